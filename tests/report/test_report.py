"""The report: complete, offline, safe for any names, and honest about what it shows."""

import io
import math
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin import report
from nearkin.core import toml
from nearkin.report import charts, format, maps, number_sections, run_report, sampling

VOID = {"meta", "link", "img", "wbr"}
NASTY = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "Ж & co", "a" * 5000, "\udcff\x00\u202e", ""]


class Reader(HTMLParser):
    """Elements, attributes and text; every tag that opens must close, in order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style", "code"):
            self.text.append(data)

    def all(self, tag, style=None):
        return [a for t, a in self.elements if t == tag and (style is None or style in (a.get("class") or "").split())]


def blobs(classes=6, size=8, noise=0.45, dim=12):
    rng = torch.Generator().manual_seed(3)
    labels = torch.arange(classes).repeat_interleave(size)
    centres = torch.nn.functional.normalize(torch.randn(classes, dim, generator=rng), dim=1)
    return centres[labels] + noise / math.sqrt(dim) * torch.randn(len(labels), dim, generator=rng) * 2, labels


def drawn(i):
    return np.random.default_rng(i).integers(0, 256, (20, 24) if i % 2 else (70, 60, 3), dtype=np.uint8)


def history(epochs=3):
    lines = []
    for e in range(1, epochs + 1):
        steps = range(10 * e - 9, 10 * e + 1)
        lines += [
            {"event": "step", "epoch": e, "step": s, "loss": 3 / s, "lr": 0.1 / s, "gradient": 1.0} for s in steps
        ]
        val = {"map@r": 0.2 * e, "recall@1": 0.25 * e}
        lines.append(
            {"event": "epoch", "epoch": e, "step": 10 * e, "val": val, "spread": 1.2, "effective_rank": 9.0 + e}
        )
        lines[-1] |= {"best": e < 3, "seconds": 40.0 * e}
    return lines


def made(**changes):
    x, labels = blobs()

    def scores(value):
        return {"recall@1": {"value": value, "low": value - 0.02, "high": value + 0.02}, "map@r": {"value": value / 2}}

    findings = {
        "title": "blobs, SupCon, mlp",
        "recipe": {"seed": 0, "loss": {"name": "supcon", "temperature": 0.1}},
        "data": {"items": 96, "parts": {"train": {"items": 48, "classes": 6}, "test": {"items": 48, "classes": 6}}},
        "history": history(),
        "results": {
            "test": {"trained": scores(0.861), "untrained": scores(0.085), "baseline": scores(0.191)},
            "baseline_name": "pixels",
        },
        "embeddings": x,
        "labels": labels,
        "targets": None,
        "classes": [f"class {c}" for c in range(6)],
        "names": [f"folder/item{i}.png" for i in range(len(x))],
        "picture": drawn,
        "notes": ["resumed from step 20"],
    }
    changed = {**findings, **changes}
    if len(changed["names"]) != len(changed["embeddings"]):
        changed["names"] = [f"item {i}" for i in range(len(changed["embeddings"]))]
    return report.Findings(**changed)


@pytest.fixture(autouse=True)
def _without_tsne(monkeypatch):
    monkeypatch.setitem(sys.modules, "openTSNE", None)  # import fails: PCA, which is quick


def offline(text):
    read = Reader(text)
    for _, attrs in read.elements:
        for name in ("src", "href"):
            assert (attrs.get(name) or "#").startswith(("data:", "#")), attrs
        assert not [name for name in attrs if name.startswith("on")]
    assert len(read.all("script")) == 1
    assert not re.search(r"@import|url\((?!#)|https?://", text)
    policies = [a["content"] for a in read.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1 and policies[0].startswith("default-src 'none'")
    return read


def test_whole_offline_and_the_same_twice(tmp_path):
    seen = []
    report.write(tmp_path / "a.html", made(), lambda done, of: seen.append((done, of)))
    report.write(tmp_path / "b.html", made())
    text = (tmp_path / "a.html").read_text("utf-8")
    assert text == (tmp_path / "b.html").read_text("utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "b.html"]
    assert seen == [(i, seen[-1][1]) for i in range(1, seen[-1][1] + 1)]
    read = offline(text)
    sections = [a["id"] for a in read.all("section")]
    assert sections[:4] == ["results", "retrieval", "map", "training"] and sections[-2:] == ["data", "recipe"]
    ids = [a["id"] for _, a in read.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in read.all("a")} == set(sections)
    assert all("alt" in a for a in read.all("img")) and all(a.get("aria-label") for a in read.all("svg"))
    headings = [t for t, _ in read.elements if re.fullmatch(r"h\d", t)]
    assert headings.count("h1") == 1 and headings[0] == "h1"
    assert len(text) < 3_000_000


def test_headline_says_the_main_figure():
    text = run_report.page(made())
    sentence = "R@1 on 6 unseen classes: 86.1\u202f% (84.1–88.1); pixels 19.1\u202f%; untrained 8.5\u202f%."
    assert f'<meta name="description" content="{sentence}">' in text
    closed = run_report.page(made(data={"closed": True}))
    assert "R@1 on 6 known classes: 86.1" in closed and "unseen" not in closed


def test_a_verdict_stands_on_top_and_warns_where_training_did_not_help():
    def shown(helped, sentence):
        results = made().results | {"verdict": {"helped": helped, "sentence": sentence, "against": {}}}
        return run_report.page(made(results=results))

    text = shown(True, "Training helped: 5 < 7.")
    assert '<div class="helped"><p>Training helped: 5 &lt; 7.</p></div>' in text
    text = shown(False, "Training did not help.")
    assert '<div class="alert" role="alert"><p>Training did not help.</p></div>' in text
    assert text.index("did not help") < text.index("<nav")


def test_curves_are_drawn_where_something_was_measured():
    """With fewer batches than log_steps an epoch has no spread of its own, and none is drawn for it."""
    steps = [{"event": "step", "epoch": 1, "step": 1, "loss": 3.0, "lr": {"head": 0.1}, "gradient": 1.0}]
    steps[0] |= {"spread": 0.5, "effective_rank": 6.0}
    epochs = [{"event": "epoch", "epoch": e, "step": 3 * e, "loss": 3 / e} for e in (1, 2, 3)]
    history = run_report._history(steps + epochs)
    assert [line for line in history if "effective_rank" in line] == [history[0]] and history[0]["lr"] == 0.1
    drawn = number_sections.training(made(history=history))
    assert drawn.count("effective rank") == 1 and "step 1: 6" in drawn and "step 3: 6" not in drawn


def test_each_metric_of_a_chart_has_a_style_of_its_own():
    val = {"map@r": 0.1, "recall@1": 0.3, "r_precision": 0.2, "precision@5": 0.15}
    drawn = number_sections.training(made(history=[{"event": "epoch", "epoch": 1, "step": 3, "val": val}]))
    styles = re.findall(r'<path class="line (\w+)"', drawn)
    assert len(styles) == 4 == len(set(styles))
    names = [float(y) for y in re.findall(r'<text class="name \w+" x="[\d.]+" y="([\d.]+)"', drawn)]
    assert len(names) == 4 and min(b - a for a, b in zip(sorted(names), sorted(names)[1:], strict=False)) >= 13.9


def test_captions_keep_words_whole():
    text = format.caption("001.Brewer_Black <b>bird")
    assert [Reader(text).text] == [["001.Brewer_", "Black", " ", "<b>bird"]] and text.count('class="word"') == 3


def test_curves_name_the_best_epoch():
    text = " ".join(Reader(run_report.page(made())).text)
    assert "best: epoch 2, 40.0\u202f%" in text  # the last line that was best
    assert "3 epochs, 30 steps, 2 min" in text


def _near(x, query, k):
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    order = sorted(range(len(x)), key=lambda j: (-float(unit[query] @ unit[j]), j))
    return [j for j in order if j != query][:k]


def test_grid_shows_the_nearest_and_the_bad_ones_too():
    findings = made()
    chosen = sampling.draw(findings, 0)
    assert [group.title.split(":")[0] for group in chosen.groups] == [
        "Nearest neighbour correct",
        "Nearest neighbour wrong",
        "From the worst classes",
    ]
    first = {
        q: findings.labels[_near(findings.embeddings, q, 1)[0]] == findings.labels[q]
        for q in range(len(findings.names))
    }
    good = sum(bool(v) for v in first.values()) / len(first)
    assert f"{100 * good:.1f} %" in chosen.groups[0].title and 0 < good < 1
    for group, right in zip(chosen.groups, (True, False, None), strict=True):
        assert 0 < len(group.rows) <= sampling.ROWS
        for row in group.rows:
            assert row.neighbours == _near(findings.embeddings, row.query, sampling.NEIGHBOURS)
            assert right is None or bool(first[row.query]) == right
    worst = {one["class"] for one in chosen.diagnosis["worst_classes"][: sampling.ROWS]}
    assert {int(findings.labels[row.query]) for row in chosen.groups[2].rows} <= worst
    read = Reader(run_report.page(findings))
    expected = [
        findings.labels[n] == findings.labels[r.query] for g in chosen.groups for r in g.rows for n in r.neighbours
    ]
    assert len(read.all("figure", "right")) == sum(map(bool, expected))
    assert len(read.all("figure", "wrong")) == sum(not e for e in expected)


def test_items_keep_their_numbers_where_others_are_left_out():
    x, labels = blobs(noise=0.05)
    labels[:8] = -1  # all of the first class
    labels[20] = 5  # an item of class 2
    x[9] = torch.nan
    chosen = sampling.draw(made(embeddings=x, labels=labels), 0)
    assert not {9, *range(8)} & set(chosen.items.tolist()) and len(chosen.items) == 39
    errors = [(one["item"], one["class"], one["suggested"]) for one in chosen.diagnosis["label_errors"]]
    assert errors == [(20, 5, 2)]
    for row in (row for group in chosen.groups for row in group.rows):
        left = [j for j in chosen.items.tolist() if j != row.query]
        cosine = torch.nn.functional.cosine_similarity(x[left].double(), x[row.query].double()[None])
        assert row.neighbours == [left[j] for j in cosine.argsort(descending=True, stable=True)[:8].tolist()]


def test_another_seed_draws_others():
    findings = made()
    queries = [[r.query for g in sampling.draw(findings, seed).groups for r in g.rows] for seed in (0, 0, 1)]
    assert queries[0] == queries[1] != queries[2]


def test_nothing_a_user_names_gets_out_of_its_place():
    x, _ = blobs()
    findings = made(
        title=NASTY[0],
        classes=NASTY,
        names=[NASTY[i % 6] for i in range(len(x))],
        notes=[NASTY[1]],
        recipe={NASTY[0]: {NASTY[1]: NASTY[0], "z": NASTY[4]}},
        data={NASTY[1]: NASTY[0], "parts": {NASTY[0]: {NASTY[1]: NASTY[0]}}, "notes": [NASTY[0]]},
        results={"test": {"trained": {NASTY[0]: 0.5}, NASTY[1]: {NASTY[0]: 0.4}}, "baseline_name": NASTY[0]},
    )
    text = run_report.page(findings)
    read = offline(text)
    text.encode("utf-8")
    assert "alert(1)" in " ".join(read.text) and len(text) < 3_000_000
    assert "a" * 200 not in text


DEGENERATE = {
    "no history": {"history": []},
    "one epoch": {"history": history(1)[-2:]},
    "no validation": {"history": [line for line in history() if line["event"] == "step"]},
    "nan in history": {"history": [{"event": "step", "step": 1, "loss": math.nan}, {"event": "step", "loss": None}]},
    "empty": {"history": [{}], "results": {}, "data": {}, "recipe": {}, "notes": []},
    "nan in results": {"results": {"test": {"trained": {"recall@1": {"value": math.nan, "low": None}}}}},
    "plain results": {"results": {"test": {"trained": {"recall@1": 0.5, "queries": 48}}, "val": {"trained": {"x": 1}}}},
    "odd data": {"data": {"parts": [1, 2], "notes": "one", "nothing": None, "deep": {"a": [1, {}]}}},
    "one class": {"labels": torch.zeros(48, dtype=torch.long)},
    "every item alone": {"labels": torch.arange(48), "classes": [str(i) for i in range(48)]},
    "two items": {"embeddings": torch.eye(2, 3), "labels": torch.tensor([0, 0])},
    "two strangers": {"embeddings": torch.eye(2, 3), "labels": torch.tensor([0, 1])},
    "one item": {"embeddings": torch.ones(1, 3), "labels": torch.tensor([0])},
    "no item": {"embeddings": torch.ones(0, 3), "labels": torch.zeros(0, dtype=torch.long)},
    "one dimension": {"embeddings": torch.linspace(-1, 1, 48)[:, None]},
    "unknown labels": {"labels": torch.where(torch.arange(48) % 3 == 0, -1, blobs()[1])},
    "all unknown": {"labels": torch.full((48,), -1)},
    "all zero": {"embeddings": torch.zeros(48, 4)},
    "some nan": {"embeddings": torch.where(torch.arange(48)[:, None] < 5, torch.nan, blobs()[0])},
    "all nan": {"embeddings": torch.full((48, 4), torch.nan)},
    "vectors": {"picture": None},
    "no labels": {"labels": None, "classes": []},
    "targets": {"labels": None, "classes": [], "targets": torch.linspace(0, 1, 48)},
    "one target": {"labels": None, "classes": [], "targets": torch.ones(48), "picture": None},
    "many targets": {"labels": None, "classes": [], "targets": torch.arange(192).view(48, 4), "picture": None},
    "two with targets": {"labels": None, "embeddings": torch.eye(2), "targets": torch.tensor([0.0, 1.0])},
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_whatever_is_missing_there_is_a_page(name):
    read = offline(run_report.page(made(**DEGENERATE[name])))
    text = " ".join(read.text)
    assert not re.search(r"\bnan\b|\bNone\b|\binf\b", text), name
    for svg in re.findall(r"<svg.*?</svg>", run_report.page(made(**DEGENERATE[name])), re.S):
        assert "nan" not in svg


def test_missing_values_are_a_dash():
    text = " ".join(Reader(run_report.page(made(**DEGENERATE["nan in results"]))).text)
    assert "–" in text


def test_collapse_and_broken_rows_are_said_on_top():
    spot = torch.ones(48, 4) + 1e-4 * blobs()[0][:, :4]
    assert "Collapsed embedding" in run_report.page(made(embeddings=spot))
    assert "Collapsed embedding" not in run_report.page(made())
    text = run_report.page(made(**DEGENERATE["some nan"]))
    assert "in 5 of 48 embeddings" in text


def test_graded_grid_shows_label_distances():
    targets = torch.linspace(0, 10, 48)
    findings = made(labels=None, classes=[], targets=targets)
    groups = sampling.draw(findings, 0).groups
    for row in (row for group in groups for row in group.rows):
        assert row.label_distance == pytest.approx(
            [abs(float(targets[n] - targets[row.query])) for n in row.neighbours]
        )
        away = (findings.embeddings - findings.embeddings[row.query]).norm(dim=1)
        assert row.neighbours == [j for j in away.sort(stable=True).indices.tolist() if j != row.query][:8]
    means = [np.mean([np.mean(row.label_distance) for row in group.rows]) for group in groups]
    assert means == sorted(means) and len(means) == 3
    assert "Δ" in run_report.page(findings)


def test_pictures_that_cannot_be_read_cost_a_note():
    def broken(i):
        if i % 2:
            raise OSError("gone <b>")
        return drawn(i)

    text = run_report.page(made(picture=broken))
    offline(text)
    assert "could not be read" in text and "gone &lt;b&gt;" in text


def test_bad_input_is_a_sentence_and_the_old_page_stays(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    wrong = {
        "names must have one entry per row of embeddings: 48 rows, 1 names": {"names": ["a"]},
        "labels must be in 0..2": {"classes": ["a", "b", "c"]},
        "labels must have one entry": {"labels": torch.zeros(3, dtype=torch.long)},
        "targets must be .rows,. or .rows, K.": {"targets": torch.zeros(3)},
        "picture.i. must be uint8": {"picture": lambda i: np.zeros((4, 4))},
    }
    for sentence, change in wrong.items():
        findings = report.Findings(**{**made().__dict__, **change})
        with pytest.raises(ValueError, match=sentence):
            report.write(path, findings)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_quality_shows_the_shortest_and_the_longest(tmp_path):
    x, _ = blobs()
    lengths = torch.linspace(2, 30, len(x))[torch.randperm(len(x), generator=torch.Generator().manual_seed(3))]
    x = torch.nn.functional.normalize(x, dim=1) * lengths[:, None].to(x)
    recipe = {"loss": {"name": "magface"}}
    page = run_report.page(made(embeddings=x, free_length=True, recipe=recipe))
    section = page[page.index('id="quality"') : page.index('id="worst"')]
    assert section.index("Lowest") < section.index("Highest") and "should have short ones" in section
    order = lengths.argsort().tolist()
    shown = re.findall(r'title="folder/item(\d+)\.png"', section)
    assert [int(i) for i in shown] == order[:9] + order[::-1][:9]
    assert "items)" in section and "pairs)" not in section
    other = run_report.page(made(embeddings=x, free_length=True))
    assert "The loss supcon does not train it as a quality" in other
    assert 'id="quality"' not in run_report.page(made(embeddings=x))
    same = made(embeddings=torch.nn.functional.normalize(x, dim=1), free_length=True)
    assert 'id="quality"' in run_report.page(same)  # all of one length: one bar


def test_many_items_are_sampled(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_DIAGNOSED", 600)
    monkeypatch.setattr(sampling, "MAX_QUERIES", 64)
    labels = torch.arange(100_000) // 25
    x = torch.randn(100_000, 4, generator=torch.Generator().manual_seed(0))
    findings = made(embeddings=x, labels=labels, classes=[str(c) for c in range(4000)], picture=None)
    sample = sampling.draw(findings, 0)
    assert len(sample.diagnosed) == 600 and set(np.bincount(labels.numpy()[sample.diagnosed]).tolist()) == {0, 25}
    assert len(sample.mapped) == 1000
    for row in sample.groups[1].rows[:2]:  # neighbours are of all items, not of the sample
        cosine = torch.nn.functional.normalize(x.double(), dim=1) @ torch.nn.functional.normalize(
            x[row.query].double(), dim=0
        )
        cosine[row.query] = -2
        assert row.neighbours[0] == int(cosine.argmax())
    text = run_report.page(findings)
    assert "Among 600 of 100,000 items" in text and len(text) < 3_000_000


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    most=st.integers(2, 200),
    most_classes=st.integers(1, 40),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_samples_are_bounded_and_made_of_classes(sizes, most, most_classes, seed):
    kinds = np.repeat(np.arange(len(sizes)), sizes)
    items = np.arange(len(kinds)) * 3
    taken = sampling._by_class(items, kinds, most, most_classes, seed, 7)
    assert np.isin(taken, items).all() and (np.diff(taken) > 0).all() and len(taken) > 0
    sizes_taken = np.bincount(kinds[taken // 3], minlength=len(sizes))
    assert (sizes_taken > 0).sum() <= most_classes
    assert len(taken) <= max(most, 2 * min(most_classes, len(sizes)))
    if len(items) <= most and len(sizes) <= most_classes:
        assert len(taken) == len(items)


def test_picture_of_the_grid(tmp_path):
    from PIL import Image

    x, _ = blobs()
    findings = made(classes=["$x^", "日本", "<b>", "long " * 9, "e", "f"])
    report.write_picture(tmp_path / "grid.png", findings, rows=2)
    again = io.BytesIO((tmp_path / "grid.png").read_bytes())
    with Image.open(again) as image:
        assert image.format == "PNG" and image.width > 800 and np.asarray(image.convert("L")).std() > 20
    report.write_picture(tmp_path / "graded.png", made(labels=None, targets=torch.linspace(0, 1, len(x))))
    with pytest.raises(ValueError, match=r"findings\.picture must be given"):
        report.write_picture(tmp_path / "none.png", made(picture=None))
    with pytest.raises(ValueError, match="at least 2 items"):
        report.write_picture(tmp_path / "none.png", made(**DEGENERATE["one item"]))


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e7), most=st.integers(2, 10))
def test_ticks_are_round_and_inside(low, span, most):
    ticks = charts.ticks(low, low + span, most)
    assert 1 <= len(ticks) <= most + 1
    slack = 1e-6 * (span + abs(low))
    assert all(low - slack <= t <= low + span + slack for t in ticks)
    if len(ticks) > 1:
        digits = f"{ticks[1] - ticks[0]:.6e}"
        assert float(digits.split("e")[0]) == pytest.approx(round(float(digits.split("e")[0])), abs=1e-3)
        assert round(float(digits.split("e")[0])) in (1, 2, 5, 10)


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=20), st.floats(1, 8))
def test_smoothing_is_a_weighted_mean(ys, window):
    keep = 1 - 1 / window
    for i, smooth in enumerate(charts.smoothed(ys, window)):
        if ys[i] is None:
            assert smooth is None
            continue
        past = [y for y in ys[: i + 1] if y is not None]
        weights = [keep ** (len(past) - 1 - j) for j in range(len(past))]
        assert smooth == pytest.approx(sum(w * y for w, y in zip(weights, past, strict=True)) / sum(weights), abs=1e-9)


def test_chart_puts_values_where_they_belong():
    svg = charts.lines([charts.Line("", [0, 5, 10], [0.0, None, 4.0])], title="t", x_label="step", from_zero=True)
    path = re.search(r'<path class="line main" d="([^"]+)"', svg).group(1)
    top, base = charts.TOP, charts.HEIGHT - charts.BOTTOM
    assert path == f"M{charts.LEFT:.1f} {base:.1f}M{charts.WIDTH - charts.RIGHT:.1f} {top:.1f}"  # a gap, then the top
    assert charts.lines([charts.Line("", [0, 1], [None, math.nan])], title="t", x_label="step") == ""


VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\ufffe\uffff"), max_size=8),
)
RECIPES = st.recursive(
    st.dictionaries(st.text("ab. é\"'", max_size=4), st.one_of(VALUES, st.lists(VALUES, max_size=3)), max_size=4),
    lambda inner: st.dictionaries(st.text("xyz-", min_size=1, max_size=3), st.one_of(VALUES, inner), max_size=4),
    max_leaves=6,
)


@given(RECIPES)
def test_recipe_can_be_read_back(recipe):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    assert tomllib.loads(toml.text(recipe)) == recipe


def test_unset_keys_are_comments():
    assert toml.text({"a": None, "b": {"c": 1, "d": None}}) == "# a is not set\n\n[b]\nc = 1\n# d is not set\n"


@pytest.mark.parametrize(
    "value, text",
    [
        *((nothing, "–") for nothing in (None, math.nan, math.inf, True, "x")),
        *((3, "3"), (-2.5, "−2.5"), (12345.6, "12,346"), (1234567, "1,234,567"), (0.0, "0"), (0.5, "0.5")),
        *((0.00001234, "1.23e−5"), (1e-4, "0.0001"), (1e20, "100,000,000,000,000,000,000")),
    ],
)
def test_numbers(value, text):
    assert format.number(value) == text


def test_names_are_bounded_and_keep_both_ends():
    assert format.short("abcdefghij", 7) == "abcd…ij" and format.short("abc", 7) == "abc"
    assert len(format.short("x" * 999)) == format.MAX_NAME


def test_plane_is_pca_without_opentsne():
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    flat, by = maps.plane(x, 0)
    assert by == "PCA" and flat.min() == 0 and flat.max() == 1
    unit = torch.nn.functional.normalize(x, dim=1)
    u, s, _ = torch.linalg.svd(unit - unit.mean(0), full_matrices=False)
    for axis in range(2):
        expected = (u[:, axis] * s[axis]).numpy()
        assert abs(np.corrcoef(expected, flat[:, axis])[0, 1]) == pytest.approx(1)


def test_plane_by_tsne_keeps_classes_together(monkeypatch):
    monkeypatch.undo()
    pytest.importorskip("openTSNE", reason="nearkin[report] is not installed")
    x, labels = blobs(noise=0.1)
    flat, by = maps.plane(x, 0)
    assert by == "t-SNE" and np.array_equal(flat, maps.plane(x, 0)[0])
    away = ((flat[:, None] - flat[None]) ** 2).sum(2)
    np.fill_diagonal(away, np.inf)
    assert (labels.numpy()[away.argmin(1)] == labels.numpy()).all()


def test_close_classes_have_different_hues():
    middles = np.random.default_rng(0).uniform(0, 100, (40, 2))
    hue = maps.hues(middles)
    nearest = [sorted(range(40), key=lambda j, i=i: ((middles[i] - middles[j]) ** 2).sum())[1:3] for i in range(40)]
    assert all(hue[i] != hue[j] for i in range(40) for j in nearest[i])
    assert max(np.bincount(hue)) <= 6


def test_groups_are_explained_and_drawn():
    plain = run_report.page(made())
    assert "CMC" not in plain and "groups" not in number_sections.groups(made())
    curve = [0.5, 0.7, 0.9]
    figures = {"test": 12, "pairs_left_out": 1, "without_positives": 3}
    figures["cmc"] = {"trained": curve, "untrained": [None, 0.1, 0.2], "baseline": curve}
    results = made().results | {"groups": figures}
    text = run_report.page(made(results=results))
    offline(text)
    assert "The test items are of 12 groups." in text and "1 pair is left out" in text
    assert "3 test items have no item of" in text and "CMC: share of queries with a match" in text
    for broken in ({}, {"cmc": None}, {"cmc": {"trained": "x"}}, [1], {"cmc": {"trained": [None]}}):
        offline(run_report.page(made(results=made().results | {"groups": broken})))
