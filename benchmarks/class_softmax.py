"""Softmax over many classes, forward and backward, beside its peers and floor: python benchmarks/class_softmax.py

On a GPU: B = 1,024, D = 512, bfloat16 or with --dtype float32, C from 10,000 to 10,000,000; on the CPU: B = 256, D =
64, float32, the contenders by turns. Time by device events. `extra_mib`: the peak of a step beyond what was allocated
before it with no gradients there, so the gradient by the weights (`gradient_mib`) is in it; on the CPU in a process of
its own. `floor`: the matrix products alone, the three of the dense form, or four where the scores are made twice. At
the smallest C also the errors against float64. Scores made whole and peers only where B · C is at most 2^30; beyond
2^32 only the kernel. "kernel" is the loss as it comes, which in bfloat16 takes it; "blocks" is plain torch in blocks of
classes. --profile lists what a step spends its time on.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

import measure
from nearkin import losses

BLOCKS = 2**28  # bytes of a block of classes, and of what else a loss takes
PLAINLY = {"kernel": False, "max_memory": BLOCKS}
SECONDS = 0.25  # of repeats
HUGE = 2**32  # B · C beyond which a step of plain torch takes seconds


def ways(x, y, w, dense):
    """Name of each contender and its step; the dense forms only where their memory is bearable."""

    def ours(function, **settings):
        return lambda: function(x, y, w, **settings).backward()

    kernel = x.is_cuda and x.dtype == w.dtype == torch.bfloat16
    if kernel:
        yield "arcface, kernel", ours(losses.arcface_loss)
        yield "cosface, kernel", ours(losses.cosface_loss)
        yield "normalized, kernel", ours(losses.normalized_softmax_loss)
        yield "sphereface, kernel", ours(losses.sphereface_loss)
        yield "proxy-nca, kernel", ours(losses.proxy_nca_loss)
    if len(x) * len(w) > HUGE:
        return
    halved = y % (len(w) // 2)
    yield "arcface, blocks", ours(losses.arcface_loss, **PLAINLY)
    yield "arcface, 2 centres, blocks", lambda: losses.arcface_loss(x, halved, w, sub_centers=2, **PLAINLY).backward()
    yield "proxy-anchor, blocks", ours(losses.proxy_anchor_loss, max_memory=BLOCKS)
    if dense:
        yield "arcface, whole", ours(losses.arcface_loss, max_memory=2**50)
        yield "proxy-anchor, whole", ours(losses.proxy_anchor_loss, max_memory=2**50)
        yield "peer: plain torch", lambda: plain_cosface(x, y, w).backward()
    yield from peers(x, y, w, dense)
    yield "floor: three products", lambda: floor(x, w)
    yield "floor: four products", lambda: floor(x, w, again=True)


def peers(x, y, w, dense):
    if dense and x.is_cuda:
        compiled = torch.compile(plain_cosface, dynamic=False)
        yield "peer: torch.compile of it", lambda: compiled(x, y, w).backward()
    if dense and importlib.util.find_spec("pytorch_metric_learning") is not None:
        from pytorch_metric_learning.losses import ArcFaceLoss

        other = ArcFaceLoss(len(w), w.shape[1]).to(x.device)
        wide = x.detach().float().requires_grad_()

        def step():
            other.zero_grad()
            other(wide, y).backward()

        yield "peer: pytorch-metric-learning", step
    if x.is_cuda and importlib.util.find_spec("cut_cross_entropy") is not None:
        from cut_cross_entropy import linear_cross_entropy

        yield "peer: cut-cross-entropy, no margin", lambda: linear_cross_entropy(x, w, y).backward()


def plain_cosface(x, y, w):
    """What one writes without a library, in the same type."""
    normal = torch.nn.functional.normalize
    cosine = normal(x) @ normal(w).T
    logits = 64 * (cosine - 0.35 * torch.nn.functional.one_hot(y, len(w)).to(x.dtype))
    return torch.nn.functional.cross_entropy(logits.float(), y)


@torch.no_grad()
def floor(x, w, run=65_536, again=False):
    """x wᵀ, and with a matrix of its shape the two products of the gradients, a run of classes at a time."""
    for start in range(0, len(w), run):
        part = w[start : start + run]
        scores = x @ part.T
        if again:
            scores = x @ part.T
        scores @ part, scores.T @ x


def batch(classes, number, dim, device, dtype):
    torch.manual_seed(0)
    x = torch.randn(number, dim, device=device).to(dtype).requires_grad_()
    w = torch.randn(classes, dim, device=device, dtype=dtype).requires_grad_()
    return x, torch.randint(classes, (number,), device=device), w


def compare(sizes, number, dim, device, dtype):
    rows = []
    kind = str(dtype).removeprefix("torch.")
    for classes in sizes:
        x, y, w = batch(classes, number, dim, device, dtype)
        gradient = w.numel() * w.element_size() / 2**20
        for name, ms, mib in (cells_cuda if device == "cuda" else cells_cpu)(x, y, w):
            print(f"C {classes:>10,}  {name:36}{ms:>10.2f} ms{mib:>10.0f} MiB, dW {gradient:.0f}", flush=True)
            figures = [f"{ms:.3f}", f"{mib:.0f}", f"{gradient:.0f}"]
            rows.append([name, measure.machine(device), number, classes, dim, kind, *figures])
        header = ["way", "device", "B", "C", "D", "dtype", "ms", "extra_mib", "gradient_mib"]
        stem = f"class_softmax_{device}" + ("_float32" if device == "cuda" and kind == "float32" else "")
        file = Path(__file__).parent / "results" / f"{stem}.csv"
        measure.write_csv(file, header, sorted(rows, key=lambda row: row[3]))  # the file grows with each size
        if classes == min(sizes):
            accuracy(x, y, w)


def fresh_steps(x, y, w):
    """Each contender and its step, before which there are no gradients."""
    for name, step in ways(x, y, w, dense=len(x) * len(w) <= 2**30):

        def fresh(step=step):
            x.grad = w.grad = None
            step()

        yield name, fresh
        x.grad = w.grad = None


def cells_cuda(x, y, w):
    """Name, milliseconds and MiB of each contender."""
    for name, fresh in fresh_steps(x, y, w):
        try:
            ms = measure.median_ms(fresh, "cuda", SECONDS)
            x.grad = w.grad = None
            mib = measure.peak_mib(fresh, "cuda")
        except Exception as error:  # one contender that fails must not end the run
            ms = mib = float("nan")
            print(f"C {len(w):>10,}  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        yield name, ms, mib


def cells_cpu(x, y, w):
    """The same, by turns, and the memory from a process whose allocator gives freed memory back at once."""
    command = [sys.executable, __file__, "--peaks", "--classes", str(len(w)), "--dim", str(w.shape[1])]
    done = subprocess.run(command, env=measure.frugal_environment(), stdout=subprocess.PIPE, text=True, check=True)
    mib = json.loads(done.stdout.splitlines()[-1])
    contenders = dict(fresh_steps(x, y, w))
    for step in contenders.values():
        step()
    taken = measure.medians_by_turns(list(contenders.values()), "cpu", SECONDS * 8)
    for name, ms in zip(contenders, taken, strict=True):
        yield name, ms, mib[name]


def peaks(classes, number, dim):
    """Prints the MiB of each contender as JSON; meant for a separate process."""
    for _, fresh in fresh_steps(*batch(64, 8, dim, "cpu", torch.float32)):
        fresh()  # what torch loads at its first step is not the loss's
    x, y, w = batch(classes, number, dim, "cpu", torch.float32)
    print(json.dumps({name: measure.peak_mib(fresh, "cpu") for name, fresh in fresh_steps(x, y, w)}))


def accuracy(x, y, w):
    """Relative errors of loss and gradients against float64, CosFace with m 0.35 and s 64."""

    def outcome(function, kind, **settings):
        a, b = (t.detach().to(kind).requires_grad_() for t in (x, w))
        value = function(a, y, b, **settings)
        (1.7 * value).backward()
        return value.detach().double(), a.grad.double(), b.grad.double()

    exact = outcome(losses.cosface_loss, torch.float64, max_memory=2**50)
    contenders = {"blocks": (losses.cosface_loss, PLAINLY), "plain torch": (plain_cosface, {})}
    if x.is_cuda:
        contenders = {"kernel": (losses.cosface_loss, {}), **contenders}
    for kind in {x.dtype: None, torch.float32: None}:
        for name, (function, settings) in contenders.items():
            errors = [
                float((a - b).norm() / b.norm())
                for a, b in zip(outcome(function, kind, **settings), exact, strict=True)
            ]
            shown = "  ".join(f"{part} {error:.1e}" for part, error in zip(("loss", "dX", "dW"), errors, strict=True))
            print(f"C {len(w):>10,}  error of {name}, {str(kind).removeprefix('torch.')}: {shown}", flush=True)


def profile(classes, number, dim, dtype):
    """Where a step of ArcFace on a GPU spends its time: there, and on the host, which must be the less."""
    x, y, w = batch(classes, number, dim, "cuda", dtype)

    def step():
        x.grad = w.grad = None
        losses.arcface_loss(x, y, w).backward()

    print(f"{measure.median_ms(step, 'cuda', SECONDS):.3f} ms per step")
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(20):
        step()
    print(f"{(time.perf_counter() - begun) * 50:.3f} ms until the host has sent it (no more than a step)")
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile_run:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    for order in ("cuda_time_total", "self_cpu_time_total"):
        print(profile_run.key_averages().table(sort_by=order, row_limit=16, max_name_column_width=48))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--classes", type=int, nargs="*")
    parser.add_argument("--dim", type=int)
    parser.add_argument("--dtype", default=None, choices=["bfloat16", "float32"])
    parser.add_argument("--peaks", action="store_true", help="print the peaks of memory on the CPU as JSON")
    args = parser.parse_args()
    if args.peaks:
        peaks(args.classes[0], 256, args.dim)
        return
    gpu = torch.cuda.is_available()
    dtype = getattr(torch, args.dtype or ("bfloat16" if gpu else "float32"))
    if args.profile:
        profile((args.classes or [100_000])[0], 1024, args.dim or 512, dtype)
        return
    if gpu:
        large = [10_000_000] if dtype == torch.bfloat16 else []
        compare(args.classes or [10_000, 100_000, 1_000_000, *large], 1024, args.dim or 512, "cuda", dtype)
    else:
        compare(args.classes or [2_000, 20_000, 200_000], 256, args.dim or 64, "cpu", dtype)


if __name__ == "__main__":
    main()
