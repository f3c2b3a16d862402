"""LoRA, what is frozen, and the depth of layers: on our encoders, on transformers, and on timm where it imports."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tiny_vit
from nearkin import models
from nearkin.models import adapt, factory
from nearkin.models.encoder import is_lora


def lite(**changes):
    """Random weights, with statistics of a batch: with those at first nothing reaches the end of the network."""
    encoder = models.build("efficientnet-lite0", pretrained=False, **({"dim": 6, "size": 32} | changes))
    norms = [part for part in encoder.modules() if isinstance(part, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    encoder(torch.rand(8, *encoder.shape, generator=torch.Generator().manual_seed(0)))
    for norm in norms:
        norm.momentum = 0.01
    return encoder


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return tiny_vit.save(tmp_path_factory.mktemp("vit"))


def timm_vit(**changes):
    pytest.importorskip("timm", reason="timm does not import here", exc_type=ImportError)
    return models.build("timm:vit_tiny_patch16_224", pretrained=False, **({"size": 32, "dim": 6} | changes))


@pytest.fixture(params=["lite", "hf", "timm"])
def make(request, vit):
    if request.param == "timm":
        timm_vit()  # skips here where it does not import
    return {"lite": lite, "hf": lambda **k: models.build(f"hf:{vit}", **({"dim": 6} | k)), "timm": timm_vit}[
        request.param
    ]


def trained(encoder, seed=0):
    """LoRA layers as they are after some training: B is no longer 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in encoder.named_parameters():
        if name.endswith("lora_b"):
            with torch.no_grad():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return encoder


# ---- LoRA


def test_lora_begins_as_the_encoder_and_is_merged_to_the_same_outputs(make, tmp_path):
    encoder = make().eval()
    x = torch.rand(3, *encoder.shape)
    with torch.no_grad():
        before, names = encoder(x), list(encoder.state_dict())
        adapted = models.add_lora(encoder)
        assert adapted is encoder and (encoder(x) - before).abs().max() <= 1e-6, "B is 0 at first"
        trained(encoder)
        moved = encoder(x)
        assert (moved - before).abs().max() > 1e-3
        models.save(encoder, tmp_path)
        assert torch.equal(encoder(x), moved), "saving changes nothing"
        loaded, _ = models.load(tmp_path)
        copied, state = adapt.merged(encoder), adapt.plain_state(encoder)
        merged = models.merge_lora(encoder)
        assert merged is encoder and adapt.merged(encoder) is encoder
    for plain in (loaded, copied, merged):
        assert sorted(plain.state_dict()) == sorted(names) and (plain(x) - moved).abs().max() <= 1e-6
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
        assert all(p.requires_grad for p in plain.parameters())


def test_lora_computes_its_formula():
    """W + alpha / r · B A, by hand, of a convolution and of a linear layer."""
    encoder = trained(models.add_lora(lite(), rank=3, alpha=12.0))
    layer = encoder.backbone.blocks[1].widen.conv
    a, b = layer.lora_a.detach().double(), layer.lora_b.detach().double()
    assert a.shape == (3, 16) and b.shape == (96, 3)
    want = layer.original.double() + 12.0 / 3 * (b @ a)[:, :, None, None]
    assert (layer.weight.double() - want).abs().max() < 1e-7
    bound = 16**-0.5  # Kaiming-uniform with a = sqrt(5): 1 / sqrt(in)
    assert a.abs().max() <= bound and a.abs().mean() == pytest.approx(bound / 2, rel=0.3)


def test_lora_weights_depend_on_seed_and_layer_alone():
    first, again, other = (models.add_lora(lite(), seed=seed) for seed in (3, 3, 4))
    rows = [dict(e.named_parameters()) for e in (first, again, other)]
    names = [name for name in rows[0] if name.endswith("lora_a")]
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in names)
    assert not any(torch.equal(rows[0][name], rows[2][name]) for name in names)
    equal = [
        n for n in names if rows[0][n].shape == rows[0][names[1]].shape and torch.equal(rows[0][n], rows[0][names[1]])
    ]
    assert equal == [names[1]], "two layers of one shape differ"


def test_only_lora_and_the_head_learn(make):
    encoder = models.add_lora(make()).train()
    optimizer = torch.optim.SGD([p for p in encoder.parameters() if p.requires_grad], lr=0.5)
    trained(encoder)  # at first, while B is 0, A has no gradient
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    for _ in range(2):
        encoder(torch.rand(4, *encoder.shape))[:, :2].pow(3).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, value in encoder.state_dict().items() if not torch.equal(value, before[name])}
    expected = {f"backbone.{name}" for name, _ in encoder.backbone.named_parameters() if is_lora(name)}
    assert moved == expected | {"head.projection.weight", "head.projection.bias"}


def test_head_first_freezes_lora_too(make):
    encoder = models.add_lora(make()).freeze_backbone()
    assert not any(p.requires_grad for p in encoder.backbone.parameters())
    assert not any(part.training for part in encoder.train().backbone.modules())
    encoder.freeze_backbone(False)
    assert {is_lora(n) for n, p in encoder.backbone.named_parameters() if p.requires_grad} == {True}


@pytest.mark.parametrize("pooling", ["avg", "cls"])
def test_lora_at_another_picture_size(vit, pooling, tmp_path):
    """Position embeddings of 4 x 4 patches, pictures of 6 x 6."""
    encoder = trained(models.add_lora(models.build(f"hf:{vit}", size=48, pooling=pooling, dim=6))).eval()
    x = torch.rand(2, 3, 48, 48)
    models.save(encoder, tmp_path)
    assert (models.load(tmp_path)[0](x) - encoder(x)).abs().max() <= 1e-6
    encoder.train()(x)[:, 0].sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in encoder.parameters())


def test_lora_layers_by_default(vit):
    def layers(encoder):
        return [name for name, _ in adapt._adapted(models.add_lora(encoder).backbone)]

    assert layers(lite())[:3] == ["blocks.0.narrow.conv", "blocks.1.widen.conv", "blocks.1.narrow.conv"]
    assert layers(lite())[-1] == "top.conv" and len(layers(lite())) == 32
    names = layers(models.build(f"hf:{vit}"))
    assert len(names) == 12 and all("attention" in name for name in names)


def test_lora_layers_by_default_of_timm():
    names = [name for name, _ in adapt._adapted(models.add_lora(timm_vit()).backbone)]
    assert names == [f"model.blocks.{i}.attn.{part}" for i in range(12) for part in ("qkv", "proj")]


@pytest.mark.parametrize(
    "name",
    [
        "model.blocks.3.attn.qkv",
        "model.blocks.3.attn.proj",
        "model.layers.1.blocks.0.attn.q_proj",
        "model.encoder.layer.0.attention.attention.query",
        "model.encoder.layer.0.attention.output.dense",
        "model.encoder.layers.0.self_attn.out_proj",
        "model.encoder.layer.2.attention.self.value",
        "model.layers.0.attention.o_proj",
    ],
)
def test_names_of_attention(name):
    assert adapt._ATTENTION.search(name) and adapt._BLOCK.match(name)
    for other in (
        "model.patch_embed.proj",
        "model.blocks.0.mlp.fc1",
        "model.layer.0.output.dense",
        "head.attention.out_proj",
    ):
        assert not (adapt._ATTENTION.search(other) and adapt._BLOCK.match(other))


def test_lora_layers_by_pattern():
    encoder = models.add_lora(lite(), layers=r"blocks\.(14|15)\..*narrow")
    assert [name for name, _ in adapt._adapted(encoder.backbone)] == ["blocks.14.narrow.conv", "blocks.15.narrow.conv"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"rank": 0}, "rank must be >= 1, got 0"),
        ({"alpha": 0.0}, "alpha must be > 0, got 0.0"),
        ({"layers": "("}, "layers must be a regular expression"),
        (
            {"layers": "look"},
            r"layers must name linear or 1x1 convolution layers of the backbone \(blocks.0.narrow.conv",
        ),
    ],
)
def test_lora_refuses(arguments, sentence):
    encoder = lite()
    with pytest.raises(ValueError, match=sentence):
        models.add_lora(encoder, **arguments)
    assert all(p.requires_grad for p in encoder.parameters()), "nothing was changed"
    with pytest.raises(ValueError, match="has LoRA layers already"):
        models.add_lora(models.add_lora(encoder))


def test_lora_under_autocast_is_merged_in_full_precision():
    encoder = trained(models.add_lora(lite())).eval()
    x = torch.rand(2, *encoder.shape)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layers = dict(adapt._adapted(encoder))
        weights, with_lora = {name: layer.weight for name, layer in layers.items()}, encoder(x)
        plain = models.merge_lora(encoder)(x)
    assert all(torch.equal(weights[name], layers[name].weight) for name in weights)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert (with_lora - plain).abs().max() < 0.02


@pytest.mark.slow
def test_an_exported_encoder_has_lora_merged(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="extra export is not installed")
    encoder = trained(models.add_lora(lite())).eval()
    assert models.export_onnx(encoder, tmp_path / "encoder.onnx", torch.rand(2, *encoder.shape)) < 1e-4
    assert any(is_lora(name) for name, _ in encoder.named_parameters()), "the encoder itself is as it was"


def test_weights_that_a_model_does_not_train_stay_fixed():
    body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    body[0].weight.requires_grad_(False)
    head = factory.Head(4, models.Pooling(), 2, False, True)
    encoder = models.Encoder(body, head, shape=(3,), mean=[0.0] * 3, std=[1.0] * 3, settings={"dim": 2})
    encoder.freeze_backbone().freeze_backbone(False)
    assert [p.requires_grad for p in body.parameters()] == [False, True, True, True]


# ---- depth


def test_depths_of_lite():
    depth, last = adapt.depths(lite().backbone)
    assert last == 18  # stem, 16 blocks, top, head
    assert depth["stem.conv.weight"] == 0 and depth["blocks.0.look.conv.weight"] == 1
    assert depth["blocks.15.narrow.norm.bias"] == 16 and depth["top.conv.weight"] == 17


def test_depths_of_transformers(vit):
    depth, last = adapt.depths(models.build(f"hf:{vit}").backbone)
    assert last == 4  # embeddings, 3 blocks, and the norm with the head
    embeddings = {level for name, level in depth.items() if "embeddings" in name}
    norms = {level for name, level in depth.items() if name.startswith("model.layernorm")}
    assert embeddings == {0} and norms == {4} and set(depth.values()) == {0, 1, 2, 3, 4}


def test_depths_of_timm():
    depth, last = adapt.depths(timm_vit().backbone)
    assert last == 13
    assert depth["model.cls_token"] == depth["model.pos_embed"] == depth["model.patch_embed.proj.weight"] == 0
    assert depth["model.blocks.0.attn.qkv.weight"] == 1 and depth["model.blocks.11.mlp.fc2.bias"] == 12
    assert depth["model.norm.weight"] == 13


def test_depths_need_blocks():
    with pytest.raises(ValueError, match="has no numbered blocks"):
        adapt.depths(nn.Linear(2, 2))


# ---- a ViT of timm as it is used: pictures of another size, poolings, published weights


@pytest.fixture
def published(tmp_path, monkeypatch):
    """timm's tiny ViT, with random weights in a file in place of those that would be downloaded."""
    timm = pytest.importorskip("timm", reason="timm does not import here", exc_type=ImportError)
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "vit.safetensors")
    create = timm.create_model

    def from_file(name, pretrained=False, **arguments):
        if pretrained:
            arguments["pretrained_cfg_overlay"] = {"file": str(tmp_path / "vit.safetensors"), "custom_load": False}
        return create(name, pretrained=pretrained, **arguments)

    monkeypatch.setattr(timm, "create_model", from_file)
    return model.eval()


def test_timm_position_embeddings_at_another_size(published, tmp_path):
    """Weights for 224 px, pictures of 96: the grid of 14 x 14 positions is interpolated to 6 x 6, as timm does it."""
    from timm.layers import resample_abs_pos_embed

    encoder = models.build("timm:vit_tiny_patch16_224", size=96, dim=8).eval()
    want = resample_abs_pos_embed(published.pos_embed, [6, 6], num_prefix_tokens=1)
    assert encoder.pretrained and encoder.backbone.model.pos_embed.shape == (1, 37, 192)
    assert torch.allclose(encoder.backbone.model.pos_embed, want, atol=1e-6)
    x = torch.rand(2, 3, 96, 96)
    models.save(encoder, tmp_path / "saved")
    assert torch.equal(models.load(tmp_path / "saved")[0](x), encoder(x))


@pytest.mark.parametrize("pooling", ["avg", "cls", "own", "gem"])
def test_timm_poolings_of_tokens(published, pooling):
    encoder = models.build("timm:vit_tiny_patch16_224", dim=None, pooling=pooling, normalize=False).eval()
    x = torch.rand(2, *encoder.shape)
    with torch.no_grad():
        tokens = published.forward_features((x - encoder.mean) / encoder.std)
        want = tokens[:, 0] if pooling in ("cls", "own") else models.Pooling(pooling)(tokens[:, 1:])
        assert torch.allclose(encoder(x), want, atol=1e-5)


@pytest.mark.parametrize("sets", [["head"], ["lora"], ["all", "finetune.layer_decay=0.75", "schedule.frozen_epochs=1"]])
def test_timm_trains(published, sets, tmp_path, monkeypatch):
    """On a GPU where there is one: what is named learns, a stopped run ends the same, the encoder is a plain one."""
    from commands import photos
    from nearkin import training
    from nearkin.training.config.recipe import read

    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    photos(tmp_path / "photos")
    keys = [
        f"data.source={tmp_path}/photos",
        "encoder.name=timm:vit_tiny_patch16_224",
        "data.size=32",
        "data.stored=32",
    ]
    keys += ["encoder.dim=8", "sampler.batch=8", "sampler.per_class=2", "training.epochs=2", "training.batches=5"]
    keys += ["training.log_steps=1", "evaluation.interval=false", "training.on_collapse=warn", "optimizer.lr=0.01"]
    keys += ["finetune.interpolate=false"]  # so that the trained weights are saved, whatever they are worth
    outcomes = {}
    for graphs in ("false", "true") if torch.cuda.is_available() else ("false",):
        whole = [*keys, f"finetune.train={sets[0]}", *sets[1:]]
        whole += [f"training.graphs={graphs}"] if torch.cuda.is_available() else []
        outcomes[graphs] = training.train(read(None, whole), tmp_path / graphs)
    values = [[line["loss"] for line in run.history if line["event"] == "step"] for run in outcomes.values()]
    assert all(run == values[0] for run in values), "a graph of the step changes nothing"
    state, plain = models.load(tmp_path / "false")[0].state_dict(), published.state_dict()
    if sets[0] == "all":  # the best epoch may be the first, in which the head alone learns
        newest = load_file(max((tmp_path / "false" / "checkpoints").glob("step-*")))
        state = {name.removeprefix("encoder."): value for name, value in newest.items()}
    changed = {
        name for name in plain if not name.startswith("head.") and "pos_embed" not in name
        and not torch.equal(state[f"backbone.model.{name}"].cpu(), plain[name])
    }  # fmt: skip
    attention = {name for name in plain if name.endswith(("attn.qkv.weight", "attn.proj.weight"))}
    assert {"head": changed == set(), "lora": changed == attention, "all": len(changed) > 100}[sets[0]]
