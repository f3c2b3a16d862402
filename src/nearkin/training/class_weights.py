"""An optimiser for class weights with little state: 4 bytes per class, where AdamW has 8 per weight.

It touches only the rows that have a gradient: with sampled classes the others neither move nor age. Weights of
bfloat16 need no float32 copy, since they are rounded stochastically. The random bits are a hash of seed, step and
place, so the same run gives the same bits, resumed or not.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from nearkin.core import checks, distances, random
from nearkin.core.random import Salt

__all__ = ["ClassWeightOptimizer", "load_small_state"]

CHUNK = 2**22  # weights at a time: what a step needs beside its state
CHUNK_ON_GPU = 2**24  # where launches cost more than memory


class ClassWeightOptimizer(torch.optim.Optimizer):
    r"""Moves class weights (C, D), or (C·K, D), by row-wise Adagrad: one float32 number s_c of state per row.

    s_c += mean_d g_cd², w_c -= lr g_c / (√s_c + eps). All sums are float32.
    weight_decay: as in AdamW, w -= lr · weight_decay · w, of rows with a gradient. A gradient may be dense, where a row
    of zeros counts as none, or sparse (`torch.sparse_coo`). Weights: float32, float64 or bfloat16.

    State per class at D = 512: 4 bytes; AdamW with a float32 copy of bfloat16 weights has 6,144.
    """

    _compiles = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        rule: str = "rowwise",
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            checks.at_least(name, value, 0.0)
        checks.positive("eps", eps)
        checks.integer("seed", seed, 0)
        options = {"lr": lr, "rule": rule, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, options)
        for group in self.param_groups:
            _check_rule(group["rule"])
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
                    on_gpu = parameter.is_cuda and not hasattr(parameter, "to_local")
                    _move(parameter, self.state[parameter], group, self._in_one_pass if on_gpu else _moved)
        return value

    def _in_one_pass(self, *arguments: Any) -> Any:
        """`_moved`, compiled: on a GPU its operations one by one take 3 to 7 times as long. Plain where that fails."""
        if not self._compiles:
            return _moved(*arguments)
        try:
            return _compiled()(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            self._compiles = False
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"ClassWeightOptimizer is not compiled: {reason}", RuntimeWarning, stacklevel=3)
            return _moved(*arguments)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch would turn the state into the type of the weights."""
        load_small_state(self, state_dict, super().load_state_dict)


def load_small_state(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Loads a state by `load`, but that of groups with a "rule" as it is, on the device of its weights."""
    small: dict[int, dict[str, Any]] = {}
    for group in state_dict["param_groups"]:
        _check_rule(group.get("rule", "rowwise"))
        small |= {i: state_dict["state"][i] for i in group["params"] if "rule" in group and i in state_dict["state"]}
    others = {index: entry for index, entry in state_dict["state"].items() if index not in small}
    load({**state_dict, "state": others})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entry in small.items():
        device = parameters[index].device
        tensors = {name: v.to(device, copy=True) if isinstance(v, Tensor) else v for name, v in entry.items()}
        optimizer.state[parameters[index]] = tensors


def _check_rule(rule: str) -> None:
    if rule == "adam8bit":
        raise ValueError(
            'rule must be "rowwise", got "adam8bit", which has left; its state cannot be loaded: start with "rowwise" '
            "anew, or with torch.optim.AdamW where memory allows"
        )
    checks.one_of("rule", rule, ("rowwise",))


def _move(weight: Tensor, state: dict[str, Any], group: dict[str, Any], moved: Callable[..., Any]) -> None:
    """One step of a parameter, a chunk of rows after the other."""
    if not state:
        state |= {"step": 0, "sum": torch.zeros(len(weight), device=weight.device)}
    state["step"] += 1
    gradient, rows = weight.grad, None
    assert gradient is not None
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows, gradient = gradient.indices()[0], gradient.values()
    # As tensors, made there: a number that changes would be compiled anew, and a copy would wait.
    full, kind = partial(torch.full, (), device=weight.device), distances.wide(weight)
    numbers = (group["lr"], 1.0 - group["lr"] * group["weight_decay"], group["eps"])
    salts = (random.salted(state["step"], Salt.STEP), random.salted(group["seed"], Salt.SEED))
    given = [*(full(x, dtype=kind) for x in numbers), *(full(x, dtype=torch.int64) for x in salts)]
    first = weight.rows[0] if getattr(weight, "sharded", False) else 0  # type: ignore[attr-defined]
    each = max(1, (CHUNK_ON_GPU if weight.is_cuda else CHUNK) // max(1, weight.shape[1]))
    for start in range(0, len(gradient), each):
        end = min(start + each, len(gradient))
        row = torch.arange(start, end, device=weight.device) if rows is None else rows[start:end]
        at = slice(start, end) if rows is None else row
        after = moved(weight[at], gradient[start:end], state["sum"][at], row + first, *given)
        weight[at], state["sum"][at] = after


def _moved(
    weight: Tensor,
    gradient: Tensor,
    total: Tensor,
    place: Tensor,
    lr: Tensor,
    keep: Tensor,
    eps: Tensor,
    salt_step: Tensor,
    salt_seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rows (n, D) after their step, and their sums (n,). place: theirs among the rows of all processes."""
    kind = torch.promote_types(weight.dtype, torch.float32)
    before, gradient = weight.to(kind), gradient.to(kind)
    moves = gradient.abs().amax(1) != 0  # a NaN is not 0: it spreads, and is seen
    total = torch.where(moves, total + gradient.square().mean(1), total)
    kept = torch.where(moves, keep, torch.ones_like(keep)).to(kind)
    rate = (lr / (total.sqrt() + eps)).to(kind)
    after = before * kept[:, None] - gradient * rate[:, None]
    if weight.dtype == torch.bfloat16:
        words = -(-weight.shape[1] // 4)  # of 64 bits, for four weights each
        word = place[:, None] * words + torch.arange(words, device=weight.device)
        bits = random.mix(random.mix(word + salt_step) + salt_seed)
        noise = torch.stack([bits >> shift for shift in (0, 16, 32, 48)], 2).flatten(1)[:, : weight.shape[1]]
        after = _rounded(after, noise.int() & 0xFFFF)
    return after.to(weight.dtype), total.float()


def _rounded(value: Tensor, noise: Tensor) -> Tensor:
    """float32 to bfloat16, up or down by chance of 16 bits, so that the mean is the value."""
    bits = (value.view(torch.int32) + noise) & -(1 << 16)
    return torch.where(value.isfinite(), bits.view(torch.float32), value)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_moved, dynamic=True)
