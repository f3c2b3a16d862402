"""Groups of a gallery's rows under review: proposed, merged, split, named; every step is on disk and can be undone.

The state is one note of the store, written in the transaction that changes the labels: either both are there, or
neither. A step names the version of the state that it was decided on; where another step came first, it is refused.
Rows that were relabelled or removed by other means meanwhile are left out, of groups and of an undo.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nearkin.core import checks
from nearkin.core.errors import MissingRow, StaleGroups
from nearkin.gallery.run_plda import plda_of_gallery
from nearkin.gallery.schema import UNLABELLED, check_label, ours
from nearkin.gallery.source_groups import group_vectors

if TYPE_CHECKING:
    from nearkin.gallery.gallery import Gallery

__all__ = ["KEY", "MAX_ROWS", "SCOPES", "GroupEditor", "Reviewed"]

KEY = "groups"
SCOPES = ("unlabelled", "all")
MAX_ROWS = 20_000  # that are grouped at a time; `nearkin group` takes more
MAX_STEPS = 50  # that can be undone
Groups = dict[int, list[int]]
LabelsOf = Callable[[Sequence[int]], dict[int, str]]


class Reviewed(NamedTuple):
    """The state. groups: rows by number, the largest first, without rows that were relabelled or removed. undo: the
    kind of the last step, None where there is none.

    similarity: from which on rows were joined; None before the first proposal, and for PLDA. alone: rows that nothing
    was near to.
    """

    version: int
    scope: str
    similarity: float | None
    groups: Groups
    alone: int
    undo: str | None


class _State(NamedTuple):
    version: int = 0
    scope: str = "unlabelled"
    similarity: float | None = None
    groups: Mapping[int, list[int]] = {}
    alone: int = 0
    steps: tuple[dict[str, Any], ...] = ()

    def serialized(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"))

    def step(self, kind: str, groups: Mapping[int, list[int] | None], labels: Mapping[int, list[str]]) -> "_State":
        """After a step. groups: new content by number, None where it is gone; labels: [old, new] of rows."""
        before = {number: self.groups.get(number) for number in groups}
        past = {"kind": kind, "groups": before, "labels": labels}
        return self._changed(groups)._replace(steps=(*self.steps, past)[-MAX_STEPS:])

    def _changed(self, groups: Mapping[int, list[int] | None]) -> "_State":
        merged = {**self.groups, **groups}
        return self._replace(version=self.version + 1, groups={n: rows for n, rows in merged.items() if rows})


def _parsed(text: str) -> _State:
    if not text:
        return _State()
    with ours("the note about the groups of the gallery"):
        plain = json.loads(text)
        version, steps = int(plain["version"]), tuple(_step(**step) for step in plain["steps"])
        return _State(version, groups=_numbered(plain["groups"], _ids), steps=steps)._replace(**_settings(plain))


def _step(kind: str, groups: Any, labels: Any, past: Any = None) -> dict[str, Any]:
    step = {"kind": str(kind), "groups": _numbered(groups, lambda rows: None if rows is None else _ids(rows))}
    step["labels"] = _numbered(labels, _two_labels)
    return step if past is None else step | {"past": _settings(past)}


def _settings(plain: Any) -> dict[str, Any]:
    similarity = plain["similarity"]
    checks.one_of("scope", plain["scope"], SCOPES)
    return {
        "scope": plain["scope"],
        "similarity": None if similarity is None else float(similarity),
        "alone": int(plain["alone"]),
    }


def _numbered(plain: Any, parse: Callable[[Any], Any]) -> dict[int, Any]:
    return {int(number): parse(value) for number, value in plain.items()}


def _ids(rows: Any) -> list[int]:
    ids: list[int] = np.array(rows, np.int64).reshape(len(rows)).tolist()
    return ids


def _two_labels(pair: Any) -> list[str]:
    """The old one and the new one."""
    old, new = pair
    return [check_label(old), check_label(new)]


class GroupEditor:
    """The review of one gallery's groups; processes and threads may share the gallery."""

    def __init__(self, gallery: "Gallery") -> None:
        self._gallery, self._store = gallery, gallery._store

    def state(self) -> Reviewed:
        state = _parsed(self._store.note(KEY))
        rows = [row for group in state.groups.values() for row in group]
        labels = {row.id: row.label for row in self._store.rows(rows).values()}
        live = {n: [i for i in group if _open(state, labels.get(i))] for n, group in state.groups.items()}
        undo = state.steps[-1]["kind"] if state.steps else None
        groups = dict(
            sorted(((n, group) for n, group in live.items() if group), key=lambda one: (-len(one[1]), one[0]))
        )
        return Reviewed(state.version, state.scope, state.similarity, groups, state.alone, undo)

    def propose(
        self,
        version: int,
        *,
        scope: str = "unlabelled",
        similarity: float | None = None,
        size: int | None = None,
        progress: Any = None,
    ) -> Reviewed:
        """Groups anew: the rows without a label, or all. Settings as in `group_gallery`."""
        checks.one_of("scope", scope, SCOPES)
        if size is not None:
            checks.integer("size", size, 2)
        if similarity is not None and size is not None:
            raise ValueError("size is for grouping without a similarity; give one of them, got both")
        self._check_version(_parsed(self._store.note(KEY)), version)  # before minutes of work
        ids, vectors = self._rows(scope)
        free = similarity is None and size is None and len(ids) > 0
        model = plda_of_gallery(self._gallery) if free else None
        method = "average" if model is None else "plda"
        assignment, central, used = group_vectors(vectors, similarity, method, size, progress, model)
        sizes, order = np.bincount(assignment), np.lexsort((-central, assignment))
        several = int((sizes > 1).sum())
        parts = np.split(ids[order], np.cumsum(sizes)[:-1])[:several] if len(ids) else []

        def decide(state: _State, _: LabelsOf) -> tuple[_State, dict[int, str]]:
            first = max(state.groups, default=0) + 1
            groups: dict[int, list[int] | None] = dict.fromkeys(state.groups)
            groups |= {first + n: part.tolist() for n, part in enumerate(parts)}
            past = {"scope": state.scope, "similarity": state.similarity, "alone": state.alone}
            state = state.step("propose", groups, {})
            state.steps[-1]["past"] = past
            return state._replace(scope=scope, similarity=used, alone=len(ids) - sum(map(len, parts))), {}

        return self._edit(version, decide)

    def name(self, version: int, group: int, label: str) -> Reviewed:
        """The rows of a group get a label, and the group is done."""
        check_label(label)
        if label == UNLABELLED:
            raise ValueError(f'label must be a name; "{UNLABELLED}" is that of rows without one')

        def decide(state: _State, labels_of: LabelsOf) -> tuple[_State, dict[int, str]]:
            now = self._live(state, group, labels_of)
            changed = {i: [old, label] for i, old in now.items() if old != label}
            return state.step("name", {group: None}, changed), dict.fromkeys(changed, label)

        return self._edit(version, decide)

    def merge(self, version: int, groups: Sequence[int]) -> Reviewed:
        """Several groups become one, which has the number of the first."""
        unique = list(dict.fromkeys(groups))
        if len(unique) < 2:
            raise ValueError(f"groups must be at least 2 different ones to merge, got {len(unique)}")

        def decide(state: _State, _: LabelsOf) -> tuple[_State, dict[int, str]]:
            rows = [row for number in unique for row in self._rows_of(state, number)]
            return state.step("merge", {**dict.fromkeys(unique[1:]), unique[0]: rows}, {}), {}

        return self._edit(version, decide)

    def split(self, version: int, group: int, ids: Sequence[int]) -> Reviewed:
        """Some rows of a group become a group of their own."""
        chosen = list(dict.fromkeys(ids))

        def decide(state: _State, _: LabelsOf) -> tuple[_State, dict[int, str]]:
            rows = self._rows_of(state, group)
            if strangers := [i for i in chosen if i not in set(rows)]:
                raise ValueError(f"ids must be rows of group {group}, got {strangers[0]}")
            rest = [i for i in rows if i not in set(chosen)]
            if not chosen or not rest:
                raise ValueError(f"ids must be some rows of group {group}, not {'all' if chosen else 'none'} of them")
            return state.step("split", {group: rest, max(state.groups) + 1: chosen}, {}), {}

        return self._edit(version, decide)

    def undo(self, version: int) -> Reviewed:
        """The state before the last step: its groups, and the labels of rows that nobody has relabelled since."""

        def decide(state: _State, labels_of: LabelsOf) -> tuple[_State, dict[int, str]]:
            if not state.steps:
                raise ValueError("there is no step to undo")
            *steps, last = state.steps
            now = labels_of(list(last["labels"]))
            labels = {i: old for i, (old, new) in last["labels"].items() if now.get(i) == new}
            return state._changed(last["groups"])._replace(steps=tuple(steps), **last.get("past", {})), labels

        return self._edit(version, decide)

    # --- internal

    def _edit(self, version: int, decide: Callable[[_State, LabelsOf], tuple[_State, dict[int, str]]]) -> Reviewed:
        def change(note: str, labels_of: LabelsOf) -> tuple[Mapping[int, str], str]:
            state = _parsed(note)
            self._check_version(state, version)
            state, labels = decide(state, labels_of)
            return labels, state.serialized()

        self._store.edit(KEY, change)
        return self.state()

    @staticmethod
    def _check_version(state: _State, version: int) -> None:
        if state.version != version:
            raise StaleGroups(version, state.version)

    @staticmethod
    def _rows_of(state: _State, group: int) -> list[int]:
        if group not in state.groups:
            raise MissingRow(group, "group")
        return state.groups[group]

    def _live(self, state: _State, group: int, labels_of: LabelsOf) -> dict[int, str]:
        """The labels now of a group's rows that are still to be named."""
        now = labels_of(self._rows_of(state, group))
        return {i: label for i, label in now.items() if _open(state, label)}

    def _rows(self, scope: str) -> tuple[Any, torch.Tensor]:
        counts = self._gallery.labels()
        total = counts.get(UNLABELLED, 0) if scope == "unlabelled" else sum(counts.values())
        if total > MAX_ROWS:
            raise ValueError(
                f"at most {MAX_ROWS:,} rows are grouped in the page, got {total:,}; nearkin group takes more"
            )
        kept = [(hit.id, row) for hit, row in self._gallery.rows() if scope == "all" or hit.label == UNLABELLED]
        rows = np.stack([row for _, row in kept]) if kept else np.zeros((0, self._gallery.dim), np.float32)
        return np.array([id for id, _ in kept], np.int64), torch.from_numpy(rows)


def _open(state: _State, label: str | None) -> bool:
    """Whether a row is still to be named: in a review of rows without a label, it has none."""
    return label is not None and (state.scope == "all" or label == UNLABELLED)
