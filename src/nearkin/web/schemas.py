"""Schemas of requests and answers; FastAPI makes the OpenAPI description from them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr
from pydantic_core import PydanticCustomError

__all__ = [
    "MALFORMED",
    "Candidate",
    "Centre",
    "Confusion",
    "Count",
    "Diagnosis",
    "Enrolled",
    "Enrolling",
    "Explained",
    "Far",
    "FarStatement",
    "FilterText",
    "GroupCard",
    "GroupStep",
    "Groups",
    "Health",
    "HeatMap",
    "HitCount",
    "Identity",
    "Item",
    "Items",
    "K",
    "Label",
    "Labels",
    "Learned",
    "Map",
    "MaxFar",
    "MergeGroups",
    "NameGroup",
    "Neighbours",
    "NewVectors",
    "Problem",
    "Propose",
    "Relabel",
    "Reloaded",
    "RerankText",
    "RowId",
    "Rows",
    "SplitGroup",
    "Stats",
    "Strict",
    "Sure",
    "Suspect",
    "UnknownPrior",
    "VectorPair",
    "VectorQuery",
    "Verification",
]

MALFORMED = "malformed"  # type of the errors that are answered with 400
MAX_DIM = 65_536  # numbers of a vector


def _numbers(value: Any) -> list[float]:
    """Numbers only: neither text nor true, which pydantic would convert."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_DIM:
        raise PydanticCustomError(MALFORMED, f"must be a list of 1 to {MAX_DIM:,} numbers")
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in value):
        raise PydanticCustomError(MALFORMED, "must be a list of numbers only")
    try:
        return [float(number) for number in value]
    except OverflowError:
        raise PydanticCustomError(MALFORMED, "must be numbers that fit into a float64") from None


Id = Annotated[StrictInt, Field(ge=1, lt=2**63, description="Of a row.")]
Ids = Annotated[list[Id], Field(min_length=1, max_length=1000)]
Vector = Annotated[list[float], Field(min_length=1, max_length=MAX_DIM), BeforeValidator(_numbers)]
Similarity = Annotated[float, Field(description="The cosine; larger is closer.")]
_PAIRS = "Maximum false-accept rate (FAR) with 95 % confidence: the share of pairs of different classes that pass."
FarPair = Annotated[float | None, Field(description=_PAIRS)]
_QUALITY = "The length of the embedding, larger is better; null where the encoder scales it to unit length."
Quality = Annotated[float | None, Field(description=_QUALITY)]
Classes = Annotated[int | None, Field(description="Number of classes behind the calibration.")]
Probability = Annotated[float | None, Field(ge=0, le=1)]

# Query parameters.
K = Annotated[int, Field(ge=1, le=1000, description="Number of rows.")]
RowId = Annotated[int, Field(ge=1, lt=2**63, description="Of a row.")]
HitCount = Annotated[int, Field(ge=0, le=1000, description="Number of nearest rows to return as well.")]
MaxFar = Annotated[
    float | None, Field(gt=0, lt=1, allow_inf_nan=False, description="Maximum false-accept rate (FAR) per pair.")
]
Far = Annotated[
    float | None,
    Field(
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="Share of strangers (queries of labels that are not enrolled) that may be named: an expectation, "
        "with strict a bound. Its threshold alone then decides.",
    ),
]
UnknownPrior = Annotated[
    float,
    Field(gt=0, lt=1, allow_inf_nan=False, description="Share of strangers that the probabilities assume."),
]
Sure = Annotated[
    float,
    Field(ge=0.5, lt=1, allow_inf_nan=False, description="Probability from which on the verdict is named, or unknown."),
]
Strict = Annotated[
    bool, Field(description="far must hold with 95 % confidence, if strangers are like the enrolled labels; else 422.")
]
RerankText = Annotated[
    str | None,
    Field(max_length=100, description="k-reciprocal, alpha-qe or dba; settings as k-reciprocal:k1=20,k2=6,lambda=0.3."),
]
FilterText = Annotated[str | None, Field(max_length=4000, description='JSON, as {"label": "heron"}; any of a list.')]


class Problem(BaseModel):
    """What is wrong, in one sentence."""

    error: str


class Item(BaseModel):
    """A row of the gallery, and its similarity to the query."""

    id: int
    label: str
    similarity: Similarity
    name: str
    metadata: dict[str, Any]
    quality: Quality = None
    bridged: bool = False


class Items(BaseModel):
    """Nearest first. quality: of the query."""

    hits: list[Item]
    quality: Quality = None


class Candidate(BaseModel):
    """A label with its nearest row."""

    label: str
    similarity: Similarity
    confidence: Annotated[Probability, Field(description="That it is this label; null where nothing is learned yet.")]
    id: int


class FarStatement(BaseModel):
    """Strangers that are named at the threshold of `far`."""

    asked: float
    expected: Annotated[float, Field(description="Their expected share.")]
    at_most: Annotated[
        float, Field(description="Its bound, with 95 % confidence if strangers are like the enrolled labels.")
    ]
    classes: Annotated[int, Field(description="Labels behind both.")]
    proven: Annotated[bool, Field(description="Whether so many labels can show the rate that was asked for.")]


class Identity(BaseModel):
    """Who it is: the best candidate is candidates[0], whatever the verdict. label: null unless it is named.

    Probabilities are null where the gallery has learned nothing from its labels yet; note then says why.
    """

    verdict: Literal["named", "unsure", "unknown"]
    label: str | None
    confidence: Annotated[Probability, Field(description="p_right of a named label, else p_unknown.")]
    p_right: Annotated[Probability, Field(description="That the best candidate is right.")]
    p_unknown: Annotated[
        Probability, Field(description="That it is no label of the gallery; what is left: that it is another of them.")
    ]
    similarity: Annotated[float | None, Field(description="Of the best candidate's nearest row.")]
    score: Annotated[float | None, Field(description="log P(right) / P(unknown) at an even prior.")]
    threshold: Annotated[float | None, Field(description="With far: the score above which a label is named.")]
    far: Annotated[FarStatement | None, Field(description="What far asked for, and what is expected; null without it.")]
    prior: Annotated[Probability, Field(description="The share of strangers that the probabilities assume.")]
    classes: Annotated[int | None, Field(description="Number of labels that the gallery has learned from.")]
    candidates: list[Candidate]
    note: str
    hits: list[Item]
    quality: Quality = None


class Verification(BaseModel):
    """same: similarity >= threshold; null without a calibration."""

    same: bool | None
    probability: Annotated[float | None, Field(description="Of what `same` says.")]
    same_probability: Annotated[float | None, Field(description="That they are the same.")]
    similarity: Similarity
    threshold: float | None
    far: FarPair
    classes: Classes
    tar: float | None
    note: str
    qualities: Annotated[tuple[float | None, float | None], Field(description=f"Of both. {_QUALITY}")] = (None, None)


class Enrolled(BaseModel):
    """ids in the order of the items; known: enrolled before."""

    ids: list[int]
    added: int
    known: int


class HeatMap(BaseModel):
    """What each place of a picture adds to the similarity: similarity = sum + missing."""

    heat: Annotated[list[list[float]], Field(description="One number per place, row by row.")]
    sum: Annotated[float, Field(description="Of all numbers in heat.")]
    bias: Annotated[float, Field(description="The part of the sum that is the bias of the head, spread evenly.")]
    missing: Annotated[float, Field(description="Similarity minus sum.")]
    picture: Annotated[str, Field(description="What the encoder sees, small, in light grey; a data: address.")]
    overlay: Annotated[str, Field(description="heat in colours, to be laid over the picture; a data: address.")]


class Explained(BaseModel):
    """Heat maps over the query and over the picture of a row."""

    similarity: Similarity
    query: HeatMap
    row: HeatMap
    exact: Annotated[bool, Field(description="Nothing but rounding is missing; otherwise gradient times input.")]
    source: Annotated[str, Field(description="The picture of the row: original or thumbnail.")]
    row_similarity: Annotated[float, Field(description="As a search finds it, from the row's own vector.")]
    note: str


class _Body(BaseModel):
    """The body of a request; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class VectorQuery(_Body):
    """A vector to search for."""

    item: Vector


class VectorPair(_Body):
    """Two vectors to compare."""

    a: Vector
    b: Vector


class NewVectors(_Body):
    """Vectors to enrol under one label."""

    items: Annotated[list[Vector], Field(min_length=1)]
    label: StrictStr
    metadata: dict[str, Any] | None = None


class Centre(_Body):
    """Rows of the gallery whose mean is searched for."""

    ids: Ids
    k: Annotated[StrictInt, Field(ge=1, le=200)] = 12


class Neighbours(BaseModel):
    """The chosen rows, and those nearest to their mean."""

    chosen: list[Item]
    hits: list[Item]


class Rows(_Body):
    """Which rows."""

    ids: Ids


class Relabel(Rows):
    """Which rows, and their new label."""

    label: Annotated[StrictStr, Field(min_length=1, max_length=500)]


class Count(BaseModel):
    """Number of rows changed."""

    rows: int


class Label(BaseModel):
    """A label and how many rows have it."""

    label: str
    rows: int


class Labels(BaseModel):
    """The labels that match."""

    labels: list[Label]


class Enrolling(BaseModel):
    """The enrolment of a folder while the service answers; note: why it ended early, or why nothing was learned."""

    done: int
    total: int
    running: bool
    unreadable: int
    note: str


class Learned(BaseModel):
    """What `identify` has learned from the labels of the gallery."""

    labels: int
    items: int
    date: str
    of: Annotated[str, Field(description="What was asked of it: its own labels, or items of another day.")]
    classes: Annotated[int, Field(description="Labels behind the rates of far.")]


class Stats(BaseModel):
    """What the gallery holds and what the service allows. calibrated, calibration_classes, fars: of `verify`."""

    store: str
    rows: int
    labels: int
    dim: int
    encoder: str | None
    learned: Learned | None
    calibrated: bool
    calibration_classes: int | None
    fars: Annotated[list[float], Field(description="False-accept rates per pair that `verify` can guarantee.")]
    index: str
    damaged: int
    lost: int
    pictures: bool
    drawing: bool
    enrolling: Enrolling | None = None
    version: str
    largest_body: int
    largest_upload: int


class Health(BaseModel):
    """The service answers; waiting: pictures before the encoder."""

    status: str
    waiting: int


class Map(BaseModel):
    """Coordinates in the unit square, one per row."""

    method: str
    methods: list[str]
    rows: int
    ids: list[int]
    x: list[float]
    y: list[float]
    label: Annotated[list[int], Field(description="Index into labels.")]
    labels: list[str]
    hues: Annotated[list[int], Field(description="0 to 9 for each label; neighbours differ.")]


class Confusion(BaseModel):
    """Two labels that are among each other's nearest neighbours."""

    labels: list[str]
    share: float
    neighbours: int
    examples: list[list[int]]


class Suspect(BaseModel):
    """A row whose neighbours have another label."""

    id: int
    name: str
    label: str
    suggested: str
    agreement: float
    examples: list[int]


class Diagnosis(BaseModel):
    """The worst confusions and the likeliest label errors; note: why there are none."""

    rows: int
    looked_at: int
    confusions: list[Confusion]
    suspects: list[Suspect]
    note: str


# --- groups

Version = Annotated[StrictInt, Field(ge=0, description="Of the groups that the step was decided on; another is a 409.")]
GroupNumber = Annotated[StrictInt, Field(ge=1, lt=2**53, description="Of a group.")]


class GroupCard(BaseModel):
    """A group: its number, how many rows it has, some of them, the most typical first."""

    group: int
    rows: int
    ids: list[int]


class Groups(BaseModel):
    """The groups under review, the largest first. undo: the kind of the last step; null where there is none.

    ungrouped: rows in scope that are in no group: alone, or enrolled since.
    """

    version: int
    scope: str
    similarity: float | None
    total: int
    ungrouped: int
    undo: str | None
    groups: list[GroupCard]


class GroupStep(_Body):
    """A step, decided on a version of the groups."""

    version: Version


class Propose(GroupStep):
    """Groups anew. scope: rows without a label, or all. size: about how many rows a group has."""

    scope: Literal["unlabelled", "all"] = "unlabelled"
    similarity: Annotated[float | None, Field(ge=-1, le=1, allow_inf_nan=False)] = None
    size: Annotated[StrictInt | None, Field(ge=2, le=1000)] = None


class NameGroup(GroupStep):
    """The label of all rows of a group."""

    group: GroupNumber
    label: Annotated[StrictStr, Field(min_length=1, max_length=500)]


class MergeGroups(GroupStep):
    """Groups that become one."""

    groups: Annotated[list[GroupNumber], Field(min_length=2, max_length=100)]


class SplitGroup(GroupStep):
    """Rows of a group that become a group of their own."""

    group: GroupNumber
    ids: Ids


class Reloaded(BaseModel):
    """The run that answers from now on. encoder: its fingerprint. seconds: that opening it took."""

    encoder: str | None
    seconds: float
