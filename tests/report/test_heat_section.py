"""Heat maps in the report and as a picture: signs and sizes of colours, what is explained, and what is left out."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from test_report import NASTY, made, offline

from nearkin import models, report
from nearkin.report import heat_section, heatmaps, run_report
from nearkin.report.findings import PairHeat

HEAT = np.array([[0.5, -0.25], [0.0, 0.125]])


def pixels_of(address):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition("base64,")[2]))))


def test_colours_have_the_sign_and_the_size_of_the_value():
    colours = heatmaps.colours(HEAT, heatmaps.scale_of(HEAT, HEAT / 2))
    assert colours.shape == (2, 2, 4) and colours.dtype == np.uint8
    assert tuple(colours[0, 0, :3]) == heatmaps.ADDS and tuple(colours[0, 1, :3]) == heatmaps.TAKES
    opacity = colours[..., 3] / 255 / heatmaps.DENSEST
    assert np.allclose(opacity, np.abs(HEAT) / 0.5, atol=0.01)
    assert np.array_equal(pixels_of(heatmaps.overlay(HEAT, 0.5)), colours)
    assert heatmaps.scale_of(np.zeros((2, 2))) == 1.0  # nothing to divide by
    assert heatmaps.colours(np.zeros((2, 2)), 1.0)[..., 3].max() == 0


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in np.array(colour) / 255]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_both_colours_differ_in_lightness_too():
    light, dark = luminance(heatmaps.ADDS), luminance(heatmaps.TAKES)
    assert (light + 0.05) / (dark + 0.05) > 2  # orange and blue are told apart without any colour vision


def test_a_faded_picture_is_grey_and_light():
    picture = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    assert heatmaps.faded(picture).shape == (5, 4) and heatmaps.faded(picture).min() >= 255 * heatmaps.FADED - 1
    assert heatmaps.faded(picture[..., 0]).shape == (5, 4)


@pytest.mark.parametrize("shape", [(32, 32), (64, 64, 3)])
def test_the_picture_of_two_heat_maps(tmp_path, shape):
    pictures = [np.full(shape, 90, np.uint8)] * 2
    path = tmp_path / "explain.png"
    heats = [np.full((4, 4), 0.1), np.full((4, 4), -0.1)]
    report.write_heat_maps(path, pictures, heats, ["$a$.png", NASTY[2]], ["sum", "sum"], "similarity 0.5000")
    drawn = np.asarray(Image.open(path).convert("RGB")).astype(int)
    lower = drawn[len(drawn) // 2 : int(0.85 * len(drawn))]
    left, right = lower[:, : lower.shape[1] // 2], lower[:, lower.shape[1] // 2 :]
    assert ((left[..., 0] - left[..., 2]) > 100).mean() > 0.5  # all orange
    assert ((right[..., 2] - right[..., 0]) > 100).mean() > 0.5  # all blue
    assert sorted(p.name for p in tmp_path.iterdir()) == ["explain.png"]


def test_a_picture_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"explain\.png could not be written \(No such file"):
        report.write_heat_maps(
            tmp_path / "nowhere" / "explain.png", [np.zeros((4, 4), np.uint8)] * 2, [HEAT] * 2, "ab", "ab", ""
        )


def fake(pairs):
    return [PairHeat(0.5, (np.zeros((8, 8), np.uint8),) * 2, (HEAT, HEAT), (0.0, -0.25)) for _ in pairs]


def test_every_row_of_the_grid_explains_its_nearest_wrong_neighbour():
    asked = []

    def explain(pairs):
        asked.extend(pairs)
        return fake(pairs)

    findings = made(explain=explain, classes=[f"class {c}" for c in range(5)] + [NASTY[0]])
    text = run_report.page(findings)
    read = offline(text)
    labels = findings.labels
    assert len(read.all("details", "why")) == len(asked) == len(set(asked)) >= 8
    assert len(read.all("img", "over")) == 2 * len(asked)
    assert sum(int(labels[a] != labels[b]) for a, b in asked) >= len(asked) - 4  # some have no wrong neighbour
    assert 0 < sum("open" in a for a in read.all("details", "why")) < len(asked)  # only where the nearest is wrong
    assert "missing -0.250" in text and "Which part matched?" in text and NASTY[0] not in text
    assert text == run_report.page(findings)


def test_without_an_encoder_there_are_none():
    for findings in (made(), made(explain=lambda pairs: [])):
        text = run_report.page(findings)
        assert 'class="why"' not in text
    assert "Which part matched?" not in run_report.page(made())


def test_the_explainer_of_a_run(tmp_path):
    encoder = models.build("small-cnn", channels=1, size=16, width=4, dim=8).eval()
    models.save(encoder, tmp_path, {"kind": "pictures", "size": 16, "stored": 18, "fit": "crop", "channels": 1})
    rows = np.random.default_rng(0).integers(0, 256, (30, 18, 18, 1), dtype=np.uint8)
    explain = heat_section.explainer(tmp_path, rows, np.arange(10, 30))
    assert explain is not None
    pairs = [(i, 19 - i) for i in range(10)]  # more than one batch
    heats = explain(pairs)
    assert len(heats) == len(pairs)
    inputs = torch.from_numpy(rows[10:, 1:-1, 1:-1]).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        e = encoder(inputs).double()
    for (a, b), heat in zip(pairs, heats, strict=True):
        assert heat.similarity == pytest.approx(float(e[a] @ e[b]), abs=1e-5)
        for side, missing in zip(heat.heats, heat.missing, strict=True):
            assert side.sum() + missing == pytest.approx(heat.similarity, abs=1e-12) and abs(missing) < 1e-5
        assert np.array_equal(heat.pictures[0], rows[10 + a, 1:-1, 1:-1, 0])


def test_vectors_and_encoders_of_ones_own_are_left_out(tmp_path):
    assert heat_section.explainer(tmp_path, np.zeros((4, 8), np.float32), np.arange(4)) is None
    explain = heat_section.explainer(tmp_path, np.zeros((4, 8, 8, 1), np.uint8), np.arange(4))  # nothing was saved
    assert explain is not None and explain([(0, 1)]) == []
