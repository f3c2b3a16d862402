"""Links to a file of the user's, in place of files that we name ourselves, in what a stranger sent: they were followed.

GALLERY.codes, GALLERY.hnsw, RUN/plda.npz (`group --run`), RUN/model.onnx (`export`), RUN/calibration.json.
"""

import os
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from nearkin import training
from nearkin.gallery import Gallery, calibrate, group_source
from nearkin.gallery.items import encoder_info
from nearkin.gallery.results import load_calibration
from nearkin.gallery.stores import hnsw

MINE = b"mine" * 1000
warnings.simplefilter("ignore")
os.chdir(tempfile.mkdtemp())
Path("thesis.txt").write_bytes(MINE)
draw = np.random.default_rng(0)
labels = np.repeat(np.arange(60), 4)
rows = (draw.normal(size=(60, 16))[labels] + 0.5 * draw.normal(size=(240, 16))).astype(np.float32)
np.savez("vectors.npz", embeddings=rows, labels=labels)


def link(path):
    Path(path).unlink(missing_ok=True)
    os.symlink(os.path.abspath("thesis.txt"), path)


def tried(what, call):
    try:
        print(f"{what}:", str(call())[:150])
    except ValueError as error:
        print(f"{what} refused:", error)
        if "\n" in str(error) or "thesis.txt" not in str(error):
            sys.exit(1)
    if Path("thesis.txt").read_bytes() != MINE:
        sys.exit(f"{what}: thesis.txt is overwritten")


with Gallery.open("g.db", dim=16, stored="int8") as gallery:
    gallery.enrol(rows, [str(label) for label in labels])
link("g.db.codes")
with Gallery.open("g.db") as gallery:
    tried("codes", lambda: gallery.search(rows[3], k=1)[0].label)

if find_spec("faiss"):
    import faiss

    index = faiss.IndexHNSWSQ(16, faiss.ScalarQuantizer.QT_fp16, 8)
    index.train(rows)
    index.add(rows)
    link("g.db.hnsw")
    graph = hnsw.Graph(index, np.arange(240), hnsw.DEPTHS[0], 1.0)
    tried("hnsw", lambda: hnsw.save(Path("g.db.hnsw"), graph, "g"))

quick = {"training.epochs": 1, "training.batches": 2, "training.device": "cpu", "encoder.hidden": [8], "encoder.dim": 8}
training.train("vectors.npz", "run", settings=quick, report=False)
link("run/plda.npz")
tried("plda", lambda: group_source("vectors.npz", "run", device="cpu").notes)
calibrate("run", device="cpu")
Path("run/calibration.json").rename("run/elsewhere.json")
os.symlink("elsewhere.json", "run/calibration.json")
if load_calibration(Path("run"), encoder_info("run").fingerprint)[0] is not None:
    sys.exit("a calibration is read through a link")
link("run/calibration.json")
tried("calibration", lambda: calibrate("run", device="cpu"))
if find_spec("onnxscript") and find_spec("onnxruntime"):
    link("run/model.onnx")
    tried("onnx", lambda: training.export_onnx("run", "run/model.onnx"))
sys.exit(Path("thesis.txt").read_bytes() != MINE)
