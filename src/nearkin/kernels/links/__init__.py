"""The links of the pair pass: per loss the few lines by which it differs. Imported with the first kernel."""

from nearkin.kernels.links import (
    circle,
    contrastive,
    fastap,
    infonce,
    lifted,
    lossless,
    margin,
    multi_similarity,
    npair,
    sigmoid,
    supcon,
)
from nearkin.kernels.links.link import Link

__all__ = ["of"]

_LINKS = {
    "contrastive": contrastive.LINK,
    "margin": margin.LINK,
    "circle": circle.LINK,
    "lifted": lifted.LINK,
    "lifted threats": lifted.THREATS,
    "npair": npair.LINK,
    "supcon": supcon.LINK,
    "infonce": infonce.LINK,
    "lossless": lossless.LINK,
    "sigmoid": sigmoid.LINK,
}


def of(kind: str, flag: int) -> Link:
    if kind == "fastap":
        return fastap.link(flag)
    if kind == "multi_similarity":
        return multi_similarity.SELECTED if flag else multi_similarity.ALL
    if kind == "npair" and flag:
        return npair.ALONE
    return _LINKS[kind]
