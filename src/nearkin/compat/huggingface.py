"""nearkin in Hugging Face's Trainer: a model that returns its loss and embeddings, and metrics that are exact.

`EmbeddingModel` and `retrieval_metrics` need torch alone; the Trainer needs `transformers` and `accelerate`. See
docs/howto/huggingface.md. Hugging Face datasets as a source: `data.load("hf-dataset:…")`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from nearkin import evaluation

__all__ = ["EmbeddingModel", "parameter_groups", "retrieval_metrics"]


class EmbeddingModel(nn.Module):
    """An encoder and a loss as the Trainer takes them: model(pixel_values, labels) → {"loss", "embeddings"}.

    encoder: gives (B, D), or an output of transformers, of which the pooled row or the first token is taken. Its
    keyword arguments are the columns of a batch. miner: of `nearkin.compat.pml.miners`.
    """

    accepts_loss_kwargs = False  # the Trainer itself divides by the number of accumulated batches

    def __init__(self, encoder: nn.Module, loss: nn.Module, miner: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder, self.loss, self.miner = encoder, loss, miner

    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **inputs: Any
    ) -> dict[str, Tensor]:
        """The loss where labels are given, and the embeddings."""
        if pixel_values is not None:
            inputs = {"pixel_values": pixel_values, **inputs} if inputs else inputs
        output = self.encoder(**inputs) if inputs else self.encoder(pixel_values)
        embeddings = _rows(output)
        if labels is None:
            return {"embeddings": embeddings}
        mined = () if self.miner is None else (self.miner(embeddings, labels),)
        return {"loss": self.loss(embeddings, labels, *mined), "embeddings": embeddings}


def _rows(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        pooled = getattr(output, "pooler_output", None)
        output = output.last_hidden_state[:, 0] if pooled is None else pooled
    if output.dim() != 2:
        raise ValueError(f"the encoder must give (B, D) embeddings, got {tuple(output.shape)}")
    rows: Tensor = output
    return rows


def retrieval_metrics(ks: Sequence[int] | None = None, **options: Any) -> Callable[[Any], dict[str, float]]:
    """`compute_metrics` for the Trainer: `evaluation.retrieval` of all embeddings of the evaluation set at once.

    Every item searches all others; no mean over batches. options: of `evaluation.retrieval`. The Trainer logs them as
    `eval_recall@1` and so on, and drops by itself the copies with which it fills up the last batch.
    """

    cut_offs = None if ks is None else tuple(ks)

    def compute(prediction: Any) -> dict[str, float]:
        embeddings, labels = prediction.predictions, prediction.label_ids
        if isinstance(embeddings, tuple | list):
            raise ValueError(f"the model must give embeddings alone beside its loss, got {len(embeddings)} outputs")
        scores = evaluation.retrieval(np.asarray(embeddings, np.float32), np.asarray(labels), ks=cut_offs, **options)
        return dict(scores)

    return compute


def parameter_groups(model: EmbeddingModel, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """For an optimizer: the encoder at lr, the loss's own parameters at lr times its `lr_scale` and without decay."""
    groups: list[dict[str, Any]] = [
        {"params": list(model.encoder.parameters()), "lr": lr, "weight_decay": weight_decay}
    ]
    if learned := list(model.loss.parameters()):
        rate = lr * float(getattr(model.loss, "lr_scale", 1.0))
        groups.append({"params": learned, "lr": rate, "weight_decay": 0.0})
    return groups
