"""Mining beside pytorch-metric-learning's miners, time and memory: python benchmarks/mining.py [--out FILE]

Two rows a selection: "mine", from embeddings and labels to the selection, and "step", the same followed by the triplet
loss and its gradient. D = 128, float32, 4 items a class. The CPU runs B = 256 to 1,024, a GPU, where there is one,
B = 512 to 8,192; a peer that runs out of memory is written as such. Peer and ours alternate in one process.
"""

import argparse
from collections.abc import Callable
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
    def mine() -> object:
        with torch.no_grad():
            return mining.select(selection, distances.euclidean(distances.unit(x)), relations.of(y), dim=D)

    loss: torch.nn.Module = (
        losses.TripletLoss(0.2, squared=False, selection=selection, reduction="active")
        if (selection != "multi_similarity")
        else losses.MultiSimilarityLoss()
    )
    return None if selection == "all" else mine, lambda: gradient(loss, x, y)


def theirs(miner: Callable[..., object] | None, loss: Callable[..., Tensor], x: Tensor, y: Tensor):
    def mine() -> object:
        return miner(x.detach(), y)

    if miner is None:
        return None, lambda: gradient(loss, x, y)
    return mine, lambda: gradient(lambda a, b: loss(a, b, miner(a, b)), x, y)


def gradient(loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    loss(x, y).backward()
    return x.grad


def figures(step: Callable[[], object], device: str) -> tuple[float, float] | None:
    """Milliseconds and MiB, or None when memory ran out."""
    try:
        return measure.median_ms(step, device), measure.peak_mib(step, device)
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
    torch.cuda.empty_cache()
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: results/mining_cpu.csv or mining_gpu.csv beside this script")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = arguments.device
    name = "mining_cpu.csv" if device == "cpu" else "mining_gpu.csv"
    out = arguments.out or Path(__file__).parent / "results" / name
    if device == "cpu":
        measure.give_back_freed_memory()
        torch.set_num_threads(2)
    rows: list[list[object]] = []
    titles = "".join(f"{t:>15}" for t in ("ms", "MiB", "peer ms", "peer MiB", "ratio"))
    print(f"{'selection':20}{'what':6}{'B':>6}{titles}")
    for size in (256, 512, 1024) if device == "cpu" else (512, 1024, 2048, 4096, 8192):
        torch.manual_seed(0)
        x = torch.randn(size, D, device=device)
        y = torch.arange(size, device=device) // EACH
        for selection, (miner, loss) in peers().items():
            for what, own, peer in zip(("mine", "step"), ours(selection, x, y), theirs(miner, loss, x, y), strict=True):
                if own is None or peer is None:
                    continue
                mine, other = figures(own, device), figures(peer, device)
                assert mine is not None
                shown = ("out of memory",) * 2 + ("",) if other is None else (*other, other[0] / mine[0])
                text = [f"{v:.2f}" if isinstance(v, float) else v for v in (*mine, *shown)]
                cells = "".join(f"{t:>15}" for t in text)
                print(f"{selection:20}{what:6}{size:>6}{cells}", flush=True)
                hardware = torch.cuda.get_device_name() if device == "cuda" else "cpu, 2 threads"
                rows.append([selection, what, hardware, size, D, "float32", *text])
    header = ["selection", "what", "device", "B", "D", "dtype", "ms", "extra_mib", "peer_ms", "peer_mib", "ratio"]
    measure.write_csv(out, header, rows)


if __name__ == "__main__":
    main()
