"""A module of the user's own as an encoder: trained as ours are, and built by its owner's code alone."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nearkin.models.encoder import Encoder, Head
from nearkin.models.pooling import Pooling

__all__ = ["PREFIX", "OwnEncoder"]

PREFIX = "own:"  # before the name of the class, where a recipe names an encoder, a loss or a source


class OwnEncoder(Encoder):
    """Wraps a module (B, …) → (B, D), whose output is the embedding as it is; `initial`: its weights at the start."""

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        name = f"{PREFIX}{type(module).__name__}"
        dim = _width(module, example, type(module).__name__)
        settings = {"name": name, "dim": dim, "normalize": False}
        head = Head(dim, Pooling(), None, False, False)
        super().__init__(module, head, shape=(), mean=[], std=[], settings=settings)
        self.initial = {key: value.detach().clone().cpu() for key, value in module.state_dict().items()}

    def _map(self, x: Tensor) -> Tensor:
        result: Tensor = self.backbone(x)
        return result

    def standardize(self, x: Tensor) -> "Encoder":
        """Nothing: the module takes items as they come."""
        return self

    def untrained(self) -> "OwnEncoder":
        """A copy with the weights of the start."""
        found = copy.deepcopy(self)
        found.backbone.load_state_dict(self.initial)
        return found

    def begin_with(self, initial: Mapping[str, Tensor]) -> None:
        """Takes the weights with which a run began for those of the start."""
        self.initial = dict(initial)


def _width(module: nn.Module, example: Tensor, name: str) -> int:
    """Dimensions of an embedding, found by one pass that leaves no trace."""
    place = next((p.device for p in module.parameters()), torch.device("cpu"))
    was = module.training
    module.eval()
    try:
        with torch.no_grad():
            found = module(example.to(place))
    finally:
        module.train(was)
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != len(example) or not found.is_floating_point():
        got = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        wanted = f"({len(example)}, dimensions)"
        raise ValueError(f"encoder {name} must give floats of shape {wanted} for {len(example)} items, got {got}")
    return int(found.shape[1])
