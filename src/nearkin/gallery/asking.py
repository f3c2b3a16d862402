"""A whole source asked of a gallery: who is on each of its pictures, or what is to be learned from them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearkin import data
from nearkin.core.errors import EncoderChanged
from nearkin.data import groups
from nearkin.data.item_set import Items
from nearkin.data.sources import AS_BEFORE, PLAIN
from nearkin.evaluation.recognition import ITEMS, NEAREST
from nearkin.gallery import answers
from nearkin.gallery.answers import Asked, Identity
from nearkin.gallery.gallery import Gallery
from nearkin.gallery.items import Seen

__all__ = ["Answered", "answered", "calibrate_with", "identify_items", "identify_source"]
__all__ += ["load_unlabelled"]

STEP = 64  # items that are encoded together

Progress = Callable[[int, int], None]


class Answered(NamedTuple):
    """The answer to an item of a source. nearest: the name of the best candidate's nearest row, or "id N". answer is
    None for an item that cannot be read, and `why` is a sentence then."""

    name: str
    answer: Identity | None
    nearest: str = ""
    why: str = ""


def identify_source(
    gallery: Gallery,
    source: str | Path,
    *,
    far: float | None = None,
    filter: Mapping[str, Any] | None = None,
    unknown_prior: float = answers.PRIOR,
    sure: float = answers.SURE,
    strict: bool = False,
    reading: data.Reading = PLAIN,
    progress: Progress | None = None,
) -> Iterator[Answered]:
    """`Gallery.identify` for every item of a source, in its order: a folder of pictures, or what `data.load` reads.

    Items are encoded together; one that cannot be read is an answer too. reading: how the files are read, see
    `data.load`; folders are no classes here. progress: called with how many are answered, and how many there are.
    """
    asked = Asked(far, unknown_prior, sure, strict)
    asked.check()
    items = load_unlabelled(source, reading)
    yield from identify_items(gallery, source, items, filter, asked, progress)


def load_unlabelled(source: str | Path, reading: data.Reading) -> Items:
    """Every item of a source, whatever its folders are called."""
    options = {**reading.for_load(), "split_folders": AS_BEFORE, "leaf_classes": False}
    return data.load(source, labelled=False, group_column=groups.UNUSED, **options)


def identify_items(
    gallery: Gallery,
    source: str | Path,
    items: Items,
    filter: Mapping[str, Any] | None,
    asked: Asked,
    progress: Progress | None,
) -> Iterator[Answered]:
    """`identify_source` with items that are loaded already."""
    _check_kind(gallery, items, source)
    for i, name, content, seen in _seen(gallery, items, source):
        if isinstance(seen, Seen):
            try:
                yield answered(gallery, name, seen, filter, asked)
            except EncoderChanged:  # the gallery was upgraded since: encoded once more
                yield answered(gallery, name, content, filter, asked)
        else:
            yield Answered(name, None, why=seen)
        if progress is not None:
            progress(i + 1, len(items))


def calibrate_with(
    gallery: Gallery,
    source: str | Path,
    *,
    reading: data.Reading = PLAIN,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`Gallery.calibrate` with photographs of another day, in a folder per label; a folder of another name is a
    stranger's. Of more than 4,000 as many are drawn by the seed. "unreadable" has a sentence for each that was left
    out. reading: how the files are read, see `data.load`."""
    items = data.load(source, group_column=groups.UNUSED, **reading.for_load())
    if items.labels is None or not items.classes:
        raise ValueError(f"{source}: has no class labels; photographs of another day need a folder per label")
    _check_kind(gallery, items, source)
    if len(items) > ITEMS:
        items = items.take(np.sort(np.random.default_rng([seed, 7]).permutation(len(items))[:ITEMS]))
    assert items.labels is not None
    readable: list[Seen] = []
    labels, unreadable = list[str](), list[str]()
    for i, _, _, seen in _seen(gallery, items, source):
        if isinstance(seen, Seen):
            readable.append(seen._replace(thumbnail=b""))
            labels.append(items.classes[items.labels[i]])
        else:
            unreadable.append(seen)
        if progress is not None:
            progress(i + 1, len(items))
    if not readable:
        raise ValueError(f"{source}: none of its {len(items):,} items can be read; the first: {unreadable[0]}")
    return gallery.calibrate(readable, labels) | {"unreadable": unreadable}


def _check_kind(gallery: Gallery, items: Items, source: str | Path) -> None:
    if items.vectors is None:
        gallery.check_source_kind(False, str(source))
        if gallery._encoding is None:
            raise ValueError(f"{source}: has pictures, and the gallery no encoder: it takes vectors of {gallery.dim}")
    elif gallery._encoding is not None:  # without it vectors are embeddings
        gallery.check_source_kind(True, str(source))


def _seen(gallery: Gallery, items: Items, source: str | Path) -> Iterator[tuple[int, str, Any, Seen | str]]:
    """The place, name, content and embedding of each item; for one that cannot be read a sentence in place of it."""
    for start in range(0, len(items), STEP):
        positions = range(start, min(start + STEP, len(items)))
        names = {i: f"{str(source).rstrip('/')}/{items.names[i]}" for i in positions}
        contents, why = dict[int, Any](), dict[int, str]()
        for i in positions:
            try:
                contents[i] = items.vectors[i] if items.vectors is not None else items.pictures.read(i)  # type: ignore[union-attr]
            except (OSError, ValueError) as error:  # noqa: PERF203
                why[i] = f"{names[i]} cannot be read ({getattr(error, 'strerror', None) or error})"
        sentences: list[str] = []
        encoded = gallery.see(list(contents.values()), [names[i] for i in contents], sentences) if contents else []
        seen = dict(zip(contents, encoded, strict=True))
        why |= zip((i for i, one in seen.items() if one is None), sentences, strict=True)
        for i in positions:
            one = seen.get(i)
            yield i, names[i], contents.get(i), why[i] if one is None else one


def answered(gallery: Gallery, name: str, item: Any, filter: Mapping[str, Any] | None, asked: Asked) -> Answered:
    """The answer to one item."""
    answer, hits = gallery.identify_with_hits(item, NEAREST, filter=filter, asked=asked)
    if not answer.candidates:
        return Answered(name, answer)
    best = answer.candidates[0].id
    row = next((hit for hit in hits if hit.id == best), None)
    return Answered(name, answer, (row or gallery.get(best)).name or f"id {best}")
