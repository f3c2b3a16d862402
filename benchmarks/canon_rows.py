"""What the comparison of the canon compares: the subjects, the rows of its table, what is tried for each, the peer."""

from typing import Any, NamedTuple

__all__ = ["BASES", "BEST", "CANDIDATES", "FOUR", "PAPERS", "PEER", "RATES", "Row", "base_of", "rows_of"]

Setting = dict[str, Any]  # "section.key": value

# pytorch-metric-learning 2.9 on the same files under the same settings, mean of two seeds (H200): percent.
FOUR = ("recall@1", "recall@8", "map@r", "nmi")
PEER: dict[str, tuple[float, float, float, float]] = {
    "frozen": (26.5, 61.5, 5.3, 41.4),
    "contrastive": (32.2, 67.3, 8.3, 47.1),
    "triplet": (27.3, 62.1, 7.1, 46.2),
    "margin": (31.5, 68.8, 7.8, 47.0),
    "lifted": (17.7, 50.4, 4.0, 41.5),
    "npair": (30.6, 67.3, 7.6, 48.1),
    "multi-similarity": (32.0, 68.1, 7.5, 47.5),
    "proxy-nca": (31.1, 67.5, 7.9, 47.0),
    "proxy-anchor": (34.4, 70.3, 8.9, 48.4),
    "normalized-softmax": (31.9, 67.8, 8.0, 47.7),
    "cosface": (29.8, 64.8, 7.1, 45.5),
    "arcface": (33.4, 69.7, 9.5, 50.3),
}
# Musgrave et al. 2020, arXiv:2003.08505, CUB, 128-d, separated: R@1 and MAP@R. BN-Inception, photos at 227 px.
PAPERS: dict[str, tuple[float, float]] = {
    "contrastive": (59.7, 21.2),
    "triplet": (55.8, 18.8),
    "infonce": (58.1, 19.9),
    "proxy-nca": (57.9, 19.3),
    "margin": (54.8, 18.1),
    "normalized-softmax": (58.8, 21.0),
    "cosface": (59.6, 21.2),
    "arcface": (60.2, 21.5),
    "fastap": (55.6, 19.1),
    "multi-similarity": (59.4, 21.0),
    "soft-triple": (59.9, 21.3),
}


class Row(NamedTuple):
    """A row of the table: a loss and the settings tried for it, the first of which is where it starts.

    peer: its row of the peer's table. group: 0 what the peer has too, 1 the rest of the canon. full_search: chosen by
    trainings as long as the final, where short ones could not tell the rates apart.
    """

    name: str
    tried: tuple[Setting, ...]
    peer: str | None = None
    group: int = 1
    paper: str | None = None
    full_search: bool = False


def _row(name: str, loss: str, *tried: Setting, **fields: Any) -> Row:
    return Row(name, tuple({"loss.name": loss, **setting} for setting in tried or ({},)), **fields)


def _loss(**keys: Any) -> Setting:
    return {f"loss.{key}": value for key, value in keys.items()}


_FAST: Setting = {"optimizer.loss_scale": 10.0}  # class weights that begin at random learn faster than an encoder
_FREE: Setting = {"encoder.normalize": False}  # embeddings of free length

# In brackets, beside our defaults: what Musgrave et al. found on CUB, where it lies elsewhere.
_TRIED: tuple[Row, ...] = (
    _row(
        "contrastive",
        "contrastive",
        _loss(margin=1.0, squared=False, reduction="active"),
        _loss(margin=1.0),
        _loss(margin=0.5, squared=False, reduction="active"),
        peer="contrastive",
        group=0,
        paper="contrastive",
    ),
    _row(
        "triplet semi-hard",
        "triplet",
        _loss(margin=0.2, reduction="active"),
        _loss(margin=0.1, reduction="active"),
        _loss(margin=0.2, squared=False, reduction="active"),
        _loss(margin=0.4, reduction="active"),
        peer="triplet",
        group=0,
        paper="triplet",
    ),
    _row(
        "triplet semi-hard, peer's defaults",
        "triplet",
        _loss(margin=0.05, squared=False, reduction="active"),
        peer="triplet",
        group=0,
    ),
    _row(
        "margin, distance-weighted",
        "margin",
        {},
        _loss(beta=0.8, margin=0.1),
        peer="margin",
        group=0,
        paper="margin",
        full_search=True,  # 21.91 and 21.94 at two rates
    ),
    _row(
        "lifted",
        "lifted-structure",
        {**_loss(margin=1.0), **_FREE},
        {**_loss(margin=10.0), **_FREE},
        _loss(margin=1.0, form="max"),
        _loss(margin=0.5, form="max"),
        peer="lifted",
        group=0,
    ),
    _row(
        "lifted, peer's defaults",
        "lifted-structure",
        _loss(margin=1.0, form="smooth", normalize=True),
        peer="lifted",
        group=0,
    ),
    _row("generalised lifted", "generalized-lifted", dict(_FREE), {**_loss(margin=0.3), **_FREE}),
    _row("N-pair", "npair", _loss(length_weight=0.002), _loss(length_weight=0.02), peer="npair", group=0),
    _row(
        "multi-similarity",
        "multi-similarity",
        {},
        _loss(selection="all"),
        _loss(alpha=2.0, beta=40.0, base=0.7),
        peer="multi-similarity",
        group=0,
        paper="multi-similarity",
    ),
    _row(
        "Proxy-NCA",
        "proxy-nca",
        _loss(scale=3.0),
        _loss(scale=10.0),
        peer="proxy-nca",
        group=0,
        paper="proxy-nca",
    ),
    _row("Proxy-Anchor", "proxy-anchor", {}, _loss(scale=16.0), peer="proxy-anchor", group=0),
    _row(
        "normalised softmax",
        "normalized-softmax",
        {**_loss(scale=20.0), **_FAST},
        {**_loss(scale=10.0), **_FAST},
        peer="normalized-softmax",
        group=0,
        paper="normalized-softmax",
    ),
    _row(
        "CosFace",
        "cosface",
        {**_loss(margin=0.2, scale=16.0), **_FAST},
        {**_loss(margin=0.35, scale=16.0), **_FAST},
        {**_loss(margin=0.1, scale=32.0), **_FAST},
        {**_loss(margin=0.35, scale=10.0), **_FAST},
        peer="cosface",
        group=0,
        paper="cosface",
    ),
    _row(  # both rates of the class weights, so that margin and scale alone tell it from the row above
        "CosFace, peer's defaults",
        "cosface",
        _loss(margin=0.35, scale=64.0),
        {**_loss(margin=0.35, scale=64.0), **_FAST},
        peer="cosface",
        group=0,
    ),
    _row(
        "ArcFace",
        "arcface",
        {**_loss(margin=0.2, scale=16.0), **_FAST},
        {**_loss(margin=0.4, scale=16.0), **_FAST},
        {**_loss(margin=0.5, scale=64.0), **_FAST},
        peer="arcface",
        group=0,
        paper="arcface",
    ),
    _row("circle", "circle", _loss(margin=0.4, scale=80.0), _loss(margin=0.4, scale=32.0)),
    _row("SupCon", "supcon", _loss(temperature=0.1), _loss(temperature=0.05)),
    _row("InfoNCE", "infonce", _loss(temperature=0.07), _loss(temperature=0.15), paper="infonce"),
    _row("SoftTriple", "soft-triple", {}, _loss(margin=0.1, scale=10.0), paper="soft-triple"),
    _row("Smooth-AP", "smooth-ap", _loss(temperature=0.01), _loss(temperature=0.03)),
    _row("Fast-AP", "fastap", _loss(bins=10), _loss(bins=20), paper="fastap"),
    _row(
        "triplet, other selections",
        "triplet",
        _loss(margin=0.2, selection="distance_weighted", reduction="active"),
        _loss(margin=0.2, selection="all", reduction="active"),
        _loss(margin=0.2, selection="batch_hard", reduction="active"),
    ),
    _row("softmax + center", "center", dict(_FAST), {**_loss(center_weight=0.03), **_FAST}),
    _row("heated softmax", "heated-softmax", {**_loss(scale=16.0), **_FAST}),
    _row("SphereFace", "sphereface", {**_loss(margin=4), **_FAST, **_FREE}, {**_loss(margin=2), **_FAST, **_FREE}),
    _row("AdaCos", "adacos", dict(_FAST)),
    _row("AdaFace", "adaface", {**_loss(margin=0.2, scale=16.0), **_FAST}, {**_loss(margin=0.4, scale=16.0), **_FAST}),
    _row("MagFace", "magface", {**_loss(scale=16.0, length_weight=1.0), **_FAST}, {**_loss(scale=16.0), **_FAST}),
    _row("sigmoid", "sigmoid", dict(_FAST)),
    _row("facility location", "facility-location", _loss(gamma=1.0), _loss(gamma=5.0)),
    _row("siamese", "siamese", dict(_FAST)),
    _row("lossless triplet", "lossless-triplet", {}),
    _row("quadruplet", "quadruplet", _loss(reduction="active"), _loss(selection="batch_hard", reduction="active")),
    _row("VICReg", "vicreg", dict(_FREE), {**_loss(covariance_weight=4.0), **_FREE}),
)
_ATTRIBUTES = _row("log-ratio on attributes", "logratio", {"sampler.name": "label-neighbours", "loss.normalize": True})

# All weights learn from a random head, and the trained ones are tested: what is compared is the loss.
_PLAIN: dict[str, Any] = {"train": "all", "projection": "random", "interpolate": False}
# The peer's settings; what it leaves open (schedule, a smaller rate for the backbone) is ours and the same for all.
# The trainer always holds classes out to validate on: two, and nothing is chosen on them.
BASES: dict[str, dict[str, dict[str, Any]]] = {
    "cub200": {
        "data": {"source": "cub200", "size": 96, "stored": 112, "val": 0.02},
        "encoder": {"name": "efficientnet-lite0", "dim": 128, "pooling": "avg", "freeze_norms": True},
        "augment": {"preset": "none", "scale_low": 0.25, "aspect": 1.3333, "flip": 0.5},
        "loss": {},
        "sampler": {"name": "class-balanced", "batch": 128, "per_class": 4},
        "optimizer": {"name": "adamw", "lr": 6e-4, "weight_decay": 1e-4, "backbone_scale": 0.3},
        "finetune": _PLAIN,
        "training": {"epochs": 30, "batches": 45, "every": 30, "on_collapse": "warn"},
        "evaluation": {"clustering": True},
    },
    "fashion-mnist": {
        "data": {"source": "fashion-mnist", "size": 32, "stored": 32, "channels": 1},
        "encoder": {"name": "small-cnn", "dim": 128},
        "augment": {"preset": "light"},
        "loss": {},
        "sampler": {"name": "class-balanced", "batch": 120, "per_class": 24},
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1},
        "training": {"epochs": 12, "batches": 50, "every": 12, "on_collapse": "warn"},
        "evaluation": {"clustering": True},
    },
}
RATES = {"cub200": (2e-4, 6e-4, 1.8e-3), "fashion-mnist": (1e-3, 3e-3, 9e-3)}  # the middle one comes first

# Our own choice of everything but the encoder, its 128 dimensions and the photos.
BEST: dict[str, dict[str, Any]] = {
    "data": {"source": "cub200", "size": 224, "stored": 128, "val": 0.02},
    "encoder": {"name": "efficientnet-lite0", "dim": 128, "pooling": "gem", "freeze_norms": True},
    "augment": {"preset": "photo"},
    "loss": {"name": "proxy-anchor"},
    "sampler": {"name": "class-balanced", "batch": 120, "per_class": 4},
    "optimizer": {"name": "adamw", "lr": 5e-4, "weight_decay": 1e-4, "backbone_scale": 0.3},
    "finetune": _PLAIN,
    "training": {"epochs": 15, "batches": 45, "every": 15, "ema": 0.99},
    "evaluation": {"clustering": True},
}
CANDIDATES: dict[str, Setting] = {
    "GeM, EMA": {},
    "average, no EMA": {"encoder.pooling": "avg", "training.ema": 0.0},
}


def rows_of(subject: str) -> tuple[Row, ...]:
    """The rows of a subject's table in the order of their importance."""
    return (*_TRIED, _ATTRIBUTES) if subject == "cub200" else _TRIED


def base_of(subject: str) -> dict[str, dict[str, Any]]:
    return BEST if subject == "best" else BASES[subject]
