"""`nearkin enrol`, `search`, `identify`, `verify` and `gallery …`: a trained encoder answers."""

import json as json_module
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearkin.cli.screen import Device, app, echo, one_sentence, plain_bar
from nearkin.cli.torchrun import first, shared
from nearkin.core.text import visible
from nearkin.gallery.stores.postgres_connection import shown

if TYPE_CHECKING:
    from nearkin.dist.group import ProcessGroup
    from nearkin.gallery import Gallery
    from nearkin.gallery.items import Encoding

_Run = Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN", show_default=False)]
_OtherRun = Annotated[
    Path | None,
    typer.Option("--run", help="Where its run is now.", metavar="RUN", show_default="where it was enrolled from"),
]
_Place = Annotated[
    str,
    typer.Option("--gallery", help="A file, or postgresql://…/db[?gallery=NAME].", metavar="G", show_default=False),
]
_Where = Annotated[str, typer.Argument(help="A file, or postgresql://…", metavar="G", show_default=False)]
_Device = Annotated[Device, typer.Option(help="auto takes cuda where there is one.")]
_Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
_FarPair = Annotated[
    float | None,
    typer.Option(
        help="Share of pairs of different classes that may pass as the same (per pair).",
        show_default="0.001, or the strictest of 0.1, 0.01, … that the calibration can hold",
    ),
]
_FarQuery = Annotated[
    float | None,
    typer.Option(
        help="Share of queries by strangers that may pass as somebody in this gallery (per query).",
        show_default="the likelier answer is given, whatever its FAR",
    ),
]
_Filter = Annotated[
    list[str] | None,
    typer.Option("--filter", help="label=heron, or a key of the metadata; may be repeated.", metavar="KEY=VALUE"),
]
_Item = Annotated[
    str, typer.Argument(help="A picture, or an .npy with one vector.", metavar="ITEM", show_default=False)
]

CANDIDATES = 3  # that "unknown" names

verbs = typer.Typer(no_args_is_help=True, help="What is in a gallery, and whether it is whole.")
app.add_typer(verbs, name="gallery")


@app.command(no_args_is_help=True)
def enrol(
    run: _Run,
    source: Annotated[str, typer.Argument(help="What to enrol, as in `nearkin train`; classes are the labels.")],
    gallery: _Place,
    root: Annotated[Path | None, typer.Option(help="Where a benchmark set lies.", metavar="DIR")] = None,
    label: Annotated[str | None, typer.Option(help="Enrol everything under this label.")] = None,
    metadata: Annotated[
        str | None, typer.Option(help='Kept with every item, as {"place": "pond"}.', metavar="JSON")
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out files that cannot be read.")
    ] = False,
    device: _Device = Device.auto,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing.")] = False,
) -> None:
    """Enrol a source in a gallery, which is made if need be. What is enrolled already is not enrolled again.

    It may be stopped at any time: what was done is kept, and the same command goes on from there.

    Examples:

      nearkin enrol runs/birds photos/ --gallery birds.gallery

      nearkin enrol runs/birds heron.jpg-folder/ --label heron --gallery birds.gallery

      torchrun --nproc-per-node 8 -m nearkin enrol runs/birds photos/ --gallery birds.gallery
    """
    with one_sentence(lambda: "what was enrolled stays; the same command goes on from there"), shared() as group:
        from nearkin import gallery as room

        kept = _json_object(metadata)
        with _enrolling(gallery, run, device, group) as opened:
            with plain_bar("enrolling", quiet or not first(group)) as progress:
                found = room.enrol_source(
                    opened,
                    source,
                    root=None if root is None else str(root),
                    label=label,
                    metadata=kept,
                    skip_unreadable=skip_unreadable,
                    progress=progress,
                    group=group,
                )
            if isinstance(opened, room.Gallery):
                with plain_bar("indexing", quiet) as progress:
                    opened.warm(progress)
                rows = opened.stats()["rows"]
    if not first(group):
        return
    for line in found.unreadable[:10]:
        echo(f"left out: {line}", err=True)
    if not quiet:
        more = f", {found.kept:,} of them under another label, which they keep" if found.kept else ""
        left = f", {len(found.unreadable):,} unreadable" if found.unreadable else ""
        echo(f"{shown(gallery)}: {found.added:,} enrolled, {found.known:,} there already{more}{left}; {rows:,} in all")


@app.command(no_args_is_help=True)
def search(
    item: _Item,
    gallery: _Place,
    run: _OtherRun = None,
    k: Annotated[int, typer.Option(help="How many.")] = 10,
    filter: _Filter = None,
    device: _Device = Device.auto,
    json: _Json = False,
) -> None:
    """The nearest items of a gallery.

    Example:

      nearkin search new.jpg --gallery birds.gallery --k 5
    """
    with one_sentence(), _seeing(gallery, run, device) as opened:
        hits = opened.search(_item(item), k, _filter(filter))
    if json:
        _print_json([hit._asdict() for hit in hits])
        return
    rows = [(f"{hit.similarity:.4f}", hit.label, hit.name, str(hit.id)) for hit in hits]
    _table(("similarity", "label", "name", "id"), rows, "nothing was found")


@app.command(no_args_is_help=True)
def identify(
    item: _Item,
    gallery: _Place,
    run: _OtherRun = None,
    far: _FarQuery = None,
    filter: _Filter = None,
    device: _Device = Device.auto,
    json: _Json = False,
) -> None:
    """Whose an item is, with how much confidence, or unknown.

    Example:

      nearkin identify new.jpg --gallery birds.gallery
    """
    with one_sentence(), _seeing(gallery, run, device) as opened:
        found = opened.identify(_item(item), far=far, filter=_filter(filter))
    if json:
        _print_json(found._asdict() | {"candidates": [one._asdict() for one in found.candidates]})
        return
    sure = (
        "" if found.confidence is None else f", {'confidence' if found.label else 'probability'} {found.confidence:.1%}"
    )
    near = "" if found.similarity is None else f", similarity {found.similarity:.4f}"
    limit = (
        "" if found.threshold is None else f" (known from {found.threshold:.4f} on{_held(found.far, 'query', found)})"
    )
    echo(f"{found.label or 'unknown'}{sure}{near}{limit}")
    if found.label is None and found.candidates:
        shown = [
            f"{one.label} {one.confidence:.1%} (similarity {one.similarity:.4f})"
            for one in found.candidates[:CANDIDATES]
        ]
        echo(f"nearest of the enrolled: {', '.join(shown)}")
    _say(found.note)


@app.command(no_args_is_help=True)
def verify(
    a: Annotated[str, typer.Argument(help="A picture, or an .npy with one vector.", metavar="A", show_default=False)],
    b: Annotated[str, typer.Argument(help="Another.", metavar="B", show_default=False)],
    run: Annotated[Path | None, typer.Option(help="The folder of a run.", metavar="RUN")] = None,
    gallery: Annotated[str | None, typer.Option(help="Or the gallery whose encoder compares.", metavar="G")] = None,
    far: _FarPair = None,
    device: _Device = Device.auto,
    json: _Json = False,
) -> None:
    """Whether two items are the same, how probably, and at which false-accept rate (FAR, per pair).

    Example:

      nearkin verify ana.jpg bob.jpg --run runs/faces --far 0.001
    """
    with one_sentence():
        from nearkin import gallery as room

        chosen = run or (None if gallery is None else room.run_of(gallery))
        if chosen is None:
            raise ValueError("verify needs an encoder: --run RUN, or --gallery G of a gallery made with one")
        found = room.verify(chosen, _item(a), _item(b), far=far, device=device.value)
    if json:
        _print_json(found._asdict())
        return
    if found.same is None:
        echo(f"similarity {found.similarity:.4f}")
    else:
        word = "the same" if found.same else "not the same"
        limit = f"threshold {found.threshold:.4f}{_held(found.far, 'pair', found)}"
        echo(f"{word}: probability {found.probability:.1%}, similarity {found.similarity:.4f}, {limit}")
    _say(found.note)


@verbs.command(no_args_is_help=True)
def stats(gallery: _Where, json: _Json = False) -> None:
    """What there is: rows, labels, the encoder, how it is searched."""
    with one_sentence(), _opened(gallery) as opened:
        found = opened.stats() | {"largest": _largest(opened.labels())}
    if json:
        _print_json(found)
        return
    found["largest"] = ", ".join(f"{label} {count:,}" for label, count in found["largest"].items())
    shown = [(key, ", ".join(map(str, one)) if isinstance(one, list) else str(one)) for key, one in found.items()]
    _table(("", ""), [(key, value) for key, value in shown if value not in ("", "None")], "")


@verbs.command(no_args_is_help=True)
def export(
    gallery: _Where,
    out: Annotated[Path, typer.Option(help="An .npz, .safetensors, .parquet or .jsonl file.", metavar="FILE")],
) -> None:
    """Every row into one file, for `nearkin evaluate` or any index."""
    with one_sentence(), _opened(gallery) as opened:
        count = opened.export(out)
    echo(f"{out}: {count:,} rows")


@verbs.command(no_args_is_help=True)
def reindex(gallery: _Where) -> None:
    """Make the search index anew; up to 100,000 rows there is none, and every search is exact."""
    with one_sentence(), _opened(gallery) as opened:
        with plain_bar("indexing") as progress:
            opened.reindex(progress)
        state = opened.stats()["index"]
    echo(f"{shown(gallery)}: {state}")


@verbs.command(no_args_is_help=True)
def check(
    gallery: _Where,
    repair: Annotated[
        bool, typer.Option("--repair", help="Keep the rows that are whole, put the others aside.")
    ] = False,
) -> None:
    """Read and prove everything; exit code 1 where something is damaged."""
    with one_sentence(), _opened(gallery) as opened:
        with plain_bar("checking") as progress:
            found = opened.check(progress)
        saved = opened.repair() if repair and not found.whole else None
    echo(f"{shown(gallery)}: {found.sound:,} of {found.rows:,} rows are whole")
    for id, why in list(found.bad.items())[:20]:
        echo(f"id {id}: {why}", err=True)
    for note in found.notes:
        echo(note, err=True)
    if saved is not None:
        echo(f"{saved[0]:,} rows are kept; what was there before is in {saved[1]}")
    elif not found.whole:
        echo(f"damaged rows are left out of every search; nearkin gallery check {shown(gallery)} --repair", err=True)
        raise typer.Exit(1)


@verbs.command(no_args_is_help=True)
def calibrate(
    run: _Run,
    part: Annotated[
        str, typer.Option(help="Whose pairs: val, or test where val has few classes.", metavar="PART")
    ] = "val",
    device: _Device = Device.auto,
) -> None:
    """Measure what the similarities of a run mean; `identify` and `verify` then give probabilities."""
    with one_sentence():
        from nearkin import gallery as room

        with plain_bar("embedding") as progress:
            found = room.calibrate(run, part=part, device=device.value, progress=progress)
    echo(
        f"{run}: calibrated on {found['classes']:,} classes of {part}, {found['genuine']:,} pairs of the same class "
        f"and {found['impostors']:,} of different ones; error of probabilities {found['error']:.3f}"
    )
    rows = [
        (
            f"{one['far']:g}",
            f"{one['threshold']:.4f}",
            _share(one["measured_far"], one["far_interval"]),
            _share(one["tar"], one["tar_interval"]),
            f"{one['classes']:,}",
        )
        for one in found["operating_points"]
    ]
    _table(("FAR held (per pair)", "threshold", "measured FAR", "found of the same", "classes"), rows, "no FAR is held")
    _say(found["note"])


@contextmanager
def _opened(
    place: str, run: Path | None = None, device: Device = Device.auto, create: bool = False
) -> "Iterator[Gallery]":
    """The gallery, closed in the end; what it warns of becomes a note."""
    from nearkin.gallery import Gallery

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            with Gallery.open(place, run, create=create, device=device.value) as opened:
                yield opened
        finally:
            for one in heard:
                echo(f"note: {one.message}", err=True)


@contextmanager
def _enrolling(place: str, run: Path, device: Device, group: "ProcessGroup | None") -> "Iterator[Gallery | Encoding]":
    """The gallery, where this process writes it; the encoder alone, where it helps the one that does."""
    if first(group):
        with _opened(place, run, device, create=True) as opened:
            yield opened
    else:
        from nearkin.gallery.items import Encoding

        yield Encoding(run, device.value)


@contextmanager
def _seeing(place: str, run: Path | None, device: Device) -> "Iterator[Gallery]":
    """The gallery with the encoder it was made with."""
    from nearkin import gallery as room

    with _opened(place, run or room.run_of(place), device) as opened:
        yield opened


def _item(text: str) -> Any:
    """A path, or the vector in an .npy file."""
    if not text.lower().endswith(".npy"):
        return text
    import numpy as np

    try:
        vector = np.load(text, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{text}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if vector.ndim == 2 and len(vector) == 1:
        vector = vector[0]
    if vector.ndim != 1:
        raise ValueError(f"{text}: must hold one vector, got shape {vector.shape}")
    return vector


def _filter(texts: list[str] | None) -> dict[str, Any] | None:
    """KEY=VALUE, the value as JSON where it is a number, true, false or null; a key given twice means any of them."""
    found: dict[str, list[Any]] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f'filter must be KEY=VALUE, as label=heron, got "{text}"')
        try:
            read = json_module.loads(value) if key != "label" else value
        except (ValueError, RecursionError):
            read = value
        found.setdefault(key, []).append(value if isinstance(read, list | dict) else read)
    return found or None


def _json_object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json_module.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--metadata must be JSON ({error}), got {text[:200]}") from None
    if not isinstance(found, dict):
        raise ValueError(f'--metadata must be a JSON object, as {{"place": "pond"}}, got {text[:200]}')
    return found


def _held(far: float | None, per: str, found: Any) -> str:
    """What a threshold promises, and on how many classes that rests."""
    return "" if far is None else f" at FAR {far:.3g} per {per} or less, 95 % sure from {found.classes:,} classes"


def _share(value: float, ends: Sequence[float]) -> str:
    return f"{value:.3g} ({ends[0]:.2g}–{ends[1]:.2g})"


def _largest(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:5])


def _print_json(found: Any) -> None:
    echo(json_module.dumps(found, indent=2, ensure_ascii=False), lines=True)


def _say(note: str) -> None:
    if note:
        echo(f"note: {note}", err=True)


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]], empty: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        echo(empty)
        return
    grid = Table(box=SIMPLE_HEAD, show_header=any(names), pad_edge=False)
    for name in names:
        grid.add_column(name, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(visible(cell)) for cell in row))
    Console().print(grid)
