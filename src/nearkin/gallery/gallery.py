"""The gallery: enrol items under labels, then ask which is nearest, who it is, whether two are the same."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from nearkin.core import checks
from nearkin.core.errors import MissingRow
from nearkin.data import decode as decoding
from nearkin.gallery import admitting, opening, results
from nearkin.gallery import items as item_inputs
from nearkin.gallery.encoding import Encoding
from nearkin.gallery.facts import Facts
from nearkin.gallery.items import Seen
from nearkin.gallery.results import Hit, Identity, Verification
from nearkin.gallery.schema import Row, filter_of, label_of, metadata_of, shortened, unpacked
from nearkin.gallery.stores.contract import Report, Store
from nearkin.gallery.stores.matrix import similarities

__all__ = ["Enrolled", "Gallery"]

TIMEOUT = 30.0  # seconds a writer waits for another
CHUNK = 4096  # rows a transaction
PICTURES = 256  # pictures a transaction: encoding them is what takes the time
NEAREST = 50  # rows whose labels `identify` weighs against one another
Progress = Callable[[int, int], None]


class Enrolled(NamedTuple):
    """ids: of every item, in order. added: how many are new. known: there already. kept: there under another label."""

    ids: list[int]
    added: int
    known: int
    kept: int


class Gallery:
    """Open it with `Gallery.open`; it may be used by several threads, and other processes see what it writes."""

    def __init__(self, store: Store, facts: Facts, encoding: Encoding | None) -> None:
        self._store, self._encoding = store, encoding
        self.dim, self.fingerprint = facts.dim, facts.fingerprint
        self._meaning: results.Meaning | None = None
        self._note = "the gallery was opened without a run, so there is a similarity only; open it with run=RUN"
        if encoding is not None:
            self._meaning, self._note = results.read(encoding.said.run, encoding.said.fingerprint)

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
    ) -> "Gallery":
        """A gallery in a file, or in PostgreSQL (postgresql://…/db, with ?gallery=NAME if there are several).

        run: the folder of a run, whose encoder sees the items; without it the gallery takes and finds vectors only.
        dim: of a new gallery of vectors. create: make it where there is none. timeout: seconds a writer waits for
        another before it gives up. A gallery made with another encoder is refused.
        """
        return cls(*opening.opened(place, run, dim, create, timeout, device, max_pixels))

    @property
    def place(self) -> str:
        """Where it is kept, without a password."""
        return self._store.where

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
        """Adds items; a new label is recognised from its first one on. When this returns, they are on the disk.

        items: a path, the bytes of an image file, a PIL picture, pixels (H, W[, C]) uint8, a vector, or a list of
        these; vectors also as (n, D). label, metadata: one for all, or one an item. names: what an item is called; a
        path is its own name. An item that is enrolled already (by the hash of its content) is not added again; under
        another label it is an error, or with keep=True left as it is. Long lists are written in parts of thousands.
        """
        many = item_inputs.listed(items)[0]
        labels = _each("label", label, len(many), str)
        for one in set(labels) if all(isinstance(one, str) for one in labels) else labels:
            label_of(one)
        metas = _each("metadata", metadata, len(many), Mapping | None)
        if isinstance(metadata, Mapping):
            metadata_of(metadata)  # before anything is encoded
        called = _each("names", names, len(many), str | None)
        self._writable()
        ids, added, known, kept, start = [], 0, 0, 0, 0
        while start < len(many):
            plain = admitting.plain(many[start], self._encoding)
            part = slice(start, min(start + (CHUNK if plain else PICTURES), len(many)))
            asked = admitting.Asked(many[part], labels[part], metas[part], called[part], keep)
            done = admitting.admit(self._store, self._encoding, self.dim, asked)
            ids += [one.id for one in done]
            added += sum(one.new for one in done)
            known += sum(not one.new for one in done)
            kept += sum(one.label != wanted for one, wanted in zip(done, labels[part], strict=True))
            start = part.stop
            if progress is not None:
                progress(start, len(many))
        return Enrolled(ids, added, known, kept)

    def remove(self, ids: int | Sequence[int]) -> int:
        """Takes rows out; how many there were of them."""
        return self._store.remove(_ids(ids))

    def relabel(self, ids: int | Sequence[int], label: str) -> int:
        """Gives rows another label; how many there were of them."""
        return self._store.relabel(_ids(ids), label_of(label))

    # --- asking

    def see(
        self, items: Any, names: Sequence[str] | None = None, unreadable: list[str] | None = None
    ) -> list[Seen | None]:
        """Items through the encoder, together: what the other methods take in their place.

        unreadable: a list that gets a sentence for each picture that cannot be read, which is None in the answer;
        without it the first of them is a ValueError.
        """
        return item_inputs.encoded(self._raws(items, names), self._encoding, unreadable)

    def decode(self, items: Any, names: Sequence[str] | None = None) -> list[Any]:
        """Pictures decoded, which takes no turn of the encoder's: what `see` and the other methods take in their place.

        The first that cannot be read is a ValueError.
        """
        return item_inputs.decoded(self._raws(items, names), self._encoding)

    def search(self, item: Any, k: int = 10, filter: Mapping[str, Any] | None = None) -> list[Hit]:
        """The k nearest rows, nearest first, equals by id.

        filter: {"label": …, "colour": …}; every key must hold, and of a list any value.
        """
        checks.integer("k", k, 1)
        return [_hit(row, near) for row, near in self._store.nearest(self._one(item).vector, k, filter_of(filter))]

    def identify(self, item: Any, *, far: float | None = None, filter: Mapping[str, Any] | None = None) -> Identity:
        """Whose it is, with a calibrated confidence, or unknown: none of the enrolled is likelier.

        far: the share of queries by strangers that may pass as somebody enrolled here (per query, however many labels
        there are); one that the calibration cannot hold is refused. Left out, the likeliest answer is given, and `far`
        of the answer says how many strangers pass at most. An item that is enrolled itself is known. Without a
        calibration the nearest label is given with its similarity only, and `note` says so.
        """
        chosen, seen = filter_of(filter), self._one(item)
        found = self._store.nearest(seen.vector, NEAREST, chosen)
        hits = [_hit(row, near) for row, near in found]
        if self._meaning is None:
            return results.nearest_label(hits, self._note, far)
        only = None if chosen is None or chosen.labels is None else set(chosen.labels)
        examples = self._store.examples(list({hit.label for hit in hits} | (only or set())))
        sizes = self._store.sizes() if only is None else Counter(examples.get(label, 1) for label in only)
        equal = next((row.id for row, _ in found if row.content == seen.content), None)
        return self._meaning.identify(hits, sizes, far, examples, equal)

    def verify(self, a: Any, b: Any, *, far: float | None = None) -> Verification:
        """Whether two items are the same, how probable that is, and at which FAR (per pair) that was decided.

        far: 0.001 by default, or the strictest of 0.1, 0.01, … that the calibration can hold.
        """
        both = item_inputs.listed(a)[0], item_inputs.listed(b)[0]
        if any(len(one) != 1 for one in both):
            raise ValueError(f"verify takes two items, got {len(both[0])} and {len(both[1])}")
        one, other = self.see([both[0][0], both[1][0]])
        assert one is not None and other is not None
        similarity = float(similarities(one.vector[None], other.vector)[0])
        return results.verified(self._meaning, self._note, similarity, far)

    def get(self, id: int) -> Hit:
        """A row by its id; its similarity is 1, that with itself."""
        found = self._store.rows(_ids(id))
        if id not in found:
            raise MissingRow(id)
        return _hit(found[id], 1.0)

    def thumbnail(self, id: int) -> bytes:
        """PNG or JPEG; empty where there is none."""
        return self._store.thumbnail(_ids(id)[0])

    def vectors(self, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """(n, D) of these rows."""
        found = self._store.rows(_ids(ids))
        if missing := [i for i in ids if i not in found]:
            raise MissingRow(missing[0])
        return unpacked([found[i].vector for i in ids], self.dim)

    def rows(self) -> Iterator[tuple[Hit, np.ndarray[Any, np.dtype[np.float32]]]]:
        """Every row that is whole with its vector, by id."""
        for row in self._store.scan():
            yield _hit(row, 1.0), unpacked([row.vector], self.dim)[0]

    def labels(self) -> dict[str, int]:
        """Rows of each label."""
        return self._store.counts()

    def known(self, items: Any) -> list[int | None]:
        """The id of each item that is enrolled already, by the hash of its content; nothing is encoded."""
        raws = item_inputs.contents(item_inputs.listed(items)[0], self._encoding, self.dim)
        found = self._store.known([raw.content for raw in raws])
        return [found[raw.content][0] if raw.content in found else None for raw in raws]

    # --- keeping

    def stats(self) -> dict[str, Any]:
        """What there is, as JSON has it."""
        facts, counts = self._store.facts(), self._store.counts()
        assert facts is not None
        meaning = self._meaning or _calibrated(facts)
        return {
            "place": self._store.where,
            "store": self._store.kind,
            "rows": sum(counts.values()),
            "labels": len(counts),
            "dim": facts.dim,
            "encoder": facts.fingerprint,
            "run": facts.run,
            "sources": facts.sources,
            "calibrated": meaning is not None,
            "calibration_classes": None if meaning is None else meaning.classes,
            "fars": [] if meaning is None else meaning.fars,
            "index": self._store.index_state or opening.index_of(facts),
            "damaged": sorted(self._store.damaged),
            "lost": self._store.lost,
        }

    def export(self, path: str | Path) -> int:
        """All rows into an .npz, .safetensors or .parquet that `nearkin evaluate` reads, or a .jsonl; how many."""
        from nearkin.gallery import export

        return export.write(self, Path(path))

    def warm(self, progress: Progress | None = None) -> None:
        """Reads everything a search needs; beyond 100,000 rows makes the search index, where it is not up to date."""
        self._store.warm(progress)

    def reindex(self, progress: Progress | None = None) -> None:
        """Makes the search index anew."""
        self._store.reindex(progress)

    def check(self, progress: Progress | None = None) -> Report:
        """Reads and proves everything."""
        return self._store.check(progress)

    def repair(self) -> tuple[int, Any]:
        """Leaves damaged rows out for good: how many are whole, and where what was there before is kept."""
        return self._store.repair()

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> "Gallery":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- inside

    def _raws(self, items: Any, names: Sequence[str] | None) -> list[Any]:
        raws = item_inputs.contents(item_inputs.listed(items)[0], self._encoding, self.dim)
        called = _each("names", names, len(raws), str | None)
        return [raw if name is None else raw._replace(name=name) for raw, name in zip(raws, called, strict=True)]

    def _one(self, item: Any) -> Seen:
        many = item_inputs.listed(item)[0]
        if len(many) != 1:
            raise ValueError(f"item must be one item, got {len(many)}")
        seen = self.see(many)[0]
        assert seen is not None
        return seen

    def expects(self, vectors: bool, source: str) -> None:
        """Raises where a source holds the other kind than the encoder takes."""
        if self._encoding is not None and self._encoding.takes_pictures == vectors:
            wanted = "pictures" if vectors else "vectors"
            raise ValueError(f"{source}: the run's encoder takes {wanted}, the source holds the other kind")

    def remember(self, source: str) -> None:
        """A source that is enrolled from: a sentence about another encoder names it."""
        self._store.add([], True, [source])

    def _writable(self) -> None:
        if self.fingerprint is not None and self._encoding is None:
            raise ValueError(
                f"{self._store.where}: its items came through an encoder; open it with run=RUN to enrol more"
            )


def _calibrated(facts: Facts) -> results.Meaning | None:
    """The calibration beside the run that a gallery was made with, where it is there and of its encoder."""
    if facts.run is None or facts.fingerprint is None:
        return None
    try:
        return results.read(Path(facts.run), facts.fingerprint)[0]
    except ValueError:
        return None


def _hit(row: Row, similarity: float) -> Hit:
    return Hit(row.id, row.label, similarity, row.name, json.loads(row.metadata))


def _ids(ids: Any) -> list[int]:
    many = [ids] if isinstance(ids, int | np.integer) else list(ids)
    for one in many:
        checks.integer("id", int(one) if isinstance(one, np.integer) else one, 1)
    if any(one >= 2**63 for one in many):
        raise ValueError(f"id must be < 2^63, got {max(many)}")
    return [int(one) for one in many]


def _each(name: str, value: Any, count: int, kind: Any) -> list[Any]:
    """One for all, or one an item."""
    if isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{name} must be one for all items or a list of one an item, got {shortened(value)}")
    if len(value) != count:
        raise ValueError(f"{name} must have one entry per item: {count} items, {len(value)} entries")
    return list(value)
