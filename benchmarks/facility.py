"""Facility location, forward and backward, 4 items per class, 5 sweeps: python benchmarks/facility.py [--sizes 128 256]

Median time and memory beyond what was allocated; the number of classes is unknown to the loss. `sweeps`: rounds that
were needed, the last to see that nothing changes. On a GPU the medoids must be those that the CPU finds from the same
distances, and nothing may wait for the device. --compile asks the compiler, without a GPU, what the kernel takes on
Hopper.
"""

import argparse
from pathlib import Path

import torch

import measure
from nearkin import losses
from nearkin.core import distances

DIM = 128


def batch(size, device):
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(size // 4).repeat_interleave(4)
    centres = torch.randn(size // 4, DIM, generator=g).repeat_interleave(4, 0)
    x = 0.3 * centres + torch.randn(size, DIM, generator=g)
    return x.to(device).requires_grad_(), labels.to(device)


def check(size, sweeps):
    """The kernel and the CPU choose the same, from the same distances and from the same embeddings."""
    x, labels = batch(size, "cpu")
    d = distances.euclidean(x.detach(), normalize=True)
    ours = losses.facility_location(d.cuda(), labels.cuda(), sweeps=sweeps)
    theirs = losses.facility_location(d, labels, sweeps=sweeps)
    assert torch.equal(ours.chosen.cpu(), theirs.chosen), f"{size}: other medoids than on the CPU"
    assert torch.equal(ours.assignment.cpu(), theirs.assignment), f"{size}: other clusters than on the CPU"
    module = losses.FacilityLocationLoss(sweeps=sweeps).cuda()
    x, labels = batch(size, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    module(x, labels).backward()
    torch.cuda.set_sync_debug_mode("default")
    return float((module.medoids.cpu() != theirs.chosen).sum())


def needed(size, sweeps):
    """The least sweeps that find what all of them find."""
    x, labels = batch(size, "cpu")
    d = distances.euclidean(x.detach(), normalize=True)
    last = losses.facility_location(d, labels, sweeps=sweeps).chosen
    return next(s for s in range(sweeps + 1) if losses.facility_location(d, labels, sweeps=s).chosen.equal(last))


def compile_only(sizes):
    """Shared memory of the kernel on Hopper."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nearkin.kernels import facility_kernels as tiles

    kinds = {"distance": "*fp32", "values": "*fp32", "gamma_at": "*fp64", "floats": "*fp64", "ints": "*i32"}
    kinds |= {"chosen": "*u8", "size": "i32", "sweeps": "i32", "most": "i32"}
    for size in sizes:
        fixed, options = tiles.choices(size, torch.float32)
        names = tiles._solve.arg_names
        signature = {name: "constexpr" if name in fixed else kinds.get(name, "*i64") for name in names}
        source = ASTSource(fn=tiles._solve, signature=signature, constexprs=fixed)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(f"{size:5}: {fixed} {options} shared {built.metadata.shared:,}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[128, 256, 512])
    parser.add_argument("--sweeps", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.compile:
        compile_only(args.sizes)
        return
    rows = []
    print(f"{'items':>6} {'classes':>8} {'sweeps':>7} {'ms':>9} {'MiB':>8}")
    for size in args.sizes:
        x, labels = batch(size, args.device)
        module = losses.FacilityLocationLoss(sweeps=args.sweeps).to(args.device)

        def step(x=x, labels=labels, module=module):
            module(x, labels).backward()

        took = measure.median_ms(step, args.device)
        mib = measure.peak_mib(step, args.device)
        rows.append(
            [measure.machine(args.device), size, size // 4, needed(size, args.sweeps), f"{took:.2f}", f"{mib:.1f}"]
        )
        print(f"{size:6} {size // 4:8} {rows[-1][3]:7} {took:9.2f} {mib:8.1f}", flush=True)
        if args.device == "cuda":
            other = check(size, args.sweeps)
            print(f"{'':6} same medoids as the CPU; {other:.0f} differ where distances are made there", flush=True)
    path = Path(__file__).parent / "results" / f"facility_{args.device}.csv"
    measure.write_csv(path, ["machine", "items", "classes", "sweeps", "ms", "MiB"], rows)


if __name__ == "__main__":
    main()
