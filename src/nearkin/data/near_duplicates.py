"""Near-duplicates across the parts of a split: pictures saved again, cropped a little, resized, or brighter.

A picture of training that is also in the test makes the test too easy. Two pictures are compared by the cosine of small
grey versions of them without their mean brightness. First every picture of a part meets every picture of the later
parts at 6 x 6 pixels; the nearest few are then compared at 16 x 16, the one with windows of the other, so that a crop
meets the part of the picture that it shows. docs/data.md has what this finds of planted copies.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks, files
from nearkin.data import cache_store

__all__ = ["THRESHOLD", "NearPairs", "find", "thumbnails", "window_similarity"]

Ints = NDArray[np.int64]
Progress = Callable[[int, int], object]
THRESHOLD = 0.98  # similarity from which on two pictures count as the same: docs/data.md
CANDIDATES = 16  # pictures of later parts that each picture is compared with in detail
LEAST = 0.6  # cosine at 6 x 6 below which they are not
SIDE, SMALL, COARSE = 32, 16, 6  # of the thumbnails, of what windows are compared at, of the search
FEW, MANY = ((1.0, 0.95, 0.9, 0.85), 3), ((1.0, 0.97, 0.94, 0.91, 0.88, 0.85), 6)  # windows: their sides, their places
WORTH = 0.88  # cosine with the best of few windows from which on many are tried
FLAT = 2.0  # grey levels of deviation below which a picture shows nothing, and is nobody's copy
_VERSION = 1  # increase when other pairs would be found: it is part of the cache file's name
_ROWS, _COLUMNS, _PAIRS, _CHUNK = 1024, 16384, 512, 512  # at a time: tens of MiB


class NearPairs(NamedTuple):
    """Pairs (P, 2) of positions, the second in a later part, and their similarity (P,), the most similar first."""

    pairs: Ints
    similarity: NDArray[np.float32]


def find(
    pixels: NDArray[np.uint8],
    parts: Sequence[Ints],
    *,
    threshold: float = THRESHOLD,
    digests: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> NearPairs:
    """Pictures of a part that are nearly in a later one.

    pixels (N, S, S, C): on disk or in memory; read once, in blocks. parts: positions, the earliest part first:
    training, validation, test. Of each picture the 16 nearest of all later parts are compared, so the list names at
    most 16 of its copies. digests (N,) of the pictures: with them the pairs are kept in the picture cache.
    progress(done, total) counts pictures, twice. Memory: 1.3 KiB per picture of these parts, and blocks of tens of MiB.
    """
    checks.between("threshold", threshold, 0, 1)
    cached = None if digests is None else _cache_name(parts, threshold, digests)
    pairs = None if cached is None else _recall(cached)
    if pairs is not None:
        return pairs
    every = np.concatenate([np.asarray(part, np.int64) for part in parts])
    total = 2 * len(every)
    thumbs = thumbnails(pixels, every, lambda done: None if progress is None else progress(done, total))
    coarse = torch.cat([_unit(_resized(part, COARSE).flatten(1)) for part in torch.split(thumbs, _CHUNK)])  # (n, 36)
    starts = np.cumsum([0, *(len(part) for part in parts)])
    found: list[tuple[Ints, NDArray[np.float32]]] = []
    for start, stop in pairwise(starts):
        for rows in _blocks(int(start), int(stop), _ROWS):
            if stop < len(every):
                found.append(_near(thumbs, coarse, rows, int(stop), threshold))
            if progress is not None:
                progress(len(every) + rows.stop, total)
    places = np.concatenate([np.empty((0, 2), np.int64), *(pairs for pairs, _ in found)])
    similarity = np.concatenate([np.empty(0, np.float32), *(value for _, value in found)])
    order = np.lexsort((places[:, 1], places[:, 0], -similarity))
    result = NearPairs(every[places[order]], similarity[order])
    if cached is not None:
        _remember(cached, result)
    return result


def thumbnails(pixels: NDArray[np.uint8], chosen: Ints, progress: Callable[[int], object] = lambda _: None) -> Tensor:
    """Grey versions of 32 x 32, (n, 32, 32) uint8; smaller pictures are enlarged."""
    thumbs = torch.empty(len(chosen), SIDE, SIDE, dtype=torch.uint8)
    for rows in _blocks(0, len(chosen), _CHUNK):
        grey = torch.from_numpy(np.take(pixels, chosen[rows], axis=0)).float().mean(3)
        thumbs[rows] = _resized(grey, SIDE).round().to(torch.uint8)
        progress(rows.stop)
    return thumbs


def window_similarity(left: Tensor, right: Tensor) -> Tensor:
    """(P,) the largest cosine of one thumbnail with a window of the other, of pairs (P, 32, 32)."""
    best = _best_window(left, right, *FEW)
    worth = (best >= WORTH).nonzero().squeeze(1)
    best[worth] = torch.maximum(best[worth], _best_window(left[worth], right[worth], *MANY))
    return best


def _best_window(left: Tensor, right: Tensor, scales: Sequence[float], places: int) -> Tensor:
    """The same with windows of these sides, at `places` positions along each axis."""
    best = torch.full((len(left),), -1.0)
    for cut, whole in ((left.float(), right), (right.float(), left)):
        target = _unit(_resized(whole, SMALL).flatten(1))  # (P, 256)
        for scale in scales:
            offsets = torch.linspace(0, 1 - scale, places if scale < 1 else 1).tolist()
            operators = [_averages(offset, scale) for offset in offsets]
            for upper in [operator @ cut for operator in operators]:  # each (P, 16, 32)
                for operator in operators:
                    view = _unit((upper @ operator.T).flatten(1))
                    best = torch.maximum(best, (view * target).sum(1))
    return best


def _averages(offset: float, scale: float) -> Tensor:
    """(16, 32): cell i is the mean of the line from offset + i scale / 16 on, over scale / 16, of its length."""
    edges = SIDE * (offset + scale * torch.arange(SMALL + 1, dtype=torch.float64) / SMALL)
    pixel = torch.arange(SIDE, dtype=torch.float64)
    overlap = torch.minimum(edges[1:, None], pixel + 1) - torch.maximum(edges[:-1, None], pixel)
    weights = overlap.clamp(min=0)
    return (weights / weights.sum(1, keepdim=True)).float()


def _near(
    thumbs: Tensor, coarse: Tensor, rows: slice, later: int, threshold: float
) -> tuple[Ints, NDArray[np.float32]]:
    """Pairs of these rows with rows from `later` on."""
    value = torch.empty(rows.stop - rows.start, 0)
    place = torch.empty(rows.stop - rows.start, 0, dtype=torch.long)
    for columns in _blocks(later, len(coarse), _COLUMNS):
        product = coarse[rows] @ coarse[columns].T
        nearest = product.topk(min(CANDIDATES, product.shape[1]), dim=1)
        value = torch.cat([value, nearest.values], 1)
        place = torch.cat([place, nearest.indices + columns.start], 1)
        if value.shape[1] > CANDIDATES:
            value, order = value.topk(CANDIDATES, dim=1)
            place = place.gather(1, order)
    row, slot = (value >= LEAST).nonzero(as_tuple=True)
    left, right = row + rows.start, place[row, slot]
    similarity = torch.cat(
        [torch.empty(0), *(window_similarity(thumbs[left[p]], thumbs[right[p]]) for p in _blocks(0, len(left), _PAIRS))]
    )
    same = similarity >= threshold
    return torch.stack([left[same], right[same]], 1).numpy(), similarity[same].numpy()


def _resized(grey: Tensor, side: int) -> Tensor:
    """(n, side, side) float: means of areas; a smaller picture is enlarged first."""
    rows = grey.float()[:, None]
    if rows.shape[-1] < side:
        rows = torch.nn.functional.interpolate(rows, size=(side, side), mode="bilinear", align_corners=False)
    return torch.nn.functional.interpolate(rows, size=(side, side), mode="area")[:, 0]


def _unit(rows: Tensor) -> Tensor:
    """Rows without their mean, of length 1; 0 where there is nothing to see."""
    centred = rows - rows.mean(1, keepdim=True)
    length = centred.norm(dim=1, keepdim=True)
    return torch.where(length > FLAT * rows.shape[1] ** 0.5, centred / length.clamp(min=1e-6), 0.0)


def _blocks(start: int, stop: int, step: int) -> Iterator[slice]:
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


# --- kept in the picture cache


def _cache_name(parts: Sequence[Ints], threshold: float, digests: Sequence[str]) -> str:
    digest = hashlib.sha256(f"{_VERSION} {threshold} {CANDIDATES}".encode())
    for part in parts:
        digest.update("\n".join(["", *(digests[i] for i in part.tolist())]).encode())
        digest.update(np.ascontiguousarray(part, np.int64).tobytes())
    return f"near-{digest.hexdigest()[:32]}.json"


def _recall(name: str) -> NearPairs | None:
    """The pairs of an earlier search; None where there was none, or its file is corrupt."""
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        content = json.loads((cache_store.folder() / name).read_text(encoding="utf-8"))
        pairs = np.array(content["pairs"], np.int64).reshape(-1, 2)
        similarity = np.array(content["similarity"], np.float32)
        if len(pairs) == len(similarity):
            return NearPairs(pairs, similarity)
    return None


def _remember(name: str, found: NearPairs) -> None:
    content: Mapping[str, Any] = {"pairs": found.pairs.tolist(), "similarity": found.similarity.tolist()}
    with suppress(OSError, RuntimeError):  # the next run searches again
        folder = cache_store.folder()
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / name, content)
