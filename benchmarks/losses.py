"""Every loss beside pytorch-metric-learning and the floor, forward and backward: benchmarks/losses.py

D = 128, float32, 4 items per class; losses over class weights have as many classes as the batch. `auto` is the loss as
it comes; `compiled`, on a GPU, is torch.compile(loss, dynamic=False), its first step in seconds `compile_s`; `torch`,
which nothing fills now, was the way without kernels of losses over class weights; `peer` is pytorch-metric-learning
with the same loss and its own miner; `floor` is the matrix products alone: one of the forward pass, two of the
backward. Time by device events on a GPU, the host's share included, and for `auto` once more on a device that is kept
busy (`busy`), as by an encoder; on the CPU in rounds, one step of each, so that other load on
the machine hits all alike. Memory: the peak beyond what was allocated before, on the CPU in a separate process. --check
compares values and gradients with float64 instead. --classes: losses over class weights alone, every number of classes
with every batch, in rounds, beside the peer and `compiled`: the loss after `loss.compile(dynamic=True)`.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import measure
from nearkin import losses

D, EACH = 128, 4
SIZES = {"cpu": (256, 512, 1024), "cuda": (128, 512, 1024, 2048, 4096, 16_384, 65_536)}
SMALL = 4096  # up to here every loss; beyond it those marked large, and one timed step
LARGEST_PEER = 16_384
PATIENCE = 200.0  # ms: a peer that took longer is not run again at the next larger size beyond SMALL
ONCE = 3000.0  # ms: a step on the CPU that takes longer is taken once
CEILING = 12 * 2**30  # bytes a peer may ask for on the CPU
CONTENDERS = ("auto", "compiled", "torch", "peer", "floor")
BATCHES, CLASSES = (128, 512, 2048, 4096), (100, 1000, 10_000)  # of --classes
CLASS_CONTENDERS = ("auto", "peer", "compiled")


class Case(NamedTuple):
    name: str
    ours: str
    settings: Mapping[str, Any] = MappingProxyType({})
    peer: str | None = None  # an expression over what `peer_names` gives
    miner: str | None = None
    large: bool = False
    drawn: bool = False  # pairs are drawn at random: not to be compared draw by draw
    most: int = LARGEST_PEER  # the peer is not run beyond
    weighs: bool = False  # over class weights: `ours` takes num_classes and dim, and so does the peer, as C and D
    continuous: bool = False  # labels are random numbers, not those of classes


# The nearest the peer has, not always the same number: its contrastive loss knows no squares, its margin loss sums over
# triplets, its semi-hard miner takes all inside the margin, its N-pair loss leaves out all but two of a class, its
# Smooth-AP counts each item as its own positive.
CASES = [
    Case("contrastive", "ContrastiveLoss", {}, "L.ContrastiveLoss(distance=raw(), reducer=Mean())", large=True),
    Case("margin", "MarginLoss", {}, "L.MarginLoss(learn_beta=True)", "M.DistanceWeightedMiner()", True, True),
    Case("margin, all", "MarginLoss", {"selection": "all"}, "L.MarginLoss(learn_beta=True)", large=True),
    Case("multi-similarity", "MultiSimilarityLoss", {}, "L.MultiSimilarityLoss()", "M.MultiSimilarityMiner()", True),
    Case("circle", "CircleLoss", {}, "L.CircleLoss()"),
    Case(
        "triplet, semi-hard",
        "TripletLoss",
        {},
        "L.TripletMarginLoss(0.2, distance=squared(), reducer=Mean())",
        "M.TripletMarginMiner(0.2, 'semihard', distance=squared())",
        large=True,
    ),
    Case(
        "triplet, all",
        "TripletLoss",
        {"selection": "all"},
        "L.TripletMarginLoss(0.2, distance=squared(), reducer=Mean())",
    ),
    Case(
        "triplet, batch-hard",
        "TripletLoss",
        {"selection": "batch_hard"},
        "L.TripletMarginLoss(0.2, distance=squared(), reducer=Mean())",
        "M.BatchHardMiner()",
        large=True,
    ),
    Case(
        "triplet, distance-weighted",
        "TripletLoss",
        {"selection": "distance_weighted"},
        "L.TripletMarginLoss(0.2, distance=squared(), reducer=Mean())",
        "M.DistanceWeightedMiner()",
        drawn=True,
    ),
    Case("lossless triplet", "LosslessTripletLoss"),
    Case("lifted", "LiftedStructureLoss", {}, "L.LiftedStructureLoss(distance=raw())", large=True),
    Case("N-pair", "NPairLoss", {}, "L.NPairsLoss(distance=inner(), **penalty(0.001))"),
    Case("SupCon", "SupConLoss", {}, "L.SupConLoss()", large=True),
    Case("InfoNCE", "InfoNCELoss", {}, "L.NTXentLoss()", large=True),
    Case("log-ratio", "LogRatioLoss", large=True),  # of whole numbers: nearly all label distances are tied
    Case("log-ratio, continuous", "LogRatioLoss", large=True, continuous=True),
    Case("Fast-AP", "FastAPLoss", {}, "L.FastAPLoss()", large=True),
    Case(
        "Smooth-AP", "SmoothAPLoss", {"max_positives": EACH - 1}, "L.SmoothAPLoss()", large=True, most=2048
    ),  # B³ bytes of the host
    Case("normalised softmax", "NormalizedSoftmaxLoss", {}, "L.NormalizedSoftmaxLoss(C, D)", weighs=True),
    Case("CosFace", "CosFaceLoss", {}, "L.CosFaceLoss(C, D)", weighs=True),
    Case("ArcFace", "ArcFaceLoss", {}, "L.ArcFaceLoss(C, D)", weighs=True),
    Case(
        "ArcFace, 3 centres",
        "ArcFaceLoss",
        {"sub_centers": 3},
        "L.SubCenterArcFaceLoss(num_classes=C, embedding_size=D)",
        weighs=True,
    ),
    Case("SphereFace", "SphereFaceLoss", {}, "L.SphereFaceLoss(C, D)", weighs=True),
    Case("AdaCos", "AdaCosLoss", {}, weighs=True),
    Case("AdaCos, fixed", "AdaCosLoss", {"dynamic": False}, weighs=True),
    Case("heated softmax", "HeatedSoftmaxLoss", {}, weighs=True),
    Case("heated softmax, batch norm", "HeatedSoftmaxLoss", {"norm": "batch"}, weighs=True),
    Case("softmax + center", "CenterLoss", {}, weighs=True),
    Case("Proxy-NCA", "ProxyNCALoss", {}, "L.ProxyNCALoss(C, D)", weighs=True),
    Case("Proxy-NCA, original", "ProxyNCALoss", {"form": "original"}, weighs=True),
    Case("Proxy-Anchor", "ProxyAnchorLoss", {}, "L.ProxyAnchorLoss(C, D)", weighs=True),
    Case("SoftTriple", "SoftTripleLoss", {}, "L.SoftTripleLoss(C, D)", weighs=True),
]


def peer_names() -> dict[str, Any] | None:
    """The names in the table's expressions, or None where pytorch-metric-learning is not installed."""
    try:
        from pytorch_metric_learning import distances, miners, reducers, regularizers
        from pytorch_metric_learning import losses as peer_losses
    except ImportError:
        return None
    return {
        "L": peer_losses,
        "M": miners,
        "Mean": reducers.MeanReducer,
        "raw": lambda: distances.LpDistance(normalize_embeddings=False),
        "squared": lambda: distances.LpDistance(power=2),
        "penalty": lambda w: {"embedding_regularizer": regularizers.LpRegularizer(power=2), "embedding_reg_weight": w},
        "inner": lambda: distances.DotProductSimilarity(normalize_embeddings=False),
    }


def batch(size: int, device: str, case: Case | None = None) -> tuple[Tensor, Tensor]:
    """Items loosely around class means, about 1 apart, so that hinges are neither all alive nor all dead."""
    g = torch.Generator().manual_seed(size)
    y = torch.arange(size) // EACH
    x = torch.randn(size, D, generator=g) * 2 + torch.randn(size // EACH + 1, D, generator=g)[y]
    x = (x * (0.7 / (5 * D) ** 0.5)).to(device).requires_grad_()
    if case is not None and case.ours == "LogRatioLoss":
        y = torch.randn(size, generator=g) if case.continuous else y.float()
    return x, y.to(device)


def ours(case: Case, size: int, device: str, classes: int | None = None, **overrides: Any) -> torch.nn.Module:
    constructor = getattr(losses, case.ours)
    weights = (classes or -(-size // EACH), D) if case.weighs else ()
    return constructor(*weights, **case.settings, **overrides).to(device)


def compiled_loss(case: Case, size: int, device: str) -> torch.nn.Module:
    """Nothing else is compiled then: a function has a limited number of compiled forms, and all losses share some."""
    torch._dynamo.reset()
    return torch.compile(ours(case, size, device), dynamic=False)


def steps(case: Case, size: int, device: str, names: dict[str, Any] | None) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each contender's step on the same batch."""
    x, y = batch(size, device, case)

    def step(loss: torch.nn.Module, *miner: Callable[..., Any]) -> Callable[[], None]:
        return learning_step(lambda: loss(x, y, *(m(x, y) for m in miner)), [x, *loss.parameters()])

    yield "auto", step(ours(case, size, device))
    if device == "cuda":
        yield "compiled", step(compiled_loss(case, size, device))
    if case.peer is not None and names is not None:
        names = names | {"C": -(-size // EACH), "D": D}
        miner = [eval(case.miner, names)] if case.miner else []  # of the table above, nothing else
        yield "peer", step(eval(case.peer, names).to(device), *miner)
    reference_rows = x.detach()[: -(-size // EACH)].clone() if case.weighs else x.detach()
    yield "floor", lambda: floor(x.detach(), reference_rows)


def learning_step(value: Callable[[], Tensor], learnt: list[Tensor]) -> Callable[[], None]:
    def once() -> None:
        for each in learnt:
            each.grad = None
        value().backward()

    return once


def class_steps(
    case: Case, size: int, classes: int, device: str, names: dict[str, Any] | None
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The contenders of --classes on the same batch, labels at random."""
    x, _ = batch(size, device)
    y = torch.randint(classes, (size,), generator=torch.Generator().manual_seed(classes)).to(device)
    loss = ours(case, size, device, classes)
    yield "auto", learning_step(lambda: loss(x, y), [x, *loss.parameters()])
    if case.peer is not None and names is not None:
        peer = eval(case.peer, names | {"C": classes, "D": D}).to(device)
        yield "peer", learning_step(lambda: peer(x, y), [x, *peer.parameters()])
    if device == "cuda":
        fast = ours(case, size, device, classes)
        fast.compile(dynamic=True)
        yield "compiled", learning_step(lambda: fast(x, y), [x, *fast.parameters()])


def class_table(chosen: list[Case], sizes: list[int], device: str, seconds: float, out: Path | None) -> None:
    """Milliseconds of each loss over class weights, by batch and classes."""
    names = peer_names()
    print(f"{measure.machine(device)}, torch {torch.__version__}, D = {D}, ms: {' / '.join(CLASS_CONTENDERS)}")
    print(f"{'loss':28}{'B':>6}" + "".join(f"{f'C = {classes:,}':>32}" for classes in CLASSES))
    rows: list[list[object]] = []
    for case in (case for case in chosen if case.weighs):
        for size in sizes:
            line = ""
            for classes in CLASSES:
                figures: dict[str, Any] = {}
                sound: dict[str, Callable[[], None]] = {}
                for contender, once in class_steps(case, size, classes, device, names):
                    failed = attempt(once) or attempt(once)
                    if failed:
                        figures[contender] = failed
                    else:
                        sound[contender] = once
                taken = measure.medians_by_turns(list(sound.values()), device, seconds)
                figures |= zip(sound, taken, strict=True)
                cells = [shown(figures.get(contender, "-")) for contender in CLASS_CONTENDERS]
                line += f"{' / '.join(cell[:12] for cell in cells):>32}"
                rows.append([case.name, measure.machine(device), size, classes, D, *cells])
            print(f"{case.name:28}{size:>6}{line}", flush=True)
    if out is not None:
        header = ["loss", "machine", "B", "C", "D", *(f"{contender}_ms" for contender in CLASS_CONTENDERS)]
        measure.write_csv(out, header, rows)


@torch.no_grad()
def floor(x: Tensor, reference_rows: Tensor, rows: int = 4096) -> None:
    """The similarities, and with a matrix of their shape the two products of the gradient; in blocks where large."""
    for part in x.split(rows):
        matrix = part @ reference_rows.T
        matrix @ reference_rows, matrix.T @ part


def failure(error: Exception) -> str:
    """An error as an entry of a table."""
    text = str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in text or "out of memory" in text:
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(text.split())[:80]}"


def peaks(chosen: list[Case], size: int, device: str) -> None:
    """Prints the MiB of each contender of each loss, one JSON line per loss; meant for a separate process."""
    names = peer_names()
    for case in chosen:
        for _, once in steps(case, 16, device, names):  # what torch loads at its first step is not the loss's
            for _ in range(2):
                attempt(once)
        print(json.dumps({case.name: peak_cells(case, size, device, names)}), flush=True)


def peak_cells(case: Case, size: int, device: str, names: dict[str, Any] | None) -> dict[str, float | str]:
    return {
        contender: attempt(lambda once=once: measure.peak_mib(once, device))
        for contender, once in steps(case, size, device, names)
    }


def attempt(figure: Callable[[], Any]) -> Any:
    try:
        return figure()
    except Exception as error:  # an entry of the table, whatever it is
        message = failure(error)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # outside the handler, whose traceback holds the tensors
    return message


def peaks_of_a_fresh_process(chosen: list[Case], size: int) -> dict[str, dict[str, float | str]]:
    """From a process whose allocator gives freed memory back at once: true peaks, but slower, so not timed."""
    command = [sys.executable, __file__, "--device", "cpu", "--peaks", "--sizes", str(size), "--losses"]
    command += [case.name for case in chosen]
    done = subprocess.run(command, env=measure.frugal_environment(), stdout=subprocess.PIPE, text=True)
    figures: dict[str, dict[str, float | str]] = {}
    for line in done.stdout.splitlines():
        figures |= json.loads(line)
    return figures


def cells_cpu(
    case: Case, size: int, names: dict[str, Any] | None, seconds: float, mib: dict[str, float | str]
) -> dict[str, Any]:
    """Milliseconds of each contender, in rounds; one that fails its first step, or takes seconds for it, is left
    out."""
    figures: dict[str, Any] = {f"{contender}_mib": value for contender, value in mib.items()}
    sound: dict[str, Callable[[], None]] = {}
    for contender, once in steps(case, size, "cpu", names):
        first = attempt(lambda once=once: measure.once_ms(once, "cpu"))
        if isinstance(first, str) or first > ONCE:
            figures[f"{contender}_ms"] = first
        else:
            sound[contender] = once
    taken = measure.medians_by_turns(list(sound.values()), "cpu", seconds)
    return figures | {f"{contender}_ms": ms for contender, ms in zip(sound, taken, strict=True)}


def cells_cuda(case: Case, size: int, names: dict[str, Any] | None, seconds: float, tired: set[str]) -> dict[str, Any]:
    """Milliseconds and MiB of each contender; the first call, whose peak is taken, is the warm-up."""
    figures: dict[str, Any] = {}
    for contender, once in steps(case, size, "cuda", names):
        beyond = (contender == "torch" and size > SMALL) or (contender == "peer" and size > case.most)
        if beyond or (contender == "peer" and size > SMALL and case.name in tired):
            figures |= {f"{contender}_ms": "not run", f"{contender}_mib": "not run"}
            continue
        begun = time.perf_counter()
        mib = attempt(lambda once=once: measure.peak_mib(once, "cuda"))
        if contender == "compiled":
            figures["compile_s"] = time.perf_counter() - begun
        if not isinstance(mib, str):
            once_more = attempt(lambda once=once: measure.once_ms(once, "cuda"))
            slow = isinstance(once_more, str) or once_more > PATIENCE or size > SMALL
            ms = once_more if slow else attempt(lambda once=once: measure.median_ms(once, "cuda", seconds, warm=True))
        else:
            ms = mib
        if contender == "peer" and (isinstance(ms, str) or ms > PATIENCE):
            tired.add(case.name)
        figures |= {f"{contender}_ms": ms, f"{contender}_mib": mib}
        if contender == "auto" and not isinstance(ms, str) and size <= SMALL:
            busy = attempt(lambda once=once: measure.busy_ms(once))
            figures["busy_ms"] = "" if isinstance(busy, str) else busy  # more launches than the queue takes
    return figures


def ratio(figures: dict[str, Any], over: str) -> float | str:
    auto, other = figures.get("auto_ms"), figures.get(over)
    return auto / other if isinstance(auto, float) and isinstance(other, float) and other > 0 else ""


def table(chosen: list[Case], sizes: list[int], device: str, seconds: float, out: Path | None) -> None:
    names = peer_names()
    version = "" if names is None else sys.modules["pytorch_metric_learning"].__version__
    print(f"{measure.machine(device)}, torch {torch.__version__}, peer: {version or 'not installed, skipped'}")
    columns = [f"{contender}_{what}" for what in ("ms", "mib") for contender in CONTENDERS]
    columns += ["busy_ms", "compile_s"] if device == "cuda" else []
    print(f"{'loss':28}{'B':>7}" + "".join(f"{c:>12}" for c in columns) + f"{'auto/peer':>12}{'auto/floor':>12}")
    rows: list[list[object]] = []
    tired: set[str] = set()
    for size in sizes:
        measured_cases = [case for case in chosen if case.large or size <= SMALL]
        mib = peaks_of_a_fresh_process(measured_cases, size) if device == "cpu" else {}
        for case in measured_cases:
            if device == "cpu":
                figures = cells_cpu(case, size, names, seconds, mib.get(case.name, {}))
            else:
                for contender, once in steps(case, 64, device, names):
                    if contender != "compiled":
                        attempt(once)
                figures = cells_cuda(case, size, names, seconds, tired)
            figures |= {"auto/peer": ratio(figures, "peer_ms"), "auto/floor": ratio(figures, "floor_ms")}
            cells = [shown(figures.get(c, "")) for c in (*columns, "auto/peer", "auto/floor")]
            print(f"{case.name:28}{size:>7}" + "".join(f"{c[:11]:>12}" for c in cells), flush=True)
            rows.append([case.name, measure.machine(device), size, D, EACH, *cells, version])
            if out is not None:
                header = ["loss", "machine", "B", "D", "each", *columns, "ratio_peer", "ratio_floor", "peer_version"]
                measure.write_csv(out, header, rows)  # the file grows with each line


def shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def check(chosen: list[Case], sizes: list[int], device: str) -> bool:
    """Relative errors of value and gradient in float32 against float64 in plain torch; whether kernels, or on a GPU the
    compiled loss, are as good as plain torch."""
    print(f"{measure.machine(device)}, torch {torch.__version__}")
    print(f"{'loss':28}{'B':>7}" + "".join(f"{t:>15}" for t in ("value", "plain value", "grad", "plain grad")))
    sound = True
    for size in sizes:
        for case in chosen:
            flag = attempt(lambda case=case, size=size: checked(case, size, device))
            sound = sound and flag in ("", "drawn, not judged")
            if flag:
                print(f"{case.name:28}{size:>7}  {flag}", flush=True)
    print("all as accurate as plain torch" if sound else "SOMETHING IS LESS ACCURATE THAN PLAIN TORCH")
    return sound


def checked(case: Case, size: int, device: str) -> str:
    """Prints the errors; what is wrong with them, or nothing."""

    def result(dtype: torch.dtype, as_it_comes: bool = False) -> tuple[Tensor, Tensor]:
        x, y = batch(size, device, case)
        x = x.detach().to(dtype).requires_grad_()
        torch.manual_seed(0)
        if as_it_comes and device == "cuda":
            loss = compiled_loss(case, size, device)
        else:
            loss = ours(case, size, device).to(dtype)
        value = 3 * loss(x, y)  # the upstream gradient is not 1
        value.backward()
        return value.detach().double(), x.grad.double()

    truth = result(torch.float64)
    results = (result(torch.float32, as_it_comes=True), result(torch.float32))
    errors = [
        [float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(got, truth, strict=True)]
        for got in results
    ]
    (value, slope), (plain_value, plain_slope) = errors
    print(
        f"{case.name:28}{size:>7}" + "".join(f"{e:>15.1e}" for e in (value, plain_value, slope, plain_slope)),
        flush=True,
    )
    if case.drawn:
        return "drawn, not judged"
    worse = [n for n, a, b in (("value", value, plain_value), ("gradient", slope, plain_slope)) if not a <= b + 1e-6]
    return f"!! {' and '.join(worse)} worse than plain torch" if worse else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="+", help="batch sizes")
    parser.add_argument("--losses", nargs="+", choices=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on a cell (default: 1)")
    parser.add_argument("--out", type=Path, help="default for a complete run: results/losses_cpu.csv or losses_gpu.csv")
    parser.add_argument("--check", action="store_true", help="accuracy instead of time")
    parser.add_argument("--classes", action="store_true", help="losses over class weights, by batch and classes")
    parser.add_argument("--peaks", action="store_true", help="print the peaks of memory as JSON, and nothing else")
    args = parser.parse_args()
    chosen = [case for case in CASES if args.losses is None or case.name in args.losses]
    sizes, device, out = args.sizes or list(SIZES[args.device]), args.device, args.out
    torch.set_num_threads(2)
    if device == "cpu":
        bound = measure.status("VmSize") * 1024 + CEILING
        resource.setrlimit(resource.RLIMIT_AS, (bound, resource.RLIM_INFINITY))
    if args.peaks:
        peaks(chosen, sizes[0], device)
    elif args.classes:
        if out is None and args.losses is None and args.sizes is None:
            out = Path(__file__).parent / "results" / f"class_losses_{'cpu' if device == 'cpu' else 'gpu'}.csv"
        class_table(chosen, args.sizes or list(BATCHES), device, min(args.seconds, 0.1), out)
    elif args.check:
        sys.exit(0 if check(chosen, [size for size in sizes if size <= 2048], device) else 1)
    else:
        if out is None and args.losses is None and args.sizes is None:
            out = Path(__file__).parent / "results" / f"losses_{'cpu' if device == 'cpu' else 'gpu'}.csv"
        table(chosen, sizes, device, args.seconds, out)


if __name__ == "__main__":
    main()
