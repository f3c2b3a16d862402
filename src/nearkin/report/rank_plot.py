"""Two drawings of a comparison: losses in their order with intervals, and the trials of a search on one strip."""

from collections.abc import Mapping, Sequence
from typing import Any

from nearkin.report.charts import ticks
from nearkin.report.format import escape, percent, share

__all__ = ["ranks", "tried"]

MAIN = "map@r"
_WIDE, _NARROW = (860, 150, 90), (420, 122, 54)  # width, room for names, room for places
_ROW, _FOOT = 26, 26


def ranks(said: Mapping[str, Any]) -> str:
    """A row a loss, best first: interval, mean, joined mean, and between which places it stands. For both widths."""
    wide, narrow = _ranks(said, *_WIDE), _ranks(said, *_NARROW)
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def _ranks(said: Mapping[str, Any], width: int, left: int, right: int) -> str:
    rows = said["table"]
    ends = [row[form][MAIN][end] for row in rows for form in ("separated", "concatenated") for end in ("value",)]
    ends += [row["separated"][MAIN][end] for row in rows for end in ("low", "high")]
    known = [end for end in ends if end is not None]
    room = 0.04 * (max(known) - min(known)) or 0.01
    low, high = max(0.0, min(known) - room), min(1.0, max(known) + room)
    base = _ROW * len(rows) + 6

    def x(value: float) -> float:
        return float(left + (value - low) / (high - low) * (width - left - right))

    parts = []
    for value in ticks(low, high, 6 if width > 600 else 4):
        parts.append(f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="2" y2="{base}"/>')
        parts.append(f'<text class="tick mid" x="{x(value):.1f}" y="{base + 16}">{escape(percent(value))}</text>')
    for i, row in enumerate(rows):
        parts.append(_rank_row(row, x, _ROW * i + _ROW / 2 + 2, left, width))
    title = "; ".join(f"{row['loss']} {share(row['separated'][MAIN]['value'])}" for row in rows)
    size = f"0 0 {width} {base + _FOOT}"
    return f'<svg class="plot" viewBox="{size}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _rank_row(row: Mapping[str, Any], x: Any, y: float, left: int, width: int) -> str:
    figure, joined = row["separated"][MAIN], row["concatenated"][MAIN]["value"]
    verdict = row["separated"]["against"]["verdict"]
    span = ""
    if figure["low"] is not None:
        span = f'<line class="span" x1="{x(figure["low"]):.1f}" x2="{x(figure["high"]):.1f}" y1="{y}" y2="{y}"/>'
    first, last = row["separated"]["ranks"]
    places = f"{first}" if first == last else f"{first}–{last}"
    inside = "" if figure["low"] is None else f" ({share(figure['low'])} to {share(figure['high'])})"
    tip = f"{row['loss']}: {share(figure['value'])}{inside}, joined {share(joined)}, place {places}"
    return (
        f'<g class="rank {escape(verdict)}"><title>{escape(tip)}</title>'
        f'<text class="who end {escape(verdict)}" x="{left - 12}" y="{y + 4}">{escape(row["loss"])}</text>'
        f'{span}<circle class="joined" cx="{x(joined):.1f}" cy="{y}" r="3.6"/>'
        f'<circle class="dot" cx="{x(figure["value"]):.1f}" cy="{y}" r="4.4"/>'
        f'<text class="tick end" x="{width - 2}" y="{y + 4}">{places}</text></g>'
    )


def tried(trials: Sequence[Mapping[str, Any]], chosen: int, low: float, high: float) -> str:
    """Every trial's validation value on one strip; the default hollow, the chosen one full."""
    width, height, span = 200, 22, (high - low) or 1.0
    parts = [f'<line class="strip" x1="6" x2="{width - 6}" y1="{height / 2}" y2="{height / 2}"/>']

    def mark(trial: Mapping[str, Any]) -> str:
        at = 6 + (trial["value"] - low) / span * (width - 12)
        kind = "chosen" if trial["number"] == chosen else "default" if trial["number"] == 0 else ""
        what = "default" if trial["number"] == 0 else f"trial {trial['number']}"
        part = "" if trial["complete"] else ", one fold"
        radius = 4.4 if kind == "chosen" else 3.6
        tip = f"{what}: {share(trial['value'])}{part}"
        shape = f'<circle class="tried {kind}" cx="{at:.1f}" cy="{height / 2}" r="{radius}">'
        return f"{shape}<title>{escape(tip)}</title></circle>"

    ordered = sorted(trials, key=lambda trial: (trial["number"] == chosen, trial["number"] == 0))
    parts += [mark(trial) for trial in ordered]
    best = max(trial["value"] for trial in trials)
    said = f"{len(trials)} trials, the best {share(best)}"
    frame = f'<svg class="plot strip-plot" viewBox="0 0 {width} {height}" role="img" aria-label="{said}">'
    return f"{frame}{''.join(parts)}</svg>"
