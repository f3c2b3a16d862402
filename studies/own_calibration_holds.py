"""Whether a gallery that calibrates itself by its own labels keeps what it states, and what leaving labels out changes.

    python studies/own_calibration_holds.py [--embeddings FILE.npz] [--quick]

FILE.npz: as in `calibration_holds.py`, of an encoder that has learned from none of the classes; without it, synthetic
classes. Galleries of C labels are drawn and calibrated by their own items; then they are asked for other items of these
labels and for items of classes that are not enrolled. "left out": each label is judged by curves without it, as the
gallery does; "by all": by the curves of all its labels.
"""

import argparse
from typing import NamedTuple

import numpy as np
import torch
from calibration_holds import NEAREST, Floats, Labels, worlds

from nearkin.gallery import calibration
from nearkin.gallery.results import Calibrator, Hit, Identity

EXAMPLES = 6  # items per label; the others are queries


class Tally(NamedTuple):
    """Of one gallery: the stated FAR per query, the share of unknown queries that got a label; confidences, truth."""

    stated: float | None
    accepted: float
    sure: list[float]
    right: list[bool]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--embeddings")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args(arguments)
    for name, rows, labels in worlds(chosen.embeddings, "own", chosen.quick):
        print(f"{name} | labels | judged | stated, accepted | FAR held | confidence - right | largest in a tenth")
        for count in (10, 20, 60, 100):
            tallies: dict[str, list[Tally]] = {"left out": [], "by all": []}
            for seed in range(4 if chosen.quick else 20):
                for way, tally in one_gallery(rows, labels, count, seed).items():
                    tallies[way].append(tally)
            for way, several in tallies.items():
                print(f"{count} | {way} | {line(several)}", flush=True)


def one_gallery(rows: Floats, labels: Labels, count: int, seed: int, most: int = 200) -> dict[str, Tally]:
    draw = np.random.default_rng([count, seed])
    enrolled = draw.permutation(int(labels.max()) + 1)[:count]
    place = np.arange(len(labels)) - np.searchsorted(labels, labels)
    inside = np.isin(labels, enrolled)
    kept = np.flatnonzero(inside & (place < EXAMPLES))
    known = draw.permutation(np.flatnonzero(inside & (place >= EXAMPLES)))[:most]
    unknown = draw.permutation(np.flatnonzero(~inside))[:most]
    plain = calibration.measure_left_out(torch.from_numpy(rows[kept]), [str(label) for label in labels[kept]])
    by_all = {key: value for key, value in plain.items() if key not in ("folds", "fold_of")}
    result = {}
    for way, content in (("left out", plain), ("by all", by_all)):
        calibrator = Calibrator(content)
        strange = [ask(calibrator, rows, labels, kept, i, count) for i in unknown]
        own = [ask(calibrator, rows, labels, kept, i, count) for i in known]
        right = [answer.label is None for answer in strange]
        right += [answer.label == str(labels[i]) for answer, i in zip(own, known, strict=True)]
        accepted = float(np.mean([answer.label is not None for answer in strange]))
        sure = [answer.confidence or 0.0 for answer in strange + own]
        result[way] = Tally(strange[0].far, accepted, sure, right)
    return result


def ask(calibrator: Calibrator, rows: Floats, labels: Labels, kept: Labels, query: int, count: int) -> Identity:
    near = rows[kept] @ rows[query]
    order = np.argsort(-near, kind="stable")[:NEAREST]
    hits = [Hit(int(n) + 1, str(labels[kept[n]]), float(near[n]), "", {}) for n in order]
    return calibrator.identify(hits, {EXAMPLES: count}, None, {hit.label: EXAMPLES for hit in hits})


def line(tallies: list[Tally]) -> str:
    sure, right = np.concatenate([t.sure for t in tallies]), np.concatenate([t.right for t in tallies])
    tenth = np.minimum((sure * 10).astype(int), 9)
    gaps = [abs(sure[tenth == b].mean() - right[tenth == b].mean()) for b in range(10) if (tenth == b).sum() >= 100]
    stated = [t.stated for t in tallies if t.stated is not None]
    held = [t.accepted <= t.stated for t in tallies if t.stated is not None]
    figures = f"{np.median(stated):.2f}, {np.mean([t.accepted for t in tallies]):.2f}" if stated else "none"
    return f"{figures} | {sum(held)} of {len(held)} | {sure.mean() - right.mean():+.3f} | {max(gaps):.3f}"


if __name__ == "__main__":
    main()
