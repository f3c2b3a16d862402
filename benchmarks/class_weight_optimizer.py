"""Memory and time of a step of the optimiser for class weights: python benchmarks/class_weight_optimizer.py

C = 10,000,000 class weights of D = 128 and 512 on a GPU (10,000 and 100,000 of 64 on the CPU). `state`: what stays
allocated beyond weights and gradient after the first step; `extra`: the peak of a later step beyond all of that. The
sparse rows are a tenth of the classes, as with sample_rate = 0.1. AdamW is torch's, fused, with float32 weights: of
bfloat16 weights its float32 copy takes another 4 bytes per weight.
"""

import argparse
from pathlib import Path

import torch

import measure
from nearkin.training import ClassWeightOptimizer


def contenders():
    """Name, type of the weights, share of rows with a gradient, and the optimiser."""
    for kind in (torch.bfloat16, torch.float32):
        yield f"rowwise, {name_of(kind)}", kind, 1.0, lambda w: ClassWeightOptimizer([w])
    yield "rowwise, bfloat16, a tenth of the rows", torch.bfloat16, 0.1, lambda w: ClassWeightOptimizer([w])
    yield "AdamW, float32", torch.float32, 1.0, lambda w: torch.optim.AdamW([w], fused=w.is_cuda or None)


def name_of(kind):
    return str(kind).removeprefix("torch.")


def batch(classes, dim, kind, share, device):
    weight = torch.nn.Parameter(torch.randn(classes, dim, device=device, dtype=kind))
    rows = int(classes * share)
    gradient = torch.randn(rows, dim, device=device, dtype=kind)
    if share < 1:
        places = torch.arange(0, rows, device=device)[None] * int(1 / share)
        gradient = torch.sparse_coo_tensor(places, gradient, (classes, dim), is_coalesced=True, check_invariants=False)
    weight.grad = gradient
    return weight


def state_mib(values):
    return sum(t.numel() * t.element_size() for t in values if isinstance(t, torch.Tensor)) / 2**20


def compare(classes, dim, device):
    for name, kind, share, make in contenders():
        torch.manual_seed(0)
        try:
            weight = batch(classes, dim, kind, share, device)
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            optimizer = make(weight)
            optimizer.step()
            if device == "cuda":
                state = (torch.cuda.memory_allocated() - before) / 2**20
            else:
                state = state_mib(optimizer.state[weight].values())
            extra = measure.peak_mib(optimizer.step, device)
            ms = measure.median_ms(optimizer.step, device, 0.3)
        except torch.cuda.OutOfMemoryError:
            state = extra = ms = float("nan")
        mib = weight.numel() * weight.element_size() / 2**20
        print(
            f"C {classes:,} D {dim} {name:34} weights {mib:8.0f} state {state:9.1f} extra {extra:7.0f} MiB {ms:9.2f} ms"
        )
        yield [name, measure.machine(device), classes, dim, f"{mib:.0f}", f"{state:.1f}", f"{extra:.0f}", f"{ms:.2f}"]
        del weight, optimizer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="*")
    parser.add_argument("--dims", type=int, nargs="*")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = args.classes or ([10_000_000] if device == "cuda" else [10_000, 100_000])
    dims = args.dims or ([128, 512] if device == "cuda" else [64])
    rows = [row for classes in sizes for dim in dims for row in compare(classes, dim, device)]
    header = ["way", "device", "C", "D", "weights_mib", "state_mib", "extra_mib", "ms"]
    file = Path(__file__).parent / "results" / f"class_weight_optimizer_{device}.csv"
    measure.write_csv(file, header, rows)


if __name__ == "__main__":
    main()
