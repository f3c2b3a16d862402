"""`nearkin train`: from a source to a trained, measured encoder."""

import json as json_module
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from nearkin.cli import options
from nearkin.cli.screen import app, echo, one_sentence, print_json, training_screen


class Strategy(str, Enum):
    """Values of --strategy."""

    ddp = "ddp"
    fsdp = "fsdp"


@app.command()
def train(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A folder of class folders; a .csv, .tsv or .parquet with path and label (or targets); an .npz or "
            ".safetensors of vectors; or a name that `nearkin sources` lists.",
            show_default="glyphs",
        ),
    ] = None,
    root: options.RootOption = None,
    recipe: Annotated[Path | None, typer.Option(help="A recipe in TOML; flags override it.", metavar="FILE")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any key of a recipe, as loss.margin=0.3; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    unlabelled: Annotated[
        str | None,
        typer.Option(
            help="Pretrain on these pictures first, whose labels are not read; without SOURCE, nothing else.",
            metavar="FOLDER",
        ),
    ] = None,
    compatible_with: Annotated[
        str | None,
        typer.Option(help="An old run whose gallery rows the new encoder's queries are to search.", metavar="RUN"),
    ] = None,
    loss: Annotated[str | None, typer.Option(help="See `nearkin losses`.", show_default="by the data")] = None,
    encoder: options.EncoderOption = None,
    epochs: Annotated[int | None, typer.Option(show_default="by the data")] = None,
    batch: options.BatchOption = None,
    chunk: Annotated[
        int | None, typer.Option(help="Items encoded at a time; the gradient is that of the full batch.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="by the encoder")] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of weights, batches and augmentation; the split has data.seed.", show_default="0"),
    ] = None,
    device: options.OpenDeviceOption = None,
    strategy: Annotated[
        Strategy | None,
        typer.Option(help="With several ranks: all weights on each (ddp) or sharded (fsdp).", show_default="ddp"),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Keep decoded images in memory only.")] = False,
    partial: options.PartialFlag = False,
    split_folders: options.SplitFoldersOption = None,
    leaf_classes: options.LeafClassesFlag = False,
    allow_outside: options.AllowOutsideFlag = False,
    own_source: options.OwnSourceOption = None,
    group_pattern: options.GroupPatternOption = None,
    group_column: options.GroupColumnOption = None,
    skip_single: options.SkipSingleFlag = False,
    skip_unreadable: options.SkipUnreadableFlag = False,
    levels: options.LevelsOption = None,
    without: Annotated[
        Path | None,
        typer.Option(help="Leave out the items that this list names: .csv, .tsv or .json with path.", metavar="FILE"),
    ] = None,
    drop_near: Annotated[
        bool,
        typer.Option("--drop-near", help="Drop training and validation pictures that are nearly in a later part."),
    ] = False,
    closed: options.ClosedOption = None,
    log: Annotated[
        str | None,
        typer.Option(
            "--log",
            "--track",  # torchrun takes --log for one of its own
            help="Also write the figures for tensorboard, mlflow or wandb (offline); under torchrun: --track.",
            metavar="NAME,…",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the run.", metavar="DIR", show_default="runs/SOURCE")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume this run instead.", metavar="RUN")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the folder of the run.")] = False,
    json: options.JsonResultsFlag = False,
) -> None:
    """Train an encoder, test it on unseen classes or items, and write a report.

    Examples:

      nearkin train photos/

      nearkin train photos/ --loss proxy-anchor --epochs 20 --out runs/birds

      nearkin train cub200 --root data/CUB_200_2011 --recipe recipes/cub200-proxy-anchor.toml

      nearkin train photos/ --unlabelled more-photos/

      nearkin train photos/ --compatible-with runs/old

      nearkin train --resume runs/birds

      torchrun --nproc-per-node 4 -m nearkin train photos/ --out runs/birds
    """
    flags = {
        "data.source": own_source if source is None else source,
        "data.root": None if root is None else str(root),
        "data.split_folders": options.names(split_folders),
        "data.leaf_classes": leaf_classes or None,
        "data.group_pattern": group_pattern,
        "data.group_column": group_column,
        "data.skip_single": skip_single or None,
        "data.unreadable": "skip" if skip_unreadable else None,
        "data.closed": closed,
        "data.partial": partial or None,
        "data.cache": False if no_cache else None,
        "data.levels": options.names(levels),
        "data.without": None if without is None else str(without),
        "data.near": "drop" if drop_near else None,
        "unlabelled.folder": unlabelled,
        "compatible.run": compatible_with,
        "loss.name": loss,
        "encoder.name": encoder,
        "training.epochs": epochs,
        "sampler.batch": batch,
        "training.chunk": chunk,
        "optimizer.lr": lr,
        "training.seed": seed,
        "training.log": options.names(log),
        "training.device": None if device is None else device.value,
        "training.strategy": None if strategy is None else strategy.value,
    }
    settings = {key: value for key, value in flags.items() if value is not None}
    folder = resume
    with one_sentence(lambda: _after_interrupt(folder)):
        from nearkin import dist, training

        if own_source is not None and source not in (None, own_source):
            raise ValueError(f"--source is SOURCE typed again, got {own_source} beside {source}")
        with dist.join() as group:
            with training_screen(quiet or json or not group.first) as screen:
                _name_rank(screen, group)

                def callback(event: dict[str, Any]) -> None:
                    nonlocal folder
                    if event["event"] == "folder":
                        folder = Path(event["folder"])
                    screen(event)

                sets = [*_assignments(settings), *(set_ or [])]
                how: dict[str, Any] = {"resume": resume, "report": True, "group": group, "allow_outside": allow_outside}
                outcome = training.train(None, out, callback, recipe=recipe, settings=sets, **how)
            if group.first:
                _print_outcome(outcome, quiet, json)


def _print_outcome(outcome: Any, quiet: bool, json: bool) -> None:
    if json:
        print_json(outcome.results)
    elif quiet:
        echo(str(outcome.folder))
    elif outcome.recipe.unlabelled.only:
        facts = outcome.results["pretraining"]
        echo(f"pretrained on {facts['pictures']:,} pictures: loss {facts['loss'][0]:.4g} → {facts['loss'][-1]:.4g}")
        echo(f"nothing was tested: there are no labels; nearkin embed {outcome.folder} PHOTOS takes the encoder")
    else:
        from nearkin.cli.screen import results_table

        results_table(outcome.results)
        if "interpolation" in outcome.results:
            echo(outcome.results["interpolation"]["sentence"])
        echo(outcome.results["verdict"]["sentence"])
        if "compatible" in outcome.results:
            echo(outcome.results["compatible"]["sentence"])
        echo(f"report: {outcome.report}")


def _name_rank(callback: Any, group: Any) -> None:
    """Prefixes lines on the screen with the rank, if there are several."""
    console = getattr(callback, "console", None)
    if group.size > 1 and console is not None:
        callback.console = _PrefixedConsole(console, f"rank {group.rank}: ")


class _PrefixedConsole:
    """A console whose lines start with a prefix."""

    def __init__(self, console: Any, prefix: str) -> None:
        self.console, self.prefix = console, prefix

    def print(self, text: Any, **style: Any) -> None:
        from rich.text import Text

        self.console.print(Text.assemble(self.prefix, text), **style)


def _after_interrupt(folder: Path | None) -> str:
    """What an interrupted command has written."""
    if folder is None or not (folder / "recipe.toml").is_file():
        return "nothing was written"
    return f"the run is saved; resume it with nearkin train --resume {folder}"


def _assignments(settings: dict[str, Any]) -> list[str]:
    """Settings in the form of --set; text in quotes, so that a folder called 7 stays a name."""
    return [f"{key}={json_module.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
