"""A gallery whose rows, description, notes or schema another program wrote, with checksums that match."""

import hashlib
import json
import os
import sqlite3
import tempfile
import threading
import warnings

import numpy as np

from nearkin.gallery import Gallery, GroupEditor, own_calibration, schema

os.chdir(tempfile.mkdtemp())
warnings.simplefilter("ignore")
EYE = np.eye(4, dtype="f4")
ENDLESS = (
    "ALTER TABLE items RENAME TO kept; CREATE VIEW items AS SELECT * FROM kept UNION ALL "
    "SELECT x, x'00', 'a', '', '{}', x'00', x'00' FROM "
    "(WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n WHERE x < 0)"
)


def row(**changed):
    """Writes the first row anew, with its checksum."""

    def forge(connection):
        names = ("content", "label", "name", "metadata", "vector")
        values = connection.execute(f"SELECT {', '.join(names)} FROM items WHERE id = 1").fetchone()
        new = dict(zip(names, values, strict=True)) | changed
        total = schema.checksum(1, *new.values())
        forged = new["metadata"], new["vector"], total
        connection.execute("UPDATE items SET metadata = ?, vector = ?, sum = ? WHERE id = 1", forged)

    return forge


def facts(text=None, **changed):
    """Writes the description anew, with its checksum; a key with None goes."""

    def forge(connection):
        said = json.loads(connection.execute("SELECT said FROM facts").fetchone()[0]) | changed
        plain = json.dumps({key: value for key, value in said.items() if value is not None}) if text is None else text
        connection.execute("UPDATE facts SET said = ?, sum = ?", (plain, hashlib.sha256(plain.encode()).digest()[:8]))

    return forge


def note(key, text="[]", **changed):
    """Writes a note, with its checksum; the one about a bridge with a row that came over it."""

    def forge(connection):
        plain = text if not changed else json.dumps(FORMS[key] | changed)
        connection.execute("CREATE TABLE IF NOT EXISTS notes (key TEXT PRIMARY KEY, content TEXT, sum BLOB)")
        connection.execute("INSERT INTO notes VALUES (?, ?, ?)", (key, plain, schema.note_checksum(key, plain)))
        if key == "bridge":
            facts(beyond={"bridge": True})(connection)
            row(metadata='{"nearkin.encoder":"a"}')(connection)

    return forge


FORMS = {
    "bridge": {"format": 1, "encoder": "", "knots": {}, "summary": {}, "calibration": None, "why": ""},
    "groups": {"version": 1, "scope": "all", "similarity": 0.5, "groups": {}, "alone": 0, "steps": []},
}
STEP = {"kind": "name", "groups": {}, "labels": {"1": ["a", 5]}}
BRIDGE, GROUPS, OWN = "the note about its bridge is none", "the note about the groups of", "its calibration is damaged"
ROW, GALLERY = "that nearkin did not write|is none that nearkin wrote", "the description of the gallery is none"
CASES = {
    "metadata are a list": (row(metadata="[]"), ROW),
    "metadata are a text": (row(metadata='"x"'), ROW),
    "metadata are no JSON": (row(metadata="{"), ROW),
    "metadata are deep": (row(metadata="[" * 100_000), ROW),
    "a short vector": (row(vector=bytes(8)), ROW),
    "a vector of NaN": (row(vector=np.full(4, np.nan, ">f4").tobytes()), ROW),
    "a long vector": (row(vector=np.full(4, 1e30, ">f4").tobytes()), ROW),
    "a description without format": (facts(format=None), GALLERY),
    "a description with a text for its format": (facts(format="1"), GALLERY),
    "a description with more": (facts(evil=1), GALLERY),
    "a description that is a list": (facts(text="[]"), GALLERY),
    "a dimension that is a text": (facts(dim="4"), GALLERY),
    "a store's data that are a list": (facts(beyond=[1]), GALLERY),
    "a run that is a number": (facts(run=5), GALLERY),
    "fewer than no rows": (facts(rows=-1), GALLERY),
    "ids beyond those of SQLite": (facts(next_id=2**70), GALLERY),
    "a bridge that is a list": (note("bridge"), BRIDGE),
    "a bridge without its fields": (note("bridge", '{"format": 1}'), BRIDGE),
    "a scale of texts": (note("bridge", knots={"a": [["x"], ["y"]]}), BRIDGE),
    "a scale that falls": (note("bridge", knots={"a": [[1, 0], [0, 1]]}), BRIDGE),
    "groups that are a list": (note("groups"), GROUPS),
    "a deep note about groups": (note("groups", "[" * 100_000), GROUPS),
    "a group of texts": (note("groups", groups={"1": ["x"]}), GROUPS),
    "a group of rows beyond those of SQLite": (note("groups", groups={"1": [2**70]}), GROUPS),
    "a step without its fields": (note("groups", steps=[{}]), GROUPS),
    "a step that undoes to a number": (note("groups", steps=[STEP]), GROUPS),
    "a deep calibration": (note("calibration", "[" * 100_000), OWN),
    "a deep note on what is learned": (note("recognition", "[" * 100_000), "at least 3 labels"),
    "an endless view": (lambda connection: connection.executescript(ENDLESS), "has a view"),
    "a trigger": (
        lambda connection: connection.execute("CREATE TRIGGER t AFTER INSERT ON items BEGIN DELETE FROM items; END"),
        "a trigger or a virtual table",
    ),
}


def answer(place):
    """What opening and searching it ends with."""
    try:
        with Gallery.open(place, dim=4) as gallery:
            gallery.search(EYE[0], 4, {"colour": "red"})
            answers = gallery.search(EYE[0], 4), GroupEditor(gallery).state(), gallery.identify(EYE[0] + EYE[1])
            own_calibration.load(gallery._store, gallery._store.facts())  # as a gallery of a ready encoder does
            return repr((*answers, gallery.verify(EYE[0], EYE[1])))
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"FAULT {type(error).__name__}: {error}"


faults = 0
for number, (what, (forge, sentence)) in enumerate(CASES.items()):
    with Gallery.open(f"{number}.db", dim=4) as gallery:
        gallery.enrol(EYE, "a", {"colour": "blue"})
    connection = sqlite3.connect(f"{number}.db")
    forge(connection)
    connection.commit()
    connection.close()
    said = []
    thread = threading.Thread(target=lambda place=f"{number}.db", said=said: said.append(answer(place)), daemon=True)
    thread.start()
    thread.join(60)
    text = said[0] if said else "FAULT it does not end"
    bad = "\n" in text or not any(part in text for part in sentence.split("|"))
    faults += bad
    print(f"{'FAULT' if bad else 'ok'}: {what}: {text[:200]}", flush=True)
os._exit(faults > 0)
