"""The report's section on a compatible run: three pairs of encoders, their intervals, and what was gained."""

from types import SimpleNamespace

from nearkin.report import compatible_section


def figure(value):
    return {"value": value, "low": value - 0.02, "high": value + 0.02}


FACTS = {
    "run": "runs/old",
    "metric": "map@r",
    "sentence": "Among the rows of runs/old, new queries find more than its own: a difference of +3.1 points of MAP@R.",
    "test": {
        pair: {"recall@1": figure(value + 0.3), "recall@8": figure(0.99), "map@r": figure(value)}
        for pair, value in (("old_old", 0.404), ("new_old", 0.435), ("new_new", 0.518))
    },
    "against": {"new_old": figure(0.031), "new_new": figure(0.114)},
}


def test_every_pair_of_encoders_has_a_row():
    html = compatible_section.compatibility(SimpleNamespace(results={"compatible": FACTS}))
    assert "new queries find more" in html and html.count("<tr>") == 4
    rows = html.split("<tbody>")[1].split("</tr>")[:3]
    for row, words in zip(rows, ("old among old 40.4", "new among old 43.5", "new among new 51.8"), strict=True):
        name, _, value = words.rpartition(" ")
        assert name in row and value in row
    assert "41.5–45.5" in rows[1] and "+3.1<small>+1.1 to +5.1" in rows[1] and "R@8" not in html
    assert compatible_section.compatibility(SimpleNamespace(results={})) == ""


def test_figures_without_intervals_stand_alone():
    bare = {pair: {"map@r": {"value": 0.5, "low": None, "high": None}} for pair in FACTS["test"]}
    none = {"value": None, "low": None, "high": None}
    facts = FACTS | {"test": bare, "against": {"new_old": none, "new_new": none}}
    html = compatible_section.compatibility(SimpleNamespace(results={"compatible": facts}))
    assert "50.0" in html and "<small>" not in html
