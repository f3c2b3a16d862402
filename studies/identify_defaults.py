"""The weights of the three events that `identify` starts from, learned from generated sets alone.

    python studies/identify_defaults.py [--quick]

Rugs, of which two share their colours, and glyphs, embedded by the frozen efficientnet-lite0. Galleries of 10, 30 and
100 labels with 1, 2, 4 or 8 rows each are asked for five other items of each label and of as many strangers; those of
rugs also for photographs of another day, which are darker, blurred and cropped more. The regression of what came true
on the features, relative to those of the strangers that each gallery simulates, is `DEFAULT` in
src/nearkin/evaluation/recognition/events.py: a gallery's own weights are pulled towards it. Strangers count as much as
known items. `SINGLE` there is of the galleries with one row each, `DEFAULT` of the others.
"""

import argparse
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

import nearkin
from nearkin.data import glyphs
from nearkin.evaluation.recognition import NEAREST, NONE, OTHER, RIGHT, Hits, LabelSums, Part, events, fit
from nearkin.evaluation.recognition.recogniser import relative
from nearkin.evaluation.recognition.simulation import best_labels

CLASSES, EACH, ASKED = 240, 14, 5
EXAMPLES = {"DEFAULT": (2, 4, 8), "SINGLE": (1,)}
FIRST_DAY = 9  # photographs of a rug; the others are of another day
Floats = NDArray[Any]


class World(NamedTuple):
    """Rows (n, D) of length 1 by class, their classes, and which of them are of another day."""

    rows: Floats
    classes: Floats
    another_day: Floats


class Asked(NamedTuple):
    """Questions to one gallery: their features (n, 1 + F), the events that took place, and the weight of each."""

    features: Floats
    event: Floats
    weight: Floats


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="few classes and galleries")
    quick = parser.parse_args(arguments).quick
    worlds = rugs(24 if quick else CLASSES), drawings(24 if quick else CLASSES)
    for name, examples in EXAMPLES.items():
        learn(name, examples, worlds, (10,) if quick else (10, 30, 100))


def learn(name: str, examples: tuple[int, ...], worlds: tuple[World, ...], sizes: tuple[int, ...]) -> None:
    asked = [
        questions(world, labels, each, another_day, seed + 100 * labels + each)
        for world in worlds
        for another_day in sorted({False, bool(world.another_day.any())})
        for labels in sizes
        for each in examples
        for seed in range(4 if labels < 100 else 2)
    ]
    features, event, weight = (np.concatenate(column) for column in zip(*asked, strict=True))
    weights = events.fit_events(features, event, weight / weight.sum() * len(weight))
    weights -= weights.mean(1, keepdims=True)  # only differences count
    print(f"{name}: {len(asked)} galleries, {len(event):,} questions; rows: a constant, {', '.join(events.FEATURES)}")
    print(np.array2string(weights.round(2) + 0.0, separator=", "), flush=True)


def questions(world: World, labels: int, each: int, another_day: bool, seed: int) -> Asked:
    draw = np.random.default_rng(seed)
    classes = draw.permutation(int(world.classes.max()) + 1)[: 2 * labels]
    mine, query = [], []
    for number, c in enumerate(classes):
        first, other = (np.flatnonzero((world.classes == c) & (world.another_day == day)) for day in (False, True))
        if number < labels:
            some = draw.permutation(first)
            mine.append(some[:each])
            query.append((draw.permutation(other) if another_day else some[each:])[:ASKED])
        else:
            query.append(draw.permutation(other if another_day else first)[:ASKED])
    rows, asked = world.rows[np.concatenate(mine)], world.rows[np.concatenate(query)]
    codes = np.repeat(np.arange(labels), each)
    truth = np.repeat(np.where(np.arange(2 * labels) < labels, np.arange(2 * labels), -1), [len(q) for q in query])
    learned = fit(lambda: iter([Part(rows, codes, np.arange(1, len(codes) + 1))]), np.full(labels, each))
    sums = LabelSums.of(learned.rows(rows), codes, labels)
    best, first_score, second = best_labels(learned.scores(*sums)(learned.rows(asked)))
    cosines = asked @ rows.T
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :NEAREST]
    hits = Hits(np.take_along_axis(cosines, order, 1).astype(np.float64), codes[order])
    features = relative(events.features(first_score, second, *hits.labels(best)), learned.strangers)
    event = np.where(truth < 0, NONE, np.where(best == truth, RIGHT, OTHER))
    known = truth >= 0
    return Asked(features, event, np.where(known, 0.5 / known.sum(), 0.5 / (~known).sum()))


def rugs(number: int) -> World:
    draw, pictures, colours = np.random.default_rng(0), [], None
    for rug in range(number):
        if rug % 2 == 0:
            colours = draw.integers(0, 256, (4, 3), dtype=np.uint8)
        quarter = colours[draw.integers(0, 4, (5, 5))]  # type: ignore[index]
        half = np.concatenate([quarter, quarter[::-1]])
        woven = Image.fromarray(np.concatenate([half, half[:, ::-1]], axis=1)).resize(
            (160, 160), Image.Resampling.NEAREST
        )
        pictures += [photograph(draw, woven, shot >= FIRST_DAY) for shot in range(EACH)]
    return embedded(pictures, np.arange(EACH * number) % EACH >= FIRST_DAY)


def photograph(draw: np.random.Generator, rug: Image.Image, another_day: bool) -> Image.Image:
    turn = 35 if another_day else 20
    turned = rug.rotate(draw.uniform(-turn, turn), Image.Resampling.BILINEAR)
    x, y, side = draw.integers([8, 8, 80], [48, 48, 112]) if another_day else draw.integers([16, 16, 96], [32, 32, 128])
    photo = turned.crop((x, y, x + side, y + side)).resize((96, 96))
    photo = ImageEnhance.Brightness(photo).enhance(draw.uniform(*((0.4, 0.8) if another_day else (0.6, 1.3))))
    if not another_day:
        return photo
    photo = ImageEnhance.Color(photo).enhance(draw.uniform(0.6, 1.2))
    return photo.filter(ImageFilter.GaussianBlur(draw.uniform(0.3, 1.5)))


def drawings(number: int) -> World:
    names = glyphs.characters()
    chosen = [names[i] for i in np.random.default_rng(1).permutation(len(names))[:number]]
    pictures = [
        Image.fromarray(glyphs.draw(name, shot, size=64)).convert("RGB") for name in chosen for shot in range(EACH)
    ]
    return embedded(pictures, np.zeros(len(pictures), bool))


def embedded(pictures: list[Image.Image], another_day: Floats) -> World:
    encoder = nearkin.open("efficientnet-lite0")
    rows = np.concatenate([encoder.embed(pictures[i : i + 64]) for i in range(0, len(pictures), 64)])
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return World(rows, np.arange(len(rows)) // EACH, another_day)


if __name__ == "__main__":
    main()
