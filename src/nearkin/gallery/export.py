"""Writes a gallery to files that other programs read: vectors for `nearkin evaluate`, JSON lines, parquet, FAISS."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nearkin.core import files
from nearkin.data import vector_files
from nearkin.gallery.schema import StoredRow, read_metadata, row_encoder, unpack
from nearkin.gallery.stores import hnsw, warn_damaged

if TYPE_CHECKING:
    from nearkin.gallery.gallery import Gallery

__all__ = ["FAISS", "LINES", "write"]

Progress = Callable[[int, int], None]
LINES, FAISS = ".jsonl", ".faiss"
NO_ROOM = "make room, or choose another place"


def write(gallery: "Gallery", path: Path, progress: Progress | None = None) -> int:
    """All rows or no file; returns how many. The last three are one state of the gallery, whoever writes to it.

    .npz, .safetensors: vectors, labels and names. .jsonl: id, label, name, metadata, vector and, where it is known,
    quality per line, and of a bridged row the encoder that made it. .parquet: the same and the thumbnail, in columns.
    .faiss: an index of inner products by id, and beside it FILE.jsonl with all but the vectors.
    progress(done, total) is called with rows.
    """
    ending = path.suffix.lower()
    if ending not in (LINES, FAISS, *vector_files.WRITABLE):
        allowed = f"{LINES}, {', '.join(vector_files.WRITABLE)}"
        raise ValueError(f'{path}: must end in {allowed}, got "{path.suffix}"; an index for FAISS, in {FAISS}')
    if ending in (LINES, FAISS):
        if not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: the folder {path.parent} does not exist")
        return (_write_lines if ending == LINES else _write_faiss)(gallery, path, progress)
    vector_files.writable(path)
    if ending == ".parquet":
        return _write_parquet(gallery, path, progress)
    hits, vectors, total = [], [], 0 if progress is None else gallery.stats()["rows"]
    for hit, vector in gallery.rows():
        hits.append(hit)
        vectors.append(vector)
        if progress is not None and len(hits) % 1000 == 0:
            progress(len(hits), total)
    classes = sorted({hit.label for hit in hits})
    codes = {label: i for i, label in enumerate(classes)}
    rows = torch.from_numpy(np.stack(vectors)) if vectors else torch.empty(0, gallery.dim)
    labels = np.array([codes[hit.label] for hit in hits], np.int64)
    vector_files.write(path, rows, labels, None, [hit.name or f"id {hit.id}" for hit in hits], classes)
    return len(hits)


def _batches(gallery: "Gallery", progress: Progress | None) -> Iterator[list[StoredRow]]:
    """One state of the gallery, a batch at a time; damaged rows are left out, with a warning."""
    store, damaged, done = gallery._store, [], 0
    total = 0 if progress is None else gallery.stats()["rows"]
    with store.snapshot() as snapshot:
        for batch in snapshot.rows():
            damaged += batch.damaged
            if batch.rows:
                yield batch.rows
            done += len(batch.rows) + len(batch.damaged)
            if progress is not None:
                progress(done, total)
    if damaged:
        warn_damaged(store.where, damaged)


def _fields(row: StoredRow) -> dict[str, Any]:
    metadata, quality = read_metadata(row.metadata.decode())
    fields = {"id": row.id, "label": row.label.decode(), "name": row.name.decode(), "metadata": metadata}
    encoder = row_encoder(row.metadata.decode())
    return fields | ({} if quality is None else {"quality": quality}) | ({"encoder": encoder} if encoder else {})


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def _write_lines(gallery: "Gallery", path: Path, progress: Progress | None) -> int:
    count = 0
    with files.explained(str(path), NO_ROOM), files.replacing(path) as file:
        for rows in _batches(gallery, progress):
            for row, vector in zip(rows, unpack([row.vector for row in rows], gallery.dim), strict=True):
                file.write(_line(_fields(row) | {"vector": vector.tolist()}))
            count += len(rows)
    return count


def _write_parquet(gallery: "Gallery", path: Path, progress: Progress | None) -> int:
    """Columns `embedding`, `label` and `name` as `nearkin evaluate` reads them."""
    pyarrow, parquet = vector_files.arrow(path, "writing")
    types = {
        "id": pyarrow.int64(),
        "label": pyarrow.string(),
        "name": pyarrow.string(),
        "metadata": pyarrow.string(),
        "quality": pyarrow.float64(),
        "thumbnail": pyarrow.binary(),
        "embedding": pyarrow.list_(pyarrow.float32(), gallery.dim),
    }
    bridged = bool(gallery.stats()["bridged"])
    if bridged:
        types |= {"encoder": pyarrow.string()}
    schema, count = pyarrow.schema(types), 0
    with (
        files.explained(str(path), NO_ROOM),
        files.replacing(path) as file,
        parquet.ParquetWriter(file, schema) as writer,
    ):
        for rows in _batches(gallery, progress):
            fields = [_fields(row) for row in rows]
            flat = pyarrow.array(unpack([row.vector for row in rows], gallery.dim).reshape(-1))
            columns = [
                [row.id for row in rows],
                [one["label"] for one in fields],
                [one["name"] or f"id {one['id']}" for one in fields],
                [json.dumps(one["metadata"], ensure_ascii=False) for one in fields],
                [one.get("quality") for one in fields],
                [row.thumbnail or None for row in rows],
            ]
            arrays = [
                pyarrow.array(column, kind) for column, kind in zip(columns, list(types.values())[:6], strict=True)
            ]
            arrays.append(pyarrow.FixedSizeListArray.from_arrays(flat, gallery.dim))
            if bridged:
                arrays.append(pyarrow.array([one.get("encoder") for one in fields], pyarrow.string()))
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
            count += len(rows)
    return count


def _write_faiss(gallery: "Gallery", path: Path, progress: Progress | None) -> int:
    """Exact search: the products of unit vectors are the similarities of the gallery."""
    faiss = hnsw.load_faiss()
    index, beside = faiss.IndexIDMap2(faiss.IndexFlatIP(gallery.dim)), path.with_name(f"{path.name}{LINES}")
    with files.explained(str(path), NO_ROOM), files.replacing(path) as file, files.replacing(beside) as lines:
        for rows in _batches(gallery, progress):
            ids = np.array([row.id for row in rows], np.int64)
            index.add_with_ids(unpack([row.vector for row in rows], gallery.dim), ids)
            lines.writelines(_line(_fields(row)) for row in rows)
        try:
            faiss.write_index(index, file.name)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} could not be written by FAISS ({reason}); {NO_ROOM}") from None
    return int(index.ntotal)
