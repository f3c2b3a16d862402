"""Benchmark sets in their publishers' layouts, each read from a root and checked against its published counts."""

from collections.abc import Callable
from pathlib import Path

from nearkin.data.benchmarks.characters import FASHION_MNIST, OMNIGLOT, fashion_mnist, omniglot
from nearkin.data.benchmarks.faces import LFW, ORL, lfw, orl
from nearkin.data.benchmarks.layout import Facts
from nearkin.data.benchmarks.photos import CARS196, CUB200, INSHOP, SOP, cars196, cub200, inshop, sop
from nearkin.data.benchmarks.turntable import COIL20, coil20
from nearkin.data.item_set import Items

__all__ = ["BENCHMARKS", "Facts", "read"]

BENCHMARKS: dict[str, tuple[Facts, Callable[[Path | None, bool], Items]]] = {
    "cub200": (CUB200, cub200),
    "cars196": (CARS196, cars196),
    "sop": (SOP, sop),
    "inshop": (INSHOP, inshop),
    "omniglot": (OMNIGLOT, omniglot),
    "fashion-mnist": (FASHION_MNIST, fashion_mnist),
    "coil20": (COIL20, coil20),
    "orl": (ORL, orl),
    "lfw": (LFW, lfw),
}


def read(name: str, root: Path | None, partial: bool = False) -> Items:
    """A set by its name; counts that differ from the published ones are an error unless `partial`."""
    try:
        return BENCHMARKS[name][1](root, partial)
    except (LookupError, TypeError, AttributeError, UnicodeDecodeError) as error:  # a list with other content
        raise ValueError(f"{name}: the lists in {root} are not in the publisher's format ({error!r})") from None
