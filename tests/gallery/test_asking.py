"""A whole source asked of a gallery: who is on each item, and what photographs of another day teach."""

import json

import numpy as np
import pytest
from test_gallery import a_run

from commands import photos
from nearkin import gallery as room
from nearkin.gallery import Gallery, LabelConflict, asking, recognition
from nearkin.gallery.answers import Asked


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A gallery of pictures of five labels, and a folder of new ones."""
    monkeypatch.chdir(tmp_path)
    files = sorted(photos(tmp_path / "photos", classes=5, each=4).rglob("*.png"))
    with Gallery.open("g", a_run(tmp_path / "run", 0)) as gallery:
        gallery.enrol(files, [file.parent.name for file in files])
    photos(tmp_path / "new", classes=6, each=3, seed=9)
    return tmp_path


def world(seed, labels=20, strangers=10):
    """A gallery's rows, and new ones with more noise; of these the last labels are strangers'."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(labels + strangers, 16))
    for classes, each, noise in ((range(labels), 6, 0.6), (range(labels + strangers), 4, 0.9)):
        codes = np.repeat(classes, each)
        yield centres[codes] + noise * draw.normal(size=(len(codes), 16)), [f"l{i}" for i in codes]


def test_answers_are_those_of_identify_in_the_order_of_the_source(place):
    told = []
    with Gallery.open("g") as gallery:
        answers = list(room.identify_source(gallery, "new/", sure=0.6, progress=lambda *n: told.append(n)))
        assert [one.name for one in answers] == [f"new/class{c}/{i}.png" for c in range(6) for i in range(3)]
        assert told == [(i + 1, 18) for i in range(18)]
        for one in answers:
            alone = gallery.identify(one.name, sure=0.6)
            assert one.answer.verdict == alone.verdict and one.why == ""
            assert one.answer.p_right == pytest.approx(alone.p_right, abs=1e-4)
            assert one.nearest == gallery.get(one.answer.candidates[0].id).name


def test_the_nearest_row_is_read_where_the_search_has_not_found_it(place, monkeypatch):
    with Gallery.open("g") as gallery:
        answer, hits = gallery.identify_with_hits("new/class0/0.png", 50)
        found = next(hit for hit in hits if hit.id == answer.candidates[0].id)
        monkeypatch.setattr(Gallery, "identify_with_hits", lambda *_, **__: (answer, []))
        assert asking.answered(gallery, "x", "new/class0/0.png", None, Asked()).nearest == found.name


def test_a_file_that_cannot_be_read_does_not_shift_the_others(place):
    (place / "new" / "class1" / "1.png").write_bytes(b"")
    (place / "new" / "class3" / "0.png").write_bytes(b"no picture")
    with Gallery.open("g") as gallery:
        answers = list(room.identify_source(gallery, "new"))
        unreadable = {one.name: one.why for one in answers if one.answer is None}
        assert unreadable == {
            "new/class1/1.png": "new/class1/1.png is empty (0 bytes)",
            "new/class3/0.png": "new/class3/0.png is not a picture of a known format (its first bytes are b'no pictu')",
        }
        after = next(one for one in answers if one.name == "new/class3/1.png")
        assert after.answer.p_right == pytest.approx(gallery.identify(after.name).p_right, abs=1e-4)


def test_a_gallery_that_is_upgraded_meanwhile_answers_with_the_encoder_of_today(place):
    with Gallery.open("g") as gallery:
        answers = room.identify_source(gallery, "new")
        assert next(answers).answer is not None
        room.upgrade("g", a_run(place / "later", 1))
        rest = list(answers)
        assert len(rest) == 17 and all(one.answer is not None for one in rest)
        alone = gallery.identify(rest[5].name)
        assert rest[5].answer.similarity == pytest.approx(alone.similarity, abs=1e-5)


def test_sources_of_the_other_kind_are_refused(place):
    np.savez("v.npz", embeddings=np.eye(8, dtype=np.float32), labels=np.arange(8))
    with Gallery.open("g", "run") as gallery, pytest.raises(ValueError, match="the run's encoder takes pictures"):
        list(room.identify_source(gallery, "v.npz"))
    with Gallery.open("g") as gallery:  # without a run vectors are embeddings
        assert len(list(room.identify_source(gallery, "v.npz"))) == 8
    with (
        Gallery.open("v", dim=8) as gallery,
        pytest.raises(ValueError, match="has pictures, and the gallery no encoder"),
    ):
        list(room.identify_source(gallery, "new"))


def test_no_other_label_is_likelier_than_the_best(tmp_path):
    """P(another label) is shared by the others, none of which may pass the best."""
    (rows, labels), (new, _) = world(4)
    shares = []
    with Gallery.open(tmp_path / "v", dim=16) as gallery:
        gallery.enrol(rows, labels)
        for row in new:
            first, *others = gallery.identify(row).candidates
            shares.append(max(other.confidence for other in others) / first.confidence)
    assert max(shares) <= 1 and np.mean(np.array(shares) > 0.999) > 0.02, "where it would pass, it is held"


# ---- photographs of another day


def test_strangers_of_one_folder_are_one_class(tmp_path):
    (rows, labels), (new, names) = world(1)
    with Gallery.open(tmp_path / "v", dim=16) as gallery:
        gallery.enrol(rows, labels)
        assert gallery.calibrate()["classes"] == 20
        learned = gallery.calibrate(new, names)
        assert learned["classes"] == 30 and learned["of"] == "120 items of another day, 40 of them strangers'"
        assert learned["least_far"] == pytest.approx(1 / 31) and learned["enrolled"] == 0
        expected = [gallery.identify(row, far=0.2).label is not None for row in new[80:]]
        assert np.mean(expected) == pytest.approx(0.2, abs=0.12)


def share_of_unknown(gallery, rows):
    return np.mean([gallery.identify(row, unknown_prior=0.5).p_unknown for row in rows])


def test_another_day_makes_probabilities_hold_on_that_day(tmp_path):
    """New items are farther from their label than the gallery's are from each other: by its own rows too many look
    like strangers."""
    own, asked = [], []
    for seed in range(4):
        (rows, labels), (new, names) = world(seed, 40, 40)
        with Gallery.open(tmp_path / f"{seed}", dim=16) as gallery:
            gallery.enrol(rows, labels)
            own.append(share_of_unknown(gallery, new[1::2]) - 0.5)
            gallery.calibrate(new[::2], names[::2])
            asked.append(share_of_unknown(gallery, new[1::2]) - 0.5)
    assert abs(np.mean(asked)) < 0.03 < abs(np.mean(own)), (own, asked)


def test_what_is_enrolled_is_asked_without_its_own_row(tmp_path):
    (rows, labels), _ = world(2)
    with Gallery.open(tmp_path / "v", dim=16) as gallery:
        gallery.enrol(rows, labels)
        gallery.calibrate()
        stranger = np.random.default_rng(5).normal(size=16)
        own = gallery.identify(stranger).p_unknown
        learned = gallery.calibrate(gallery.vectors(range(1, 121)), labels)
        assert learned["enrolled"] == 120
        assert gallery.identify(stranger).p_unknown == pytest.approx(own, abs=0.02), "as if it had asked itself"
        with pytest.raises(LabelConflict, match='this item is enrolled as "l0" already'):
            gallery.calibrate(gallery.vectors(range(1, 121)), labels[::-1])


def test_of_many_photographs_some_are_drawn_by_the_seed(place, monkeypatch):
    monkeypatch.setattr(asking, "ITEMS", 12)
    with Gallery.open("g") as gallery:
        told = []
        learned = room.calibrate_with(gallery, "new", progress=lambda *n: told.append(n))
        assert learned["of"].startswith("12 items of another day") and told[-1] == (12, 12)
        assert room.calibrate_with(gallery, "new") | {"pairs": None} == learned | {"pairs": None}


@pytest.mark.parametrize(
    "labels, sentence",
    [
        (None, "labels must be one for all items or a list of one per item, got None"),
        (["l0"] * 3, "labels must have one entry per item: 40 items, 3 entries"),
        ("l0", "labels must be 3 different ones or more, got 1"),
        (
            [f"x{i % 4}" for i in range(40)],
            "labels must be the gallery's, as 'l0', or others for strangers; none of the",
        ),
        ([""] * 40, "label must have 1 to 500"),
    ],
)
def test_wrong_labels_are_refused(tmp_path, labels, sentence):
    (rows, own), (new, _) = world(3)
    with Gallery.open(tmp_path / "v", dim=16) as gallery:
        gallery.enrol(rows, own)
        before = gallery.calibrate()
        with pytest.raises((ValueError, TypeError), match=sentence):
            gallery.calibrate(new[:40], labels)
        assert gallery.stats()["learned"].items() <= before.items()


@pytest.mark.parametrize("damage", [{"state": [1, 2, 3, 4]}, {"state": ["x", 1, 2]}, {"state": 7}, {"of": None}])
def test_a_note_that_another_version_wrote_is_made_again(tmp_path, damage):
    (rows, labels), (new, _) = world(6)
    with Gallery.open(tmp_path / "v", dim=16) as gallery:
        gallery.enrol(rows, labels)
        gallery.calibrate()
        plain = json.loads(gallery._store.note(recognition.KEY)) | damage
        gallery._store.edit(recognition.KEY, lambda *_: ({}, json.dumps(plain)))
        with Gallery.open(tmp_path / "v") as again:
            assert again.identify(new[0]).p_right is not None and again.stats()["learned"]["labels"] == 20
