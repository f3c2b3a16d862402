"""Softmax over many classes, forward and backward, beside its peers and floor: python benchmarks/class_softmax.py

On a GPU: B = 1,024, D = 512, bfloat16, C from 10,000 to 10,000,000; on the CPU: B = 256, D = 64, float32. Time by
device events, memory beyond what was held. `floor`: the three matrix products of the dense form alone.
--tune tries every tile of the kernels at --classes and prints lines for `kernels/class_tiles.py`; --compile asks the
compiler, without a GPU, how much shared memory each tile of its tables takes on Hopper.
"""

import argparse
import contextlib
import importlib.util
from pathlib import Path

import torch

import measure
from nearkin import losses
from nearkin.core import class_softmax as plain
from nearkin.kernels import class_softmax as fused

SHARED = 232_448  # bytes a program may take on Hopper


def ways(x, y, w, dense):
    """Name of each contender and its step; the dense form only where its memory is bearable."""

    def ours(function, **more):
        return lambda: function(x, y, w, **more).backward()

    yield "arcface, torch", ours(losses.arcface_loss, impl="torch")
    if x.is_cuda:
        yield "arcface, triton", ours(losses.arcface_loss, impl="triton")
        yield "cosface, triton", ours(losses.cosface_loss, impl="triton")
        yield "normalized, triton", ours(losses.normalized_softmax_loss, impl="triton")
    if dense:
        yield "arcface, dense", ours(losses.arcface_loss, max_memory=2**50)
        yield "peer: plain torch", lambda: plain_cosface(x, y, w).backward()
    if x.is_cuda and importlib.util.find_spec("cut_cross_entropy") is not None:
        from cut_cross_entropy import linear_cross_entropy

        yield "peer: cut-cross-entropy, no margin", lambda: linear_cross_entropy(x, w, y).backward()
    yield "floor: three products", lambda: floor(x, w)


def plain_cosface(x, y, w):
    """What one writes without a library, in the type given."""
    normal = torch.nn.functional.normalize
    cosine = normal(x) @ normal(w).T
    logits = 64 * (cosine - 0.35 * torch.nn.functional.one_hot(y, len(w)).to(x.dtype))
    return torch.nn.functional.cross_entropy(logits.float(), y)


@torch.no_grad()
def floor(x, w, run=65_536):
    """x wᵀ, and with a matrix of its shape the two products of the gradients, a run of classes at a time."""
    for start in range(0, len(w), run):
        part = w[start : start + run]
        scores = x @ part.T
        scores @ part, scores.T @ x


def batch(classes, number, dim, device, dtype):
    torch.manual_seed(0)
    x = torch.randn(number, dim, device=device).to(dtype).requires_grad_()
    w = torch.randn(classes, dim, device=device, dtype=dtype).requires_grad_()
    return x, torch.randint(classes, (number,), device=device), w


def compare(sizes, number, dim, device, dtype):
    rows = []
    for classes in sizes:
        x, y, w = batch(classes, number, dim, device, dtype)
        for name, step in ways(x, y, w, dense=number * classes <= 2**30):

            def fresh(step=step, x=x, w=w):
                x.grad = w.grad = None
                step()

            try:
                ms, mib = measure.median_ms(fresh, device), measure.peak_mib(fresh, device)
            except torch.OutOfMemoryError:
                ms = mib = float("nan")
            gradient = w.numel() * w.element_size() / 2**20
            print(f"C {classes:>10,}  {name:36}{ms:>10.2f} ms{mib:>10.0f} MiB, dW {gradient:.0f}", flush=True)
            kind = str(dtype).removeprefix("torch.")
            rows.append([name, device, number, classes, dim, kind, f"{ms:.3f}", f"{mib:.0f}", f"{gradient:.0f}"])
    header = ["way", "device", "B", "C", "D", "dtype", "ms", "extra_mib", "gradient_mib"]
    measure.write_csv(Path(__file__).parent / "results" / f"class_softmax_{device}.csv", header, rows)


def tune(classes, number, dim, dtype):
    """The fastest tile of each kernel, for each number of terms."""
    from triton.runtime.errors import OutOfResources

    from nearkin.kernels import class_tiles

    x, y, w = batch(classes, number, dim, "cuda", dtype)
    with torch.no_grad():
        asked = plain.queries(x.float(), w, 64.0, True)
        rows, factor = fused._operands(x, w, asked)
        inverse, _ = class_tiles.inverse_lengths(w.detach(), True)
        ones, own, out = torch.ones_like(factor), torch.zeros_like(asked), torch.empty_like(w)
        for terms in (1, 2):
            way = {"terms": terms, "precision": fused._precision(), "whole": fused.WHOLE_DIM}
            found = {"FORWARD": [], "BACKWARD": []}
            for tile in class_tiles.CANDIDATES:
                given = (rows, factor, w.detach(), inverse, y)
                steps = {
                    "FORWARD": lambda g=given, t=tile, v=way: class_tiles.forward(
                        *g, fused._splits(asked, None), True, chosen=t, **v
                    ),
                    "BACKWARD": lambda g=given, t=tile, v=way: class_tiles.backward(
                        *g, 64 * ones, ones, own, out, True, chosen=t, **v
                    ),
                }
                for name, step in steps.items():
                    with contextlib.suppress(OutOfResources):
                        found[name].append((measure.median_ms(step, "cuda", 0.2), tile))
            for name, tried in found.items():
                for ms, tile in sorted(tried)[:3]:
                    print(f"{name} terms {terms}  ({w.element_size()}, {dim}): {tile},  # {ms:.2f} ms", flush=True)


def compile_only():
    """Shared memory of every tile of the tables on Hopper."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nearkin.kernels import class_tiles

    kinds = {"ids": "*i64", "order": "*i64", "bounds": "*i64"}
    numbers = ("anchors", "number", "dim", "a_part")
    for kernel, table, more in (
        (class_tiles._forward, class_tiles.FORWARD, {"MEAN": True}),
        (class_tiles._backward, class_tiles.BACKWARD, {"NORMALIZE": True}),
    ):
        for (item, dim), tile in table.items():
            stored = {"rows", "weight", "by_weight"}
            halves = item == 2
            fixed = {"DOT": tl.bfloat16 if halves else tl.float32, "TERMS": fused.TERMS if halves else 0}
            fixed |= {"PRECISION": "tf32x3", "B": tile.anchors, "C": tile.classes, "D": dim, "CHUNKS": 1, **more}
            signature = {
                name: "constexpr"
                if name in fixed
                else "i32"
                if name in numbers
                else kinds.get(name, "*bf16" if halves and name in stored else "*fp32")
                for name in kernel.arg_names
            }
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
            built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            fits = "" if built.metadata.shared <= SHARED else "  TOO MUCH"
            print(f"{kernel.fn.__name__:10}({item}, {dim}): {tile} shared {built.metadata.shared:,}{fits}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--classes", type=int, nargs="*")
    parser.add_argument("--dim", type=int)
    parser.add_argument("--dtype", default=None, choices=["bfloat16", "float32"])
    given = parser.parse_args()
    if given.compile:
        compile_only()
        return
    gpu = torch.cuda.is_available()
    dtype = getattr(torch, given.dtype or ("bfloat16" if gpu else "float32"))
    if given.tune:
        tune((given.classes or [1_000_000])[0], 1024, given.dim or 512, dtype)
        return
    if gpu:
        compare(given.classes or [10_000, 100_000, 1_000_000, 10_000_000], 1024, given.dim or 512, "cuda", dtype)
    else:
        compare(given.classes or [2_000, 20_000, 200_000], 256, given.dim or 64, "cpu", dtype)


if __name__ == "__main__":
    main()
