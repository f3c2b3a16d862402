"""Fine-tuning through CUDA graphs: the numbers are those without, also where what is trained changes."""

import os
import signal

import pytest
import torch

from commands import photos
from nearkin import training
from nearkin.models import efficientnet_lite
from nearkin.training.config.recipe import read

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

KEYS = ["encoder.name=efficientnet-lite0", "data.size=32", "data.stored=32", "encoder.dim=8", "sampler.batch=8"]
KEYS += ["sampler.per_class=2", "training.epochs=3", "training.batches=6", "training.log_steps=1", "optimizer.lr=0.01"]
KEYS += ["training.device=cuda", "evaluation.interval=false", "training.on_collapse=warn"]
KEYS += ["finetune.interpolate=false"]  # so that the trained weights are compared
CASES = {
    "head": ["finetune.train=head"],
    "lora": ["finetune.train=lora", "training.ema=0.9"],
    "head first, lora, rates": ["finetune.train=lora", "schedule.frozen_epochs=1", "finetune.layer_decay=0.75"],
    "head first, all": ["finetune.train=all", "schedule.frozen_epochs=1", "finetune.layer_decay=0.75"],
}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Random weights in place of the published ones, whose package need not be there."""

    def weights(number=0):
        torch.manual_seed(7)
        model = efficientnet_lite.EfficientNetLite(number)
        norms = [part for part in model.modules() if isinstance(part, torch.nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = 1.0
        model(2 * torch.rand(8, 3, 32, 32) - 1)  # statistics with which something reaches the end of the network
        return model.state_dict()

    monkeypatch.setattr(efficientnet_lite, "imagenet_weights", weights)
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    photos(tmp_path / "photos")
    return lambda *sets: read(None, [f"data.source={tmp_path}/photos", *KEYS, *sets])


def stop_at(step):
    def callback(event):
        if event["event"] == "step_end" and event["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return callback


def numbers(outcome):
    return [[line.get(key) for key in ("step", "loss", "gradient", "val")] for line in outcome.history]


@pytest.mark.parametrize("name", CASES)
def test_graphs_change_nothing_and_runs_resume_at_the_change(name, recipe, tmp_path):
    outcomes = {}
    for graphs in ("false", "true"):
        outcomes[graphs] = training.train(recipe(*CASES[name], f"training.graphs={graphs}"), tmp_path / graphs)
        assert not any("CUDA graph" in note for note in outcomes[graphs].notes)
    assert numbers(outcomes["true"]) == numbers(outcomes["false"])
    assert torch.equal(outcomes["true"].embeddings, outcomes["false"].embeddings)
    for step in (4, 6) if "rates" in name else (6,):  # among the head's epochs, and exactly at the change
        with pytest.raises(training.Stopped):
            training.train(recipe(*CASES[name], "training.graphs=true"), tmp_path / f"run{step}", stop_at(step))
        again = training.resume(tmp_path / f"run{step}")
        assert numbers(again) == numbers(outcomes["false"])
        weights = [
            (folder / "model.safetensors").read_bytes() for folder in (tmp_path / "false", tmp_path / f"run{step}")
        ]
        assert weights[0] == weights[1]
