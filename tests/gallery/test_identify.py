"""Who is this: what a gallery learns of itself, keeps, and answers, whatever its rows are."""

import numpy as np
import pytest

from calibrations import embeddings
from nearkin import evaluation
from nearkin.evaluation.open_set import draws
from nearkin.evaluation.recognition import fit
from nearkin.gallery import Gallery, bridge_note, recognition
from nearkin.gallery.bridge_scale import Scale
from nearkin.gallery.schema import UNLABELLED, bridged_metadata, checksum
from nearkin.gallery.stores import label_table, sqlite
from nearkin.gallery.stores.sqlite import SqliteStore


@pytest.fixture
def world():
    """Rows of 30 labels, six of each enrolled; two more of each, and strangers, to ask."""
    rows, codes = embeddings(60, 8, dim=24, seed=1, spread=0.45)
    known, place = codes < 30, np.arange(len(codes)) % 8
    mine = known & (place < 6)
    names = np.array([f"c{code}" for code in codes])
    return rows[mine], names[mine].tolist(), rows[known & ~mine], names[known & ~mine].tolist(), rows[~known][::3]


def filled(place, world, **more):
    gallery = Gallery.open(place, dim=world[0].shape[1])
    gallery.enrol(world[0], world[1], **more)
    return gallery


def test_verdicts_follow_the_probabilities_and_the_best_candidate_comes_first(tmp_path, world):
    with filled(tmp_path / "g", world) as gallery:
        right = []
        for query, label in zip(world[2], world[3], strict=True):
            answer = gallery.identify(query)
            first = answer.candidates[0]
            assert answer.p_right == first.confidence and 0 < answer.p_unknown < 1 and answer.prior == 0.3
            total = answer.p_unknown + sum(one.confidence for one in answer.candidates)
            assert total <= 1 + 1e-9
            expected = "named" if answer.p_right >= 0.7 else "unknown" if answer.p_unknown >= 0.7 else "unsure"
            assert answer.verdict == expected and answer.classes == 30 and answer.note == ""
            assert (answer.label is None) == answer.unknown == (answer.verdict != "named")
            assert answer.confidence == (answer.p_right if answer.label else answer.p_unknown)
            right.append(first.label == label)
        assert np.mean(right) > 0.8
        strangers = [gallery.identify(query) for query in world[4]]
        assert np.mean([answer.verdict == "named" for answer in strangers]) < 0.15
        assert np.mean([answer.p_unknown for answer in strangers]) > 0.5
        one = world[2][0]
        by_prior = [gallery.identify(one, unknown_prior=prior).p_unknown for prior in (0.1, 0.5, 0.9)]
        assert by_prior == sorted(set(by_prior)) and gallery.identify(one, unknown_prior=0.9).score == answer_score(
            gallery, one
        )
        strict, loose = (gallery.identify(one, sure=sure).verdict for sure in (0.99999, 0.5))
        assert strict == "unsure" and loose == "named"


def answer_score(gallery, item):
    return gallery.identify(item).score


def test_evaluate_counts_what_a_gallery_answers(tmp_path):
    rows, codes = embeddings(24, 6, dim=16, seed=5, spread=0.7)
    (entry,) = evaluation.identification(rows, codes, examples=(3,), fars=(0.3, 0.01), repeats=1)["examples"]
    draw = draws.draw(codes, np.arange(len(codes)), 3, 0, 0)
    names = [f"c{line:02}" for line in range(12)]
    counted = {"right": 0, "wrong": 0, "unsure": 0, "unknown": 0, "named": 0, "far": 0, "right at far": 0, "strict": 0}
    with Gallery.open(tmp_path / "g", dim=16) as gallery:
        gallery.enrol(rows[draw.enrolled.ravel()], np.repeat(names, 3).tolist())
        for probe, mate in zip(draw.probes, draw.mate, strict=True):
            plain, loose, strict = (gallery.identify(rows[probe], **far) for far in ({}, {"far": 0.3}, {"far": 0.01}))
            right = mate >= 0 and plain.candidates[0].label == names[mate]
            if mate >= 0:
                counted[plain.verdict if plain.verdict != "named" else "right" if right else "wrong"] += 1
                counted["right at far"] += right and not loose.unknown
            else:
                counted["named"] += plain.verdict == "named"
                counted["far"] += not loose.unknown
                counted["strict"] += not strict.unknown
    for verdict, share in entry["known"].items():
        assert verdict == "intervals" or share == pytest.approx(counted[verdict] / 36), verdict
    assert entry["strangers"]["named"] == pytest.approx(counted["named"] / 72)
    far, not_shown = entry["far"]
    assert far["observed"] == pytest.approx(counted["far"] / 72) and far["right"] == counted["right at far"] / 36
    assert far["expected"] == loose.far.expected and not_shown["observed"] == pytest.approx(counted["strict"] / 72)
    assert not not_shown["proven"] and not strict.far.proven and not_shown["expected"] == strict.far.expected
    assert counted["wrong"] and counted["named"] and counted["unsure"], "nothing is counted in vain"


def test_far_alone_decides_and_says_what_it_can_show(tmp_path, world):
    with filled(tmp_path / "g", world) as gallery:
        shares = []
        for far in (0.05, 0.1, 0.3, 0.6):
            answers = [gallery.identify(query, far=far) for query in world[4]]
            assert {answer.verdict for answer in answers} <= {"named", "unknown"}
            said = answers[0].far
            assert said.asked == far and said.expected <= far and said.classes == 30 and said.proven
            assert said.expected <= said.at_most
            assert all((answer.score > answer.threshold) == (answer.verdict == "named") for answer in answers)
            shares.append(np.mean([not answer.unknown for answer in answers]))
        assert shares == sorted(shares) and shares[-1] > shares[0]
        few = gallery.identify(world[2][0], far=0.01)
        assert not few.far.proven and few.candidates and few.verdict in ("named", "unknown")
        assert few.note == "not proven: 30 labels can show 3.2 % at the least; you asked 1 %"
        with pytest.raises(ValueError, match=r"30 labels can show \d+ % at the least; you asked 1 %"):
            gallery.identify(world[2][0], far=0.01, strict=True)
        bound = gallery.identify(world[2][0], far=0.3, strict=True)
        assert bound.far.at_most <= 0.3 and bound.threshold >= gallery.identify(world[2][0], far=0.3).threshold


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"far": 2.0}, "far must be > 0 and < 1"),
        ({"unknown_prior": 0.0}, "unknown_prior must be > 0 and < 1"),
        ({"sure": 0.3}, "sure must be at least 0.5 and below 1, got 0.3"),
        ({"strict": True}, "strict needs far"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, world, options, sentence):
    with filled(tmp_path / "g", world) as gallery, pytest.raises(ValueError, match=sentence):
        gallery.identify(world[2][0], **options)


def test_an_enrolled_item_is_always_known(tmp_path, world):
    with filled(tmp_path / "g", world) as gallery:
        for i in range(0, len(world[0]), 7):
            for far in (None, 0.01):
                answer = gallery.identify(world[0][i], far=far, unknown_prior=0.99)
                assert answer.label == world[1][i] and answer.confidence > 0.999 and answer.candidates[0].id == i + 1
        gallery.enrol(world[4][0], "someone new")
        assert gallery.identify(world[4][0]).label == "someone new", "from its first item on"
        gallery.enrol(world[4][1], "c0")
        assert gallery.identify(world[4][1], far=0.01).label == "c0", "unlike all others of its label"


def test_what_is_learned_is_kept_with_the_rows_and_read_by_others(tmp_path, world):
    place = tmp_path / "g"
    with filled(place, world) as gallery:
        first = gallery.identify(world[2][0])
        key = recognition.made(gallery._store)
        assert key
    with Gallery.open(place) as other:
        assert other.identify(world[2][0]) == first and recognition.made(other._store) == key
        with Gallery.open(place) as third:
            third.calibrate()
            other.identify(world[2][0])
            assert recognition.made(other._store) != key and other._learned.key == recognition.made(third._store)
        store = other._store
        with store.transaction() as (writer, _):
            writer.execute("UPDATE notes SET content = 'torn' WHERE key = ?", (recognition.KEY,))
    with Gallery.open(place) as again:
        assert again.identify(world[2][0]).verdict == first.verdict, "learned again where it is damaged"


def test_it_is_learned_again_when_a_tenth_of_the_rows_has_changed(tmp_path, world):
    with filled(tmp_path / "g", world) as gallery:
        gallery.identify(world[2][0])
        key = recognition.made(gallery._store)
        gallery.relabel(range(1, 18), "c0")
        assert gallery.calibration_is_current and gallery.identify(world[2][0]).note == ""
        assert recognition.made(gallery._store) == key
        gallery.relabel(18, "c0")
        assert not gallery.calibration_is_current
        gallery.identify(world[2][0])
        assert recognition.made(gallery._store) != key


def test_a_large_gallery_is_not_learned_on_the_way_of_a_query(tmp_path, world, monkeypatch):
    monkeypatch.setattr("nearkin.gallery.gallery.AT_ONCE", 100)
    with filled(tmp_path / "g", world) as gallery:
        answer = gallery.identify(world[2][0])
        assert answer.verdict == "unsure" and answer.candidates and "nearkin gallery calibrate" in answer.note
        gallery.calibrate()
        assert gallery.identify(world[2][0]).p_right is not None
        gallery.relabel(range(1, 60), "c0")
        answer = gallery.identify(world[2][0])
        assert answer.p_right is not None and "33% of the rows have changed since it was calibrated on" in answer.note


def test_a_gallery_that_cannot_be_written_uses_what_it_has(tmp_path, world, monkeypatch):
    with filled(tmp_path / "g", world) as gallery:
        gallery.calibrate()
        gallery.relabel(range(1, 60), "c0")

        def full(self, key, decide):
            raise ValueError("cannot be written")

        monkeypatch.setattr(SqliteStore, "edit", full)
        answer = gallery.identify(world[2][0])
        assert answer.p_right is not None and "cannot be written" in answer.note


def test_rows_that_are_enrolled_meanwhile_are_left_out(tmp_path, world):
    with filled(tmp_path / "g", world) as gallery:
        before = gallery._facts()
        gallery.enrol(world[4][0], "c0")
        (part,) = recognition._parts(gallery._store, before, {"c0": 0, "c1": 1}, {})
        assert part.ids.max() < before.next_id and len(part.ids) == 12


@pytest.mark.parametrize(("exact", "only_near"), [(180, False), (179, True)])
def test_where_the_labels_of_the_nearest_compete_they_do_so_when_it_is_learned(
    tmp_path, world, monkeypatch, exact, only_near
):
    seen = []
    monkeypatch.setattr(recognition, "EXACT", exact)
    monkeypatch.setattr(recognition, "fit", lambda *some, **more: seen.append(more["only_near"]) or fit(*some, **more))
    with filled(tmp_path / "g", world) as gallery:
        gallery.calibrate()
    assert seen == [only_near]


def test_unlabelled_rows_are_found_and_are_no_answer(tmp_path, world):
    names = [UNLABELLED if i % 2 else label for i, label in enumerate(world[1])]
    with Gallery.open(tmp_path / "g", dim=24) as gallery:
        gallery.enrol(world[0], names)
        answers = [gallery.identify_with_hits(query, 8) for query in world[2]]
        assert any(hit.label == UNLABELLED for _, hits in answers for hit in hits)
        assert all(one.label != UNLABELLED for answer, _ in answers for one in answer.candidates)
        assert np.mean([a.candidates[0].label == y for (a, _), y in zip(answers, world[3], strict=True)]) > 0.7
        assert answers[0][0].classes == 30
    with Gallery.open(tmp_path / "h", dim=24) as gallery:
        gallery.enrol(world[0], UNLABELLED)
        answer, hits = gallery.identify_with_hits(world[2][0], 3)
        assert answer.verdict == "unsure" and answer.label is None and answer.similarity == hits[0].similarity
        assert "none of the nearest items has a label" in answer.note and len(hits) == 3


def test_unlabelled_rows_change_no_answer(tmp_path, world):
    with filled(tmp_path / "g", world) as gallery:
        gallery.calibrate()
        query = world[4][0]
        before = gallery.identify(query)
        same = query + 0.03 * np.random.default_rng(0).normal(size=(6, 24))
        gallery.enrol((same / np.linalg.norm(same, axis=1, keepdims=True)).astype(np.float32), UNLABELLED)
        after = gallery.identify(query)
        assert after.p_right == pytest.approx(before.p_right, abs=1e-6) and after.score == pytest.approx(before.score)
        assert [one.label for one in after.candidates][:5] == [one.label for one in before.candidates][:5]


def test_filtered_rows_alone_compete_and_count(tmp_path, world):
    """The answer is that of a gallery of these rows alone, by what the whole one has learned."""
    metas = [{"side": i % 2} for i in range(len(world[1]))]
    with filled(tmp_path / "g", world, metadata=metas) as gallery:
        gallery.calibrate()
        gallery.take_learned()
        learned = gallery._learned
        with Gallery.open(tmp_path / "h", dim=24) as half:
            half.enrol(world[0][::2], world[1][::2])
            half.calibrate()
            half.take_learned()
            half._stored = half._stored[0], learned._replace(state=half._learned.state)
            for query in world[2][::9]:
                one, two = gallery.identify(query, filter={"side": 0}), half.identify(query)
                assert one.candidates[0].label == two.candidates[0].label
                assert one.similarity == pytest.approx(two.similarity, abs=1e-6)
                some = sorted({hit.label for hit in gallery.search(query, 20)})[:4]
                one, two = (
                    gallery.identify(query, filter={"side": 0, "label": some}),
                    half.identify(query, filter={"label": some}),
                )
                assert one.p_right == pytest.approx(two.p_right, abs=1e-6), "by the rows that pass alone"
        only = gallery.identify(world[2][0], filter={"label": ["c3", "c4"]})
        assert {one.label for one in only.candidates} == {"c3", "c4"}
        assert gallery.identify(world[2][0], filter={"side": 5}).candidates == []


def test_labels_of_the_nearest_rows_answer_as_all_labels_do(tmp_path, world, monkeypatch):
    """As on a server and beyond 100,000 rows."""
    with filled(tmp_path / "g", world) as gallery:
        gallery.calibrate()
        whole = [gallery.identify(query) for query in world[2]]
        monkeypatch.setattr(SqliteStore, "label_table", lambda self, key, project, since: None)
        near = [gallery.identify(query) for query in world[2]]
        same = [a.candidates[0].label == b.candidates[0].label for a, b in zip(whole, near, strict=True)]
        assert np.mean(same) > 0.95
        gaps = [abs(a.p_right - b.p_right) for a, b, s in zip(whole, near, same, strict=True) if s]
        assert np.median(gaps) < 0.02


def test_label_sums_follow_every_change(tmp_path, world):
    with filled(tmp_path / "g", world) as gallery:
        gallery.calibrate()
        gallery.identify(world[2][0])  # the sums are made, and kept in step from here on
        gallery.enrol(world[4][:3], ["c1", "new", "new"])
        gallery.relabel([5, 6], "c7")
        gallery.remove([1, 2, 3, 180])
        learned = gallery._learned
        project = learned.recogniser.rows
        table = gallery._store.label_table(learned.key, project)
        with Gallery.open(tmp_path / "g") as fresh:
            again = fresh._store.label_table(learned.key, project)
        assert named(table) == named(again)
        for label in named(table):
            sums = (one.sums[one.numbers[label]] for one in (table, again))
            np.testing.assert_allclose(*sums, atol=1e-4)
        same = gallery._store.label_table(learned.key, project, table.version)
        assert not len(same.changed), "nothing has changed"
        gallery.relabel(9, "c9")
        gallery.enrol(world[4][4], "newer")
        names = list(gallery._store.label_table(learned.key, project, table.version).numbers)
        changed = gallery._store.label_table(learned.key, project, table.version).changed
        assert {names[i] for i in changed} == {world[1][8], "c9", "newer"}


def test_changes_that_are_no_longer_known_change_all(tmp_path, world, monkeypatch):
    monkeypatch.setattr(label_table, "REMEMBERED", 2)
    with filled(tmp_path / "g", world) as gallery:
        gallery.calibrate()
        gallery.identify(world[2][0])
        learned, store = gallery._learned, gallery._store
        sums = [store.label_table(learned.key, learned.recogniser.rows)]
        for label in ("c3", "c4", "c5"):
            gallery.enrol(world[4][len(sums)], label)
            sums.append(store.label_table(learned.key, learned.recogniser.rows))
        changed = [store.label_table(learned.key, learned.recogniser.rows, one.version).changed for one in sums]
        assert changed[0] is None and [len(one) for one in changed[1:]] == [2, 1, 0]


def test_labels_are_counted_in_parts(tmp_path, world, monkeypatch):
    with filled(tmp_path / "g", world) as gallery:
        gallery.remove([5, 6, 7, 150])
        whole = gallery._store.stored_counts()
        monkeypatch.setattr(sqlite, "COUNTED", 7)
        assert gallery._store.stored_counts() == whole == gallery._store.counts() and sum(whole.values()) == 176


def test_scores_after_changes_are_those_of_a_new_process(tmp_path, world):
    with filled(tmp_path / "g", world) as gallery, Gallery.open(tmp_path / "g") as other:
        gallery.calibrate()
        for step in range(4):
            gallery.enrol(world[4][step], f"new {step}")
            gallery.relabel(10 + step, "c5")
            gallery.remove([40 + step])
            for query in world[2][step::12]:
                one = gallery.identify(query)
                other._labels._last = None
                two = other.identify(query)
                assert one.candidates[0].label == two.candidates[0].label
                assert one.p_right == pytest.approx(two.p_right, abs=1e-4)


def named(table):
    return {label: int(table.counts[i]) for label, i in table.numbers.items() if table.counts[i]}


def test_rows_of_an_earlier_encoder_answer_on_their_scale(tmp_path, world):
    with filled(tmp_path / "g", world) as gallery:
        gallery.calibrate()  # of another encoder, when the rows are asked
        draw = np.random.default_rng(0)
        with gallery._store.transaction() as (writer, facts):
            for row in list(gallery._store.scan()):
                if draw.random() < 0.5:
                    new = row._replace(metadata=bridged_metadata(row.metadata, "a"))
                    writer.execute(
                        "UPDATE items SET metadata = ?, sum = ? WHERE id = ?", (new.metadata, checksum(*new), row.id)
                    )
            gallery._store.write_facts(writer, facts.replace(fingerprint="f" * 64))
        scale = Scale((-1.0, 0.0, 0.5, 1.0), (-1.0, 0.1, 0.7, 0.999))
        knots = {"a": [list(scale.cosine), list(scale.similarity)]}
        note = bridge_note.Bridges("f" * 64, knots, {}, None, "not measured").text()
        gallery._store.edit(bridge_note.KEY, lambda _, labels_of: ({}, note))
    with Gallery.open(tmp_path / "g") as gallery:
        number = {label: i for i, label in enumerate(sorted(set(world[1])))}
        parts = list(recognition._parts(gallery._store, gallery._facts(), number, {"a": scale}))
        assert sum(len(part.ids) for part in parts if part.scale == scale) == gallery._store.encoders()["a"] > 50
        assert all(part.asked == (part.scale is None) for part in parts) and sum(len(part.ids) for part in parts) == 180
        answers = [gallery.identify(query) for query in world[2]]
        assert np.mean([a.candidates[0].label == y for a, y in zip(answers, world[3], strict=True)]) > 0.8
        assert all(answer.p_right is not None for answer in answers)
        hits = gallery.search(world[2][0], 5)
        assert any(answers[0].candidates[0].similarity == pytest.approx(hit.similarity) for hit in hits)
        strangers = [gallery.identify(query) for query in world[4]]
        assert np.mean([answer.verdict == "named" for answer in strangers]) < 0.2


def test_photographs_of_another_day_correct_what_a_gallery_believes_of_itself(tmp_path):
    """Enrolled items resemble each other more than new ones do: the share of the known that are right is overrated."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(120, 32))
    day = 0.45 * draw.normal(size=(120, 32))  # what all items of a label and a day share

    def items(labels, each, of_day):
        rows = np.repeat(centres[labels] + of_day * day[labels], each, 0)
        other = (1 - of_day) * 0.45 * np.repeat(draw.normal(size=(len(labels), 32)), each, 0)
        rows = rows + other + 0.35 * draw.normal(size=rows.shape)
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), np.repeat(labels, each)

    enrolled, labels = items(np.arange(40), 6, 1.0)
    shown, shown_labels = items(np.arange(60), 4, 0.0)
    asked, asked_labels = items(np.r_[np.arange(40), np.arange(80, 120)], 4, 0.0)
    with Gallery.open(tmp_path / "g", dim=32) as gallery:
        gallery.enrol(enrolled, [f"c{label}" for label in labels])
        errors = []
        for learn in (lambda: gallery.calibrate(), lambda: gallery.calibrate(shown, [f"c{i}" for i in shown_labels])):
            learn()
            found = [gallery.identify(query, unknown_prior=0.5) for query in asked]
            unknown = np.array([answer.p_unknown for answer in found])
            bins = np.minimum((unknown * 10).astype(int), 9)
            gap = (asked_labels >= 80) - unknown
            errors.append(sum(abs(gap[bins == b].sum()) for b in range(10)) / len(gap))
        assert errors[1] < errors[0] and errors[1] < 0.1, errors
        assert gallery._learned.of == "240 items of another day, 80 of them strangers'"
