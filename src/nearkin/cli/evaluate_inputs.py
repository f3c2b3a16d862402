"""What `nearkin evaluate` reads: embeddings of a run, its cohort and validation part; lists, rates and sizes."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin.cli.ranks import first
from nearkin.cli.screen import plain_bar, print_note

if TYPE_CHECKING:
    from nearkin.data import Reading
    from nearkin.data.vectors import Vectors
    from nearkin.dist.group import ProcessGroup

__all__ = ["cohort_of_run", "cut_offs", "is_encoder", "open_set_settings", "rates_of"]
__all__ += ["size_in_bytes", "validation_of_run", "vectors_of_run"]

PER_CLASS = 20  # items of a training class, whose mean is in the cohort
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def is_encoder(text: str) -> bool:
    """Whether the argument is no file: a folder, an encoder's name, or what may be one mistyped."""
    from nearkin.models.frozen import is_encoder_name

    path = Path(text)
    return is_encoder_name(text) or path.is_dir() or not (path.exists() or path.suffix)


def vectors_of_run(
    run: str,
    source: str | None,
    root: Path | None,
    dim: int | None,
    device: str,
    group: "ProcessGroup | None",
    chosen: dict[str, Any],
) -> "tuple[Vectors, Vectors | None]":
    """Embeddings of a source by the encoder of a run; and of its gallery, if it has one."""
    from nearkin import training
    from nearkin.training.inference import length_note

    with plain_bar("embedding", not first(group)) as progress:
        options: dict[str, Any] = {"root": root, "dim": dim, "device": device, "progress": progress, "group": group}
        vectors = training.vectors_of(run, source, **options, **chosen)
    if dim is not None and first(group) and (note := length_note(run, dim)) is not None:
        print_note(note)
    return vectors


def validation_of_run(
    run: str, dim: int | None, device: str, group: "ProcessGroup | None", reading: "Reading"
) -> "Vectors | None":
    """Embeddings of the validation part of a run's own source; None where it has none."""
    from nearkin import training

    with plain_bar("embedding the validation part", not first(group)) as progress:
        options: dict[str, Any] = {"dim": dim, "device": device, "group": group, "reading": reading}
        items = training.vectors_of(run, part="val", progress=progress, **options)[0]
    return items if len(items.embeddings) else None


def open_set_settings(
    asked: bool, examples: str | None, fpir: str | None, repeats: int | None, cohort: Path | None, report: Path | None
) -> dict[str, Any]:
    """The settings of --open-set; its options need it."""
    given = {"--examples": examples, "--fpir": fpir, "--repeats": repeats, "--cohort": cohort, "--report": report}
    if not asked and (alone := [name for name, value in given.items() if value is not None]):
        raise ValueError(f"{', '.join(alone)}: for --open-set, which is not asked for")
    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{report}: a report must end in .html")
    chosen: dict[str, Any] = {} if repeats is None else {"repeats": repeats}
    if examples is not None:
        chosen["examples"] = cut_offs(examples, "examples", "1,2,5")
    if fpir is not None:
        chosen["fpirs"] = rates_of(fpir, "fpir")
    return chosen


def cohort_of_run(
    run: str | Path, dim: int | None, device: str, group: "ProcessGroup | None", reading: "Reading"
) -> "Vectors | None":
    """Embeddings of the run's training part; a note where there is none, as when its source has moved."""
    from nearkin import training

    if not Path(run).is_dir():  # an encoder's name: it was trained elsewhere
        return None
    options: dict[str, Any] = {"dim": dim, "device": device, "group": group, "part": "train", "per_class": PER_CLASS}
    options["reading"] = reading
    try:
        with plain_bar("embedding the training part", not first(group)) as progress:
            return training.vectors_of(run, progress=progress, **options)[0]
    except (ValueError, OSError) as error:
        if first(group):
            print_note(f"no cohort for AS-norm: {error}")
        return None


def cut_offs(text: str, name: str = "ks", like: str = "1,2,4,8") -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f'{name} must be whole numbers >= 1, separated by commas, as {like}, got "{text}"')
    return tuple(dict.fromkeys(int(part) for part in parts))


def rates_of(text: str, name: str = "far") -> tuple[float, ...]:
    try:
        rates = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < 1 for rate in rates):
        raise ValueError(f'{name} must be rates > 0 and < 1, separated by commas, as 1e-2,1e-3, got "{text}"')
    return rates


def size_in_bytes(text: str) -> int:
    """512MB is 512 · 2^20 bytes, with or without an i."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if match is None or not float(match[1]):
        raise ValueError(f'budget must be a size as 512MB or 2GB, got "{text}"')
    return int(float(match[1]) * 2 ** _UNITS[match[2]])
