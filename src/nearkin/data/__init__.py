"""Where items come from: sources, benchmark sets, splits."""

from nearkin.data import glyphs

__all__ = ["glyphs"]
