"""The section on fine-tuning: the curve over a, what was saved, and nothing where weights were not interpolated."""

import re

import pytest
import torch

from nearkin.report import interpolation_section, number_sections, run_report
from nearkin.report.findings import Findings
from nearkin.training import interpolation
from nearkin.training.interpolation import FROZEN, SHARES, UNTRAINED, judge

CLASSES = torch.arange(10).repeat_interleave(6)


def facts_of(gains, classes=CLASSES):
    generator = torch.Generator().manual_seed(1)
    frozen = 0.3 + 0.1 * torch.rand(len(classes), generator=generator)
    values = {FROZEN: frozen, UNTRAINED: frozen - 0.2}
    values |= {
        a: frozen + gain + 0.02 * torch.randn(len(classes), generator=generator)
        for a, gain in zip(SHARES, gains, strict=True)
    }
    facts = judge(values, classes, "map@r")
    return facts | {"sentence": interpolation._sentence(facts, "MAP@R", 8, 12)}


def findings(**results):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    labels, names = torch.arange(8) // 2, [f"{i}.png" for i in range(8)]
    return Findings("title", {}, {}, [], results, x, labels, None, list("abcd"), names)


def page_of(facts):
    return run_report.page(findings(interpolation=facts))


def test_the_curve_the_bars_and_the_saved_point():
    facts = facts_of([-0.1, 0.05, 0.2, 0.15, 0.1])
    page = page_of(facts)
    assert facts["sentence"] in page.replace("\u202f%", " %") and 'id="finetuning"' in page
    section = page.split('id="finetuning"')[1].split("</section>")[0]
    assert section.count('class="whisker main"') == 5 and section.count('class="dot main"') == 5
    assert f"saved: {100 * facts['curve'][2]['value']:.1f}" in section and "a = 0.5 (saved)" in section
    assert re.findall(r'<text class="tick mid" [^>]*>([\d.]+)</text>', section) == ["0", "0.25", "0.5", "0.75", "1"]
    assert "frozen encoder</th>" in section and "untrained head</th>" in section
    results = findings(interpolation=facts, test={"trained": {"recall@1": {"value": 0.5}}})
    assert "interpolation" not in number_sections.results(results) and number_sections.results(results)


def test_a_bar_crosses_the_frozen_line_where_the_gain_may_be_chance():
    facts = facts_of([-0.1, 0.0, 0.2, 0.15, 0.1])
    section = interpolation_section.interpolation(findings(interpolation=facts))
    line = float(re.search(r'class="line other" d="M[\d.]+ ([\d.]+)', section)[1])
    bars = re.findall(r'class="whisker main" d="M[\d.]+ ([\d.]+)V([\d.]+)"', section)
    assert len(bars) == 5
    for (low, high), point in zip(bars, facts["curve"], strict=True):
        above = float(low) < line and float(high) < line  # y grows downward
        assert above == point["better"]


def test_a_frozen_encoder_that_was_kept():
    facts = facts_of([-0.1, -0.1, -0.05, -0.1, -0.2])
    section = interpolation_section.interpolation(findings(interpolation=facts))
    assert (
        "frozen encoder (saved)" in section
        and "circle class=" not in section
        and "The frozen encoder is kept" in section
    )


def test_few_classes_have_fewer_intervals():
    facts = facts_of([0.1] * 5, CLASSES % 3)
    page = page_of(facts)
    assert facts["curve"][0]["low"] is None and facts["curve"][0]["gain"]["low"] is not None
    assert page.count('class="whisker main"') == 5


@pytest.mark.parametrize("results", [{}, {"interpolation": None}])
def test_a_run_without_it_has_no_section(results):
    assert 'id="finetuning"' not in run_report.page(findings(**results))


def test_what_was_not_measured_is_a_sentence():
    facts = judge({}, CLASSES, "map@r")
    facts |= {"sentence": interpolation._sentence(facts, "MAP@R", 8, 8)}
    section = interpolation_section.interpolation(findings(interpolation=facts))
    assert section.startswith("<p>The trained weights are saved as they are") and "<svg" not in section


def test_the_sentence_is_escaped():
    facts = facts_of([0.1] * 5) | {"sentence": "<script>alert(1)</script>"}
    assert "<script>alert" not in interpolation_section.interpolation(findings(interpolation=facts))
