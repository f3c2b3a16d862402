"""Which trainings the canon's comparison consists of, in which order, and what is chosen by those that are done.

First every setting of a row at the middle learning rate, then the best setting at the other rates, then the winner in
several seeds on the test classes. What is done is all that the plan looks at, so a comparison goes on from anywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from canon_rows import CANDIDATES, RATES, Row, rows_of
from canon_work import Job, key

__all__ = ["Options", "chosen", "finals", "jobs", "searched", "value"]

BEST = "best recipe"
FROZEN = "frozen"
EARLY = (2, 1)  # seeds of each group that come before anything else of the next

Done = Mapping[str, Mapping[str, Any]]  # key of a job → what it gave


class Options(NamedTuple):
    """How much is done: None stands for what the recipes say."""

    seeds: int = 2
    search_epochs: int = 12
    epochs: int | None = None
    batches: int | None = None
    rows: tuple[str, ...] | None = None
    speed: bool = False


def jobs(subject: str, options: Options, done: Done) -> list[Job]:
    """What can be done now and is not, the most important first."""
    ordered: list[tuple[int, Job]] = []
    if subject == "best":
        ordered += [(0, job) for job in _tried_recipes(options)]
        ordered += [(1, job) for job in finals(subject, None, options, done)]
    else:
        ordered.append((0, Job(subject, "frozen", FROZEN, _length({"loss.name": "contrastive"}, options))))
        for row in _rows(subject, options):
            ordered += [(1 + 2 * row.group, job) for job in _searches(subject, row, options, done)]
            for job in finals(subject, row, options, done):
                ordered.append((2 + 2 * row.group if job.seed < EARLY[row.group] else 8 + job.seed, job))
    if options.speed:
        ordered = [(0, job) for job in _speeds(subject, options, done)]
    return [job for _, job in sorted(ordered, key=lambda entry: entry[0]) if key(job) not in done]


def chosen(subject: str, row: Row | None, options: Options, done: Done) -> dict[str, Any] | None:
    """The setting with the best MAP@R on the held-out classes, once all are tried; None before, or where all
    diverged."""
    if row is None:
        tried = _tried_recipes(options)
    else:
        tried = _searches(subject, row, options, done)
        expected = len(row.tried) + len(RATES[subject]) - 1
        if len(tried) < expected:
            return None
    if any(key(job) not in done for job in tried):
        return None
    best = max(tried, key=lambda job: value(done[key(job)]))  # of equal ones the first
    if value(done[key(best)]) < 0:
        return None
    setting = dict(best.setting)
    if row is not None:
        setting.pop("training.epochs", None)
    return setting


def finals(subject: str, row: Row | None, options: Options, done: Done) -> list[Job]:
    """The chosen setting in each seed; none before there is one."""
    setting = chosen(subject, row, options, done)
    if setting is None:
        return []
    name = BEST if row is None else row.name
    return [Job(subject, "final", name, _length(setting, options), seed) for seed in range(options.seeds)]


def searched(subject: str, row: Row | None, options: Options, done: Done) -> list[tuple[Job, float]]:
    """Finished trials, with their MAP@R on the held-out classes."""
    tried = _tried_recipes(options) if row is None else _searches(subject, row, options, done)
    return [(job, value(done[key(job)])) for job in tried if key(job) in done]


def value(result: Mapping[str, Any]) -> float:
    """MAP@R on the classes to choose on; below 0 where there is none."""
    return float(result.get("val", {}).get("map@r", -1.0))


def _rows(subject: str, options: Options) -> Sequence[Row]:
    every = rows_of(subject)
    if options.rows is None:
        return every
    unknown = set(options.rows) - {row.name for row in every}
    if unknown:
        known = "; ".join(row.name for row in every)
        raise ValueError(f'--rows: unknown row "{sorted(unknown)[0]}"; known: {known}')
    return [row for row in every if row.name in options.rows]


def _searches(subject: str, row: Row, options: Options, done: Done) -> list[Job]:
    """Those that are known so far: the other rates follow when the best setting at the middle one is known."""
    low, middle, high = RATES[subject]

    def at(setting: Mapping[str, Any], rate: float) -> Job:
        short = {**setting, "optimizer.lr": rate}
        if not row.full_search:
            short["training.epochs"] = options.search_epochs
        if options.batches is not None:
            short["training.batches"] = options.batches
        return Job(subject, "search", row.name, short)

    first = [at(setting, middle) for setting in row.tried]
    if len(first) > 1 and any(key(job) not in done for job in first):
        return first
    best = max(range(len(first)), key=lambda i: value(done.get(key(first[i]), {})))
    return [*first, *(at(row.tried[best], rate) for rate in (low, high))]


def _tried_recipes(options: Options) -> list[Job]:
    return [Job("best", "search", name, _length(setting, options)) for name, setting in CANDIDATES.items()]


def _speeds(subject: str, options: Options, done: Done) -> list[Job]:
    """Each row as it was chosen, or as it starts."""
    if subject == "best":
        return [job._replace(stage="speed") for job in finals(subject, None, options, done)[:1]]
    planned = []
    for row in _rows(subject, options):
        setting = chosen(subject, row, options, done) or row.tried[0]
        planned.append(Job(subject, "speed", row.name, _length(setting, options)))
    return planned


def _length(setting: Mapping[str, Any], options: Options) -> dict[str, Any]:
    lengthened = dict(setting)
    if options.epochs is not None:
        lengthened["training.epochs"] = options.epochs
    if options.batches is not None:
        lengthened["training.batches"] = options.batches
    return lengthened
