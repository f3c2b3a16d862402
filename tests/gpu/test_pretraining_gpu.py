"""Pretraining on a GPU: by CUDA graphs it gives the numbers without, and it resumes. Skipped without a CUDA device."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin import losses, training
from nearkin.training.config.recipe import read

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

SETS = ["encoder.name=small-cnn", "encoder.width=8", "encoder.dim=16", "data.size=32", "data.stored=32"]
SETS += ["training.device=cuda", "training.epochs=1", "training.batches=3", "training.log_steps=1"]
SETS += ["sampler.batch=16", "sampler.per_class=2", "data.cache=false", "training.precision=fp32"]
SETS += ["unlabelled.own_part=true", "unlabelled.batch=32", "unlabelled.batches=10", "unlabelled.epochs=3"]
METHODS = {
    "infonce": ["unlabelled.method=infonce", "unlabelled.queue=300"],
    "vicreg": ["unlabelled.projector=[32,32]"],
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(200):
        pixels = rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)
        pixels[4:20, 4 : 6 + number // 10] = 12 * (number // 10)
        (folder / f"class{number // 10}").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"class{number // 10}" / f"{number}.png")
    return folder


def curve(out):
    lines = [json.loads(line) for line in (out / "pretraining.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if line["event"] == "step"])


def run(photos, out, *sets, callback=None):
    return training.train(read(None, [f'data.source="{photos}"', *SETS, *sets]), out, callback)


@pytest.mark.parametrize("method", METHODS)
def test_graphs_give_the_numbers_without(method, photos, tmp_path):
    """Over 30 steps of both, and no note says that a graph was left."""
    outcomes = [run(photos, tmp_path / name, *METHODS[method], f"training.graphs={name}") for name in ("true", "false")]
    np.testing.assert_allclose(curve(tmp_path / "true"), curve(tmp_path / "false"), rtol=2e-3)
    assert len(curve(tmp_path / "true")) == 30
    assert not [note for note in outcomes[0].notes if "graph" in note]


@pytest.mark.parametrize("method", METHODS)
def test_a_pretraining_resumes_on_a_gpu(method, photos, tmp_path):
    def callback(event):
        if event["event"] == "step_end" and event["step"] == 17 and event.get("stage") == "pretraining":
            os.kill(os.getpid(), signal.SIGTERM)

    run(photos, tmp_path / "whole", *METHODS[method])
    with pytest.raises(training.Stopped):
        run(photos, tmp_path / "run", *METHODS[method], callback=callback)
    training.resume(tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_vicreg_on_a_gpu_is_that_of_the_cpu():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 48, generator=generator) for _ in range(2))
    ids = torch.arange(64)
    values = []
    for device in ("cpu", "cuda"):
        x, y = (t.detach().to(device).requires_grad_() for t in (a, b))
        value = losses.VICRegLoss()(x, ids.to(device), y, ids.to(device))
        value.backward()
        values.append([value.detach().cpu(), x.grad.cpu(), y.grad.cpu()])
    for one, other in zip(*values, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
