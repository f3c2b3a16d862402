"""What a gallery says of itself: its dimensions, its encoder, how many rows it has. One JSON text with a checksum."""

import json
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nearkin.gallery.schema import meta_checksum

__all__ = ["FORMAT", "Facts", "first_sound", "read"]

FORMAT = 1  # raise when a reader of today could not make sense of a gallery


@dataclass(frozen=True)
class Facts:
    """Changed by every writing transaction, together with the rows.

    fingerprint: of the encoder; None for a gallery of vectors from anywhere. run: where that encoder lay. sources: what
    was enrolled from, as it was typed. next_id: no id is given twice, not even after a removal. rows: how many there
    must be. changes: the last change to a row that was there. beyond: what a store keeps for itself.
    """

    dim: int
    fingerprint: str | None = None
    run: str | None = None
    sources: list[str] = field(default_factory=list)
    gallery: str = field(default_factory=lambda: uuid.uuid4().hex)
    next_id: int = 1
    rows: int = 0
    changes: int = 0
    beyond: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def written(self) -> tuple[str, bytes]:
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)
        return text, meta_checksum(text)

    def but(self, **changed: Any) -> "Facts":
        return replace(self, **changed)


def first_sound(where: str, copies: Sequence[tuple[object, object]]) -> Facts:
    """Of several copies the first that is whole."""
    for said, total in copies[:-1]:
        with suppress(ValueError):
            return read(where, said, total)
    return read(where, *(copies[-1] if copies else (None, None)))


def read(where: str, said: object, total: object) -> Facts:
    """What was written, or a sentence that it is not that any more."""
    if not isinstance(said, str) or not isinstance(total, bytes) or meta_checksum(said) != total:
        raise ValueError(f"{where}: what the gallery says of itself is damaged, both copies")
    found = json.loads(said)
    if found["format"] != FORMAT:
        raise ValueError(f"{where}: has format {found['format']}, this version of nearkin reads format {FORMAT}")
    return Facts(**found)
