"""Weight interpolation on a GPU: bfloat16, steps as CUDA graphs, and the same choice after a cut."""

import sys

import pytest
import torch

import standin
from nearkin import training
from nearkin.training.config.recipe import read

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SETS = [text for text in standin.SETS if "device" not in text] + ["training.device=cuda"]


class Cut(BaseException):
    """The machine goes down."""


@pytest.mark.parametrize("sets", [[], ["training.precision=fp32"], ["optimizer.lr=3", "training.on_collapse=warn"]])
def test_a_gpu_chooses_and_resumes_to_the_same_bits(sets, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    standin.install()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    standin.pictures(tmp_path / "hues")
    recipe = read(None, [*SETS, *sets])
    reference = training.train(recipe, tmp_path / "reference")
    facts = reference.results["interpolation"]
    assert facts["chosen"] == ("frozen" if "optimizer.lr=3" in sets else "finetuned")
    assert facts["dim"] == reference.embeddings.shape[1]
    assert facts["curve"][-1]["value"] == reference.results["val"]["map@r"]

    def cut(event):
        if event.get("what") == "a = 0.5":
            raise Cut

    with pytest.raises(Cut):
        training.train(recipe, tmp_path / "run", cut)
    again = training.resume(tmp_path / "run")
    assert again.results["interpolation"] == facts
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "reference/model.safetensors").read_bytes()
