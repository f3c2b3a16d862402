"""A gallery gets another encoder: rows bridged at once, renewed from their originals, on both stores."""

import io
import json
import os
import signal
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_gallery import STORES, place_of

import tiny_vit
from commands import output_of, run, separate_runner
from nearkin import gallery as room
from nearkin import models
from nearkin.cli import app
from nearkin.core.errors import EncoderChanged
from nearkin.gallery import Gallery, bridge, bridge_note, encoder_upgrade, opening
from nearkin.gallery.schema import ENCODER, Renewed, pack
from nearkin.gallery.stores.postgres_connection import Connections, parse_address

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))

COUNT, UPLOADS = 60, 12
CHEAP = {"procrustes": ((0.1,),), "ridge": ((0.1,),)}


def picture(number):
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (20, 24), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


def a_run(folder, dim):
    preparation = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 1, "flip": False}
    models.save(models.build("small-cnn", channels=1, size=16, width=4, dim=dim, seed=dim), folder, preparation)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return [a_run(tmp_path_factory.mktemp("run"), dim) for dim in (8, 12, 10)]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(encoder_upgrade, "FEWEST", 20)
    monkeypatch.setattr(bridge, "KINDS", CHEAP)


@pytest.fixture(params=STORES)
def place(request, tmp_path, runs, few):
    """A gallery of 60 pictures in files and 12 uploads, by the first encoder."""
    place = place_of(request.param, tmp_path)
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(COUNT):
        (photos / f"{i}.png").write_bytes(picture(i))
    with Gallery.open(place, runs[0]) as gallery:
        gallery.enrol([str(photos / f"{i}.png") for i in range(COUNT)], [f"c{i % 12}" for i in range(COUNT)])
        gallery.enrol([picture(1000 + i) for i in range(UPLOADS)], "upload", {"colour": "red"})
    return place


def rows_of(place):
    with Gallery.open(place) as gallery:
        return {hit.id: (hit, vector) for hit, vector in gallery.rows()}


def test_rows_with_originals_are_renewed_and_the_others_bridged(place, runs, tmp_path):
    result = room.upgrade(place, runs[1])
    assert (result.rows, result.renewed, result.bridged) == (72, 60, 12) and result.pairs == COUNT
    assert {row["rows"] for row in result.summary["rows"]} == {"old-old", "new-old", "new-new"}
    assert result.summary["pairs"] + result.summary["held_out"] == COUNT
    with Gallery.open(place, runs[1]) as gallery:
        stats = gallery.stats()
        assert stats["dim"] == gallery.dim == 12 and list(stats["bridged"].values()) == [12] and gallery.check().whole
        for hit, vector in gallery.rows():
            assert hit.bridged == (hit.id > COUNT) and vector.shape == (12,)
            assert hit.metadata == ({"colour": "red"} if hit.bridged else {})
        seen = gallery.see([picture(i) for i in range(COUNT)])
        np.testing.assert_allclose(gallery.vectors(range(1, COUNT + 1)), [one.vector for one in seen], atol=1e-5)
        assert gallery.search(picture(7), 1)[0].id == 8 and len(gallery.search(picture(7), 100)) == 72
        assert {hit.bridged for hit in gallery.search(picture(1003), 5, {"colour": "red"})} == {True}
        assert gallery.identify(picture(7)).label == "c7"
        near = gallery.search(picture(1003), 72)
        assert [hit.similarity for hit in near] == sorted((hit.similarity for hit in near), reverse=True)
        gallery.enrol(picture(5000), "new")
        assert not gallery.search(picture(5000), 1)[0].bridged
    with pytest.raises(ValueError, match=r"was made with another encoder.*nearkin gallery upgrade"):
        Gallery.open(place, runs[0])
    kept = result.kept if "://" not in place else f"{place}_previous_1"
    assert {hit.bridged for hit, _ in rows_of(kept).values()} == {False}
    with Gallery.open(kept, runs[0]) as gallery:
        assert gallery.search(picture(7), 1)[0].id == 8  # as it was


def test_the_same_command_again_finishes_and_changes_nothing(place, runs, tmp_path):
    for i in range(40, COUNT):
        (tmp_path / "photos" / f"{i}.png").rename(tmp_path / f"{i}.png")
    assert room.upgrade(place, runs[1]).bridged == 32
    assert room.upgrade(place, runs[1]).renewed == 0
    for i in range(40, COUNT):
        (tmp_path / f"{i}.png").rename(tmp_path / "photos" / f"{i}.png")
    again = room.upgrade(place, runs[1])
    assert (again.renewed, again.bridged, again.kept) == (20, 12, "")
    with Gallery.open(place, runs[1]) as gallery:
        gallery.remove([hit.id for hit, _ in gallery.rows() if hit.bridged])
    assert room.upgrade(place, runs[1]).bridged == 0
    with Gallery.open(place, runs[1]) as gallery:
        assert bridge_note.load(gallery._store, gallery._store.facts()) is None and gallery.stats()["bridged"] == {}


def test_a_changed_original_is_no_original(place, runs, tmp_path):
    (tmp_path / "photos" / "3.png").write_bytes(picture(77))
    assert room.upgrade(place, runs[1]).bridged == UPLOADS + 1


def test_an_interrupted_renewal_keeps_what_is_done(place, runs, monkeypatch):
    monkeypatch.setattr(encoder_upgrade, "MOST", 30)  # the others are renewed after the switch
    monkeypatch.setattr(encoder_upgrade, "BATCH", 8)

    def stop(what, done, total):
        if what == "renewing rows" and done >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        room.upgrade(place, runs[1], progress=stop)
    bridged = sum(hit.bridged for hit, _ in rows_of(place).values())
    assert UPLOADS < bridged < COUNT
    with Gallery.open(place, runs[1]) as gallery:
        assert gallery.check().whole and gallery.search(picture(7), 1)[0].label == "c7"
    assert room.upgrade(place, runs[1]).bridged == UPLOADS


def test_an_interrupted_switch_leaves_the_gallery_as_it_was(place, runs):
    before = rows_of(place)

    def stop(what, done, total):
        if what == "mapping rows":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        room.upgrade(place, runs[1], progress=stop)
    after = rows_of(place)
    assert before.keys() == after.keys() and all((before[i][1] == after[i][1]).all() for i in before)
    with Gallery.open(place, runs[0]) as gallery:
        assert gallery.check().whole and gallery.stats()["bridged"] == {}


def test_a_gallery_that_is_open_follows(place, runs):
    with Gallery.open(place, runs[0]) as gallery, Gallery.open(place) as without:
        seen = gallery.see([picture(7)])[0]
        assert gallery.search(picture(7), 1)[0].id == 8 and without.search(seen, 1)[0].id == 8
        room.upgrade(place, runs[1])
        with pytest.raises(EncoderChanged, match="was upgraded to another encoder meanwhile"):
            gallery.search(seen)
        with pytest.raises(EncoderChanged):
            gallery.enrol([seen._replace(content=b"x" * 32)], "old vector")
        assert gallery.search(picture(7), 1)[0].id == 8 and gallery.dim == 12
        assert gallery.identify(picture(9)).label == "c9"
        with pytest.raises(OSError, match="open it again"):
            without.search(seen, 1)
        ids = gallery.enrol([picture(6000)], "later").ids
        assert gallery.search(picture(6000), 1)[0].id == ids[0] and "old vector" not in gallery.labels()


def test_an_enrolment_across_the_change_is_of_the_new_encoder(place, runs):
    with Gallery.open(place, runs[0]) as gallery:
        room.upgrade(place, runs[1])
        (id,) = gallery.enrol([picture(6000)], "later").ids  # not read before: the store refuses the old vector
        assert gallery.vectors([id]).shape == (1, 12) and not gallery.get(id).bridged


def test_open_readers_see_renewed_vectors_at_once(place, runs):
    room.upgrade(place, runs[1], renew_rows=False)
    hidden = rows_of(place)
    with Gallery.open(place, runs[1]) as gallery:
        gallery.search(picture(1), 1, {"colour": "red"})
        assert sum(hit.bridged for hit, _ in hidden.values()) == UPLOADS
        row, index = gallery._store.bridged(0, 1)[0], gallery._store.facts().index_id
        (seen,) = gallery.see([picture(1000)])
        renewed = Renewed(row.id, row.content, pack(seen.vector[None])[0], None)
        with Gallery.open(place, runs[1]) as other:
            assert other._store.renew([renewed], other.fingerprint) == 1
            assert other._store.renew([renewed], other.fingerprint) == 0  # it is done
            with pytest.raises(EncoderChanged):
                other._store.renew([renewed], "of another")
        if gallery._store.kind == "sqlite":  # an index file of the vectors before is not used
            assert gallery._store.facts().index_id != index != gallery._store.facts().gallery
        hit = gallery.search(picture(1000), 1)[0]
        assert (hit.id, hit.bridged) == (row.id, False) and hit.similarity > 1 - 1e-5
        assert len(gallery.search(picture(1000), 20, {"colour": "red"})) == UPLOADS


def test_backup_copy_restore_and_export_carry_the_bridge(place, runs, tmp_path):
    room.backup(place, tmp_path / "kept")
    room.upgrade(place, runs[1])
    room.backup(place, tmp_path / "kept")
    assert [state.full for state in room.check_backup(tmp_path / "kept")] == [True, True]
    room.restore(tmp_path / "kept", tmp_path / "restored")
    room.copy(place, tmp_path / "copied")
    expected = rows_of(place)
    with Gallery.open(place, runs[1]) as gallery:
        hits, note = gallery.search(picture(1003), 20), gallery._store.note(bridge_note.KEY)
        assert gallery.export(tmp_path / "rows.jsonl") == 72
    for other in (tmp_path / "restored", tmp_path / "copied"):
        assert [hit for hit, _ in rows_of(other).values()] == [hit for hit, _ in expected.values()]
        with Gallery.open(other, runs[1]) as gallery:
            assert gallery.search(picture(1003), 20) == hits and gallery._store.note(bridge_note.KEY) == note
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sum("encoder" in line for line in lines) == UPLOADS and ENCODER not in str(
        [one["metadata"] for one in lines]
    )


def test_a_second_upgrade_takes_bridged_rows_along(place, runs):
    room.upgrade(place, runs[1])
    result = room.upgrade(place, runs[2])
    assert (result.bridged, result.rows) == (UPLOADS, 72) and "two bridges" in result.why
    with Gallery.open(place, runs[2]) as gallery:
        assert gallery.check().whole and gallery.dim == 10 and len(gallery.search(picture(1003), 100)) == 72
        assert len(bridge_note.load(gallery._store, gallery._store.facts()).scales) == 2
        assert gallery.identify(picture(7)).label, "enrolled, and known over two bridges"
        assert gallery.verify(picture(7), picture(8)).same is None, "pairs are not calibrated across two bridges"


def test_too_few_pairs_are_refused_with_their_number(place, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder_upgrade, "FEWEST", 200)
    before = rows_of(place)
    with pytest.raises(ValueError, match=r"60 items can be seen by both encoders, a bridge needs 200.*--with FOLDER"):
        room.upgrade(place, runs[1])
    assert before.keys() == rows_of(place).keys()
    more = tmp_path / "more"
    more.mkdir()
    for i in range(150):
        (more / f"{i}.png").write_bytes(picture(20_000 + i))
    assert room.upgrade(place, runs[1], with_source=more).pairs == 210


def test_a_gallery_whose_originals_are_all_there_needs_no_bridge(place, runs, monkeypatch):
    monkeypatch.setattr(encoder_upgrade, "FEWEST", 10_000)
    with Gallery.open(place, runs[0]) as gallery:
        gallery.remove(range(COUNT + 1, COUNT + UPLOADS + 1))
    result = room.upgrade(place, runs[1])
    assert (result.pairs, result.renewed, result.bridged, result.rows) == (0, COUNT, 0, COUNT)
    with Gallery.open(place, runs[1]) as gallery:
        assert gallery.search(picture(7), 1)[0].id == 8 and gallery.check().whole


@pytest.mark.parametrize("added", ["files", "many files", "uploads"])
def test_an_upgrade_goes_on_where_rows_are_enrolled_meanwhile(place, runs, tmp_path, monkeypatch, added):
    """All originals were there, so there is no bridge: files are embedded too, uploads need one."""
    monkeypatch.setattr(encoder_upgrade, "BATCH", 8)
    if added != "uploads":
        monkeypatch.setattr(encoder_upgrade, "FEWEST", 10_000)
    count, times = (20 if added == "many files" else 3), []
    new = [tmp_path / "photos" / f"new {i}.png" for i in range(count)]
    for i, path in enumerate(new):
        path.write_bytes(picture(3000 + i))
    with Gallery.open(place, runs[0]) as gallery:
        gallery.remove(range(COUNT + 1, COUNT + UPLOADS + 1))

    def progress(what, done, total):
        if what == "mapping rows" or done < total:
            return
        times.append(what)
        if times == ["embedding originals"]:
            with Gallery.open(place, runs[0]) as gallery:
                gallery.remove(1)
                gallery.enrol([picture(3000 + i) if added == "uploads" else str(new[i]) for i in range(count)], "new")

    result = room.upgrade(place, runs[1], progress=progress)
    assert result.rows == COUNT - 1 + count and result.bridged == (count if added == "uploads" else 0)
    with Gallery.open(place, runs[1]) as gallery:
        assert gallery.dim == 12 and gallery.check().whole and gallery.search(picture(7), 1)[0].id == 8
        hits = gallery.search(picture(3001), count, {"label": "new"})
        assert [hit.bridged for hit in hits] == [added == "uploads"] * count
        assert added == "uploads" or hits[0].similarity > 0.999


def test_a_gallery_of_vectors_and_a_lost_run_are_refused(tmp_path, runs, few):
    with Gallery.open(tmp_path / "v", dim=4) as gallery:
        gallery.enrol(np.eye(4), "a")
    with pytest.raises(ValueError, match="has vectors of an unknown encoder, which cannot be upgraded"):
        room.upgrade(tmp_path / "v", runs[1])
    lost = a_run(tmp_path / "lost", 9)
    with Gallery.open(tmp_path / "g", lost) as gallery:
        gallery.enrol([picture(i) for i in range(5)], "a")
    (lost / "encoder.json").unlink()
    with pytest.raises(ValueError, match=r"--with needs the encoder that it was made with, which cannot be opened"):
        room.upgrade(tmp_path / "g", runs[1], with_source=tmp_path)


def test_a_damaged_note_leaves_similarities_only(tmp_path, runs, few):
    with Gallery.open(tmp_path / "g", runs[0]) as gallery:
        gallery.enrol([picture(i) for i in range(5)], "a")
        for i in range(30):
            (tmp_path / f"{i}.png").write_bytes(picture(100 + i))
        gallery.enrol([str(tmp_path / f"{i}.png") for i in range(30)], [f"c{i % 12}" for i in range(30)])
    room.upgrade(tmp_path / "g", runs[1])
    with Gallery.open(tmp_path / "g", runs[1]) as gallery, gallery._store.transaction() as (writer, _):
        writer.execute("UPDATE notes SET content = content || ' '")
    with Gallery.open(tmp_path / "g", runs[1]) as gallery:
        assert "note about its bridge is damaged" in gallery.identify(picture(3)).note
        assert len(gallery.search(picture(3), 99)) == 35


@pytest.mark.parametrize("labels", [12, 10, COUNT])  # 10: too few are held out for an interval; one picture of each
def test_the_command(tmp_path, runs, few, labels):
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(COUNT):
        (photos / f"{i}.png").write_bytes(picture(i))
    place = str(tmp_path / "g")
    with Gallery.open(place, runs[0]) as gallery:
        gallery.enrol([str(photos / f"{i}.png") for i in range(COUNT)], [f"c{i % labels}" for i in range(COUNT)])
        gallery.enrol([picture(1000 + i) for i in range(UPLOADS)], "upload")
    out = output_of(run("gallery", "upgrade", place, "--run", runs[1]))
    assert "fitted on" in out and "new-old" in out and "72 rows, 60 embedded again, 12 over the bridge" in out
    assert "12 rows of encoder" in output_of(run("gallery", "stats", place))
    plain = json.loads(output_of(run("gallery", "upgrade", place, "--run", runs[1], "--json")))
    assert plain["bridged"] == 12 and plain["renewed"] == 0
    result = separate_runner().invoke(app, ["gallery", "upgrade", str(tmp_path / "no"), "--run", str(runs[1])])
    assert result.exit_code == 2 and "no such gallery" in result.stderr and "Traceback" not in result.stderr


def test_classes_of_several_items_are_held_out_whatever_the_others():
    labels = [f"pair {i // 2}" for i in range(20)] + [f"single {i}" for i in range(400)]
    for seed in range(20):
        codes, held, by_class = encoder_upgrade.split_classes(labels, 0.4, seed)
        assert by_class and held[:20].sum() == 8 and held[20:].sum() == 160
        assert all(held[codes == code].all() or not held[codes == code].any() for code in range(codes.max() + 1))
    assert not encoder_upgrade.split_classes(labels[2:], 0.4, 0)[2], "9 labels of several items are too few"


@pytest.mark.parametrize("phase", ["embedding originals", "fitting the bridge"])
def test_an_upgrade_that_another_one_overtakes_goes_on_with_its_rows(place, runs, phase, monkeypatch):
    monkeypatch.setattr(encoder_upgrade, "BATCH", 16)
    room.upgrade(place, runs[1])
    overtaken = []

    def progress(what, *_):
        if what == phase and not overtaken:
            overtaken.append(room.upgrade(place, runs[0], renew_rows=False))

    result = room.upgrade(place, runs[0], progress=progress)
    assert overtaken[0].kept and not result.kept and (result.rows, result.bridged) == (72, UPLOADS)
    with Gallery.open(place, runs[0]) as gallery:
        assert gallery.dim == 8 and gallery.check().whole and gallery.search(picture(7), 1)[0].id == 8


@pytest.mark.slow
def test_a_commit_that_outlives_its_client_does_not_end_the_next_upgrade(runs, few, tmp_path, monkeypatch):
    """The server goes on with what a killed process has sent, and may be slow; the command is begun again meanwhile."""
    place = place_of("postgres", tmp_path)
    import psycopg
    from backup_kills import _child

    photos = [tmp_path / f"{i}.png" for i in range(COUNT)]
    for i, path in enumerate(photos):
        path.write_bytes(picture(i))
    with Gallery.open(place, runs[1]) as gallery:
        gallery.enrol([*map(str, photos), picture(1000)], "a")
    monkeypatch.setattr(encoder_upgrade, "BATCH", 16)
    held = 42  # an advisory lock that stands for a slow disk
    with psycopg.connect(parse_address(place).url, autocommit=True) as disk:
        disk.execute("SELECT pg_advisory_lock(%s)", (held,))

        @contextmanager
        def killed_in_commit(self, key):
            connection = self._connection(True)
            connection.execute("BEGIN")
            with connection.cursor(binary=True) as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (key,))
                yield cursor
            connection.pgconn.send_query(f"SELECT pg_advisory_lock({held}); COMMIT".encode())
            connection.pgconn.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        def work(_):
            Connections.writing = killed_in_commit
            room.upgrade(place, runs[0])

        child, pipe = _child(work)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        os.close(pipe)
        committed = []

        def progress(what, *_):
            if what == "embedding originals" and not committed:
                assert disk.execute("SELECT pg_advisory_unlock(%s)", (held,)).fetchone() == (True,)
                with closing(opening.store_at(place, 30)) as store, store.transaction() as (_, facts):
                    committed.append(facts.dim)  # a writer waits for the one before

        result = room.upgrade(place, runs[0], progress=progress)
    assert committed == [8] and not result.kept and (result.rows, result.bridged) == (COUNT + 1, 1)
    with Gallery.open(place, runs[0]) as gallery:
        assert gallery.check().whole and gallery.search(picture(7), 1)[0].id == 8


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_kills_lose_nothing(store, tmp_path, monkeypatch):
    """Some of the kills of `studies/upgrade_kills.py`, in a smaller gallery."""
    import upgrade_kills

    for name, value in (("ORIGINALS", 140), ("UPLOADS", 20), ("PAIRS", 80), ("TICKS", 15), ("MOST_BATCHES", 3)):
        monkeypatch.setattr(upgrade_kills, name, value)
    lines = []
    case = upgrade_kills.Case(place_of(store, tmp_path), tmp_path)
    assert upgrade_kills.study(case, 8, 1, None, say=lambda line, **_: lines.append(line)) == 0, lines


def test_a_gallery_of_a_frozen_encoder_is_calibrated_again(tmp_path):
    """By its own labels, as it was before."""
    encoders = [f"hf:{tiny_vit.save(tmp_path / str(size), hidden_size=size)}" for size in (16, 32)]
    paths, labels = [tmp_path / f"{i}.png" for i in range(48)], [f"kind {i // 4}" for i in range(48)]
    for i, path in enumerate(paths):
        path.write_bytes(picture(i))
    with Gallery.open(tmp_path / "g.db", encoders[0]) as gallery:
        gallery.enrol([*map(str, paths)], labels)
        gallery.calibrate()
    result = room.upgrade(tmp_path / "g.db", encoders[1])
    assert (result.renewed, result.bridged, result.why) == (48, 0, "")
    with Gallery.open(tmp_path / "g.db", encoders[1]) as gallery:
        assert gallery.calibration_is_current and gallery.identify(paths[3]).confidence is not None
        gallery.relabel(range(1, 49), "one kind")
    assert "at least 3 labels are needed" in room.upgrade(tmp_path / "g.db", encoders[1]).why


def test_a_compatible_run_searches_at_once_and_upgrades_as_any_other(place, runs, tmp_path):
    """Its encoder is nearly the old one, and says so: as after training with `compatible.run`."""
    encoder, preparation = models.load(runs[0])
    with torch.no_grad():
        for weight in encoder.parameters():
            weight += 1e-4
    description = json.loads((runs[0] / "encoder.json").read_text())
    old = {"run": str(runs[0]), "encoder": models.io.fingerprint(description), "dim": 8}
    models.save(encoder, tmp_path / "new", preparation, compatible=old)
    with Gallery.open(place, tmp_path / "new") as gallery:
        before = gallery.search(picture(1003), 1, {"colour": "red"})[0]
        assert gallery.search(picture(7), 1)[0].id == 8 and before.id == COUNT + 4 and before.similarity > 0.99
        with pytest.raises(ValueError, match="it can search them, not enrol among them"):
            gallery.enrol(picture(5000), "new")
    result = room.upgrade(place, tmp_path / "new")
    assert (result.renewed, result.bridged) == (COUNT, UPLOADS)
    with Gallery.open(place, tmp_path / "new") as gallery:
        assert gallery.search(picture(7), 1)[0].id == 8
        assert gallery.search(picture(1003), 1, {"colour": "red"})[0].id == COUNT + 4
        gallery.enrol(picture(5000), "new")
        assert gallery.search(picture(5000), 1)[0].label == "new"
