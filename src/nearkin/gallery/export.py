"""Writes a gallery to one file: for `nearkin evaluate` and others, or as JSON lines with everything but thumbnails."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nearkin.core import files
from nearkin.data import vector_files

if TYPE_CHECKING:
    from nearkin.gallery.gallery import Gallery

__all__ = ["LINES", "write"]

LINES = ".jsonl"


def write(gallery: "Gallery", path: Path) -> int:
    """All rows or no file. .jsonl: id, label, name, metadata, vector and, where it is known, quality per line."""
    if path.suffix.lower() == LINES:
        return _write_lines(gallery, path)
    if path.suffix.lower() not in vector_files.WRITABLE:
        raise ValueError(f'{path}: must end in {LINES}, {", ".join(vector_files.WRITABLE)}, got "{path.suffix}"')
    vector_files.writable(path)
    hits, vectors = [], []
    for hit, vector in gallery.rows():
        hits.append(hit)
        vectors.append(vector)
    classes = sorted({hit.label for hit in hits})
    codes = {label: i for i, label in enumerate(classes)}
    rows = torch.from_numpy(np.stack(vectors)) if vectors else torch.empty(0, gallery.dim)
    labels = np.array([codes[hit.label] for hit in hits], np.int64)
    vector_files.write(path, rows, labels, None, [hit.name or f"id {hit.id}" for hit in hits], classes)
    return len(hits)


def _write_lines(gallery: "Gallery", path: Path) -> int:
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    count = 0
    with files.explained(str(path), "make room, or choose another place"), files.replacing(path) as file:
        for hit, vector in gallery.rows():
            count += 1
            fields = {
                "id": hit.id,
                "label": hit.label,
                "name": hit.name,
                "metadata": hit.metadata,
                "vector": vector.tolist(),
            }
            if hit.quality is not None:
                fields["quality"] = hit.quality
            file.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
    return count
