"""The gallery: enrol items under labels, then search, identify and verify."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nearkin.core import checks
from nearkin.core.errors import EncoderChanged, MissingRow, StoreUnavailable
from nearkin.data import decode as decoding
from nearkin.evaluation.retrieval.rerank_settings import Rerank
from nearkin.gallery import bridge_note, matched_parts, opening, own_calibration, results, shortlist, stored_as
from nearkin.gallery import items as item_inputs
from nearkin.gallery.items import Batch, Encoding, RawItem, Seen
from nearkin.gallery.matched_parts import Matched, RowPicture
from nearkin.gallery.mixed_search import MixedRows, Searched
from nearkin.gallery.results import Calibrator, Hit, Hits, Identity, Verification
from nearkin.gallery.schema import (
    UNLABELLED,
    Facts,
    Filter,
    KnownRows,
    Row,
    check_label,
    metadata_json,
    parse_filter,
    read_metadata,
    row_encoder,
    shortened,
    unpack,
)
from nearkin.gallery.stores import Neighbours, Report, Store
from nearkin.gallery.stores.matrix import similarities
from nearkin.models.frozen import is_encoder_name

__all__ = ["Enrolled", "Gallery"]

TIMEOUT = 30.0  # seconds a writer waits for another
VECTOR_BATCH = 4096  # per transaction
LARGE_BATCH = 1 << 26  # bytes of vectors per transaction, of a gallery whose index is on the disk
MOST_VECTORS = 131_072
PICTURE_BATCH = 256  # per transaction: encoding them takes the time
NEAREST = 50  # rows whose labels `identify` compares
Progress = Callable[[int, int], None]
T = TypeVar("T")


class Enrolled(NamedTuple):
    """ids: of all items, in order. added: how many are new. known: enrolled before; kept: those with another label."""

    ids: list[int]
    added: int
    known: int
    kept: int


class Gallery:
    """Open it with `Gallery.open`. Threads may share it, and other processes see what it writes."""

    def __init__(self, store: Store, facts: Facts, encoding: Encoding | None) -> None:
        self._store, self._encoding = store, encoding
        self._calibrator: Calibrator | None = None
        self._note = "the gallery was opened without a run, so there is only a similarity; open it with run=RUN"
        self._use(facts, encoding)

    def _use(self, facts: Facts, encoding: Encoding | None) -> None:
        """Encoder, scales and calibration, as the gallery has them now."""
        bridges = bridge_note.load(self._store, facts)
        if encoding is not None:
            info = encoding.info
            if info.fingerprint != facts.fingerprint:  # a compatible run, whose calibration is of its own rows
                self._calibrator = None
                self._note = f"the rows are of {facts.run}, {info.shown} is only compatible with it: a similarity alone"
            elif bridges is not None:
                self._calibrator, self._note = bridges.calibrator(facts)
            elif info.frozen is None:
                self._calibrator, self._note = results.load_calibration(info.run, info.fingerprint, info.short)
            else:
                self._calibrator, self._note = own_calibration.load(self._store, facts)
        self._rows: Searched = self._store if bridges is None else MixedRows(self._store, bridges.scales)
        self._encoding, self.dim, self.fingerprint = encoding, facts.dim, facts.fingerprint

    @classmethod
    def open(
        cls,
        place: str | Path,
        run: str | Path | None = None,
        *,
        dim: int | None = None,
        create: bool = True,
        timeout: float = TIMEOUT,
        device: str = "auto",
        max_pixels: int = decoding.MAX_PIXELS,
        stored: str | None = None,
    ) -> "Gallery":
        """A gallery in a file, or in PostgreSQL (postgresql://…/db, with ?gallery=NAME if there are several).

        run: the folder of a run, whose encoder encodes the items, or an encoder's name ("efficientnet-lite0"); without
        it the gallery takes vectors only. dim: of a new gallery of vectors; with a run, a length that it was trained
        for, the full one by default. A gallery that exists has its length, which the encoder takes. create: make it if
        it does not exist. timeout: seconds a writer waits for another. A gallery made with another encoder is refused,
        unless the run was trained to be compatible with that one: then it can be searched.
        stored: of a new gallery in a file, the form of its search index on the disk, for more rows than memory has room
        for: "float32", "int8", "binary" or "short:N" (the first N dimensions); by default the rows are in memory.
        """
        store, facts, encoding = opening.open_store(place, run, dim, create, timeout, device, max_pixels, stored)
        try:
            return cls(store, facts, encoding)
        except BaseException:  # a damaged calibration
            store.close()
            raise

    @property
    def place(self) -> str:
        """The file or the address of the database, without a password."""
        return self._store.where

    @property
    def row_count(self) -> int:
        """How many rows there are, without counting them."""
        facts = self._store.facts()
        return 0 if facts is None else facts.rows

    @property
    def frozen(self) -> bool:
        """Whether its encoder is a pretrained one that has learned from no label of the gallery."""
        return self._encoding is not None and self._encoding.info.frozen is not None

    @property
    def vector_batch(self) -> int:
        """Vectors per transaction: more where the index of contents has outgrown memory, and each costs a page."""
        if not getattr(self._store, "stored", None):
            return VECTOR_BATCH
        return max(VECTOR_BATCH, min(LARGE_BATCH // (4 * self.dim), MOST_VECTORS))

    # --- writing

    def enrol(
        self,
        items: Any,
        label: str | Sequence[str],
        metadata: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        *,
        names: str | Sequence[str] | None = None,
        keep: bool = False,
        progress: Progress | None = None,
    ) -> Enrolled:
        """Adds items; a new label is recognised from its first item on. When this returns, they are on the disk.

        items: a path, the bytes of an image file, a PIL picture, pixels (H, W[, C]) uint8, a vector, or a list of
        these; vectors also as (n, D). label, metadata: one for all, or one per item. names: of the items; a path is its
        own name. An enrolled item (by the hash of its content) is not added again; under another label it is an error,
        or with keep=True left as it is. Long lists are written in several transactions. `enroll` is the same method.
        """
        item_list = item_inputs.as_list(items)
        labels = _per_item("label", label, len(item_list), str)
        for text in set(labels) if all(isinstance(text, str) for text in labels) else labels:
            check_label(text)
        metas = _per_item("metadata", metadata, len(item_list), Mapping | None)
        if isinstance(metadata, Mapping):
            metadata_json(metadata)  # before anything is encoded
        all_names = _per_item("names", names, len(item_list), str | None)
        self._check_writable()
        ids: list[int] = []
        added = known = kept = 0
        while (start := len(ids)) < len(item_list):
            size = self.vector_batch if item_inputs.is_embedding(item_list[start], self._encoding) else PICTURE_BATCH
            part = slice(start, min(start + size, len(item_list)))
            batch = self._enrol_batch(Batch(item_list[part], labels[part], metas[part], all_names[part], keep))
            ids += batch.ids
            added, known, kept = added + batch.added, known + batch.known, kept + batch.kept
            if progress is not None:
                progress(part.stop, len(item_list))
        return Enrolled(ids, added, known, kept)

    enroll = enrol

    def _enrol_batch(self, batch: Batch, known: KnownRows | None = None) -> Enrolled:
        """One transaction; known: see `items.enrol_batch`."""
        self._check_writable()
        try:
            rows = item_inputs.enrol_batch(self._store, self._encoding, self.dim, batch, known)
        except EncoderChanged:
            self._follow()
            if any(isinstance(item, Seen) for item in batch.items):
                raise
            rows = item_inputs.enrol_batch(self._store, self._encoding, self.dim, batch, known)
        added = sum(row.new for row in rows)
        kept = sum(row.label != label for row, label in zip(rows, batch.labels, strict=True))
        return Enrolled([row.id for row in rows], added, len(rows) - added, kept)

    def remove(self, ids: int | Sequence[int]) -> int:
        """Removes rows; returns how many of them existed."""
        return self._store.remove(_checked_ids(ids))

    def relabel(self, ids: int | Sequence[int], label: str) -> int:
        """Changes the label of rows; returns how many of them existed."""
        return self._store.relabel(_checked_ids(ids), check_label(label))

    # --- reading

    def see(
        self, items: Any, names: Sequence[str] | None = None, unreadable: list[str] | None = None
    ) -> list[Seen | None]:
        """Encodes items together; every other method takes the result in place of an item.

        unreadable: a list that gets a sentence for each picture that cannot be read, which is None in the result;
        without it the first of them is a ValueError.
        """
        return item_inputs.encode_items(self._hash(items, names), self._encoding, unreadable)

    def decode(self, items: Any, names: Sequence[str] | None = None) -> list[Any]:
        """Decodes pictures without the encoder; `see` and the other methods take the result in place of an item.

        The first that cannot be read is a ValueError.
        """
        return item_inputs.decode_items(self._hash(items, names), self._encoding)

    def search(
        self,
        item: Any,
        k: int = 10,
        filter: Mapping[str, Any] | None = None,
        *,
        rerank: Rerank | str | None = None,
        exact: bool = False,
    ) -> Hits:
        """The k nearest rows, nearest first, ties by id.

        filter: {"label": …, "colour": …}; every key must match, of a list any value. rerank: `evaluation.KReciprocal`,
        `AlphaQE` or `DBA`, or a name as "k-reciprocal" or "k-reciprocal:k1=20": the rows in the order after re-ranking,
        with their cosines as they were. Without settings they follow the median number of rows per label. exact:
        without an approximate index, which may take long; the result's `proved` and `recall` tell what an answer is.
        """
        checks.integer("k", k, 1)
        if exact and rerank is not None:
            raise ValueError("exact must be False with rerank, which orders a shortlist; got True")
        parsed = parse_filter(filter)
        method = None if rerank is None else shortlist.method_for(rerank, self._store.label_sizes())

        def found(seen: Seen) -> Hits:
            if method is None:
                rows = stored_as.nearest(self._rows, seen.vector, k, parsed, exact)
            else:
                rows = shortlist.search(self._rows, seen.vector, k, parsed, method, self.dim)
            hits = Hits(_hit(row, near) for row, near in rows)
            if isinstance(rows, Neighbours):
                hits.proved, hits.recall = rows.proved, rows.recall
            return hits

        return self._in_space(item, found)[1]

    def identify(self, item: Any, *, far: float | None = None, filter: Mapping[str, Any] | None = None) -> Identity:
        """The label of an item with a calibrated confidence, or unknown: no enrolled label is likelier.

        far: the largest share of queries of classes that are not enrolled which may be taken for one that is (per
        query, however many labels there are); refused where the calibration cannot guarantee it. By default the
        likeliest answer is returned, and its `far` bounds that share. An item that is enrolled itself is always known.
        Without a calibration the nearest label is returned with its similarity only, and `note` says so.
        """
        return self.identify_with_hits(item, 0, far=far, filter=filter)[0]

    def identify_with_hits(
        self, item: Any, k: int, *, far: float | None = None, filter: Mapping[str, Any] | None = None
    ) -> tuple[Identity, list[Hit]]:
        """`identify` and the k hits of `search`, from one search."""
        checks.integer("k", k, 0)
        parsed = parse_filter(filter)
        seen, neighbours = self._in_space(item, lambda seen: self._rows.nearest(seen.vector, max(NEAREST, k), parsed))
        neighbours = self._with_itself(neighbours, seen, parsed)
        hits = [_hit(row, near) for row, near in neighbours]
        nearest = [hit for hit in hits[:NEAREST] if hit.label != UNLABELLED]
        if hits and not nearest:
            note = "none of the nearest items has a label, so there are only similarities"
            return results.identify_unlabelled(hits[0], note, far)._replace(quality=seen.quality), hits[:k]
        if self._calibrator is None:
            answer = results.identify_uncalibrated(nearest, self._note, far)
            return answer._replace(quality=seen.quality), hits[:k]
        only = None if parsed is None or parsed.labels is None else set(parsed.labels)
        counts = self._store.counts_of(list({hit.label for hit in nearest} | (only or {UNLABELLED})))
        if only is None:
            sizes = Counter(self._store.label_sizes()) - Counter([counts.pop(UNLABELLED, 0)])
        else:
            sizes = Counter(counts.get(label, 1) for label in only - {UNLABELLED})
        same_id = next((row.id for row, _ in neighbours[:NEAREST] if row.content == seen.content), None)
        answer = self._calibrator.identify(nearest, sizes, far, counts, same_id)
        return answer._replace(quality=seen.quality), hits[:k]

    def verify(self, a: Any, b: Any, *, far: float | None = None) -> Verification:
        """Whether two items are the same, how probable that is, and the FAR (per pair) of that decision.

        far: 0.001 by default, or the strictest of 0.1, 0.01, … that the calibration can guarantee.
        """
        first, second = item_inputs.as_list(a), item_inputs.as_list(b)
        if len(first) != 1 or len(second) != 1:
            raise ValueError(f"verify takes two items, got {len(first)} and {len(second)}")
        left, right = self.see([first[0], second[0]])
        assert left is not None and right is not None
        return results.verify_items(self._calibrator, self._note, left, right, far)

    def explain(self, item: Any, id: int, pictures: Sequence[tuple[Any, str]] | None = None) -> Matched:
        """Which part of a picture and of a row matched: a heat map over each, whose sum is the similarity.

        The picture of the row is its original, where that still is at its path and embeds as it did when it was
        enrolled; else its thumbnail, and `note` says so. pictures: those of `row_pictures` and their sources, as
        `decode` returns them.
        """
        matched_parts.check_takes_pictures(self._encoding)
        assert self._encoding is not None
        (decoded,) = self.decode([item])
        return matched_parts.explain_row(self._encoding, self._store, decoded, _checked_ids(id)[0], pictures)

    def row_pictures(self, id: int) -> list[RowPicture]:
        """The files from which the picture of a row can be read, the best first; a `NoPicture` where there is none."""
        return matched_parts.row_pictures(self._store, _checked_ids(id)[0])

    def get(self, id: int) -> Hit:
        """A row by its id; its similarity is 1, that with itself."""
        rows = self._store.rows(_checked_ids(id))
        if id not in rows:
            raise MissingRow(id)
        return _hit(rows[id], 1.0)

    def thumbnail(self, id: int) -> bytes:
        """PNG or JPEG; empty where there is none."""
        return self._store.thumbnail(_checked_ids(id)[0])

    def vectors(self, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """(n, D) of these rows."""
        rows = self._store.rows(_checked_ids(ids))
        if missing := [i for i in ids if i not in rows]:
            raise MissingRow(missing[0])
        return unpack([rows[i].vector for i in ids], self.dim)

    def rows(self) -> Iterator[tuple[Hit, np.ndarray[Any, np.dtype[np.float32]]]]:
        """Every undamaged row with its vector, by id."""
        for row in self._store.scan():
            yield _hit(row, 1.0), unpack([row.vector], self.dim)[0]

    def labels(self) -> dict[str, int]:
        """Rows per label."""
        return self._store.counts()

    def known(self, items: Any) -> list[int | None]:
        """The id of each item that is enrolled, by the hash of its content, else None; nothing is encoded."""
        hashed = self._hash(items)
        rows = self._store.look_up([item.content for item in hashed])
        return [rows[item.content][0] if item.content in rows else None for item in hashed]

    # --- maintenance

    def stats(self) -> dict[str, Any]:
        """Size, encoder, calibration, index and damage, as JSON has it."""
        facts, counts = self._store.facts(), self._store.counts()
        assert facts is not None
        calibrator = self._calibrator or self._calibrator_of(facts)
        return {
            "place": self._store.where,
            "store": self._store.kind,
            "rows": sum(counts.values()),
            "labels": len(counts),
            "dim": facts.dim,
            "encoder": facts.fingerprint,
            "run": facts.run,
            "sources": facts.sources,
            "calibrated": calibrator is not None,
            "calibration_classes": None if calibrator is None else calibrator.classes,
            "fars": [] if calibrator is None else calibrator.fars,
            "index": self._store.index_state or opening.describe_index(facts),
            **getattr(self._store, "index_figures", {}),
            "damaged": sorted(self._store.damaged),
            "lost": self._store.lost,
            "bridged": self._store.encoders() if bridge_note.load(self._store, facts) is not None else {},
        }

    def export(self, path: str | Path, progress: Progress | None = None) -> int:
        """Writes all rows to .npz, .safetensors, .parquet, .jsonl or .faiss; returns how many: see `gallery.export`."""
        from nearkin.gallery import export

        return export.write(self, Path(path), progress)

    def warm(self, progress: Progress | None = None) -> None:
        """Loads everything a search needs; beyond 100,000 rows builds the search index if it is not up to date."""
        self._store.warm(progress)

    def reindex(self, progress: Progress | None = None, filter_keys: Sequence[str] | None = None) -> None:
        """Rebuilds the search index. filter_keys: in PostgreSQL keys of the metadata, or "label", whose frequent values
        get indexes of their own, now and later; an empty list removes these."""
        self._store.reindex(progress, filter_keys)

    def store_as(self, form: str | None, progress: Progress | None = None) -> None:
        """Changes the form of the search index, as `stored` of `Gallery.open`; None: the rows in memory. Builds it."""
        stored_as.store_as(self._store, form, self.dim, progress)

    def check(self, progress: Progress | None = None) -> Report:
        """Reads everything and verifies every checksum."""
        return self._store.check(progress)

    def repair(self) -> tuple[int, Any]:
        """Removes damaged rows; returns how many rows are left, and where the previous state is kept."""
        return self._store.repair()

    def vacuum(self) -> tuple[int, int]:
        """Frees the space of removed rows; returns the bytes before and after.

        A file becomes smaller, and needs its size again in free space meanwhile. PostgreSQL reuses the space for later
        rows. Others read and write on; a writer of a file waits.
        """
        return self._store.vacuum()

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> "Gallery":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- internal

    def _hash(self, items: Any, names: Sequence[str] | None = None) -> list[Seen | RawItem]:
        hashed = item_inputs.hash_items(item_inputs.as_list(items), self._encoding, self.dim)
        all_names = _per_item("names", names, len(hashed), str | None)
        return [
            item if name is None else item._replace(name=name) for item, name in zip(hashed, all_names, strict=True)
        ]

    def _one(self, item: Any) -> Seen:
        item_list = item_inputs.as_list(item)
        if len(item_list) != 1:
            raise ValueError(f"item must be one item, got {len(item_list)}")
        seen = self.see(item_list)[0]
        assert seen is not None
        return seen

    def _in_space(self, item: Any, use: Callable[[Seen], T]) -> tuple[Seen, T]:
        """The item, and what a search with it returns; both again where the gallery was upgraded to another encoder
        meanwhile. An item that was encoded before that is an `EncoderChanged`."""
        for again in (False, True):
            seen = self._one(item)
            try:
                own = self.fingerprint if self._encoding is None else self._encoding.info.fingerprint
                if seen.encoder not in (None, own):
                    raise EncoderChanged(self._store.where)
                result = use(seen)
                if self.fingerprint not in (None, self._store.fingerprint):
                    raise EncoderChanged(self._store.where)
                return seen, result
            except EncoderChanged:
                self._follow()
                if again or isinstance(item, Seen):
                    raise
        raise AssertionError

    def _with_itself(
        self, neighbours: list[tuple[Row, float]], seen: Seen, filter: Filter | None
    ) -> list[tuple[Row, float]]:
        """With the row of this very item, where an index has not found it: an enrolled item is always known."""
        known = self._store.look_up([seen.content])
        if seen.content not in known or any(row.content == seen.content for row, _ in neighbours):
            return neighbours
        row = self._store.rows([known[seen.content][0]]).get(known[seen.content][0])
        if row is None or (filter is not None and not filter.passes(row)):
            return neighbours
        near = float(similarities(unpack([row.vector], len(seen.vector)), seen.vector)[0])
        near = self._rows.similarity(row, near) if isinstance(self._rows, MixedRows) else near
        return sorted([*neighbours, (row, near)], key=lambda one: (-one[1], one[0].id))

    def _follow(self) -> None:
        """Takes the encoder that the gallery has now, after another process has upgraded it."""
        facts = self._store.facts()
        assert facts is not None
        if facts.fingerprint == self.fingerprint:
            return
        if self._encoding is None or facts.run is None:
            raise StoreUnavailable(f"{self._store.where}: was upgraded to another encoder; open it again")
        encoding = Encoding(facts.run, self._encoding.device.type, self._encoding.max_pixels)
        if facts.dim in encoding.info.lengths:
            encoding.shorten(facts.dim)
        if encoding.info.fingerprint != facts.fingerprint:
            raise StoreUnavailable(f"{self._store.where}: was upgraded to another encoder; open it again with its run")
        self._use(facts, encoding)

    def check_source_kind(self, vectors: bool, source: str) -> None:
        """Raises where a source has vectors and the encoder takes pictures, or the reverse."""
        if self._encoding is not None and self._encoding.takes_pictures == vectors:
            kind = "pictures" if vectors else "vectors"
            raise ValueError(f"{source}: the run's encoder takes {kind}, the source has the other kind")

    def use_calibration(self, calibrator: Calibrator | None, note: str) -> None:
        """Answers by this calibration from now on; note: why there is none."""
        self._calibrator, self._note = calibrator, note

    def calibrate(self) -> dict[str, Any]:
        """Calibrates the gallery of a frozen encoder by its own labels, each judged by the others; see `stats`."""
        return own_calibration.calibrate_gallery(self)

    @property
    def calibration_is_current(self) -> bool:
        """Whether there is a calibration by the labels as they are now."""
        facts = self._store.facts()
        return facts is not None and own_calibration.is_current(self._store, facts)

    def calibrate_if_changed(self) -> str:
        """`calibrate` where rows have changed since; returns why that could not be, or ""."""
        if self.calibration_is_current:
            return ""
        try:
            self.calibrate()
        except ValueError as error:
            self._calibrator, self._note = None, f"not calibrated, so there is only a similarity: {error}"
            return self._note
        return ""

    def similarity_at(self, far: float) -> float:
        """The similarity from which on the calibration holds this false-accept rate per pair."""
        facts = self._store.facts()
        calibrator = self._calibrator or (None if facts is None else self._calibrator_of(facts))
        if calibrator is None:
            raise ValueError(f"far needs a calibration, and {self._store.where} has none; give a similarity instead")
        return calibrator.similarity_at(far)

    def remember(self, source: str) -> None:
        """Records a source that is enrolled from; the message about another encoder names it."""
        self._store.add([], True, [source])

    def _calibrator_of(self, facts: Facts) -> Calibrator | None:
        """The calibration of a gallery that is opened without its encoder, if it exists and is of that encoder."""
        if facts.run is None or facts.fingerprint is None:
            return None
        if (bridges := bridge_note.load(self._store, facts)) is not None:
            return bridges.calibrator(facts)[0]
        try:
            if is_encoder_name(facts.run):
                return own_calibration.load(self._store, facts)[0]
            of_length = (results.load_calibration(Path(facts.run), facts.fingerprint, n)[0] for n in (None, facts.dim))
            return next((calibrator for calibrator in of_length if calibrator is not None), None)
        except ValueError:
            return None

    def _check_writable(self) -> None:
        if self.fingerprint is not None and self._encoding is None:
            raise ValueError(
                f"{self._store.where}: its items came through an encoder; open it with run=RUN to enrol more"
            )
        if self._encoding is not None and self._encoding.info.fingerprint != self.fingerprint:
            raise ValueError(
                f"{self._store.where}: {self._encoding.info.shown} is compatible with the encoder of its rows: it can "
                f"search them, not enrol among them"
            )


def _hit(row: Row, similarity: float) -> Hit:
    metadata, quality = read_metadata(row.metadata)
    return Hit(row.id, row.label, similarity, row.name, metadata, quality, bool(row_encoder(row.metadata)))


def _checked_ids(ids: Any) -> list[int]:
    id_list = [ids] if isinstance(ids, int | np.integer) else list(ids)
    for id in id_list:
        checks.integer("id", int(id) if isinstance(id, np.integer) else id, 1)
    if any(id >= 2**63 for id in id_list):
        raise ValueError(f"id must be < 2^63, got {max(id_list)}")
    return [int(id) for id in id_list]


def _per_item(name: str, value: Any, count: int, kind: Any) -> list[Any]:
    """One for all, or one per item."""
    if isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{name} must be one for all items or a list of one per item, got {shortened(value)}")
    if len(value) != count:
        raise ValueError(f"{name} must have one entry per item: {count} items, {len(value)} entries")
    return list(value)
