"""The gallery: enrol items under labels, then search, identify and verify."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nearkin.core import checks
from nearkin.core.errors import EncoderChanged, MissingRow, StoreUnavailable
from nearkin.data import decode as decoding
from nearkin.evaluation.recognition import NEAREST
from nearkin.evaluation.retrieval.rerank_settings import Rerank
from nearkin.gallery import (
    answers,
    bridge_note,
    matched_parts,
    opening,
    own_calibration,
    recognition,
    results,
    shortlist,
    stored_as,
)
from nearkin.gallery import items as item_inputs
from nearkin.gallery.answers import Asked, Identity
from nearkin.gallery.items import Batch, Encoding, RawItem, Seen
from nearkin.gallery.label_scores import LabelScorer
from nearkin.gallery.matched_parts import Matched, RowPicture
from nearkin.gallery.mixed_search import MixedRows, Searched
from nearkin.gallery.recognition import Recognition
from nearkin.gallery.results import Calibrator, Hit, Hits, Verification, hit_of
from nearkin.gallery.schema import (
    UNLABELLED,
    Facts,
    Filter,
    KnownRows,
    Row,
    check_label,
    metadata_json,
    parse_filter,
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
AT_ONCE = 1 << 22  # numbers of a gallery, from which its labels are learned within a second or two
SAME_ITEM = 1 - 1e-6  # similarity from which on two embeddings are of one and the same item
NOTHING_ENROLLED = "nothing is enrolled"
SPARSE = 10  # ids per row, beyond which a sample reads all rows and not ids that are mostly gone
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
        self._learned: Recognition | None = None
        self._labels = LabelScorer(store)
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
            hits = Hits(hit_of(row, near) for row, near in rows)
            if isinstance(rows, Neighbours):
                hits.proved, hits.recall = rows.proved, rows.recall
            return hits

        return self._in_space(item, found)[1]

    def identify(
        self,
        item: Any,
        *,
        far: float | None = None,
        filter: Mapping[str, Any] | None = None,
        unknown_prior: float = answers.PRIOR,
        sure: float = answers.SURE,
        strict: bool = False,
    ) -> Identity:
        """Who an item is: the best candidate always, how probable it is, and a verdict: named, unsure or unknown.

        The label is named from the probability `sure` on. far: the share of strangers, queries of labels that are not
        enrolled, that may be named: its threshold alone decides then, and the answer's `far` has the expected share and
        its bound. strict: the bound must be within `far`, or that is refused. unknown_prior: the share of strangers
        among the queries; it moves probabilities, not `far`. An item that is enrolled itself is always known. Without
        probabilities (too few labels, or not calibrated) the candidates have similarities only, and `note` says why.
        """
        asked = Asked(far, unknown_prior, sure, strict)
        return self.identify_with_hits(item, 0, filter=filter, asked=asked)[0]

    def identify_with_hits(
        self, item: Any, k: int, *, filter: Mapping[str, Any] | None = None, asked: Asked | None = None
    ) -> tuple[Identity, list[Hit]]:
        """`identify` and the k hits of `search`, from one search."""
        checks.integer("k", k, 0)
        asked = asked or Asked()
        asked.check()
        parsed = parse_filter(filter)
        seen, neighbours = self._in_space(item, lambda seen: self._rows.nearest(seen.vector, max(NEAREST, k), parsed))
        neighbours = self._with_itself(neighbours, seen, parsed)
        hits = [hit_of(row, near) for row, near in neighbours]
        nearest = [hit for hit in hits[:NEAREST] if hit.label != UNLABELLED]
        learned, note = self._recognition()
        if not nearest:
            note = "none of the nearest items has a label, so there are only similarities" if hits else NOTHING_ENROLLED
        same_id = next((row.id for row, _ in neighbours[:NEAREST] if row.content == seen.content), None)
        same = {hit.label for hit in nearest if hit.id == same_id} or {
            hit.label for hit in nearest if hit.similarity >= SAME_ITEM
        }
        itself = next(iter(same)) if len(same) == 1 else None
        if learned is None or not nearest:
            answer = answers.by_pairs(nearest, note, asked, self._calibrator, itself)
            if answer.similarity is None and hits:
                answer = answer._replace(similarity=hits[0].similarity)
            return answer._replace(quality=seen.quality), hits[:k]
        answer = self._labels.answer(self._rows, learned, seen.vector, nearest, parsed, asked, itself)
        note = "; ".join(text for text in (answer.note, note) if text)
        return answer._replace(quality=seen.quality, classes=learned.labels, note=note), hits[:k]

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
        return hit_of(rows[id], 1.0)

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
            yield hit_of(row, 1.0), unpack([row.vector], self.dim)[0]

    def sample(self, most: int) -> Iterator[tuple[Hit, np.ndarray[Any, np.dtype[np.float32]]]]:
        """About `most` rows at most, evenly over the ids, as `rows` gives them; the others are not read."""
        checks.integer("most", most, 1)
        facts = self._store.facts()
        assert facts is not None
        step, last = max(1, -(-facts.rows // most)), facts.next_id - 1
        if step == 1 or last > SPARSE * facts.rows:
            yield from (row for n, row in enumerate(self.rows()) if n % step == 0)
            return
        ids = np.arange(1, last + 1, step)
        if last > facts.rows:  # rows were removed, perhaps every other one
            ids += np.random.default_rng(0).integers(0, step, len(ids))
        for start in range(0, len(ids), PICTURE_BATCH):
            rows = self._store.rows(ids[start : start + PICTURE_BATCH].tolist())
            for row in sorted(rows.values()):
                yield hit_of(row, 1.0), unpack([row.vector], self.dim)[0]

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

    def calibrate(self, items: Any = None, labels: Sequence[str] | None = None) -> dict[str, Any]:
        """Learns from the gallery's own labels what `identify` answers; and what `verify` needs of a frozen encoder.

        items, labels: photographs of another day, under the labels that they have in the gallery, or others for
        strangers. They are asked in place of the gallery's own rows, which resemble each other more than new ones do.
        Returns what was learned, as JSON has it.
        """
        facts, asked = self._facts(), None
        if items is not None:
            seen = [one for one in self.see(items, unreadable=[]) if one is not None]
            asked = (
                np.stack([one.vector for one in seen]),
                _per_item("labels", labels, len(seen), str),
                [0] * len(seen),
            )
        bridges = bridge_note.load(self._store, facts)
        of = "its own labels" if asked is None else f"{len(asked[1]):,} items of another day"
        learned = recognition.learn_gallery(self._store, facts, None if bridges is None else bridges.scales, asked, of)
        recognition.save(self._store, learned)
        self._learned = recognition.load(self._store, facts) or learned  # as every other process reads it
        pairs = None
        if facts.run is not None and is_encoder_name(facts.run) and bridges is None:
            try:
                pairs = own_calibration.measure_gallery(self, facts)
            except ValueError:  # too few labels for pairs of them
                pairs = None
            self._calibrator, self._note = own_calibration.load(self._store, facts)
        return recognition.described(learned) | {"pairs": pairs}

    @property
    def calibration_is_current(self) -> bool:
        """Whether the gallery has learned from its labels, less than a tenth of which have changed since."""
        learned = recognition.load(self._store, self._facts())
        return learned is not None and learned.changed(self._facts()) < recognition.CHANGED

    def calibrate_if_changed(self) -> str:
        """`calibrate` where a tenth of the rows have changed since; returns why that could not be, or ""."""
        if self.calibration_is_current:
            return ""
        try:
            self.calibrate()
        except ValueError as error:
            return f"nothing is learned from its labels: {error}"
        return ""

    def _recognition(self) -> tuple[Recognition | None, str]:
        """What the gallery has learned of itself, and a sentence on what is wrong with it; learned at once where there
        is nothing yet and that takes no time."""
        facts = self._facts()
        if self._encoding is not None and self._encoding.info.fingerprint != facts.fingerprint:
            return None, f"the rows are of {facts.run}, {self._encoding.info.shown} is only compatible with it"
        bridges = bridge_note.load(self._store, facts)
        if bridges is not None and not bridges.scales:
            return None, f"no probabilities across the bridge: {bridges.why}"
        if self._learned is None or self._learned.key != recognition.made(self._store):
            self._learned = recognition.load(self._store, facts)
        share = 1.0 if self._learned is None else self._learned.changed(facts)
        if share >= recognition.CHANGED and facts.rows * facts.dim <= AT_ONCE:
            try:
                self.calibrate()
            except (ValueError, OSError, TimeoutError) as error:  # too few labels, or a gallery that cannot be written
                return self._learned, f"nothing is learned from its labels yet: {error}"
            return self._learned, ""
        if self._learned is None:
            return (
                None,
                f"not calibrated, so there are only similarities: nearkin gallery calibrate {self._store.where}",
            )
        if share >= recognition.CHANGED:
            return self._learned, (
                f"{share:.0%} of the rows have changed since it was calibrated on {self._learned.date}: "
                f"nearkin gallery calibrate {self._store.where}"
            )
        return self._learned, ""

    def _facts(self) -> Facts:
        facts = self._store.facts()
        assert facts is not None
        return facts

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
