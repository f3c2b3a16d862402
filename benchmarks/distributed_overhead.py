"""What the global batch costs: python benchmarks/distributed_overhead.py [--device cuda] [--batch 256] [--dim 128]

One rank: forward and backward of `GlobalBatch(loss)` with `average_gradients`, in a process group of one, against the
plain loss, by turns in one process; the ratio of the medians. Then, on the CPU with gloo, worlds of 2 and 4 ranks: what
each rank sends in a step, counted where torch.distributed is called. Both go to results/distributed_overhead.csv.
"""

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

import measure
from nearkin import losses
from nearkin.dist.global_batch import GlobalBatch, average_gradients

CLASSES, EACH = 1000, 4
LOSSES = {
    "supcon": lambda dim: losses.SupConLoss(),
    "triplet": lambda dim: losses.TripletLoss(),
    "margin": lambda dim: losses.MarginLoss(),
    "proxy-anchor": lambda dim: losses.ProxyAnchorLoss(CLASSES, dim),
    "arcface": lambda dim: losses.ArcFaceLoss(CLASSES, dim),
}


def join(rank: int, world: int, folder: str, backend: str) -> None:
    store = dist.FileStore(os.path.join(folder, f"meeting-{world}"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def step(loss: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> None:
    x.grad = None
    loss.zero_grad()
    loss(x, labels).backward()
    if isinstance(loss, GlobalBatch):
        average_gradients(loss)


def batch(size: int, dim: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dim, generator=generator).to(device).requires_grad_()
    return x, torch.randint(0, size // EACH, (size,), generator=generator).to(device)


def one_rank(size: int, dim: int, device: str, seconds: float) -> list[list[object]]:
    """Plain and global medians, and their ratio."""
    rows: list[list[object]] = []
    x, labels = batch(size, dim, device)
    for name, make in LOSSES.items():
        torch.manual_seed(0)
        plain = make(dim).to(device)
        both = [lambda loss=loss: step(loss, x, labels) for loss in (plain, GlobalBatch(plain))]
        for one in both * 3:
            one()
        alone, together = measure.medians_by_turns(both, device, seconds)
        rows.append([name, 1, f"{alone:.4f}", f"{together:.4f}", f"{together / alone:.3f}", 0, 0])
        print(f"{name:13s} 1 rank: plain {alone:8.4f} ms, global {together:8.4f} ms, ratio {together / alone:.3f}")
    return rows


def count(rank: int, world: int, folder: str, size: int, dim: int) -> None:
    """Writes what this rank sends in its second step (the first also shares the parameters), by kind of exchange."""
    torch.set_num_threads(1)
    join(rank, world, folder, "gloo")
    sent: Counter[str] = Counter()

    def counted(name: str, tensor: int, times: float) -> None:
        exchange = getattr(dist, name)

        def call(*args, **keywords):
            sent[name] += round(args[tensor].numel() * args[tensor].element_size() * times)
            return exchange(*args, **keywords)

        setattr(dist, name, call)

    gathering = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    counted(gathering, 1, world - 1)
    counted("all_reduce", 0, 2 * (world - 1) / world)
    counted("broadcast", 0, 1 if rank == 0 else 0)
    x, labels = batch(size, dim, "cpu", seed=rank)
    lines = []
    for name, make in LOSSES.items():
        loss = GlobalBatch(make(dim))
        step(loss, x, labels)
        sent.clear()
        step(loss, x, labels)
        lines.append(f"{name} {sum(sent.values()) - sent['all_reduce']} {sent['all_reduce']}")
    if rank == 0:
        Path(folder, f"sent-{world}").write_text("\n".join(lines))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=256, help="items per rank")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "distributed_overhead.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for a core would be the noise
    with tempfile.TemporaryDirectory() as folder:
        join(0, 1, folder, "nccl" if options.device == "cuda" else "gloo")
        rows = one_rank(options.batch, options.dim, options.device, options.seconds)
        dist.destroy_process_group()
        for world in (2, 4):
            processes.spawn(count, (world, folder, options.batch, options.dim), world)
            for line in Path(folder, f"sent-{world}").read_text().splitlines():
                name, forward, gradients = line.split()
                rows.append([name, world, "", "", "", forward, gradients])
                print(f"{name:13s} {world} ranks: {forward:>9s} bytes of the batch, {gradients:>9s} of gradients")
    rows = [[row[0], measure.machine(options.device), options.batch, options.dim, *row[1:]] for row in rows]
    header = [
        "loss",
        "machine",
        "batch",
        "dim",
        "ranks",
        "plain_ms",
        "global_ms",
        "ratio",
        "batch_bytes",
        "gradient_bytes",
    ]
    measure.write_csv(options.out, header, rows)


if __name__ == "__main__":
    main()
