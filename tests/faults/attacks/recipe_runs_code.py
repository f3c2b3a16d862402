"""A recipe, run or gallery of a stranger runs code, or deletes a folder, by `data.source = "dataset:MODULE:NAME"`.

It was imported and called with `data.root` from train --recipe, --resume, report, evaluate, calibrate, export, group
and upgrade, and as `unlabelled.folder`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from nearkin import data, training
from nearkin.gallery import Gallery

os.chdir(tempfile.mkdtemp())
Path("notes.txt").write_text('open("PWNED", "w").write("x")\n')
Path("evil.py").write_text('open("PWNED", "w").write("x")\n')
os.makedirs("victim/docs")
draw = np.random.default_rng(0)
labels = np.repeat(np.arange(40), 6)
rows = (draw.normal(size=(40, 8))[labels] + 0.3 * draw.normal(size=(240, 8))).astype(np.float32)
np.savez("vectors.npz", embeddings=rows, labels=labels)
RUN, RMTREE, EVIL = "dataset:runpy:run_path", "dataset:shutil:rmtree", "dataset:evil:NAME"
for name, text in {
    "run": f'[data]\nsource = "{RUN}"\nroot = "notes.txt"\n',
    "rmtree": f'[data]\nsource = "{RMTREE}"\nroot = "victim"\n',
    "unlabelled": f'[unlabelled]\nfolder = "{EVIL}"\n',
}.items():
    Path(f"{name}.toml").write_text(text)
quick = {"training.epochs": 1, "training.batches": 2, "training.device": "cpu", "encoder.hidden": [8], "encoder.dim": 8}
for number, name in enumerate(("theirs", "mine")):
    training.train("vectors.npz", name, settings=quick | {"training.seed": number}, report=False)
with Gallery.open("g.db", "theirs", create=True, device="cpu") as gallery:
    gallery.enrol(list(rows), [str(label) for label in labels], names=[f"{EVIL}/item {i}" for i in range(240)])
    gallery.remember(EVIL)
recipe = Path("theirs/recipe.toml")  # as a stranger may send it
recipe.write_text(recipe.read_text().replace('source = "vectors.npz"', f'source = "{RUN}"\nroot = "notes.txt"'))

VERBS = {
    "train --recipe": ("train", "--recipe", "run.toml", "--out", "new"),
    "train --recipe, which deletes": ("train", "--recipe", "rmtree.toml", "--out", "new"),
    "train --recipe with pictures": ("train", "--recipe", "unlabelled.toml", "--out", "new"),
    "train --resume": ("train", "--resume", "theirs"),
    "report": ("report", "theirs"),
    "evaluate": ("evaluate", "theirs"),
    "calibrate": ("gallery", "calibrate", "theirs"),
    "export": ("export", "theirs", "--onnx"),
    "another text": ("evaluate", "theirs", "--source", RMTREE),
}
good = True
for name, words in VERBS.items():
    done = subprocess.run([sys.executable, "-m", "nearkin", *words], capture_output=True, text=True)
    print(f"{name}: {done.returncode}", done.stderr.strip()[-250:])
    told = "which no file can ask for" in done.stderr or "as the run has recorded it" in done.stderr
    good &= done.returncode == 2 and told and "Traceback" not in done.stderr and not os.path.exists("PWNED")
for name, words in {  # which go on without what would run code, and say so
    "group": ("group", "vectors.npz", "--run", "theirs"),
    "upgrade": ("gallery", "upgrade", "g.db", "--run", "mine", "--with", "vectors.npz"),
}.items():
    done = subprocess.run([sys.executable, "-m", "nearkin", *words], capture_output=True, text=True)
    print(f"{name}: {done.returncode}", done.stderr.strip()[-250:])
    good &= done.returncode == 0 and "which no file can ask for" in done.stderr and not os.path.exists("PWNED")
try:
    training.train(recipe="run.toml")
    good = False
except ValueError as error:
    good &= "which no file can ask for" in str(error)
print("code ran:", os.path.exists("PWNED"), "| folder victim is gone:", not os.path.exists("victim/docs"))
sys.exit(not (good and os.path.exists("victim/docs") and data.load("vectors.npz").labels is not None))
