"""Backward-compatible training (BCT, Shen et al. 2020, arXiv:2003.11942): an old encoder, and the term beside the loss.

The old encoder embeds every item once, as a gallery has them: without augmentation, prepared as its own run prepares
them. The term compares the new embeddings, of augmented items, with these. Of more dimensions than the old ones have,
the first so many are compared.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearkin import losses, models
from nearkin.core import distances
from nearkin.models.frozen import encoder_folder
from nearkin.models.io import DESCRIPTION, fingerprint

__all__ = ["CompatibleLoss", "OldEncoder", "check_dim", "check_items", "class_means", "open_old"]


class OldEncoder(NamedTuple):
    """The encoder of an old run, on the CPU, and how its items are prepared."""

    run: str
    encoder: models.Encoder
    preparation: dict[str, Any]
    fingerprint: str

    @property
    def record(self) -> dict[str, Any]:
        """What data.json and encoder.json of the new run say of it."""
        return {"run": self.run, "encoder": self.fingerprint, "dim": self.encoder.dim}


def open_old(run: str) -> OldEncoder:
    """The encoder of a run, or of the name of a pretrained one; what is wrong with it is named."""
    try:
        folder = encoder_folder(run)
        encoder, preparation = models.load(folder)
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"compatible.run: {error}") from None
    return OldEncoder(run, encoder, preparation, fingerprint(description))


def check_items(old: OldEncoder, kind: str, shape: tuple[int, ...] | None) -> None:
    """Refuses an old encoder that cannot take the items: "pictures", "vectors", or "own" for a dataset of the user's.

    shape: of an item; None for pictures, which every run decodes for itself.
    """
    theirs = str(old.preparation.get("kind"))
    words = {"own": "items of a dataset of your own"}
    if theirs != kind:
        raise ValueError(
            f"compatible.run must take {words.get(kind, kind)}, as this source has, got {old.run}, which takes "
            f"{words.get(theirs, theirs)}"
        )
    known = old.preparation.get("shape") if kind == "own" else [old.preparation.get("features")]
    if shape is not None and list(shape) != known:
        raise ValueError(
            f"compatible.run must take items of shape {list(shape)}, as this source has, got {old.run}, which takes "
            f"{known}"
        )


def check_dim(dim: int, old: Mapping[str, Any] | None) -> None:
    """Refuses a new encoder with fewer dimensions than the old rows have. old: `OldEncoder.record`."""
    if old is not None and dim < old["dim"]:
        raise ValueError(f"encoder.dim must be at least the {old['dim']} dimensions of {old['run']}, got {dim}")


class CompatibleLoss(nn.Module):
    """The term of new embeddings z (B, D), of items with class ids (B,), against old ones; nothing of it is learned.

    method "regression": 1 - cos(z_i, t_i), t_i = (1 - a) o_i + a w_y scaled to length 1, o_i the old embedding of the
    item, w_y the mean old embedding of its class, a = `class_share`. "classes": the old classifier, as in BCT, with
    means in place of weights: -log softmax_y of s cos(z_i, w_c) over all training classes. "items": -log softmax of
    s cos(z_i, o_j) over the old embeddings of the batch, averaged over those of its class (SupCon with references), or
    with continuous targets its own. All times `weight`; s = `scale`.

    old (n, D_old): of the training items. labels: class ids (n,), or of levels (n, L); or continuous targets, which are
    not read. Of z the first D_old dimensions are compared.
    """

    old: Tensor
    means: Tensor

    def __init__(
        self,
        old: Tensor,
        labels: Tensor,
        method: str,
        weight: float,
        class_share: float | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.method, self.weight, self.scale = method, weight, scale or 1.0
        unit = distances.unit(old)
        if method == "classes":
            self.register_buffer("means", class_means(unit, labels), persistent=False)
        elif class_share:
            means = class_means(unit, labels)[_class_ids(labels, labels)]
            unit = distances.unit((1 - class_share) * unit + class_share * means)
        self.register_buffer("old", unit, persistent=False)

    def forward(self, embeddings: Tensor, labels: Tensor, *, items: Tensor) -> Tensor:
        """items: (B,) places of the rows among the training items."""
        z, ids = embeddings[:, : self.old.shape[1]], _class_ids(labels, items)
        if self.method == "classes":
            return self.weight * losses.normalized_softmax_loss(z, ids, self.means, scale=self.scale)
        old = self.old[items]
        if self.method == "items":
            return self.weight * losses.supcon_loss(z, ids, old, ids, temperature=1 / self.scale)
        return self.weight * (1 - (distances.unit(z) * old).sum(1)).mean()


def class_means(unit: Tensor, labels: Tensor) -> Tensor:
    """The mean direction of each class (C, D); labels (n,) from 0, every class among them."""
    ids = _class_ids(labels, labels).cpu()
    sums = torch.zeros(int(ids.max()) + 1, unit.shape[1], dtype=torch.float64)
    return distances.unit(sums.index_add_(0, ids, unit.cpu().double())).to(unit)


def _class_ids(labels: Tensor, items: Tensor) -> Tensor:
    """Of levels the finest; with continuous targets every item is a class by itself."""
    if labels.is_floating_point():
        return items
    return labels if labels.dim() == 1 else labels[:, 0].contiguous()
