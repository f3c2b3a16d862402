"""An optimiser for class weights with little state: 4 bytes per class, or 2 per weight, where AdamW has 8.

Both rules touch only the rows that have a gradient: with sampled classes the others neither move nor age. Weights of
bfloat16 need no float32 copy, since they are rounded stochastically. The random bits are a hash of seed, step and
place, so the same run gives the same bits, resumed or not.
"""

import functools
import math
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core import checks, distances, random
from nearkin.core.random import Salt
from nearkin.kernels import launch

__all__ = ["RULES", "ClassWeightOptimizer", "load_small_state"]

RULES = ("rowwise", "adam8bit")
BLOCK = 256  # weights of a row that share the scale of their 8-bit moments
CHUNK = 2**22  # weights at a time: what a step needs beside its state
MEAN_BITS, ROOT_BITS = 3, 4  # of the mantissa of an 8-bit moment; 4 more are its exponent, a mean has a sign too
LOWEST = 127 - 15  # the exponent of the smallest, as float32 stores it


class ClassWeightOptimizer(torch.optim.Optimizer):
    r"""Moves class weights (C, D), or (C·K, D), by one of two rules. All sums are float32.

    rule="rowwise": row-wise Adagrad, one float32 number per row. s_c += mean_d g_cd², w_c -= lr g_c / (√s_c + eps).
    rule="adam8bit": Adam (Kingma & Ba 2015), whose moments m and √v are kept in 8 bits each, relative to the largest of
    256 weights of a row and rounded stochastically; bias is corrected by the number of steps that the row has had.
    weight_decay: as in AdamW, w -= lr · weight_decay · w, of rows with a gradient. A gradient may be dense, where a row
    of zeros counts as none, or sparse (`torch.sparse_coo`). Weights: float32, float64 or bfloat16.

    State per class at D = 512: 4 bytes, or 1,044; AdamW with a float32 copy of bfloat16 weights has 6,144.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        rule: str = "rowwise",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("beta", betas[0]), ("beta", betas[1])):
            checks.at_least(name, value, 0.0)
        checks.positive("eps", eps)
        checks.integer("seed", seed, 0)
        options = {"lr": lr, "rule": rule, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, options)
        for group in self.param_groups:
            checks.one_of("rule", group["rule"], RULES)
            for parameter in group["params"]:
                if parameter.dim() != 2 or parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
                    raise ValueError(
                        "class weights must be (C, D) of float32, float64 or bfloat16, got "
                        f"{tuple(parameter.shape)} of {str(parameter.dtype).removeprefix('torch.')}"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _move(parameter, self.state[parameter], group)
        return value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch would turn the state into the type of the weights."""
        load_small_state(self, state_dict, super().load_state_dict)


def load_small_state(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Loads a state by `load`, but that of groups with a "rule" as it is, on the device of its weights."""
    small: dict[int, dict[str, Any]] = {}
    for group in state_dict["param_groups"]:
        small |= {i: state_dict["state"][i] for i in group["params"] if "rule" in group and i in state_dict["state"]}
    others = {index: entry for index, entry in state_dict["state"].items() if index not in small}
    load({**state_dict, "state": others})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entry in small.items():
        device = parameters[index].device
        tensors = {name: v.to(device, copy=True) if isinstance(v, Tensor) else v for name, v in entry.items()}
        optimizer.state[parameters[index]] = tensors


def _move(weight: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One step of a parameter, a chunk of rows after the other."""
    if not state:
        state |= _fresh_state(weight, group["rule"])
    state["step"] += 1
    gradient, rows = weight.grad, None
    assert gradient is not None
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows, gradient = gradient.indices()[0], gradient.values()
    if _in_a_kernel(weight, gradient):
        with launch.device_of(weight):
            _kernels().move(weight, gradient.contiguous(), rows, state, group)
        return
    each = max(1, CHUNK // max(1, weight.shape[1]))
    for start in range(0, len(gradient), each):
        part = slice(start, start + each)
        _move_rows(weight, gradient[part], part if rows is None else rows[part], state, group)


def _in_a_kernel(weight: Tensor, gradient: Tensor) -> bool:
    kinds = (torch.float32, torch.bfloat16)
    return (
        kernels.can_run(weight)
        and weight.dtype in kinds
        and gradient.dtype in kinds
        and weight.is_contiguous()
        and not hasattr(weight, "to_local")
    )


@functools.cache
def _kernels() -> ModuleType:
    from nearkin.kernels import class_weight_kernels

    return class_weight_kernels


def _fresh_state(weight: Tensor, rule: str) -> dict[str, Any]:
    def zeros(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=weight.device)

    rows, dim = weight.shape
    if rule == "rowwise":
        return {"step": 0, "sum": zeros(rows)}
    codes = {name: zeros(rows, dim, kind=torch.uint8) for name in ("mean", "root")}
    scales = {f"{name}_scale": zeros(rows, -(-dim // BLOCK)) for name in codes}
    return {"step": 0, "count": zeros(rows, kind=torch.int32), **codes, **scales}


def _move_rows(weight: Tensor, gradient: Tensor, rows: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    """rows: a slice, or the indices of the gradient's rows."""
    kind = torch.promote_types(weight.dtype, torch.float32)
    before, gradient = weight[rows].to(kind), gradient.to(kind)
    moments = {name: value[rows] for name, value in state.items() if isinstance(value, Tensor)}
    noise = None
    if group["rule"] != "rowwise" or weight.dtype == torch.bfloat16:
        noise = _noise(weight, rows, state["step"], group["seed"])
    rule = _rowwise if group["rule"] == "rowwise" else _adam8bit
    update, moments_after = rule(gradient, moments, group, noise)
    after = before * (1.0 - group["lr"] * group["weight_decay"]) - group["lr"] * update
    if weight.dtype == torch.bfloat16 and noise is not None:
        after = _rounded(after, (noise >> 39) & 0xFFFF)
    moves = (gradient != 0).any(1)  # a NaN is not 0: it spreads, and is seen
    weight[rows] = torch.where(moves[:, None], after, before).to(weight.dtype)
    for name, value in moments_after.items():
        mask = moves.view(-1, *[1] * (value.dim() - 1))
        state[name][rows] = torch.where(mask, value, moments[name])


def _rowwise(
    gradient: Tensor, moments: dict[str, Tensor], group: dict[str, Any], noise: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    total = moments["sum"] + gradient.square().mean(1)
    return gradient / (total.sqrt() + group["eps"])[:, None], {"sum": total.float()}


def _adam8bit(
    gradient: Tensor, moments: dict[str, Tensor], group: dict[str, Any], noise: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    assert noise is not None
    beta1, beta2 = group["betas"]
    mean = _decoded(moments["mean"] & 0x7F, moments["mean_scale"], MEAN_BITS)
    mean = torch.where(moments["mean"] > 0x7F, -mean, mean)
    root = _decoded(moments["root"], moments["root_scale"], ROOT_BITS)
    mean = beta1 * mean + (1 - beta1) * gradient
    root = (beta2 * root.square() + (1 - beta2) * gradient.square()).sqrt()
    count = moments["count"] + 1
    steps = count.to(distances.wide(mean))[:, None]
    if steps.dtype == torch.float64:
        correction1, correction2 = ((1 - beta**steps).to(mean.dtype) for beta in (beta1, beta2))
    else:  # 1 - beta^steps without cancellation
        correction1, correction2 = (-torch.expm1(steps * math.log(max(beta, 1e-30))) for beta in (beta1, beta2))
    update = mean / correction1 / (root / correction2.sqrt() + group["eps"])
    mean_codes, mean_scale = _encoded(mean.abs(), MEAN_BITS, noise & 0xFFFFF)
    root_codes, root_scale = _encoded(root, ROOT_BITS, (noise >> 20) & 0x7FFFF)
    root_codes = torch.where(root > 0, root_codes.clamp(min=1), root_codes)  # else a step would divide by eps alone
    signs = (mean < 0).to(torch.uint8) << 7
    after = {"mean": mean_codes | signs, "mean_scale": mean_scale, "root": root_codes, "root_scale": root_scale}
    return update, after | {"count": count}


def _noise(weight: Tensor, rows: Any, step: int, seed: int) -> Tensor:
    """A random word per weight, (n, D) int64, by its place among the weights of all processes."""
    first = weight.rows[0] if getattr(weight, "sharded", False) else 0  # type: ignore[attr-defined]
    row = torch.arange(len(weight), device=weight.device)[rows] if isinstance(rows, slice) else rows
    place = (row + first)[:, None] * weight.shape[1] + torch.arange(weight.shape[1], device=weight.device)
    return random.mix(random.mix(place + random.salted(step, Salt.STEP)) + random.salted(seed, Salt.SEED))


def _rounded(value: Tensor, noise: Tensor) -> Tensor:
    """float32 to bfloat16, up or down by chance, so that the mean is the value."""
    bits = (value.float().view(torch.int32) + noise.int()) & -(1 << 16)
    return torch.where(value.isfinite(), bits.view(torch.float32), value)


def _encoded(size: Tensor, mantissa: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (n, D) of numbers >= 0, rounded up or down by chance, and the scales (n, blocks) that they refer to."""
    blocks, dim = -(-size.shape[1] // BLOCK), size.shape[1]
    padded = torch.nn.functional.pad(size.float(), (0, blocks * BLOCK - dim))
    scale = padded.view(-1, blocks, BLOCK).amax(2)
    relative = size.float() / _spread(torch.where(scale > 0, scale, 1.0), dim)
    codes = ((relative.view(torch.int32) + noise.int()) >> (23 - mantissa)) - (LOWEST << mantissa)
    least = 2.0 ** (LOWEST - 127) * (1 + 2.0**-mantissa)  # what code 1 stands for
    codes = torch.where(relative < least, (noise < relative / least * 2 ** (23 - mantissa)).int(), codes)
    return codes.to(torch.uint8), scale


def _decoded(codes: Tensor, scale: Tensor, mantissa: int) -> Tensor:
    bits = (codes.int() + (LOWEST << mantissa)) << (23 - mantissa)
    return torch.where(codes > 0, bits.view(torch.float32), 0.0) * _spread(scale, codes.shape[1])


def _spread(scale: Tensor, dim: int) -> Tensor:
    """One scale per weight, (n, D)."""
    return scale.repeat_interleave(BLOCK, 1)[:, :dim]
