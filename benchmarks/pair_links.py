"""The pair kernels of this tree beside those of another one, on a GPU: benchmarks/pair_links.py --before KERNELS

KERNELS is the other tree's folder src/nearkin/kernels. D = 128, float32, 4 items per class, forward and backward, both
in one process, by turns in changing order; each time is a median. `event`: one step by device events, the host's share
included; `busy`: a step on a device whose queue is never empty, so the kernels alone. Memory: the peak beyond the
arguments. Value and gradient of both are compared with float64. Prints a table and a line of JSON.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import measure
from nearkin import losses
from nearkin.kernels import pair_ops

D, PER_CLASS = 128, 4
SIZES = (512, 1024, 2048, 4096, 8192, 16_384)
CASES: dict[str, Callable[..., Tensor]] = {
    "contrastive": losses.contrastive_loss,
    "margin": lambda *batch, **how: losses.margin_loss(*batch, selection="all", **how),
    "multi-similarity": losses.multi_similarity_loss,
    "multi-similarity, all": lambda *batch, **how: losses.multi_similarity_loss(*batch, selection="all", **how),
    "circle": losses.circle_loss,
    "lifted": losses.lifted_structure_loss,
    "N-pair": losses.npair_loss,
    "SupCon": losses.supcon_loss,
    "InfoNCE": losses.infonce_loss,
    "lossless": losses.lossless_triplet_loss,
}
Passes = dict[str, tuple[ModuleType, ModuleType]]


def other_kernels(folder: Path, scratch: Path) -> tuple[ModuleType, ModuleType]:
    """The modules of another tree, as a package `before` beside this one's."""
    package = scratch / "before" / "kernels"
    package.mkdir(parents=True)
    (scratch / "before" / "__init__.py").touch()
    for path in folder.rglob("*.py"):
        copy = package / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        text = path.read_text().replace("nearkin.kernels", "before.kernels")
        copy.write_text(text.replace("from nearkin import kernels", "from before import kernels"))
    sys.path.insert(0, str(scratch))
    names = ("before.kernels.pair_kernels", "before.kernels.row_kernels")
    pair_kernels, row_kernels = (importlib.import_module(name) for name in names)
    return pair_kernels, row_kernels


def batch(size: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    labels = torch.arange(size) // PER_CLASS
    means = torch.randn(int(labels[-1]) + 1, D, generator=generator)
    x = means[labels] + 1.5 * torch.randn(size, D, generator=generator)
    return 0.3 * x.to(device), labels.to(device)


def value_and_gradient(loss: Callable[..., Tensor], x: Tensor, labels: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    value = loss(x, labels, impl=impl)
    value.backward(torch.full_like(value, 0.7))
    assert x.grad is not None
    return value.detach(), x.grad


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-6))


def compare(name: str, size: int, device: str, seconds: float, passes: Passes) -> dict[str, Any]:
    """The figures of both trees' kernels for one loss and a batch of `size` rows."""
    loss = CASES[name]
    x, labels = batch(size, device)
    exact = value_and_gradient(loss, x.double(), labels, "torch")
    row: dict[str, Any] = {"loss": name, "B": size}
    leaf = x.clone().requires_grad_()

    def step() -> None:
        leaf.grad = None
        loss(leaf, labels, impl="triton").backward()

    def choose(tree: str) -> None:
        pair_ops._kernels = lambda: passes[tree]  # type: ignore[assignment]
        step()  # pays for what the change leaves in caches

    results = {}
    for tree in passes:
        choose(tree)
        results[tree] = value_and_gradient(loss, x, labels, "triton")
        row[f"{tree}_error"] = [error(*pair) for pair in zip(results[tree], exact, strict=True)]
        leaf.grad = None
        row[f"{tree}_mib"] = measure.peak_mib(step, device) if device == "cuda" else 0.0
    row["equal"] = [bool(torch.equal(*pair)) for pair in zip(*results.values(), strict=True)]
    clocks = {"event": lambda: measure.once_ms(step, device)}
    if device == "cuda":
        clocks["busy"] = lambda: measure.busy_ms(step, 4)
    times: dict[str, list[float]] = {f"{tree}_{clock}": [] for tree in passes for clock in clocks}
    end, turn = time.perf_counter() + seconds, 0
    while turn < 2 or (time.perf_counter() < end and turn < 200):
        turn += 1
        for tree in list(passes)[:: 1 if turn % 2 else -1]:
            choose(tree)
            for clock, timed in clocks.items():
                times[f"{tree}_{clock}"].append(timed())
    row |= {f"{key}_ms": sorted(values)[len(values) // 2] for key, values in times.items()}
    row |= {f"{clock}_ratio": row[f"after_{clock}_ms"] / row[f"before_{clock}_ms"] for clock in clocks}
    return row | {"rounds": turn}


def line(row: dict[str, Any]) -> str:
    parts = [f"{row['loss']:22} B {row['B']:6}", "equal" if all(row["equal"]) else "differs"]
    for clock in ("event", "busy"):
        if f"{clock}_ratio" in row:
            before, after = row[f"before_{clock}_ms"], row[f"after_{clock}_ms"]
            parts.append(f"{clock} {before:.4f} → {after:.4f} ms ({row[f'{clock}_ratio']:.4f})")
    parts.append(f"peak {row['before_mib']:.3f} → {row['after_mib']:.3f} MiB")
    parts.append(f"error {max(row['before_error']):.1e} → {max(row['after_error']):.1e}")
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other tree's src/nearkin/kernels")
    parser.add_argument("--losses", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seconds", type=float, default=2.0, help="per loss and size")
    parser.add_argument("--compiled", action="store_true", help="do not compile all kernels in parallel first")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not options.compiled:  # one process per loss fills triton's cache on disk
        command = [sys.executable, __file__, "--before", str(options.before), "--compiled", "--seconds", "0"]
        command += ["--sizes", *map(str, options.sizes)]
        warm = [subprocess.Popen([*command, "--losses", name], stdout=subprocess.DEVNULL) for name in options.losses]
        assert all(process.wait() == 0 for process in warm)
    from nearkin.kernels import pair_kernels, row_kernels

    with tempfile.TemporaryDirectory() as scratch:
        passes = {"before": other_kernels(options.before, Path(scratch)), "after": (pair_kernels, row_kernels)}
        print(f"{measure.machine(device)}, torch {torch.__version__}")
        rows = []
        for name in options.losses:
            for size in options.sizes:
                rows.append(compare(name, size, device, options.seconds, passes))
                print(line(rows[-1]), flush=True)
        for clock in ("event", "busy"):
            ratio, name, size = max((row.get(f"{clock}_ratio", 0.0), row["loss"], row["B"]) for row in rows)
            print(f"largest ratio by {clock}: {ratio:.4f}, {name}, B = {size}")
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
