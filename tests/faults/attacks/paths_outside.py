"""Paths of tables and of Hugging Face datasets lead out of their folder: `../private.png`, an absolute path."""

import os
import sys
import tempfile
from importlib.util import find_spec

from PIL import Image

from nearkin import data

os.chdir(tempfile.mkdtemp())
os.makedirs("shared/within")
for name in ("private.png", "shared/1.png", "shared/2.png", "shared/within/3.png"):
    Image.new("RGB", (8, 8)).save(name)
PRIVATE = os.path.abspath("private.png")


def answer(source, row):
    try:
        return f"{len(data.load(source).pictures.read(row))} bytes of private.png were read"
    except ValueError as error:
        return str(error)


answers = {}
for path in ("../private.png", "within/../../private.png", PRIVATE):
    with open("shared/t.csv", "w") as file:
        file.write(f"path,label\n1.png,a\n2.png,b\n{path},b\n")
    answers[path] = answer("shared/t.csv", 2)
within = (
    "within/../1.png",
    os.path.abspath("shared/2.png"),
    "within/3.png",
)  # which stay within, however they are written
with open("shared/t.csv", "w") as file:
    file.write("path,label\n" + "".join(f"{path},a\n" for path in within))
good = len(data.load("shared/t.csv").pictures) == 3

if find_spec("datasets"):
    import datasets
    import pyarrow

    rows = {"image": [{"bytes": b"x", "path": None}] * 3, "label": ["a", "b", "b"]}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk("hf")
    (name,) = [name for name in os.listdir("hf") if name.endswith(".arrow")]
    os.rename("shared/1.png", "hf/1.png")
    with open(f"hf/{name}", "rb") as file:
        table = pyarrow.ipc.open_stream(file).read_all()
    paths = ["hf/1.png", "private.png", PRIVATE]
    cells = [{"bytes": None, "path": path} for path in paths]
    column = pyarrow.chunked_array([pyarrow.array(cells, table.schema.field("image").type)])
    table = table.set_column(table.schema.get_field_index("image"), table.schema.field("image"), column)
    with pyarrow.ipc.new_stream(f"hf/{name}", table.schema) as stream:
        stream.write_table(table)
    good &= len(data.load("hf-dataset:hf").pictures.read(0)) == os.path.getsize("hf/1.png")
    answers |= {f"hf-dataset: {path}": answer("hf-dataset:hf", row) for row, path in enumerate(paths) if row}
    with open("hf/state.json") as file:
        state = file.read()
    os.rename(f"hf/{name}", "elsewhere.arrow")
    with open("hf/state.json", "w") as file:
        file.write(state.replace(name, "../elsewhere.arrow"))
    answers["hf-dataset: ../elsewhere.arrow"] = answer("hf-dataset:hf", 0)

print(*answers.items(), sep="\n")
refused = all("outside of" in line and "--allow-outside" in line and "\n" not in line for line in answers.values())
sys.exit(not (refused and good))
