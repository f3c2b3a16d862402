"""Facility location, forward and backward, 4 items per class, 5 sweeps: python benchmarks/facility.py [--sizes 128 256]

Median time and memory beyond what was allocated. `sweeps`: rounds that were needed, the last to see that nothing
changes. The search runs on the host; on a GPU the time holds the way of the distances there and back.
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


def needed(size, sweeps):
    """The least sweeps that find what all of them find."""
    x, labels = batch(size, "cpu")
    d = distances.euclidean(x.detach(), normalize=True)
    last = losses.facility_location(d, labels, sweeps=sweeps).chosen
    return next(s for s in range(sweeps + 1) if losses.facility_location(d, labels, sweeps=s).chosen.equal(last))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[128, 256, 512, 1024])
    parser.add_argument("--sweeps", type=int, default=5)
    args = parser.parse_args()
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
    path = Path(__file__).parent / "results" / f"facility_{args.device}.csv"
    measure.write_csv(path, ["machine", "items", "classes", "sweeps", "ms", "MiB"], rows)


if __name__ == "__main__":
    main()
