"""The first projection of a head on a pretrained backbone: the principal directions of its features.

A random projection to 128 of 1,280 dimensions loses what the backbone knows, and training has to win it back. The
leading principal directions keep nearly all of it, so that training starts about where the frozen features are. The few
directions that vary most would outweigh all others in a cosine; half-way to equal variances ranks better than either
end.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearkin.core import checks, random
from nearkin.models.encoder import Encoder

__all__ = ["fit_projection", "principal_directions"]

SMALLEST = 1e-7  # of the largest variance: directions with less are noise of float32
POWER = 0.25  # a direction of variance v is divided by v^0.25, so that v^0.5 is left; 0: none, 0.5: equal variances
FLOOR = 0.01  # of the mean variance, added to each: small ones are not known well


def principal_directions(features: Tensor, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weight (D, F) and bias (D,) float64 that project features (N, F) onto their `dim` leading principal directions.

    Row i is direction i times ((v_1 + f) / (v_i + f))^`POWER` with v the variances and f = `FLOOR` · their mean; the
    bias is -weight · mean, so the features are centred. N items are taken to show N / 2 directions; where these are
    fewer than `dim`, the others are random, orthogonal to these and to one another, and scaled so that they keep the
    squared length of what they see on average. D = min(dim, F).
    """
    checks.integer("dim", dim, 1)
    checks.integer("seed", seed, 0)
    if features.dim() != 2 or len(features) < 2:
        raise ValueError(
            f"features must have shape (items, features) with at least 2 items, got {tuple(features.shape)}"
        )
    checks.finite("features", features)
    x = features.detach().double().cpu().numpy()
    mean, width = x.mean(0), x.shape[1]
    variances, directions = _eigen((x - mean).T @ (x - mean) / len(x))
    rank = min(dim, max(1, len(x) // 2), int((variances > SMALLEST * variances[0]).sum()))
    rows = directions[:, :rank].T
    # Eigenvectors have no sign: the largest entry is made positive, so that every machine has the same.
    signs = np.sign(rows[np.arange(rank), np.abs(rows).argmax(1)])
    rows = rows * signs[:, None]
    others, scales = min(dim, width) - rank, np.ones(rank)
    if rank:
        floored = variances[:rank] + FLOOR * variances[:rank].mean()
        scales = (floored[0] / floored) ** POWER
    scaled = rows * scales[:, None]
    if others > 0:
        scaled = np.concatenate([scaled, _random_directions(rows, others, seed)])
    weight = torch.from_numpy(np.ascontiguousarray(scaled))
    return weight, -weight @ torch.from_numpy(mean)


def _eigen(matrix: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Eigenvalues, the largest first, and eigenvectors as columns; by an SVD where LAPACK does not converge."""
    try:
        values, vectors = np.linalg.eigh(matrix)
        return values[::-1], vectors[:, ::-1]
    except np.linalg.LinAlgError:
        left, values, _ = np.linalg.svd(matrix, hermitian=False)
        return values, left


def _random_directions(rows: NDArray[np.float64], count: int, seed: int) -> NDArray[np.float64]:
    """(count, F) orthogonal to `rows` and to one another."""
    rank, width = rows.shape
    words = random.words(count * width, seed, random.Stream.PROJECTION)
    numbers = ((words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0).reshape(width, count)
    for _ in range(2):  # once more: what rounding left of the rows is then gone
        numbers -= rows.T @ (rows @ numbers)
    directions: NDArray[np.float64] = np.linalg.qr(numbers)[0].T
    return directions * math.sqrt((width - rank) / count)


@torch.no_grad()
def fit_projection(encoder: Encoder, features: Tensor, seed: int = 0) -> Encoder:
    """Sets the projection of the head, in place, to the principal directions of pooled features (N, F).

    Rows beyond the number of features stay random. Embeddings of free length (`normalize=False`) keep the mean squared
    length that they have with a random projection, for which losses on lengths are made.
    """
    head = encoder.head
    if not isinstance(head.projection, nn.Linear):
        raise ValueError("the encoder has no projection to fit: dim is 0")
    parameter, offset = head.projection.weight, head.projection.bias
    normed = head.norm(features.to(parameter.device, torch.float32))
    weight, bias = principal_directions(normed, len(parameter), seed)
    if not head.normalize:
        before = head.projection(normed).double().square().sum(1).mean()
        after = (normed.double().cpu() @ weight.T + bias).square().sum(1).mean()
        scale = float((before.cpu() / after.clamp(min=1e-30)).sqrt())
        weight, bias = weight * scale, bias * scale
    parameter[: len(weight)] = weight.to(parameter)
    offset[: len(weight)] = bias.to(offset)
    return encoder
