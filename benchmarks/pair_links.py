"""SupCon by the generic pair pass with links beside SupCon's present kernels, on a GPU: benchmarks/pair_links.py

D = 128, float32, 4 items per class, forward and backward, in one process. Both take turns, in changing order; each time
is the median of many. `event`: one step by device events, the host's share included; `wall`: one step by the clock, with
a synchronisation after it; `busy`: a step on a device whose queue is never empty, so the kernels alone. Memory: the peak
beyond the arguments. Value and gradient of both are compared with float64. Prints a table and a line of JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import measure
from nearkin import losses
from nearkin.kernels import pair_ops

D, PER_CLASS = 128, 4
SIZES = (512, 1024, 2048, 4096, 8192, 16_384)
CLOCKS: tuple[str, ...] = ("event", "wall", "busy")


def batch(size: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    labels = torch.arange(size) // PER_CLASS
    means = torch.randn(int(labels[-1]) + 1, D, generator=generator)
    x = means[labels] + 0.7 * torch.randn(size, D, generator=generator)
    return x.to(device), labels.to(device)


def value_and_gradient(x: Tensor, labels: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    value = losses.supcon_loss(x, labels, impl=impl)
    value.backward(torch.full_like(value, 0.7))
    assert x.grad is not None
    return value.detach(), x.grad


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max() / exact.abs().max())


def wall_ms(step: Callable[[], object], device: str) -> float:
    begun = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def compare(size: int, device: str, rounds: int, passes: dict[str, tuple[ModuleType, ModuleType]]) -> dict[str, Any]:
    """The figures of both passes for a batch of `size` rows."""
    x, labels = batch(size, device)
    exact = value_and_gradient(x.double(), labels, "torch")
    plain = value_and_gradient(x, labels, "torch")
    row: dict[str, Any] = {"B": size, "torch_error": [error(*pair) for pair in zip(plain, exact, strict=True)]}
    leaf = x.clone().requires_grad_()

    def step() -> None:
        leaf.grad = None
        losses.supcon_loss(leaf, labels, impl="triton").backward()

    results = {}
    for name, modules in passes.items():
        pair_ops._kernels = lambda modules=modules: modules  # type: ignore[assignment,misc]
        results[name] = value_and_gradient(x, labels, "triton")
        row[f"{name}_error"] = [error(*pair) for pair in zip(results[name], exact, strict=True)]
        step()
        if device == "cuda":
            leaf.grad = None
            row[f"{name}_mib"] = measure.peak_mib(step, device)
    row["equal"] = [bool(torch.equal(*pair)) for pair in zip(*results.values(), strict=True)]
    clocks = {"event": lambda: measure.once_ms(step, device), "wall": lambda: wall_ms(step, device)}
    if device == "cuda":
        clocks["busy"] = lambda: measure.busy_ms(step)
    times: dict[str, list[float]] = {f"{name}_{clock}": [] for name in passes for clock in clocks}
    for turn in range(rounds):
        order = list(passes.items())[:: 1 if turn % 2 else -1]
        for clock, timed in clocks.items():
            for name, modules in order:
                pair_ops._kernels = lambda modules=modules: modules  # type: ignore[assignment,misc]
                step()  # the turn's first step pays for what the change leaves in caches
                times[f"{name}_{clock}"].append(timed())
    row |= {f"{name}_ms": median(values) for name, values in times.items()}
    row |= {f"{clock}_ratio": row[f"generic_{clock}_ms"] / row[f"present_{clock}_ms"] for clock in clocks}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    from nearkin.kernels import pair_kernels, pair_pass, row_kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    passes = {"present": (pair_kernels, row_kernels), "generic": (pair_pass, row_kernels)}
    print(f"{measure.machine(device)}, torch {torch.__version__}")
    rows = []
    for size in options.sizes:
        row = compare(size, device, options.rounds, passes)
        rows.append(row)
        parts = [f"B {size:6}", f"equal {row['equal']}"]
        for clock in CLOCKS:
            if f"{clock}_ratio" in row:
                before, after = row[f"present_{clock}_ms"], row[f"generic_{clock}_ms"]
                parts.append(f"{clock} {before:.4f} → {after:.4f} ms ({row[f'{clock}_ratio']:.4f})")
        if device == "cuda":
            parts.append(f"peak {row['present_mib']:.3f} → {row['generic_mib']:.3f} MiB")
        errors = (f"{name} {max(row[f'{name}_error']):.1e}" for name in (*passes, "torch"))
        print("  ".join([*parts, "error " + ", ".join(errors)]), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
