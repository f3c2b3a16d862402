"""Recognition from few examples: N-way K-shot episodes, and the official one-shot runs of Omniglot."""

import io
import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks, distances, random
from nearkin.core.relations import UNKNOWN
from nearkin.evaluation.arrays import Array, Ids, takes_arrays
from nearkin.evaluation.retrieval.knn import BUDGET
from nearkin.evaluation.statistics.cluster_bootstrap import Scores, share_interval

SCORES = ("mean", "max", "nearest")
_95 = 1.959963984540054  # a normal variable lies within so many standard deviations of its mean in 95 of 100 cases

Ints = NDArray[np.int64]


class OneShotRun(NamedTuple):
    """One official run: supports and queries (20, 105, 105) with ink 1 and paper 0, and the support of each query."""

    name: str
    supports: Tensor
    queries: Tensor
    answers: Tensor


@takes_arrays
def one_shot(
    embeddings: Array,
    labels: Ids,
    ways: int = 20,
    shots: int = 1,
    episodes: int = 600,
    seed: int = 0,
    *,
    queries: int = 1,
    score: str = "mean",
    budget: int = BUDGET,
    interval: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Mean accuracy over episodes, each of which asks which of `ways` classes a query belongs to.

    An episode draws `ways` classes of those with at least shots + queries items, and of each `shots` supports and
    `queries` others to be recognised; items of label -1 are left out. A class scores by
      "mean"     the mean cosine of the query with its supports,
      "max"      the largest cosine with a support,
      "nearest"  minus the Euclidean distance to its nearest support, lengths of the rows counting.
    The best score wins; where n classes share it (equal within float64 rounding) and the right one is among them, the
    query counts 1/n, as chance would give: collapsed embeddings score 1/ways.

    Returns "accuracy"; "interval", half the width of the 95 % interval of that mean: 1.96 standard errors over
    episodes, by the normal approximation; "chance" = 1/ways; and "classes", how many could be drawn. Episode i is a
    function of the seed, i, the labels and the four counts alone, so that more episodes begin with the same ones.

    interval: also `.intervals["accuracy"]`, the 95 % interval over the choice of classes, from those that were asked
    for, each with all its queries of all episodes (`uncertainty.share_interval`). More episodes make the "interval" of
    the mean as small as one likes; this one they bring down to what other classes would change. progress(done, of) is
    called with episodes.
    """
    known = _check(embeddings, labels, ways, shots, episodes, seed, queries, score, budget)
    members, first, sizes = _classes(labels, known, ways, shots + queries)
    drawn, wide = shots + queries, distances.wide(embeddings)
    right, asked = np.empty((episodes, ways)), np.empty((episodes, ways), np.int64)
    bytes_each = 8 * ways * (6 * drawn * embeddings.shape[1] + 4 * queries * ways * (shots + 2))
    step = max(1, budget // bytes_each)
    for at in range(0, episodes, step):
        some = range(at, min(at + step, episodes))
        places = _draw(some, seed, ways, drawn, first, sizes)
        items = members[places]  # (E, ways, drawn)
        rows = distances.upcast(embeddings.detach()[torch.from_numpy(items).to(embeddings.device)].to(wide))
        right[at : at + step] = _accuracy(rows[:, :, :shots], rows[:, :, shots:], score).cpu().numpy()
        asked[at : at + step] = np.searchsorted(first, places[:, :, 0], side="right")  # which class
        if progress is not None:
            progress(some.stop, episodes)
    result = Scores({"accuracy": float(right.mean())})
    result["interval"] = _95 * float(right.mean(axis=1).std(ddof=1)) / math.sqrt(episodes)
    result["chance"], result["classes"] = 1 / ways, float(sizes.size)
    if interval:
        groups = torch.from_numpy(asked.ravel())
        result.intervals["accuracy"] = share_interval(torch.from_numpy(right.ravel()), groups)
    return result


def omniglot_runs(path: str | Path) -> list[OneShotRun]:
    """The official one-shot runs of Omniglot from `all_runs.zip`, or from the folder it unpacks to.

    Every run shows 20 characters of one alphabet once, drawn by one person, and asks for 20 drawings by another: the
    within-alphabet protocol of Lake et al. 2015. Answers are read from each run's `class_labels.txt`.
    """
    where = Path(path)
    if where.is_dir():
        return _runs(where)
    if not where.is_file() or not zipfile.is_zipfile(where):
        raise ValueError(f"path must be all_runs.zip or the folder it unpacks to, got {path}")
    with zipfile.ZipFile(where) as archive:
        return _runs(zipfile.Path(archive))


def omniglot_accuracy(embed: Callable[[Tensor], Tensor], path: str | Path) -> dict[str, float]:
    """Accuracy of an encoder in the official runs: {"accuracy", "interval", "run01", …, "run20"}.

    `embed` maps images (N, 105, 105), float32, ink 1 and paper 0, to embeddings (N, D); it sees the supports and the
    queries of a run as two batches. A query takes the support of the largest cosine, ties shared as in `one_shot`.
    "interval": half the width of the 95 % interval over runs, by the normal approximation.
    """
    result = {}
    for run in omniglot_runs(path):
        with torch.no_grad():
            supports, queries = embed(run.supports), embed(run.queries)
        for name, rows, images in (("supports", supports, run.supports), ("queries", queries, run.queries)):
            checks.finite(f"embed({name})", checks.rows(f"embed({name})", rows))
            checks.enough(f"rows of embed({name})", rows.shape[0], images.shape[0], "the images")
        wide = distances.wide(supports)
        scores = distances.cosine(queries.to(wide), supports.to(wide))  # (20, 20)
        answers = run.answers.to(scores.device)
        result[run.name] = float(_shared(scores, answers, _rounding(supports)).mean())
    values = np.array(list(result.values()))
    spread = _95 * float(values.std(ddof=1)) / math.sqrt(values.size) if values.size > 1 else math.nan
    return {"accuracy": float(values.mean()), "interval": spread, **result}


def _check(
    embeddings: Tensor,
    labels: Tensor,
    ways: int,
    shots: int,
    episodes: int,
    seed: int,
    queries: int,
    score: str,
    budget: int,
) -> Ints:
    """Everything fits; returns the places of the items whose class is known."""
    checks.finite("embeddings", checks.rows("embeddings", embeddings))
    checks.class_ids("labels", labels, embeddings)
    counts = {"ways": (ways, 2), "shots": (shots, 1), "episodes": (episodes, 2), "seed": (seed, 0)}
    for name, (value, low) in {**counts, "queries": (queries, 1), "budget": (budget, 1)}.items():
        checks.integer(name, value, low)
    checks.one_of("score", score, SCORES)
    return (labels != UNKNOWN).nonzero().squeeze(1).cpu().numpy()


def _classes(labels: Tensor, known: Ints, ways: int, needed: int) -> tuple[Ints, Ints, Ints]:
    """Items grouped by class, and where each class that has enough of them begins and how many it has."""
    ids = labels.cpu().numpy()[known]
    members = known[np.argsort(ids, kind="stable")]
    sizes = np.unique(ids, return_counts=True)[1]
    first, able = np.cumsum(sizes) - sizes, sizes >= needed
    if able.sum() < ways:
        raise ValueError(
            f"ways must be at most the number of classes with shots + queries = {needed} or more items: "
            f"{int(able.sum())}, got {ways}"
        )
    return members, first[able], sizes[able]


def _draw(some: range, seed: int, ways: int, drawn: int, first: Ints, sizes: Ints) -> Ints:
    """Places of the items of these episodes, (E, ways, drawn): different classes, different items of each."""
    words = np.stack([random.words(ways * (1 + drawn), seed, random.Stream.EPISODES, episode) for episode in some])
    classes = _different(words[:, :ways], np.full(len(some), sizes.size))  # (E, ways)
    items = _different(words[:, ways:].reshape(len(some), ways, drawn), sizes[classes])
    return first[classes][:, :, None] + items


def _different(words: random.Words, limit: Ints) -> Ints:
    """As many different numbers below `limit` as there are words in the last axis, every choice as likely.

    The t-th number is drawn among those left, limit - t of them, then counted past the ones already taken.
    """
    taken = np.empty(words.shape, np.int64)  # ascending up to t
    chosen = np.empty(words.shape, np.int64)
    for t in range(words.shape[-1]):
        place = (words[..., t] % (limit - t).astype(np.uint64)).astype(np.int64)
        for earlier in range(t):
            place += place >= taken[..., earlier]
        chosen[..., t] = taken[..., t] = place
        taken[..., : t + 1].sort(axis=-1)
    return chosen


def _accuracy(supports: Tensor, queries: Tensor, score: str) -> Tensor:
    """Share of right answers a class and episode, (E, ways).

    supports (E, ways, shots, D), queries (E, ways, queries, D).
    """
    episodes, ways, shots, dim = supports.shape
    rows, asked = supports.reshape(-1, dim), queries.reshape(-1, dim)
    if score != "nearest":
        rows, asked = distances.unit(rows), distances.unit(asked)
    rows, asked = rows.view(episodes, -1, dim), asked.view(episodes, -1, dim)
    slack: Tensor | float = _rounding(rows)
    if score == "nearest":
        away = torch.cdist(asked, rows, compute_mode="donot_use_mm_for_euclid_dist")
        scores = -away.view(episodes, -1, ways, shots).amin(3)  # (E, ways × queries, ways)
        slack = -scores.amax(2, keepdim=True) * slack
    else:
        cosines = (asked @ rows.transpose(1, 2)).view(episodes, -1, ways, shots)
        scores = cosines.mean(3) if score == "mean" else cosines.amax(3)
    answers = torch.arange(ways, device=rows.device).repeat_interleave(queries.shape[2])
    return _shared(scores, answers.expand(episodes, -1), slack).view(episodes, ways, -1).mean(2)


def _rounding(rows: Tensor) -> float:
    return 2 * rows.shape[-1] * torch.finfo(distances.wide(rows)).eps


def _shared(scores: Tensor, answers: Tensor, slack: Tensor | float) -> Tensor:
    """1/n where the answer is among the n best of the last axis, otherwise 0."""
    best = scores >= scores.amax(-1, keepdim=True) - slack
    return best.gather(-1, answers[..., None]).squeeze(-1).to(scores.dtype) / best.sum(-1)


def _runs(root: Path | zipfile.Path) -> list[OneShotRun]:
    if root.joinpath("all_runs").is_dir():
        root = root.joinpath("all_runs")
    names = sorted(entry.name for entry in root.iterdir() if re.fullmatch(r"run\d+", entry.name))
    if not names:
        raise ValueError(f"path must hold run01/class_labels.txt and so on, got {root} without any run")
    return [_run(root, name) for name in names]


def _run(root: Path | zipfile.Path, run: str) -> OneShotRun:
    supports = sorted(entry.name for entry in root.joinpath(run, "training").iterdir() if entry.name.endswith(".png"))
    queries, answers = [], []
    for line in root.joinpath(run, "class_labels.txt").read_text(encoding="utf-8").splitlines():
        named = re.fullmatch(rf"{run}/test/([\w-]+\.png)\s+{run}/training/([\w-]+\.png)\s*", line)
        if named is None or named[2] not in supports:
            raise ValueError(f"{run}/class_labels.txt must name a query and its support in each line, got {line!r}")
        queries.append(_image(root.joinpath(run, "test", named[1])))
        answers.append(supports.index(named[2]))
    shown = [_image(root.joinpath(run, "training", name)) for name in supports]
    return OneShotRun(run, torch.stack(shown), torch.stack(queries), torch.tensor(answers))


def _image(file: Path | zipfile.Path) -> Tensor:
    """(105, 105) float32, ink 1 and paper 0; the files are black on white."""
    from PIL import Image

    with Image.open(io.BytesIO(file.read_bytes())) as picture:
        grey = np.array(picture.convert("L"), np.float32)
    return torch.from_numpy(1 - grey / 255)
