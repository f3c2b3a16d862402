"""A gallery whose rows, description or schema another program wrote, with checksums that match."""

import hashlib
import json
import os
import sqlite3
import tempfile
import threading
import warnings

import numpy as np

from nearkin.gallery import Gallery, schema

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
        connection.execute(
            "UPDATE items SET metadata = ?, vector = ?, sum = ?", (new["metadata"], new["vector"], total)
        )

    return forge


def facts(text=None, **changed):
    """Writes the description anew, with its checksum; a key with None goes."""

    def forge(connection):
        said = json.loads(connection.execute("SELECT said FROM facts").fetchone()[0]) | changed
        plain = json.dumps({key: value for key, value in said.items() if value is not None}) if text is None else text
        connection.execute("UPDATE facts SET said = ?, sum = ?", (plain, hashlib.sha256(plain.encode()).digest()[:8]))

    return forge


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
            return repr(gallery.search(EYE[0], 4, {"colour": "red"}) or gallery.search(EYE[0], 4))
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
