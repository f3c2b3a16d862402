"""The gallery of a frozen encoder is calibrated by pairs of its own labels, which it has not learned from."""

import json

import pytest

from calibrations import embeddings
from nearkin.gallery import Gallery, calibration, own_calibration
from nearkin.gallery.schema import Facts
from nearkin.gallery.stores.sqlite import SqliteStore


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


def test_a_gallery_calibrates_itself_and_again_after_a_change(tmp_path):
    rows, labels = embeddings(12, 5, seed=7)
    with frozen_gallery(tmp_path / "g", rows, [f"c{label}" for label in labels]) as gallery:
        assert not gallery.stats()["calibrated"] and not gallery.calibration_is_current
        written = gallery.calibrate()
        assert written["labels"] == 12 and written["pairs"]["classes"] == 12 and gallery.calibration_is_current
        assert gallery.stats()["calibrated"] and gallery.stats()["calibration_classes"] == 12
        assert gallery.verify(rows[0], rows[1]).same_probability is not None
        gallery.relabel([1, 2, 3, 4, 5], "c3")
        assert gallery.calibration_is_current, "less than a tenth of 60 rows"
        gallery.relabel([6, 7], "c3")
        assert not gallery.calibration_is_current
        assert gallery.calibrate_if_changed() == "" and gallery.calibration_is_current


def test_too_few_labels_for_pairs_are_one_sentence(tmp_path):
    rows, labels = embeddings(4, 5, seed=9)
    with frozen_gallery(tmp_path / "g", rows, [f"c{label}" for label in labels]) as gallery:
        assert gallery.calibrate()["pairs"] is None
        answer = gallery.verify(rows[0], rows[1])
        assert answer.same is None and "not calibrated" in answer.note


def test_a_sample_is_even_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "CLASSES", 7)
    monkeypatch.setattr(calibration, "ITEMS", 21)
    rows, labels = embeddings(10, 8, seed=11)
    with frozen_gallery(tmp_path / "g", rows, [f"c{label}" for label in labels]) as gallery:
        vectors, names = own_calibration._sample(gallery)
    assert len(set(names)) == 7 and vectors.shape == (21, 24)
    assert all(names.count(name) == 3 for name in set(names))


def test_pairs_of_a_trained_run_are_those_of_the_run(tmp_path):
    """Its encoder may have learned from the labels; what `identify` learns of them is the gallery's all the same."""
    rows, labels = embeddings(8, 4)
    with frozen_gallery(tmp_path / "g", rows, [f"c{label}" for label in labels]) as gallery:
        store = gallery._store
        with store.transaction() as (writer, facts):
            store.write_facts(writer, facts.replace(run="/runs/birds"))
        learned = gallery.calibrate()
        assert learned["pairs"] is None and learned["labels"] == 8 and not store.note(own_calibration.KEY)


def test_a_damaged_calibration_is_said_with_the_way_out(tmp_path):
    rows, labels = embeddings(8, 4)
    with frozen_gallery(tmp_path / "g", rows, [f"c{label}" for label in labels]) as gallery:
        gallery.calibrate()
        plain = json.loads(gallery._store.note(own_calibration.KEY))
        gallery._store.edit(own_calibration.KEY, lambda _, labels_of: ({}, json.dumps(plain | {"classes": 9})))
        with pytest.raises(
            ValueError, match=r"does not match its checksum.*; nearkin gallery calibrate .* makes it again"
        ):
            own_calibration.load(gallery._store, gallery._store.facts())
        assert gallery.calibrate()["pairs"]["classes"] == 8
