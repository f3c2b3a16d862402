"""Ways of re-ranking: their settings, their names, and how both are written in one word."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

from nearkin.core import checks

__all__ = ["DBA", "METHODS", "AlphaQE", "KReciprocal", "Rerank", "check_similarity", "fields", "has_settings"]
__all__ += ["method_of", "settings_of"]


@dataclass(frozen=True)
class KReciprocal:
    """k-reciprocal re-ranking (Zhong et al. 2017, arXiv:1701.08398): items that are among each other's neighbours.

    d* = (1 - λ) d_J + λ d, where d_J is the Jaccard distance of the weighted k1-reciprocal neighbours of query and
    item, each averaged over its k2 nearest, and d the squared distance over the largest one of the query.
    k1: how many neighbours; about the size of a class. k2: how many rows are averaged, itself included; 1: none; None:
    0.3 k1. lambda_: the share of the original distance. Defaults: section 4.1 of the paper, with its k2 = 6.
    """

    k1: int = 20
    k2: int | None = None
    lambda_: float = 0.3
    name: ClassVar[str] = "k-reciprocal"
    similarities: ClassVar[tuple[str, ...]] = ("cosine", "euclidean")

    def __post_init__(self) -> None:
        checks.integer("k1", self.k1, 1)
        if self.k2 is None:
            object.__setattr__(self, "k2", max(1, round(0.3 * self.k1)))
        assert self.k2 is not None
        checks.integer("k2", self.k2, 1)
        checks.at_most("k2", self.k2, self.k1 + 1, "an item has k1 neighbours and itself")
        checks.at_least("lambda", self.lambda_, 0)
        checks.at_most("lambda", self.lambda_, 1, "it is a share")


@dataclass(frozen=True)
class _Expansion:
    """neighbours: how many are added to a row. alpha: each weighs max(similarity, 0) ** alpha, the row itself 1."""

    neighbours: int = 5
    alpha: float = 3.0
    similarities: ClassVar[tuple[str, ...]] = ("cosine",)

    def __post_init__(self) -> None:
        checks.integer("neighbours", self.neighbours, 1)
        checks.at_least("alpha", self.alpha, 0)


@dataclass(frozen=True)
class AlphaQE(_Expansion):
    """α query expansion (Radenović et al. 2019, arXiv:1711.02512): a query searches again with its neighbours.

    q' = q + Σ_j max(<q, x_j>, 0)^α x_j over its nearest gallery items j, of unit rows. neighbours: how many of them.
    alpha: 0 is the plain average, 3 as in section 4.4 of the paper.
    """

    name: ClassVar[str] = "alpha-qe"


@dataclass(frozen=True)
class DBA(_Expansion):
    """Database-side augmentation (Arandjelović, Zisserman 2012; Gordo et al. 2017): the same sum for each gallery item.

    x_i' = x_i + Σ_j max(<x_i, x_j>, 0)^α x_j over its nearest gallery items j, of unit rows. The queries stay as they
    are. neighbours: how many of them. alpha: as in `AlphaQE`.
    """

    name: ClassVar[str] = "dba"


Rerank: TypeAlias = KReciprocal | AlphaQE | DBA
METHODS: dict[str, type[Rerank]] = {method.name: method for method in (KReciprocal, AlphaQE, DBA)}
_EXAMPLE = "k-reciprocal:k1=20,k2=6,lambda=0.3"
_KINDS = {"k1": int, "k2": int, "neighbours": int, "lambda": float, "alpha": float}


def settings_of(rerank: "Rerank | str") -> Rerank:
    """The settings in words as "k-reciprocal", or "k-reciprocal:k1=20,k2=6,lambda=0.3"; an object as it is."""
    if isinstance(rerank, KReciprocal | AlphaQE | DBA):
        return rerank
    method, values = METHODS[method_of(rerank)], {}
    for part in filter(None, rerank.partition(":")[2].split(",")):
        key, _, text = part.strip().partition("=")
        allowed = fields(method())
        checks.one_of(f"setting of {method.name}", key, allowed)
        try:
            values["lambda_" if key == "lambda" else key] = _KINDS[key](text)
        except ValueError:
            kind = "a whole number" if _KINDS[key] is int else "a number"
            raise ValueError(f'rerank: {key} must be {kind}, as in {_EXAMPLE}, got "{text}"') from None
    return method(**values)


def method_of(rerank: "Rerank | str") -> str:
    """The name of the method alone."""
    if isinstance(rerank, KReciprocal | AlphaQE | DBA):
        return rerank.name
    if not isinstance(rerank, str):
        names = ", ".join(f'"{name}"' for name in METHODS)
        raise TypeError(f"rerank must be a KReciprocal, AlphaQE or DBA, or a name ({names}), got {rerank!r}")
    name = rerank.partition(":")[0].strip()
    checks.one_of("rerank", name, METHODS)
    return name


def has_settings(rerank: "Rerank | str") -> bool:
    """Whether the settings come from the caller; a name alone leaves them open."""
    return not isinstance(rerank, str) or bool(rerank.partition(":")[2].strip())


def fields(rerank: Rerank) -> dict[str, Any]:
    """The settings by the names that a text has."""
    return {"lambda" if key == "lambda_" else key: value for key, value in asdict(rerank).items()}


def check_similarity(settings: Rerank, similarity: str) -> None:
    if similarity not in settings.similarities:
        checks.impossible("similarity", similarity, f"{settings.name} re-ranks by others", settings.similarities)
