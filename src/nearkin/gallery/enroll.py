"""A whole source into a gallery, in parts that are kept as they are done: it can be stopped anywhere and go on."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from nearkin import data
from nearkin.core.errors import RankFailed
from nearkin.data.item_set import Items, Pictures
from nearkin.dist.group import ProcessGroup
from nearkin.gallery import enroll_ranks
from nearkin.gallery.encoding import Encoding
from nearkin.gallery.gallery import PICTURES, Gallery

__all__ = ["Counted", "enrol_source"]

VECTORS = 4096


class Counted(NamedTuple):
    """What became of a source. unreadable: names of pictures that were left out, with the reason."""

    added: int
    known: int
    kept: int
    unreadable: list[str]


def enrol_source(
    gallery: Gallery | Encoding,
    source: str,
    *,
    root: str | None = None,
    label: str | None = None,
    metadata: dict[str, Any] | None = None,
    skip_unreadable: bool = False,
    progress: Callable[[int, int], None] | None = None,
    group: ProcessGroup | None = None,
) -> Counted:
    """Enrols every item of a source under its class, or all under `label`.

    What is there already, by the hash of its content, is neither encoded nor added again. ranks: the processes that
    share the reading and encoding; rank 0 calls this with the gallery and writes, the others with an `Encoding` of its
    run, and all get the same counts.
    """
    items = data.load(source, root=root, labelled=False)
    if label is None and (items.labels is None or not items.classes):
        raise ValueError(f"{source}: its items have no classes; say under which label they are enrolled: --label")
    if group is not None and group.size > 1:
        under = None if label is not None else [items.classes[number] for number in _labels(items)]
        more = (metadata, skip_unreadable, progress, group)
        return _shared(gallery, source, items, under or [str(label)] * len(items), *more)
    if not isinstance(gallery, Gallery):
        raise TypeError(f"gallery must be a Gallery where one process works alone, got {type(gallery).__name__}")
    gallery.expects(items.vectors is not None, source)
    gallery.remember(source)
    step = PICTURES if items.pictures is not None else VECTORS
    added = known = kept = 0
    bad: list[str] = []
    for start in range(0, len(items), step):
        chosen = range(start, min(start + step, len(items)))
        names = [_name(source, items, i) for i in chosen]
        ready = _ready(gallery, items, chosen, names, bad)
        if bad and not skip_unreadable:
            raise ValueError(_refused(bad[0]))
        whole = [n for n, item in enumerate(ready) if item is not None]
        if whole:
            labels = [label if label is not None else items.classes[_labels(items)[chosen[n]]] for n in whole]
            called = [names[n] for n in whole]
            found = gallery.enrol([ready[n] for n in whole], labels, metadata, names=called, keep=True)
            added, known, kept = added + found.added, known + found.known, kept + found.kept
        if progress is not None:
            progress(chosen.stop, len(items))
    return Counted(added, known, kept, bad)


def _shared(
    gallery: Gallery | Encoding,
    source: str,
    items: Items,
    labels: list[str],
    metadata: dict[str, Any] | None,
    skip_unreadable: bool,
    progress: Callable[[int, int], None] | None,
    group: ProcessGroup,
) -> Counted:
    """The same with several ranks: what the others have encoded is written here, part after part."""
    if isinstance(gallery, Gallery) != group.first:
        raise TypeError(f"gallery must be a Gallery on rank 0 and an Encoding on the others, got {gallery!r}")
    if isinstance(gallery, Gallery):
        gallery.expects(items.vectors is not None, source)
        gallery.remember(source)
    counts = [0, 0, 0]
    bad: list[str] = []

    def write(rank: int, part: enroll_ranks.Part) -> None:
        assert isinstance(gallery, Gallery)
        if part.bad and not skip_unreadable:
            raise RankFailed(f"rank {rank}: {_refused(part.bad[0])}")
        bad.extend(part.bad)
        kept = [enroll_ranks.label_there(gallery, id) not in (None, labels[i]) for i, id in part.there]
        done = [0, len(kept), sum(kept)]
        if part.seen:
            under = [labels[i] for i, _ in part.seen]
            names = [one.name for _, one in part.seen]
            done = [
                a + b
                for a, b in zip(
                    done,
                    gallery.enrol([one for _, one in part.seen], under, metadata, names=names, keep=True)[1:],
                    strict=True,
                )
            ]
        counts[:] = [a + b for a, b in zip(counts, done, strict=True)]

    enroll_ranks.enrol_parts(gallery, items, partial(_name, source, items), write, progress, group)
    (added, known, there), left_out = group.values([counts, bad])[0]
    return Counted(added, known, there, left_out)


def _name(source: str, items: Items, i: int) -> str:
    return f"{source.rstrip('/')}/{items.names[i]}"


def _refused(why: str) -> str:
    return f"{why}. Use --skip-unreadable to leave such files out; what was enrolled before it stays"


def _ready(gallery: Gallery, items: Items, chosen: range, names: list[str], bad: list[str]) -> list[Any]:
    """What the gallery takes: known pictures as they are, new ones encoded, None for those that cannot be read."""
    if items.vectors is not None:
        return list(items.vectors[chosen.start : chosen.stop])
    assert items.pictures is not None
    ready: list[Any] = [_read(items.pictures, i, name, bad) for i, name in zip(chosen, names, strict=True)]
    there = [n for n, item in enumerate(ready) if item is not None]
    enrolled = gallery.known([ready[n] for n in there])
    new = [n for n, id in zip(there, enrolled, strict=True) if id is None]
    for n, seen in zip(new, gallery.see([ready[n] for n in new], [names[n] for n in new], bad), strict=True):
        ready[n] = seen
    return ready


def _read(pictures: Pictures, i: int, name: str, bad: list[str]) -> Any:
    try:
        return pictures.read(i)
    except (OSError, ValueError) as error:
        bad.append(f"{name} cannot be read ({getattr(error, 'strerror', None) or error})")
        return None


def _labels(items: Items) -> Any:
    assert items.labels is not None
    return items.labels
