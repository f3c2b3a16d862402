"""Runs of the trainer, step by step, and everything they leave behind: to compare them with and without graphs."""

import numpy as np
import torch

from nearkin.training.checkpoint import state as checkpoint_state
from nearkin.training.config.recipe import read
from nearkin.training.loop import deterministic
from nearkin.training.prepare import prepare
from nearkin.training.trainer import assemble

# Every loss with its defaults, and what takes another road through a step: draws, schedules, queues, sampled classes.
VARIANTS = {
    "triplet, semihard": ["loss.name=triplet", "loss.selection=semihard"],
    "triplet, batch_hard": ["loss.name=triplet", "loss.selection=batch_hard"],
    "triplet, distance_weighted": ["loss.name=triplet", "loss.selection=distance_weighted"],
    "margin, fitted": ["loss.name=margin", "loss.sampling_dim=fitted"],
    "triplet, random": ["loss.name=triplet", "loss.selection=random"],
    "contrastive, distance_weighted": [
        "loss.name=contrastive",
        "loss.selection=distance_weighted",
        "loss.normalize=true",
    ],
    "arcface, 3 centres": ["loss.name=arcface", "loss.sub_centers=3"],
    "arcface, sampled": ["loss.name=arcface", "loss.sample_rate=0.5"],
    "proxy-nca, softmax": ["loss.name=proxy-nca", "loss.form=softmax"],
    "heated": ["loss.name=heated-softmax", "loss.heat_after=7", "loss.norm=batch"],
    "supcon, memory": ["loss.name=supcon", "memory.size=256"],
    "contrastive, memory": ["loss.name=contrastive", "memory.size=100", "memory.warmup=5"],
    "adacos, short": ["loss.name=adacos", "loss.matryoshka=[8, 4]"],
    "center, short": ["loss.name=center", "loss.matryoshka=[8, 4]"],
    "margin, short": ["loss.name=margin", "loss.matryoshka=[8, 4]"],
    "supcon, memory, short": ["loss.name=supcon", "memory.size=256", "loss.matryoshka=[8, 4]"],
    "sgd": ["loss.name=supcon", "optimizer.name=sgd"],
    "rmsprop": ["loss.name=supcon", "optimizer.name=rmsprop"],
    "clip, ema": ["loss.name=supcon", "optimizer.clip=0.5", "training.ema=0.9"],
    "fp16": ["loss.name=supcon", "training.precision=fp16"],
    "fp16, clip, arcface": ["loss.name=arcface", "training.precision=fp16", "optimizer.clip=0.5"],
    "fp32": ["loss.name=supcon", "training.precision=fp32"],
}


def write_sources(folder):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(120), 12)
    rows = (rng.normal(size=(120, 20))[labels] + 0.7 * rng.normal(size=(len(labels), 20))).astype(np.float32)
    np.savez(folder / "vectors.npz", embeddings=rows, labels=labels)
    np.savez(folder / "targets.npz", embeddings=rows, targets=rows[:, :2])


def trainer_of(folder, sets, graphs, source="vectors.npz"):
    options = [f"data.source={folder / source}", "encoder.dim=16", "sampler.batch=64", "training.batches=60"]
    options += ["training.epochs=2", "training.device=cuda", f"training.graphs={graphs}"]
    return assemble(prepare(read(None, [*options, *sets])), folder / "run")


def advance(trainer, steps):
    """Trains; returns the loss of each step."""
    values, state = [], trainer.state
    with deterministic(True):
        trainer.begin_epoch()
        for batch in trainer.loader.epoch(state.epoch, state.batch):
            trainer.lr_schedule.set(trainer.optimizer, state.step)
            value, _, _ = trainer.train_step(batch, measure=state.step % 5 == 0)
            values.append(value.clone())
            state.step, state.batch = state.step + 1, batch.number + 1
            if len(values) == steps:
                break
    return torch.stack(values).tolist()


def state_of(trainer):
    """All that a checkpoint would hold: weights, buffers, the optimiser's state, random states, the average."""
    tensors, values = checkpoint_state.collect(trainer)
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, values


def interrupted(make_first, make_second, cut, steps, folder):
    """Losses of a run of `steps` steps that was stopped after `cut` of them, and resumed by another trainer."""
    folder.mkdir(parents=True)
    started = make_first()
    losses = advance(started, cut)
    started.checkpoints.folder = folder
    started.save()
    resumed = make_second()
    resumed.out.mkdir(exist_ok=True)
    resumed.checkpoints.folder = folder
    notes = resumed.restore()
    assert not notes, notes
    return losses + advance(resumed, steps - cut)


def differences(one, other):
    """Names of the tensors that are not equal to the last bit, NaN included."""
    names = [name for name in one if not torch.equal(_bits(one[name]), _bits(other[name]))]
    return names + sorted(set(one) ^ set(other))


def _bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
