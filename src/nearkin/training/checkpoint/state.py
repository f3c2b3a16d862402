"""The state of a training: what a checkpoint stores of it and restores, whichever part of it each rank holds."""

import os
import platform
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nearkin.dist import collectives
from nearkin.dist.group import ProcessGroup
from nearkin.losses import class_shards
from nearkin.training.checkpoint.checkpoints import Checkpoints, CheckpointTensors, LocalRows

if TYPE_CHECKING:
    from nearkin.training.trainer import Trainer

__all__ = ["State", "collect", "full_state", "local_state", "numerics", "numerics_note", "open_newest", "prefixed"]
__all__ += ["restore", "seed_rank"]

_NUMERICS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")  # which instructions libraries choose


@dataclass
class State:
    """How far a run has come: all that is neither a tensor nor in the recipe."""

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
    epoch_steps: int = 0  # steps of this epoch whose losses are summed
    notes: list[str] = field(default_factory=list)


def collect(trainer: "Trainer") -> tuple[dict[str, Tensor | LocalRows], dict[str, Any]]:
    """All tensors that a run resumes from, and the values that are no tensors."""
    group = trainer.group
    moments, groups = _optimizer_state(trainer.optimizer)
    random_tensors, random_values = _random_state(trainer.device, group)
    tensors = prefixed(
        encoder=local_state(trainer.encoder, group),
        loss=local_state(trainer.loss, group),
        optimizer={name: _local_moment(name, moment, trainer) for name, moment in moments.items()},
        sampler=trainer.sampler.state_dict(trainer.state.batch),
        chance=random_tensors,
        average={} if trainer.average is None else local_state(trainer.average, group),
    )
    values = asdict(trainer.state) | {
        "optimizer": groups,
        "chances": random_values,
        "rate": trainer.lr_schedule.state_dict(),
    }
    values |= {"numerics": numerics(trainer.device, group.size)}
    values |= {"scaler": trainer.scaler.state_dict(), "monitor": trainer.monitor.state_dict()}
    return {"window": trainer.window, "epoch.loss": trainer.epoch_loss, **tensors}, values


def restore(trainer: "Trainer", tensors: CheckpointTensors, values: dict[str, Any]) -> None:
    """Puts what `collect` has returned back into the trainer."""
    _load_module(trainer.encoder, tensors, "encoder", trainer.group)
    _load_module(trainer.loss, tensors, "loss", trainer.group)
    if trainer.average is not None:
        _load_module(trainer.average, tensors, "average", trainer.group)
    _load_optimizer(trainer, tensors, values.pop("optimizer"))
    trainer.sampler.load_state_dict(tensors.section("sampler"))
    seed = trainer.recipe.training.seed + values["step"]
    _set_random_state(tensors.section("chance"), values.pop("chances"), trainer.device, seed, trainer.group)
    trainer.lr_schedule.load_state_dict(values.pop("rate"))
    trainer.scaler.load_state_dict(values.pop("scaler"))
    trainer.monitor.load_state_dict(values.pop("monitor"))
    trainer.window.copy_(tensors.rows("window"))
    for loss in tensors.section("epoch").values():  # checkpoints of earlier versions do not have it
        trainer.epoch_loss.copy_(loss)
    values.pop("numerics", None)
    trainer.state = State(**values)


def open_newest(checkpoints: Checkpoints) -> tuple[CheckpointTensors, dict[str, Any], list[str]]:
    """The newest intact checkpoint. Of several ranks the first verifies it, and all read that one."""
    group = checkpoints.group
    if group.size == 1:
        _, tensors, values, notes = checkpoints.find_newest()
        return tensors, values, notes

    def choose() -> list[Any]:
        name, _, values, notes = checkpoints.find_newest()
        return [name, notes, values.get("best_file")]

    name, notes, best_file = group.on_rank0("choosing", choose)
    with group.work("opening"):
        tensors, values = checkpoints.open(name)
    return tensors, values | {"best_file": best_file}, notes


def prefixed(**sections: Mapping[str, Tensor | LocalRows]) -> dict[str, Tensor | LocalRows]:
    """The tensors of several sections under names that begin with the section's."""
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


# --- modules


def local_state(module: nn.Module, group: ProcessGroup) -> dict[str, Tensor | LocalRows]:
    """The state of a module; of sharded tensors the rows of this rank."""
    state = module.state_dict()
    if group.size == 1:
        return dict(state)
    tensors: dict[str, Tensor | LocalRows] = {name: _local_rows(tensor) for name, tensor in state.items()}
    for name, (first, _, total) in class_shards.layout(module).items():
        if name in state:
            tensors[name] = LocalRows(state[name], first, total)
    return tensors


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """The complete state of a module that is sharded over ranks; all of them must call it."""
    state: dict[str, Any] = module.state_dict()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def _load_module(module: nn.Module, tensors: CheckpointTensors, prefix: str, group: ProcessGroup) -> None:
    """Loads the state of a module from a checkpoint; of sharded tensors the rows of this rank."""
    targets = local_state(module, group)
    if not any(isinstance(target, LocalRows) for target in targets.values()):
        module.load_state_dict(tensors.section(prefix))
        return
    before = class_shards.before(module)
    stored = {before.get(name, name): name for name in tensors.names(prefix)}
    stored.pop(None, None)  # what nobody reads any more
    if set(stored) != set(targets):
        other = sorted(map(str, set(stored) ^ set(targets)))[0]
        raise ValueError(f"the checkpoint is not of this {prefix}: {other} is only in one of them")
    for name, target in targets.items():
        tensors.copy_to(f"{prefix}.{stored[name]}", target)


def _local_rows(tensor: Tensor, parameter: Tensor | None = None) -> Tensor | LocalRows:
    """A tensor, or this rank's rows of it. parameter: the one that an optimiser's moment belongs to."""
    if hasattr(tensor, "to_local"):
        mesh, total = tensor.device_mesh, tensor.shape[0]  # type: ignore[attr-defined]
        each = -(-total // mesh.size())  # as torch divides rows: all alike but the last
        return LocalRows(tensor.to_local(), min(mesh.get_local_rank() * each, total), total)
    owner = tensor if parameter is None else parameter
    if getattr(owner, "sharded", False) and tensor.dim() and len(tensor) == len(owner):
        return LocalRows(tensor, owner.rows[0], owner.total)  # type: ignore[attr-defined]
    return tensor


# --- the optimiser


def _optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimiser: its tensors as `index.name`, and the other values."""
    state = optimizer.state_dict()
    entries = {f"{index}.{name}": value for index, entry in state["state"].items() for name, value in entry.items()}
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in entries.items() if not isinstance(value, Tensor)}
    return tensors, {"groups": state["param_groups"], "rest": rest}


def _local_moment(name: str, moment: Tensor, trainer: "Trainer") -> Tensor | LocalRows:
    """This rank's rows of a tensor of the optimiser, sharded as the parameter of its index."""
    return moment if trainer.group.size == 1 else _local_rows(moment, trainer.parameters[int(name.partition(".")[0])])


def _load_optimizer(trainer: "Trainer", tensors: CheckpointTensors, values: Mapping[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name in tensors.names("optimizer"):
        index, _, entry = name.partition(".")
        parameter, full_name = trainer.parameters[int(index)], f"optimizer.{name}"
        rows = _local_rows(parameter) if trainer.group.size > 1 else parameter
        if not isinstance(rows, LocalRows) or tensors.dims(full_name) == 0:
            moment = tensors.rows(full_name)
        else:
            moment = tensors.rows(full_name, rows.first, rows.first + len(rows.tensor)).to(rows.tensor.device)
            moment = _sharded_as(parameter, moment)
        state.setdefault(int(index), {})[entry] = moment
    for name, value in values["rest"].items():
        index, _, entry = name.partition(".")
        state.setdefault(int(index), {})[entry] = value
    # How this process computes a step is no state: it may have been another device, or without a CUDA graph.
    groups = [
        saved | {key: group[key] for key in ("capturable", "fused", "foreach") if key in group}
        for saved, group in zip(values["groups"], trainer.optimizer.param_groups, strict=True)
    ]
    trainer.optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, entries in trainer.optimizer.state.items():
        for name, moment in entries.items():
            if _other_layout(
                moment, parameter
            ):  # a file has rows one after the other; fused optimisers take one layout
                entries[name] = torch.empty_like(parameter, dtype=moment.dtype, requires_grad=False).copy_(moment)


def _other_layout(moment: Any, parameter: Tensor) -> bool:
    plain = isinstance(moment, Tensor) and moment.shape == parameter.shape and not hasattr(parameter, "to_local")
    return plain and moment.stride() != parameter.stride()


def _sharded_as(parameter: Tensor, rows: Tensor) -> Tensor:
    """Rows of this rank, sharded as the parameter is."""
    if not hasattr(parameter, "to_local"):
        return rows
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    return DTensor.from_local(
        rows.contiguous(), like.device_mesh, like.placements, shape=like.shape, stride=like.stride(), run_check=False
    )


# --- numerics and random states


def numerics(device: torch.device, ranks: int) -> dict[str, Any]:
    """What may change the last bits of a result: the order of summation depends on these."""
    return {
        "ranks": ranks,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "CPU threads": torch.get_num_threads(),
        "CPU instructions": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
    } | {name: os.environ[name] for name in _NUMERICS if name in os.environ}


def numerics_note(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A note if a run continues with other numerics than its checkpoint was written with."""
    names = [name for name in (*before, *(set(now) - set(before))) if before.get(name) != now.get(name)]
    if not names:
        return []
    both = (", ".join(f"{name} {facts.get(name, 'not set')}" for name in names) for facts in (before, now))
    return [
        "the checkpoint was written with {}, this process has {}: the run resumes, but its last bits may differ from "
        "those of a run that was never stopped".format(*both)
    ]


def seed_rank(seed: int, rank: int) -> None:
    """Seeds what a rank but 0 must draw by itself, as dropout; rank 0 draws as one process would."""
    torch.manual_seed((seed + rank * 0x9E3779B97F4A7C15) % 2**63)


def _random_state(device: torch.device, group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every generator: NumPy's, Python's and torch's; of several ranks torch's on each of them."""
    # Code of others may draw from NumPy's global generator.
    name, words, *place = np.random.get_state(legacy=True)  # noqa: NPY002
    python = random.getstate()
    values = {
        "numpy": [name, np.asarray(words).tolist(), *place],
        "python": [python[0], list(python[1]), python[2]],
    }
    tensors = {"cpu": torch.get_rng_state()}
    if group.size == 1:
        if device.type == "mps":
            tensors["mps"] = torch.mps.get_rng_state()
        if torch.cuda.is_available():
            tensors |= {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
        return tensors, values
    if device.type == "cuda":
        tensors["cuda0"] = torch.cuda.get_rng_state(device)
    ones = [1] * group.size
    by_rank = {f"{name}.ranks": collectives.gather(state[None], group.world, ones) for name, state in tensors.items()}
    return tensors | by_rank, values


def _set_random_state(
    tensors: Mapping[str, Tensor], values: Mapping[str, Any], device: torch.device, seed: int, group: ProcessGroup
) -> None:
    """Restores `_random_state`. A rank that did not exist when the checkpoint was written gets a seed of its own."""
    name, words, *place = values["numpy"]
    np.random.set_state((name, np.array(words, np.uint32), *place))  # noqa: NPY002
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    if group.size == 1:
        if "cpu" in tensors:
            torch.set_rng_state(tensors["cpu"])
        if device.type == "mps" and "mps" in tensors:
            torch.mps.set_rng_state(tensors["mps"])
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            if f"cuda{i}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda{i}"], i)
        return
    by_rank = {name.removesuffix(".ranks"): states for name, states in tensors.items() if name.endswith(".ranks")}
    own = {name: states[group.rank].clone() for name, states in by_rank.items() if group.rank < len(states)}
    if group.first:
        own = {name: state for name, state in tensors.items() if not name.endswith(".ranks")} | own
    if "cpu" in own:
        torch.set_rng_state(own["cpu"])
    elif group.rank:
        seed_rank(seed, group.rank)
    if device.type == "cuda" and "cuda0" in own:
        torch.cuda.set_rng_state(own["cuda0"], device)
