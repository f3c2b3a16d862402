# mypy: ignore-errors
"""The kernels of `training.class_weights`: a step of the class weights in one pass over gradient, weights and state.

The same rules, rounded by the same random bits, as in plain torch there, which says what they are.
"""

import functools
import math

from nearkin.core import random
from nearkin.core.random import Salt
from nearkin.kernels import interpreted
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import tl, triton

ROWS = 4  # per program
BLOCK = 256  # weights of a row at a time, which share a scale
ODD = tuple(map(tl.constexpr, map(random.signed, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))))
ODD_1, ODD_2 = ODD


@triton.jit
def _mix(x):
    """`core.random.mix`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * ODD_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * ODD_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _store(weight, at, mask, value, noise):
    """Writes weights; bfloat16 is rounded by 16 bits of the noise."""
    if weight.dtype.element_ty == tl.bfloat16:
        bits = (value.to(tl.int32, bitcast=True) + ((noise >> 39) & 0xFFFF).to(tl.int32)) & -65536
        finite = (value - value) == 0
        value = tl.where(finite, bits.to(tl.float32, bitcast=True), value)
    tl.store(weight + at, value.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def _decoded(codes, scale, MANTISSA: tl.constexpr):
    bits = (codes.to(tl.int32) + (112 << MANTISSA)) << (23 - MANTISSA)
    return tl.where(codes > 0, bits.to(tl.float32, bitcast=True), 0.0) * scale[:, None]


@triton.jit
def _encoded(size, scale, noise, MANTISSA: tl.constexpr):
    relative = size / tl.where(scale > 0, scale, 1.0)[:, None]
    codes = ((relative.to(tl.int32, bitcast=True) + noise) >> (23 - MANTISSA)) - (112 << MANTISSA)
    least: tl.constexpr = 2.0**-15 * (1 + 2.0**-MANTISSA)
    chance = relative / least * (1 << (23 - MANTISSA))
    return tl.where(relative < least, tl.where(noise.to(tl.float32) < chance, 1, 0), codes)


@triton.jit
def _move(
    weight, gradient, rows, total, count, mean, root, mean_scale, root_scale, lr, keep, eps, beta1, beta2, log1, log2,
    salt_step, salt_seed, num_rows, dim, blocks, first, SPARSE: tl.constexpr, ADAM: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr):  # fmt: skip
    """One step of R rows. keep: 1 less the decay; log1, log2: the logarithms of the betas."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    exists = r < num_rows
    row = r
    if SPARSE:
        row = tl.load(rows + r, mask=exists, other=0)
    squares = tl.zeros((R,), tl.float32)
    moves = tl.zeros((R,), tl.int32)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = exists[:, None] & (axis < dim)[None, :]
        g = tl.load(gradient + r[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(g * g, 1)
        moves = tl.maximum(moves, tl.max(tl.where(g != 0, 1, 0), 1))
    moves = (moves > 0) & exists
    if ADAM:
        steps = tl.load(count + row, mask=exists, other=0) + 1
        tl.store(count + row, steps, mask=moves)
        old1 = (1.0 - tl.exp(steps.to(tl.float64) * log1)).to(tl.float32)
        old2 = tl.sqrt(1.0 - tl.exp(steps.to(tl.float64) * log2)).to(tl.float32)
    else:
        squares = tl.load(total + row, mask=exists, other=0.0) + squares / dim
        tl.store(total + row, squares, mask=moves)
        inverse = 1.0 / (tl.sqrt(squares) + eps)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = moves[:, None] & (axis < dim)[None, :]
        at = row[:, None] * dim + axis[None, :]
        noise = _mix(_mix((row + first)[:, None] * dim + axis[None, :] + salt_step) + salt_seed)
        g = tl.load(gradient + r[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
        if ADAM:
            block = row * blocks + start // D
            m_code = tl.load(mean + at, mask=mask, other=0).to(tl.int32)
            m = _decoded(m_code & 127, tl.load(mean_scale + block, mask=moves, other=0.0), 3)
            m = beta1 * tl.where(m_code > 127, -m, m) + (1.0 - beta1) * g
            v = _decoded(tl.load(root + at, mask=mask, other=0).to(tl.int32),
                         tl.load(root_scale + block, mask=moves, other=0.0), 4)  # fmt: skip
            v = tl.sqrt(beta2 * v * v + (1.0 - beta2) * g * g)
            m = tl.where(mask, m, 0.0)
            v = tl.where(mask, v, 0.0)
            m_scale = tl.max(tl.abs(m), 1)
            v_scale = tl.max(v, 1)
            tl.store(mean_scale + block, m_scale, mask=moves)
            tl.store(root_scale + block, v_scale, mask=moves)
            m_code = _encoded(tl.abs(m), m_scale, (noise & 0xFFFFF).to(tl.int32), 3) + tl.where(m < 0, 128, 0)
            v_code = _encoded(v, v_scale, ((noise >> 20) & 0x7FFFF).to(tl.int32), 4)
            tl.store(mean + at, m_code.to(tl.uint8), mask=mask)
            tl.store(root + at, tl.where(v > 0, tl.maximum(v_code, 1), v_code).to(tl.uint8), mask=mask)
            update = m / old1[:, None] / (v / old2[:, None] + eps)
        else:
            update = g * inverse[:, None]
        w = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
        _store(weight, at, mask, w * keep - lr * update, noise)


@functools.cache
def _launcher(sparse, adam):
    options = {} if interpreted() else {"enable_fp_fusion": False}  # as plain torch rounds
    return CachedLauncher(_move, SPARSE=sparse, ADAM=adam, R=ROWS, D=BLOCK, num_warps=4, **options)


def move(weight, gradient, rows, state, group):
    """A step of `weight` (C, D) in place, and of its state. rows: the gradient's, or None for all."""
    num_rows, dim = gradient.shape
    if num_rows == 0 or dim == 0:
        return
    adam = group["rule"] == "adam8bit"
    names = ("count", "mean", "root", "mean_scale", "root_scale") if adam else ("sum",) * 5
    moments = (state[names[0] if adam else "sum"], *(state[name] for name in names))
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    logs = tuple(math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2))
    numbers = (lr, 1.0 - lr * group["weight_decay"], float(group["eps"]), float(beta1), float(beta2), *logs)
    salts = (random.salted(state["step"], Salt.STEP), random.salted(group["seed"], Salt.SEED))
    first = weight.rows[0] if getattr(weight, "sharded", False) else 0
    sizes = (num_rows, dim, -(-dim // BLOCK), first)
    grid = (-(-num_rows // ROWS), 1, 1)
    listed = rows if rows is not None else state[names[0]]
    _launcher(rows is not None, adam)(grid, weight, gradient, listed, *moments, *numbers, *salts, *sizes)
