"""The contact sheet: groups of items with their thumbnails, as one HTML file that opens offline."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.core import files
from nearkin.report import format
from nearkin.report.template import document
from nearkin.report.thumbnails import encoded

__all__ = ["write_contact_sheet"]

GROUPS, ITEMS, SINGLE = 400, 12, 48  # shown: groups, items of each, items that are alone
SIDE = 72  # pixels of a thumbnail
STYLE = """
.sheet, .sheet ul, .alone { list-style: none; padding: 0; margin: 0; display: grid; gap: 8px; }
.sheet { grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 20px; }
.sheet > li { border: 1px solid var(--rule); border-radius: 6px; padding: 12px; min-width: 0; }
.sheet h3 { margin: 0 0 8px; font-size: 0.9375rem; display: flex; justify-content: space-between; }
.sheet ul { grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 6px; }
.sheet li li { min-width: 0; } .sheet p { margin-top: 8px; font-size: 0.8125rem; color: var(--soft); }
.sheet img, .alone img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: 4px; }
.sheet img, .alone img { background: var(--wash); }
.sheet .noimg { aspect-ratio: 1; overflow-wrap: anywhere; }
.alone { grid-template-columns: repeat(auto-fill, minmax(72px, 1fr)); }
"""


def write_contact_sheet(
    path: str | Path,
    title: str,
    names: Sequence[str],
    groups: NDArray[np.int64],
    central: NDArray[np.float64],
    *,
    picture: Callable[[int], NDArray[np.uint8]] | None = None,
    labels: Sequence[str] | None = None,
    scores: Mapping[str, Mapping[str, tuple[float, tuple[float, float]]]] | None = None,
    how: str = "",
) -> int:
    """Writes the sheet; returns how many pictures could not be read.

    groups (n,): of each item, 0 the largest. central (n,): how near an item is to its group; the nearest come first.
    picture(i): pixels (H, W[, 3]) uint8 of an item; without it names are shown. how: one sentence about the grouping.
    """
    sizes = np.bincount(groups) if len(groups) else np.zeros(0, np.int64)
    several, alone = int((sizes > 1).sum()), int((sizes == 1).sum())
    order = np.lexsort((-central, groups))
    starts = np.cumsum(sizes) - sizes
    faces = _Faces(names, picture)
    cards = [
        _card(number, order[starts[number] : starts[number] + sizes[number]], faces, labels)
        for number in range(min(several, GROUPS))
    ]
    single = order[starts[several] :][:SINGLE] if alone else np.zeros(0, np.int64)
    left = f" The first {GROUPS} are shown; the table has all." if several > GROUPS else ""
    sections = [
        (
            "groups",
            "Groups",
            f"The largest first, in each the most typical items first.{left}",
            f'<ol class="sheet">{"".join(cards)}</ol>' if cards else "<p>No two items are near enough.</p>",
        )
    ]
    if alone:
        more = f" The first {SINGLE} are shown." if alone > SINGLE else ""
        body = "".join(f"<li>{faces.html(int(i))}</li>" for i in single)
        note = f"{format.count(alone, 'item has', 'items have')} nothing near.{more}"
        sections.append(("alone", "By themselves", note, f'<ul class="alone">{body}</ul>'))
    if scores:
        sections.append(
            (
                "agreement",
                "Agreement",
                "With the classes of the source, which the grouping did not use.",
                _table(scores),
            )
        )
    counts = (
        f"{format.count(several, 'group', 'groups')} of {format.count(len(names), 'item', 'items')}, {alone:,} alone"
    )
    opening = f'<p class="lede"><strong>{several:,}</strong><span class="where">{format.escape(counts)}'
    opening += f'<span class="soft">{format.escape(how)}</span></span></p>'
    text = document("groups", title, counts, opening, sections, STYLE)
    with files.explained(str(path), "make room, or choose another path"):
        files.write_text(path, text)
    return len(faces.bad)


class _Faces:
    """Thumbnails of items, or their names; an unreadable picture is counted, not fatal."""

    def __init__(self, names: Sequence[str], picture: Callable[[int], NDArray[np.uint8]] | None) -> None:
        self.names, self.picture, self.bad = names, picture, set[int]()

    def html(self, item: int) -> str:
        name = format.escape(format.short(self.names[item], 120))
        if self.picture is not None:
            try:
                return f'<img src="{encoded(self.picture(item), SIDE)}" alt="{name}" title="{name}">'
            except (OSError, ValueError):
                self.bad.add(item)
        return f'<div class="noimg" title="{name}">{format.name_html(self.names[item])}</div>'


def _card(number: int, members: NDArray[np.int64], faces: _Faces, labels: Sequence[str] | None) -> str:
    shown = "".join(f"<li>{faces.html(int(i))}</li>" for i in members[:ITEMS])
    rest = f"and {len(members) - ITEMS:,} more" if len(members) > ITEMS else ""
    if labels is not None:
        found, counts = np.unique([labels[i] for i in members], return_counts=True)
        at = int(counts.argmax())
        rest += f"{'; ' if rest else ''}{counts[at]} of {len(members)} are {format.short(str(found[at]), 40)}"
    note = f"<p>{format.escape(rest)}</p>" if rest else ""
    return f"<li><h3><span>Group {number + 1}</span><span>{len(members):,}</span></h3><ul>{shown}</ul>{note}</li>"


def _table(scores: Mapping[str, Mapping[str, tuple[float, tuple[float, float]]]]) -> str:
    names: dict[str, str] = {"bcubed": "B-cubed", "pairwise": "pairs"}
    rows = ""
    for kind, figures in scores.items():
        cells = "".join(f"<td>{_figure(*figures[key])}</td>" for key in ("precision", "recall", "f"))
        rows += f"<tr><th scope='row'>{names.get(kind, kind)}</th>{cells}</tr>"
    return (
        "<table><thead><tr><th></th><th>precision</th><th>recall</th><th>F</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _figure(value: float, ends: Any) -> str:
    low, high = ends
    if low != low:
        return format.share(value)
    return f"{format.share(value)} <small>({format.share(low, False)}–{format.share(high, False)})</small>"
