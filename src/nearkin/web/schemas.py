"""What goes in and out as JSON, field by field; the OpenAPI description is made of it."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

__all__ = [
    "Ask",
    "Confusion",
    "Count",
    "Diagnosis",
    "Enrolled",
    "Health",
    "Identity",
    "Item",
    "Items",
    "Labels",
    "Map",
    "Neighbours",
    "Problem",
    "Relabel",
    "Stats",
    "Verification",
]

Id = Annotated[StrictInt, Field(ge=1, lt=2**63, description="Of a row.")]
Ids = Annotated[list[Id], Field(min_length=1, max_length=1000)]
Similarity = Annotated[float, Field(description="The cosine; larger is closer.")]
_BOUND = "false-accept rate at most, with 95 % confidence on new classes: the share of"
FarQuery = Annotated[
    float | None, Field(description=f"Per query: {_BOUND} strangers that pass as anybody in this gallery.")
]
FarPair = Annotated[float | None, Field(description=f"Per pair: {_BOUND} pairs of different classes that pass.")]
Classes = Annotated[int | None, Field(description="Classes that the calibration rests on.")]


class Problem(BaseModel):
    """What went wrong, in one sentence."""

    error: str


class Item(BaseModel):
    """A row of the gallery; its similarity is to what was asked about."""

    id: int
    label: str
    similarity: Similarity
    name: str
    metadata: dict[str, Any]


class Items(BaseModel):
    """Nearest first."""

    hits: list[Item]


class Candidate(BaseModel):
    """A label with its nearest row."""

    label: str
    similarity: Similarity
    confidence: float | None
    id: int


class Identity(BaseModel):
    """label null: unknown. confidence: that the label is right, or that it is none; null without a calibration."""

    label: str | None
    confidence: float | None
    similarity: float | None
    threshold: float | None
    far: FarQuery
    classes: Classes
    candidates: list[Candidate]
    note: str
    hits: list[Item]


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


class Enrolled(BaseModel):
    """ids in the order of the pictures; known: there already."""

    ids: list[int]
    added: int
    known: int


class Ask(BaseModel):
    """Rows of the gallery to look around."""

    model_config = ConfigDict(extra="forbid")
    ids: Ids
    k: Annotated[StrictInt, Field(ge=1, le=200)] = 12


class Neighbours(BaseModel):
    """The rows that were asked about, and those nearest to their middle."""

    chosen: list[Item]
    hits: list[Item]


class Rows(BaseModel):
    """Which rows."""

    model_config = ConfigDict(extra="forbid")
    ids: Ids


class Relabel(Rows):
    """Which rows, and what they are called from now on."""

    label: Annotated[StrictStr, Field(min_length=1, max_length=500)]


class Count(BaseModel):
    """How many rows it was done to."""

    rows: int


class Label(BaseModel):
    """A label and how many rows have it."""

    label: str
    rows: int


class Labels(BaseModel):
    """Of all labels, those asked for."""

    labels: list[Label]


class Stats(BaseModel):
    """What there is."""

    store: str
    rows: int
    labels: int
    dim: int
    encoder: str | None
    calibrated: bool
    calibration_classes: int | None
    fars: Annotated[list[float], Field(description="Per pair, that `verify` can hold.")]
    index: str
    damaged: int
    lost: int
    pictures: bool
    drawing: bool
    version: str
    largest_body: int
    largest_upload: int


class Health(BaseModel):
    """That it answers, and how many pictures wait."""

    status: str
    waiting: int


class Map(BaseModel):
    """A place in the unit square for each of some rows."""

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
    """Two labels that stand among one another's nearest."""

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
    """The worst confusions and the likeliest label errors; note: what could not be said."""

    rows: int
    looked_at: int
    confusions: list[Confusion]
    suspects: list[Suspect]
    note: str
