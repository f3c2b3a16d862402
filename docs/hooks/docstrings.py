"""Docstrings as Markdown: written to be read in a terminal, they get their signs escaped and their lists made lists."""

import importlib
import inspect
import re
from typing import Any

import griffe

__all__ = ["RuntimeDocstrings", "as_markdown"]

_SIGNS = re.compile(r"([\\*_>\[\]#|~$])")
_SETTING = re.compile(r"^  (\w+)(=[^:]*?)?: (.*)$")


def _escaped(text: str) -> str:
    """Escapes what Markdown would read as markup, outside `code`."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(part if i % 2 else _SIGNS.sub(r"\\\1", part.replace("<", "&lt;")) for i, part in enumerate(parts))


def _settings(lines: list[str]) -> str:
    """`name=default: meaning` per line, a continued line indented further, as a list."""
    items: list[str] = []
    for line in lines:
        match = _SETTING.match(line)
        if match:
            name, default, meaning = match.groups()
            items.append(f"- `{name}{default or ''}`: {_escaped(meaning)}")
        elif items:
            items[-1] += " " + _escaped(line.strip())
    return "\n".join(items)


def as_markdown(text: str, formula: bool = False) -> str:
    """The docstring of a public name; `formula`: its second paragraph is one."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(text))
    written = []
    for i, block in enumerate(blocks):
        lines = block.splitlines()
        if all(line.startswith("    ") for line in lines):
            written.append(block)
        elif formula and i == 1:
            written.append("\n".join(f"    {line}" for line in lines))
        elif _SETTING.match(lines[0]):
            written.append(_settings(lines))
        elif block == "Settings":
            written.append("**Settings**")
        else:
            written.append(_escaped(block))
    return "\n\n".join(written)


def _live(path: str) -> Any:
    """The object of a dotted path, or None where it is none of a module."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


class RuntimeDocstrings(griffe.Extension):
    """Takes docstrings from the imported objects (those of the losses are completed there), and makes them Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Every class, function and attribute that has a docstring."""
        if obj.docstring is None or obj.is_module:
            return
        text, formula = obj.docstring.value, False
        if obj.is_class and (live := _live(obj.path)) is not None and inspect.isclass(live):
            text = inspect.getdoc(live) or text
        if "nearkin.losses" in obj.path:
            parts = re.split(r"\n\s*\n", inspect.cleandoc(text))
            formula = len(parts) > 1 and " = " in parts[1]
        obj.docstring = griffe.Docstring(as_markdown(text, formula), parent=obj)
