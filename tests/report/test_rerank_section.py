"""The report's section on re-ranking: both orders side by side, the verdict, and how the settings were found."""

from types import SimpleNamespace

from nearkin.report import rerank_section

FIGURE = {"value": 0.085, "low": 0.065, "high": 0.109}
FACTS = {
    "method": "k-reciprocal",
    "settings": {"k1": 30, "k2": 9, "lambda": 0.3},
    "map@r": 0.129,
    "intervals": {"map@r": [0.096, 0.169]},
    "sentence": "Re-ranking helps: MAP@R 8.5 % becomes 12.9 %.",
    "chosen": {"items": 90, "classes": 20, "plain": 0.329, "tried": [{"k1": 30, "map@r": 0.506}]},
}


def test_plain_and_reranked_stand_side_by_side():
    findings = SimpleNamespace(results={"rerank": FACTS, "test": {"trained": {"map@r": FIGURE, "recall@1": FIGURE}}})
    html = rerank_section.reranking(findings)
    assert "Re-ranking helps" in html and "k1 30, k2 9, lambda 0.3, chosen by MAP@R on 20 validation classes" in html
    assert html.count("<tr>") == 2 and "12.9" in html and "8.5" in html and "9.6–16.9" in html
    alone = rerank_section.reranking(SimpleNamespace(results=findings.results | {"rerank": FACTS | {"chosen": None}}))
    assert "as the recipe has it" in alone
    assert rerank_section.reranking(SimpleNamespace(results={})) == ""
