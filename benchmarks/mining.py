"""Mining beside pytorch-metric-learning's miners, time and memory: python benchmarks/mining.py [--out FILE]

Two rows per selection: "mine", from embeddings and labels to the selection, and "step", the same followed by the
triplet loss and its gradient. D = 128, float32, 4 items per class. The CPU runs B = 256 to 1,024, a GPU, where there is
one, B = 512 to 8,192; a peer that runs out of memory is written as such. Ours and the peer's follow each other in one
process.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import measure
from nearkin import losses, mining
from nearkin.core import distances, relations

D, EACH = 128, 4


def peers() -> dict[str, tuple[Callable[..., object] | None, Callable[..., Tensor]]]:
    """The peer's miner for each of our selections (none for "all"), and its triplet loss."""
    from pytorch_metric_learning import losses as peer_losses
    from pytorch_metric_learning import miners

    loss = peer_losses.TripletMarginLoss(margin=0.2)
    return {
        "all": (None, loss),
        "semihard": (miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard"), loss),
        "distance_weighted": (miners.DistanceWeightedMiner(), loss),
        "batch_hard": (miners.BatchHardMiner(), loss),
        "hard": (miners.BatchEasyHardMiner(pos_strategy="all", neg_strategy="hard"), loss),
        "easy_positive": (miners.BatchEasyHardMiner(pos_strategy="easy", neg_strategy="semihard"), loss),
        "multi_similarity": (miners.MultiSimilarityMiner(), peer_losses.MultiSimilarityLoss()),
    }


def ours(selection: str, x: Tensor, y: Tensor) -> tuple[Callable[[], object] | None, Callable[[], object]]:
    def mining_step() -> object:
        with torch.no_grad():
            return mining.select(selection, distances.euclidean(distances.unit(x)), relations.of(y), dim=D)

    loss: torch.nn.Module = (
        losses.TripletLoss(0.2, squared=False, selection=selection, reduction="active")
        if (selection != "multi_similarity")
        else losses.MultiSimilarityLoss()
    )
    return None if selection == "all" else mining_step, lambda: gradient(loss, x, y)


def theirs(miner: Callable[..., object] | None, loss: Callable[..., Tensor], x: Tensor, y: Tensor):
    def mining_step() -> object:
        return miner(x.detach(), y)

    if miner is None:
        return None, lambda: gradient(loss, x, y)
    return mining_step, lambda: gradient(lambda a, b: loss(a, b, miner(a, b)), x, y)


def gradient(loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    loss(x, y).backward()
    return x.grad


def each_step(device: str, size: int) -> Iterator[tuple[str, str, Callable[[], object], Callable[[], object]]]:
    """Selection, "mine" or "step", our call and the peer's, on the same batch."""
    torch.manual_seed(0)
    x = torch.randn(size, D, device=device)
    y = torch.arange(size, device=device) // EACH
    for selection, (miner, loss) in peers().items():
        for what, our_step, peer in zip(
            ("mine", "step"), ours(selection, x, y), theirs(miner, loss, x, y), strict=True
        ):
            if our_step is not None and peer is not None:
                yield selection, what, our_step, peer


def or_out_of_memory(figure: Callable[[], float]) -> float | None:
    try:
        return figure()
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
    torch.cuda.empty_cache()
    return None


def peaks(device: str, sizes: Sequence[int]) -> dict[str, list[float | None]]:
    """MiB of ours and of the peer's, by selection, what and size."""
    peak_mib_by_case: dict[str, list[float | None]] = {}
    for size in sizes:
        for selection, what, *steps in each_step(device, size):
            for step in steps:
                or_out_of_memory(lambda step=step: measure.median_ms(step, device, 0, 1))  # warm
            peak_mib_by_case[f"{selection} {what} {size}"] = [
                or_out_of_memory(lambda step=step: measure.peak_mib(step, device)) for step in steps
            ]
    return peak_mib_by_case


def peaks_of_a_fresh_process(device: str) -> dict[str, list[float | None]]:
    """The same from a process whose allocator gives freed memory back: true peaks, but slower, so not timed."""
    command = [sys.executable, __file__, "--device", device, "--peaks"]
    done = subprocess.run(command, env=measure.frugal_environment(), check=True, stdout=subprocess.PIPE, text=True)
    peak_mib_by_case: dict[str, list[float | None]] = json.loads(done.stdout)
    return peak_mib_by_case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: results/mining_cpu.csv or mining_gpu.csv beside this script")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peaks", action="store_true", help="print peaks of memory as JSON, and nothing else")
    arguments = parser.parse_args()
    device = arguments.device
    sizes = (256, 512, 1024) if device == "cpu" else (512, 1024, 2048, 4096, 8192)
    if arguments.peaks:
        print(json.dumps(peaks(device, sizes)))
        return
    torch.set_num_threads(2)
    mib = peaks(device, sizes) if device == "cuda" else peaks_of_a_fresh_process(device)
    hardware = torch.cuda.get_device_name() if device == "cuda" else "cpu, 2 threads"
    rows: list[list[object]] = []
    header = ["selection", "what", "device", "B", "D", "dtype", "ms", "extra_mib", "peer_ms", "peer_mib", "ratio"]
    print("".join(f"{title:>14}" for title in header if title not in ("device", "D", "dtype")))
    for size in sizes:
        for selection, what, *steps in each_step(device, size):
            our_ms, peer = (or_out_of_memory(lambda step=step: measure.median_ms(step, device)) for step in steps)
            memory = mib[f"{selection} {what} {size}"]
            ratio = None if peer is None or our_ms is None else peer / our_ms
            cells = ["out of memory" if v is None else f"{v:.2f}" for v in (our_ms, memory[0], peer, memory[1], ratio)]
            rows.append([selection, what, hardware, size, D, "float32", *cells])
            print("".join(f"{cell:>14}" for cell in (selection[:13], what, size, *cells)), flush=True)
    name = "mining_cpu.csv" if device == "cpu" else "mining_gpu.csv"
    measure.write_csv(arguments.out or Path(__file__).parent / "results" / name, header, rows)


if __name__ == "__main__":
    main()
