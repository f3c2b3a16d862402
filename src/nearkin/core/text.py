"""Foreign text made safe to show: nothing in it moves a cursor, hides a word or starts a line."""

import re

__all__ = ["MARKS", "visible"]

# Control characters, line and paragraph separators, and marks of the direction of writing.
MARKS = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_HIDDEN = re.compile(f"[{MARKS}]")


def visible(text: str, lines: bool = False) -> str:
    """Control characters written as \\u001b, which JSON reads too. lines: line breaks stay."""
    if lines:
        return "\n".join(map(visible, text.split("\n")))
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
