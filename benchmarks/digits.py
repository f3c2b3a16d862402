"""Products of digits beside products of float64, on a GPU that has both: python benchmarks/digits.py [--sizes 512 2048]

`loss(x, y).backward()`, D = 128, float32, 4 items per class, by turns in one process: as the device is, and as one
without float64 on its matrix units (`kernels.set_float64_units(False)`). Medians of the wall time and of the time on a
busy device, and errors against float64 in plain torch, by the largest entry; written to results/digits_cuda.csv.
"""

import argparse
from pathlib import Path

import torch

import measure
from nearkin import kernels, losses

DIM = 128
CASES = {
    "contrastive": losses.ContrastiveLoss,
    "multi-similarity": losses.MultiSimilarityLoss,
    "triplet, semi-hard": losses.TripletLoss,
    "lifted": losses.LiftedStructureLoss,
    "SupCon": losses.SupConLoss,
    "log-ratio": losses.LogRatioLoss,
    "Fast-AP": losses.FastAPLoss,
    "Smooth-AP": losses.SmoothAPLoss,
}
SETTINGS = {"float64": "auto", "digits": False}


def outcome(name, size, setting, dtype=torch.float32, **choice):
    """A step, and its value and gradient after it."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(size, DIM, generator=g).to("cuda", dtype).requires_grad_()
    labels = (torch.arange(size) // 4).cuda()
    loss = CASES[name](**choice)

    def step():
        kernels.set_float64_units(setting)
        x.grad = None
        value = loss(x, labels)
        value.backward()
        return value.detach(), x.grad

    return step


def errors(got, exact):
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, exact, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[512, 2048, 4096])
    parser.add_argument("--seconds", type=float, default=0.3)
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        for name in CASES:
            steps = {kind: outcome(name, size, setting) for kind, setting in SETTINGS.items()}
            exact = outcome(name, size, "auto", torch.float64, impl="torch")() if size <= 2048 else None
            wrong = {kind: errors(step(), exact) if exact else ["", ""] for kind, step in steps.items()}
            wall = measure.medians_by_turns(list(steps.values()), "cuda", args.seconds)
            busy = [measure.busy_ms(step) for step in steps.values()]
            mib = [measure.peak_mib(step, "cuda") for step in steps.values()]
            cells = [*wall, wall[1] / wall[0], *busy, busy[1] / busy[0], *mib]
            shown = [f"{cell:.3f}" for cell in cells]
            shown += [f"{e:.1e}" if e != "" else "" for kind in SETTINGS for e in wrong[kind]]
            print(f"{name:22}{size:>6}", *shown, flush=True)
            rows.append([name, measure.machine("cuda"), size, DIM, *shown])
    kernels.set_float64_units("auto")
    header = ["loss", "device", "B", "D", "float64_ms", "digits_ms", "ratio", "float64_busy_ms", "digits_busy_ms"]
    header += ["busy_ratio", "float64_mib", "digits_mib", "float64_value_error", "float64_gradient_error"]
    header += ["digits_value_error", "digits_gradient_error"]
    measure.write_csv(Path(__file__).parent / "results" / "digits_cuda.csv", header, rows)


if __name__ == "__main__":
    main()
