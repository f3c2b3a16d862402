"""Hand-worked cases and identities of the canon, family by family."""

import itertools
import math

import numpy as np
import pytest
import torch

import reference
from cases import masks
from nearkin import losses, mining, relations
from nearkin.core import distances
from nearkin.core.angles import psi, sine
from nearkin.losses import rank, structured
from nearkin.losses.cluster import facility_location
from nearkin.training import grad_cache

f64 = torch.float64


def points(*rows):
    return torch.tensor(rows, dtype=f64)


# ---------------------------------------------------------------- pairs and triplets


def test_contrastive_by_hand():
    x, y = points([0, 0], [3, 4], [0, 1]), torch.tensor([0, 0, 1])
    # positive: D = 5; negatives: D = 1 and sqrt(18); margin 2 leaves (2 - 1)² of one of two
    assert losses.contrastive_loss(x, y, margin=2.0).item() == pytest.approx(0.5 * 25 + 0.5 * (1 / 2))


def test_triplet_by_hand():
    x, y = points([0.0, 0.0], [1.0, 0.0], [0.0, 2.0]), torch.tensor([0, 0, 1])
    plain = {"squared": False, "normalize": False, "selection": "all", "margin": 1.5}
    # anchor 0: 1 - 2 + 1.5 = 0.5; anchor 1: 1 - sqrt(5) + 1.5
    terms = [0.5, 2.5 - math.sqrt(5)]
    assert losses.triplet_loss(x, y, **plain).item() == pytest.approx(sum(terms) / 2)
    plain["margin"] = 1.1
    assert losses.triplet_loss(x, y, **plain).item() == pytest.approx(0.1 / 2)
    assert losses.triplet_loss(x, y, **plain, reduction="active").item() == pytest.approx(0.1)


@pytest.mark.parametrize("squared", [True, False])
def test_all_triplets_count_and_sum_like_the_cube(squared):
    """On a grid, where distances tie with each other and with the margin."""
    x, y = torch.randint(0, 3, (40, 3)).double(), torch.randint(0, 5, (40,))
    d = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    d = d.square().round() if squared else d
    positive, negative = masks(y)
    cube = (d[:, :, None] - d[:, None, :] + 1.0)[positive[:, :, None] & negative[:, None, :]]
    settings = {"margin": 1.0, "squared": squared, "normalize": False, "selection": "all"}
    got = {r: losses.triplet_loss(x, y, reduction=r, **settings).item() for r in ("sum", "mean", "active")}
    active = cube[cube > 1e-9]
    assert got["sum"] == pytest.approx(active.sum().item(), rel=1e-11)
    assert got["mean"] == pytest.approx(active.sum().item() / len(cube), rel=1e-11)
    if squared:  # integers: what is active is not a matter of rounding
        assert got["active"] == pytest.approx(active.mean().item(), rel=1e-12)


def test_all_triplets_keep_float32_digits_in_a_large_batch():
    x, y = torch.randn(512, 16), torch.arange(512) // 4
    single = losses.triplet_loss(x, y, selection="all", margin=0.05)
    double = losses.triplet_loss(x.double(), y, selection="all", margin=0.05)
    assert single.item() == pytest.approx(double.item(), rel=2e-6)


def test_soft_margin_starts_at_ln_2_when_collapsed():
    loss = losses.TripletLoss(None, squared=False, normalize=False, selection="batch_hard")
    assert loss(torch.zeros(8, 4), torch.arange(8) // 2).item() == pytest.approx(math.log(2))


def test_margin_normaliser_counts_pairs_and_beta_has_its_gradient():
    x, y = points([1, 0], [0, 1], [-1, 0]), torch.tensor([0, 0, 1])
    loss = losses.MarginLoss(margin=0.2, beta=1.5, num_classes=2, selection="all").double()
    root = math.sqrt(2)
    # positive pairs, both ways: 0.2 + √2 - 1.5; negatives of anchors 0, 1: D = 2 (inactive), √2; of anchor 2: 2, √2
    active = [0.2 + root - 1.5] * 2 + [0.2 - root + 1.5] * 2
    value = loss(x, y)
    assert value.item() == pytest.approx(sum(active) / 4)
    value.backward()
    assert loss.beta.grad.tolist() == pytest.approx([(-2 + 1) / 4, 1 / 4])


def test_lossless_never_goes_flat_or_off():
    x = torch.tensor([[-50.0, 50.0], [-50.0, 50.0], [50.0, -50.0]], requires_grad=True)
    for labels in ([0, 0, 1], [0, 1, 0]):
        value = losses.lossless_triplet_loss(x, torch.tensor(labels))
        assert bool(value.isfinite()) and value.item() >= -1e-6


# ---------------------------------------------------------------- structured


def test_lifted_equals_the_published_number_of_terms():
    """Half the mean of squares over ordered pairs is the paper's 1/(2|P|) over unordered ones."""
    x, y = torch.randn(8, 4, dtype=f64), torch.arange(8) // 2
    d = torch.cdist(x, x)
    total, pairs = 0.0, 0
    for i, j in itertools.combinations(range(8), 2):
        if y[i] == y[j]:
            threat = sum(math.exp(1 - d[i, k]) for k in range(8) if y[k] != y[i])
            threat += sum(math.exp(1 - d[j, k]) for k in range(8) if y[k] != y[j])
            total += max(0.0, math.log(threat) + d[i, j].item()) ** 2
            pairs += 1
    assert losses.lifted_structure_loss(x, y).item() == pytest.approx(total / (2 * pairs), rel=1e-12)


def test_npair_of_one_pair_a_class_is_cross_entropy():
    a, p, y = torch.randn(6, 5, dtype=f64), torch.randn(6, 5, dtype=f64), torch.randperm(6)
    entropy = torch.nn.functional.cross_entropy(a @ p.T, torch.arange(6))
    penalty = 0.002 / 4 * (a.square().sum(1).mean() + p.square().sum(1).mean())
    mixed = torch.stack([a, p], 1).flatten(0, 1)  # a0 p0 a1 p1 …
    batch = losses.npair_loss(mixed, y.repeat_interleave(2))
    torch.testing.assert_close(batch, entropy + penalty)
    torch.testing.assert_close(losses.npair_loss(a, y, p, y), entropy + penalty)
    torch.testing.assert_close(losses.npair_loss(mixed, y.repeat_interleave(2), length_weight=0.0), entropy)


def test_infonce_of_two_views_is_nt_xent():
    a, b = torch.randn(7, 5), torch.randn(7, 5)
    z = torch.nn.functional.normalize(torch.cat([a, b]), dim=1)
    logits = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
    wanted = torch.nn.functional.cross_entropy(logits, torch.arange(14).roll(7))
    got = losses.infonce_loss(torch.cat([a, b]), torch.arange(7).repeat(2), temperature=0.5)
    torch.testing.assert_close(got, wanted)


# ---------------------------------------------------------------- ratio


def test_log_ratio_is_twice_the_variance():
    x, t = torch.randn(9, 4, dtype=f64), torch.randn(9, dtype=f64)
    squared = torch.cdist(x, x).square()
    per_anchor = []
    for a in range(9):
        others = [i for i in range(9) if i != a]
        ratio = (squared[a, others] + 1e-6).log() - 2 * (t[a] - t[others]).abs().log()
        per_anchor.append(2 * ratio.var(correction=1))
    torch.testing.assert_close(losses.logratio_loss(x, t), torch.stack(per_anchor).mean())


def test_log_ratio_of_the_targets_themselves_is_zero():
    t = torch.tensor([0.0, 1.0, 2.5, 7.0, 7.5]).double()
    x = torch.stack([3 * t, torch.zeros(5)], 1)
    assert losses.logratio_loss(x, t, epsilon=1e-300).item() == pytest.approx(0, abs=1e-20)
    label_distance = relations.LabelDistance((t[:, None] - t[None]).abs())
    torch.testing.assert_close(losses.logratio_loss(x, label_distance), losses.logratio_loss(x, t))
    torch.testing.assert_close(losses.logratio_loss(x, t[:, None]), losses.logratio_loss(x, t))


def test_log_ratio_ties_and_duplicates():
    x = torch.randn(7, 3, dtype=f64)
    t = torch.tensor([0, 1, -1, 2, 2, 0, 3]).double()
    gaps = (t[:, None] - t[None]).abs()
    for ties in ("drop", "keep"):
        wanted = reference.logratio(x, gaps, ties=ties)
        torch.testing.assert_close(losses.logratio_loss(x, t, ties=ties), wanted)
    assert losses.logratio_loss(x, t, ties="drop").item() != losses.logratio_loss(x, t, ties="keep").item()


# ---------------------------------------------------------------- facility location


def random_batch(seed, size=12, classes=4):
    g = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.normalize(torch.randn(size, 4, generator=g, dtype=f64), dim=1)
    labels = torch.cat([torch.arange(classes), torch.randint(0, classes, (size - classes,), generator=g)])
    return x, labels[torch.randperm(size, generator=g)]


@pytest.mark.parametrize("gamma", [0.0, 1.0, 4.0])
def test_facility_against_every_subset(gamma):
    """Never above the best of all S, and equal to it in at least two thirds of random cases."""
    equal = 0
    for seed in range(60):
        x, y = random_batch(seed)
        d = distances.euclidean(x)
        best, _ = reference.best_clustering(d, y, gamma)
        clustering = facility_location(d, y, gamma=gamma)
        chosen = clustering.chosen.nonzero().squeeze(1).tolist()
        assert len(chosen) == len(set(y.tolist()))
        assert clustering.score.item() == pytest.approx(float(reference.facility_score(d, y, chosen, gamma)), abs=1e-9)
        assert clustering.score.item() <= float(best) + 1e-9
        equal += clustering.score.item() >= float(best) - 1e-9
    print(f"gamma {gamma}: {equal} of 60 optimal")
    assert equal >= 40


def test_facility_bracket_is_not_negative_under_exact_inference():
    for seed in range(30):
        x, y = random_batch(seed, size=9, classes=3)
        d = distances.euclidean(x)
        best, _ = reference.best_clustering(d, y, 0.7)
        assert float(best) >= float(reference.facility_oracle(d, y)) - 1e-12


def test_facility_sweeps_never_lower_the_score_even_with_ties():
    x = points([0, 0], [0, 2], [0, -1], [1, 0], [1, 1], [-1, 0], [-1, 1])
    grids = [(x, torch.tensor([2, 1, 0, 1, 1, 1, 1]))]
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        grids.append((torch.randint(0, 3, (10, 2), generator=g).double(), torch.randint(0, 4, (10,), generator=g)))
    for x, y in grids:
        d = distances.euclidean(x)
        scores = [facility_location(d, y, sweeps=s).score.item() for s in range(4)]
        assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(scores)), scores


def test_facility_shows_its_clustering_and_decays():
    x, y = random_batch(1)
    loss = losses.FacilityLocationLoss(gamma=2.0, decay=0.5, decay_steps=2).double()
    for step in range(4):
        assert loss.gamma.item() == pytest.approx(2 * 0.5 ** (step / 2))
        loss(x, y)
    assert int(loss.medoids.sum()) == 4
    assert bool((loss.assignment[loss.medoids] == loss.medoids.nonzero().squeeze(1)).all())
    assert int(loss.state_dict()["steps"]) == 4
    loss.eval()(x, y)
    assert int(loss.steps) == 4


# ---------------------------------------------------------------- proxies and class weights


def test_proxy_nca_softmax_is_normalised_softmax():
    x, y, p = torch.randn(8, 5, dtype=f64), torch.randint(0, 4, (8,)), torch.randn(4, 5, dtype=f64)
    for scale in (1.0, 3.0):
        wanted = losses.normalized_softmax_loss(x, y, p, scale=2 * scale**2)
        torch.testing.assert_close(losses.proxy_nca_loss(x, y, p, scale=scale), wanted)


def test_proxy_nca_keeps_its_hardest_sample():
    p = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    x = torch.tensor([[-1.0, 1e-3]], requires_grad=True)
    value = losses.proxy_nca_loss(x, torch.tensor([0]), p, scale=math.sqrt(32))
    value.backward()
    assert value.item() == pytest.approx(128, rel=1e-4) and float(x.grad.abs().max()) > 0.01
    easy = losses.proxy_nca_loss(-x, torch.tensor([0]), p, scale=3.0, form="original")
    assert easy.item() < -30  # not bounded by 0


def test_proxy_anchor_survives_half_precision():
    x = torch.randn(16, 8).half()
    loss = losses.ProxyAnchorLoss(4, 8)
    assert bool(loss(x, torch.arange(16) % 4).isfinite())


@pytest.mark.parametrize("margin", [1, 2, 3, 4, 5])
def test_sphereface_psi_is_its_definition_and_its_polynomial(margin):
    theta = torch.linspace(0, math.pi, 2001, dtype=f64)
    k = (theta * margin / math.pi).floor().clamp(max=margin - 1)
    defined = (-1) ** k * (margin * theta).cos() - 2 * k
    got = psi(theta.cos(), margin)
    torch.testing.assert_close(got, defined, rtol=0, atol=1e-12)
    assert bool((got.diff() <= 1e-12).all()) and got[-1].item() == pytest.approx(1 - 2 * margin)
    c = theta.cos()
    if margin == 2:
        torch.testing.assert_close(got, 2 * c.sign() * c.square() - 1, rtol=0, atol=1e-12)
    if margin == 4:
        s0 = c.sign()
        s3 = s0 * (2 * c.square() - 1).sign()
        polynomial = s3 * (8 * c**4 - 8 * c.square() + 1) + 2 * s0 + s3 - 3
        away = (c.abs() > 1e-9) & ((2 * c.square() - 1).abs() > 1e-9)
        torch.testing.assert_close(got[away], polynomial[away], rtol=0, atol=1e-12)


def test_sphereface_anneals_and_stops_at_the_floor():
    loss = losses.SphereFaceLoss(4, 8)
    seen = []
    for step in (0, 1, 100, 1658, 1659, 5000):
        loss.steps.fill_(step)
        seen.append(loss.annealing.item())
    assert seen == pytest.approx([1000, 1000 / 1.12, 1000 / 13, 1000 / (1 + 0.12 * 1658), 5, 5])
    assert seen[3] > 5
    loss.steps.zero_()
    for _ in range(3):
        loss(torch.randn(4, 8), torch.arange(4))
    assert int(loss.steps) == 3
    assert int(losses.SphereFaceLoss(4, 8).load_state_dict(loss.state_dict()) is not None)


def test_arcface_at_both_ends_of_the_circle():
    for angle in (0.0, 1e-8, 1e-4, 1.0, math.pi - 0.5 - 1e-6, math.pi - 0.5 + 1e-6, math.pi - 1e-7, math.pi):
        w = points([1, 0, 0], [0, 0, 1]).requires_grad_()
        x = points([math.cos(angle), math.sin(angle), 0]).requires_grad_()
        value = losses.arcface_loss(x, torch.tensor([0]), w)
        value.backward()
        beyond = angle > math.pi - 0.5
        target = math.cos(angle) - 0.5 * math.sin(0.5) if beyond else math.cos(angle + 0.5)
        wanted = math.log1p(math.exp(-64 * target)) if target > -1 else -64 * target
        assert value.item() == pytest.approx(wanted, rel=1e-6, abs=1e-20)
        assert bool(x.grad.isfinite().all()) and bool(w.grad.isfinite().all())


def test_arcface_target_falls_all_the_way():
    theta = torch.linspace(0, math.pi, 5001, dtype=f64)
    x = torch.stack([theta.cos(), theta.sin()], 1)
    w = points([1, 0], [1, 0])  # a second class at the same place, without margin: loss = softplus(s (cos - target))
    value = losses.arcface_loss(x, torch.zeros(5001, dtype=torch.long), w, scale=1.0, reduction="none")
    target = theta.cos() - (value.exp() - 1).log()
    assert bool((target.diff() < 0).all())


def test_arcface_gradient_is_true_or_straight_through():
    x, w, y = torch.randn(1, 3, dtype=f64), torch.randn(2, 3, dtype=f64), torch.tensor([0])

    def slope(**settings):
        weight = w.clone().requires_grad_()
        losses.arcface_loss(x, y, weight, **settings).backward()
        return weight.grad[0].norm().item()

    u, own = distances.unit(x), distances.unit(w[:1])
    cos = (u * own).sum(1)
    sin = sine(cos, u, own)
    ratio = math.sin(math.acos(cos.item()) + 0.5) / sin.item()  # d cos(θ + m) / d cos θ
    assert slope() / slope(straight_through=True) == pytest.approx(ratio, rel=1e-9)


def test_float32_angles_keep_their_digits_near_zero():
    x = points([1, 1e-4, 0]).float()
    w = torch.tensor([[1.0, 0.0, 0.0]])
    u, own = distances.unit(x), distances.unit(w)
    sin = sine((u * own).sum(1), u, own)
    assert sin.item() == pytest.approx(1e-4, rel=1e-4)  # sqrt(1 - cos²) in float32 gives 0 or 3e-4


def test_adacos_scales():
    assert losses.AdaCosLoss(10, 4).scale.item() == pytest.approx(math.sqrt(2) * math.log(9))
    loss = losses.AdaCosLoss(100, 32).double()
    for _ in range(200):
        loss(torch.randn(64, 32, dtype=f64), torch.randint(0, 100, (64,)))
    assert 6.5 < loss.scale.item() < 8.5  # settles for random features
    before = loss.scale.item()
    loss.eval()(torch.randn(64, 32, dtype=f64), torch.randint(0, 100, (64,)))
    assert loss.scale.item() == before == loss.state_dict()["scale"].item()


def test_heat_comes_when_it_is_due():
    loss = losses.HeatedSoftmaxLoss(3, 4, heat_after=2)
    scales = []
    for _ in range(4):
        scales.append(loss.scale.item())
        loss(torch.randn(6, 4), torch.arange(6) % 3)
    assert scales == [16, 16, 4, 4]
    assert losses.HeatedSoftmaxLoss(3, 4).scale.item() == 16


def test_centers_move_by_the_papers_rule():
    x, y = points([2, 0], [4, 0], [0, 6]), torch.tensor([0, 0, 2])
    loss = losses.CenterLoss(3, 2, alpha=0.5).double()
    loss(x, y)
    # class 0: 0.5 * (2 + 4) / (1 + 2) = 1; class 2: 0.5 * 6 / (1 + 1) = 1.5
    assert loss.centers.tolist() == [[1, 0], [0, 0], [0, 1.5]]
    loss.eval()(x, y)
    assert loss.centers.tolist() == [[1, 0], [0, 0], [0, 1.5]]
    wanted = reference.center_update(x, y, loss.centers, alpha=0.5)
    torch.testing.assert_close(losses.center_update(x, y, loss.centers, alpha=0.5), wanted)


def test_soft_triple_of_one_center_is_cosface():
    x, y, w = torch.randn(6, 4, dtype=f64), torch.randint(0, 3, (6,)), torch.randn(3, 4, dtype=f64)
    wanted = losses.cosface_loss(x, y, w, margin=0.01, scale=20.0)
    torch.testing.assert_close(losses.soft_triple_loss(x, y, w, centers_per_class=1), wanted)


# ---------------------------------------------------------------- siamese and rank


def test_siamese_learns_to_verify_and_answers():
    g = torch.Generator().manual_seed(0)
    means = torch.randn(8, 6, generator=g)
    y = torch.arange(8).repeat_interleave(8)
    x = means[y] + 0.1 * torch.randn(64, 6, generator=g)
    loss = losses.SiameseLoss(6)
    optimiser = torch.optim.Adam(loss.parameters(), 0.1)
    for _ in range(150):
        optimiser.zero_grad()
        loss(x, y).backward()
        optimiser.step()
    same, other = loss.probability(x[:-1:2], x[1::2]), loss.probability(x, x.roll(8, 0))
    assert float(same.detach().min()) > 0.5 > float(other.detach().max())
    with pytest.raises(ValueError, match=r"b must have the shape of a: \(2, 6\), got \(3, 6\)"):
        loss.probability(x[:2], x[:3])


def test_siamese_weight_at_zero_still_learns():
    loss = losses.SiameseLoss(5)
    torch.nn.init.zeros_(loss.weight)
    loss(torch.randn(8, 5), torch.arange(8) // 2).backward()
    assert bool((loss.weight.grad != 0).all())


def test_smooth_ap_tends_to_average_precision():
    from sklearn.metrics import average_precision_score

    x, y = torch.randn(20, 6, dtype=f64), torch.arange(20) % 4
    scores = distances.cosine(x).numpy()
    wanted = []
    for i in range(20):
        others = np.arange(20) != i
        wanted.append(1 - average_precision_score((y == y[i]).numpy()[others], scores[i][others]))
    got = losses.smooth_ap_loss(x, y, temperature=1e-9).item()
    assert got == pytest.approx(np.mean(wanted), abs=1e-9)


def test_smooth_ap_knows_how_many_kin_it_was_told(monkeypatch):
    x, y = torch.randn(12, 6, dtype=f64), torch.arange(12) % 4
    wanted = losses.smooth_ap_loss(x, y)
    torch.testing.assert_close(losses.smooth_ap_loss(x, y, max_positives=2), wanted)
    with pytest.raises(ValueError, match="max_positives must be at least the most positives of an anchor: 2, got 1"):
        losses.smooth_ap_loss(x, y, max_positives=1)
    monkeypatch.setattr("nearkin.core.checks.reads_values", lambda tensor: False)
    torch.testing.assert_close(losses.smooth_ap_loss(x, y), wanted)
    torch.testing.assert_close(losses.smooth_ap_loss(x, y, max_positives=2), wanted)
    assert bool(losses.smooth_ap_loss(x, y, max_positives=1).isnan())


def test_rank_losses_of_a_perfect_batch_are_zero():
    x, y = torch.eye(4, dtype=f64).repeat_interleave(3, 0), torch.arange(4).repeat_interleave(3)
    assert losses.smooth_ap_loss(x, y).item() == pytest.approx(0, abs=0.5)
    assert losses.fastap_loss(x, y).item() == pytest.approx(0, abs=1e-12)


def test_active_is_over_the_terms_above_zero_lossless():
    """Corners of the cube: positives at one place and negatives opposite cost nothing, what is between them does."""
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.5]])
    y = torch.tensor([0, 0, 1, 1])
    settings = {"sigmoid": False, "epsilon": 1e-8}
    share = [[float((u - v).square().sum()) / 2 for v in x] for u in x]
    values = [  # l_apn of every triplet
        -math.log(1 - share[a][p]) - math.log(share[a][n])
        for a, p, n in itertools.permutations(range(4), 3)
        if y[a] == y[p] and y[a] != y[n]
    ]
    above = [v for v in values if v > 1e-6]
    assert 0 < len(above) < len(values)
    for kind in (torch.float32, torch.float64):
        got = losses.lossless_triplet_loss(x.to(kind), y, reduction="active", **settings)
        assert got.item() == pytest.approx(sum(above) / len(above), rel=1e-5)
        blocks = losses.lossless_triplet_loss(x.to(kind), y, reduction="active", max_memory=2_000, **settings)
        assert blocks.item() == pytest.approx(got.item(), rel=1e-6)


def test_active_is_over_the_terms_above_zero_fastap():
    """An anchor whose positives all come first costs exactly 0, in every precision, and does not count as active."""
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        y = torch.arange(4).repeat_interleave(5)
        x = 5 * torch.eye(4, 16)[y] + 0.3 * torch.randn(20, 16, generator=g)
        assert not bool(losses.fastap_loss(x, y, reduction="none").any())
        mixed = torch.cat(
            [x, torch.eye(4, 16)[:1] - torch.eye(4, 16)[1:2]]
        )  # one item among negatives, its positives afar
        each = losses.fastap_loss(mixed, torch.cat([y, y[-1:]]), reduction="none")
        assert 0 < int((each > 1e-3).sum()) < 21 and bool(((each > 1e-3) | (each == 0)).all())
        active = losses.fastap_loss(mixed, torch.cat([y, y[-1:]]), reduction="active")
        assert active.item() == pytest.approx(each[each > 1e-3].mean().item(), rel=1e-6)


def test_quadruplet_by_hand():
    """On a line: positives at 0 and 1, negatives of two classes at 3 and 4; of squared distances."""
    x = torch.tensor([[0.0], [1.0], [3.0], [4.0]])
    y = torch.tensor([0, 0, 1, 2])
    plain = {"normalize": False, "margin": 5.0, "second_margin": 2.0, "selection": "batch_hard"}
    first = [(1 - 9 + 5) * 0, 1 - 4 + 5]  # anchors 0 and 1, whose nearest negative is the third item
    second = [1 - 1 + 2, 1 - 1 + 2]  # the third item's nearest of a third class is the fourth, at 1
    assert losses.quadruplet_loss(x, y, **plain).item() == pytest.approx(sum(first) / 2 + sum(second) / 2)
    assert losses.quadruplet_loss(x, y, **plain, reduction="active").item() == pytest.approx(2 + 2)
    assert losses.quadruplet_loss(x, y, **plain, reduction="sum").item() == pytest.approx(2 + 4)
    assert losses.quadruplet_loss(x, y, **plain, reduction="none").tolist() == [2.0, 4.0, 0.0, 0.0]
    two = losses.quadruplet_loss(x, y.clamp(max=1), **plain)  # without a third class a triplet loss is left
    torch.testing.assert_close(
        two, losses.triplet_loss(x, y.clamp(max=1), normalize=False, margin=5.0, selection="batch_hard")
    )


@pytest.mark.parametrize("selection", ["semihard", "all", "random", "random_semihard"])
def test_quadruplet_of_a_large_batch_is_the_cube(selection):
    """Against every quadruplet written out, with duplicates and unknown items."""
    g = torch.Generator().manual_seed(4)
    x, y = torch.randn(40, 6, generator=g, dtype=f64), torch.randint(-1, 7, (40,), generator=g)
    x[3], x[9] = x[5], x[5]
    positive, negative = masks(y)
    d = distances.squared_euclidean(x, normalize=True)
    if selection == "all":
        valid = positive[:, :, None] & negative[:, None, :]  # (a, p, n)
    else:
        relation = relations.of(y)
        settings = {"margin": 0.2, "squared": True, "generator": torch.Generator().manual_seed(1)}
        chosen = mining.select(selection, d.sqrt(), relation, dim=6, **settings)
        valid = torch.zeros(40, 40, 40, dtype=torch.bool)
        valid[chosen.indices()] = True
    third = negative[:, :, None] & negative[:, None, :] & negative[None]  # (a, n, l)
    gap = torch.where(third, d[None], torch.inf).amin(2)
    first = (d[:, :, None] - d[:, None, :] + 0.2).relu()[valid]
    second = (d[:, :, None] - gap[:, None, :] + 0.1).relu()[valid]
    seeded = {"generator": torch.Generator().manual_seed(1)} if selection in mining.DRAWN else {}
    got = losses.quadruplet_loss(x, y, selection=selection, **seeded)
    assert got.item() == pytest.approx((first.mean() + second.mean()).item(), rel=1e-12)


@pytest.mark.parametrize("selection", ["all", "semihard"])
@pytest.mark.parametrize("num_classes", [None, 4])
def test_margin_with_a_boundary_per_item(selection, num_classes):
    """β_0 + β_class + β_img: value, and the gradient of every part, against the loop; in blocks and as references."""
    g = torch.Generator().manual_seed(2)
    y = torch.arange(4).repeat(3)
    x = torch.randn(4, 5, generator=g, dtype=f64)[y] + torch.randn(12, 5, generator=g, dtype=f64)
    items = torch.randperm(20, generator=g)[:12]
    settings = {"num_classes": num_classes, "num_items": 20, "beta_weight": 0.3, "selection": selection}
    module = losses.MarginLoss(**settings).double()
    with torch.no_grad():
        module.item_beta.copy_(0.2 * torch.randn(20, generator=g, dtype=f64))
    value = module(x, y, items=items)
    got = torch.autograd.grad(value, list(module.parameters()))
    chosen = "all"
    positive, negative = masks(y)
    if selection != "all":
        chosen = reference.mine_semihard(distances.euclidean(x, normalize=True), positive, negative)
    total = (module.beta if num_classes is None else module.beta[y]) + module.item_beta[items]
    twin = reference.margin(x, positive, negative, beta=total, classes=range(12), beta_weight=0.3, selection=chosen)
    torch.testing.assert_close(value, twin)
    for ours, theirs in zip(got, torch.autograd.grad(twin, list(module.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs)
    module.max_memory = 14_000
    torch.testing.assert_close(module(x, y, items=items), twin)
    copy = losses.MarginLoss(**settings)
    copy.load_state_dict(module.state_dict())  # the state dict carries them
    from nearkin.memory import CrossBatchMemory

    module.max_memory = None
    remembering = CrossBatchMemory(module, 30, 5).double()
    torch.testing.assert_close(remembering(x, y, items=items), twin)  # an empty memory: the batch alone


def test_items_that_are_missing_or_unknown_are_refused():
    x, y = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    loss = losses.MarginLoss(num_items=9)
    with pytest.raises(ValueError, match=r"items must be given where β is one per item \(num_items=9\)"):
        loss(x, y)
    with pytest.raises(ValueError, match=r"items must be in 0\.\.8, got 9"):
        loss(x, y, items=torch.tensor([0, 1, 2, 9]))
    with pytest.raises(ValueError, match=r"items must be in 0\.\.8, got -1"):
        loss(x, y, items=torch.tensor([0, -1, 2, 3]))
    with pytest.raises(ValueError, match="items must"):
        loss(x, y, items=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"items must be left out without a β per item \(num_items\)"):
        losses.MarginLoss()(x, y, items=torch.arange(4))
    with pytest.raises(ValueError, match="num_items must be"):
        losses.MarginLoss(num_items=0)


def test_contrastive_as_the_paper_has_it():
    """Half of the mean over all pairs, by hand: one positive pair at 1, two negative pairs at 2 and 3, margin 3."""
    x, y = points([0.0], [1.0], [3.0]), torch.tensor([0, 0, 1])
    pairs = [1.0, (3 - 3) ** 2, (3 - 2) ** 2]
    assert losses.contrastive_loss(x, y, margin=3.0, balance=False).item() == pytest.approx(sum(pairs) / 3 / 2)
    assert losses.contrastive_loss(x, y, margin=3.0).item() == pytest.approx((1.0 + sum(pairs[1:]) / 2) / 2)
    assert losses.contrastive_loss(x, y, margin=3.0, balance=False, reduction="active").item() == pytest.approx(0.5)
    alone = losses.contrastive_loss(x[:2], y[:2], balance=False)  # of one kind only, both are the same
    torch.testing.assert_close(alone, losses.contrastive_loss(x[:2], y[:2]))
    with pytest.raises(TypeError, match="balance must be True or False, got 'no'"):
        losses.ContrastiveLoss(balance="no")


def test_a_scale_whose_square_no_float_holds_is_refused():
    with pytest.raises(ValueError, match=r"scale must be <= 1e\+15 \(distances are .* by its square\), got 1e\+30"):
        losses.ProxyNCALoss(4, 3, scale=1e30)
    x = torch.randn(4, 3, requires_grad=True)
    value = losses.ProxyNCALoss(4, 3, scale=1e15)(x, torch.arange(4))
    value.backward()
    assert bool(value.isfinite()) and bool(x.grad.isfinite().all())


# ---- margins by length


def lengthy(*lengths, seed=0):
    """Rows of these lengths in random directions, labels, class weights."""
    g = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.normalize(torch.randn(len(lengths), 6, generator=g, dtype=torch.float64), dim=1)
    x = x * torch.tensor(lengths, dtype=torch.float64)[:, None]
    return x, torch.arange(len(lengths)) % 4, torch.randn(4, 6, generator=g, dtype=torch.float64)


def test_adaface_is_cosface_at_the_mean_and_arcface_far_below_it():
    x, labels, weight = lengthy(7.0, 7.0, 7.0, 7.0, 7.0)
    at_mean = losses.adaface_loss(x, labels, weight, mean=7.0, std=2.0, margin=0.3)
    torch.testing.assert_close(at_mean, losses.cosface_loss(x, labels, weight, margin=0.3))
    below = losses.adaface_loss(x, labels, weight, mean=90.0, std=2.0, margin=0.3)
    torch.testing.assert_close(below, losses.arcface_loss(x, labels, weight, margin=0.3))
    any_length = losses.adaface_loss(lengthy(0.1, 9.0, 70.0)[0], labels[:3], weight, margin=0.3, concentration=0.0)
    torch.testing.assert_close(
        any_length, losses.cosface_loss(lengthy(0.1, 9.0, 70.0)[0], labels[:3], weight, margin=0.3)
    )


def test_adaface_has_no_slope_where_its_angle_is_clipped():
    """A long embedding on its own class: θ - m z would be below 0."""
    weight = torch.eye(3, dtype=torch.float64)
    for height in (0.0, 0.2):
        x = torch.tensor([[50.0, 50 * height, 0.0]], dtype=torch.float64, requires_grad=True)
        value = losses.adaface_loss(x, torch.tensor([0]), weight, mean=1.0, std=0.1, scale=4.0)
        target = 4 * (math.cos(1e-3) - 0.8)
        others = 4 * torch.nn.functional.normalize(x.detach(), dim=1)[0, 1:]
        wanted = torch.logsumexp(torch.cat([torch.tensor([target], dtype=torch.float64), others]), 0) - target
        torch.testing.assert_close(value, wanted)
        value.backward()
        assert x.grad.isfinite().all() and bool(x.grad[0, 1] > 0)  # the others still push


@pytest.mark.parametrize("momentum", [0.01, 0.4, 1.0])
def test_adaface_statistics_are_the_loop(momentum):
    x, labels, _ = lengthy(1e-5, 3.0, 8.0, 500.0, 9.0, 2.0)
    labels[1] = -1
    x[4, 2] = math.nan
    mean, std = torch.tensor(20.0), torch.tensor(100.0)
    for rows in (slice(0, 6), slice(2, 3), slice(1, 2), slice(0, 0)):  # two count, one, none, no row
        wanted = reference.adaface_statistics(x[rows], labels[rows], mean, std, momentum=momentum)
        mean, std = losses.adaface_statistics(x[rows], labels[rows], mean, std, momentum=momentum)
        assert (float(mean), float(std)) == pytest.approx(
            [float(part) for part in wanted], rel=1e-6
        ) and mean.dtype == torch.float32
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\], got 2"):
        losses.adaface_statistics(x, labels, mean, std, momentum=2)


def test_adaface_moves_its_statistics_once_per_training_step_and_before_they_are_used():
    x, labels, _ = lengthy(3.0, 5.0, 8.0, 6.0)
    module = losses.AdaFaceLoss(4, 6, momentum=0.5).double()
    wanted = reference.adaface_statistics(x, labels, 20.0, 100.0, momentum=0.5)
    value = module(x, labels)
    assert (float(module.mean), float(module.std)) == pytest.approx(wanted)
    mean, std = module.mean, module.std
    torch.testing.assert_close(value, losses.adaface_loss(x, labels, module.weight, mean=mean, std=std))
    module.eval()
    module(x, labels)
    assert module.mean is mean and module.std is std
    module.train()
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.3"):
        module(x, labels + 9)
    assert module.mean is mean  # nothing is learned from a bad batch
    linear, whole = torch.nn.Linear(6, 6).double(), losses.AdaFaceLoss(4, 6, momentum=0.5).double()
    grad_cache.backward(lambda part: linear(x[part]), 4, 2, lambda z: whole(z, labels), linear)
    wanted = reference.adaface_statistics(linear(x), labels, 20.0, 100.0, momentum=0.5)
    assert (float(whole.mean), float(whole.std)) == pytest.approx(wanted)


def test_magface_of_one_margin_is_arcface():
    x, labels, weight = lengthy(3.0, 15.0, 60.0, 200.0, 0.0)
    level = {"lower_margin": 0.6, "upper_margin": 0.6, "length_weight": 0.0}
    for reduction in ("mean", "none", "active"):
        ours = losses.magface_loss(x, labels, weight, **level, reduction=reduction)
        torch.testing.assert_close(ours, losses.arcface_loss(x, labels, weight, margin=0.6, reduction=reduction))


def test_magface_draws_short_embeddings_out_and_leaves_the_longest_alone():
    """A class of its own each: no other class, no margin, only the penalty."""
    x = torch.tensor([[0.01, 0, 0], [5.0, 0, 0], [30.0, 0, 0], [110.0, 0, 0], [500.0, 0, 0], [0, 0, 0]])
    x = x.double().requires_grad_()
    value = losses.magface_loss(x, torch.zeros(6, dtype=torch.long), torch.ones(1, 3).double(), reduction="none")
    value.sum().backward()
    at_ten = 35 * (1 / 110**2 - 1 / 100)
    wanted = [at_ten, at_ten, 35 * (1 / 110**2 - 1 / 900), 0.0, 0.0, 0.0]
    torch.testing.assert_close(x.grad[:, 0], torch.tensor(wanted).double(), rtol=1e-6, atol=1e-12)
    g = [v / 110**2 + 1 / v for v in (10.0, 30.0, 110.0)]
    assert value[1].item() == pytest.approx(35 * g[0] + at_ten * (5 - 10)) and value[2].item() == pytest.approx(
        35 * g[1]
    )
    assert value[3].item() == pytest.approx(35 * g[2]) == value[4].item()


def test_sigmoid_is_the_paper_of_two_views():
    """Images and texts, one positive each: -Σ log σ(z (t s + b)) / B."""
    g = torch.Generator().manual_seed(1)
    images, texts = (torch.randn(5, 4, generator=g, dtype=torch.float64) for _ in range(2))
    unit = torch.nn.functional.normalize
    logits = 10 * unit(images, dim=1) @ unit(texts, dim=1).T - 10
    signs = 2 * torch.eye(5, dtype=torch.float64) - 1
    wanted = -torch.nn.functional.logsigmoid(signs * logits).sum() / 5
    ids = torch.arange(5)
    torch.testing.assert_close(losses.sigmoid_loss(images, ids, texts, ids), wanted)
    module = losses.SigmoidLoss().double()
    module(images, ids, texts, ids).backward()
    assert module.log_scale.grad.isfinite() and float(module.bias.grad) != 0
    blocks = losses.sigmoid_loss(images, ids, texts, ids, max_memory=10 * 4 * 48 + 2 * 5 * 128)
    torch.testing.assert_close(blocks, wanted)
    with pytest.raises(ValueError, match=r"log_scale must be a number or a floating point scalar, got .*\(2,\)"):
        losses.sigmoid_loss(images, ids, texts, ids, log_scale=torch.ones(2))


def vicreg_outcome(x, kind):
    x = x.to(kind, copy=True).requires_grad_()
    value = losses.vicreg_loss(x, torch.arange(16) // 4)
    value.backward()
    return float(value.detach()), x.grad


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5, 1e6, 3e6, 1e7, 1e9])
def test_vicreg_of_long_rows_is_as_exact_in_float32(size):
    x = size * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    (got, slope), (wanted, exact) = (vicreg_outcome(x, kind) for kind in (torch.float32, torch.float64))
    assert got == pytest.approx(wanted, rel=1e-5)
    assert float((slope - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


@pytest.mark.parametrize("size", [1e10, 1e20, 3e37])
def test_vicreg_beyond_float32_is_finite(size):
    value, slope = vicreg_outcome(size * torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.float32)
    assert 1e37 < value < math.inf and slope.isfinite().all()


def test_a_check_that_reads_values_chooses_no_path(monkeypatch):
    """As under `strict` on a device: N-pair and Smooth-AP go the way that they go there."""
    monkeypatch.setattr(distances, "freely_read", lambda tensor: False)
    monkeypatch.setattr(structured, "_between_sides", None)
    x, y = torch.randn(8, 4, dtype=f64), torch.arange(8) // 2
    assert losses.npair_loss(x, y).isfinite()
    assert rank._slots(torch.tensor([2, 3]), 7, None) == 7
    with pytest.raises(ValueError, match="max_positives must be"):
        rank._slots(torch.tensor([2, 3]), 7, 2)
