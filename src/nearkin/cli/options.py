"""Arguments and options that several verbs have."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nearkin.data import Reading

__all__ = [
    "RUN_HELP",
    "BatchOption",
    "Device",
    "DeviceOption",
    "DimOption",
    "EncoderOption",
    "GalleryOption",
    "JsonFlag",
    "JsonResultsFlag",
]
__all__ += ["StoredOption"]
__all__ += ["ClosedOption", "GroupColumnOption", "GroupPatternOption"]
__all__ += [
    "LevelsOption",
    "NamesFlag",
    "OpenDeviceOption",
    "PartialFlag",
    "QuietFlag",
    "RootOption",
    "RunArgument",
    "SilentFlag",
    "SkipSingleFlag",
]
__all__ += [
    "AllowOutsideFlag",
    "LeafClassesFlag",
    "OwnSourceOption",
    "SkipUnreadableFlag",
    "SplitFoldersOption",
    "names",
    "reading",
]


class Device(str, Enum):
    """Values of --device."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


RUN_HELP = "The folder of a run, or an encoder's name: efficientnet-lite0, timm:…, hf:…"
# Text, not a Path: a Path would make the encoder's name efficientnet-lite0 of the folder ./efficientnet-lite0.
RunArgument = Annotated[str, typer.Argument(help=RUN_HELP, metavar="RUN", show_default=False)]
RootOption = Annotated[Path | None, typer.Option(help="Folder of a benchmark data set.", metavar="DIR")]
GalleryOption = Annotated[
    str,
    typer.Option("--gallery", help="A file, or postgresql://…/db[?gallery=NAME].", metavar="G", show_default=False),
]
EncoderOption = Annotated[str | None, typer.Option(help="See `nearkin encoders`.", show_default="by the data")]
BatchOption = Annotated[int | None, typer.Option(help="Items per batch.", show_default="by the data")]
DeviceOption = Annotated[Device, typer.Option(help="auto takes cuda if available; mps: an Apple GPU.")]
OpenDeviceOption = Annotated[Device | None, typer.Option(help="auto takes cuda if available; mps: an Apple GPU.")]
PartialFlag = Annotated[bool, typer.Option("--partial", help="Accept an incomplete benchmark data set.")]
ClosedOption = Annotated[
    bool | None,
    typer.Option(
        "--closed/--open",
        help="Hold out items of every class, or whole classes.",
        show_default="--closed below 20 classes",
    ),
]
GroupPatternOption = Annotated[
    str | None,
    typer.Option(
        help="Where the group of an item (burst, camera, writer) is in its name, as '*_c{group}_*'.", metavar="PATTERN"
    ),
]
GroupColumnOption = Annotated[
    str | None,
    typer.Option(
        help="Column of the groups in a table or a file of vectors; none ignores them.",
        metavar="NAME",
        show_default="group, if there is one",
    ),
]
SplitFoldersOption = Annotated[
    str | None,
    typer.Option(
        help="Folders that are the parts of the source's split, as train,more/val or fold1=train,fold2=test; all else "
        "is left out. none: no folder is a part.",
        metavar="FOLDER,…",
        show_default="the first folders, if all are called train, val, test",
    ),
]
LeafClassesFlag = Annotated[
    bool, typer.Option("--leaf-classes", help="A class is a folder that holds images, not the first folder.")
]
AllowOutsideFlag = Annotated[
    bool,
    typer.Option("--allow-outside", help="Paths of a table or Hugging Face dataset may lead out of its folder."),
]
OwnSourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        help="The source that is recorded, typed again: code (dataset:…) is run only so.",
        metavar="SOURCE",
        show_default=False,
    ),
]
DimOption = Annotated[
    int | None,
    typer.Option(
        help="Keep the first so many dimensions, a length of loss.matryoshka.", metavar="D", show_default="all"
    ),
]
StoredOption = Annotated[
    str | None,
    typer.Option(
        help="Search index on the disk, for more rows than fit in memory: float32, int8, binary or short:N.",
        metavar="FORM",
        show_default="rows in memory",
    ),
]
SkipSingleFlag = Annotated[bool, typer.Option("--skip-single", help="Skip classes with a single item.")]
SkipUnreadableFlag = Annotated[bool, typer.Option("--skip-unreadable", help="Skip unreadable files.")]
SilentFlag = Annotated[bool, typer.Option("--quiet", help="Print nothing.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")]
NamesFlag = Annotated[bool, typer.Option("--quiet", help="Print only the names.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonResultsFlag = Annotated[bool, typer.Option("--json", help="Print only the results, as JSON.")]
LevelsOption = Annotated[
    str | None,
    typer.Option(
        help="Coarser levels of the classes, the finest first: columns, entries of a file of vectors, or names for the "
        "folders around class folders, from the inside out.",
        metavar="NAME,…",
    ),
]


def names(text: str | None) -> list[str] | None:
    """The names in "family,order"."""
    return None if text is None else [name.strip() for name in text.split(",")]


def reading(
    split_folders: str | None = None,
    leaf_classes: bool = False,
    allow_outside: bool = False,
    own_source: str | None = None,
) -> "Reading":
    """How the files of a source are read, from the options above."""
    from nearkin import data

    return data.Reading(names(split_folders), leaf_classes, allow_outside, own_source)
