"""Enrols a source in batches that are durable as soon as they are written: an interrupted enrolment can be repeated.

Several ranks share the work: each reads, decodes and encodes its batches, and rank 0 alone opens the gallery, looks the
items up by their hashes and writes what the ranks have encoded, in the order of the source. The gallery is then row for
row what one process makes: the batches are the same, and enrolled items are not encoded again.
"""

import io
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from nearkin import data
from nearkin.core.errors import RankFailed
from nearkin.data import groups
from nearkin.data.folders import WITHOUT
from nearkin.data.item_set import Items
from nearkin.data.sources import PLAIN
from nearkin.dist.group import ProcessGroup
from nearkin.gallery.gallery import PICTURE_BATCH, Enrolled, Gallery
from nearkin.gallery.items import Batch, Encoding, RawItem, Seen, encode_items, hash_items
from nearkin.gallery.schema import UNLABELLED, KnownRows, check_label, metadata_json

__all__ = ["Counted", "enrol_source", "enroll_source"]

Progress = Callable[[int, int], None]
_Items = dict[int, Seen | RawItem]  # by position in the source
_Batch = dict[int, Seen | RawItem | None]  # None: unreadable


class Counted(NamedTuple):
    """The result for a source, as in `Enrolled`. unreadable: a sentence for each picture that was left out."""

    added: int
    known: int
    kept: int
    unreadable: list[str]


class _Source(NamedTuple):
    """A source and what is stored with its items; the label of each by its position."""

    name: str
    items: Items
    labels: list[str]
    metadata: dict[str, Any] | None
    skip_unreadable: bool

    def item_name(self, i: int) -> str:
        return f"{self.name.rstrip('/')}/{self.items.names[i]}"

    def hashed(self, positions: range, encoding: Encoding | None, dim: int, unreadable: list[str]) -> _Items:
        """The readable ones of these items with their hashes, by position."""
        read: Callable[[int], Any]
        if self.items.vectors is not None:
            read = self.items.vectors.__getitem__
        else:
            assert self.items.pictures is not None
            read = self.items.pictures.read
        contents: dict[int, Any] = {}
        for i in positions:
            try:
                contents[i] = read(i)
            except (OSError, ValueError) as error:  # noqa: PERF203
                reason = getattr(error, "strerror", None) or error
                unreadable.append(f"{self.item_name(i)} cannot be read ({reason})")
        hashed = zip(contents, hash_items(list(contents.values()), encoding, dim), strict=True)
        return {i: item._replace(name=self.item_name(i)) for i, item in hashed}

    def batch(self, items: _Items) -> Batch:
        names: list[str | None] = [self.item_name(i) for i in items]
        return Batch(list(items.values()), [self.labels[i] for i in items], [self.metadata] * len(items), names, True)

    def refusal(self, unreadable: list[str]) -> str | None:
        """The message about the first unreadable item, unless they are skipped."""
        if not unreadable or self.skip_unreadable:
            return None
        return f"{unreadable[0]}. Use --skip-unreadable to leave such files out; what was enrolled before it stays"


def enrol_source(
    gallery: Gallery | Encoding,
    source: str,
    *,
    root: str | None = None,
    label: str | None = None,
    metadata: dict[str, Any] | None = None,
    skip_unreadable: bool = False,
    unlabelled: bool = False,
    items: Items | None = None,
    step: int | None = None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
    reading: data.Reading = PLAIN,
) -> Counted:
    """Enrols every item of a source under its class, or all under `label`. `enroll_source` is the same function.

    unlabelled: takes a source without classes; its items are found by `search`, and `identify` answers with none.
    items: of the source, where they are loaded already. step: items per transaction, after which `progress` is called;
    by default 256 pictures or 4,096 vectors. Items that are enrolled already, by the hash of their content, are neither
    encoded nor added again. group: the processes that share the reading and encoding; rank 0 passes the gallery and
    writes, the others pass an `Encoding` of its run, and all return the same counts. reading: how the files are
    read, see `data.load`.
    """
    if items is None:
        items = data.load(source, root=root, labelled=False, group_column=groups.UNUSED, **reading.for_load())
        if label is None and unlabelled:
            warn_without_classes(items)
    if label is not None:
        labels = [label] * len(items)
    elif items.labels is None or not items.classes:
        if not unlabelled:
            why = items.note if WITHOUT in items.note else f"{source}: its items have no classes"
            raise ValueError(f"{why}; choose the label to enrol them under: --label (--label {UNLABELLED}: none)")
        labels = [UNLABELLED] * len(items)
    else:
        labels = [items.classes[number] for number in items.labels]
    for text in set(labels):
        check_label(text)
    metadata_json(metadata)
    described = _Source(source, items, labels, metadata, skip_unreadable)
    shared = group is not None and group.size > 1
    if not shared and not isinstance(gallery, Gallery):
        raise TypeError(f"gallery must be a Gallery where one process works alone, got {type(gallery).__name__}")
    if group is not None and shared and isinstance(gallery, Gallery) != group.first:
        raise TypeError(f"gallery must be a Gallery on rank 0 and an Encoding on the others, got {gallery!r}")
    if isinstance(gallery, Gallery):
        gallery.check_source_kind(items.vectors is not None, source)
        gallery.remember(source)
    if group is not None and shared:
        return _enrol_shared(gallery, described, progress, group)
    assert isinstance(gallery, Gallery)
    return _enrol_alone(gallery, described, progress, step)


enroll_source = enrol_source


def warn_without_classes(items: Items) -> None:
    """Says that class folders are not read, and why."""
    if WITHOUT in items.note:
        warnings.warn(items.note, RuntimeWarning, stacklevel=3)


def _enrol_alone(gallery: Gallery, source: _Source, progress: Progress | None, step: int | None) -> Counted:
    counts, size, vectors = Counted(0, 0, 0, []), len(source.items), source.items.vectors
    step = step or (PICTURE_BATCH if vectors is None else gallery.vector_batch)
    for start in range(0, size, step):
        positions = range(start, min(start + step, size))
        if vectors is not None:
            labels, names = source.labels[start : positions.stop], [source.item_name(i) for i in positions]
            rows = list(vectors[start : positions.stop])
            counts = _sum(counts, gallery.enrol(rows, labels, source.metadata, names=names, keep=True))
        else:
            items = source.hashed(positions, gallery._encoding, gallery.dim, counts.unreadable)
            known = gallery._store.look_up([item.content for item in items.values()])
            new = [i for i, item in items.items() if item.content not in known]
            encoded = encode_items([items[i] for i in new], gallery._encoding, counts.unreadable)
            if refusal := source.refusal(counts.unreadable):
                raise ValueError(refusal)
            batch: _Batch = {**items, **dict(zip(new, encoded, strict=True))}
            counts = _write(gallery, source, batch, known, counts)
        if progress is not None:
            progress(positions.stop, size)
    return counts


def _write(gallery: Gallery, source: _Source, items: _Batch, known: KnownRows, counts: Counted) -> Counted:
    """Adds the items of a batch, without those that are None; those that are known are only counted."""
    readable = {i: item for i, item in items.items() if item is not None}
    return _sum(counts, gallery._enrol_batch(source.batch(readable), known)) if readable else counts


def _sum(counts: Counted, batch: Enrolled) -> Counted:
    added, known, kept = counts.added + batch.added, counts.known + batch.known, counts.kept + batch.kept
    return counts._replace(added=added, known=known, kept=kept)


# --- several ranks


NEW, REPEATED, KNOWN = 0, -1, 1  # not enrolled; nor this one, but an earlier rank of the round has it too; enrolled


def _enrol_shared(
    gallery: Gallery | Encoding, source: _Source, progress: Progress | None, group: ProcessGroup
) -> Counted:
    """In rounds of one batch per rank; rank 0 writes the batches in order."""
    encoding = gallery if isinstance(gallery, Encoding) else gallery._encoding
    if encoding is None:
        raise ValueError("ranks share the encoding, and this gallery was opened without a run; enrol in one process")
    encoding.shorten(group.values(encoding.dim)[0])  # rank 0 knows the length of the gallery
    counts, size = Counted(0, 0, 0, []), len(source.items)
    for start in range(0, size, PICTURE_BATCH * group.size):
        first = min(start + PICTURE_BATCH * group.rank, size)
        unreadable: list[str] = []
        with group.work("reading"):
            positions = range(first, min(first + PICTURE_BATCH, size))
            items = source.hashed(positions, encoding, encoding.dim, unreadable)
        contents = _gather_contents(items, group)
        marks, known = _look_up(gallery, contents, group)
        with group.work("encoding"):
            encoded = _encode(items, marks[group.rank], encoding, unreadable)
        batches = _gather_batches(items, contents, marks, encoded, unreadable, encoding.dim, group)
        with group.work("writing"):
            for rank, (batch, sentences) in enumerate(batches if isinstance(gallery, Gallery) else ()):
                assert isinstance(gallery, Gallery)
                if refusal := source.refusal(sentences):
                    raise RankFailed(f"rank {rank}: {refusal}")
                counts.unreadable.extend(sentences)
                counts = _write(gallery, source, batch, known, counts)
            if progress is not None:
                progress(min(start + PICTURE_BATCH * group.size, size), size)
    return Counted(*group.values(list(counts))[0])


def _gather_contents(items: _Items, group: ProcessGroup) -> list[list[bytes]]:
    """The hashes of the items of every rank."""
    digests = np.frombuffer(b"".join(item.content for item in items.values()), np.uint8).reshape(-1, 32)
    lengths = group.rows(torch.tensor([len(items)])).tolist()
    parts = torch.split(group.rows(torch.from_numpy(digests.copy())), lengths)
    return [[bytes(row) for row in part.numpy()] for part in parts]


def _look_up(
    gallery: Gallery | Encoding, contents: list[list[bytes]], group: ProcessGroup
) -> tuple[list[list[int]], KnownRows]:
    """Rank by rank NEW, REPEATED or KNOWN for each item; on rank 0 also the enrolled rows."""
    marks, known = torch.zeros(0, dtype=torch.int64), KnownRows()
    with group.work("looking up"):
        if isinstance(gallery, Gallery):
            known = gallery._store.look_up([content for part in contents for content in part])
            first_rank: dict[bytes, int] = {}
            flat = [
                KNOWN if content in known else REPEATED if first_rank.setdefault(content, rank) < rank else NEW
                for rank, part in enumerate(contents)
                for content in part
            ]
            marks = torch.tensor(flat, dtype=torch.int64)
    return [part.tolist() for part in torch.split(group.rows(marks), [len(part) for part in contents])], known


def _encode(items: _Items, marks: list[int], encoding: Encoding, unreadable: list[str]) -> dict[int, Seen]:
    """New items together, as in one process; then repeated ones, in case the earlier one is unreadable."""
    encoded: dict[int, Seen] = {}
    for mark in (NEW, REPEATED):
        chosen = [i for i, item_mark in zip(items, marks, strict=True) if item_mark == mark]
        seen = encode_items([items[i] for i in chosen], encoding, unreadable)
        encoded |= {i: item for i, item in zip(chosen, seen, strict=True) if item is not None}
    return dict(sorted(encoded.items()))


def _gather_batches(
    items: _Items,
    contents: list[list[bytes]],
    marks: list[list[int]],
    encoded: dict[int, Seen],
    unreadable: list[str],
    dim: int,
    group: ProcessGroup,
) -> list[tuple[_Batch, list[str]]]:
    """The batch and the unreadable items of every rank; vectors and thumbnails travel as bytes, the rest as JSON."""
    vectors = np.stack([item.vector for item in encoded.values()]) if encoded else np.zeros((0, dim), np.float32)
    thumbnails = np.frombuffer(b"".join(item.thumbnail for item in encoded.values()), np.uint8)
    all_vectors = iter(group.rows(torch.from_numpy(vectors)).numpy())
    all_thumbnails = io.BytesIO(group.rows(torch.from_numpy(thumbnails.copy())).numpy().tobytes())
    lengths = [(i, len(item.thumbnail), item.quality) for i, item in encoded.items()]
    batches = []
    for rank, (positions, sizes, sentences) in enumerate(group.values([list(items), lengths, unreadable])):
        content_of = dict(zip(positions, contents[rank], strict=True))
        batch: _Batch = {
            i: RawItem(content_of[i], "") if mark == KNOWN else None
            for i, mark in zip(positions, marks[rank], strict=True)
        }
        for i, length, quality in sizes:
            batch[i] = Seen(next(all_vectors), content_of[i], "", all_thumbnails.read(length), quality)
        batches.append((batch, sentences))
    return batches
