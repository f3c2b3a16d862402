"""Text of others, as it may be shown: nothing in it moves a cursor, hides a word or begins a line."""

import re

__all__ = ["MARKS", "visible"]

# Control characters, line and paragraph separators, and what turns the direction of writing.
MARKS = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_HIDDEN = re.compile(f"[{MARKS}]")


def visible(text: str, lines: bool = False) -> str:
    """Control characters written as \\u001b, which JSON understands too. lines: breaks between lines are kept."""
    if lines:
        return "\n".join(map(visible, text.split("\n")))
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
