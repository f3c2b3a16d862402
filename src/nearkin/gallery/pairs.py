"""Two items compared with the encoder of a run alone; nothing is enrolled."""

from pathlib import Path
from typing import Any

from nearkin.data import decode
from nearkin.gallery import items, results
from nearkin.gallery.encoding import Encoding
from nearkin.gallery.results import Verification
from nearkin.gallery.stores.matrix import similarities

__all__ = ["verify"]


def verify(
    run: str | Path,
    a: Any,
    b: Any,
    *,
    far: float | None = None,
    device: str = "auto",
    max_pixels: int = decode.MAX_PIXELS,
) -> Verification:
    """Whether two items are the same, as `Gallery.verify` says it."""
    encoding = Encoding(run, device, max_pixels)
    meaning, note = results.read(encoding.said.run, encoding.said.fingerprint)
    one, other = items.encoded(items.contents([a, b], encoding, encoding.dim), encoding)
    assert one is not None and other is not None
    return results.verified(meaning, note, float(similarities(one.vector[None], other.vector)[0]), far)
