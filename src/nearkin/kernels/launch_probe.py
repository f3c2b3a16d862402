# mypy: ignore-errors
"""A small kernel launched twice, by triton and by its compiled form: whether `CachedLauncher` may do so here."""

import torch

from nearkin.kernels.numerics import tl, triton

__all__ = ["succeeds", "version"]


@triton.jit
def _affine(x, y, number, one, offset, SCALE: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + i * one, mask=i < number, other=0.0)
    tl.store(y + i, value * SCALE + offset, mask=i < number)


def version() -> str:
    """Of triton, major and minor."""
    return ".".join(triton.__version__.split(".")[:2])


def succeeds() -> bool:
    """Whether a compiled form does what triton does with the same arguments: tensors, integers, 1, a float, constants.

    Launched on the current device. Any error is a no.
    """
    try:
        x = torch.arange(40, device="cuda", dtype=torch.float32)
        by_search, by_form = torch.zeros(2, 40, device="cuda")
        arguments, constants = (37, 1, 0.25), (3.0, 16)
        compiled = _affine[(3, 1, 1)](x, by_search, *arguments, SCALE=3.0, N=16)
        compiled[(3, 1, 1)](x.data_ptr(), by_form.data_ptr(), *arguments, *constants)  # of tensors the addresses
        expected = torch.where(torch.arange(40, device="cuda") < 37, x * 3 + 0.25, 0.0)
        return bool(torch.equal(by_search, by_form) and torch.equal(by_form, expected))
    except Exception:
        return False
