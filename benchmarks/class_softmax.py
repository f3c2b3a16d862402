"""Softmax over many classes, forward and backward, beside its peers and floor: python benchmarks/class_softmax.py

On a GPU: B = 1,024, D = 512, bfloat16 or with --dtype float32, C from 10,000 to 10,000,000; on the CPU: B = 256, D =
64, float32, the contenders by turns. Time by device events. `extra_mib`: the peak of a step beyond what was allocated
before it with no gradients there, so the gradient by the weights (`gradient_mib`) is in it; on the CPU in a process of
its own. `floor`: the matrix products alone, the three of the dense form, or four where the scores are made twice. At
the smallest C also the errors against float64. Dense forms and peers only where B · C is at most 2^30; beyond 2^32 the
kernels alone. --tune tries the tiles of the kernels at --classes, the length of a run and both ways to the gradient by
the weights, and prints lines for `kernels/class_kernels.py` and `kernels/class_softmax_ops.py`; --compile asks the
compiler, without a GPU, for the shared memory and the registers of each tile on Hopper; --profile lists what a step
spends its time on.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import measure
from nearkin import losses
from nearkin.core import class_softmax as plain
from nearkin.kernels import class_softmax_ops as fused

SHARED = 232_448  # bytes a program may take on Hopper
SECONDS = 0.25  # of repeats
HUGE = 2**32  # B · C beyond which a step of plain torch takes seconds


def ways(x, y, w, dense):
    """Name of each contender and its step; the dense forms only where their memory is bearable."""

    def ours(function, **settings):
        return lambda: function(x, y, w, **settings).backward()

    if x.is_cuda:
        yield "arcface, triton", ours(losses.arcface_loss, impl="triton")
        yield "cosface, triton", ours(losses.cosface_loss, impl="triton")
        yield "normalized, triton", ours(losses.normalized_softmax_loss, impl="triton")
        yield "sphereface, triton", ours(losses.sphereface_loss, impl="triton")
        yield "proxy-nca, triton", ours(losses.proxy_nca_loss, impl="triton")
        yield "proxy-anchor, triton", ours(losses.proxy_anchor_loss, impl="triton")
        halved = y % (len(w) // 2)
        two = {"sub_centers": 2, "impl": "triton"}
        yield "arcface, 2 centres, triton", lambda: losses.arcface_loss(x, halved, w, **two).backward()
    if len(x) * len(w) > HUGE:
        return
    yield "arcface, torch", ours(losses.arcface_loss, impl="torch")
    if dense:
        yield "arcface, dense", ours(losses.arcface_loss, max_memory=2**50)
        yield "proxy-anchor, dense", ours(losses.proxy_anchor_loss, max_memory=2**50)
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
    contenders = {"torch": (losses.cosface_loss, {"impl": "torch"}), "plain torch": (plain_cosface, {})}
    if x.is_cuda:
        contenders = {"triton": (losses.cosface_loss, {"impl": "triton"}), **contenders}
    for kind in {x.dtype: None, torch.float32: None}:
        for name, (function, settings) in contenders.items():
            errors = [
                float((a - b).norm() / b.norm())
                for a, b in zip(outcome(function, kind, **settings), exact, strict=True)
            ]
            shown = "  ".join(f"{part} {error:.1e}" for part, error in zip(("loss", "dX", "dW"), errors, strict=True))
            print(f"C {len(w):>10,}  error of {name}, {str(kind).removeprefix('torch.')}: {shown}", flush=True)


def tune(classes, number, dim, dtype):
    """The fastest tile of each kernel; then, with the tables as they are, the run, the walk and the last product."""
    from nearkin.kernels import class_kernels as tiles

    x, y, w = batch(classes, number, dim, "cuda", dtype)
    w = w.detach()
    with torch.no_grad():
        scaled = plain.scaled_anchors(x.float(), w, 64.0, True)
        rows, factor = fused._operands(x, w, scaled)
        inverse = tiles.lengths(w)
        operands = tiles.Operands(rows, 1.4427 * factor, w, inverse, y.int(), two=True, bounded=True)
        ones, out = torch.ones_like(factor), torch.empty_like(w)
        size = fused._run(rows, w, None)
        derivatives = torch.empty(
            size, number, device="cuda", dtype=torch.bfloat16 if tiles.halves(rows, w) else torch.float32
        )
        along = torch.zeros(-(-number // 64), size, device="cuda")
        inner = tiles.Own(operands.ids, ones, ones[:1], ones[:1])
        starts = range(0, classes, size)
        item, tried = 2, tiles.CANDIDATES
        if not tiles.halves(rows, w):
            item = 4
            tried = [tile._replace(depth=32) for tile in tried] + [
                tiles.Tile(64, 128, 32, 4, 3),
                tiles.Tile(64, 64, 32, 4, 3),
            ]

        def parts(tile=None):
            for start in starts:
                tiles.parts(operands, 64 * ones, ones, start, derivatives, along, inner, tile=tile)

        def gradient(tile=None):
            for start in starts:
                tiles.gradient(operands, derivatives, along[: -(-number // 128)], None, out, start, True, tile=tile)

        def scan(tile=None):
            tiles.scan(operands, fused._part_size(rows, w, None), tile=tile)

        steps = {"SCAN": scan, "PARTS": parts} | ({"GRADIENT": gradient} if tiles.halves(rows, w) else {})
        for name, step in steps.items():
            timings = sorted(((timed(lambda s=step, t=tile: s(t)), tile) for tile in tried), key=lambda pair: pair[0])
            for ms, tile in timings:
                print(f"{name} {item}: {tile},  # {ms:.2f} ms", flush=True)
            getattr(tiles, name)[item] = timings[0][1]
        print("with the fastest:")
        run = w[:size]
        products = {
            "lengths": lambda: tiles.lengths(w),
            "dX by cuBLAS": lambda: [fused._product(derivatives[: len(run)].T, run) for _ in starts],
            "dW by cuBLAS": lambda: [fused._product(derivatives, rows) for _ in starts],
        }
        for name, step in products.items():
            print(f"{name}: {timed(step):.2f} ms", flush=True)
    search(x, y, w, rows)


def search(x, y, w, rows):
    w = w.requires_grad_()

    def step():
        x.grad = w.grad = None
        losses.arcface_loss(x, y, w, impl="triton").backward()

    def tried(name, values):
        timings = []
        for value in values:
            setattr(fused, name, value)
            timings.append((timed(step, 0.3), value))
            print(f"{name} = {value}  # {timings[-1][0]:.2f} ms", flush=True)
        setattr(fused, name, min(timings, key=lambda pair: pair[0])[1])

    tried("PROGRAMS", (528, 1_056, 2_112, 8_448))
    fused.ROOM = 2**28
    tried("RUN", (33_792, 50_688, 67_584, 101_376))
    print(f"ROOM must be at least {fused.RUN * fused._each(rows, w)}")
    print(f"whole step: {timed(step, 0.5):.2f} ms", flush=True)


def profile(classes, number, dim, dtype):
    """Where a step of ArcFace on a GPU spends its time: there, and on the host, which must be the less."""
    x, y, w = batch(classes, number, dim, "cuda", dtype)

    def step():
        x.grad = w.grad = None
        losses.arcface_loss(x, y, w, impl="triton").backward()

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


def timed(step, seconds=0.08):
    """Milliseconds; infinity for what cannot run."""
    try:
        return measure.median_ms(step, "cuda", seconds)
    except Exception as error:  # one that fails must not end the search
        print(f"# {type(error).__name__}: {str(error)[:160]}", flush=True)
        return float("inf")


def build(kernel, tile, item, **constants):
    """A kernel compiled for Hopper: bytes of shared memory, registers, bytes spilt."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nearkin.kernels import class_kernels as tiles

    kind, copied = ("bf16" if item == 2 else "fp32"), {}
    fixed = {"H": tile.height, "W": tile.width, **constants}
    if kernel is not tiles._finish:
        fixed |= {"D": tile.depth, "COPIES": tile.copies, "EVEN": True}
        fixed |= {"DOT": {2: tl.bfloat16, 4: tl.float32, 8: tl.float64}[item]}
        height, width, depth = tile.height, tile.width, tile.depth
        copied = {
            tiles._scan: {"rows": (height, depth), "weight": (width, depth)},
            tiles._scan_columns: {"weight": (height, depth), "rows": (width, depth)},
            tiles._parts: {"weight": (height, depth), "rows": (width, depth), "out": (height, min(64, width))},
            tiles._gradient: dict.fromkeys(("weight", "by_weight"), (height, width))
            | {"parts": (height, depth), "rows": (depth, width)},
        }[kernel]
    index_types = dict.fromkeys(("ids", "picks", "order", "bounds"), "*i64")
    stored = dict.fromkeys(("rows", "weight", "by_weight", "parts", "out"), f"*{kind}")
    index_types |= {"ids": "*i32", "picks": "*i32"} if fixed.get("TWO") or fixed.get("OWN") is False else {}
    numbers = ("anchors", "num_weights", "dim", "start", "run_size", "part_size", "stride")
    if tile.copies:
        stored |= {name: f"tensordesc<{kind}[{a}, {b}]>" for name, (a, b) in copied.items()}
    kinds = {**index_types, **stored, **dict.fromkeys((*numbers, "heights"), "i32"), "lost": "fp32"}
    kinds |= dict.fromkeys(fixed, "constexpr")
    signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in numbers
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    options |= {} if tile.registers is None else {"maxnreg": tile.registers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.ptx"
        code.write_text(built.asm["ptx"])
        for assembler in sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*")):
            command = [str(assembler), "-v", "--gpu-name=sm_90a", str(code), "-o", str(code.with_suffix(".cubin"))]
            report = subprocess.run(command, capture_output=True, text=True)
            if report.returncode == 0:  # of several, one is too old for what this triton writes
                break
        report.check_returncode()
    registers, spilt = (
        re.search(what, report.stderr) for what in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return built.metadata.shared, int(registers[1]), int(spilt[1])


def compile_only():
    """Shared memory, registers and spills of every tile of the tables on Hopper."""
    from nearkin.kernels import class_kernels as tiles

    score = {"CENTERS": 1, "PRECISION": "ieee", "GROUP": tiles.GROUP, "TWO": True}
    end = {"OWN": False, "PROJECT": True}
    builds = [
        (tiles._scan, item, tile, score | {"LOST": False, "BOUNDED": True} | constants)
        for item, tile in tiles.SCAN.items()
        for constants in (*centers(), {"LOST": True}, {"BOUNDED": False})
    ]
    builds += [
        (tiles._scan_columns, item, tile, {"PRECISION": "ieee", "TWO": True}) for item, tile in tiles.PARTS.items()
    ]
    derive = score | {"COLUMNS": False, "HALVES": True, "OWN": True}
    builds += [
        (tiles._parts, item, tile, derive | constants)
        for item, tile in tiles.PARTS.items()
        for constants in (*centers(), {"COLUMNS": True})
    ]
    builds += [(tiles._gradient, item, tile, end) for item, tile in tiles.GRADIENT.items()]
    builds += [(tiles._finish, item, tiles.FINISH._replace(copies=False), end | {"COPIES": False}) for item in (2, 4)]
    for kernel, item, tile, constants in builds:
        shared, registers, spilt = build(kernel, tile, item, **constants)
        shown = f"shared {shared:,}, {registers} registers, {spilt} bytes spilt"
        fits = "" if shared <= SHARED else "  TOO MUCH"
        extra = "".join(
            f" {key}={value}" for key, value in constants.items() if value != score.get(key) and key not in end
        )
        print(f"{kernel.fn.__name__:10}{item}: {tuple(tile)}{extra} {shown}{fits}", flush=True)


def centers():
    return {}, {"CENTERS": 2}, {"CENTERS": 8}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--classes", type=int, nargs="*")
    parser.add_argument("--dim", type=int)
    parser.add_argument("--dtype", default=None, choices=["bfloat16", "float32"])
    parser.add_argument("--peaks", action="store_true", help="print the peaks of memory on the CPU as JSON")
    args = parser.parse_args()
    if args.peaks:
        peaks(args.classes[0], 256, args.dim)
        return
    if args.compile:
        compile_only()
        return
    gpu = torch.cuda.is_available()
    dtype = getattr(torch, args.dtype or ("bfloat16" if gpu else "float32"))
    if args.tune:
        tune((args.classes or [1_000_000])[0], 1024, args.dim or 512, dtype)
        return
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
