"""What a trainer puts into a checkpoint and takes out of it, whichever part of it each rank holds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nearkin.dist import collectives, environment
from nearkin.dist.group import ProcessGroup
from nearkin.losses import class_shards
from nearkin.training.checkpoint import checkpoints, sharded
from nearkin.training.checkpoint.checkpoints import Checkpoints
from nearkin.training.checkpoint.sharded import Kept, Rows

if TYPE_CHECKING:
    from nearkin.training.trainer import Trainer

__all__ = ["State", "contents", "gathered", "named", "newest", "put_back", "seed_rank", "spread"]


@dataclass
class State:
    """Where a run stands: all that is neither a tensor nor in the recipe."""

    epoch: int = 0
    batch: int = 0  # of this epoch, trained on
    step: int = 0
    best: float | None = None
    best_epoch: int | None = None
    best_file: str | None = None
    waited: int = 0  # validations since the best one
    finished: bool = False
    seconds: float = 0.0
    counted: int = 0  # steps in the window that the next log line averages
    epoch_steps: int = 0  # steps of this epoch whose losses are summed up
    notes: list[str] = field(default_factory=list)


def contents(trainer: "Trainer") -> tuple[dict[str, Tensor | Rows], dict[str, Any]]:
    """All tensors that a run goes on from, and what is none."""
    moments, plain = checkpoints.optimizer_parts(trainer.optimizer)
    chance, chances = _generators(trainer.device, trainer.group)
    tensors = named(
        encoder=spread(trainer.encoder, trainer.group),
        loss=spread(trainer.loss, trainer.group),
        optimizer=_spread_moments(moments, trainer.parameters, trainer.group),
        sampler=trainer.sampler.state_dict(trainer.state.batch),
        chance=chance,
        average={} if trainer.average is None else spread(trainer.average, trainer.group),
    )
    state = asdict(trainer.state) | {"optimizer": plain, "chances": chances, "rate": trainer.rate.state_dict()}
    state |= {"numerics": environment.numerics(trainer.device, trainer.group.size)}
    state |= {"scaler": trainer.scaler.state_dict(), "monitor": trainer.monitor.state_dict()}
    return {"window": trainer.window, "epoch.loss": trainer.epoch_loss, **tensors}, state


def put_back(trainer: "Trainer", kept: Kept, state: dict[str, Any]) -> None:
    """The same, back in its places."""
    _fill(trainer.encoder, kept, "encoder", trainer.group)
    _fill(trainer.loss, kept, "loss", trainer.group)
    if trainer.average is not None:
        _fill(trainer.average, kept, "average", trainer.group)
    moments = _own_moments(kept, trainer.parameters, trainer.group)
    checkpoints.restore_optimizer(trainer.optimizer, moments, state.pop("optimizer"))
    trainer.sampler.load_state_dict(kept.part("sampler"))
    seed = trainer.recipe.training.seed + state["step"]
    _restore_generators(kept.part("chance"), state.pop("chances"), trainer.device, seed, trainer.group)
    trainer.rate.load_state_dict(state.pop("rate"))
    trainer.scaler.load_state_dict(state.pop("scaler"))
    trainer.monitor.load_state_dict(state.pop("monitor"))
    trainer.window.copy_(kept.rows("window"))
    for summed in kept.part("epoch").values():  # checkpoints of earlier versions do not have it
        trainer.epoch_loss.copy_(summed)
    state.pop("numerics", None)
    trainer.state = State(**state)


def named(**parts: Mapping[str, Tensor | Rows]) -> dict[str, Tensor | Rows]:
    """The tensors of several parts under names that say of which."""
    return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}


def spread(module: nn.Module, group: ProcessGroup) -> dict[str, Tensor | Rows]:
    """The state of a module, with what each rank holds only rows of."""
    state = module.state_dict()
    if group.size == 1:
        return dict(state)
    found: dict[str, Tensor | Rows] = {name: sharded.held(tensor) for name, tensor in state.items()}
    for name, (first, _, total) in class_shards.layout(module).items():
        if name in state:
            found[name] = Rows(state[name], first, total)
    return found


def _spread_moments(
    moments: Mapping[str, Tensor], parameters: list[Tensor], group: ProcessGroup
) -> dict[str, Tensor | Rows]:
    """The same of an optimiser's tensors, `index.name`, beside the parameters that they belong to."""
    if group.size == 1:
        return dict(moments)
    return {name: sharded.held(value, parameters[int(name.partition(".")[0])]) for name, value in moments.items()}


def _fill(module: nn.Module, kept: Kept, prefix: str, group: ProcessGroup) -> None:
    """Loads the state of a module from a checkpoint, of what it holds rows of only these."""
    places = spread(module, group)
    if not any(isinstance(place, Rows) for place in places.values()):
        module.load_state_dict(kept.part(prefix))
        return
    known = set(kept.under(prefix))
    if known != set(places):
        other = sorted(known ^ set(places))[0]
        raise ValueError(f"the checkpoint is not of this {prefix}: {other} is only in one of them")
    for name, place in places.items():
        kept.into(f"{prefix}.{name}", place)


def _own_moments(kept: Kept, parameters: list[Tensor], group: ProcessGroup) -> dict[str, Tensor]:
    """The tensors of an optimiser's state as this rank holds them."""
    found: dict[str, Tensor] = {}
    for name in kept.under("optimizer"):
        parameter, full = parameters[int(name.partition(".")[0])], f"optimizer.{name}"
        rows = sharded.held(parameter) if group.size > 1 else parameter
        if not isinstance(rows, Rows) or kept.dims(full) == 0:
            found[name] = kept.rows(full)
            continue
        own = kept.rows(full, rows.first, rows.first + len(rows.tensor)).to(rows.tensor.device)
        found[name] = _like(own, parameter)
    return found


def _like(own: Tensor, parameter: Tensor) -> Tensor:
    """Rows of this rank, spread over ranks as the parameter is."""
    if not hasattr(parameter, "to_local"):
        return own
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    return DTensor.from_local(
        own.contiguous(), like.device_mesh, like.placements, shape=like.shape, stride=like.stride(), run_check=False
    )


def gathered(module: nn.Module) -> dict[str, Tensor]:
    """The whole state of a module that is spread over ranks; all of them must ask."""
    state: dict[str, Any] = module.state_dict()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def newest(checkpoints: Checkpoints) -> tuple[Kept, dict[str, Any], list[str]]:
    """The newest whole checkpoint. Of several ranks the first proves it, and all read that one."""
    group = checkpoints.group
    if group.size == 1:
        _, kept, state, notes = checkpoints.find()
        return kept, state, notes

    def choose() -> list[Any]:
        name, _, state, notes = checkpoints.find()
        return [name, notes, state.get("best_file")]

    name, notes, best_file = group.on_rank0("choosing", choose)
    with group.work("opening"):
        kept, state = checkpoints.open(name)
    return kept, state | {"best_file": best_file}, notes


def seed_rank(seed: int, group: ProcessGroup) -> None:
    """Chance that ranks must not share, as dropout is: each draws its own. Of the first rank that of one process."""
    if group.rank:
        torch.manual_seed((seed + group.rank * 0x9E3779B97F4A7C15) % 2**63)


def _generators(device: torch.device, group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Where every generator stands; of several ranks those of torch on each of them, by its device alone."""
    if group.size == 1:
        return checkpoints.generators()
    on_gpu = {"cuda0": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    mine = {"cpu": torch.get_rng_state(), **on_gpu}
    others = {f"{name}.ranks": collectives.gather(state[None], counts=[1] * group.size) for name, state in mine.items()}
    return mine | others, checkpoints.generators(torch_too=False)[1]


def _restore_generators(
    tensors: Mapping[str, Tensor], plain: Mapping[str, Any], device: torch.device, seed: int, group: ProcessGroup
) -> None:
    """A rank that was not there when the checkpoint was written begins a row of chance of its own."""
    if group.size == 1:
        checkpoints.restore_generators(tensors, plain)
        return
    own = {name: value[group.rank].clone() for name, value in _by_rank(tensors).items() if group.rank < len(value)}
    if group.first:
        own = {name: value for name, value in tensors.items() if not name.endswith(".ranks")} | own
    checkpoints.restore_generators({name: value for name, value in own.items() if name == "cpu"}, plain)
    if device.type == "cuda" and "cuda0" in own:
        torch.cuda.set_rng_state(own["cuda0"], device)
    if "cpu" not in own:
        seed_rank(seed, group)


def _by_rank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removesuffix(".ranks"): value for name, value in tensors.items() if name.endswith(".ranks")}
