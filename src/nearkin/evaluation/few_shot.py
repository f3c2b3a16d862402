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
from torch import Tensor

from nearkin.core import checks, distances, random
from nearkin.core.relations import UNKNOWN
from nearkin.evaluation.arrays import Array, Counts, Ids, Progress, Scores, group_numbers, takes_arrays
from nearkin.evaluation.retrieval.knn import BUDGET
from nearkin.evaluation.statistics.cluster_bootstrap import explain_missing, share_interval

__all__ = ["OneShotRun", "omniglot_accuracy", "omniglot_runs", "one_shot"]

SCORES = ("mean", "max", "nearest")
_95 = 1.959963984540054  # standard deviations within which 95 % of a normal distribution lie


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
    progress: Progress | None = None,
    groups: Ids | None = None,
) -> Scores[float]:
    """Mean accuracy over episodes, in each of which a query is assigned to one of `ways` classes.

    An episode draws `ways` classes of those with at least shots + queries items, and from each `shots` supports and
    `queries` other items as queries; items of label -1 are left out. The score of a class is
      "mean"     the mean cosine of the query with its supports,
      "max"      the largest cosine with a support,
      "nearest"  minus the Euclidean distance to its nearest support, of the rows as they are.
    The best score wins; where n classes share it (equal within float64 rounding) and the right one is among them, the
    query counts 1/n, as chance would give: collapsed embeddings score 1/ways.

    Returns "accuracy"; "interval", half the width of the 95 % interval of that mean: 1.96 standard errors over
    episodes, by the normal approximation; "chance" = 1/ways; and "classes", how many could be drawn. Episode i is a
    function of the seed, i, the labels and the four counts alone, so that more episodes begin with the same ones.

    interval: also `.intervals["accuracy"]`, the 95 % interval over the choice of classes, each with its queries of all
    episodes (`cluster_bootstrap.share_interval`). With more episodes the "interval" of the mean goes to 0; this one
    goes to what other classes would change. progress(done, total) is called with episodes.

    groups (N,): of the items. All items that an episode draws from a class are then of different groups, so no query is
    recognised by a support of its own group: shots + queries different groups of the class are drawn, and one item of
    each. Classes with fewer groups cannot be drawn.
    """
    checks.finite("embeddings", checks.rows("embeddings", embeddings))
    checks.class_ids("labels", labels, embeddings)
    counts = {"ways": (ways, 2), "shots": (shots, 1), "episodes": (episodes, 2), "seed": (seed, 0)}
    for name, (value, low) in {**counts, "queries": (queries, 1), "budget": (budget, 1)}.items():
        checks.integer(name, value, low)
    checks.one_of("score", score, SCORES)
    if groups is not None:
        checks.class_ids("groups", groups, embeddings)
    known = (labels != UNKNOWN).nonzero().squeeze(1).cpu().numpy()
    members, first, sizes, starts = _classes(labels, known, ways, shots + queries, groups)
    drawn, wide = shots + queries, distances.wide(embeddings)
    right, class_of = np.empty((episodes, ways)), np.empty((episodes, ways), np.int64)
    episode_bytes = 8 * ways * (6 * drawn * embeddings.shape[1] + 4 * queries * ways * (shots + 2))
    step = max(1, budget // episode_bytes)
    for at in range(0, episodes, step):
        some = range(at, min(at + step, episodes))
        places = _draw(some, seed, ways, drawn, first, sizes)
        items = members[places if starts is None else _one_of_each(places, starts, some, seed)]  # (E, ways, drawn)
        rows = distances.upcast(embeddings.detach()[torch.from_numpy(items).to(embeddings.device)].to(wide))
        right[at : at + step] = _accuracy(rows[:, :, :shots], rows[:, :, shots:], score).cpu().numpy()
        class_of[at : at + step] = np.searchsorted(first, places[:, :, 0], side="right")
        if progress is not None:
            progress(some.stop, episodes)
    result = Scores({"accuracy": float(right.mean())})
    result["interval"] = _95 * float(right.mean(axis=1).std(ddof=1)) / math.sqrt(episodes)
    result["chance"], result["classes"] = 1 / ways, float(sizes.size)
    if interval:
        groups = torch.from_numpy(class_of.ravel())
        result.intervals["accuracy"] = share_interval(torch.from_numpy(right.ravel()), groups)
        explain_missing(result, groups)
    return result


def omniglot_runs(path: str | Path) -> list[OneShotRun]:
    """The official one-shot runs of Omniglot from `all_runs.zip`, or from the folder it unpacks to.

    Every run has 20 characters of one alphabet once, drawn by one person, as supports and 20 drawings by another as
    queries: the within-alphabet protocol of Lake et al. 2015. Answers are read from each run's `class_labels.txt`.
    """
    source = Path(path)
    if source.is_dir():
        return _runs(source)
    if not source.is_file() or not zipfile.is_zipfile(source):
        raise ValueError(f"path must be all_runs.zip or the folder it unpacks to, got {path}")
    with zipfile.ZipFile(source) as archive:
        return _runs(zipfile.Path(archive))


def omniglot_accuracy(embed: Callable[[Tensor], Tensor], path: str | Path) -> dict[str, float]:
    """Accuracy of an encoder in the official runs: {"accuracy", "interval", "run01", …, "run20"}.

    `embed` maps images (N, 105, 105), float32, ink 1 and paper 0, to embeddings (N, D); it gets the supports and the
    queries of a run as two batches. A query takes the support of the largest cosine; ties count as in `one_shot`.
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
        result[run.name] = float(_tie_share(scores, answers, _rounding(supports)).mean())
    values = np.array(list(result.values()))
    spread = _95 * float(values.std(ddof=1)) / math.sqrt(values.size) if values.size > 1 else math.nan
    return {"accuracy": float(values.mean()), "interval": spread, **result}


def _classes(
    labels: Tensor, known: Counts, ways: int, needed: int, groups: Tensor | None
) -> tuple[Counts, Counts, Counts, Counts | None]:
    """Items in the order of their classes, and where each class that has enough of them begins and how many it has.

    With groups the last two count groups, and the fourth array says where the items of each group begin and end.
    """
    ids = labels.cpu().numpy()[known]
    order, starts, what = np.argsort(ids, kind="stable"), None, "items"
    if groups is not None:
        of = group_numbers(groups.cpu()).numpy()[known]
        order, what = np.lexsort((of, ids)), "groups"
        new = np.flatnonzero((np.diff(ids[order]) != 0) | (np.diff(of[order]) != 0)) + 1
        starts = np.concatenate([[0], new, [len(order)]])
        ids = ids[order][starts[:-1]]  # the class of each group
    sizes = np.unique(ids, return_counts=True)[1]
    first, able = np.cumsum(sizes) - sizes, sizes >= needed
    if able.sum() < ways:
        raise ValueError(
            f"ways must be at most the number of classes with shots + queries = {needed} or more {what}: "
            f"{int(able.sum())}, got {ways}"
        )
    return known[order], first[able], sizes[able], starts


def _one_of_each(places: Counts, starts: Counts, some: range, seed: int) -> Counts:
    """Places of one random item of each of these groups, (E, ways, drawn)."""
    count = places[0].size
    words = np.stack([random.words(count, seed, random.Stream.EPISODES, episode, 1) for episode in some])
    size = (starts[places + 1] - starts[places]).astype(np.uint64)
    return starts[places] + (words.reshape(places.shape) % size).astype(np.int64)


def _draw(some: range, seed: int, ways: int, drawn: int, first: Counts, sizes: Counts) -> Counts:
    """Places of the items of these episodes, (E, ways, drawn): different classes, different items of each."""
    words = np.stack([random.words(ways * (1 + drawn), seed, random.Stream.EPISODES, episode) for episode in some])
    classes = _draw_distinct(words[:, :ways], np.full(len(some), sizes.size))  # (E, ways)
    items = _draw_distinct(words[:, ways:].reshape(len(some), ways, drawn), sizes[classes])
    return first[classes][:, :, None] + items


def _draw_distinct(words: random.Words, limit: Counts) -> Counts:
    """As many distinct numbers below `limit` as there are words in the last axis, every choice equally likely.

    The t-th number is drawn among the remaining limit - t, then moved past the ones already taken.
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
    """Share of right answers per class and episode, (E, ways).

    supports (E, ways, shots, D), queries (E, ways, queries, D).
    """
    episodes, ways, shots, dim = supports.shape
    rows, query = supports.reshape(-1, dim), queries.reshape(-1, dim)
    if score != "nearest":
        rows, query = distances.unit(rows), distances.unit(query)
    rows, query = rows.view(episodes, -1, dim), query.view(episodes, -1, dim)
    slack: Tensor | float = _rounding(rows)
    if score == "nearest":
        away = torch.cdist(query, rows, compute_mode="donot_use_mm_for_euclid_dist")
        scores = -away.view(episodes, -1, ways, shots).amin(3)  # (E, ways × queries, ways)
        slack = -scores.amax(2, keepdim=True) * slack
    else:
        cosines = (query @ rows.transpose(1, 2)).view(episodes, -1, ways, shots)
        scores = cosines.mean(3) if score == "mean" else cosines.amax(3)
    answers = torch.arange(ways, device=rows.device).repeat_interleave(queries.shape[2])
    return _tie_share(scores, answers.expand(episodes, -1), slack).view(episodes, ways, -1).mean(2)


def _rounding(rows: Tensor) -> float:
    return 2 * rows.shape[-1] * torch.finfo(distances.wide(rows)).eps


def _tie_share(scores: Tensor, answers: Tensor, slack: Tensor | float) -> Tensor:
    """1/n where the answer is among the n best of the last axis, otherwise 0."""
    best = scores >= scores.amax(-1, keepdim=True) - slack
    return best.gather(-1, answers[..., None]).squeeze(-1).to(scores.dtype) / best.sum(-1)


def _runs(root: Path | zipfile.Path) -> list[OneShotRun]:
    if root.joinpath("all_runs").is_dir():
        root = root.joinpath("all_runs")
    names = sorted(entry.name for entry in root.iterdir() if re.fullmatch(r"run\d+", entry.name))
    if not names:
        raise ValueError(f"path must contain run01/class_labels.txt and so on, got {root} without any run")
    return [_run(root, name) for name in names]


def _run(root: Path | zipfile.Path, run: str) -> OneShotRun:
    supports = sorted(entry.name for entry in root.joinpath(run, "training").iterdir() if entry.name.endswith(".png"))
    queries, answers = [], []
    for line in root.joinpath(run, "class_labels.txt").read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(rf"{run}/test/([\w-]+\.png)\s+{run}/training/([\w-]+\.png)\s*", line)
        if match is None or match[2] not in supports:
            raise ValueError(f"{run}/class_labels.txt must name a query and its support in each line, got {line!r}")
        queries.append(_image(root.joinpath(run, "test", match[1])))
        answers.append(supports.index(match[2]))
    images = [_image(root.joinpath(run, "training", name)) for name in supports]
    return OneShotRun(run, torch.stack(images), torch.stack(queries), torch.tensor(answers))


def _image(file: Path | zipfile.Path) -> Tensor:
    """(105, 105) float32, ink 1 and paper 0; the files are black on white."""
    from PIL import Image

    with Image.open(io.BytesIO(file.read_bytes())) as picture:
        grey = np.array(picture.convert("L"), np.float32)
    return torch.from_numpy(1 - grey / 255)
