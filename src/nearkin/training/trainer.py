"""The trainer: everything that a training consists of, its parts of a step and of an epoch, and its assembly."""

import math
import random
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nearkin import evaluation
from nearkin.core import devices, files
from nearkin.data import augment
from nearkin.dist import collectives, parallel, sync_batchnorm
from nearkin.dist.global_batch import GlobalBatch
from nearkin.dist.group import ALONE, ProcessGroup
from nearkin.dist.parallel import Parallel
from nearkin.evaluation.arrays import Progress
from nearkin.losses.engine import PairLoss
from nearkin.models import Encoder
from nearkin.models.adapt import plain_state
from nearkin.samplers import EpochSampler, HardNegatives, PairPerClass
from nearkin.training import grad_cache, level_loss, run_dir, step, validation
from nearkin.training.build import adapted, build_loss, build_sampler
from nearkin.training.checkpoint import state as checkpoint_state
from nearkin.training.checkpoint.checkpoints import Checkpoints
from nearkin.training.checkpoint.state import State
from nearkin.training.compatible import CompatibleLoss
from nearkin.training.config.defaults import CAPTURABLE
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import augmentation_of
from nearkin.training.cross_retrieval import CROSS, cross_metrics
from nearkin.training.cuda_graphs import GraphedEncoder, GraphedStep
from nearkin.training.loader import Batch, BatchLoader, ItemStore, embed, on_device
from nearkin.training.metrics_log import MetricsLog
from nearkin.training.monitor import Monitor, geometry
from nearkin.training.old_rows import OldRows
from nearkin.training.optimizers import LRSchedule, build_optimizer, parameter_groups
from nearkin.training.prepare import Prepared, build_encoder
from nearkin.training.validation import HeldOut, quick_metrics

__all__ = ["PRECISIONS", "Trainer", "assemble", "seed_everything"]

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Trainer:
    """Everything that a training consists of."""

    recipe: Recipe
    out: Path
    checkpoints: Checkpoints
    device: torch.device
    encoder: Encoder
    average: AveragedModel | None
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    lr_schedule: LRSchedule
    scaler: torch.amp.GradScaler
    sampler: EpochSampler
    loader: BatchLoader
    store: ItemStore
    # Of the training items, on the device: (n,) class ids, (n, K) targets, or (n, L) class ids of levels.
    labels: Tensor
    augmentation: augment.Augmentation | None
    held_out: HeldOut  # the validation part
    graded: bool
    monitor: Monitor
    metrics_log: MetricsLog
    epochs: int
    state: State = field(default_factory=State)
    group: ProcessGroup = ALONE
    unsharded: Encoder | None = None  # of an encoder that is sharded over ranks: a copy for its complete weights
    old: OldRows | None = None  # embeddings of an old run that the new ones are to be comparable with

    def __post_init__(self) -> None:
        self.precision = PRECISIONS[self.recipe.training.precision or "fp32"]
        self.notes: list[str] = []  # for the next log line
        self.rates: step.DeviceRates | None = None
        self.graphed: GraphedEncoder | None = None
        self.graphed_step: GraphedStep | None = None
        if self.group.size == 1:
            self._use_graphs(self.recipe.training.graphs)
        if self.compiles_loss:
            parts = [part for part in self.loss.modules() if isinstance(part, PairLoss)]
            for part in parts:
                part.compile()
            if parts:
                names = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
                self.notes.append(f"a step is no CUDA graph, so the loss is compiled: {names}")
        strategy, name = self.recipe.training.strategy or "ddp", str(self.recipe.encoder.get("name"))
        self.parallel = Parallel(self.encoder, strategy, self.group, unused=name.startswith(("timm:", "hf:", "own:")))
        self.global_loss = GlobalBatch(self.loss, self.group.world) if self.group.size > 1 else self.loss
        self.old_term: nn.Module | None = None
        if self.old is not None:
            settings = self.recipe.compatible
            assert settings.method is not None and settings.weight is not None
            rows = self.old.rows[torch.from_numpy(self.loader.indices)].to(self.device)
            term = CompatibleLoss(
                rows, self.labels, settings.method, settings.weight, settings.class_share, settings.scale
            )
            self.old_term = GlobalBatch(term, self.group.world) if self.group.size > 1 else term
        self.takes_items = any(getattr(part, "item_beta", None) is not None for part in self.loss.modules())
        self.window = torch.zeros((), device=self.device)  # sum of the losses since the last log line
        self.epoch_loss = torch.zeros((), device=self.device)  # and since the epoch began
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.saved_at = self.logged_at = self.clock = time.monotonic()

    @property
    def compiles_loss(self) -> bool:
        """On a GPU, from the first step on: a step graph, which makes it needless, may end later, and numbers stay."""
        return self.device.type == "cuda" and self.graphed_step is None and not self.recipe.training.deterministic

    @property
    def best_encoder(self) -> Encoder:
        """The encoder that is validated and saved: the average, if the recipe has one.

        Of a sharded one a complete copy, for which all ranks must call this.
        """
        encoder = self.encoder if self.average is None else self.average.module
        assert isinstance(encoder, Encoder)
        if self.unsharded is None:
            return encoder
        self.unsharded.load_state_dict(checkpoint_state.full_state(encoder))
        return self.unsharded

    @property
    def augment_seed(self) -> int:
        return self.recipe.training.seed

    def train_step(self, batch: Batch, measure: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """One step on a batch: its loss and embeddings, and the norm of its gradient if it was clipped or `measure`.

        The next step may overwrite them.
        """
        if self.graphed_step is None:
            return *self.forward_backward(batch), self.optimizer_step(measure)
        rows, items, keys = step.load(self, batch)
        step.before(self)
        value, embeddings, norm = self.graphed_step(step.augmented(self, rows, keys), items)
        step.after(self)
        if self.graphed_step.reason is not None:
            self._leave_graph(self.graphed_step.reason)
        return value, embeddings, norm

    def forward_backward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Adds the gradient of one batch to the parameters; returns loss and embeddings, detached.

        Each rank encodes its part; the loss is that of the whole batch on all of them.
        """
        self.group.advance()
        rows, items, keys = step.load(self, batch)
        chunk, most = self.recipe.training.chunk, max(batch.counts)
        if chunk is None or chunk >= most:
            return step.learn(self, step.augmented(self, rows, keys), items, batch.counts)

        def encode(part: slice) -> Tensor:
            return step.encode(self, step.augmented(self, rows[part], None if keys is None else keys[part]))

        def loss_of(embeddings: Tensor) -> Tensor:
            return step.loss_of(self, embeddings, items, batch.counts)

        passes = None if self.group.size == 1 else -(-most // chunk)  # all ranks make as many
        sync = self.parallel.sync_gradients
        return grad_cache.backward(encode, len(rows), chunk, loss_of, self.encoder, self.scaler.scale, passes, sync)

    def optimizer_step(self, measure: bool) -> Tensor | None:
        """One step of the optimiser, which clears the gradient; returns its norm if it was clipped or `measure`."""
        step.before(self)
        norm = step.optimize(self, measure)
        step.after(self)
        return norm

    def _use_graphs(self, graphs: bool | str | None) -> None:
        if step.DeviceRates.serve(self.optimizer, self.device):
            self.rates = step.DeviceRates(self.optimizer, self.device)
        if graphs is True and self.rates is not None:
            self.graphed_step = step.graphed(self)
        elif graphs is True:
            self._leave_graph(f"{type(self.optimizer).__name__} computes a part of its step on the host")
        elif graphs == "encoder":
            self.graphed = GraphedEncoder(self.encoder, self.precision)

    def _leave_graph(self, reason: str) -> None:
        """Goes on without a graph of the whole step; the encoder's passes remain graphs, if it is one of ours."""
        self.graphed_step, left = None, "nothing"
        self.optimizer.zero_grad(set_to_none=True)
        if self.recipe.encoder["name"] in CAPTURABLE:
            self.graphed, left = GraphedEncoder(self.encoder, self.precision), "only the encoder"
        self.notes.append(f"a step cannot be one CUDA graph, so {left} is: {reason}")

    def log_line(self, norm: Tensor | None, embeddings: Tensor) -> dict[str, Any]:
        """The log line of the steps since the last one; the only place in the loop that waits for the device."""
        state = self.state
        if self.group.size > 1:
            embeddings = collectives.gather(embeddings, self.group.world)
        none = self.window.new_full((), math.nan)
        scalars = [self.window / max(1, state.counted), none if norm is None else norm.to(self.window)]
        loss, gradient = torch.stack(scalars).tolist()
        self.monitor.finite(state.step, loss)
        spread, rank, line_share = geometry(embeddings)
        now = time.monotonic()
        items = state.counted * len(embeddings) / max(1e-9, now - self.logged_at)
        self.window.zero_()
        state.counted, self.logged_at = 0, now
        notes = [note for note in self.notes if note not in state.notes]  # said before, by a run that was stopped
        notes += self.monitor.check(state.step, loss, gradient, spread, rank, line_share)
        self.notes = []
        line = {"event": "step", "epoch": state.epoch + 1, "step": state.step, "loss": loss}
        rates = {group["part"]: group["lr"] for group in self.optimizer.param_groups}
        line |= {"lr": rates, "gradient": gradient if math.isfinite(gradient) else None}
        line |= {"spread": spread, "effective_rank": rank, "items_per_second": items}
        return line | {"seconds": self.elapsed(), "notes": notes}

    def check(self) -> None:
        """Raises `Diverged` if the loss or a weight is not finite, before anything is measured or saved."""
        self.monitor.finite(self.state.step, float(self.window), self.parallel.all_finite(self.parameters))

    def begin_epoch(self) -> dict[str, Tensor]:
        """Switches to training mode, the backbone frozen if the recipe says so; returns the loss's parameters.

        None of them in the middle of an epoch, after a resume: how far they have moved since its start is unknown.
        """
        self.encoder.train()
        self.loss.train()
        head_first = self.state.epoch < (self.recipe.schedule.frozen_epochs or 0)
        self.encoder.freeze_backbone(head_first or self.recipe.head_only)
        self.parallel.refresh()
        if self.graphed_step is not None:
            self.graphed_step.refresh()
        return {name: p.detach().clone() for name, p in self.loss.named_parameters() if self.state.batch == 0}

    def end_epoch(
        self, before: dict[str, Tensor], mining: Callable[[str], Progress] = lambda _: _silent
    ) -> dict[str, Any]:
        """Validates on held-out classes, saves the best weights, and refreshes a sampler that mines.

        mining: makes a function that is told the progress of each part of the refresh.
        """
        state, options = self.state, self.recipe.training
        self.check()
        notes = self.monitor.epoch(state.epoch + 1, before, self.loss)
        state.epoch, state.batch = state.epoch + 1, 0
        line: dict[str, Any] = {"event": "epoch", "epoch": state.epoch, "step": state.step}
        line["loss"] = float(self.epoch_loss) / max(1, state.epoch_steps)
        self.epoch_loss.zero_()
        state.epoch_steps = 0
        if state.epoch % options.every == 0 or state.epoch == self.epochs:
            value, line["val"] = self.validate()
            self.lr_schedule.measured(value)
            line["best"] = state.best is None or value > state.best
            if line["best"]:
                self.save_best(value, line["val"])
            else:
                state.waited += 1
            if options.patience is not None and state.waited >= options.patience:
                state.finished = True
                notes.append(f"stopped early: {state.waited} validations since epoch {state.best_epoch}, none better")
        state.finished = state.finished or state.epoch >= self.epochs
        mines = hasattr(self.sampler, "refresh") and state.epoch % int(self.recipe.sampler.get("every", 1)) == 0
        if mines and not state.finished:
            self.refresh_sampler(mining)
        return line | {"seconds": self.elapsed(), "notes": notes}

    def validate(self) -> tuple[float, dict[str, float]]:
        """The present weights on the held-out classes: the main metric, and all figures.

        Beside an old run, the mean of the main metric among the new embeddings and of these against the old ones.
        """
        rows, held_out = self.embed(self.held_out.everything), self.held_out
        old = None if self.old is None else self.old.rows[torch.from_numpy(held_out.everything)]

        def measure() -> dict[str, float]:
            figures = quick_metrics(rows, held_out, self.graded, self.device)
            return figures if old is None else figures | cross_metrics(rows, old, held_out, self.graded, self.device)

        figures = self.group.on_rank0("validation", measure)
        main = validation.MAIN[self.graded]
        chosen_by = [main] if old is None else [main, CROSS + main]
        return sum(figures.get(name, -math.inf) for name in chosen_by) / len(chosen_by), figures

    def replace_lost_best(self) -> None:
        """Makes the present weights the best, if the checkpoint refers to best weights that are corrupt."""
        if self.state.best_file is None and self.state.best_epoch is not None:
            self.save_best(*self.validate())
            self.save()

    def save_best(self, value: float, figures: dict[str, float]) -> None:
        """Saves the present weights, LoRA merged, under a name that the next checkpoint refers to."""
        state = self.state
        tensors = checkpoint_state.prefixed(
            encoder=plain_state(self.best_encoder), loss=checkpoint_state.local_state(self.loss, self.group)
        )
        facts = {"epoch": state.epoch, "step": state.step, "val": figures}
        with self._explained("best weights"):
            state.best_file = self.checkpoints.write_best(state.step, tensors, facts)
        state.best = value if math.isfinite(value) else None
        state.best_epoch, state.waited = state.epoch, 0

    def _explained(self, what: str) -> AbstractContextManager[None]:
        name = f"{self.checkpoints.folder}: the {what} of step {self.state.step}"
        return files.explained(name, f"the previous one is intact: make room, then nearkin train --resume {self.out}")

    def embed(self, indices: Any, encoder: Encoder | None = None, progress: Progress | None = None) -> Tensor:
        """Embeddings (n, D) of these items by the present weights, or by another encoder, without augmentation."""
        options: dict[str, Any] = {"precision": self.precision, "group": self.group, "progress": progress}
        options["batch"] = max(64, min(512, self.recipe.training.chunk or 256))
        return embed(self.best_encoder if encoder is None else encoder, self.store, indices, **options)

    def refresh_sampler(self, mining: Callable[[str], Progress] = lambda _: _silent) -> None:
        """Gives a sampler that mines the embeddings of the training items, with the nearest negatives of each where it
        takes these, or the mean of each class."""
        rows = self.embed(self.loader.indices, progress=mining("embedding"))
        self.sampler.set_epoch(self.state.epoch)  # also after a resume in the middle of an epoch
        classes = self.labels if self.labels.dim() == 1 else self.labels[:, 0].contiguous()  # of levels the finest
        if isinstance(self.sampler, PairPerClass):
            ids = torch.from_numpy(self.sampler.class_ids)
            sums = torch.zeros(len(ids), rows.shape[1]).index_add_(0, torch.searchsorted(ids, classes.cpu()), rows)
            self.sampler.refresh(sums)
        elif isinstance(self.sampler, HardNegatives) and self.sampler.neighbours:
            on = devices.exact(self.device)
            options: dict[str, Any] = {"k": self.sampler.neighbours, "progress": mining("search"), "group": self.group}
            lists = evaluation.nearest_negatives(rows.to(on), classes.to(on), **options).indices
            self.sampler.refresh(rows, lists)
        else:
            self.sampler.refresh(rows)  # type: ignore[attr-defined]

    def elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        now = time.monotonic()
        self.state.seconds += now - self.clock
        self.clock = now
        return self.state.seconds

    def save(self) -> None:
        """Writes a checkpoint from which the run resumes to the same result, on any number of ranks."""
        self.check()
        self.elapsed()
        tensors, state = checkpoint_state.collect(self)
        with self._explained("checkpoint"), self.group.work("saving"):  # exchanges do not wait for a disk
            self.checkpoints.write(self.state.step, tensors, state)
        self.saved_at = time.monotonic()

    def restore(self) -> list[str]:
        """Resumes from the newest intact checkpoint; returns notes on corrupt ones and on changed numerics."""
        tensors, values, notes = checkpoint_state.open_newest(self.checkpoints)
        now = checkpoint_state.numerics(self.device, self.group.size)
        if not values["finished"]:
            notes += checkpoint_state.numerics_note(values.get("numerics", now), now)
        checkpoint_state.restore(self, tensors, values)
        if self.graphed_step is not None:
            self.graphed_step.reset()
        corrupt_lines = self.metrics_log.cut(self.state.step, self.state.epoch)
        return [*notes, *([corrupt_lines] if corrupt_lines else [])]


def assemble(
    prepared: Prepared,
    folder: Path,
    group: ProcessGroup = ALONE,
    weights: Mapping[str, Tensor] | None = None,
    old: OldRows | None = None,
) -> Trainer:
    """The trainer of a prepared run, at its first step. weights: of an encoder that was pretrained. old: of an old
    run, where the new one is to be compatible with it."""
    recipe, train_part, options = prepared.recipe, prepared.parts.train, prepared.recipe.training
    device, graded = group.device(recipe.device), recipe.takes_targets
    seed_everything(options.seed)
    encoder = adapted(recipe, prepared.own.wrapped or build_encoder(prepared)).to(device)
    if weights is not None:
        encoder.load_state_dict(weights)
    if options.sync_norms and group.size > 1:
        sync_batchnorm.sync(encoder, device, group)
    labels, classes, targets = _labels_or_targets(prepared, graded)
    width = None if targets is None else (1 if targets.ndim == 1 else targets.shape[1])
    targets_or_ids = targets if graded else labels
    if recipe.levels.weights is None:
        loss = build_loss(recipe, classes, encoder.dim, options.seed, width, len(train_part), prepared.own)
    else:
        targets_or_ids = level_loss.training_labels(recipe, prepared.items, train_part)
        loss = level_loss.loss_of_levels(recipe, targets_or_ids, encoder.dim, options.seed, items=len(train_part))
    loss = loss.to(device)
    with warnings.catch_warnings(record=True) as caught:  # a note of the run, not a line of Python's among the bars
        warnings.simplefilter("always")
        sampler = build_sampler(recipe, labels, targets, prepared.train_groups())
    assert options.epochs is not None
    average = unsharded = None
    if options.ema:
        ema: Any = get_ema_multi_avg_fn
        average = AveragedModel(encoder, multi_avg_fn=ema(options.ema))
    if options.strategy == "fsdp" and group.size > 1:
        unsharded = parallel.shard(encoder, device, group)
        if average is not None:
            parallel.shard(average.module, device, group)
    optimizer = build_optimizer(recipe, parameter_groups(recipe, encoder.backbone, encoder.head, loss))
    if group.rank:
        checkpoint_state.seed_rank(options.seed, group.rank)
    scaler = torch.amp.GradScaler if group.size == 1 else partial(parallel.Scaler, group=group)
    store = ItemStore(prepared.rows, device, recipe.data.size)
    return Trainer(
        recipe=recipe,
        out=folder,
        checkpoints=Checkpoints(folder / run_dir.CHECKPOINTS, prepared.origin, group),
        device=device,
        encoder=encoder,
        average=average,
        loss=loss,
        optimizer=optimizer,
        lr_schedule=LRSchedule(recipe, len(sampler), options.epochs),
        scaler=scaler(device.type, enabled=options.precision == "fp16"),
        sampler=sampler,
        loader=BatchLoader(store, train_part, sampler, options.workers, group),
        store=store,
        labels=on_device(torch.from_numpy(targets_or_ids), device),
        augmentation=augmentation_of(recipe),
        held_out=prepared.held_out("val"),
        graded=graded,
        monitor=Monitor(classes, encoder.dim, options.on_collapse),
        metrics_log=MetricsLog(folder / "metrics.jsonl", group.first),
        epochs=options.epochs,
        state=State(notes=[str(warning.message) for warning in caught]),
        group=group,
        unsharded=unsharded,
        old=old,
    )


def _silent(done: int, total: int) -> None:
    """The progress that nobody looks at."""


def _labels_or_targets(prepared: Prepared, graded: bool) -> tuple[Any, int | None, Any]:
    """Of the training items: class ids from 0 and the number of classes, or continuous targets."""
    items, train_part = prepared.items, prepared.parts.train
    if graded:
        if items.targets is None:
            raise ValueError(f'loss "{prepared.recipe.loss["name"]}" needs continuous targets, {items.name} has none')
        return None, None, items.targets[train_part]
    if items.labels is None:
        return None, None, None
    present, labels = np.unique(items.labels[train_part], return_inverse=True)
    return labels.astype(np.int64), len(present), None


def seed_everything(seed: int) -> None:
    """Seeds every generator that is not a function of (seed, epoch, index)."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - code of others may draw from it
