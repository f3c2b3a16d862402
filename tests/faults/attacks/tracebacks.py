"""Files that others have forged, and a recipe that asks for more memory than there is: a sentence, and no traceback."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from nearkin.gallery import Gallery, backup, backup_points

os.chdir(tempfile.mkdtemp())
EYE = np.eye(4, dtype="f4")


def zip_with_an_empty_name():
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.writestr("x", b"")
    content = bytearray(Path("a.zip").read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 28 : at + 32] = b"\0\0\1\0"  # the length of the name, and of the extra field
    Path("a.zip").write_bytes(content)
    return "group", "a.zip", "--similarity", "0.9"


def npz_of_a_later_zip_version():
    np.savez("a.npz", embeddings=EYE)
    content = bytearray(Path("a.npz").read_bytes())
    content[content.index(b"PK\1\2") + 6] = 127
    Path("a.npz").write_bytes(content)
    return "group", "a.npz", "--similarity", "0.9"


def recipe(name, setting):
    Path(name).write_text(f'[encoder]\nname = "small-cnn"\n{setting}\n')
    return "train", "--recipe", name, "--out", "run"


def forged_backup():
    with Gallery.open("g.db", dim=4) as gallery:
        gallery.enrol(EYE, ["a"] * 4)
    backup("g.db", "kept")
    point = backup_points.Point(1, Path("kept/point-000001.full"), True)
    blocks = [(kind, content) for kind, content, _ in backup_points.read(point, None)]
    checksum, out = bytes(32), backup_points.FORMAT
    for kind, content in [(b"H", b"{}"), *blocks[1:]]:
        head = backup_points.HEAD.pack(kind, len(content))
        checksum = hashlib.sha256(checksum + head + content).digest()
        out += head + content + checksum
    point.path.write_bytes(out)
    return "gallery", "restore", "kept", "new.db"


def forged_index():
    with Gallery.open("d.db", dim=4, stored="int8") as gallery:
        gallery.enrol(EYE, ["a"] * 4)
        gallery.warm()
    content = Path("d.db.codes").read_bytes()
    size = int.from_bytes(content[-16:-8], "little")
    head = json.loads(content[-48 - size : -48])
    del head["next_id"]
    text = json.dumps(head).encode()
    tail = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + b"nearkin1"
    Path("d.db.codes").write_bytes(content[: -48 - size] + text + tail)
    np.save("q.npy", np.ones(4))
    return "search", "q.npy", "--gallery", "d.db"


CASES = {
    "zip with an empty name": (zip_with_an_empty_name(), 2, "not a readable .zip archive"),
    "npz of a later zip version": (npz_of_a_later_zip_version(), 2, "a.npz: not a readable"),
    "no memory on the CPU": (recipe("a.toml", "width = 1000000"), 2, "out of memory; use a smaller encoder"),
    "no memory in any number": (recipe("b.toml", f"width = {10**15}"), 2, "out of memory; use a smaller encoder"),
    "a dimension beyond all": (recipe("c.toml", f"dim = {10**19}"), 2, "dim must be at most 1,048,576"),
    "forged backup": (forged_backup(), 2, "is no point that nearkin wrote"),
    "the same point looked at": (("gallery", "points", "kept"), 1, "is no point that nearkin wrote"),
    "forged index": (forged_index(), 0, "d.db.codes was damaged, and is made again"),
}
faults = 0
for what, (words, code, sentence) in CASES.items():
    done = subprocess.run([sys.executable, "-m", "nearkin", *words], capture_output=True, text=True)
    text = done.stdout + done.stderr
    bad = done.returncode != code or "Traceback (most" in text or sentence not in " ".join(text.split())
    faults += bad
    print(f"{'FAULT' if bad else 'ok'}: {what}: exit {done.returncode}: {text.strip()[-300:] if bad else sentence}")
sys.exit(faults > 0)
