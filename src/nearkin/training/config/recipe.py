"""A recipe: everything that decides a run, typed; TOML on disk, `section.key=value` on the command line.

    [data]
    source = "glyphs"
    [loss]
    name = "supcon"
    temperature = 0.1

A key that is absent (None here) is settled by the data, in `defaults.settle`, and the settled recipe is saved with the
run. Four sections take the settings of what they name: [encoder], [loss], [sampler], [augment]. A key that would have
no effect beside the others is refused: nothing in a recipe is ignored.
"""

import difflib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from nearkin.core import checks, toml
from nearkin.core.checks import no_effect
from nearkin.core.errors import ExcessiveText
from nearkin.data.map_dataset import check_typed
from nearkin.models.encoder import PREFIX

__all__ = ["KEYS", "NAMED", "Recipe", "no_effect", "read"]

NAMED = ("encoder", "loss", "sampler", "augment")  # sections whose keys depend on what they name

# Keys that may be edited before a run resumes: where things are, not what is learned.
_FREE = {
    "data": ("source", "root"),
    "unlabelled": ("folder",),
    "compatible": ("run",),
    "training": ("device", "workers", "strategy", "graphs", "log"),
    "loss": ("shard",),
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Data(_Section):
    """Which items, how they are read, and which of them are held out."""

    source: str = "glyphs"  # a folder, a table, a file of vectors, or a name of `nearkin sources`
    root: str | None = None  # folder of a benchmark set
    size: int | None = Field(default=None, ge=8, le=4096)  # side of the pictures that the encoder sees
    stored: int | None = Field(default=None, ge=8, le=4096)  # side at which they are kept, from which crops are taken
    fit: Literal["crop", "squash", "pad"] | None = None  # how a picture becomes square
    channels: Literal[1, 3] | None = None  # 1: grey, 3: colour
    unreadable: Literal["strict", "skip"] | None = None  # files: an error, or left out and named
    max_pixels: int | None = Field(default=None, ge=1)  # a larger picture counts as unreadable
    cache: bool | None = None  # decoded pictures on disk
    skip_single: bool = False  # leave out classes of one item
    closed: bool | None = None  # hold out items of every class, not classes; None: where there are fewer than 20
    official: bool = True  # the publisher's or the user's own split, where the source has one
    partial: bool = False  # take what there is of a benchmark set
    # Shares of the classes; where closed, of the items of each class.
    val: float | None = Field(default=None, gt=0, lt=1)  # share for validation, of what is not tested
    test: float | None = Field(default=None, gt=0, lt=1)  # share for the test
    seed: int = Field(default=0, ge=0)  # of the split
    # Groups beside classes: where they are (in names, or in which column), and whether a group counts within its class.
    group_pattern: str | None = None
    group_column: str | None = None  # column of a table or file of vectors
    group_scope: Literal["set", "class"] | None = None  # whether equal names in two classes are one group
    # Coarser levels of the classes by name, the finest first: columns, entries, or the folders around class folders.
    levels: list[str] | None = Field(default=None, min_length=1)
    # Of a folder: which folders are the parts of its split, or ["none"]; and whether a class is a folder of images.
    split_folders: list[str] | None = Field(default=None, min_length=1)  # ["train", "more/val"], ["fold1=train", …]
    leaf_classes: bool | None = None  # a class is a folder that holds images, not the first folder
    near: Literal["off", "list", "drop"] | None = None  # near-duplicates across parts; None: list up to 10,000 pictures
    without: str | None = None  # a list of items to leave out: .csv, .tsv, .json


class Unlabelled(_Section):
    """Pictures without labels, on which the encoder is pretrained first; `unlabelled.settle_unlabelled`."""

    folder: str | None = None  # a folder, or any other source of pictures, whose labels are not read
    own_part: bool | None = None  # the pictures of the training part too
    only: bool | None = None  # there is no labelled source: the run ends with the pretraining
    held_out: Literal["drop", "keep"] | None = None  # files that are also in validation or test
    method: Literal["infonce", "vicreg"] | None = None  # which loss compares the two views
    epochs: int | None = Field(default=None, ge=1)  # of the pretraining
    batches: int | None = Field(default=None, ge=1)  # per epoch
    batch: int | None = Field(default=None, ge=2)  # pictures, each in two views
    lr: float | None = Field(default=None, gt=0)  # learning rate of the pretraining
    preset: str | None = None  # the augmentation of the views; None: [augment]
    projector: list[Annotated[int, Field(ge=1)]] | None = None  # widths of the layers between encoder and loss
    temperature: float | None = Field(default=None, gt=0)  # infonce
    queue: int | None = Field(default=None, ge=0)  # infonce: past views as negatives
    invariance: float | None = Field(default=None, ge=0)  # vicreg: the weights of its terms
    variance: float | None = Field(default=None, ge=0)  # vicreg
    covariance: float | None = Field(default=None, ge=0)  # vicreg


class Compatible(_Section):
    """An old run whose rows the new embeddings are to search; `compatible.CompatibleLoss`."""

    run: str | None = None  # its folder, or the name of a pretrained encoder
    method: Literal["classes", "items", "regression"] | None = None  # the term that holds new embeddings to old ones
    weight: float | None = Field(default=None, gt=0)  # of the term beside the loss
    class_share: float | None = Field(default=None, ge=0, le=1)  # regression: of the class mean in what is aimed at
    scale: float | None = Field(default=None, gt=0)  # classes, items: what the cosines are multiplied by


class Levels(_Section):
    """The loss at each level of the classes."""

    weights: list[Annotated[float, Field(ge=0)]] | None = None  # of the classes, then of data.levels; None: no levels


class Memory(_Section):
    """Past embeddings as references: how many, from which step on."""

    size: int = Field(default=0, ge=0)  # embeddings that are remembered; 0: none
    warmup: int | None = Field(default=None, ge=0)  # steps before they are used


class Optimizer(_Section):
    """How the weights move. The scales multiply `lr` for their part of the parameters."""

    name: Literal["adamw", "sgd", "rmsprop"] = "adamw"  # the rule
    lr: float | None = Field(default=None, gt=0)  # learning rate of the encoder
    weight_decay: float | None = Field(default=None, ge=0)  # of matrices; biases and norms have none
    momentum: float | None = Field(default=None, ge=0, lt=1)  # sgd, rmsprop
    betas: list[Annotated[float, Field(ge=0, lt=1)]] | None = Field(default=None, min_length=2, max_length=2)  # adamw
    eps: float | None = Field(default=None, gt=0)  # adamw, rmsprop
    backbone_scale: float | None = Field(default=None, ge=0)  # of the pretrained layers
    head_scale: float = Field(default=1.0, ge=0)  # of pooling and projection
    loss_scale: float | None = Field(default=None, ge=0)  # None: what the loss asks for, `lr_scale`
    class_weights: Literal["rowwise"] | None = None  # their own rule (`ClassWeightOptimizer`); None: `name`
    clip: float = Field(default=0.0, ge=0)  # largest norm of the gradient; 0: any


class Finetune(_Section):
    """What of a pretrained encoder learns, how fast, and which weights are saved; `finetune.settle_finetune`."""

    train: Literal["auto", "head", "lora", "all"] | None = None  # auto: by the number of classes and pictures
    layer_decay: float | None = Field(default=None, gt=0, le=1)  # learning rates lr * layer_decay^(L - l); 1: all alike
    lora_rank: int | None = Field(default=None, ge=1)  # rank of the added matrices
    lora_alpha: float | None = Field(default=None, gt=0)  # their weight: alpha / rank
    lora_layers: str | None = None  # a regular expression, or "auto"
    projection: Literal["pca", "random"] | None = None  # what the head's projection is before training
    interpolate: bool | None = None  # at the end, between the pretrained and the trained weights, by validation


class Schedule(_Section):
    """The learning rate over time: a straight warm-up, then a decay."""

    decay: Literal["cosine", "step", "plateau", "constant"] = "cosine"  # after the warm-up
    warmup: float = Field(default=0.05, ge=0, lt=1)  # share of all steps
    floor: float | None = Field(default=None, ge=0, le=1)  # where cosine ends, as a part of lr
    every: int | None = Field(default=None, ge=1)  # step: epochs between two cuts
    factor: float | None = Field(default=None, gt=0, lt=1)  # step, plateau: what a cut leaves
    patience: int | None = Field(default=None, ge=1)  # plateau: validations without a better one before a cut
    frozen_epochs: int | None = Field(default=None, ge=0)  # head first: epochs in which the backbone is frozen


class Training(_Section):
    """The loop itself."""

    epochs: int | None = Field(default=None, ge=1)  # at most, with training.patience
    batches: int | None = Field(default=None, ge=1)  # per epoch
    chunk: int | None = Field(default=None, ge=1)  # items encoded at a time, with the gradient of the whole batch
    precision: Literal["fp32", "bf16", "fp16"] | None = None  # of the encoder's passes; losses are computed in fp32
    ema: float | None = Field(default=None, ge=0, lt=1)  # decay of the average of the weights; 0: none
    seed: int = Field(default=0, ge=0, lt=2**63)  # of weights, batches and augmentation
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if there is one
    workers: int = Field(default=2, ge=0)  # threads that gather batches ahead
    deterministic: bool = True  # the same weights at each repetition
    # CUDA graphs: of whole steps where they can be captured (true), of the encoder's passes only, or none.
    graphs: bool | Literal["auto", "encoder"] | None = None
    strategy: Literal["ddp", "fsdp"] | None = (
        None  # of several ranks: all weights on each, or a part of them; None: ddp
    )
    sync_norms: bool | None = None  # batch norm over the batches of all ranks
    patience: int | None = Field(default=None, ge=1)  # validations without a better one before training stops
    every: int = Field(default=1, ge=1)  # epochs between two validations
    keep_start: bool | None = None  # save the encoder as it was before training where no validation is better
    save_minutes: float = Field(default=10.0, gt=0)  # between two checkpoints
    log_steps: int = Field(default=20, ge=1)  # steps between two lines of metrics.jsonl
    on_collapse: Literal["stop", "warn"] = "stop"  # when all embeddings become one
    log: list[Literal["tensorboard", "mlflow", "wandb"]] = []  # where the figures go besides metrics.jsonl
    tensorboard: bool = False  # as log = ["tensorboard"]


class Evaluation(_Section):
    """What is measured at the end."""

    ks: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)  # the k of recall@k
    interval: bool = True  # 95 % intervals over the choice of classes
    clustering: bool = False  # also NMI and F1 of a k-means clustering
    rerank: str | None = None  # a method of `evaluation.rerank`; without settings they are chosen on validation
    views: int = Field(
        default=1, ge=1, le=28
    )  # crops and mirror images per test picture, whose embeddings are averaged


class Recipe(BaseModel):
    """All sections; `explicit_keys` are those that were written or set by hand, as "section.key"."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    data: Data = Data()
    unlabelled: Unlabelled = Unlabelled()
    encoder: dict[str, Any] = {}
    augment: dict[str, Any] = {}
    loss: dict[str, Any] = {}
    compatible: Compatible = Compatible()
    levels: Levels = Levels()
    memory: Memory = Memory()
    sampler: dict[str, Any] = {}
    optimizer: Optimizer = Optimizer()
    finetune: Finetune = Finetune()
    schedule: Schedule = Schedule()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    # Whether paths of a table or dataset may lead out of its folder. No key: no file and no stored run may say so.
    _allow_outside: bool = PrivateAttr(default=False)
    _typed: tuple[str | None, ...] | None = PrivateAttr(
        default=None
    )  # of a stored run: the sources that were typed again

    @property
    def allow_outside(self) -> bool:
        return self._allow_outside

    def allowing_outside(self, allowed: bool = True) -> "Recipe":
        """A copy by which paths of a table or dataset may lead out of its folder."""
        copy = self.model_copy()
        copy._allow_outside = allowed
        return copy

    def recorded(self, *typed: str | None) -> "Recipe":
        """A copy that comes from a stored run: its sources that are code run only if they were typed again."""
        copy = self.model_copy()
        copy._typed = typed
        return copy

    @property
    def is_recorded(self) -> bool:
        return self._typed is not None

    def check_typed(self, key: str, where: str) -> None:
        """Refuses a source that is code, of a stored run, unless it was typed again. key: data.source, …"""
        if self._typed is not None:
            section, _, name = key.partition(".")
            option = "--source" if key == "data.source" else "--unlabelled"
            check_typed(str(getattr(getattr(self, section), name)), self._typed, where, option)

    @property
    def explicit_keys(self) -> set[str]:
        keys = set()
        for section in type(self).model_fields:
            part = getattr(self, section)
            names = part if section in NAMED else part.model_fields_set
            keys |= {f"{section}.{name}" for name in names}
        return keys

    @property
    def device(self) -> torch.device:
        return checks.device(self.training.device, "training.device", "cpu")

    @property
    def pretrained(self) -> bool:
        """Whether the encoder starts from weights of another task."""
        own = self.is_own("encoder") or self.encoder["name"] in ("small-cnn", "mlp")
        return not own and bool(self.encoder.get("pretrained", True))

    @property
    def head_only(self) -> bool:
        """Whether the backbone is frozen in all epochs."""
        return bool(self.encoder.get("freeze_backbone")) or self.finetune.train == "head"

    @property
    def pretrains(self) -> bool:
        """Whether the encoder is pretrained on pictures without labels."""
        return self.unlabelled.folder is not None or self.unlabelled.own_part is True

    @property
    def takes_targets(self) -> bool:
        """Whether the loss learns from continuous labels."""
        return self.loss.get("name") == "logratio" or self.loss.get("targets") is True  # the latter: own losses

    def is_own(self, section: str) -> bool:
        """Whether the source, the encoder or the loss is an object of the user's own."""
        name = self.data.source if section == "data" else getattr(self, section).get("name")
        return str(name).startswith(PREFIX)

    def digest(self) -> str:
        """Of all that decides what is learned."""
        relevant = {
            section: {key: value for key, value in part.items() if key not in _FREE.get(section, ())}
            for section, part in self.plain().items()
        }
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()

    def with_(self, section: str, **values: Any) -> "Recipe":
        """A copy with some keys of one section replaced."""
        part = getattr(self, section)
        new = {**part, **values} if section in NAMED else part.model_copy(update=values)
        return self.model_copy(update={section: new})

    def plain(self) -> dict[str, dict[str, Any]]:
        """As TOML has it: absent keys left out; a setting that is deliberately nothing is "none"."""
        sections: dict[str, dict[str, Any]] = {}
        for section in type(self).model_fields:
            part = getattr(self, section)
            if section in NAMED:
                sections[section] = {name: "none" if value is None else _listed(value) for name, value in part.items()}
            else:
                sections[section] = {name: value for name, value in part.model_dump().items() if value is not None}
        for section in ("unlabelled", "compatible"):
            if not sections[section]:  # as in runs of versions that did not know it
                del sections[section]
        return sections

    def to_toml(self) -> str:
        """TOML that `read` reads as the same recipe."""
        return toml.text(self.plain())


# The fixed keys of each section; [] for the sections whose keys depend on what they name.
KEYS: dict[str, list[str]] = {
    section: [] if section in NAMED else list(field.annotation.model_fields)  # type: ignore[union-attr]
    for section, field in Recipe.model_fields.items()
}


def read(
    file: str | Path | None = None,
    sets: Iterable[str] = (),
    base: Mapping[str, Any] | None = None,
    stored: bool = False,
) -> Recipe:
    """A recipe from a TOML file, then `section.key=value` one after the other; an error is one sentence.

    file: a path, or the name of a recipe that comes with nearkin: "photos". A source in it that is code is refused,
    unless `sets` name the source. stored: of a run, whose source is refused when it is to be read (`Recipe.recorded`).
    """
    content: dict[str, Any] = {section: dict(part) for section, part in (base or {}).items()}
    where = "recipe"
    if file is not None:
        where = str(file)
        for section, part in _toml(_located(Path(file))).items():
            if not isinstance(part, dict):
                raise ValueError(f"{where}: {section} = … is outside of a section; known: {', '.join(KEYS)}")
            _known_section(section, where)
            content.setdefault(section, {}).update(part)
    assigned = [_assignment(text) for text in sets]
    if not stored:
        _refuse_code(content if file is not None else {}, {f"{section}.{key}" for section, key, _ in assigned}, where)
    for section, key, value in assigned:
        _known_section(section, "--set")
        content.setdefault(section, {})[key] = value
    _known_keys(content, where)
    gone = {"class_weights": "adam8bit"} if content.get("optimizer", {}).get("class_weights") == "adam8bit" else {}
    if gone and not stored:
        raise ValueError(
            f'{where}: optimizer.class_weights must be "rowwise", or left out for the rule of optimizer.name, '
            'got "adam8bit", which has left'
        )
    for key in gone:
        del content["optimizer"][key]
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{where}: {_sentence(error)}") from None
    return recipe.with_("optimizer", **gone) if gone else recipe  # a run that learned by it is read as it was


def _refuse_code(content: Mapping[str, Mapping[str, Any]], typed: Collection[str], where: str) -> None:
    for key, way in (("data.source", "--source"), ("unlabelled.folder", "--unlabelled")):
        section, _, name = key.partition(".")
        if key not in typed:
            check_typed(str(content.get(section, {}).get(name)), (), where, way)


def _located(file: Path) -> Path:
    """A file that exists, else the packaged recipe of this name, also beside a folder of it, else the same again."""
    named = next((place / f"{file}.toml" for place in _places() if (place / f"{file}.toml").is_file()), file)
    return file if file.is_file() or len(file.parts) > 1 or file.suffix else named


def _places() -> list[Path]:
    """Where recipes are: in the package as it is installed, or beside src/ in a source tree."""
    package = Path(__file__).parents[2]
    return [package / "recipes", package.parents[1] / "recipes"]


def _toml(file: Path) -> dict[str, Any]:
    try:
        return toml.read_file(file)
    except FileNotFoundError:
        known = sorted({path.stem for place in _places() for path in place.glob("*.toml")})
        raise ValueError(f"{file}: there is no such recipe; by name: {', '.join(known)}") from None
    except (OSError, UnicodeDecodeError, ExcessiveText) as error:
        raise ValueError(f"{file}: not a readable recipe ({error})") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _assignment(text: str) -> tuple[str, str, Any]:
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key or not value.strip():
        raise ValueError(f'--set must be section.key=value, as loss.margin=0.3, got "{text}"')
    try:
        read_value = toml.read(f"value = {value.strip()}")["value"]
    except ExcessiveText as error:
        raise ValueError(f"--set {name.strip()[:100]}=…: the value has {error}") from None
    except ValueError:
        read_value = value.strip()  # plain words need no quotes
    return section, key, read_value


def _known_section(section: str, where: str) -> None:
    if section not in KEYS:
        raise ValueError(f'{where}: unknown section "{section}"{_nearest(section, KEYS)}')


def _known_keys(content: Mapping[str, Mapping[str, Any]], where: str) -> None:
    for section, part in content.items():
        for key in part if section not in NAMED else ():
            if key not in KEYS[section]:
                everywhere = {f"{other}.{name}" for other, names in KEYS.items() for name in names}
                near = difflib.get_close_matches(key, KEYS[section], 1)
                elsewhere = sorted(name for name in everywhere if name.endswith(f".{key}"))
                if not near and elsewhere:
                    raise ValueError(f'{where}: unknown key "{section}.{key}"; did you mean "{elsewhere[0]}"?')
                raise ValueError(f'{where}: unknown key "{section}.{key}"{_nearest(key, KEYS[section])}')


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return (f'; did you mean "{near[0]}"?' if near else ";") + f" known: {', '.join(known)}"


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a section",
    "model_type": "a section",
    "finite_number": "a finite number",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


def _sentence(error: ValidationError) -> str:
    """The first error: which key, what is allowed, what was received."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    limits = first.get("ctx", {})
    if first["type"] == "literal_error":
        allowed = str(limits["expected"]).replace(" or ", ", ").replace("'", "")
        near = difflib.get_close_matches(str(first["input"]), allowed.split(", "), 1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        return f"{key} must be one of {allowed}, got {first['input']!r}{hint}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bound = next((f"{signs[name]} {limits[name]}" for name in signs if name in limits), None)
    expected = _EXPECTED.get(first["type"], "").format_map(limits) or bound or first["msg"].lower()
    return f"{key} must be {expected}, got {first['input']!r}"


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
