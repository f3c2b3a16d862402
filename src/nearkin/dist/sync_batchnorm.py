"""Batch norm with the statistics of all ranks' rows, as one process with the whole batch would have them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nearkin.core.autograd import HandGradient, refuse_second_derivative
from nearkin.dist import collectives

__all__ = ["SyncedNorm", "sync"]


def sync(module: nn.Module, device: torch.device) -> nn.Module:
    """Replaces every batch norm by one over all ranks: torch's own on a GPU, which refuses CPU tensors, else ours."""
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        return converted
    for name, part in list(module.named_children()):
        if isinstance(part, _BatchNorm):
            setattr(module, name, SyncedNorm.of(part))
        else:
            sync(part, device)
    return module


class SyncedNorm(_BatchNorm):
    """A `BatchNorm` of any dimension whose statistics in training are those of all ranks' rows together.

    Ranks may hold different numbers of rows, also none. Two exchanges per step: of the sums, and of their gradients.
    """

    @classmethod
    def of(cls, norm: _BatchNorm) -> "SyncedNorm":
        synced = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        synced.weight, synced.bias = norm.weight, norm.bias
        synced.running_mean, synced.running_var = norm.running_mean, norm.running_var
        synced.num_batches_tracked = norm.num_batches_tracked
        return synced.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input must have at least two dimensions, got shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if collectives.size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        x = input.transpose(0, 1).flatten(1)  # (C, rows × places)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        normal, mean, variance, count = _Normalize.call(wide, self.eps)
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        if self.weight is not None:
            normal = normal * self.weight[:, None].to(normal) + self.bias[:, None].to(normal)
        shape = (input.shape[1], input.shape[0], *input.shape[2:])
        return normal.view(shape).transpose(0, 1).to(input.dtype)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.lerp_(new.to(running), share)


class _Normalize(HandGradient):
    """(x - mean) / sqrt(variance + eps) of (C, n), both over the columns of all ranks; and mean, variance, count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = x.new_tensor([float(x.shape[1])])
        sums = collectives.total(torch.cat([x.sum(1), count]))
        total = sums[-1].clamp(min=1)
        mean = sums[:-1] / total
        centred = x - mean[:, None]
        variance = collectives.total(centred.square().sum(1)) / total  # of centred values: no digits are lost
        scale = (variance + eps).rsqrt()
        normal = centred * scale[:, None]
        ctx.save_for_backward(normal, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        return normal, mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        refuse_second_derivative("batch normalisation over several processes")
        normal, scale, total = ctx.saved_tensors
        sums = collectives.total(torch.stack([gradient.sum(1), (gradient * normal).sum(1)]))
        along = sums[0][:, None] + normal * sums[1][:, None]
        return (gradient - along / total) * scale[:, None], None
