"""Losses over class weights as one writes them without a library, to be compiled: the contender `compiled`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, normalize

Formula = Callable[..., Tensor]  # of embeddings, labels, the loss's parameters and buffers


def normalized_softmax(x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return cross_entropy(20 * (normalize(x) @ normalize(weight).T), labels)


def cosface(x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    cosine = normalize(x) @ normalize(weight).T
    own = cosine.gather(1, labels[:, None])
    return cross_entropy(64 * cosine.scatter(1, labels[:, None], own - 0.35), labels)


def arcface(x: Tensor, labels: Tensor, weight: Tensor, centers: int = 1) -> Tensor:
    cosine = normalize(x) @ normalize(weight).T
    if centers > 1:
        cosine = cosine.view(len(x), -1, centers).amax(2)
    own = cosine.gather(1, labels[:, None])
    sine = (1 - own.square()).clamp(min=1e-12).sqrt()
    turned = own * math.cos(0.5) - sine * math.sin(0.5)
    target = torch.where(own > -math.cos(0.5), turned, own - 0.5 * math.sin(0.5))
    return cross_entropy(64 * cosine.scatter(1, labels[:, None], target), labels)


def arcface_3_centers(x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return arcface(x, labels, weight, 3)


def sphereface(x: Tensor, labels: Tensor, weight: Tensor, step: Tensor) -> Tensor:
    share = (1000 / (1 + 0.12 * step)).clamp(min=5)  # of the plain cosine, annealed
    length = x.norm(dim=1, keepdim=True)
    cosine = normalize(x) @ normalize(weight).T
    own = cosine.gather(1, labels[:, None])
    first, second, third = ((own < math.cos(j * math.pi / 4)).to(own.dtype) for j in (1, 2, 3))
    turns = first + second + third
    psi = (1 - 2 * (turns % 2)) * (8 * own**4 - 8 * own**2 + 1) - 2 * turns
    return cross_entropy(length * cosine.scatter(1, labels[:, None], (share * own + psi) / (1 + share)), labels)


def proxy_nca(x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    squared = (2 - 2 * (normalize(x) @ normalize(weight).T)) * 9
    return cross_entropy(-squared, labels)


def proxy_anchor(x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    cosine = normalize(x) @ normalize(weight).T
    own = torch.zeros_like(cosine, dtype=torch.bool).scatter(1, labels[:, None], True)
    pulls = torch.where(own, -32 * (cosine - 0.1), -torch.inf).logsumexp(0)
    pushes = torch.where(own, -torch.inf, 32 * (cosine + 0.1)).logsumexp(0)
    pull = -logsigmoid(-pulls).nan_to_num(0.0).sum() / own.any(0).sum()
    return pull - logsigmoid(-pushes).sum() / len(weight)


def soft_triple(x: Tensor, labels: Tensor, weight: Tensor, centers: int = 10) -> Tensor:
    units = normalize(weight)
    cosine = (normalize(x) @ units.T).view(len(x), -1, centers)
    relaxed = ((10 * cosine).softmax(2) * cosine).sum(2)
    own = relaxed.gather(1, labels[:, None])
    groups = units.view(-1, centers, units.shape[1])
    upper = torch.ones(centers, centers, dtype=torch.bool, device=weight.device).triu(1)
    squared = torch.where(upper, (2 - 2 * groups @ groups.mT).clamp(min=0) + 1e-5, 1.0)
    apart = torch.where(upper, squared.sqrt(), 0.0).sum() / (len(weight) * (centers - 1))
    return cross_entropy(20 * relaxed.scatter(1, labels[:, None], own - 0.01), labels) + 0.2 * apart


def softmax_center(x: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, centers: Tensor) -> Tensor:
    """Without the step of the centres."""
    return cross_entropy(x @ weight.T + bias, labels) + 0.0015 * (x - centers[labels]).square().sum(1).mean()


# By the name of the case in losses.py; a loss that is missing has no `compiled`.
FORMULAS: dict[str, Formula] = {
    "normalised softmax": normalized_softmax,
    "CosFace": cosface,
    "ArcFace": arcface,
    "ArcFace, 3 centres": arcface_3_centers,
    "SphereFace": sphereface,
    "Proxy-NCA": proxy_nca,
    "Proxy-Anchor": proxy_anchor,
    "SoftTriple": soft_triple,
    "softmax + center": softmax_center,
}
