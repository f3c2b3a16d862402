"""`nearkin search`, `identify`, `verify` and `explain`: questions to a gallery or an encoder."""

import json as json_module
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearkin.cli import identified, options
from nearkin.cli.gallery_admin import opened_gallery
from nearkin.cli.screen import app, echo, one_sentence, plain_bar, print_json, print_note, print_table

if TYPE_CHECKING:
    from nearkin.data.item_set import Items
    from nearkin.gallery import Gallery

_OtherRun = Annotated[
    str | None,
    typer.Option(
        "--run",
        help="Where its run is now, or its encoder's name.",
        metavar="RUN",
        show_default="where it was enrolled from",
    ),
]
_FarPair = Annotated[
    float | None,
    typer.Option(
        help="Maximum false-accept rate (FAR), per pair.",
        show_default="0.001, or the strictest of 0.1, 0.01, … that the calibration can guarantee",
    ),
]
_FarQuery = Annotated[
    float | None,
    typer.Option(
        "--far",
        help="Share of strangers that may be named, as expected (FAR per query); its threshold alone decides then.",
        show_default="none: the probabilities decide",
    ),
]
_Filter = Annotated[
    list[str] | None,
    typer.Option("--filter", help="label=heron, or a key of the metadata; may be repeated.", metavar="KEY=VALUE"),
]
_Item = Annotated[str, typer.Argument(help="An image, or an .npy with one vector.", metavar="ITEM", show_default=False)]


@app.command(no_args_is_help=True)
def search(
    item: _Item,
    gallery: options.GalleryOption,
    run: _OtherRun = None,
    k: Annotated[int, typer.Option(help="Number of neighbours.")] = 10,
    filter: _Filter = None,
    rerank: Annotated[
        str | None,
        typer.Option(
            help="Re-rank the nearest items: k-reciprocal, alpha-qe or dba; with settings as k-reciprocal:k1=20,k2=6.",
            metavar="METHOD",
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Without an approximate index; among millions of rows this takes long.")
    ] = False,
    device: options.DeviceOption = options.Device.auto,
    json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Search a gallery for the nearest items.

    Example:

      nearkin search new.jpg --gallery birds.gallery --k 5
    """
    with one_sentence(), _gallery_with_encoder(gallery, run, device) as opened:
        seen = opened.see(_item(item))[0]
        hits = opened.search(seen, k, _filter(filter), rerank=rerank, exact=exact)
    if json:
        print_json([hit._asdict() for hit in hits])
        return
    rated = any(hit.quality is not None for hit in hits)
    rows = [
        (f"{hit.similarity:.4f}", hit.label, hit.name, str(hit.id), *([_quality(hit.quality)] if rated else []))
        for hit in hits
    ]
    print_table(("similarity", "label", "name", "id", *(["quality"] if rated else [])), rows, "nothing found")
    if hits.recall is not None and not quiet:
        print_note(
            f"not proved to be the exact answer: recall@10 {hits.recall:.4f}, measured with the index; or --exact"
        )
    if seen is not None and seen.quality is not None and not quiet:
        echo(f"quality of {item}: {_quality(seen.quality)}")


@app.command(no_args_is_help=True)
def identify(
    item: Annotated[
        str,
        typer.Argument(
            help="An image, or an .npy with one vector; or a folder of images, or another source as of `enrol`.",
            metavar="ITEM|FOLDER",
            show_default=False,
        ),
    ],
    gallery: options.GalleryOption,
    run: _OtherRun = None,
    far_query: _FarQuery = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="--far as a bound with 95 % confidence; refused if the labels are too few.")
    ] = False,
    unknown_prior: Annotated[
        float, typer.Option(help="Share of strangers among what you ask; moves probabilities, not --far.")
    ] = 0.3,
    sure: Annotated[float, typer.Option(help="Probability from which on it is named, or called unknown.")] = 0.7,
    filter: _Filter = None,
    review: Annotated[bool, typer.Option("--review", help="Of a folder: list the unsure ones first.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write a row per file, to a .csv or .jsonl file.", metavar="FILE")
    ] = None,
    allow_outside: options.AllowOutsideFlag = False,
    device: options.DeviceOption = options.Device.auto,
    json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Say who it is: named, unsure or unknown, always with the best candidate and its probability.

    Examples:

      nearkin identify new.jpg --gallery birds.gallery

      nearkin identify new-photos/ --gallery birds.gallery --review --out rows.csv

      nearkin identify new.jpg --gallery birds.gallery --far 0.05
    """
    with one_sentence():
        from nearkin.gallery import asking
        from nearkin.gallery.answers import Asked

        identified.check_out(out)
        asked, conditions = Asked(far_query, unknown_prior, sure, strict), _filter(filter)
        asked.check()
        items = _source(item, allow_outside)
        with _gallery_with_encoder(gallery, run, device) as opened:
            if items is None:
                rows = [asking.answered(opened, item, _item(item), conditions, asked)]
            else:
                with plain_bar("identifying", quiet) as progress:
                    together = asking.identify_items(opened, item, items, conditions, asked, progress)
                    rows = list(together)
        if review:
            rows = identified.in_review(rows)
        if out is not None:
            identified.write_rows(out, rows)
    if items is None and out is None:
        identified.print_one(rows[0], json)
        return
    print_note("; ".join(items.ignored if items is not None else ()))
    identified.print_many(rows, json, out)


@app.command(no_args_is_help=True)
def verify(
    a: Annotated[str, typer.Argument(help="An image, or an .npy with one vector.", metavar="A", show_default=False)],
    b: Annotated[str, typer.Argument(help="The other.", metavar="B", show_default=False)],
    run: Annotated[str | None, typer.Option(help=options.RUN_HELP, metavar="RUN")] = None,
    gallery: Annotated[str | None, typer.Option(help="Or a gallery, whose encoder is used.", metavar="G")] = None,
    far: _FarPair = None,
    device: options.DeviceOption = options.Device.auto,
    json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Verify whether two items are of the same class, at a false-accept rate (FAR) per pair.

    Example:

      nearkin verify ana.jpg bob.jpg --run runs/faces --far 0.001
    """
    with one_sentence():
        from nearkin import gallery as room
        from nearkin.models.frozen import is_encoder_name

        chosen = run or (None if gallery is None else room.run_of(gallery))
        if chosen is None:
            raise ValueError("verify needs an encoder: --run RUN, or --gallery G of a gallery made with one")
        if gallery is not None and is_encoder_name(chosen):  # whose calibration is the gallery's
            with opened_gallery(gallery, chosen, device) as opened:
                answer = opened.verify(_item(a), _item(b), far=far)
        else:
            answer = room.verify(chosen, _item(a), _item(b), far=far, device=device.value)
    if json:
        print_json(answer._asdict())
        return
    if answer.same is None:
        echo(f"similarity {answer.similarity:.4f}")
    else:
        word = "the same" if answer.same else "not the same"
        limit = f"threshold {answer.threshold:.4f}{_guarantee(answer.far, answer.classes)}"
        echo(f"{word}: probability {answer.probability:.1%}, similarity {answer.similarity:.4f}, {limit}")
    if None not in answer.qualities:
        echo(f"quality {_quality(answer.qualities[0])} and {_quality(answer.qualities[1])}")
    print_note(answer.note)


@app.command(no_args_is_help=True)
def explain(
    a: Annotated[str, typer.Argument(help="An image.", metavar="A", show_default=False)],
    b: Annotated[str, typer.Argument(help="The other.", metavar="B", show_default=False)],
    run: Annotated[str | None, typer.Option(help=options.RUN_HELP, metavar="RUN")] = None,
    gallery: Annotated[str | None, typer.Option(help="Or a gallery, whose encoder is used.", metavar="G")] = None,
    out: Annotated[Path, typer.Option(help="The picture with both heat maps.", metavar="FILE")] = Path("explain.png"),
    device: options.DeviceOption = options.Device.auto,
    json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Show which part of two images matched: a heat map over each, whose sum is the similarity.

    Example:

      nearkin explain heron.jpg egret.jpg --run runs/birds --out explain.png
    """
    with one_sentence():
        from nearkin import gallery as room
        from nearkin.report import heatmaps

        if out.suffix.lower() != ".png":
            raise ValueError(f"--out must be a .png file, got {out}")
        chosen = run or (None if gallery is None else room.run_of(gallery))
        if chosen is None:
            raise ValueError("explain needs an encoder: --run RUN, or --gallery G of a gallery made with one")
        matched = room.explain(chosen, _item(a), _item(b), device=device.value)
        sides = {a: matched.a, b: matched.b} if a != b else {a: matched.a}
        heatmaps.write_heat_maps(
            out,
            [matched.a.picture, matched.b.picture],
            [matched.a.heat, matched.b.heat],
            [Path(a).name, Path(b).name],
            [f"sum {side.heat.sum():.4f}, missing {side.missing:+.2g}" for side in (matched.a, matched.b)],
            f"similarity {matched.similarity:.4f}",
        )
    if json:
        plain = [
            {"heat": side.heat.tolist(), "sum": side.heat.sum(), "missing": side.missing, "bias": side.bias}
            for side in (matched.a, matched.b)
        ]
        print_json({"similarity": matched.similarity, "exact": matched.exact, "a": plain[0], "b": plain[1]})
        return
    echo(f"similarity {matched.similarity:.4f}")
    for name, side in sides.items():
        bias = f"; {side.bias:+.4f} of the sum is the bias of the head, spread evenly" if side.bias else ""
        echo(f"{name}: the map adds up to {side.heat.sum():.4f}, {side.missing:+.2g} is missing{bias}")
    if not matched.exact:
        print_note("gradient × input: exact only for average pooling and a linear head; what is missing says how good")
    echo(f"wrote {out}")


@contextmanager
def _gallery_with_encoder(place: str, run: str | None, device: options.Device) -> "Iterator[Gallery]":
    """The gallery with the encoder of its run."""
    from nearkin import gallery as room

    with opened_gallery(place, run or room.run_of(place), device) as opened:
        yield opened


def _source(text: str, allow_outside: bool) -> "Items | None":
    """The items of a folder, an archive, a table or a file of vectors; None for a single one."""
    from nearkin.data.sources import FILES
    from nearkin.gallery import asking

    one = Path(text).suffix.lower() not in set(FILES) - {".npy"}
    if one and not (text and Path(text).is_dir()):
        return None
    return asking.load_unlabelled(text, options.reading(allow_outside=allow_outside))


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
    conditions: dict[str, list[Any]] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f'filter must be KEY=VALUE, as label=heron, got "{text}"')
        try:
            read = json_module.loads(value) if key != "label" else value
        except (ValueError, RecursionError):
            read = value
        conditions.setdefault(key, []).append(value if isinstance(read, list | dict) else read)
    return conditions or None


def _quality(quality: float | None) -> str:
    return "" if quality is None else f"{quality:.4g}"


def _guarantee(far: float | None, classes: int | None) -> str:
    """The false-accept rate of a threshold, and the number of classes that it was measured on."""
    return "" if far is None else f" at FAR {far:.3g} per pair or less, 95 % sure from {classes:,} classes"
