"""The trainer: everything that a training consists of, and what it does in a step and at the end of an epoch."""

import math
import random
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nearkin.core import files
from nearkin.data import augment
from nearkin.dist import collectives, environment, parallel
from nearkin.dist.global_batch import GlobalBatch, average_gradients
from nearkin.dist.group import ALONE, ProcessGroup
from nearkin.dist.parallel import Parallel
from nearkin.models import Encoder
from nearkin.samplers import EpochSampler, PairPerClass
from nearkin.training import grad_cache, validation
from nearkin.training.checkpoint import state as checkpoint_state
from nearkin.training.checkpoint.checkpoints import Checkpoints
from nearkin.training.checkpoint.state import State
from nearkin.training.config.recipe import Recipe
from nearkin.training.cuda_graphs import GraphedEncoder
from nearkin.training.loader import Batch, BatchLoader, ItemStore, embed
from nearkin.training.metrics_log import MetricsLog
from nearkin.training.monitor import Monitor, geometry
from nearkin.training.optimizers import LRSchedule
from nearkin.training.validation import HeldOut, quick_metrics

__all__ = ["PRECISIONS", "Trainer", "seed_everything"]

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
    rate: LRSchedule
    scaler: torch.amp.GradScaler
    sampler: EpochSampler
    loader: BatchLoader
    store: ItemStore
    known: Tensor  # (n,) or (n, K) labels or targets of the training items, on the device
    augmentation: augment.Augmentation | None
    held: HeldOut  # the validation part
    graded: bool
    monitor: Monitor
    journal: MetricsLog
    epochs: int
    state: State = field(default_factory=State)
    group: ProcessGroup = ALONE
    plain: Encoder | None = None  # of an encoder that is spread over ranks: a copy to be filled with whole weights

    def __post_init__(self) -> None:
        self.precision = PRECISIONS[self.recipe.training.precision or "fp32"]
        graphs = self.recipe.training.graphs and self.group.size == 1
        self.graphed = GraphedEncoder(self.encoder, self.precision) if graphs else None
        strategy, name = self.recipe.training.strategy or "ddp", str(self.recipe.encoder.get("name"))
        self.parallel = Parallel(self.encoder, strategy, self.group, unused=name.startswith(("timm:", "hf:", "own:")))
        self.objective = GlobalBatch(self.loss) if self.group.size > 1 else self.loss
        self.per_item = any(getattr(part, "item_beta", None) is not None for part in self.loss.modules())
        self.window = torch.zeros((), device=self.device)  # sum of the losses since the last log line
        self.epoch_loss = torch.zeros((), device=self.device)  # and since the epoch began
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.saved_at = self.looked_at = self.clock = time.monotonic()

    @property
    def best_encoder(self) -> Encoder:
        """The one that is measured and kept: the averaged one, where the recipe wants an average.

        Of one that is spread over ranks a whole copy, which all of them must ask for.
        """
        found = self.encoder if self.average is None else self.average.module
        assert isinstance(found, Encoder)
        if self.plain is not None:
            self.plain.load_state_dict(checkpoint_state.full_state(found))
            return self.plain
        return found

    def forward_backward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The gradient of one batch, added to the parameters: loss and embeddings, detached.

        Of several ranks each encodes its part; the loss is that of the whole batch on all of them.
        """
        self.group.advance()
        rows = batch.rows.to(self.device, non_blocking=True)
        items = torch.from_numpy(batch.items[batch.part]).to(self.device)
        known = self.known[items]
        own = {"items": items} if self.per_item else {}  # for a loss that learns something per training item
        keys = None
        if self.augmentation is not None:  # of all ranks' items: one that comes twice is seen as two
            keys = augment.keys(self.state.epoch, batch.number, torch.from_numpy(batch.items))[batch.part]

        def encode(places: slice) -> Tensor:
            seen = rows[places]
            if self.augmentation is not None:
                assert self.store.size is not None and keys is not None
                seed = self.recipe.training.seed
                seen = augment.warp(seen, keys[places], size=self.store.size, augmentation=self.augmentation, seed=seed)
            elif self.store.size is not None:
                seen = augment.centre(seen, self.store.size)
            if self.graphed is not None:
                embeddings = self.graphed(seen)
            else:
                with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
                    embeddings = self.parallel(seen)
            self.group.advance()
            return embeddings.float() if self.precision is not None else embeddings

        def objective(embeddings: Tensor) -> Tensor:
            if self.group.size == 1:
                return self.loss(embeddings, known, **own)  # type: ignore[no-any-return]
            return self.objective(embeddings, known, counts=batch.counts, **own)  # type: ignore[no-any-return]

        chunk, most = self.recipe.training.chunk, max(batch.counts)
        if chunk is not None and chunk < most:
            passes = None if self.group.size == 1 else -(-most // chunk)  # all ranks make as many
            more: dict[str, Any] = {"passes": passes, "sync_gradients": self.parallel.sync_gradients}
            return grad_cache.backward(encode, len(rows), chunk, objective, self.encoder, self.scaler.scale, **more)
        embeddings = encode(slice(None))
        value = objective(embeddings)
        self.scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        return value.detach(), embeddings.detach()

    def optimizer_step(self, measure: bool) -> Tensor | None:
        """One step of the optimiser along the gradient, which is then gone; its norm if it was clipped or asked for."""
        norm, clip = None, self.recipe.optimizer.clip
        several = self.group.size > 1
        if several:
            average_gradients(self.loss)
            parallel.average_norms(self.encoder)
        if clip or measure:
            self.scaler.unscale_(self.optimizer)
            if several:
                norm = parallel.global_norm(self.parameters)
                if clip:
                    parallel.clip(self.parameters, clip, norm)
            else:
                with_gradient = [p for p in self.parameters if p.grad is not None]
                norm = nn.utils.get_total_norm([p.grad for p in with_gradient if p.grad is not None])
                if clip:
                    nn.utils.clip_grads_with_norm_(with_gradient, clip, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.encoder)
        return norm

    def log_line(self, norm: Tensor | None, embeddings: Tensor) -> dict[str, Any]:
        """The log line of the steps since the last one; the only place in the loop that waits for the device."""
        state, embeddings = self.state, embeddings if self.group.size == 1 else collectives.gather(embeddings)
        none = self.window.new_full((), math.nan)
        scalars = [self.window / max(1, state.counted), none if norm is None else norm.to(self.window)]
        loss, gradient = torch.stack(scalars).tolist()
        self.monitor.finite(state.step, loss)
        spread, rank, line_share = geometry(embeddings)
        now = time.monotonic()
        items = state.counted * len(embeddings) / max(1e-9, now - self.looked_at)
        self.window.zero_()
        state.counted, self.looked_at = 0, now
        notes = self.monitor.check(state.step, loss, gradient, spread, rank, line_share)
        line = {"event": "step", "epoch": state.epoch + 1, "step": state.step, "loss": loss}
        rates = {group["part"]: group["lr"] for group in self.optimizer.param_groups}
        line |= {"lr": rates, "gradient": gradient if math.isfinite(gradient) else None}
        line |= {"spread": spread, "effective_rank": rank, "items_per_second": items}
        return line | {"seconds": self.elapsed(), "notes": notes}

    def check(self) -> None:
        """Raises `Diverged` before anything is measured or kept that nothing can go on from."""
        sound = [parallel.local(p.detach()).isfinite().all() for p in self.parameters]
        self.monitor.finite(self.state.step, float(self.window), bool(torch.stack(sound).all()))

    def begin_epoch(self) -> dict[str, Tensor]:
        """Everything in training mode, the backbone frozen where it should rest; the loss's parameters as they are.

        Of an epoch that goes on after a stop none: how far they have moved since its beginning is not known.
        """
        self.encoder.train()
        self.loss.train()
        rest = self.state.epoch < self.recipe.schedule.frozen_epochs
        self.encoder.freeze_backbone(rest or bool(self.recipe.encoder.get("freeze_backbone")))
        self.parallel.refresh()
        return {name: p.detach().clone() for name, p in self.loss.named_parameters() if self.state.batch == 0}

    def end_epoch(self, before: dict[str, Tensor]) -> dict[str, Any]:
        """The sampler sees the classes anew; held-out classes are measured; the best weights are kept."""
        state, options = self.state, self.recipe.training
        self.check()
        notes = self.monitor.epoch(state.epoch + 1, before, self.loss)
        state.epoch, state.batch = state.epoch + 1, 0
        line: dict[str, Any] = {"event": "epoch", "epoch": state.epoch, "step": state.step}
        line["loss"] = float(self.epoch_loss) / max(1, state.epoch_steps)
        self.epoch_loss.zero_()
        state.epoch_steps = 0
        if state.epoch % options.every == 0 or state.epoch == self.epochs:
            value, line["val"] = self.measured()
            self.rate.measured(value)
            line["best"] = state.best is None or value > state.best
            if line["best"]:
                self.keep_best(value, line["val"])
            else:
                state.waited += 1
            if options.patience is not None and state.waited >= options.patience:
                state.finished = True
                notes.append(f"stopped early: {state.waited} validations since epoch {state.best_epoch}, none better")
        state.finished = state.finished or state.epoch >= self.epochs
        if hasattr(self.sampler, "refresh") and not state.finished:
            self.refresh_sampler()
        return line | {"seconds": self.elapsed(), "notes": notes}

    def measured(self) -> tuple[float, dict[str, float]]:
        """The held-out classes, by the weights as they are: the main metric, and all figures."""
        rows = self.embedded(self.held.everything)
        figures = self.group.on_rank0("validation", lambda: quick_metrics(rows, self.held, self.graded, self.device))
        return figures.get(validation.MAIN[self.graded], -math.inf), figures

    def replace_lost_best(self) -> None:
        """The weights as they are become the best, where a checkpoint was found without those that it refers to."""
        if self.state.best_file is None and self.state.best_epoch is not None:
            self.keep_best(*self.measured())
            self.save()

    def keep_best(self, value: float, figures: dict[str, float]) -> None:
        """The weights as they are, under a name that the next checkpoint refers to."""
        state = self.state
        tensors = checkpoint_state.prefixed(
            encoder=self.best_encoder.state_dict(), loss=checkpoint_state.local_state(self.loss, self.group)
        )
        facts = {"epoch": state.epoch, "step": state.step, "val": figures}
        with self.explained("best weights"):
            state.best_file = self.checkpoints.write_best(state.step, tensors, facts)
        state.best = value if math.isfinite(value) else None
        state.best_epoch, state.waited = state.epoch, 0

    def explained(self, what: str) -> AbstractContextManager[None]:
        name = f"{self.checkpoints.folder}: the {what} of step {self.state.step}"
        return files.explained(name, f"the previous one is intact: make room, then nearkin train --resume {self.out}")

    def embedded(self, indices: Any) -> Tensor:
        batch = max(64, min(512, self.recipe.training.chunk or 256))
        return embed(self.best_encoder, self.store, indices, batch=batch, precision=self.precision, group=self.group)

    def refresh_sampler(self) -> None:
        """Samplers that mine classes get the embeddings of the training items, or the mean of each class."""
        rows = self.embedded(self.loader.indices)
        self.sampler.set_epoch(self.state.epoch)  # an epoch that went on after a stop is over as well
        if isinstance(self.sampler, PairPerClass):
            ids = torch.from_numpy(self.sampler.class_ids)
            sums = torch.zeros(len(ids), rows.shape[1]).index_add_(0, torch.searchsorted(ids, self.known.cpu()), rows)
            self.sampler.refresh(sums)
        else:
            self.sampler.refresh(rows)  # type: ignore[attr-defined]

    def elapsed(self) -> float:
        now = time.monotonic()
        self.state.seconds += now - self.clock
        self.clock = now
        return self.state.seconds

    def save(self) -> None:
        """A checkpoint of everything, from which the run goes on to the same end, on any number of ranks."""
        self.check()
        self.elapsed()
        tensors, state = checkpoint_state.collect(self)
        with self.explained("checkpoint"), self.group.work("saving"):  # exchanges do not wait for a disk
            self.checkpoints.write(self.state.step, tensors, state)
        self.saved_at = time.monotonic()

    def restore(self) -> list[str]:
        """Goes back to the newest whole checkpoint; what was wrong with newer ones, and what is not as it was."""
        tensors, state, notes = checkpoint_state.open_newest(self.checkpoints)
        now = environment.numerics(self.device, self.group.size)
        changed = None if state["finished"] else environment.difference(state.get("numerics", now), now)
        checkpoint_state.restore(self, tensors, state)
        damaged = self.journal.cut(self.state.step, self.state.epoch)
        return [*notes, *([changed] if changed else []), *([damaged] if damaged else [])]


def seed_everything(seed: int) -> None:
    """Every generator that is not a function of (seed, epoch, index) starts from the same place."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  other people's code may draw from it
