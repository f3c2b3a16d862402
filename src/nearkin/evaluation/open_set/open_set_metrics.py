"""Open-set identification of a labelled set: half of its classes enrolled, the others unknown."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.core import checks, distances, random
from nearkin.core.relations import UNKNOWN
from nearkin.evaluation.arrays import Array, Counts, Ids, Progress, group_numbers, takes_arrays
from nearkin.evaluation.open_set import draws, label_scores, search_rates
from nearkin.evaluation.open_set.label_scores import NORMALIZATIONS, SCORINGS, Cohort, Method
from nearkin.evaluation.open_set.method_choice import choose
from nearkin.evaluation.open_set.search_rates import Trials
from nearkin.evaluation.retrieval.knn import BUDGET
from nearkin.evaluation.statistics.cluster_bootstrap import too_few

__all__ = [
    "COHORT", "EXAMPLES", "FPIRS", "NEAREST_COHORT", "Classes", "check_lists", "classes_of", "in_part", "open_set",
    "searches",
]  # fmt: skip

EXAMPLES = (1, 2, 5)
FPIRS = (0.1, 0.05, 0.01, 0.001)
COHORT = 2000  # templates at most; of more classes a random subset
NEAREST_COHORT = 100  # that set the scale of AS-norm, or half of the cohort
_REPEATS, _SEARCHES = 10, 200_000  # fewer halves for large sets, whose single half says enough
_VARIES = 1e-3  # relative spread of lengths from which on they may be a quality


class Classes(NamedTuple):
    """The items of known classes: rows (n,) of the embeddings, their classes from 0, and their bursts."""

    rows: Counts
    classes: Counts
    bursts: Counts


@takes_arrays
def open_set(
    embeddings: Array,
    labels: Ids,
    *,
    examples: Sequence[int] = EXAMPLES,
    fpirs: Sequence[float] = FPIRS,
    repeats: int | None = None,
    seed: int = 0,
    scorings: Sequence[str] = SCORINGS,
    normalizations: Sequence[str] = NORMALIZATIONS,
    cohort: Array | None = None,
    cohort_labels: Ids | None = None,
    interval: bool = True,
    budget: int = BUDGET,
    progress: Progress | None = None,
    groups: Ids | None = None,
) -> dict[str, Any]:
    """How often the right label is found, and how often an unknown item is taken for a label.

    In each of `repeats` seeded draws half of the classes are enrolled with `examples` items each. Their other items are
    searches with a mate, all items of the other classes are searches without one. Over all draws together:
      FPIR(t)  share of searches without a mate whose best label scores t or more,
      FNIR(t)  share of searches with a mate that is not at rank 1 or scores below t (rank 1 of NIST's 1:N; a tie with
               another label is a miss),
      DIR      = 1 - FNIR,
      AUROC    probability that a search with a mate scores higher than one without, whatever its best label,
      OSCR     the same, of those at rank 1: the area under DIR over FPIR.
    FNIR and DIR are reported at the smallest threshold whose FPIR does not exceed each of `fpirs`. An FPIR below 3 /
    (searches without a mate in a draw) is None and listed in "not_measurable": so few searches cannot show it.

    scorings, normalizations: see `label_scores.search`. With one example the templates are the item itself, and
    "weighted" is measured where the lengths of embeddings differ. "as-norm" needs `cohort`: embeddings (C, D) of
    classes that are not tested, such as training classes; with cohort_labels the mean of each class is one entry, and
    a class that is also in `labels` is refused. Labels are compared by cosine; items of label -1 are left out.

    repeats: 10, or fewer for large sets. interval: 95 % intervals over identities, and whether a method finds more than
    the plain nearest item (`method_choice.choose`). groups (N,): no search meets an enrolled item of its class and
    group. budget: bytes of working memory beyond the embeddings and the enrolled rows in float64. progress(done, total)
    counts searches.

    Returns "classes", "repeats", "rank", "fpirs", "not_measurable", "notes" and "examples": for each number of examples
    {"examples", "labels", "mated", "nonmated", "smallest_fpir", "methods", "choices"}; methods by name, as "nearest" or
    "template+as-norm": {"fnir@fpir=0.1", "dir@fpir=0.1", "threshold@fpir=0.1", …, "identification" (rank 1 without a
    threshold), "auroc", "oscr", "intervals", "curve"}.
    """
    known = classes_of(embeddings, labels, groups)
    check_lists({"examples": examples, "fpirs": fpirs, "scorings": scorings}, repeats, seed, budget)
    for scoring in scorings:
        checks.one_of("scorings", scoring, SCORINGS)
    for kind in normalizations:
        checks.one_of("normalizations", kind, NORMALIZATIONS)
    possible, notes = draws.check_classes(known.classes, known.bursts, examples)
    templates, missing = _cohort(embeddings, labels, cohort, cohort_labels, normalizations, seed, budget)
    notes += missing
    repeats = repeats or max(2, min(_REPEATS, _SEARCHES // len(known.rows)))
    quality = _lengths_vary(embeddings)
    entries = []
    for at, number in enumerate(possible):
        methods = _methods(number, scorings, normalizations, templates is not None, quality)
        report = None if progress is None else in_part(progress, at, len(possible))
        trials = searches(embeddings, known, number, methods, repeats, seed, templates, budget, report)
        enrolled = len(draws.enrollable(known.classes, known.bursts, number)) // 2
        entries.append(_entry(number, enrolled, trials, fpirs, repeats, seed, interval, notes))
    classes = len(np.unique(known.classes))
    if interval and classes < 2 * draws.FEWEST:
        notes.append(too_few(classes))
    return {
        "classes": classes,
        "items": len(known.rows),
        "repeats": repeats,
        "rank": 1,
        "fpirs": list(fpirs),
        "not_measurable": [f for f in fpirs if all(f < entry["smallest_fpir"] for entry in entries)],
        "cohort": 0 if templates is None else len(templates.templates),
        "examples": entries,
        "notes": list(dict.fromkeys(notes)),
    }


def classes_of(embeddings: Tensor, labels: Tensor, groups: Tensor | None = None) -> Classes:
    """The items of known classes, checked."""
    checks.finite("embeddings", checks.rows("embeddings", embeddings))
    checks.class_ids("labels", labels, embeddings)
    if groups is not None:
        checks.class_ids("groups", groups, embeddings)
    rows = (labels != UNKNOWN).nonzero().squeeze(1).cpu().numpy()
    if not len(rows):
        raise ValueError("open-set identification needs items of known classes, all labels are -1")
    classes = np.unique(labels.cpu().numpy()[rows], return_inverse=True)[1].astype(np.int64)
    bursts = np.arange(len(rows)) if groups is None else group_numbers(groups).cpu().numpy()[rows]
    return Classes(rows, classes, bursts.astype(np.int64))


def searches(
    embeddings: Tensor,
    known: Classes,
    examples: int,
    methods: Sequence[Method],
    repeats: int,
    seed: int,
    cohort: Cohort | None = None,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> dict[str, Trials]:
    """The searches of all draws together, by method; the same searches in the same order for each."""
    parts: list[list[Trials]] = [[] for _ in methods]
    for repeat in range(repeats):
        draw = draws.draw(known.classes, known.bursts, examples, repeat, seed)
        mated, classes = draw.mate >= 0, known.classes[draw.probes]
        draw = draw._replace(enrolled=known.rows[draw.enrolled], probes=known.rows[draw.probes])
        results = label_scores.search(embeddings, draw, methods, cohort, budget)
        for part, result in zip(parts, results, strict=True):
            part.append(Trials(result.score.cpu().numpy(), result.first.cpu().numpy(), mated, classes))
        if progress is not None:
            progress((repeat + 1) * len(draw.probes), repeats * len(draw.probes))
    return {
        method.name: Trials(*(np.concatenate(column) for column in zip(*part, strict=True)))
        for method, part in zip(methods, parts, strict=True)
    }


def _entry(
    examples: int,
    labels: int,
    trials: Mapping[str, Trials],
    fpirs: Sequence[float],
    repeats: int,
    seed: int,
    interval: bool,
    notes: list[str],
) -> dict[str, Any]:
    """The figures of one number of examples."""
    one = next(iter(trials.values()))
    nonmated = int((~one.mated).sum()) // repeats
    smallest = search_rates.smallest_fpir(nonmated)
    measurable, note = search_rates.quotable(fpirs, nonmated)
    notes += [note] if note else []
    methods, resampled = {}, {}
    for name, part in trials.items():
        methods[name], resampled[name] = search_rates.figures(part, fpirs, measurable, smallest, seed, interval)
    choices = [choose(trials, resampled, measurable, fpir, seed) for fpir in measurable] if interval else []
    return {
        "examples": examples,
        "labels": labels,
        "mated": int(one.mated.sum()) // repeats,
        "nonmated": nonmated,
        "smallest_fpir": smallest,
        "methods": methods,
        "choices": choices,
    }


def _methods(
    examples: int, scorings: Sequence[str], normalizations: Sequence[str], cohort: bool, quality: bool
) -> list[Method]:
    """The plain nearest item first. Templates of one item are that item."""
    used = [s for s in scorings if s == "nearest" or (examples > 1 and (s != "weighted" or quality))]
    kinds = [n for n in normalizations if n != "as-norm" or cohort]
    methods = [Method(scoring, kind) for kind in kinds for scoring in used]
    return list(dict.fromkeys([Method("nearest"), *methods]))


def _cohort(
    embeddings: Tensor,
    labels: Tensor,
    cohort: Tensor | None,
    cohort_labels: Tensor | None,
    normalizations: Sequence[str],
    seed: int,
    budget: int,
) -> tuple[Cohort | None, list[str]]:
    """The templates of the cohort; or None, and a note where they would be used."""
    if cohort is None:
        if cohort_labels is not None:
            raise ValueError("cohort_labels must come with cohort, got none")
        note = "AS-norm is not measured: it needs a cohort, embeddings of classes that are not tested"
        return None, [note] if "as-norm" in normalizations else []
    checks.finite("cohort", checks.rows("cohort", cohort))
    checks.same_device("cohort", cohort, embeddings)
    checks.dimensions("cohort", cohort, embeddings.shape[1], "embeddings have")
    rows, number = cohort, torch.arange(len(cohort), device=cohort.device)
    if cohort_labels is not None:
        checks.class_ids("cohort_labels", cohort_labels, cohort, "cohort")
        both = set(cohort_labels.tolist()) & set(labels.tolist()) - {UNKNOWN}
        if both:
            raise ValueError(
                f"cohort_labels must be of classes that are not tested, got {len(both)} that are also in labels"
            )
        rows = cohort[cohort_labels != UNKNOWN]
        number = torch.unique(cohort_labels[cohort_labels != UNKNOWN], return_inverse=True)[1]
    classes = int(number.max()) + 1 if len(number) else 0
    checks.enough("cohort", classes, 2, "two classes")
    chosen = random.shuffled(random.words(classes, seed, random.Stream.OPEN_SET_COHORT))[:COHORT]
    sums = embeddings.new_zeros(classes, embeddings.shape[1], dtype=torch.float64)
    for at in range(0, len(rows), 2**14):
        sums.index_add_(0, number[at : at + 2**14], distances.unit(rows[at : at + 2**14].double()))
    templates = distances.unit(sums[torch.from_numpy(np.sort(chosen)).to(sums.device)])
    return Cohort.of(templates, min(NEAREST_COHORT, max(2, len(templates) // 2)), embeddings, budget), []


def _lengths_vary(embeddings: Tensor) -> bool:
    lengths = torch.cat([part.double().norm(dim=1) for part in torch.split(embeddings, 2**14)])
    return bool(lengths.std() > _VARIES * lengths.mean())


def check_lists(lists: Mapping[str, Sequence[Any]], repeats: int | None, seed: int, budget: int) -> None:
    """Checks options by name: numbers of examples, rates and whole numbers."""
    for name, values in lists.items():
        if isinstance(values, str) or not hasattr(values, "__len__") or not len(values):
            raise ValueError(f"{name} must be a list of at least one, got {values!r}")
        for value in values:
            if name == "examples":
                checks.integer(name, value, 1)
            elif name in ("fpirs", "fars"):
                checks.between(name, value, 0, 1)
    checks.integer("repeats", 1 if repeats is None else repeats, 1)
    checks.integer("seed", seed, 0)
    checks.integer("budget", budget, 1)


def in_part(progress: Progress, at: int, parts: int) -> Progress:
    """The progress of one of several numbers of examples, as a share of all."""
    return lambda done, total: progress(at * total + done, parts * total)
