"""Pair losses: each pair of an anchor and a reference is a term of its own, or weighted by the anchor's other pairs."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import math
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import mining
from nearkin.core import blockwise, checks, reduce
from nearkin.core.autograd import differentiable_once
from nearkin.core.labels import Labels, Relation
from nearkin.losses.engine import Call, Costs, PairLoss, Rows, function_of
from nearkin.losses.selecting import SamplingDim, SelectingLoss
from nearkin.losses.settings import Choices, Range, setting

__all__ = [
    "CircleLoss",
    "ContrastiveLoss",
    "MarginLoss",
    "MultiSimilarityLoss",
    "SigmoidLoss",
    "circle_loss",
    "contrastive_loss",
    "margin_loss",
    "multi_similarity_loss",
    "sigmoid_loss",
]

LEARNED = Range(1.0, 100.0, log=True)  # how much faster than the encoder a boundary or a scale learns


class ContrastiveLoss(SelectingLoss):
    r"""Positives are pulled together, negatives pushed out to the margin.

    L = 1/2 mean_{positive pairs} D²  +  1/2 mean_{negative pairs} [margin - D]_+²,   D = Euclidean distance

    `balance=False` is the paper's own sum, 1/2 mean over all pairs of D² or [margin - D]_+²: a batch has many more
    negative pairs than positive ones, so these then have little weight. Balanced, both kinds weigh the same.

    embeddings (B, D), labels (B,) or any relation of `relations.of`. Needs two items per class. `positive_margin` m
    turns D into [D - m]_+; `squared=False` drops both squares. Two equal embeddings do not repel each other. See also
    `MarginLoss` (learned boundary).
    Hadsell, Chopra, LeCun 2006, eq. 4; margin 1 and raw embeddings from there. `reduction` applies to each half, or
    without balance to all pairs together.
    """

    measure = "distance"
    takes_pairs = True

    margin: float = setting(
        default=1.0,
        at_least=0,
        kw_only=False,
        search=Range(0.3, 1.5),
        text="distance beyond which a negative pair costs nothing; 1: the paper's",
    )
    positive_margin: float = setting(
        default=0.0,
        at_least=0,
        search=Range(0.0, 0.5),
        text="distance within which a positive pair costs nothing; 0: the paper's",
    )
    squared: bool = setting(default=True, text="hinges are squared, as in the paper")
    balance: bool = setting(
        default=True, text="positive and negative pairs are averaged apart; False: one mean over all pairs, the paper's"
    )
    selection: mining.Selection = SelectingLoss.states("all")
    normalize: bool = setting(default=False, text="embeddings are scaled to unit length first")

    def value(self, call: Call) -> Tensor:
        select = self.selector(call)

        def rows(rows: Rows) -> tuple[Tensor, ...]:
            distance = rows.all()
            near, positive, far, negative = mining.as_pairs(select(rows, distance, self.margin), distance)
            pull = blockwise.hinges(near, positive, self.reduction, start=self.positive_margin, squared=self.squared)
            push = blockwise.hinges(
                far, negative, self.reduction, start=self.margin, falling=True, squared=self.squared
            )
            if self.balance:
                return *pull, *push
            return tuple(a + b for a, b in zip(pull, push, strict=True))

        if not self.balance:
            return call.reduced(rows, **self.drawing()) / 2
        pull, positives, pulled, *push = call.run(rows, **self.drawing())
        return (reduce.total(pull, positives, pulled, self.reduction) + call.total(*push)) / 2


class MarginLoss(SelectingLoss):
    r"""Positives nearer than a boundary β, negatives farther, each by the margin; β is learned.

    l_ap = [margin + D_ap - β_a]_+,  l_an = [margin - D_an + β_a]_+,  L = (Σ l_ap + Σ l_an + ν Σ_ap β_a) / active terms

    D: Euclidean distance of unit vectors. β_a = β of all or of a's class + β of the item a. There is one β for all, or
    one per class with `num_classes`; `num_items` adds one per training item, which starts at 0: the loss is then called
    with `items=`, (B,), which of the 0..num_items-1 each row of the batch is. Together they are the paper's β_0 +
    β_class + β_img, and ν Σ β_a holds all three back. The normaliser counts active pairs ("active"; none active, no
    loss), "mean" counts all, "sum" does not divide; a pair of a triplet selection counts as often as it was drawn.
    Needs two items per class. `lr_scale` 7: the authors' β learns at 0.1, divided by their batch of 140, beside an
    encoder at 1e-4.

    Wu et al. 2017, arXiv:1706.07567, eq. 6-8; margin 0.2, β 1.2, ν 0 and the normaliser from the authors' code.
    """

    lr_scale = 7.0
    search_rate = LEARNED
    measure = "distance"
    takes_pairs = True

    margin: float = setting(
        default=0.2,
        at_least=0,
        kw_only=False,
        search=Range(0.05, 0.5),
        text="α, how far on its side of β a pair must be; 0.2: the authors' code",
    )
    beta: float = setting(
        default=1.2,
        learned=True,
        kw_only=False,
        search=Range(0.6, 1.4),
        text="where the boundary β starts; 1.2: the authors' code",
    )
    num_classes: int | None = setting(
        default=None,
        optional=True,
        whole=True,
        shapes=True,
        kw_only=False,
        text="number of classes, for a β per class; None: one for all",
    )
    beta_weight: float = setting(
        default=0.0, at_least=0, kw_only=False, was="nu", text="ν, the weight of β itself; 0: the authors' code"
    )
    selection: mining.Selection = SelectingLoss.states(
        "distance_weighted", kw_only=False, search=Choices(("distance_weighted", "all"))
    )
    num_items: int | None = setting(
        default=None,
        optional=True,
        whole=True,
        shapes=True,
        text="number of training items, for a β per item beside the others; None: none",
    )
    normalize: bool = setting(default=True, text="embeddings are scaled to unit length first")
    reduction: str = setting(
        default="active", choices=reduce.REDUCTIONS, text='"active": over the terms above 0; "mean", "sum" or "none"'
    )

    def make(self) -> None:
        super().make()
        beta, classes = self.__dict__.pop("beta"), self.num_classes
        if isinstance(beta, Tensor):  # of the function form: as it is
            self.__dict__["beta"] = beta
        else:
            self.beta = nn.Parameter(torch.full(() if classes is None else (classes,), float(beta)))  # type: ignore[assignment]
        self.item_beta = None if self.num_items is None else nn.Parameter(torch.zeros(self.num_items))

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
        *,
        items: Tensor | None = None,
    ) -> Tensor:
        call = Call(self, embeddings, labels, references, reference_labels)
        of_item = _of_items(self.item_beta, items, embeddings)
        return self._bounded(call, _boundary(self.beta, of_item, call.batch))

    def _bounded(self, call: Call, boundary: Tensor) -> Tensor:
        select = self.selector(call)

        def rows(rows: Rows, boundary: Tensor) -> Costs:
            distance = rows.all()
            cutoff = (boundary.detach() + self.margin).squeeze(1)
            near, positive, far, negative = mining.as_pairs(select(rows, distance, cutoff), distance)
            pull = torch.where(positive, (self.margin + near - boundary).relu(), 0.0)
            push = torch.where(negative, (self.margin - far + boundary).relu(), 0.0)
            sums = pull.sum(1) + push.sum(1)
            if self.beta_weight:
                sums = sums + self.beta_weight * boundary.squeeze(1) * positive.sum(1)
            return sums, positive.sum(1) + negative.sum(1), (pull > 0).sum(1) + (push > 0).sum(1)

        return call.reduced(rows, boundary, **self.drawing())


class MultiSimilarityLoss(SelectingLoss):
    r"""Pairs are weighted by how hard they are among the anchor's other pairs.

    l_i = 1/α log(1 + Σ_{p} e^{-α (s_ip - λ)}) + 1/β log(1 + Σ_{n} e^{β (s_in - λ)}),   s = cosine, λ = `base`

    p and n run over the pairs that the paper's own mining leaves (ε), or over all with `selection="all"`. Anchors
    without any pair do not count. See also `SupConLoss`. Wang et al. 2019, arXiv:1904.06627, eq. 15; α 2, β 50, ε 0.1
    from its section 4, λ 0.5 from its released code (the paper prints 1).
    """

    takes_pairs, takes_triplets = True, False

    alpha: float = setting(
        default=2.0,
        above=0,
        kw_only=False,
        search=Range(0.5, 20.0, log=True),
        text="α, how sharply positives are weighed; 2: the paper's",
    )
    beta: float = setting(
        default=50.0,
        above=0,
        kw_only=False,
        search=Range(10.0, 100.0, log=True),
        text="β, how sharply negatives are weighed; 50: the paper's",
    )
    base: float = setting(
        default=0.5,
        kw_only=False,
        search=Range(0.2, 0.9),
        text="λ, the similarity at which weights turn; 0.5: the released code's",
    )
    epsilon: float = setting(default=0.1, search=Range(0.02, 0.3), text="ε, the slack of the mining; 0.1: the paper's")
    selection: mining.Selection = SelectingLoss.states(
        "multi_similarity", text='"multi_similarity", the paper\'s mining; "all"; another pair selection or function'
    )
    sampling_dim = generator = max_positives = None

    def check_together(self) -> None:
        super().check_together()
        if self.selection != "multi_similarity" and self.epsilon != 0.1:  # the default
            raise ValueError(f'epsilon must be left out unless selection="multi_similarity", got {self.epsilon}')

    def value(self, call: Call) -> Tensor:
        def rows(rows: Rows) -> Costs:
            similarity = rows.all()
            pairs: Any = rows.relation
            if self.selection == "multi_similarity":
                pairs = mining.multi_similarity(1 - similarity, rows.relation, epsilon=self.epsilon)
            elif self.selection != "all":
                pairs = mining.select(self.selection, 1 - similarity, rows.relation, dim=rows.x.shape[1])
            self.check_chosen(pairs)
            near, far = -self.alpha * (similarity - self.base), self.beta * (similarity - self.base)
            pull = reduce.softplus(reduce.logsumexp(near, pairs.positive)) / self.alpha
            push = reduce.softplus(reduce.logsumexp(far, pairs.negative)) / self.beta
            return pull + push, reduce.any_in_row(rows.pairs)

        return call.reduced(rows, **self.drawing())


class CircleLoss(PairLoss):
    r"""Each similarity is pulled as strongly as it is far from its own optimum, towards a circular boundary.

    l_i = log(1 + Σ_n e^{γ α_n (s_n - m)} Σ_p e^{-γ α_p (s_p - 1 + m)}),  α_p = [1 + m - s_p]_+, α_n = [s_n + m]_+

    s = cosine, γ = `scale`, m = `margin`; the weights α carry no gradient, as in the paper, so that a second derivative
    is refused. Only anchors with both positives and negatives count. Sun et al. 2020, arXiv:2002.10857, eq. 6-8; m 0.4
    and γ 80 from its retrieval experiments (faces: 0.25 and 256).
    """

    margin: float = setting(
        default=0.4,
        kw_only=False,
        search=Range(0.1, 0.6),
        text="m, the relaxation of the optima 1 and 0; 0.4: the paper's retrieval experiments",
    )
    scale: float = setting(
        default=80.0,
        above=0,
        kw_only=False,
        search=Range(8.0, 256.0, log=True),
        text="γ; 80: the paper's retrieval experiments",
    )

    def rows(self, rows: Rows) -> Costs:
        similarity = rows.all()
        weight = similarity.detach()
        pull = -self.scale * (1 + self.margin - weight).relu() * (similarity - (1 - self.margin))
        push = self.scale * (weight + self.margin).relu() * (similarity - self.margin)
        both = reduce.any_in_row(rows.positive) & reduce.any_in_row(rows.negative)
        value = reduce.logsumexp(pull, rows.positive) + reduce.logsumexp(push, rows.negative)
        value = reduce.softplus(torch.where(both, value, 0.0))
        return differentiable_once(value, "CircleLoss, whose weights are constants in its gradient,"), both


class SigmoidLoss(PairLoss):
    r"""Each pair by itself: positives above a boundary, negatives below it, which is learned with its steepness.

    l_i = Σ_j log(1 + e^{-z_ij (e^{t'} s_ij + b)}),   s = cosine, z_ij = 1 for a positive of i, -1 for a negative

    The mean is over anchors, as in the paper: a sum over all pairs, divided by B. t' = `log_scale` and b = `bias` are
    learned. Every item of the anchor's class is a positive, and an item has no pair with itself; another view of the
    batch as `references` is the paper's setting. There is no softmax: an anchor's pairs do not compete, so the gradient
    of a pair needs no other one. The bias starts at -10 since nearly all pairs are negative: without it the first steps
    would only unlearn that. Anchors without any pair do not count. See also `InfoNCELoss`.
    Zhai et al. 2023, arXiv:2303.15343, section 3; t' log 10 and b -10 at the start from there.
    """

    search_rate = LEARNED

    log_scale: float = setting(
        default=math.log(10.0),
        learned=True,
        kw_only=False,
        search=Range(1.0, 4.0),
        text="where t', the logarithm of the scale, starts; log 10: the paper's",
    )
    bias: float = setting(
        default=-10.0,
        learned=True,
        kw_only=False,
        search=Range(-20.0, 0.0),
        text="where the bias b starts; -10: the paper's",
    )

    def make(self) -> None:
        for name in ("log_scale", "bias"):
            if not isinstance(self.__dict__[name], Tensor):  # else of the function form: as it is
                setattr(self, name, nn.Parameter(torch.tensor(float(self.__dict__.pop(name)))))

    def value(self, call: Call) -> Tensor:
        x, references = call.batch.embeddings, call.batch.references
        kind = torch.promote_types(x.dtype if references is None else references.dtype, torch.float32)
        kind = torch.promote_types(x.dtype, kind)
        log, shift = (_scalar(name, getattr(self, name), x, kind) for name in ("log_scale", "bias"))
        learned = torch.stack([log.exp(), shift]).expand(x.shape[0], 2)
        return call.reduced(self.costs, learned)

    def costs(self, rows: Rows, learned: Tensor) -> Costs:
        logits, pairs = learned[:, :1] * rows.all() + learned[:, 1:], rows.pairs  # (B, R)
        cost = reduce.softplus(torch.where(rows.positive, -logits, logits))
        return torch.where(pairs, cost, 0.0).sum(1), reduce.any_in_row(pairs)


contrastive_loss = function_of(ContrastiveLoss, "contrastive_loss")
multi_similarity_loss = function_of(MultiSimilarityLoss, "multi_similarity_loss")
circle_loss = function_of(CircleLoss, "circle_loss")
sigmoid_loss = function_of(SigmoidLoss, "sigmoid_loss")


def margin_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    beta: Tensor | float = 1.2,
    item_beta: Tensor | None = None,
    items: Tensor | None = None,
    margin: float = 0.2,
    beta_weight: float = 0.0,
    selection: mining.Selection = "distance_weighted",
    normalize: bool = True,
    reduction: str = "active",
    sampling_dim: SamplingDim = None,
    generator: torch.Generator | None = None,
    max_positives: int | None = None,
    max_memory: int | None = None,
    **unknown: Any,
) -> Tensor:
    """`MarginLoss` with a boundary of the caller's.

    beta: a number, a scalar tensor, or (C,) one per class of the anchor; item_beta (N,): one per item, where items (B,)
    says which of the N each anchor is.
    """
    MarginLoss.fields["beta"].check("beta", beta)
    loss = MarginLoss(
        margin,
        beta if isinstance(beta, Tensor) else torch.tensor(beta),  # type: ignore[arg-type]
        beta_weight=beta_weight,
        selection=selection,
        normalize=normalize,
        reduction=reduction,
        sampling_dim=sampling_dim,
        generator=generator,
        max_positives=max_positives,
        max_memory=max_memory,
        **unknown,
    )
    loss.eval()
    call = Call(loss, embeddings, labels, references, reference_labels)
    return loss._bounded(call, _boundary(beta, _of_items(item_beta, items, embeddings), call.batch))


def _boundary(beta: Tensor | float, of_item: Tensor | None, batch: blockwise.Batch) -> Tensor:
    """β of each anchor, (B, 1), in the type of the distances."""
    embeddings, labels, references, _ = batch
    both = embeddings.dtype if references is None else torch.promote_types(embeddings.dtype, references.dtype)
    kind = torch.promote_types(both, torch.float32)
    if of_item is not None:
        return _boundary(beta, None, batch) + of_item.to(kind)[:, None]
    if not isinstance(beta, Tensor):
        return torch.full((embeddings.shape[0], 1), beta, dtype=kind, device=embeddings.device)
    beta = beta.to(kind)
    if beta.dim() == 0:
        return beta.expand(embeddings.shape[0], 1)
    classes = labels.ids if isinstance(labels, Relation) else labels
    if not isinstance(classes, Tensor) or classes.dtype == torch.bool:
        raise TypeError(
            "labels must be integer class ids, or a Relation with ids, where β is one per class (num_classes)"
        )
    ids, _, addend = checks.in_range(classes, beta.shape[0])
    return (beta[ids] + addend.to(beta.dtype))[:, None]


def _of_items(item_beta: Tensor | None, items: Tensor | None, embeddings: Tensor) -> Tensor | None:
    """The part of β that is each anchor's own, (B,); None where there is none."""
    if item_beta is None:
        if items is not None:
            raise ValueError("items must be left out without a β per item (num_items), got items")
        return None
    number = item_beta.shape[0]
    if items is None:
        raise ValueError(f"items must be given where β is one per item (num_items={number}): (B,) ids, got None")
    ids = checks.class_ids("items", items, embeddings).long()
    checks.same_device("item_beta", item_beta, embeddings)
    if checks.reads_values(ids) and ids.numel():
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or high >= number:
            raise ValueError(f"items must be in 0..{number - 1}, got {low if low < 0 else high}")
        return item_beta[ids]
    beyond = (ids < 0) | (ids >= number)
    return item_beta[ids.clamp(0, number - 1)].masked_fill(beyond, torch.nan)


def _scalar(name: str, value: Tensor | float, embeddings: Tensor, kind: torch.dtype) -> Tensor:
    if not isinstance(value, Tensor):
        checks.number(name, value)
        return torch.full((), value, dtype=kind, device=embeddings.device)
    if value.dim() or not value.is_floating_point():
        raise ValueError(f"{name} must be a number or a floating point scalar, got {value.dtype} {tuple(value.shape)}")
    checks.same_device(name, value, embeddings)
    return value.to(kind)
