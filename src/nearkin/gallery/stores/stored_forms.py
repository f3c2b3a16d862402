"""The forms in which the index file of a gallery has its rows: float32, int8, binary, or the first N dimensions.

Every form scores a row x against a query q, both of length 1, and knows how far that score can be from the cosine:

- float32: only the rounding of the sum.
- int8: x and q are rounded to integers times a scale, x' and q'; off by at most |x - x'| + |q - q'| · |x'|.
- binary: x' = a · sign(x) with a = mean |x_i|. The rest x - x' is orthogonal to sign(x), so the score is off by at most
  sqrt(1 - D a²) · sqrt(1 - (q · sign(x))² / D): too wide to decide much.
- short:N: the first N dimensions as int8; the others add at most |q_rest| · |x_rest|.

A binary or short file has the rows as int8 too: the coarse form chooses, int8 and then the float32 rows of the gallery
decide, so only few pages of int8 are read.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.gallery.schema import Floats
from nearkin.gallery.stores.matrix import Ids, has_int8_matmul, round_rows

__all__ = ["EPSILON", "FORMS", "Coded", "Form", "Part", "Query", "encode", "parse_form", "take"]

FORMS = "float32, int8, binary or short:N, as short:32"
Arrays: TypeAlias = dict[str, NDArray[Any]]
Part: TypeAlias = slice | Ids | list[slice]  # rows of an index file; slices one after another
EPSILON = float(np.finfo(np.float32).eps)


class Form(NamedTuple):
    """fine: the form that decides which rows are read from the gallery; coarse: the one before it, "" if there is none.
    dim: how many dimensions the coarse form has."""

    text: str
    fine: str
    coarse: str
    dim: int


def parse_form(text: object, dim: int) -> Form:
    """float32, int8, binary or short:N."""
    if text in ("float32", "int8"):
        return Form(str(text), str(text), "", dim)
    if text == "binary":
        return Form("binary", "int8", "binary", dim)
    if isinstance(text, str) and text.startswith("short:") and text[6:].isdigit():
        if not 1 <= (length := int(text[6:])) < dim:
            raise ValueError(f"stored short:N must have 1 to {dim - 1} of the {dim} dimensions, got {text}")
        return Form(text, "int8", "short", length)
    raise ValueError(f"stored must be {FORMS}, got {text!r}")


def encode(rows: Floats, kind: str, dim: int) -> Arrays:
    """codes (n, …), and per row a scale and an error; the same rows always give the same bytes."""
    if kind == "float32":
        return {"codes": rows, "scales": np.ones(len(rows), np.float32), "errors": np.zeros(len(rows), np.float32)}
    if kind == "int8":
        codes, scales, errors = round_rows(rows)
        return {"codes": codes, "scales": scales, "errors": _up(errors)}
    if kind == "short":
        codes, scales, errors = round_rows(rows[:, :dim])
        rest = np.sqrt((rows[:, dim:].astype(np.float64) ** 2).sum(1))
        return {"codes": codes, "scales": scales, "errors": _up(errors), "rest": _up(rest)}
    mean = np.abs(rows.astype(np.float64)).mean(1)
    errors = np.sqrt(np.maximum((rows.astype(np.float64) ** 2).sum(1) - rows.shape[1] * mean**2, 0.0))
    return {"codes": np.packbits(rows >= 0, axis=1), "scales": mean.astype(np.float32), "errors": _up(errors)}


def _up(errors: NDArray[np.float64]) -> Floats:
    """To float32, and not below."""
    up: Floats = np.nextafter(errors.astype(np.float32), np.float32(np.inf)) + np.float32(1e-6)
    return up


def take(array: NDArray[Any], at: Part) -> NDArray[Any]:
    return np.concatenate([array[piece] for piece in at]) if isinstance(at, list) else array[at]


class Query:
    """A query of length 1, prepared for one form."""

    def __init__(self, query: Floats, kind: str, dim: int) -> None:
        self.full = query
        part = query[:dim] if kind == "short" else query
        codes, scale, error = round_rows(part[None])
        self.codes, self.scale, self.error = codes[0], float(scale[0]), float(error[0])
        self.sum = int(self.codes.sum(dtype=np.int64))
        self.rest = float(np.sqrt((query[dim:].astype(np.float64) ** 2).sum())) if kind == "short" else 0.0
        self.column = torch.from_numpy(self.codes)[:, None].contiguous()


class Coded:
    """Rows in one form, in an index file that is mapped into memory."""

    def __init__(self, kind: str, dim: int, arrays: Arrays) -> None:
        self.kind, self.dim, self.arrays = kind, dim, arrays
        self.codes, self.scales, self.errors = arrays["codes"], arrays["scales"], arrays["errors"]
        self._int8 = has_int8_matmul()

    def query(self, query: Floats) -> Query:
        return Query(query, self.kind, self.dim)

    def scores(self, query: Query, at: Part) -> tuple[Floats, Floats]:
        """Scores of these rows, and by how much each can be off."""
        codes, scales, errors = take(self.codes, at), take(self.scales, at), take(self.errors, at)
        slack = 4 * self.dim * EPSILON
        if self.kind == "float32":
            return np.einsum("nd,d->n", codes, query.full), errors + np.float32(slack)
        if self.kind == "binary":
            return self._binary_scores(query, codes, scales, errors, slack)
        near = np.multiply(self._products(query, codes), scales * np.float32(query.scale), dtype=np.float32)
        error = errors * np.float32(1 + query.error) + np.float32(query.error + slack + 1e-6)
        if self.kind == "short":
            error = error + take(self.arrays["rest"], at) * np.float32(query.rest * (1 + 1e-6))
        return near, error

    def agree(self, rows: Floats, positions: Ids) -> NDArray[np.bool_]:
        """Which of these rows of the gallery are those that were encoded."""
        return np.asarray((encode(rows, self.kind, self.dim)["codes"] == self.codes[positions]).all(1))

    def _products(self, query: Query, codes: NDArray[np.int8]) -> Floats:
        if self._int8:
            return np.asarray(torch._int_mm(torch.from_numpy(codes), query.column).view(-1).float().numpy())
        return np.asarray(np.einsum("nd,d->n", codes.astype(np.float32), query.codes.astype(np.float32)))

    def _binary_scores(
        self, query: Query, codes: NDArray[np.uint8], scales: Floats, errors: Floats, slack: float
    ) -> tuple[Floats, Floats]:
        bits = np.unpackbits(codes, axis=1, count=self.dim).view(np.int8)
        along = (2 * self._products(query, bits) - query.sum) * np.float32(query.scale)  # q' · sign(x)
        off = query.error * self.dim**0.5  # by which it can differ from q · sign(x)
        across = np.sqrt(np.maximum(1 - np.maximum(np.abs(along) - off, 0) ** 2 / self.dim, 0))
        error = errors * across.astype(np.float32) * np.float32(1 + 1e-6) + scales * np.float32(off)
        near: Floats = (along * scales).astype(np.float32)
        return near, (error + np.float32(slack + 1e-6)).astype(np.float32)
