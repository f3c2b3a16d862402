"""A small .zip, a sparse .png and .tar whose one picture is larger than any that is read; so in every source."""

import os
import resource
import sys
import tarfile
import tempfile
import zipfile
from importlib.util import find_spec

from nearkin import data
from nearkin.gallery import items, matched_parts

LIMIT, HEAD = 256 << 20, b"\x89PNG\r\n\x1a\n"
os.chdir(tempfile.mkdtemp())
os.makedirs("folder/c")
os.makedirs("shards")
with (
    zipfile.ZipFile("a.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    archive.open("c/x.png", "w") as member,
):
    member.write(HEAD)
    for _ in range(LIMIT >> 20):
        member.write(bytes(1 << 20))
with open("folder/c/x.png", "wb") as file:
    file.write(HEAD)
    file.truncate(LIMIT + 1)
with open("t.csv", "w") as file:
    file.write("path,label\nfolder/c/x.png,a\n")
for path, name in (("a.tar", "c/x.png"), ("shards/train-0.tar", "x.png")):
    header = tarfile.TarInfo(name)
    header.size = LIMIT + 1
    with open(path, "wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.truncate(512 + header.size + 1024)

readers = {
    source: data.load(source, labelled=source == "t.csv").pictures.read
    for source in ("a.zip", "folder", "t.csv", "a.tar", "webdataset:shards")
}
readers["a file of a query"] = lambda _: items._file_bytes(items.Path("folder/c/x.png"))
if find_spec("datasets"):
    if os.fork() == 0:  # what it takes to make it is not counted
        import datasets

        rows = {"image": [{"bytes": HEAD + bytes(LIMIT), "path": None}], "label": ["a"]}
        datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk("hf", max_shard_size="1GB")
        os._exit(0)
    os.wait()
    readers["hf-dataset"] = data.load("hf-dataset:hf").pictures.read


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def answer(read):
    try:
        return f"{len(read(0)):,} bytes were read"
    except ValueError as error:
        return str(error)


before = peak()
answers = {source: answer(read) for source, read in readers.items()}
print(*answers.items(), f"peak memory {before} -> {peak()} MiB", sep="\n")
refused = all("bytes, and at most 268,435,456 are read" in line and "\n" not in line for line in answers.values())
sys.exit(not refused or matched_parts.original("folder/c/x.png") != b"" or peak() - before > 64)
