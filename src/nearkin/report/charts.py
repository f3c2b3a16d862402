"""Small SVG charts: round ticks, labels at the lines, tooltips. Colours come from the page's style."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nearkin.report.format import escape, finite, metric_value, number, percent, share

__all__ = ["STYLES", "Bars", "Line", "Mark", "bar", "histogram", "intervals", "lines", "smoothed", "ticks"]

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 38
MAX_POINTS = 400  # per line: more are not visible at this width
MAX_TOOLTIPS = 60  # per line

STYLES = ("main", "other", "third", "fourth")  # one per line of a chart: colours of the page, the later two dashed
LETTER = 7.2  # average width of a letter, at most

Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """ys over xs; None is a gap. style: one of `STYLES`, or "faint". ends: the interval of each y, None without one."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    style: str = "main"
    ends: Sequence[tuple[float, float] | None] = ()


@dataclass(frozen=True)
class Bars:
    """Counts over common bins, and the mean of the values."""

    name: str
    style: str
    counts: Sequence[int]
    mean: float | None

    @property
    def shares(self) -> list[float]:
        total = sum(self.counts)
        return [n / total for n in self.counts]


@dataclass(frozen=True)
class Mark:
    """A labelled point."""

    x: float
    y: float
    text: str


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` + 1 round numbers within [low, high]: steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    finest = 10.0 ** math.floor(math.log10(span / most))
    for factor in (1, 2, 5, 10):  # the finest that is not too many: a coarser one might leave no tick
        step = finest * factor
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first <= most:
            break
    return [i * step for i in range(first, last + 1)]


def smoothed(ys: Sequence[float | None], window: float) -> list[float | None]:
    """Bias-corrected exponential mean; None values are skipped."""
    decay, total, weight = 1 - 1 / max(window, 1.0), 0.0, 0.0
    out: list[float | None] = []
    for y in ys:
        if y is None:
            out.append(None)
            continue
        total, weight = decay * total + y, decay * weight + 1
        out.append(total / weight)
    return out


def lines(
    series: Sequence[Line],
    *,
    title: str,
    x_label: str,
    form: Format = number,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    x_ticks: Sequence[float] | None = None,
    x_form: Format | None = None,
) -> str:
    """Lines over a common axis; "" where nothing can be drawn. x_form: how x is written, as a number by default."""
    values = [y for line in series for y in map(finite, line.ys) if y is not None]
    places = [x for line in series for x, y in zip(line.xs, line.ys, strict=True) if finite(y) is not None]
    if not values:
        return ""
    values += [end for line in series for ends in line.ends if ends is not None for end in ends]
    low, high = _range(values, from_zero)
    first, last = min(places), max(places)
    named = [line for line in series if line.name and line.style != "faint"]
    right = RIGHT if len(named) < 2 else 14 + 7.5 * max(len(line.name) for line in named)
    frame = _Frame((first, last if last > first else first + 1), (low, high), right)
    parts = [frame.axes(form, x_label, x_ticks, x_form or number)]
    behind = sorted(series, key=lambda line: line.style != "faint")
    parts += [_line(frame, line, form, x_label, x_form) for line in behind]
    if len(named) > 1:
        parts += _end_labels(frame, named)
    parts += [_mark(frame, mark, series) for mark in marks]
    return _svg(title, WIDTH, HEIGHT, "".join(parts))


def histogram(
    edges: Sequence[float],
    groups: Sequence[Bars],
    *,
    title: str,
    x_label: str,
    width: float = WIDTH,
    counted: str = "pairs",
) -> str:
    """Filled steps of shares over common bins, with a legend above; "" where there are none."""
    groups = [group for group in groups if sum(group.counts)]
    if not groups:
        return ""
    used = [i for group in groups for i, n in enumerate(group.counts) if n]
    first, last = max(0, min(used) - 1), min(len(edges) - 2, max(used) + 1)
    highest = max(max(group.shares) for group in groups)
    names, top = _legend(groups, width)
    frame = _Frame((edges[first], edges[last + 1]), (0.0, 1.05 * highest), RIGHT, width, top)
    parts = [frame.axes(percent, x_label), *names]
    for group in groups:
        outline, bars = [f"{frame.x(edges[first]):.1f},{frame.base}"], []
        for i in range(first, last + 1):
            x0, x1, y = frame.x(edges[i]), frame.x(edges[i + 1]), frame.y(group.shares[i])
            outline += [f"{x0:.1f},{y:.1f}", f"{x1:.1f},{y:.1f}"]
            between = f"{group.name}, {number(edges[i])} to {number(edges[i + 1])}"
            tip = f"{between}: {share(group.shares[i])} ({number(group.counts[i])} {counted})"
            box = f'<rect x="{x0:.1f}" y="{y:.1f}" width="{x1 - x0:.1f}" height="{frame.base - y:.1f}"/>'
            bars += [_hover(box, tip)] if group.counts[i] else []
        outline.append(f"{frame.x(edges[last + 1]):.1f},{frame.base}")
        parts.append(f'<polygon class="area {group.style}" points="{" ".join(outline)}"/>')
        parts.append(f'<g class="hover">{"".join(bars)}</g>')
    return _svg(title, width, HEIGHT, "".join(parts))


def intervals(values: Sequence[tuple[str, str, object, object, object]], name: str) -> str:
    """One strip from 0 to 1: (name, style, value, low, high), a band for the interval and a mark for the value."""
    width, height = 260, 30
    parts = [f'<line class="strip" x1="6" x2="{width - 6}" y1="{height / 2}" y2="{height / 2}"/>']
    for at in (0.0, 0.5, 1.0):
        x = 6 + at * (width - 12)
        parts.append(f'<line class="strip" x1="{x}" x2="{x}" y1="{height / 2 - 3}" y2="{height / 2 + 3}"/>')
    for who, style, value, low, top in reversed(values):
        v, a, b = finite(value), finite(low), finite(top)
        if v is None:
            continue
        x, x0, x1 = (6 + (width - 12) * min(max(n, 0), 1) for n in (v, v if a is None else a, v if b is None else b))
        tip = f"{who}: {metric_value(name, v)}" + (
            "" if a is None or b is None else f" ({metric_value(name, a)} to {metric_value(name, b)})"
        )
        shape = {
            "trained": f'<circle cx="{x:.1f}" cy="{height / 2}" r="3.6"/>',
            "untrained": f'<circle class="hollow" cx="{x:.1f}" cy="{height / 2}" r="3.2"/>',
        }.get(style, f'<rect x="{x - 3:.1f}" y="{height / 2 - 3}" width="6" height="6"/>')
        band = f'<rect class="band" x="{x0:.1f}" y="{height / 2 - 8}" width="{x1 - x0:.1f}" height="16" rx="2"/>'
        tooltip = f"<title>{escape(tip)}</title>"
        known = style if style in ("trained", "untrained", "baseline") else "other"
        parts.append(f'<g class="mark {known}">{tooltip}{"" if a is None else band}{shape}</g>')
    title = "; ".join(f"{who} {metric_value(name, value)}" for who, _, value, _, _ in values)
    return _svg(title, width, height, "".join(parts), "plot strip-plot")


def bar(value: object, style: str = "") -> str:
    """A share as an HTML bar, hidden from screen readers: its number is beside it."""
    n = min(max(finite(value) or 0.0, 0.0), 1.0)
    return f'<span class="bar {style}" aria-hidden="true"><span style="width:{100 * n:.1f}%"></span></span>'


class _Frame:
    """Maps values to the picture."""

    def __init__(
        self, xs: tuple[float, float], ys: tuple[float, float], right: float, width: float = WIDTH, top: float = TOP
    ) -> None:
        self.xs, self.ys, self.width, self.right = xs, ys, width, width - right
        self.base, self.top = HEIGHT - BOTTOM, top

    def x(self, value: float) -> float:
        return LEFT + (value - self.xs[0]) / (self.xs[1] - self.xs[0]) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return self.base - (value - self.ys[0]) / (self.ys[1] - self.ys[0]) * (self.base - self.top)

    def axes(self, form: Format, x_label: str, x_ticks: Sequence[float] | None = None, x_form: Format = number) -> str:
        parts = []
        for value in ticks(*self.ys, most=4):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick end" x="{LEFT - 7}" y="{y + 3.8:.1f}">{escape(form(value))}</text>')
        for value in x_ticks or ticks(*self.xs, most=5 if self.width == WIDTH else 10):
            x = self.x(value)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{self.base}" y2="{self.base + 4}"/>')
            parts.append(f'<text class="tick mid" x="{x:.1f}" y="{self.base + 18.5}">{escape(x_form(value))}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{self.right:.1f}" y1="{self.base}" y2="{self.base}"/>')
        middle = (LEFT + self.right) / 2
        parts.append(f'<text class="tick mid label" x="{middle:.1f}" y="{HEIGHT - 5}">{escape(x_label)}</text>')
        return "".join(parts)


def _range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """The range of the values, rounded out to ticks; outliers are included."""
    low, high = min(values), max(values)
    if from_zero and low > 0:
        low = 0.0
    if high - low <= 1e-12 * max(abs(high), abs(low), 1e-300):  # a single value: add space around it
        room = abs(high) / 2 or 1.0
        return (0.0 if from_zero and low >= 0 else low - room), high + room
    marks = ticks(low, high, 4)
    step = marks[1] - marks[0] if len(marks) > 1 else high - low
    return step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)


def _line(frame: _Frame, line: Line, form: Format, x_label: str, x_form: Format | None = None) -> str:
    points = [(float(x), finite(y)) for x, y in zip(line.xs, line.ys, strict=True)]
    stride = max(1, math.ceil(len(points) / MAX_POINTS))
    points = points[:-1:stride] + points[-1:]
    path, pen, drawn = [], "M", []
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        path.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
        drawn.append((x, y))
        pen = "L"
    if not drawn:
        return ""
    parts = [f'<path class="line {line.style}" d="{"".join(path)}"/>']
    parts += [
        f'<path class="whisker {line.style}" d="M{frame.x(x):.1f} {frame.y(ends[0]):.1f}V{frame.y(ends[1]):.1f}"/>'
        for x, ends in zip(line.xs, line.ends, strict=False)
        if ends is not None
    ]
    if line.style != "faint":
        few = len(drawn) <= 25
        for x, y in drawn[:: max(1, math.ceil(len(drawn) / MAX_TOOLTIPS))]:
            tip = f"{line.name + ', ' if line.name else ''}{x_label} {x_form(x) if x_form else number(x, 6)}: {form(y)}"
            dot = f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{2.4 if few else 6}"/>'
            parts.append(f'<g class="{f"dot {line.style}" if few else "hover"}">{_hover(dot, tip)}</g>')
    return "".join(parts)


def _end_labels(frame: _Frame, named: Sequence[Line]) -> list[str]:
    """Names at the ends of the lines, pushed apart where they would overlap, none below the axis."""
    ends = []
    for line in named:
        drawn = [y for y in map(finite, line.ys) if y is not None]
        ends += [(frame.y(drawn[-1]), line.style, line.name)] if drawn else []
    ends.sort()
    places: list[float] = []
    for y, _, _ in ends:
        places.append(max(y, places[-1] + 14) if places else y)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], (places[i + 1] - 14) if i + 1 < len(places) else frame.base)
    return [
        f'<text class="name {style}" x="{frame.right + 10:.1f}" y="{place + 4:.1f}">{escape(name)}</text>'
        for place, (_, style, name) in zip(places, ends, strict=True)
    ]


def _mark(frame: _Frame, mark: Mark, series: Sequence[Line]) -> str:
    """A ring at the point, and its text on the dotted line through it, where it is farthest from every line."""
    x, y = frame.x(mark.x), frame.y(mark.y)
    left = x > (LEFT + frame.right) / 2
    width = LETTER * len(mark.text)
    first, last = (x - 9 - width, x) if left else (x, x + 9 + width)
    passing = [place for line in series for place in _between(frame, line, first, last)]
    rows = [frame.top + 4 + 6 * i for i in range(int((frame.base - frame.top - 8) / 6))]
    row = max(rows, key=lambda row: (min([24.0, *(abs(row - place) for place in passing)]), -abs(row - y)))
    at = f'x="{x + (-9 if left else 9):.1f}" y="{row + 4:.1f}"'
    return (
        f'<line class="best" x1="{x:.1f}" x2="{x:.1f}" y1="{min(y, row):.1f}" y2="{frame.base}"/>'
        f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>'
        f'<text class="name best {"end" if left else ""}" {at}>{escape(mark.text)}</text>'
    )


def _between(frame: _Frame, line: Line, first: float, last: float) -> list[float]:
    """The y coordinates of a line between two x coordinates of the picture, every few pixels."""
    drawn = [(frame.x(x), frame.y(y)) for x, y in zip(line.xs, map(finite, line.ys), strict=True) if y is not None]
    ys = [y for x, y in drawn if first <= x <= last]
    for (x0, y0), (x1, y1) in pairwise(drawn):
        places = range(math.ceil(max(x0, first)), math.floor(min(x1, last)) + 1, 4)
        ys += [y0 + (y1 - y0) * (x - x0) / max(x1 - x0, 1e-9) for x in places]
    return ys


def _legend(groups: Sequence[Bars], width: float) -> tuple[list[str], float]:
    """The legend above the plot, in one line where it fits, and the top of the plot below it."""
    parts: list[str] = []
    x, y = float(LEFT), 12.0
    for group in groups:
        text = group.name if group.mean is None else f"{group.name}, mean {number(group.mean)}"
        needed = 18 + LETTER * len(text)
        if x > LEFT and x + needed > width - RIGHT:
            x, y = float(LEFT), y + 17
        parts.append(f'<rect class="area {group.style}" x="{x:.1f}" y="{y - 9:.1f}" width="11" height="11" rx="2"/>')
        parts.append(f'<text class="name {group.style}" x="{x + 17:.1f}" y="{y + 1:.1f}">{escape(text)}</text>')
        x += needed + 18
    return parts, y + 14


def _hover(shape: str, tip: str) -> str:
    return shape.replace("/>", f"><title>{escape(tip)}</title></{shape[1:].split()[0]}>")


def _svg(title: str, width: float, height: float, content: str, style: str = "plot") -> str:
    size = f"0 0 {width:g} {height:g}"
    return f'<svg class="{style}" viewBox="{size}" role="img" aria-label="{escape(title)}">{content}</svg>'
