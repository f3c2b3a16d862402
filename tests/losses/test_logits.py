"""`get_logits` of the class losses, each against its formula written out in float64."""

import pytest
import torch

from nearkin import losses
from nearkin.losses.class_shards import Shard

C, D = 5, 4


def cosine(x, w):
    return torch.nn.functional.normalize(x.double(), dim=1) @ torch.nn.functional.normalize(w.double(), dim=1).T


def heated(loss, x):
    return loss.__dict__["scale"] * cosine(x, loss.weight) + loss.bias.double()


def standardised(loss, x):
    y = (x.double() - loss.running_mean.double()) / (loss.running_var.double() + 1e-5).sqrt()
    return (
        loss.__dict__["scale"] / D**0.5 * (y @ torch.nn.functional.normalize(loss.weight.double(), dim=1).T) + loss.bias
    )


def soft(loss, x):
    each = cosine(x, loss.weight).view(len(x), C, 3)
    return 20 * ((each / 0.1).softmax(2) * each).sum(2)


CASES = {
    "normalised softmax": (lambda: losses.NormalizedSoftmaxLoss(C, D), lambda m, x: 20 * cosine(x, m.weight)),
    "sampled": (lambda: losses.NormalizedSoftmaxLoss(C, D, sample_rate=0.2), lambda m, x: 20 * cosine(x, m.weight)),
    "heated": (lambda: losses.HeatedSoftmaxLoss(C, D), heated),
    "heated, batch": (lambda: losses.HeatedSoftmaxLoss(C, D, norm="batch"), standardised),
    "AdaCos": (lambda: losses.AdaCosLoss(C, D), lambda m, x: m.scale.double() * cosine(x, m.weight)),
    "CosFace": (lambda: losses.CosFaceLoss(C, D, 0.2, 30.0), lambda m, x: 30 * cosine(x, m.weight)),
    "ArcFace": (lambda: losses.ArcFaceLoss(C, D), lambda m, x: 64 * cosine(x, m.weight)),
    "AdaFace": (lambda: losses.AdaFaceLoss(C, D, scale=30.0), lambda m, x: 30 * cosine(x, m.weight)),
    "MagFace": (lambda: losses.MagFaceLoss(C, D, scale=30.0), lambda m, x: 30 * cosine(x, m.weight)),
    "ArcFace, sub-centres": (
        lambda: losses.ArcFaceLoss(C, D, sub_centers=3),
        lambda m, x: 64 * cosine(x, m.weight).view(len(x), C, 3).amax(2),
    ),
    "SphereFace": (
        lambda: losses.SphereFaceLoss(C, D),
        lambda m, x: x.double().norm(dim=1, keepdim=True) * cosine(x, m.weight),
    ),
    "Proxy-NCA": (lambda: losses.ProxyNCALoss(C, D), lambda m, x: -9 * (2 - 2 * cosine(x, m.weight))),
    "Proxy-NCA, several": (
        lambda: losses.ProxyNCALoss(C, D, proxies_per_class=2),
        lambda m, x: (-9 * (2 - 2 * cosine(x, m.weight))).view(len(x), C, 2).amax(2),
    ),
    "Proxy-Anchor": (lambda: losses.ProxyAnchorLoss(C, D), lambda m, x: 32 * cosine(x, m.weight)),
    "SoftTriple": (lambda: losses.SoftTripleLoss(C, D, centers_per_class=3), soft),
    "center": (lambda: losses.CenterLoss(C, D), lambda m, x: x.double() @ m.weight.double().T + m.bias),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_formula(name):
    make, formula = CASES[name]
    torch.manual_seed(3)
    loss, x, labels = make(), torch.randn(7, D), torch.arange(7) % C
    loss(x, labels)  # a step has moved what moves by itself
    state = {key: value.clone() for key, value in loss.state_dict().items()}
    for kind, tolerance in (
        (torch.float64, 1e-6),
        (torch.float32, 1e-4),
        (torch.bfloat16, 1e-4),
        (torch.float16, 1e-4),
    ):
        embeddings = x.to(kind).requires_grad_()
        got = loss.get_logits(embeddings)
        assert got.shape == (7, C) and got.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
        torch.testing.assert_close(got.double(), formula(loss, embeddings), rtol=1e-4, atol=tolerance * 100)
        weight = next(loss.parameters())
        by_x, by_weight = torch.autograd.grad(got.square().sum(), [embeddings, weight])
        assert by_x.isfinite().all() and by_x.any() and by_weight.isfinite().all() and by_weight.any()
    assert all(torch.equal(value, state[key]) for key, value in loss.state_dict().items())  # nothing is learned by it
    assert loss.get_logits(x[:0]).shape == (0, C)


def test_the_loss_is_the_cross_entropy_of_its_logits():
    """Where there is no margin: what is used is what was trained."""
    torch.manual_seed(0)
    x, labels = torch.randn(9, D, dtype=torch.float64), torch.arange(9) % C
    for loss in (
        losses.NormalizedSoftmaxLoss(C, D),
        losses.HeatedSoftmaxLoss(C, D),
        losses.AdaCosLoss(C, D, dynamic=False),
        losses.CosFaceLoss(C, D, margin=0.0),
        losses.ArcFaceLoss(C, D, margin=0.0, sub_centers=2),
        losses.ProxyNCALoss(C, D, proxies_per_class=1),
        losses.SoftTripleLoss(C, D, margin=0.0, spread_weight=0.0),
        losses.CenterLoss(C, D, center_weight=0.0),
        losses.SphereFaceLoss(C, D, margin=1),
    ):
        loss = loss.double().eval()
        wanted = torch.nn.functional.cross_entropy(loss.get_logits(x), labels)
        torch.testing.assert_close(loss(x, labels), wanted, rtol=1e-6, atol=1e-7)


def test_every_class_loss_has_logits_and_says_what_does_not_fit():
    named = {type(make()).__name__ for make, _ in CASES.values()}
    assert named == {n for n in losses.__all__ if n.endswith("Loss") and hasattr(getattr(losses, n), "get_logits")}
    takers = [n for n in losses.__all__ if n.endswith("Loss") and "shard" in getattr(getattr(losses, n), "fields", ())]
    assert all(getattr(losses, name).get_logits.__doc__ for name in named) and not set(takers) - named
    for make, _ in CASES.values():
        loss = make()
        assert hasattr(loss, "shard")
        with pytest.raises(ValueError, match=r"embeddings must have 4 dimensions|embeddings"):
            loss.get_logits(torch.randn(3, D + 1))
        with pytest.raises(TypeError, match="embeddings must be"):
            loss.get_logits([[1.0] * D])
        x = torch.randn(3, D)
        x[1, 2] = torch.inf
        got = loss.get_logits(x)
        assert got[1].isnan().all() and got[[0, 2]].isfinite().all()
        assert loss.get_logits(torch.full((1, D), 3e38)).isfinite().all()
        loss.held = Shard(0, 2, C, processes=2)
        with pytest.raises(ValueError, match=r"get_logits needs all classes in one process, got 2 of 5 \(shard=True\)"):
            loss.get_logits(x)
    with pytest.raises(ValueError, match='get_logits needs proxies that belong to classes, got assignment="dynamic"'):
        losses.ProxyNCALoss(C, D, assignment="dynamic").get_logits(torch.randn(2, D))
