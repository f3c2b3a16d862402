"""Devices without float64, as Apple's GPUs (mps), played by the CPU: what would run on one creates no float64.

The CPU is said to have no float64 and no values that are free to read, and a mode refuses every operation that returns
float64. What remains to be seen on a real one is whether torch has every operation there.
"""

import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from commands import noisy_vectors, photos
from loss_checks.devices import NoFloat64
from nearkin import models, training
from nearkin.core import checks, devices, distances
from nearkin.dist.group import ProcessGroup
from nearkin.training import loader, trainer
from nearkin.training.class_weights import ClassWeightOptimizer
from nearkin.training.config.recipe import read
from nearkin.training.grad_cache import uses_batch_statistics


@pytest.fixture
def without_float64(monkeypatch):
    monkeypatch.setattr(devices, "has_float64", lambda device: False)
    monkeypatch.setattr(distances, "freely_read", lambda x: False)


def test_the_mode_sees_what_it_must():
    with NoFloat64():
        torch.rand(3).add(1.5)
        with pytest.raises(AssertionError, match="returns float64"):
            torch.rand(3).double()
        with pytest.raises(AssertionError, match="returns float64"):
            distances.euclidean(torch.rand(3, 2))


def test_the_class_weight_optimizer_needs_no_float64(without_float64):
    def moved(steps=3):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))
        optimizer = ClassWeightOptimizer([weight], lr=0.1)
        for step in range(steps):
            weight.grad = torch.sin(torch.arange(24.0) + step).view(4, 6)
            optimizer.step()
        return weight.detach()

    with NoFloat64():
        narrow = moved()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "has_float64", lambda device: True)
        assert (narrow - moved()).abs().max() < 1e-5


@contextmanager
def on_the_device(monkeypatch):
    """A training whose work on the device refuses float64; metrics and samplers work on the CPU, as they do on mps."""

    def guarded(owner, name):
        function = getattr(owner, name)

        def inside(*args, **kwargs):
            with NoFloat64():
                return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, inside)

    guarded(trainer.Trainer, "train_step")
    guarded(loader, "_embed_alone")
    yield


KEYS = ["training.epochs=2", "training.batches=3", "sampler.batch=8", "training.log_steps=1", "training.workers=0"]
KEYS += ["training.device=cpu", "encoder.dim=8", "training.on_collapse=warn", "evaluation.clustering=true"]
RUNS = {
    "vectors": ["encoder.hidden=[8]"],
    "memory, average, clip": ["encoder.hidden=[8]", "loss.name=contrastive", "memory.size=32", "training.ema=0.9",
                              "optimizer.clip=1"],
    "chunks": ["encoder.hidden=[8]", "encoder.dropout=0.2", "training.chunk=3", "loss.name=arcface"],
    "rowwise": ["encoder.hidden=[8]", "loss.name=proxy-anchor", "optimizer.class_weights=rowwise"],
    "distance_weighted": ["encoder.hidden=[8]", "loss.name=margin", "optimizer.name=sgd"],
    "targets": ["encoder.hidden=[8]", "evaluation.clustering=false"],
    "pictures": ["encoder.name=small-cnn", "encoder.width=4", "data.size=16", "data.stored=16",
                 "training.precision=bf16"],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_training_needs_no_float64_on_its_device(name, without_float64, monkeypatch, tmp_path):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "vectors.npz"
    noisy_vectors(source, 12)
    if name == "targets":
        stored = np.load(source)
        np.savez(source, embeddings=stored["embeddings"], targets=stored["embeddings"][:, :2])
    if name == "pictures":
        source = photos(tmp_path / "photos")
    with on_the_device(monkeypatch):
        outcome = training.train(read(None, [f"data.source={source}", *KEYS, *RUNS[name]]), tmp_path / "run")
    assert all(np.isfinite(line["loss"]) for line in outcome.history)
    assert outcome.results["test"]["trained"]


@pytest.mark.parametrize("name", ["efficientnet-lite0", "small-cnn"])
def test_encoders_need_no_float64(name, without_float64):
    with NoFloat64():
        encoder = models.build(name, size=32, dim=4, **({"pretrained": False} if "lite" in name else {}))
        if "lite" in name:
            models.add_lora(encoder)
        encoder.train()(torch.rand(4, *encoder.shape)).square().sum().backward()
        assert uses_batch_statistics(encoder) == (name == "small-cnn")


def test_mps_is_accepted_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert checks.device("mps") == torch.device("mps") == read(None, ["training.device=mps"]).device
    assert devices.exact(torch.device("mps")) == torch.device("cpu")
    assert not devices.has_float64(torch.device("mps")) and devices.has_float64(torch.device("cuda"))


def test_mps_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device mps is not available here; use --device cpu"):
        checks.device("mps")


@pytest.mark.skipif(sys.platform == "darwin", reason="there may be one")
def test_the_command_line_takes_mps(tmp_path):
    from commands import output_of, run

    noisy_vectors(tmp_path / "vectors.npz", 8)
    for command in (["train", tmp_path / "vectors.npz"], ["evaluate", tmp_path / "vectors.npz"]):
        text = output_of(run(*command, "--device", "mps"), 2)
        assert "mps is not available here" in " ".join(text.split())


def test_mps_takes_one_process_and_no_fp16(tmp_path, monkeypatch):
    group = ProcessGroup.__new__(ProcessGroup)
    group.__dict__["size"] = 2
    with pytest.raises(ValueError, match=r"training\.device=mps takes one process, got 2 ranks"):
        group.device(torch.device("mps"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    noisy_vectors(tmp_path / "vectors.npz", 12)
    recipe = read(None, [f"data.source={tmp_path}/vectors.npz", "training.device=mps", "training.precision=fp16"])
    with pytest.raises(ValueError, match=r"training\.precision must be fp32 or bf16 with training\.device=mps, got"):
        training.train(recipe, tmp_path / "run")
