"""What a gallery knows of the bridges that its rows came over: kept as a note with its rows, so copies have it too."""

import json
from dataclasses import asdict, dataclass, field
from operator import index
from typing import Any

from nearkin.gallery.bridge_scale import Scale, read_scale
from nearkin.gallery.results import Calibrator
from nearkin.gallery.schema import Facts, ours
from nearkin.gallery.stores import Store

__all__ = ["FINISHED", "KEY", "MARK", "Bridges", "load"]

KEY = "bridge"
MARK = 16  # digits of an encoder's fingerprint that its rows have
FORMAT = 1
FINISHED = "{}"  # all rows are of one encoder again


@dataclass(frozen=True)
class Bridges:
    """encoder: of the gallery now. knots: the scale of each earlier encoder, by its mark. summary: pairs, kind and
    quality of the last bridge. calibration: of queries against rows of both kinds; None: why not."""

    encoder: str
    knots: dict[str, list[list[float]]]
    summary: dict[str, Any]
    calibration: dict[str, Any] | None
    why: str
    format: int = FORMAT
    scales: dict[str, Scale] = field(init=False)

    def __post_init__(self) -> None:
        scales = {mark: read_scale(knots) for mark, knots in self.knots.items()}
        object.__setattr__(self, "scales", scales)

    def calibrator(self, facts: Facts) -> tuple[Calibrator | None, str]:
        """Of the gallery while it has rows of earlier encoders; or None, and a sentence that says why."""
        if self.calibration is None or self.encoder != facts.fingerprint:
            return None, f"not calibrated across the bridge, so there is only a similarity: {self.why}"
        with ours("the calibration across the bridge"):
            return Calibrator(self.calibration), ""

    def text(self) -> str:
        plain = asdict(self)
        del plain["scales"]
        return json.dumps(plain, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def load(store: Store, facts: Facts) -> Bridges | None:
    """None for a gallery whose rows are all of one encoder."""
    text = store.note(KEY)
    if text == FINISHED or (not text and not facts.beyond.get(KEY)):
        return None
    if not text:
        return Bridges(facts.fingerprint or "", {}, {}, None, "the note about its bridge is damaged; restore a backup")
    with ours(f"{store.where}: the note about its bridge"):
        plain = json.loads(text)
        number = index(plain["format"])
        bridges = Bridges(**plain) if number == FORMAT else None
    if bridges is None:
        raise ValueError(f"{store.where}: its bridge has format {number}, this version reads {FORMAT}")
    return bridges
