# mypy: ignore-errors
"""The score of each anchor's own class after its margin, in float64, for the kernels of losses over class weights."""

import torch

from nearkin.kernels.numerics import tl, triton

TINY = torch.finfo(torch.float32).tiny * 1e6  # shorter rows have no direction, as in `distances.unit`
BOUND = tl.constexpr(torch.finfo(torch.float32).max ** (1 / 3))  # as in `distances.upcast`
SHORT = tl.constexpr(TINY * TINY)
PI = tl.constexpr(3.141592653589793)
EPSILON, SHORTEST, LONGEST = tl.constexpr(1e-3), tl.constexpr(1e-3), tl.constexpr(100.0)  # `losses.quality_margin`
STEEPEST = tl.constexpr(2.0**23)  # of the sine by the cosine: float32 tells no nearer angles apart


@triton.jit
def clamped(x):
    """Coordinates in float64, clamped so that squares fit into float32; NaN stays NaN."""
    x = x.to(tl.float64)
    return tl.where(x > BOUND, BOUND, tl.where(x < -BOUND, -BOUND, x))


@triton.jit
def inverse_length(squared):
    """1 / length from its square, 0 for a row too short to have a direction."""
    return tl.where(squared > SHORT, 1.0 / tl.sqrt(tl.where(squared > SHORT, squared, 1.0)), 0.0)


@triton.jit
def _psi(cos, TIMES: tl.constexpr):
    """SphereFace's ψ from cos θ, and its slope: `core.angles.psi_and_slope`."""
    before = cos * 0.0 + 1.0
    now = cos
    slope_before = cos * 0.0
    slope = slope_before + 1.0
    turns = cos * 0.0
    for j in tl.static_range(1, TIMES):
        later = 2.0 * cos * now - before
        later_slope = 2.0 * now + 2.0 * cos * slope - slope_before
        before = now
        slope_before = slope
        now = later
        slope = later_slope
        turns += tl.where(cos < tl.cos(cos * 0.0 + PI * j / TIMES), 1.0, 0.0)
    sign = 1.0 - 2.0 * (turns - 2.0 * tl.floor(turns / 2.0))
    return sign * now - 2.0 * turns, sign * slope


@triton.jit
def own_cosine(x, weight, at, own, inverse, mask_m, dim, CENTERS: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """Of several centres of the own class the nearest: its row, the cosine, 1 / its length; and 0, or NaN of any."""
    cos = tl.full((M,), float("-inf"), tl.float64)
    pick = own * CENTERS
    inverse_own = tl.zeros((M,), tl.float64)
    taints = tl.zeros((M,), tl.float64)
    for k in tl.static_range(0, CENTERS):
        beside = (own * CENTERS + k)[:, None] * dim
        inner = tl.zeros((M,), tl.float64)
        size = tl.zeros((M,), tl.float64)
        for start in range(0, dim, D):
            axis = start + tl.arange(0, D)
            mask = mask_m[:, None] & (axis < dim)[None, :]
            value = clamped(tl.load(x + at + axis[None, :], mask=mask, other=0.0))
            w = tl.load(weight + beside + axis[None, :], mask=mask, other=0.0).to(tl.float64)
            taints += tl.sum(w * 0.0, 1)
            w = clamped(w)
            inner += tl.sum(value * w, 1)
            size += tl.sum(w * w, 1)
        inverse_this = inverse_length(size)
        this = inner * inverse * inverse_this
        better = this > cos
        pick = tl.where(better, own * CENTERS + k, pick)
        inverse_own = tl.where(better, inverse_this, inverse_own)
        cos = tl.where(better, this, cos)
    return pick, cos, inverse_own, taints


@triton.jit
def _sine(x, weight, at, pick, cos, inverse, inverse_own, mask_m, dim, M: tl.constexpr, D: tl.constexpr):
    """sin θ, exact near 0 and π: how far the unit row is from cos θ · w; 1 for a row without a direction."""
    far = tl.zeros((M,), tl.float64)
    beside = pick[:, None] * dim
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        value = clamped(tl.load(x + at + axis[None, :], mask=mask, other=0.0)) * inverse[:, None]
        w = clamped(tl.load(weight + beside + axis[None, :], mask=mask, other=0.0))
        value -= cos[:, None] * (w * inverse_own[:, None])
        far += tl.sum(value * value, 1)
    return tl.where((inverse == 0) | (inverse_own == 0), 1.0, tl.sqrt(far))


@triton.jit
def own_score(x, weight, at, pick, cos, inverse, inverse_own, length, scale, margin, along, across, lost, mask_m, dim,
              MARGIN: tl.constexpr, STRAIGHT: tl.constexpr, TIMES: tl.constexpr, M: tl.constexpr,
              D: tl.constexpr):  # fmt: skip
    """The own class's logit after its margin, its slope by the plain logit, and what an anchor's length adds to it.

    MARGIN: "cosine" (of margin 0 it is the plain logit), "angle", "sphere", whose `scale` is its annealing, "adaptive"
    (AdaFace; along, across, lost: h, mean and deviation of the lengths) or "magnitude" (MagFace; from `margin` at
    length `across` to `along` at `lost`). along, across: cosine and sine of an angle's margin. STRAIGHT: its slope is
    that of the plain cosine.
    """
    by_length = tl.zeros((M,), tl.float64)
    slope = by_length + 1.0
    if MARGIN == "sphere":
        psi, steep = _psi(cos, TIMES)
        psi = (scale * cos + psi) / (1.0 + scale)
        slope = tl.where(inverse > 0, (scale + steep) / (1.0 + scale), 0.0)
        target = length * psi
        by_length = psi - cos * slope
    elif MARGIN == "angle" or MARGIN == "adaptive" or MARGIN == "magnitude":
        sin = _sine(x, weight, at, pick, cos, inverse, inverse_own, mask_m, dim, M, D)
        steep = tl.where(sin > 1e-14, cos / tl.where(sin > 1e-14, sin, 1.0), 0.0)
        steep = tl.minimum(tl.maximum(steep, -STEEPEST), STEEPEST)
        if MARGIN == "adaptive":
            quality = along * (tl.minimum(tl.maximum(length, SHORTEST), LONGEST) - across) / (lost + EPSILON)
            quality = tl.minimum(tl.maximum(quality, -1.0), 1.0)
            turn = -margin * quality
            below = (turn < EPSILON) & (cos >= tl.cos(-turn + EPSILON))
            beyond = (turn > -EPSILON) & (cos <= -tl.cos(turn + EPSILON))
            bent = cos * tl.cos(turn) - sin * tl.sin(turn)
            furthest = tl.cos(by_length + EPSILON)
            bent = tl.where(below, furthest, tl.where(beyond, -furthest, bent))
            target = scale * (bent - (margin + margin * quality))
            slope = tl.where(below | beyond, 0.0, tl.cos(turn) + tl.sin(turn) * steep)
        else:
            if MARGIN == "magnitude":
                rate = (by_length + along - margin) / (by_length + lost - across)
                row_margin = margin + rate * (tl.minimum(tl.maximum(length, across), lost) - across)
                rate = tl.where((length >= across) & (length <= lost), rate, 0.0)
                cos_margin = tl.cos(row_margin)
                sin_margin = tl.sin(row_margin)
            else:
                row_margin = margin
                cos_margin = along
                sin_margin = across
            within = cos > -cos_margin
            target = scale * tl.where(within, cos * cos_margin - sin * sin_margin, cos - row_margin * sin_margin)
            if MARGIN == "magnitude":
                turned = tl.where(within, sin * cos_margin + cos * sin_margin, sin_margin + row_margin * cos_margin)
                by_length = -scale * rate * turned
            if not STRAIGHT:
                slope = tl.where(within, cos_margin + sin_margin * steep, 1.0)
    else:
        target = scale * (cos - margin) + tl.where(inverse_own == 0, lost, 0.0)
    return target, slope, by_length
