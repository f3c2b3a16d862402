"""What a step costs on many ranks, from the bytes it exchanges, the links and the measured work of one rank.

`python benchmarks/scaling_model.py` prints the arithmetic of docs/scaling.md: SupCon on 8, 64 and 1,024 GPUs, and the
memory of 100 million classes. `scaling.py` asks the same functions for the ranks of this machine, and compares.
"""

import math
from typing import NamedTuple

MEET = 8 * (40 + 5 * 9)  # bytes per rank that describe its batch before a plain loss: dist/collectives.py, five tensors
MEET_SHARDED = 8 * (40 + 2 * 9)  # and before a sharded one, two tensors


class Link(NamedTuple):
    """Between ranks: bytes per second that one rank can send while all do, and seconds until the first arrives."""

    bandwidth: float
    latency: float


class Exchange(NamedTuple):
    """What one rank hands to the collectives of a step, in bytes: rows that all get, and tensors that are summed."""

    gathered: float
    reduced: float
    calls: int

    def sent(self, ranks: int) -> float:
        """Bytes that leave a rank: a ring passes rows on to all others, and a sum round twice."""
        return (ranks - 1) * self.gathered + 2 * (ranks - 1) / ranks * self.reduced


def plain(batch: int, dim: int, size: int = 4) -> Exchange:
    """A loss of the global batch: `batch` rows per rank of `dim` numbers of `size` bytes, and their int64 labels."""
    return Exchange(batch * dim * size + batch * 8 + MEET, 0, 3)


def sharded(batch: int, dim: int, ranks: int, size: int = 4) -> Exchange:
    """A class softmax whose classes are shared: the rows and labels, the largest score per anchor, its sum and the own
    class's term in float64, and backward the gradient of all rows.
    """
    rows = batch * ranks
    return Exchange(batch * dim * size + batch * 8 + MEET_SHARDED, rows * 4 + (2 * rows + 1) * 8 + rows * dim * size, 6)


def gradients(parameters: int, size: int = 4) -> Exchange:
    """The encoder's, summed by DistributedDataParallel."""
    return Exchange(0, parameters * size, 1)


def averaged(parameters: int) -> Exchange:
    """Those of one parameter of the loss that is complete on every rank, with a number that tells whether there are
    any."""
    return Exchange(0, parameters * 4 + 4, 1)


def seconds(exchange: Exchange, ranks: int, link: Link) -> float:
    if ranks == 1:
        return 0.0
    hops = math.ceil(math.log2(ranks))  # of the trees that a good library builds for small messages
    return exchange.sent(ranks) / link.bandwidth + exchange.calls * hops * link.latency


# --- GPUs: what is assumed, and what was measured on an H200 (docs/performance.md, docs/measured/training.md)

NODE = 8
NVLINK = Link(0.8 * 450e9, 5e-6)  # 450 GB/s a direction; four fifths of it, as collectives reach
RAILS = Link(0.8 * 8 * 50e9, 15e-6)  # 400 Gb/s per GPU: eight rails per node, all of which a ring over nodes uses
LITE = 12_000.0  # images per second, EfficientNet-Lite0 at 96 px, bf16, batches of 128, training
LITE_PARAMETERS = 3_535_000  # of its encoder with a projection to 128
PAIR = (0.79e-3, 101e-3 / 65_536**2)  # SupCon compiled, D = 128: seconds per step, and seconds per pair of the batch


def link_of(ranks: int) -> Link:
    return NVLINK if ranks <= NODE else RAILS


def pair_loss(rows: int) -> float:
    return PAIR[0] + PAIR[1] * rows * rows


def pair_step(ranks: int, batch: int, dim: int = 128) -> dict[str, float]:
    """Milliseconds of a training step with a pair loss over the global batch."""
    link = link_of(ranks)
    parts = {
        "encoder": batch / LITE,
        "loss": pair_loss(batch * ranks),
        "gather": seconds(plain(batch, dim), ranks, link),
        "gradients": seconds(gradients(LITE_PARAMETERS), ranks, link),
    }
    return _ms(parts, batch, ranks)


def _ms(parts: dict[str, float], batch: int, ranks: int) -> dict[str, float]:
    total = sum(parts.values())
    alone = parts["encoder"] / total
    return {name: 1e3 * value for name, value in parts.items()} | {
        "step": 1e3 * total,
        "images/s": batch * ranks / total,
        "encoder's share": alone,
    }


def break_even(batch: int) -> tuple[int, int]:
    """From how many rows, and so GPUs, the loss that every rank computes completely takes longer than the encoder."""
    rows = math.sqrt(max(batch / LITE - PAIR[0], 0) / PAIR[1])
    return round(rows), math.ceil(rows / batch)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def main() -> None:
    ranks = (1, 8, 64, 1024)
    columns = ["encoder", "loss", "gather", "gradients", "step"]
    print("SupCon over the global batch, 128 images per GPU, D = 128 (weak scaling); ms")
    rows = []
    for number in ranks:
        one = pair_step(number, 128)
        rows.append(
            [f"{number:,}", f"{128 * number:,}", *(f"{one[c]:.2f}" for c in columns), f"{one['images/s']:,.0f}"]
        )
    print(table(["GPUs", "global batch", *columns, "images/s"], rows))
    print(f"\nloss = encoder from a global batch of {break_even(128)[0]:,}, {break_even(128)[1]:,} GPUs of 128 images")
    print("\n100 million classes, D = 512, float32: GB per GPU")
    gigabytes = 1e8 * 512 * 4 / 1e9
    rows = [
        [name, f"{gigabytes * parts:,.0f}", *(f"{gigabytes * parts / number:,.1f}" for number in (8, 64, 256))]
        for name, parts in [("weights", 1), ("gradient", 1), ("AdamW", 2), ("together", 4), ("with SGD + momentum", 3)]
    ]
    print(table(["", "all", "8 GPUs", "64", "256"], rows))


if __name__ == "__main__":
    main()
