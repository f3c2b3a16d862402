"""A gallery of a frozen encoder is calibrated by its own labels, each left out of what judges it."""

import json

import numpy as np
import pytest
import torch

from calibrations import embeddings
from commands import output_of, photos, run
from nearkin.evaluation.verification import class_rates
from nearkin.gallery import Gallery, calibration, own_calibration
from nearkin.gallery.results import Calibrator, Hit
from nearkin.gallery.schema import UNLABELLED, Facts
from nearkin.gallery.stores.sqlite import SqliteStore


def left_out(rows, labels):
    names = [f"c{label}" for label in labels]
    return json.loads(json.dumps(calibration.measure_left_out(torch.from_numpy(rows), names), allow_nan=False))


def frozen_gallery(place, rows, labels):
    """A gallery as a frozen encoder makes it; here its vectors are given."""
    store = SqliteStore(place, 5.0)
    store.create(Facts(rows.shape[1]))
    gallery = Gallery(store, store.facts(), None)
    gallery.enrol(list(rows), labels)
    gallery.close()
    store = SqliteStore(place, 5.0)
    with store.transaction() as (writer, facts):
        store.write_facts(writer, facts.replace(fingerprint="f" * 64, run="efficientnet-lite0"))
    return Gallery(store, store.facts(), None)


def test_sums_by_part_are_those_of_the_classes_that_are_left():
    rows, labels = embeddings(11, 5, seed=3)
    groups = [np.flatnonzero(labels == c) for c in range(11)]
    thresholds, parts = np.array([-0.2, 0.1, 0.4, 1.0]), np.arange(11) % 4
    for examples in (1, 2):
        sums = class_rates.accepts_by_part(rows, groups, thresholds, parts, examples)
        np.testing.assert_allclose(sums.sum(2), class_rates.accepts(rows, groups, thresholds, examples), atol=1e-12)
        for part in range(4):
            left = [group for group, of in zip(groups, parts, strict=True) if of != part]
            alone = class_rates.accepts(rows, left, thresholds, examples)
            others = [p for p in range(4) if p != part]
            np.testing.assert_allclose(sums[:, parts != part][..., others].sum(2), alone, atol=1e-12)


@pytest.mark.parametrize("classes", [8, 45])
def test_a_label_is_judged_by_a_calibration_it_took_no_part_in(classes):
    """Whatever the items of a label are: its own curves stay as they are, and those of the others change."""
    rows, labels = embeddings(classes, 6, seed=4)
    before = left_out(rows, labels)
    assert set(before["fold_of"]) == {f"c{c}" for c in range(classes)}
    assert len(before["folds"]) == min(classes, calibration.FOLDS)
    other = rows.copy()
    other[labels == 2] = rows[labels == 3] + 0.01 * rows[labels == 2]  # now confused with another in every item
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    after = left_out(other, labels)
    mine = before["fold_of"]["c2"]
    assert after["fold_of"] == before["fold_of"]

    def log_ratios(fold):
        sets = [Calibrator(plain) for plain in (before, after)]
        return [float((c.curves if fold is None else c.folds[fold])[1].ratio.at(0.9)) for c in sets]

    own, all_labels = log_ratios(mine), log_ratios(None)
    assert abs(own[1] - own[0]) < 0.3, "but for thresholds that are another grid"
    assert all_labels[1] < all_labels[0] - 3, "the calibration by all labels sees the confusion"
    judged = Calibrator(after)
    assert judged._curves_for(1, "c2") is judged.folds[mine][1]
    assert judged._curves_for(1, "new") is judged.curves[1]


def test_identify_answers_a_label_by_the_curves_without_it():
    rows, labels = embeddings(9, 6, seed=5)
    plain = left_out(rows, labels)
    calibrator = Calibrator(plain)
    hits = [Hit(1, "c4", 0.8, "", {}), Hit(2, "c5", 0.5, "", {})]
    answer = calibrator.identify(hits, {6: 9}, None, {"c4": 1, "c5": 1})
    ratios = {
        label: float(calibrator.folds[plain["fold_of"][label]][1].ratio.at(s))
        for label, s in (("c4", 0.8), ("c5", 0.5))
    }
    odds = calibrator.folds[plain["fold_of"]["c4"]][1].ratio.reaches(np.log(9))
    assert answer.threshold == pytest.approx(odds)
    rest = calibrator._ratios_below(0.5, {6: 9}, 2)
    total = 0.5 + 0.5 / 9 * (np.exp(list(ratios.values())).sum() + rest)
    assert answer.candidates[0].confidence == pytest.approx(0.5 / 9 * np.exp(ratios["c4"]) / total)


@pytest.mark.slow
def test_rates_and_confidences_hold_on_what_took_no_part():
    """Thirty galleries of 60 of 300 classes that calibrate themselves: asked for other classes, and for new items."""
    rows, labels = embeddings(300, 8, seed=6)
    within, gaps = 0, []
    for seed in range(30):
        draw = np.random.default_rng(seed)
        inside = np.isin(labels, draw.permutation(300)[:60])
        kept = inside & (np.arange(len(labels)) % 8 < 6)  # two items per class are queries
        calibrator = Calibrator(left_out(rows[kept], labels[kept]))
        unknown = draw.permutation(np.flatnonzero(~inside))[:120]
        known = draw.permutation(np.flatnonzero(inside & ~kept))[:120]
        of_unknown = answers(calibrator, rows[kept], labels[kept], rows[unknown])
        of_known = answers(calibrator, rows[kept], labels[kept], rows[known])
        far = of_unknown[0].far
        within += far is None or np.mean([answer.label is not None for answer in of_unknown]) <= far
        right = [answer.label is None for answer in of_unknown]
        right += [answer.label == f"c{labels[i]}" for answer, i in zip(of_known, known, strict=True)]
        gaps.append(np.mean([answer.confidence for answer in of_unknown + of_known]) - np.mean(right))
    assert within >= 28, within
    assert abs(np.mean(gaps)) < 0.05, np.mean(gaps)


def answers(calibrator, rows, labels, queries):
    """`identify` of each query among these rows, six per label."""
    counts = {f"c{label}": 6 for label in set(labels.tolist())}
    found = []
    for query in queries:
        near = rows @ query
        hits = [Hit(int(i) + 1, f"c{labels[i]}", float(near[i]), "", {}) for i in np.argsort(-near)[:50]]
        found.append(calibrator.identify(hits, {6: len(counts)}, None, counts))
    return found


def test_a_gallery_calibrates_itself_and_again_after_a_change(tmp_path):
    rows, labels = embeddings(12, 5, seed=7)
    with frozen_gallery(tmp_path / "g", rows, [f"c{label}" for label in labels]) as gallery:
        assert not gallery.stats()["calibrated"] and not gallery.calibration_is_current
        written = gallery.calibrate()
        assert written["classes"] == 12 and gallery.calibration_is_current
        assert gallery.stats()["calibrated"] and gallery.stats()["calibration_classes"] == 12
        assert gallery.identify(rows[0]).confidence is not None
        gallery.relabel(1, "c3")
        assert not gallery.calibration_is_current
        assert gallery.calibrate_if_changed() == "" and gallery.calibration_is_current


def test_unlabelled_items_are_found_and_are_no_answer(tmp_path):
    rows, labels = embeddings(12, 5, seed=8)
    names = [UNLABELLED if label >= 6 else f"c{label}" for label in labels]
    with frozen_gallery(tmp_path / "g", rows, names) as gallery:
        assert gallery.calibrate()["classes"] == 6
        plain = gallery.identify(rows[0])
        assert plain.label == "c0" and UNLABELLED not in {candidate.label for candidate in plain.candidates}
        only, hits = gallery.identify_with_hits(rows[40], 3)
        assert hits[0].label == UNLABELLED and UNLABELLED not in {candidate.label for candidate in only.candidates}
    with frozen_gallery(tmp_path / "h", rows, UNLABELLED) as gallery:
        answer, hits = gallery.identify_with_hits(rows[0], 3)
        assert answer.label is None and answer.confidence is None and answer.similarity == pytest.approx(1)
        assert "only similarities" in answer.note and len(hits) == 3
        with pytest.raises(ValueError, match="far needs labels"):
            gallery.identify(rows[0], far=0.1)
        assert "none of the gallery's items has a label" in gallery.calibrate_if_changed()


@pytest.mark.parametrize("classes", [1, 5])
def test_too_few_labels_are_one_sentence(tmp_path, classes):
    rows, labels = embeddings(classes, 5, seed=9)
    with frozen_gallery(tmp_path / "g", rows, [f"c{label}" for label in labels]) as gallery:
        with pytest.raises(ValueError, match="at least 6 of them, 5 with 2 items or more"):
            gallery.calibrate()
        note = gallery.calibrate_if_changed()
        assert f"at least 6 of them, 5 with 2 items or more, as each is left out in turn; got {classes} and" in note
        assert "at least 6" in gallery.identify(rows[0] + 0.5).note


def test_rare_pairs_are_dealt_over_the_folds():
    """Of 400 labels only five have two items: no fold may take all of them."""
    rows, _ = embeddings(405, 1, seed=10)
    labels = [f"c{i}" for i in range(400)] + [f"c{i}" for i in range(5)]
    plain = calibration.measure_left_out(torch.from_numpy(rows), labels)
    assert all("1" in fold for fold in plain["folds"]) and len(plain["folds"]) == calibration.FOLDS


def test_a_sample_is_even_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "CLASSES", 7)
    monkeypatch.setattr(calibration, "ITEMS", 21)
    rows, labels = embeddings(10, 8, seed=11)
    with frozen_gallery(tmp_path / "g", rows, [f"c{label}" for label in labels]) as gallery:
        vectors, names = own_calibration._sample(gallery)
    assert len(set(names)) == 7 and vectors.shape == (21, 24)
    assert all(names.count(name) == 3 for name in set(names))


def test_a_gallery_of_a_trained_run_is_not_calibrated_by_labels_it_may_have_learned(tmp_path):
    rows, labels = embeddings(8, 4)
    with frozen_gallery(tmp_path / "g", rows, [f"c{label}" for label in labels]) as gallery:
        store = gallery._store
        with store.transaction() as (writer, facts):
            store.write_facts(writer, facts.replace(run="/runs/birds"))
        with pytest.raises(ValueError, match="calibrate the run: nearkin gallery calibrate /runs/birds"):
            gallery.calibrate()


def test_the_command_and_a_damaged_file(tmp_path, monkeypatch):
    tiny_vit = pytest.importorskip("tiny_vit")
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tiny_vit.save(tmp_path / "vit")
    photos(tmp_path / "photos", classes=7, each=4)
    output_of(run("enrol", "hf:vit", "photos", "--gallery", "g.db"))
    file = tmp_path / "g.db.calibration.json"
    assert file.is_file(), "calibrated with the enrolment"
    file.unlink()
    assert "is not calibrated" in output_of(run("identify", "photos/class1/0.png", "--gallery", "g.db"))
    assert "calibrated on 7 classes of its own" in output_of(run("gallery", "calibrate", "g.db"))
    said = output_of(run("identify", "photos/class1/0.png", "--gallery", "g.db"))
    assert "class1, confidence" in said and "not calibrated" not in said
    pair = run("verify", "photos/class1/0.png", "photos/class2/0.png", "--gallery", "g.db")
    assert "7 calibration classes" in output_of(pair), "by the gallery's calibration"
    assert "are for a run, got a gallery" in output_of(run("gallery", "calibrate", "g.db", "--part", "val"), 2)
    file.write_text(file.read_text().replace('"classes":7', '"classes":9'))
    said = output_of(run("identify", "photos/class1/0.png", "--gallery", "g.db"), 2)
    assert "does not match its checksum" in said and "nearkin gallery calibrate g.db makes it again" in said
    output_of(run("gallery", "calibrate", "g.db"))
    alone = output_of(run("verify", "photos/class1/0.png", "photos/class2/0.png", "--run", "hf:vit"))
    assert "similarity" in alone and "alone has no calibration" in alone


def test_the_calibration_of_a_database_is_in_the_cache(tmp_path, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path))
    store = SimpleNamespace(kind="postgres", where="postgresql://host/db?gallery=birds")
    one, other = Facts(8), Facts(8)
    paths = {own_calibration.calibration_path(store, facts) for facts in (one, other)}
    assert len(paths) == 2 and all(path.parent == tmp_path / "calibrations" for path in paths)
    assert own_calibration.load(store, one)[0] is None and not own_calibration.is_current(store, one)
