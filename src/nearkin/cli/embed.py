"""`nearkin embed` and `nearkin export`: embeddings of a source, and the encoder as ONNX."""

from pathlib import Path
from typing import Annotated

import typer

from nearkin.cli import options
from nearkin.cli.ranks import first, joined
from nearkin.cli.screen import app, one_sentence, plain_bar, print_result


@app.command(no_args_is_help=True)
def embed(
    run: options.RunArgument,
    source: Annotated[
        str, typer.Argument(help="What to embed, as in `nearkin train`; labels are written too, if any.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="An .npz, .parquet or .safetensors file.", metavar="FILE", show_default="SOURCE.npz, if there is none"
        ),
    ] = None,
    root: options.RootOption = None,
    split_folders: options.SplitFoldersOption = None,
    leaf_classes: options.LeafClassesFlag = False,
    allow_outside: options.AllowOutsideFlag = False,
    part: Annotated[
        str,
        typer.Option(
            help="all, or train, val or test as the run splits the source; of an encoder's name, as train does.",
            metavar="PART",
        ),
    ] = "all",
    dim: options.DimOption = None,
    views: Annotated[int, typer.Option(help="Crops and flips to average over.")] = 1,
    batch: Annotated[int, typer.Option(help="Items per batch.")] = 256,
    skip_unreadable: options.SkipUnreadableFlag = False,
    device: options.DeviceOption = options.Device.auto,
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Embed a source with the encoder of a run or a pretrained one, for `nearkin evaluate` or any index.

    Examples:

      nearkin embed efficientnet-lite0 photos/

      nearkin embed runs/birds new-photos/ --out new.npz

      nearkin embed runs/birds photos/ --part test --views 10 --out test.parquet

      torchrun --nproc-per-node 8 -m nearkin embed runs/birds photos/ --out all.npz
    """
    with one_sentence(), joined() as group:
        from nearkin import training
        from nearkin.data import vector_files

        out = out or _beside(source)
        if first(group):
            vector_files.writable(out)
        with plain_bar("embedding", quiet or not first(group)) as progress:
            embedded = training.embed_source(
                run,
                source,
                root=root,
                part=part,
                dim=dim,
                views=views,
                batch=batch,
                unreadable="skip" if skip_unreadable else "strict",
                device=device.value,
                progress=progress,
                group=group,
                reading=options.reading(split_folders, leaf_classes, allow_outside),
            )
        if first(group):
            columns = (embedded.labels, embedded.targets, embedded.names, embedded.classes, embedded.quality)
            vector_files.write(out, embedded.embeddings, *columns, embedded.groups)
    if first(group):
        rows, dimensions = embedded.embeddings.shape
        document = {"file": str(out), "rows": rows, "dimensions": dimensions}
        print_result(f"{out}: {rows:,} × {dimensions}", document)


def _beside(source: str) -> Path:
    """The file for the embeddings of a source, in the current folder, under its name; one that exists is not lost."""
    path = Path(f"{Path(source).absolute().name}.npz")
    if path.exists():
        raise ValueError(f"{path} is there already; name the file: --out FILE")
    return path


@app.command(no_args_is_help=True)
def export(
    run: options.RunArgument,
    onnx: Annotated[bool, typer.Option("--onnx", help="ONNX, checked with onnxruntime on real inputs.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Output file.", metavar="FILE", show_default="RUN/model.onnx, RUN/model-D.onnx with --dim"),
    ] = None,
    dim: options.DimOption = None,
    allow_outside: options.AllowOutsideFlag = False,
    own_source: options.OwnSourceOption = None,
    quiet: options.SilentFlag = False,
    json: options.JsonFlag = False,
) -> None:
    """Write the encoder of a run in another format, and check it on real inputs.

    Example:

      nearkin export runs/birds --onnx --out birds.onnx
    """
    with one_sentence():
        from nearkin import training

        if not onnx:
            raise ValueError("say which format: nearkin export RUN --onnx")
        path = out or Path(run) / ("model.onnx" if dim is None else f"model-{dim}.onnx")
        difference, items = training.export_onnx(
            run, path, dim=dim, reading=options.reading(allow_outside=allow_outside, own_source=own_source)
        )
    text = f"{path}: equal to the run's encoder within {difference:.1e} on {items} of its test items"
    print_result(text, {"file": str(path), "difference": difference, "items": items})
