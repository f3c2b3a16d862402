"""Where items come from: sources, benchmark sets, splits."""

from nearkin.data import glyphs
from nearkin.data.file_tree import Files, Members
from nearkin.data.inspection import inspect, lines
from nearkin.data.item_set import Arrays, Items, Pairs, Pictures, Several
from nearkin.data.map_dataset import from_dataset
from nearkin.data.sources import Reading, Source, load, sources
from nearkin.data.splits import Parts, divide

__all__ = ["Arrays", "Files", "Items", "Members", "Pairs", "Parts", "Pictures", "Reading", "Several", "Source"]
__all__ += ["divide", "from_dataset", "glyphs", "inspect", "lines", "load", "sources"]


def __dir__() -> list[str]:
    return __all__
