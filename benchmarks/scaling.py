"""Strong and weak scaling over the processes of this machine: python benchmarks/scaling.py [--out FILE] [--quick]

Worlds of 1, 2 and 4 ranks on gloo, one thread each; ranks beyond the cores are marked as oversubscribed and only show
that nothing breaks. Measured: a training step (small-cnn under DistributedDataParallel, SupCon over the global batch),
ArcFace with its class weights complete on every rank and sharded (`shard=True`), and the search of
`evaluation.retrieval`. The bytes of every exchange are counted where they leave the program and compared with the
formulas of `scaling_model.py`, which also predicts each time from the work of one rank and the links as measured in the
same run. Writes the CSV, the picture docs/pictures/scaling.svg, and the table into docs/scaling.md (not with --quick).
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import measure
import scaling_model as model
from nearkin import evaluation, losses, models
from nearkin.dist import ProcessGroup, collectives
from nearkin.dist.global_batch import GlobalBatch, average_gradients

HERE = Path(__file__).parent
WORLDS = (1, 2, 4)
# Weak scaling gives each rank what a rank of two has of these: pictures; classes, for the same batch; pairs of items.
STEP = {"batch": 256, "dim": 128, "size": 32}
CLASSES = {"batch": 128, "dim": 128, "classes": 20_000}
ITEMS = {"items": 30_000, "dim": 128, "each": 5}
MARK, END = "<!-- measured -->", "<!-- end -->"
HEADER = ["what", "scaling", "ranks", "oversubscribed", "size", "ms", "speedup", "bytes", "formula_bytes", "model_ms"]


class Counted:
    """Counts the bytes that this rank hands to the collectives of `core.world` and of DistributedDataParallel."""

    def __init__(self) -> None:
        self.gathered = self.reduced = 0
        gather, reduce = collectives._all_gather, collectives._reduced

        def all_gather(flat: Tensor, group: Any) -> Tensor:
            self.gathered += flat.numel() * flat.element_size()
            return gather(flat, group)

        def reduced(tensor: Tensor, group: Any, how: Any) -> Tensor:
            self.reduced += tensor.numel() * tensor.element_size()
            return reduce(tensor, group, how)

        collectives._all_gather, collectives._reduced = all_gather, reduced

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """What DistributedDataParallel does by itself, counted."""
        self.reduced += bucket.buffer().numel() * bucket.buffer().element_size()
        handle = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return handle.get_future().then(lambda done: done.value()[0])

    def of(self, step: Callable[[], object]) -> float:
        """Bytes that leave this rank in a step."""
        self.gathered = self.reduced = 0
        step()
        return model.Exchange(self.gathered, self.reduced, 0).sent(dist.get_world_size())


def timed(step: Callable[[], object], seconds: float) -> float:
    """Milliseconds of a step that all ranks begin together: the median on this rank."""
    step()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    go_on = torch.ones(1)
    while True:
        dist.barrier()
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
        go_on.fill_(float(len(taken) < 3 or time.perf_counter() < end))
        dist.broadcast(go_on, 0)  # all ranks take as many steps
        if not go_on:
            return 1e3 * statistics.median(taken)


def links(seconds: float) -> dict[str, float]:
    """Latency and bandwidth of this machine's gloo, from all-reduces of little and of much."""
    small, large = torch.zeros(16), torch.zeros(4 << 20)
    few, much = (timed(lambda x=x: dist.all_reduce(x), seconds) / 1e3 for x in (small, large))
    ranks = dist.get_world_size()
    sent = 2 * (ranks - 1) / ranks * large.numel() * 4
    return {"latency": few, "bandwidth": sent / max(much - few, 1e-9)}


def training_step(batch: int, counted: Counted, encode: bool = True) -> Callable[[], None]:
    """One step with `batch` rows on this rank; encode=False: the loss alone, on rows that are there."""
    torch.manual_seed(dist.get_rank())
    dim, size = STEP["dim"], STEP["size"]
    labels = torch.arange(batch) // 4 + dist.get_rank() * batch
    loss = GlobalBatch(losses.SupConLoss())
    if not encode:
        rows = torch.randn(batch, dim, requires_grad=True)
        return lambda: loss(rows, labels).backward()
    encoder: Any = models.build("small-cnn", dim=dim, size=size, channels=3)
    if dist.get_world_size() > 1:
        encoder = DistributedDataParallel(encoder)
        encoder.register_comm_hook(None, counted.hook)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-3)
    pictures = torch.rand(batch, 3, size, size)

    def step() -> None:
        optimizer.zero_grad()
        loss(encoder(pictures), labels).backward()
        optimizer.step()

    return step


def class_step(batch: int, classes: int, shard: bool) -> Callable[[], None]:
    """ArcFace alone: `batch` rows on this rank against `classes` in all."""
    torch.manual_seed(0)
    loss = losses.ArcFaceLoss(classes, CLASSES["dim"], **({"shard": True} if shard else {}))
    globally = GlobalBatch(loss)
    rows = torch.randn(batch, CLASSES["dim"], requires_grad=True)
    labels = torch.randint(0, classes, (batch,))

    def step() -> None:
        loss.zero_grad()
        globally(rows, labels).backward()
        average_gradients(loss)

    return step


def search(items: int, group: ProcessGroup) -> Callable[[], None]:
    torch.manual_seed(0)
    rows, labels = torch.randn(items, ITEMS["dim"]), torch.arange(items) // ITEMS["each"]
    return lambda: evaluation.retrieval(rows + labels[:, None] % 7, labels, group=group)


def measured(quick: bool) -> dict[str, Any]:
    """Everything that is measured in one world, on this rank."""
    ranks, counted = dist.get_world_size(), Counted()
    long, short = (0.2, 0.1) if quick else (6.0, 2.0)
    figures: dict[str, Any] = {"links": links(short)} if ranks > 1 else {}
    batch = STEP["batch"] // (8 if quick else 1)
    rows, classes = CLASSES["batch"], CLASSES["classes"] // (20 if quick else 1)
    items = ITEMS["items"] // (10 if quick else 1)

    def put(name: str, step: Callable[[], object], seconds: float = long) -> None:
        figures[name] = {"ms": timed(step, seconds), "bytes": counted.of(step)}

    put("training strong", training_step(batch // ranks, counted))
    put("training weak", training_step(batch // 2, counted))
    for shard in (False, True):
        name = "shared" if shard else "whole"
        put(f"classes {name} strong", class_step(rows // ranks, classes, shard))
        put(f"classes {name} weak", class_step(rows // ranks, classes // 2 * ranks, shard))
    with ProcessGroup() as team:
        put("search strong", search(items, team), short)
        put("search weak", search(round(items * (ranks / 2) ** 0.5), team), short)
    if ranks == 1:  # what the model is made of
        for parts in WORLDS:
            put(f"encode {batch // parts}", training_step(batch // parts, counted), short)
            put(f"loss {batch // parts}", training_step(batch // parts, counted, encode=False), short)
            put(f"loss {batch // 2 * parts}", training_step(batch // 2 * parts, counted, encode=False), short)
            for number in {classes // parts, classes // 2 * parts}:
                put(f"classes {rows}x{number}", class_step(rows, number, False), short)
        figures["sizes"] = {"batch": batch, "rows": rows, "classes": classes, "items": items}
        figures["parameters"] = sum(p.numel() for p in models.build("small-cnn", dim=STEP["dim"], size=32).parameters())
    return figures


def _rank(rank: int, size: int, meeting: str, out: str, quick: bool) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    figures = measured(quick)
    if rank == 0:
        Path(out).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, quick: bool) -> dict[str, Any]:
    """One world from start to end."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, f"{folder}/meeting", f"{folder}/found.json", quick)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        for process in processes:
            if process.is_alive():
                process.kill()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"a rank of {size} failed")
        figures: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        return figures


def expected(name: str, ranks: int, alone: dict[str, Any], link: model.Link) -> tuple[float, float]:
    """Bytes by the formulas, and milliseconds from the work of one rank and the links."""
    size, (what, scaling) = alone["sizes"], name.rsplit(" ", 1)
    strong = scaling == "strong"
    if what == "search":  # tiles are shared, then counts, then metrics; the bytes depend on how many tiles there are
        return float("nan"), alone[name]["ms"] / ranks * (1 if strong else ranks)
    if what == "training":
        batch = size["batch"] // ranks if strong else size["batch"] // 2
        exchanges = [model.plain(batch, STEP["dim"]), model.gradients(alone["parameters"])]
        work = alone[f"encode {batch}"]["ms"] - alone[f"loss {batch}"]["ms"] + alone[f"loss {batch * ranks}"]["ms"]
    else:
        batch = size["rows"] // ranks
        classes = size["classes"] if strong else size["classes"] // 2 * ranks
        if "shared" in what:
            exchanges = [model.sharded(batch, CLASSES["dim"], ranks)]
            work = alone[f"classes {batch * ranks}x{classes // ranks}"]["ms"]
        else:
            exchanges = [model.plain(batch, CLASSES["dim"]), model.averaged(classes * CLASSES["dim"])]
            work = alone[f"classes {batch * ranks}x{classes}"]["ms"]
    sent = sum(world.sent(ranks) for world in exchanges) if ranks > 1 else 0.0
    return sent, work + 1e3 * sum(model.seconds(world, ranks, link) for world in exchanges)


def sized(what: str, scaling: str, ranks: int, size: dict[str, int]) -> str:
    """How much work there is for all ranks together."""
    strong = scaling == "strong"
    if what == "search":
        return f"{size['items'] if strong else round(size['items'] * (ranks / 2) ** 0.5)} rows"
    if what == "training":
        return f"{size['batch'] if strong else size['batch'] // 2 * ranks} pictures"
    rows, classes = size["rows"], size["classes"]
    return f"{rows} x {classes if strong else classes // 2 * ranks}"


def rows_of(figures: dict[int, dict[str, Any]], cores: int) -> list[list[object]]:
    alone, rows = figures[1], []
    names = [name for name in alone if name.endswith((" strong", " weak"))]
    for name in names:
        what, scaling = name.rsplit(" ", 1)
        for ranks, world in figures.items():
            link = model.Link(**world["links"]) if ranks > 1 else model.Link(1e12, 0)
            formula, predicted = expected(name, ranks, alone, link)
            ms = world[name]["ms"]
            grown = (
                ranks if scaling == "weak" else 1
            )  # as much work per rank: done in as long means `ranks` times as much
            speedup = alone[name]["ms"] / ms * grown
            size = sized(what, scaling, ranks, alone["sizes"])
            table_text = "" if formula != formula else round(formula)
            over = "yes" if ranks > cores else "no"
            rows.append([what, scaling, ranks, over, size, round(ms, 2), round(speedup, 2)])
            rows[-1] += [round(world[name]["bytes"]), table_text, round(predicted, 2)]
    return rows


def printed(rows: list[list[object]], figures: dict[int, dict[str, Any]]) -> str:
    """The table of docs/scaling.md: a row for each kind of work, a column for each number of ranks."""
    lines = []
    for name in dict.fromkeys((row[0], row[1]) for row in rows):
        alone, *more = [row for row in rows if (row[0], row[1]) == name]
        cells = [f"{row[5]:,} ({row[6]})" for row in more]
        lines.append([f"{name[0]}, {name[1]}", f"{alone[4]}", f"{alone[5]:,}", *cells, f"{more[0][7]:,}"])
    ranks = [f"{row[2]} ranks{'*' if row[3] == 'yes' else ''}" for row in more]
    header = ["what, scaling", "size for one rank", "1 rank, ms", *ranks, f"bytes sent per rank of {more[0][2]}"]
    measured_links = [
        f"{ranks} ranks: {world['links']['bandwidth'] / 1e9:.2f} GB/s, {1e6 * world['links']['latency']:.0f} µs"
        for ranks, world in figures.items()
        if ranks > 1
    ]
    return model.table(header, lines) + "\n\ngloo on this machine, " + "; ".join(measured_links) + "."


def draw(rows: list[list[object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    for axis, scaling in zip(axes, ("strong", "weak"), strict=True):
        axis.plot(WORLDS, WORLDS, color="0.7", linewidth=1, label="ideal")
        for what in dict.fromkeys(str(row[0]) for row in rows):
            points = [(row[2], row[6]) for row in rows if row[0] == what and row[1] == scaling]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=what)
        axis.set_title(f"{scaling} scaling")
        axis.set_xticks(WORLDS)
        axis.set_xlabel("ranks")
    crowded = [row[2] for row in rows if row[3] == "yes"]
    for axis in axes if crowded else ():
        axis.axvspan(min(crowded) - 1, max(crowded) + 0.2, color="0.93", zorder=0)  # more ranks than cores
    axes[0].set_ylabel("times the work of one rank")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scaling_cpu.csv")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "pictures" / "scaling.svg")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    figures = {size: run(size, options.quick) for size in WORLDS}
    rows = rows_of(figures, cores)
    wrong = [row for row in rows if row[8] != "" and row[7] != row[8]]
    measure.write_csv(options.out, HEADER, rows)
    draw(rows, options.picture)
    table_text = printed(rows, figures)
    print(table_text)
    page = HERE.parent / "docs" / "scaling.md"
    if not options.quick:
        before, _, rest = page.read_text().partition(MARK)
        page.write_text(f"{before}{MARK}\n{table_text}\n{END}{rest.partition(END)[2]}")
    if wrong:
        raise SystemExit(f"the formulas do not give the counted bytes: {wrong}")


if __name__ == "__main__":
    main()
