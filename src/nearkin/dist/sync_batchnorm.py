"""Batch norm with the statistics of all ranks' rows, as one process with the whole batch would have them."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nearkin.dist import collectives
from nearkin.dist.group import ProcessGroup

__all__ = ["SyncedNorm", "sync"]


def sync(module: nn.Module, device: torch.device, group: ProcessGroup) -> None:
    """Replaces every batch norm inside by one over all ranks: torch's own on a GPU, which refuses CPU tensors, or ours.

    Both keep the names of a state dict.
    """
    for name, part in list(module.named_children()):
        if not isinstance(part, _BatchNorm):
            sync(part, device, group)
        elif type(part).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise ValueError(
                f"training.sync_norms takes torch's own batch norms, got a {type(part).__name__}, which computes "
                "something else as well; leave sync_norms out, or set encoder.freeze_norms"
            )
        elif device.type == "cuda":  # of all processes, as the group is: torch cannot copy a norm that holds its group
            setattr(module, name, nn.SyncBatchNorm.convert_sync_batchnorm(part))  # type: ignore[no-untyped-call]
        else:
            setattr(module, name, SyncedNorm(part, group))


class SyncedNorm(_BatchNorm):
    """A `BatchNorm` of any dimension whose statistics in training are those of all ranks' rows together.

    Ranks may hold different numbers of rows, also none. Sums go round twice per pass, so that no digits are lost.
    """

    def __init__(self, norm: _BatchNorm, group: ProcessGroup) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.group, self._parameters, self._buffers = group, norm._parameters, norm._buffers
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        x = wide.transpose(0, 1).flatten(1)  # (C, rows × places)
        sums = collectives.summed(torch.cat([x.sum(1), x.new_tensor([x.shape[1]])]), self.group.world)
        count = sums[-1].detach().clamp(min=1)
        mean = sums[:-1] / count
        x = x - mean[:, None]
        variance = collectives.summed(x.square().sum(1), self.group.world) / count
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)))
        x = x * (variance + self.eps).rsqrt()[:, None]
        if self.weight is not None:
            x = x * self.weight[:, None].to(x) + self.bias[:, None].to(x)
        shape = input.shape[1], input.shape[0], *input.shape[2:]
        return x.view(shape).transpose(0, 1).to(input.dtype)

    def _track(self, mean: Tensor, unbiased: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            assert running is not None
            running.lerp_(new.to(running), share)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input must have at least two dimensions, got shape {tuple(input.shape)}")
