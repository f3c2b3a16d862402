"""Pretraining on pictures without labels: two views of each are positives of one another; then training begins.

A pretraining is a training by the same trainer and loop: every picture is a class of its own, a batch has each of its
pictures twice, and augmentation makes two views of them. What lies between encoder and loss, the projector, is part of
the loss and goes with it. Its checkpoints and its log are beside those of the training.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearkin import losses, models
from nearkin.core import files
from nearkin.core.random import Ints, Salt, Stream, salted
from nearkin.core.versions import version_of
from nearkin.dist import parallel, sync_batchnorm
from nearkin.dist.group import ALONE, ProcessGroup
from nearkin.memory import CrossBatchMemory
from nearkin.samplers import EpochSampler
from nearkin.training.build import adapted
from nearkin.training.checkpoint import state as checkpoint_state
from nearkin.training.checkpoint.checkpoints import Checkpoints
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.unlabelled import stage_recipe, view_augmentation
from nearkin.training.loader import BatchLoader, ItemStore
from nearkin.training.loop import Callback, fit
from nearkin.training.metrics_log import MetricsLog
from nearkin.training.monitor import Monitor
from nearkin.training.optimizers import LRSchedule, build_optimizer, parameter_groups
from nearkin.training.prepare import Prepared, build_encoder
from nearkin.training.run_dir import PRETRAINING
from nearkin.training.trainer import Trainer, seed_everything
from nearkin.training.validation import HeldOut

__all__ = ["LOG", "Pretrainer", "TwoViewLoss", "TwoViews", "assemble_pretrainer", "build_view_loss", "log_of"]
__all__ += ["pretrain", "pretrained_encoder", "pretrained_weights", "summary", "write_results"]

LOG = "pretraining.jsonl"


class TwoViews(EpochSampler):
    """Batches of different items, each of them twice in a row; a pass has every item once, but for a last few.

    `batch` items per batch of 2 · `batch` rows. A pure function of (seed, epoch, index), as every sampler.
    """

    def __init__(self, count: int, batch: int, *, batches: int | None = None, seed: int = 0) -> None:
        self.count, self.items = count, batch
        super().__init__(np.arange(count), max(1, count // batch), batches, seed)
        self._add_to_fingerprint(batch)

    def _global_batch(self, pass_index: int, position: int) -> tuple[Ints, Ints]:
        order = self._shuffled(self.count, Stream.UNLABELLED, pass_index)
        items = order[position * self.items : (position + 1) * self.items]
        return np.repeat(items, 2), np.full(len(items), 2, np.int64)


class TwoViewLoss(nn.Module):
    """A loss of projected embeddings, the views of an item in neighbouring rows.

    by_side: the first views are the anchors and the second ones their references, as VICReg has them; otherwise all are
    in one batch. The projector learns with the encoder and is discarded after the pretraining.
    """

    lr_scale = 1.0

    def __init__(self, projector: nn.Module, loss: nn.Module, by_side: bool) -> None:
        super().__init__()
        self.projector, self.loss, self.by_side = projector, loss, by_side

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        z = self.projector(embeddings)
        if not self.by_side:
            return self.loss(z, labels)  # type: ignore[no-any-return]
        return self.loss(z[0::2], labels[0::2], z[1::2], labels[1::2])  # type: ignore[no-any-return]


def build_view_loss(recipe: Recipe, dim: int) -> TwoViewLoss:
    """The loss of a settled recipe's [unlabelled], its projector drawn from the seed. dim: of the embeddings."""
    options = recipe.unlabelled
    assert options.projector is not None and options.batches is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.training.seed)
        projector = _projector(dim, options.projector)
    width = options.projector[-1] if options.projector else dim
    loss: nn.Module
    if options.method == "vicreg":
        assert options.invariance is not None and options.variance is not None and options.covariance is not None
        loss = losses.VICRegLoss(options.invariance, options.variance, options.covariance)
    else:
        assert options.temperature is not None and options.queue is not None
        loss = losses.InfoNCELoss(options.temperature)
        if options.queue:  # from the second epoch on: at first embeddings drift too fast
            loss = CrossBatchMemory(loss, options.queue, width, warmup=options.batches)
    return TwoViewLoss(projector, loss, by_side=options.method == "vicreg")


def _projector(dim: int, widths: list[int]) -> nn.Module:
    """Linear layers with batch norm and ReLU between them; the last one is linear alone."""
    layers: list[nn.Module] = []
    for i, width in enumerate(widths):
        last = i == len(widths) - 1
        layers.append(nn.Linear(dim, width, bias=last))
        if not last:
            layers += [nn.BatchNorm1d(width, track_running_stats=False), nn.ReLU()]
        dim = width
    return nn.Sequential(*layers)


class Pretrainer(Trainer):
    """A trainer without validation: its epochs end with their loss, and the last weights are those that count."""

    @property
    def augment_seed(self) -> int:
        """Other views than those of the training."""
        return salted(self.recipe.training.seed, Salt.VIEWS) & (2**63 - 1)

    def end_epoch(self, before: dict[str, Tensor], mining: Any = None) -> dict[str, Any]:
        """The mean loss of the epoch."""
        state = self.state
        self.check()
        notes = self.monitor.epoch(state.epoch + 1, before, self.loss)
        state.epoch, state.batch = state.epoch + 1, 0
        line: dict[str, Any] = {"event": "epoch", "epoch": state.epoch, "step": state.step}
        line["loss"] = float(self.epoch_loss) / max(1, state.epoch_steps)
        self.epoch_loss.zero_()
        state.epoch_steps = 0
        state.finished = state.epoch >= self.epochs
        return line | {"seconds": self.elapsed(), "notes": notes}


def assemble_pretrainer(prepared: Prepared, folder: Path, group: ProcessGroup = ALONE) -> Pretrainer:
    """The trainer of a prepared run's pretraining, at its first step."""
    assert prepared.unlabelled is not None
    recipe = stage_recipe(prepared.recipe)
    options, unlabelled, rows = recipe.training, recipe.unlabelled, prepared.unlabelled.rows
    assert options.epochs is not None and unlabelled.batch is not None
    device = group.device(recipe.device)
    seed_everything(options.seed)
    own = prepared.own.wrapped
    encoder = adapted(recipe, build_encoder(prepared) if own is None else copy.deepcopy(own)).to(device)
    if options.sync_norms and group.size > 1:
        sync_batchnorm.sync(encoder, device, group)
    loss = build_view_loss(recipe, encoder.dim).to(device)
    sampler = TwoViews(len(rows), unlabelled.batch, batches=unlabelled.batches, seed=options.seed)
    fsdp = options.strategy == "fsdp" and group.size > 1
    unsharded = parallel.shard(encoder, device, group) if fsdp else None
    optimizer = build_optimizer(recipe, parameter_groups(recipe, encoder.backbone, encoder.head, loss))
    if group.rank:
        checkpoint_state.seed_rank(options.seed, group.rank)
    scaler = torch.amp.GradScaler if group.size == 1 else partial(parallel.Scaler, group=group)
    store = ItemStore(rows, device, recipe.data.size)  # type: ignore[arg-type]
    every = np.arange(len(rows))
    return Pretrainer(
        recipe=recipe,
        out=folder,
        checkpoints=Checkpoints(folder / PRETRAINING, _origin(prepared), group),
        device=device,
        encoder=encoder,
        average=None,
        loss=loss,
        optimizer=optimizer,
        lr_schedule=LRSchedule(recipe, len(sampler), options.epochs),
        scaler=scaler(device.type, enabled=options.precision == "fp16"),
        sampler=sampler,
        loader=BatchLoader(store, every, sampler, options.workers, group),
        store=store,
        labels=torch.arange(len(rows), device=device),
        augmentation=view_augmentation(recipe),
        held_out=HeldOut(every[:0], None, None),
        graded=False,
        monitor=Monitor(None, encoder.dim, options.on_collapse),
        metrics_log=MetricsLog(folder / LOG, writes=group.first),
        epochs=options.epochs,
        group=group,
        unsharded=unsharded,
    )


def _origin(prepared: Prepared) -> dict[str, str]:
    assert prepared.unlabelled is not None
    return prepared.origin | {"unlabelled": str(prepared.unlabelled.record["fingerprint"])}


def pretrain(prepared: Prepared, folder: Path, callback: Callback, group: ProcessGroup) -> list[str]:
    """Pretrains from the newest checkpoint, if there is one, to the end; returns the notes of the pretraining."""
    trainer = assemble_pretrainer(prepared, folder, group)
    options = trainer.recipe.unlabelled
    start = {"pictures": len(trainer.store.rows), "epochs": options.epochs, "batches": options.batches}
    callback({"event": "pretraining", "method": options.method, "batch": options.batch, **start})
    if group.on_rank0("looking", trainer.checkpoints.any_written):
        for note in trainer.restore():
            trainer.state.notes.append(note)
            callback({"event": "note", "text": note})
        state = trainer.state
        if not state.finished:
            facts = {"epoch": state.epoch + 1, "step": state.step, "finished": False}
            callback({"event": "resumed", "stage": "pretraining", **facts})
    else:
        group.on_rank0("looking", lambda: _check_not_started(folder))
        trainer.save()
    fit(trainer, lambda event: callback({**event, "stage": "pretraining"}))
    callback({"event": "pretrained", "steps": trainer.state.step, "seconds": trainer.state.seconds})
    return trainer.state.notes


def _check_not_started(folder: Path) -> None:
    lines = MetricsLog(folder / LOG).read()
    if lines:
        raise ValueError(
            f"{folder}: all checkpoints of its pretraining are missing, although {LOG} shows that it had reached step "
            f"{lines[-1]['step']}; restore them, or start a new run with --recipe {folder / 'recipe.toml'}"
        )


def pretrained_weights(folder: Path, group: ProcessGroup = ALONE) -> dict[str, Tensor]:
    """The encoder's weights at the end of the pretraining of a run, complete."""
    checkpoints = Checkpoints(folder / PRETRAINING, group=group)
    tensors, values, _ = checkpoint_state.open_newest(checkpoints)
    if not values["finished"]:
        raise ValueError(f"{folder / PRETRAINING}: the pretraining of this run has not ended")
    return tensors.section("encoder")


def pretrained_encoder(prepared: Prepared, folder: Path, group: ProcessGroup = ALONE) -> models.Encoder:
    """The encoder at the end of the pretraining, LoRA merged, on the CPU."""
    own = prepared.own.wrapped
    encoder = adapted(prepared.recipe, build_encoder(prepared) if own is None else copy.deepcopy(own).to("cpu"))
    encoder.load_state_dict(pretrained_weights(folder, group))
    return models.merge_lora(encoder)


def log_of(folder: Path) -> MetricsLog:
    return MetricsLog(folder / LOG)


def summary(folder: Path, prepared: Prepared) -> dict[str, Any]:
    """What results.json and the report say of the pretraining of a run: on what, how long, the loss of each epoch."""
    lines = [line for line in log_of(folder).read() if line["event"] == "epoch"]
    record = prepared.report["unlabelled"]
    content: dict[str, Any] = {"method": prepared.recipe.unlabelled.method, "pictures": record["pictures"]}
    content |= {"of_training_part": record["of_training_part"], "held_out_files": record["held_out"]["files"]}
    content["held_out_kept"] = record["held_out"]["kept"]
    content |= {"epochs": len(lines), "steps": lines[-1]["step"], "seconds": lines[-1]["seconds"]}
    return content | {"loss": [line["loss"] for line in lines]}


def write_results(prepared: Prepared, folder: Path, encoder: models.Encoder, notes: list[str]) -> dict[str, Any]:
    """Saves the encoder and results.json of a run that ends with its pretraining."""
    way_out = f"the pretraining is done and saved: make room, then nearkin train --resume {folder}"
    facts = summary(folder, prepared)
    content: dict[str, Any] = {"nearkin": version_of("nearkin"), "source": prepared.recipe.data.source}
    content |= {"protocol": prepared.parts.note, "items": {"train": len(prepared.parts.train)}, "pretraining": facts}
    content |= {"device": str(prepared.recipe.device), "epochs": facts["epochs"], "steps": facts["steps"]}
    content |= {"seconds": facts["seconds"], "notes": notes}
    with files.explained(f"{folder}: the encoder", way_out):
        models.save(encoder, folder, prepared.preparation, None)
        files.write_json(folder / "results.json", content)
    return content
