"""`nearkin.compat.huggingface`: the Trainer trains with it, and its figures are those of the evaluation itself."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin import evaluation, losses
from nearkin.compat import pml
from nearkin.compat.huggingface import EmbeddingModel, parameter_groups, retrieval_metrics

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "huggingface.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def rows(seed, items=8):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(3).repeat_interleave(items)
    means = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return means[labels] + 2 * torch.randn(len(labels), 3, 8, 8, generator=g), labels


def as_items(seed):
    return [{"pixel_values": x, "labels": int(label)} for x, label in zip(*rows(seed), strict=True)]


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_the_page(tmp_path):
    pytest.importorskip("transformers", reason="extra hf is not installed")
    pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    quiet = {"disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
    known = {"folder": tmp_path, "train_set": as_items(1), "test_set": as_items(2), "quiet": quiet}
    torch.manual_seed(0)
    exec(BLOCKS[0], known)
    scores, model = known["scores"], known["model"]
    inputs, labels = rows(2)
    with torch.no_grad():
        expected = evaluation.retrieval(model(inputs)["embeddings"], labels, ks=(1, 5))
    for name, value in expected.items():
        assert scores[f"eval_{name}"] == pytest.approx(value), name
    assert scores["eval_recall@1"] > 0.5 and scores["eval_loss"] > 0


def test_the_dataset_of_the_page(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    pictures = [Image.fromarray(np.full((8, 8, 3), i, np.uint8)) for i in range(12)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["heron", "ibis"])})
    part = datasets.Dataset.from_dict({"image": pictures, "label": [i % 2 for i in range(12)]}, features=features)
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "birds")
    *lines, last = BLOCKS[1].strip().splitlines()
    known = {"folder": tmp_path}
    exec("\n".join(lines), known)
    assert eval(last, known) == (24, ["heron", "ibis"], ["test", "train"]) and len(known["chosen"]) == 12


def test_metrics_are_exact_and_refuse_other_outputs():
    embeddings, labels = rows(3)
    flat = embeddings.flatten(1).numpy()
    compute = retrieval_metrics(ks=(1, 2), metrics=("recall", "map"))
    expected = evaluation.retrieval(flat, labels.numpy(), ks=(1, 2), metrics=("recall", "map"))
    assert compute(SimpleNamespace(predictions=flat, label_ids=labels.numpy())) == dict(expected)
    with pytest.raises(ValueError, match="embeddings alone beside its loss, got 2 outputs"):
        compute(SimpleNamespace(predictions=(flat, flat), label_ids=labels))


def test_models_with_and_without_labels_miners_and_outputs_of_transformers():
    inputs, labels = rows(4)
    encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))
    miner = pml.miners.BatchHardMiner()
    model = EmbeddingModel(encoder, pml.losses.TripletMarginLoss(), miner)
    output = model(pixel_values=inputs, labels=labels)
    expected = pml.losses.TripletMarginLoss()(encoder(inputs), labels, miner(encoder(inputs), labels))
    assert torch.equal(output["loss"], expected) and set(model(inputs)) == {"embeddings"}

    class Tokens(torch.nn.Module):
        def forward(self, pixel_values, mask=None):
            states = pixel_values.flatten(2)
            return SimpleNamespace(last_hidden_state=states, pooler_output=None if mask is None else states[:, 1])

    model = EmbeddingModel(Tokens(), losses.SupConLoss())
    assert torch.equal(model(inputs)["embeddings"], inputs.flatten(2)[:, 0])
    assert torch.equal(model(inputs, mask=True)["embeddings"], inputs.flatten(2)[:, 1])
    with pytest.raises(ValueError, match=r"must give \(B, D\) embeddings, got"):
        EmbeddingModel(torch.nn.Identity(), losses.SupConLoss())(inputs)


def test_parameters_of_the_loss_have_their_own_rate():
    model = EmbeddingModel(torch.nn.Linear(4, 3), losses.ProxyAnchorLoss(5, 3))
    first, second = parameter_groups(model, 1e-3, 0.1)
    assert first["lr"] == 1e-3 and second["lr"] == pytest.approx(0.1) and second["weight_decay"] == 0
    assert len(parameter_groups(EmbeddingModel(torch.nn.Linear(4, 3), losses.SupConLoss()), 1e-3)) == 1


def test_nothing_of_hugging_face_is_imported():
    code = "import sys, nearkin.compat.huggingface; assert not {'transformers', 'accelerate'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
