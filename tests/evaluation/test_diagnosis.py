"""The diagnosis against loops over pairs, and planted faults that it must name."""

import json
import math
from collections import Counter

import pytest
import torch
from scipy import stats

from nearkin.evaluation import diagnose, diagnosis


def blobs(classes, size, noise, seed=0, dim=8):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(size)
    centres = torch.nn.functional.normalize(torch.randn(classes, dim, generator=rng), dim=1)
    return centres[labels] + noise * torch.randn(classes * size, dim, generator=rng), labels


def mixed():
    x, labels = blobs(6, 7, 0.35, seed=1)
    labels = labels * 5 + 2
    labels[[3, 20]] = -1
    labels[41] = 77  # alone in its class
    return x, labels


def pairs_of(x, labels):
    """(distance, same class) of all pairs of known items, one by one."""
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    known = [i for i in range(len(x)) if labels[i] != -1]
    return [(float((unit[i] - unit[j]).norm()), bool(labels[i] == labels[j])) for i in known for j in known if i < j]


def neighbours_of(x, labels, k):
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    known = [i for i in range(len(x)) if labels[i] != -1]
    return {i: sorted((j for j in known if j != i), key=lambda j: -float(unit[i] @ unit[j]))[:k] for i in known}


@pytest.mark.parametrize("tile", [512, 5])
def test_pairs_by_loops(tile, monkeypatch):
    monkeypatch.setattr(diagnosis, "_TILE", tile)
    x, labels = mixed()
    result, pairs = diagnose(x, labels, bins=20), pairs_of(x, labels)
    for name, same in (("intra", True), ("inter", False)):
        far = [d for d, k in pairs if k == same]
        counts = Counter(min(int(d * 10), 19) for d in far)
        assert result[f"{name}_histogram"]["counts"] == [counts[i] for i in range(20)]
        assert result[f"{name}_histogram"]["edges"] == pytest.approx([i / 10 for i in range(21)])
        assert result[f"{name}_mean"] == pytest.approx(sum(far) / len(far))
    same = [d**2 for d, k in pairs if k]
    assert result["alignment"] == pytest.approx(sum(same) / len(same))
    assert result["uniformity"] == pytest.approx(math.log(sum(math.exp(-2 * d**2) for d, _ in pairs) / len(pairs)))
    assert (result["items"], result["classes"], result["k"]) == (40, 7, 10)


@pytest.mark.parametrize("tile", [512, 5])
def test_effective_rank_from_singular_values(tile, monkeypatch):
    monkeypatch.setattr(diagnosis, "_TILE", tile)
    x, labels = mixed()
    rows = x[labels != -1].double()
    rows = rows / rows.norm(dim=1, keepdim=True)
    p = torch.linalg.svdvals(rows - rows.mean(0))
    p = p / p.sum()
    assert diagnose(x, labels)["effective_rank"] == pytest.approx(float(torch.exp(-(p * p.log()).sum())))


def test_effective_rank_counts_directions_used_alike():
    axes = torch.cat([torch.eye(6), -torch.eye(6)])[:, :5]
    axes = axes[axes.norm(dim=1) > 0]  # plus and minus of 5 axes
    assert diagnose(axes, torch.arange(10) % 5)["effective_rank"] == pytest.approx(5)


def test_neighbour_statistics_by_loops():
    x, labels = mixed()
    result, near = diagnose(x, labels, k=4), neighbours_of(x, labels, 4)
    times = Counter(j for row in near.values() for j in row)
    assert result["hubness"] == pytest.approx(float(stats.skew([times[i] for i in near])))
    assert result["hubs"][0]["times"] == max(times.values()) == times[result["hubs"][0]["item"]]
    sizes = Counter(labels.tolist())
    confused, places = Counter(), Counter()
    for i, row in near.items():
        label = int(labels[i])
        for j in row[: sizes[label] - 1]:
            places[label] += 1
            if labels[j] != label:
                confused[label, int(labels[j])] += 1
    assert confused
    both = {tuple(sorted(pair)) for pair in confused}
    expected = [
        {
            "classes": [a, b],
            "neighbours": confused[a, b] + confused[b, a],
            "of_each": [confused[a, b], confused[b, a]],
            "share": (confused[a, b] + confused[b, a]) / (places[a] + places[b]),
        }
        for a, b in both
    ]
    assert result["confused_pairs"] == sorted(expected, key=lambda row: (-row["neighbours"], row["classes"]))[:10]


def test_worst_classes_by_loops():
    x, labels = blobs(14, 6, 0.5, seed=3)
    near, expected = neighbours_of(x, labels, 5), []
    for c in range(14):
        hits = [[bool(labels[j] == c) for j in near[i]] for i in range(6 * c, 6 * c + 6)]
        expected.append((sum(map(sum, hits)) / 30, sum(row[0] for row in hits) / 6, c))
    result = diagnose(x, labels)["worst_classes"]
    assert [row["class"] for row in result] == [c for _, _, c in sorted(expected)[:10]]
    assert [row["r_precision"] for row in result] == pytest.approx([r for r, _, _ in sorted(expected)[:10]])
    assert all(row["items"] == 6 for row in result)


def test_a_fine_embedding_has_no_faults():
    result = diagnose(*blobs(12, 12, 0.05, dim=16))
    assert not result["collapse"]["collapsed"] and not result["collapse"]["why"]
    assert not result["confused_pairs"] and not result["label_errors"]
    assert result["worst_classes"][0]["r_precision"] == 1
    assert result["intra_mean"] < result["inter_mean"] / 3


@pytest.mark.parametrize("size, k", [(20, 10), (6, 10), (6, 3)])
def test_planted_label_errors_are_found_and_nothing_else(size, k):
    x, labels = blobs(15, size, 0.05, dim=16)
    true, planted = labels.clone(), [4, 2 * size, 9 * size + 3]
    labels[planted] = (labels[planted] + 7) % 15
    labels[size] = -1
    result = diagnose(x, labels, k=k)["label_errors"]
    assert sorted(row["item"] for row in result) == planted
    for row in result:
        assert row["suggested"] == true[row["item"]] and row["class"] == labels[row["item"]]
        assert 0.8 <= row["agreement"] <= 1
    assert [row["agreement"] for row in result] == sorted((row["agreement"] for row in result), reverse=True)


def test_a_pair_cannot_outvote_a_label():
    x, labels = blobs(10, 2, 0.01, dim=16)
    labels[0] = 5  # beside the single item left of class 0; class 5 has 3, all elsewhere
    assert not diagnose(x, labels)["label_errors"]


def test_a_small_class_does_not_outvote_kin_close_behind():
    angles = [0, 1, 2, 3, 4, *range(10, 25)]  # item 0, four of class 1, fifteen of its own
    x = torch.tensor([[math.cos(a / 20), math.sin(a / 20)] for a in angles])
    labels = torch.tensor([0, *[1] * 4, *[0] * 15])
    assert 0 not in [row["item"] for row in diagnose(x, labels)["label_errors"]]  # positives fill 6 places of 10
    result = diagnose(x, labels, k=5)["label_errors"]  # 1 place of 5
    assert result == [{"item": 0, "class": 0, "suggested": 1, "agreement": 1.0}]


def test_planted_hub_is_named():
    rng = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(200, 64, generator=rng), dim=1)
    labels = torch.arange(200) % 10
    before = diagnose(x, labels, k=5)["hubness"]
    x = x + 0.3 * x.mean(0) / x.mean(0).norm()
    x[17] = x.mean(0)
    result = diagnose(x, labels, k=5)
    assert result["hubs"][0]["item"] == 17 and result["hubs"][0]["times"] > 80
    assert result["hubness"] > before + 3


def test_planted_confusion_is_named():
    x, labels = blobs(10, 10, 0.05, dim=16)
    x[labels == 7] = x[labels == 3].flip(0) + 0.01
    result = diagnose(x, labels)["confused_pairs"]
    assert len(result) == 1 and result[0]["classes"] == [3, 7] and result[0]["neighbours"] == sum(result[0]["of_each"])


def test_collapse_to_a_point_and_to_a_line_is_flagged():
    x, labels = blobs(10, 6, 0.2)
    point = diagnose(x * 1e-3 + torch.ones(8), labels)["collapse"]
    assert point["collapsed"] and "one spot" in point["why"][0]
    same = diagnose(torch.ones(60, 8), labels)
    assert same["effective_rank"] == 0 and len(same["collapse"]["why"]) == 2
    line = torch.ones(60, 8)
    line[:, 0] = labels.float() / 2
    line = diagnose(line + 1e-4 * x, labels)["collapse"]
    assert line["collapsed"] and "one line" in line["why"][-1]


def test_few_classes_well_apart_are_no_collapse():
    for classes in (2, 3):
        x = torch.eye(8)[torch.arange(20) % classes]
        assert not diagnose(x, torch.arange(20) % classes)["collapse"]["collapsed"]


def test_budget_changes_nothing():
    x, labels = blobs(30, 50, 0.4, dim=12)
    least = diagnosis._needed(12)
    assert diagnose(x, labels, budget=least) == diagnose(x, labels)
    with pytest.raises(ValueError, match="budget must be at least"):
        diagnose(x, labels, budget=least - 1)


def test_goes_through_json_and_has_no_nan():
    x, labels = mixed()
    for class_ids in (labels, torch.zeros_like(labels), torch.arange(len(x))):
        result = diagnose(x, class_ids)
        assert json.loads(json.dumps(result, allow_nan=False)) == result
    single_class = diagnose(x, torch.zeros_like(labels))
    assert (
        single_class["inter_mean"] is None
        and single_class["alignment"] is not None
        and single_class["confused_pairs"] == []
    )
    alone = diagnose(x, torch.arange(len(x)))
    assert alone["alignment"] is None and alone["worst_classes"] == [] and alone["label_errors"] == []


def test_length_does_not_count_and_zero_rows_stand_aside():
    x, labels = mixed()
    scaled = diagnose(x * torch.arange(1, 43)[:, None].double(), labels)
    assert scaled["alignment"] == pytest.approx(diagnose(x, labels)["alignment"])
    zero = diagnose(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0, 1]))
    assert zero["intra_mean"] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"labels": torch.zeros(3, dtype=torch.long)}, "labels must have one entry per row of embeddings: 42 rows"),
        ({"labels": torch.full((42,), -1)}, "labels must be known of at least 2 items, got 0"),
        ({"embeddings": torch.ones(42)}, "embeddings must have shape (rows, dimensions), got (42,)"),
        ({"embeddings": torch.full((42, 2), math.nan)}, "must be finite"),
        ({"k": 0}, "k must be >= 1, got 0"),
        ({"bins": 0}, "bins must be >= 1, got 0"),
        ({"agreement": 0.5}, "agreement must be > 0.5 and <= 1, got 0.5"),
    ],
)
def test_bad_input_is_named(change, words):
    x, labels = mixed()
    with pytest.raises((TypeError, ValueError)) as error:
        diagnose(**{"embeddings": x, "labels": labels} | change)
    assert words in str(error.value)
