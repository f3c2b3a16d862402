"""The HTML around the sections of a page: head, style, content security policy, links, footer."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files as resources

from nearkin.core.versions import version_of
from nearkin.report.format import escape, name_html, short

__all__ = ["Section", "document"]

Section = tuple[str, str, str, str]  # id, title, note, body


def document(
    eyebrow: str, title: str, sentence: str, opening: str, sections: Sequence[Section], style: str = ""
) -> str:
    """The text of a page. title: a user's words; sentence: plain text for link previews; style: more CSS."""
    common, script = (resources("nearkin.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Only data: addresses and our own script are allowed: neither a bug nor a class name can make requests or run code.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _, _ in sections)
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><div class="side-note"><h2 id="{key}-title">{title}</h2>'
        f'{f"<p>{note}</p>" if note else ""}</div><div class="content">{content}</div></section>\n'
        for key, title, note, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta name="description" content="{escape(sentence)}">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(short(title, 80))} · nearkin report</title>\n<style>\n{common}{style}</style>\n</head>\n"
        "<body>\n"
        f'<header><p class="eyebrow">{eyebrow}</p><h1>{name_html(title)}</h1>{opening}'
        f'<nav aria-label="Sections">{links}</nav></header>\n<main>\n{body}</main>\n'
        f"<footer><p>nearkin {escape(version_of('nearkin'))} · complete in one file, makes no requests</p></footer>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
