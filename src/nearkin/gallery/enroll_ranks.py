"""Enrolment by several ranks: each reads, decodes and encodes its parts of a source, and rank 0 writes them in order.

The gallery is then row for row what one process makes: parts are as large, the same pictures meet in the encoder, and
who is there already is not encoded. Only rank 0 opens the gallery; only hashes and what was encoded cross over to it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.core.errors import MissingRow
from nearkin.data.item_set import Items
from nearkin.dist.group import ProcessGroup
from nearkin.gallery import items as item_inputs
from nearkin.gallery.encoding import Encoding
from nearkin.gallery.gallery import PICTURES, Gallery
from nearkin.gallery.items import Raw, Seen

__all__ = ["Part", "enrol_parts", "label_there"]


class Part(NamedTuple):
    """What became of one rank's part of a round, by the places of the items in the source."""

    there: list[tuple[int, int]]  # place, and the id it is enrolled under
    seen: list[tuple[int, Seen]]
    bad: list[str]


def enrol_parts(
    gallery: Gallery | Encoding,
    items: Items,
    names: Callable[[int], str],
    write: Callable[[int, Part], None],
    progress: Callable[[int, int], None] | None,
    group: ProcessGroup,
) -> None:
    """Calls write(rank, part) on rank 0 for the parts of all ranks, in the order of the items."""
    encoding = gallery if isinstance(gallery, Encoding) else gallery._encoding
    if encoding is None:
        raise ValueError("ranks share the encoding, and this gallery was opened without a run; enrol in one process")
    for start in range(0, len(items), PICTURES * group.size):
        first = min(start + PICTURES * group.rank, len(items))
        chosen = range(first, min(first + PICTURES, len(items)))
        bad: list[str] = []
        with group.work("reading"):
            raws = _read(items, chosen, names, encoding, bad)
        digests = np.frombuffer(b"".join(raw.content for raw in raws.values()), np.uint8).reshape(-1, 32)
        counts = group.rows(torch.tensor([len(raws)])).tolist()
        ids = _known(gallery, group.rows(torch.from_numpy(digests.copy())), counts, group)
        with group.work("encoding"):
            seen = _encode(raws, ids[group.rank], encoding, bad)
        parts = _collect(group, counts, list(raws), ids, seen, bad, encoding.dim)
        with group.work("writing"):
            for rank, part in enumerate(parts if group.first else ()):
                write(rank, part)
            if progress is not None:
                progress(min(start + PICTURES * group.size, len(items)), len(items))


def _read(
    items: Items, chosen: range, names: Callable[[int], str], encoding: Encoding, bad: list[str]
) -> dict[int, Raw]:
    """What can be read of these items, with its hash."""
    found: dict[int, Raw] = {}
    for i in chosen:
        if items.vectors is not None:
            item: Any = items.vectors[i]
        else:
            assert items.pictures is not None
            try:
                item = items.pictures.read(i)
            except (OSError, ValueError) as error:
                bad.append(f"{names(i)} cannot be read ({getattr(error, 'strerror', None) or error})")
                continue
        raw = item_inputs.contents([item], encoding, encoding.dim)[0]
        assert isinstance(raw, Raw)
        found[i] = raw._replace(name=names(i))
    return found


def _known(gallery: Gallery | Encoding, digests: Tensor, counts: list[int], group: ProcessGroup) -> list[list[int]]:
    """Rank by rank the id that each item is enrolled under; 0 for a new one, -1 where the round has it before."""
    found = torch.zeros(0, dtype=torch.int64)
    with group.work("looking up"):
        if isinstance(gallery, Gallery):
            contents = [bytes(row) for row in digests.numpy()]
            nothing = np.zeros(0, np.float32)
            ids = gallery.known([Seen(nothing, content, "", b"") for content in contents]) if contents else []
            part = [rank for rank, count in enumerate(counts) for _ in range(count)]
            first: dict[bytes, int] = {}
            before = [first.setdefault(content, at) < at for content, at in zip(contents, part, strict=True)]
            found = torch.tensor([id or -int(again) for id, again in zip(ids, before, strict=True)], dtype=torch.int64)
    return [one.tolist() for one in torch.split(group.rows(found), counts)]


def _encode(raws: dict[int, Raw], ids: list[int], encoding: Encoding, bad: list[str]) -> list[tuple[int, Seen]]:
    """New items together, as in one process; apart from them those that the round has before, in case they are new."""
    found: dict[int, Seen] = {}
    for mark in (0, -1):
        chosen = [i for i, id in zip(raws, ids, strict=True) if id == mark]
        seen = zip(chosen, item_inputs.encoded([raws[i] for i in chosen], encoding, bad), strict=True)
        found |= {i: one for i, one in seen if one is not None}
    return sorted(found.items())


def _collect(
    group: ProcessGroup,
    counts: list[int],
    places: list[int],
    ids: list[list[int]],
    seen: list[tuple[int, Seen]],
    bad: list[str],
    dim: int,
) -> list[Part]:
    """The parts of all ranks; vectors, hashes and thumbnails as they are, the little else as JSON."""
    vectors = np.stack([one.vector for _, one in seen]) if seen else np.zeros((0, dim), np.float32)
    thumbnails = b"".join(one.thumbnail for _, one in seen)
    rows = group.rows(torch.from_numpy(vectors)).numpy()
    pixels = bytes(group.rows(_bytes(thumbnails)).numpy())
    told = [(i, one.content.hex(), one.name, len(one.thumbnail)) for i, one in seen]
    parts, row, at = [], 0, 0
    for own, (everyone, told_here, wrong) in zip(ids, group.values([places, told, bad]), strict=True):
        here: list[tuple[int, Seen]] = []
        for i, content, name, length in told_here:
            here.append((i, Seen(rows[row], bytes.fromhex(content), name, pixels[at : at + length])))
            row, at = row + 1, at + length
        parts.append(Part([(i, id) for i, id in zip(everyone, own, strict=True) if id > 0], here, wrong))
    return parts


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def label_there(gallery: Gallery, id: int) -> str | None:
    """The label a row has; None where it was removed meanwhile."""
    try:
        return gallery.get(id).label
    except MissingRow:
        return None
