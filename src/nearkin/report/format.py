"""Text and numbers as HTML. Names chosen by users are escaped here and nowhere else."""

import html
import math
import re
from typing import Any

__all__ = [
    "caption",
    "count",
    "escape",
    "metric_name",
    "metric_value",
    "name_html",
    "number",
    "percent",
    "plain",
    "share",
    "short",
]

MISSING = "–"
MAX_NAME = 160  # characters; the middle of a longer name is left out
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_COUNTS = {
    "queries",
    "without_positives",
    "unknown",
    "genuine",
    "impostors",
    "classes",
    "clusters",
    "iterations",
    "items",
}
_COUNTS |= {"spearman_skipped", "k"}
_PLAIN = {"spearman", "inertia", "threshold"}  # neither a count nor a share
_METRICS = {
    "map@r": "MAP@R",
    "map": "mAP",
    "minp": "mINP",
    "r_precision": "R-precision",
    "spearman": "Spearman",
    "nmi": "NMI",
    "ami": "AMI",
    "f1": "F1",
    "eer": "EER",
}


def plain(value: object) -> str:
    """The text of a value without control characters and surrogates, which HTML cannot contain."""
    return _UNPRINTABLE.sub("\ufffd", str(value))


def short(value: object, longest: int = MAX_NAME) -> str:
    text = plain(value)
    if len(text) <= longest:
        return text
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def escape(value: object) -> str:
    """For text between tags and for quoted attributes."""
    return html.escape(plain(value), quote=True)


def name_html(value: object) -> str:
    """A user's name between tags: escaped, bounded, isolated in its writing direction, with places for line breaks."""
    text = escape(short(value)).replace("_", "_<wbr>").replace("/", "/<wbr>")
    return f"<bdi>{text}</bdi>"


def caption(value: object) -> str:
    """A name in little space, as under a picture: words are never broken; the style cuts long ones with …"""
    parts = [part for part in re.split(r"(?<=[\s_/-])", short(value)) if part]
    words = [f'<span class="word">{escape(part.rstrip())}</span>{" " if part[-1].isspace() else ""}' for part in parts]
    return f"<bdi>{''.join(words)}</bdi>"


def finite(value: object) -> float | None:
    """The number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def number(value: object, digits: int = 3) -> str:
    """Three significant digits, thousands separators, a real minus sign; a dash for anything but a finite number."""
    n = finite(value)
    if n is None:
        return MISSING
    if n == int(n) and abs(n) < 1e15:
        return f"{int(n):,}".replace("-", "−")
    if abs(n) >= 10**digits:
        return f"{n:,.0f}".replace("-", "−")
    if abs(n) < 1e-4:
        mantissa, power = f"{n:.{digits - 1}e}".split("e")
        trimmed = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{trimmed}e{int(power)}".replace("-", "−")
    return f"{n:.{digits}g}".replace("-", "−")


def count(value: object, one: str, many: str) -> str:
    """1 class, 478 classes."""
    return f"{number(value)} {one if value == 1 else many}"


def share(value: object, unit: bool = True) -> str:
    """A share of one as per cent, one decimal; with a non-breaking space before the sign."""
    n = finite(value)
    if n is None:
        return MISSING
    return f"{100 * n:.1f}".replace("-", "−") + ("\u202f%" if unit else "")


def percent(value: float) -> str:
    """A share on an axis, without trailing zeros."""
    return f"{100 * value:.4g}\u202f%".replace("-", "−")


def is_share(name: str) -> bool:
    return name not in _COUNTS and name not in _PLAIN and "distance" not in name


def metric_name(name: str) -> str:
    """recall@1 → R@1, as in tables of the field."""
    if name in _METRICS:
        return _METRICS[name]
    if name.startswith("old_"):  # of new queries, where a run is compatible with an old one
        return f"{metric_name(name.removeprefix('old_'))} among old rows"
    if name.startswith("recall@"):
        return name.replace("recall@", "R@")
    return name.replace("ndcg@", "nDCG@").replace("_", " ")


def metric_value(name: str, value: object, unit: bool = True) -> str:
    """A metric's value as a share or a number, by its name."""
    return share(value, unit) if is_share(name) else number(value)


def any_value(value: Any) -> str:
    """Any value of a data report, escaped; lists in one line."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, (list, tuple)):
        rest = f" and {len(value) - 20} more" if len(value) > 20 else ""
        return ", ".join(any_value(v) for v in value[:20]) + rest if value else MISSING
    if isinstance(value, dict):
        return ", ".join(f"{escape(k)} {any_value(v)}" for k, v in list(value.items())[:20]) or MISSING
    return name_html(value) if str(value) else MISSING
