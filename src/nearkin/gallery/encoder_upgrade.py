"""`nearkin gallery upgrade`: a new encoder for a gallery, without enrolling anew.

1. Items that both encoders have seen make pairs: rows whose originals are still there, or another folder.
2. A bridge is fitted on most of their classes; scale and error rates are measured on classes that played no part.
3. One transaction takes all rows into the new space: those of the pairs with their new embedding, the others mapped.
4. Mapped rows whose originals are there are embedded again, a batch per transaction, at any pace.

A kill before 3 leaves the gallery as it was; after it, the same command goes on with 4. So it does where 3 is committed
while the command runs: by another process, or by the server for one that was killed. Rows that are enrolled meanwhile
are mapped, or embedded where no bridge was needed.
"""

import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nearkin import data, training
from nearkin.core import checks, toml
from nearkin.core.errors import EncoderChanged, NotAllowed, RowsAdded
from nearkin.data import groups
from nearkin.data.map_dataset import check_typed
from nearkin.data.sources import AS_BEFORE, PLAIN
from nearkin.evaluation.statistics.cluster_bootstrap import share_interval
from nearkin.gallery import bridge, bridge_note, bridge_scale, calibration, opening
from nearkin.gallery.bridge_note import KEY, MARK, Bridges
from nearkin.gallery.gallery import Gallery
from nearkin.gallery.items import Encoding, encode_items, encoder_info, hash_items
from nearkin.gallery.originals import Originals
from nearkin.gallery.schema import (
    UNLABELLED,
    Facts,
    Floats,
    Renewed,
    Row,
    bridged_metadata,
    pack,
    renewed_metadata,
    row_encoder,
    unpack,
)
from nearkin.gallery.stores import Rewrite, Store, check_encoder
from nearkin.models.frozen import is_encoder_name
from nearkin.training.inference import recorded_source

__all__ = ["FEWEST", "Pairs", "Upgraded", "renew", "split_classes", "upgrade"]

FEWEST = 200  # pairs
MOST = 10_000  # pairs
LOOKED_UP = 10_000  # rows between two reports of progress
HELD_OUT = 0.4  # share of the classes, or of the items without labels
FEWEST_CLASSES = 10  # labels of several items, below which items are held out and not classes
BATCH = 256  # rows per transaction, and items encoded at a time
Progress = Callable[[str, int, int], None]  # what is done, how far, of how many


class Pairs(NamedTuple):
    """Items that both encoders have seen: (n, D_old) and (n, D_new). labels: "" where there is none."""

    old: Floats
    new: Floats
    labels: list[str]


class Upgraded(NamedTuple):
    """The result. pairs: that the bridge was fitted on and judged by; 0 where none was needed. summary: of the bridge.

    kept: where the gallery as it was before is, "" where it had this encoder already. rows: by what made them: renewed
    ones and those of earlier encoders. bridged: rows that are mapped still. why: these have no calibration, or, where
    none is bridged, a frozen encoder's gallery has none by its own labels.
    """

    pairs: int
    summary: dict[str, Any]
    kept: str
    renewed: int
    rows: int
    bridged: int
    why: str


def upgrade(
    place: str | Path,
    run: str | Path,
    *,
    with_source: str | Path | None = None,
    renew_rows: bool = True,
    device: str = "auto",
    timeout: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    reading: data.Reading = PLAIN,
) -> Upgraded:
    """Gives a gallery the encoder of another run; new queries then search all its rows at once.

    with_source: pictures that both encoders embed for the bridge, labelled or not, in addition to the originals of rows
    that are still there. renew_rows: embed rows again from their originals; without it only the bridge is made. The
    gallery can be used meanwhile, and the same call resumes. reading: what the sources of the originals, and those of
    the runs, are allowed; see `data.load`.
    """
    checks.positive("timeout", timeout)
    report = progress or (lambda *_: None)
    with closing(opening.store_at(place, timeout)) as store:
        _check_own_source(store, run, reading)
        kept, pairs, renewed, known = "", 0, 0, dict[int, Any]()
        while True:
            facts = opening.existing_facts(store)
            encoding = _encoding_for(run, device, facts)
            if facts.fingerprint is None:
                raise ValueError(f"{store.where}: has vectors of an unknown encoder, which cannot be upgraded")
            if facts.fingerprint == encoding.info.fingerprint:
                break
            # Another upgrade may be committed meanwhile: that of a process which was killed while the server committed.
            try:
                kept, pairs, renewed = _switch(
                    store, facts, encoding, with_source, device, seed, report, reading, known
                )
                break
            except EncoderChanged:
                known.clear()
            except RowsAdded:
                continue  # with what is known
        if renew_rows:
            renewed += renew(store, encoding, report, reading)
        facts = opening.existing_facts(store)
        bridges = bridge_note.load(store, facts)
        bridged = 0 if bridges is None else sum(store.encoders().values())
        summary, why = ({}, "") if bridges is None else (bridges.summary, bridges.why)
    with Gallery.open(place, run, device=device, timeout=timeout) as gallery:
        note = gallery.calibrate_if_changed()
    why = why or note
    return Upgraded(pairs, summary, kept, renewed, facts.rows, bridged, why)


def _check_own_source(store: Store, run: str | Path, reading: data.Reading) -> None:
    """Refuses a source, typed again, that neither the gallery nor one of its runs has recorded."""
    if reading.own_source is None:
        return
    facts = opening.existing_facts(store)
    recorded = [*facts.sources, *filter(None, (recorded_source(one) for one in (run, facts.run) if one is not None))]
    if reading.own_source not in recorded:
        known = ", ".join(recorded) or "none"
        raise ValueError(f"{store.where}: it has recorded these sources: {known}; none is {reading.own_source}")


def _for_run(reading: data.Reading, run: str | Path) -> data.Reading:
    """The same, where the source that was typed again is that of the run."""
    return reading if reading.own_source == recorded_source(run) else reading._replace(own_source=None)


def _encoding_for(run: str | Path, device: str, facts: Facts) -> Encoding:
    """In the length of the gallery's vectors, where it is their encoder already."""
    encoding = Encoding(run, device)
    known = facts.dim in encoding.info.lengths
    if known and facts.fingerprint == Encoding(run, device, dim=facts.dim).info.fingerprint:
        encoding.shorten(facts.dim)
    return encoding


# --- the bridge


def _switch(
    store: Store,
    facts: Facts,
    encoding: Encoding,
    with_source: str | Path | None,
    device: str,
    seed: int,
    report: Progress,
    reading: data.Reading,
    known: dict[int, Any],
) -> tuple[str, int, int]:
    """Where the gallery before is, the number of pairs, and of rows that have their new embedding already.

    known: by id, the new embeddings of rows; those of an earlier attempt, which this one adds to.
    """
    assert facts.fingerprint is not None
    originals = Originals(facts.sources, encoding, reading)
    rows = _embed_rows(store, facts, originals, report, known)
    check_encoder(store.where, opening.existing_facts(store), facts.fingerprint)  # the rows are all of that encoder
    note, count, mapped = "", 0, None
    if len(known) < facts.rows:
        pairs = _pairs_of(rows, known, facts.dim)
        if with_source is not None:
            pairs = _joined(pairs, _pairs_with(store, facts, encoding, str(with_source), device, report, reading))
        report("fitting the bridge", 0, 1)
        mapped, bridges = _bridge(store, facts, encoding, pairs, device, seed, reading)
        note, count = bridges.text(), len(pairs.old)
        report("fitting the bridge", 1, 1)
    mark = facts.fingerprint[:MARK]

    def rewritten(part: Sequence[Row]) -> list[Row]:
        others = [row for row in part if row.id not in known]
        vectors: dict[int, bytes] = {}
        if others and mapped is None:
            known.update(originals.embedded(others) if len(others) <= BATCH else {})
            if not all(row.id in known for row in others):
                raise RowsAdded
        elif others:
            assert mapped is not None
            vectors = dict(
                zip(
                    [row.id for row in others],
                    pack(mapped(unpack([row.vector for row in others], facts.dim))),
                    strict=True,
                )
            )
        return [
            row._replace(vector=vectors[row.id], metadata=bridged_metadata(row.metadata, mark))
            if row.id in vectors
            else row._replace(
                vector=pack(known[row.id].vector[None])[0],
                metadata=renewed_metadata(row.metadata, known[row.id].quality),
            )
            for row in part
        ]

    plan = Rewrite(
        facts.fingerprint,
        encoding.info.fingerprint,
        opening.run_fact(encoding),
        encoding.dim,
        rewritten,
        (KEY, note),
    )
    return store.rewrite(plan, lambda done, total: report("mapping rows", done, total)), count, len(known)


def _embed_rows(store: Store, facts: Facts, originals: Originals, report: Progress, known: dict[int, Any]) -> list[Row]:
    """Up to `MOST` rows whose originals are there. known: by id, their new embeddings, and afterwards no others."""
    rows, there = list[Row](), array("q")  # of all rows: a few originals among many uploads are enough for a bridge
    for done, row in enumerate(store.scan(), 1):
        if originals.has(row):
            there.append(row.id)
        if done % LOOKED_UP == 0:
            report("looking for originals", done, max(done, facts.rows))
    chosen = there[:: max(1, -(-len(there) // MOST))]
    for start in range(0, len(chosen), BATCH):
        batch = list(store.rows(chosen[start : start + BATCH].tolist()).values())
        known |= originals.embedded([row for row in batch if row.id not in known])
        rows += [row for row in batch if row.id in known]
        report("embedding originals", start + len(batch), len(chosen))
    there_now = {row.id for row in rows}
    for id in [id for id in known if id not in there_now]:
        del known[id]
    return rows


def _pairs_of(rows: Sequence[Row], known: dict[int, Any], dim: int) -> Pairs:
    """Rows that the gallery's encoder made itself, and their new embeddings."""
    own = [row for row in rows if not row_encoder(row.metadata)]
    if not own:
        return Pairs(np.zeros((0, dim), np.float32), np.zeros((0, 0), np.float32), [])
    labels = ["" if row.label == UNLABELLED else row.label for row in own]
    return Pairs(unpack([row.vector for row in own], dim), np.stack([known[row.id].vector for row in own]), labels)


def _pairs_with(
    store: Store,
    facts: Facts,
    encoding: Encoding,
    source: str,
    device: str,
    report: Progress,
    reading: data.Reading,
) -> Pairs:
    """The items of a source by both encoders."""
    old = _old_encoding(store, facts, device)
    reading = PLAIN._replace(split_folders=AS_BEFORE, allow_outside=reading.allow_outside)  # no labels are needed
    items = data.load(source, labelled=False, group_column=groups.UNUSED, **reading.for_load())
    step = max(1, -(-len(items) // MOST))
    chosen = range(0, len(items), step)
    parts: list[list[Floats]] = [[], []]
    labels: list[str] = []
    for start in range(0, len(chosen), BATCH):
        positions = chosen[start : start + BATCH]
        contents = [items.vectors[i] if items.vectors is not None else items.pictures.read(i) for i in positions]  # type: ignore[union-attr]
        seen = [encode_items(hash_items(contents, one, one.dim), one, []) for one in (old, encoding)]
        for i, a, b in zip(positions, *seen, strict=True):
            if a is not None and b is not None:
                parts[0].append(a.vector)
                parts[1].append(b.vector)
                labels.append(items.classes[items.labels[i]] if items.labels is not None and items.classes else "")
        report(f"embedding {source}", start + len(positions), len(chosen))
    if not labels:
        raise ValueError(f"{source}: none of its items can be read by both encoders")
    return Pairs(np.stack(parts[0]), np.stack(parts[1]), labels)


def _old_encoding(store: Store, facts: Facts, device: str) -> Encoding:
    """The encoder that the gallery has now."""
    try:
        old = Encoding(facts.run or "", device)
        if facts.dim in old.info.lengths:
            old.shorten(facts.dim)
    except ValueError as error:
        raise ValueError(
            f"{store.where}: --with needs the encoder that it was made with, which cannot be opened ({error})"
        ) from None
    if old.info.fingerprint != facts.fingerprint:
        raise ValueError(f"{store.where}: the run {facts.run} has another encoder now than the one it was made with")
    return old


def _joined(a: Pairs, b: Pairs) -> Pairs:
    if not a.labels:
        return b
    return Pairs(np.concatenate([a.old, b.old]), np.concatenate([a.new, b.new]), a.labels + b.labels)


def split_classes(labels: Sequence[str], held_out: float, seed: int) -> tuple[Any, Any, bool]:
    """Number of the class of each item, which items are held out, and whether these are of other classes.

    An item without a label is a class of its own; with few labels, or one item of each, so is every item.
    """
    texts = np.array(labels, dtype=str)
    several = [label for label, count in Counter(labels).items() if label and count > 1]
    by_class = len(several) >= FEWEST_CLASSES
    alone = np.array([f"\0{i}" for i in range(len(texts))])
    names = np.where((texts != "") & by_class, texts, alone)
    _, codes = np.unique(names, return_inverse=True)
    order = np.random.default_rng([seed, 4]).permutation(codes.max() + 1)
    return codes, bridge.of_share(codes, order, lambda count: round(held_out * count)), by_class


def _bridge(
    store: Store, facts: Facts, encoding: Encoding, pairs: Pairs, device: str, seed: int, reading: data.Reading
) -> tuple[bridge.Bridge, Bridges]:
    """Fitted on some classes, measured on the others."""
    assert facts.fingerprint is not None
    val = _validation(facts, encoding, device, reading) if len(pairs.labels) >= FEWEST else None
    if val is not None:  # its classes play no part in the fit
        free = [i for i, label in enumerate(pairs.labels) if label not in val[1]]
        pairs = Pairs(pairs.old[free], pairs.new[free], [pairs.labels[i] for i in free])
    if len(pairs.labels) < FEWEST:
        raise ValueError(
            f"{store.where}: {len(pairs.labels):,} items can be seen by both encoders, a bridge needs {FEWEST}; give a "
            "folder of such pictures with --with FOLDER (no labels needed)"
        )
    codes, held, by_class = split_classes(pairs.labels, HELD_OUT, seed)
    chosen = bridge.choose(pairs.old[~held], pairs.new[~held], codes[~held], by_class, seed)
    mapped = chosen.bridge(pairs.old[held])
    scale = bridge_scale.measure_scale(pairs.new[held], mapped)
    summary = {
        "pairs": int((~held).sum()),
        "held_out": int(held.sum()),
        "by_class": by_class,
        "kind": chosen.bridge.kind,
        "settings": list(chosen.bridge.settings),
        "tried": chosen.tried,
        "rows": _table(pairs, mapped, held, codes if by_class else None),
        "from": facts.run,
    }
    calibrated, why = _calibration(encoding, pairs, held, by_class, val)
    earlier = bridge_note.load(store, facts)
    knots = {mark: _composed(scale, one) for mark, one in (earlier.scales if earlier is not None else {}).items()}
    if knots:
        calibrated, why = None, "some rows came over two bridges, across which nothing was measured"
    knots[facts.fingerprint[:MARK]] = [list(scale.cosine), list(scale.similarity)]
    return chosen.bridge, Bridges(encoding.info.fingerprint, knots, summary, calibrated, why)


def _composed(last: bridge_scale.Scale, first: bridge_scale.Scale) -> list[list[float]]:
    return [list(last.cosine), first(np.array(last.similarity)).tolist()]


def _table(pairs: Pairs, mapped: Floats, held: Any, codes: Any) -> list[dict[str, Any]]:
    """Recall@1 and MAP@R of held-out items with 95 % intervals over classes, None for fewer than 5 of them: old–old,
    new–old, new–new."""
    old, new = pairs.old[held], pairs.new[held]
    classes = None if codes is None else np.unique(codes[held], return_inverse=True)[1]
    rows = []
    for name, queries, found in (("old-old", old, old), ("new-old", new, mapped), ("new-new", new, new)):
        if classes is None and name != "new-old":
            continue  # every item finds itself
        first, precision, places = bridge.per_query(queries, found, classes)
        groups = torch.from_numpy(np.arange(len(places)) if classes is None else classes[places])
        intervals = [
            _known(*share_interval(torch.tensor(values, dtype=torch.float64), groups)) for values in (first, precision)
        ]
        figures = {"recall@1": float(np.mean(first)), "map@r": float(np.mean(precision))}
        rows.append(
            {"rows": name} | figures | dict(zip(("recall@1_interval", "map@r_interval"), intervals, strict=True))
        )
    return rows


def _known(low: float, high: float) -> list[float] | None:
    return None if np.isnan(low) else [float(low), float(high)]


# --- error rates


def _validation(
    facts: Facts, encoding: Encoding, device: str, reading: data.Reading
) -> tuple[Pairs, set[str], list[str] | None] | None:
    """The validation part of a trained run by both encoders, the names of its classes, and its groups.

    None for a frozen encoder, and where the part cannot be read or the old encoder cannot be opened.
    """
    if encoding.info.frozen is not None or facts.run is None:
        return None
    try:
        options: dict[str, Any] = {"device": device, "reading": _for_run(reading, encoding.info.run)}
        new = training.embed_source(encoding.info.run, part="val", dim=encoding.info.short, **options)
        if new.labels is None:
            return None
        options |= {"dim": _old_length(facts), "reading": _for_run(reading, facts.run)}
        if is_encoder_name(facts.run):  # it has learned from none of these classes
            recipe = toml.read_file(encoding.info.run / "recipe.toml")["data"]
            options |= {"source": recipe["source"], "root": recipe.get("root"), "part": "all"}
            check_typed(recipe["source"], [reading.own_source], encoding.info.shown)
            options["reading"] = PLAIN._replace(split_folders=AS_BEFORE, allow_outside=reading.allow_outside)
        old = training.embed_source(facts.run, **{"part": "val"} | options)
    except NotAllowed as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return None
    except (OSError, ValueError, KeyError):
        return None
    at = {name: i for i, name in enumerate(old.names)}
    if (
        not set(new.names) <= set(at)
        or len(at) < len(old.names)
        or ("source" not in options and old.names != new.names)
    ):
        return None
    names = [new.classes[label] for label in new.labels]
    rows = old.embeddings[[at[name] for name in new.names]], new.embeddings
    unit = [torch.nn.functional.normalize(one.double(), dim=1).float().numpy() for one in rows]
    return Pairs(unit[0], unit[1], names), set(names), new.groups


def _old_length(facts: Facts) -> int | None:
    info = encoder_info(facts.run or "")
    return facts.dim if facts.dim != info.dim and facts.dim in info.lengths else None


def _calibration(
    encoding: Encoding,
    pairs: Pairs,
    held: Any,
    by_class: bool,
    val: tuple[Pairs, set[str], list[str] | None] | None,
) -> tuple[dict[str, Any] | None, str]:
    """Of pairs by the new encoder, on classes that it has not learned from; or None, and why."""
    try:
        if val is not None:
            _, codes = np.unique(np.array(val[0].labels, dtype=str), return_inverse=True)
            return calibration.measure(torch.from_numpy(val[0].new), torch.from_numpy(codes), groups=val[2]), ""
        if encoding.info.frozen is None:
            return None, (
                f"it needs the validation part of {encoding.info.shown}, also as that of the run before; the same "
                "source with the same split"
            )
        labelled = np.array([label != "" for label in pairs.labels])[held]
        if not by_class or not labelled.any():
            return None, f"it needs several originals of {FEWEST_CLASSES} labels or more"
        _, codes = np.unique(np.array(pairs.labels, dtype=str)[held][labelled], return_inverse=True)
        return calibration.measure(torch.from_numpy(pairs.new[held][labelled]), torch.from_numpy(codes)), ""
    except ValueError as error:
        return None, str(error)


# --- renewing


def renew(store: Store, encoding: Encoding, report: Progress | None = None, reading: data.Reading = PLAIN) -> int:
    """Embeds bridged rows again from their originals, a batch per transaction; returns how many."""
    facts = opening.existing_facts(store)
    if facts.fingerprint != encoding.info.fingerprint:
        raise ValueError(f"{store.where}: has another encoder than {encoding.info.shown}")
    if bridge_note.load(store, facts) is None:
        return 0
    originals, after, done, renewed = Originals(facts.sources, encoding, reading), 0, 0, 0
    total = sum(store.encoders().values())
    while batch := store.bridged(after, BATCH):
        after = batch[-1].id
        embedded = originals.embedded(batch)
        rows = [
            Renewed(row.id, row.content, pack(embedded[row.id].vector[None])[0], embedded[row.id].quality)
            for row in batch
            if row.id in embedded
        ]
        renewed += store.renew(rows, encoding.info.fingerprint) if rows else 0
        done += len(batch)
        if report is not None:
            report("renewing rows", done, max(done, total))
    if not store.encoders():
        store.edit(KEY, lambda _, labels_of: ({}, bridge_note.FINISHED))  # all rows are of one encoder again
    return renewed
