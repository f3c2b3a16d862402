"""A pretrained encoder for tests that trains in a moment: a tiny ViT of transformers, saved as if it were published."""

import json

import pytest
import torch

PLAN = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
PLAN |= {"image_size": 32, "patch_size": 8}


def save(folder, **changes):
    transformers = pytest.importorskip("transformers", reason="extra hf is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    transformers.ViTModel(transformers.ViTConfig(**(PLAN | changes))).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    return folder
