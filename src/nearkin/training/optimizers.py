"""Parameter groups with their own learning rates, the optimizer, and the learning-rate schedule."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nearkin.models import adapt
from nearkin.models.encoder import is_lora
from nearkin.training.class_weights import ClassWeightOptimizer, load_small_state
from nearkin.training.config.recipe import Recipe, no_effect

__all__ = ["EncoderAndClasses", "LRSchedule", "build_optimizer", "parameter_groups"]


def parameter_groups(recipe: Recipe, backbone: nn.Module, head: nn.Module, loss: nn.Module) -> list[dict[str, Any]]:
    """Backbone, head and loss, each with and without weight decay; the backbone by depth if its rates decay.

    "base" is the learning rate that the schedule multiplies. Biases, norms and single numbers (everything with fewer
    than two axes) do not decay.
    """
    _check_weights(recipe, backbone, head, loss)
    options = recipe.optimizer
    assert options.lr is not None and options.weight_decay is not None
    loss_scale = getattr(loss, "lr_scale", 1.0) if options.loss_scale is None else options.loss_scale
    backbone_scale = 1.0 if options.backbone_scale is None else options.backbone_scale
    scales = {"backbone": backbone_scale, "head": options.head_scale, "loss": float(loss_scale)}
    parts = [*_backbone_parts(recipe, backbone), ("head", 1.0, list(head.parameters()))]
    groups = []
    for name, factor, members in (*parts, ("loss", 1.0, list(loss.parameters()))):
        for decays in (True, False):
            parameters = [p for p in members if (p.dim() > 1) == decays]
            if parameters:
                base = options.lr * scales[name] * factor
                decay = options.weight_decay if decays else 0.0
                groups.append({"params": parameters, "lr": base, "base": base, "weight_decay": decay, "part": name})
    return groups


def _backbone_parts(recipe: Recipe, backbone: nn.Module) -> list[tuple[str, float, list[nn.Parameter]]]:
    """The backbone's parameters, in groups of one depth if rates decay with it, lowest first, with their factors."""
    lora, decay = recipe.finetune.train == "lora", recipe.finetune.layer_decay or 1.0
    parameters = [(name, p) for name, p in backbone.named_parameters() if is_lora(name) or not lora]
    if decay == 1.0:
        return [("backbone", 1.0, [p for _, p in parameters])]
    try:
        depth, last = adapt.depths(backbone)
    except ValueError as error:
        raise ValueError(f"finetune.layer_decay must be 1 for encoder {recipe.encoder['name']}: {error}") from None
    return [
        ("backbone", decay ** (last - level), [p for name, p in parameters if depth[name] == level])
        for level in sorted({depth[name] for name, _ in parameters})
    ]


def _check_weights(recipe: Recipe, backbone: nn.Module, head: nn.Module, loss: nn.Module) -> None:
    """Every part that a key concerns has weights, and some weights of the encoder can learn."""
    options, frozen = recipe.optimizer, recipe.head_only
    has = {name: any(True for _ in p.parameters()) for name, p in (("backbone", backbone), ("head", head))}
    learned = any(True for _ in loss.parameters())
    concerned = {
        "optimizer.backbone_scale": ("backbone", options.backbone_scale not in (None, 1.0)),
        "optimizer.head_scale": ("head", options.head_scale != 1.0),
        "encoder.freeze_backbone": ("backbone", bool(recipe.encoder.get("freeze_backbone"))),
        "schedule.frozen_epochs": ("backbone", (recipe.schedule.frozen_epochs or 0) > 0),
    }
    for key, (part, active) in concerned.items():
        if active and not has[part]:
            no_effect(key, f"the {part} has no weights")
    if options.class_weights is not None and not any(p.dim() > 1 for p in loss.parameters()):
        no_effect("optimizer.class_weights", f"loss {recipe.loss.get('name')} has no class weights")
    if options.loss_scale is not None and not learned:
        no_effect("optimizer.loss_scale", f"loss {recipe.loss.get('name')} has no weights")
    if not has["head"] and (frozen or not has["backbone"]):
        why = "the backbone is frozen" if frozen else "the backbone has no weights"
        raise ValueError(f"nothing of the encoder can learn: {why} and encoder.dim is 0; give encoder.dim")
    if not has["head"] and not learned and recipe.schedule.frozen_epochs:
        raise ValueError("nothing but the backbone can learn, so schedule.frozen_epochs must be 0; or give encoder.dim")


def build_optimizer(recipe: Recipe, parameters: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    options, groups = recipe.optimizer, list(parameters)
    if str(options.class_weights) == "adam8bit":  # of a stored run
        raise ValueError(
            'optimizer.class_weights is "adam8bit" in this run, a rule that has left: what the run saved can be used, '
            'but it cannot go on; start a new run with "rowwise", or without the key'
        )
    if options.class_weights is None:
        return _encoder_optimizer(recipe, groups)
    of_classes = [group["part"] == "loss" and group["params"][0].dim() > 1 for group in groups]
    encoder = _encoder_optimizer(recipe, [group for group, own in zip(groups, of_classes, strict=True) if not own])
    classes = ClassWeightOptimizer(
        [group for group, own in zip(groups, of_classes, strict=True) if own],
        rule=options.class_weights,
        eps=options.eps or 1e-8,
        seed=recipe.training.seed,
    )
    return EncoderAndClasses(encoder, classes)


def _encoder_optimizer(recipe: Recipe, parameters: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    options = recipe.optimizer
    if options.name == "adamw":
        beta1, beta2 = options.betas or (0.9, 0.999)
        groups = list(parameters)
        on_gpu = all(p.is_cuda for group in groups for p in group["params"])
        # One kernel for all weights: launches, not arithmetic, are what a step of a small encoder waits for.
        return torch.optim.AdamW(groups, betas=(beta1, beta2), eps=options.eps or 1e-8, fused=on_gpu or None)
    if options.name == "rmsprop":
        return torch.optim.RMSprop(list(parameters), momentum=options.momentum or 0.0, eps=options.eps or 1e-8)
    return _sgd(list(parameters), options.momentum or 0.0)


def _sgd(groups: list[dict[str, Any]], momentum: float) -> torch.optim.Optimizer:
    """Fused on a GPU, so that a captured step reads its learning rate there; not for sharded weights."""
    fused = all(p.is_cuda and not hasattr(p, "to_local") for group in groups for p in group["params"])
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=momentum, fused=fused or None)
    if fused:
        optimizer.register_step_pre_hook(_add_momentum)
    return optimizer


def _add_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Momentum of 0 for weights that learn for the first time, of which fused SGD must not find some among others."""
    for group in optimizer.param_groups:
        for p in group["params"] if group["momentum"] else ():
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


class EncoderAndClasses(torch.optim.Optimizer):
    """Two optimisers that share their groups and their state with this one, which stands for both."""

    def __init__(self, encoder: torch.optim.Optimizer, classes: ClassWeightOptimizer) -> None:
        self.parts = encoder, classes
        super().__init__([*encoder.param_groups, *classes.param_groups], {})
        self._share()

    def _share(self) -> None:
        encoder, classes = self.parts
        number = len(encoder.param_groups)
        encoder.param_groups, classes.param_groups = self.param_groups[:number], self.param_groups[number:]
        encoder.state = classes.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_small_state(self, state_dict, super().load_state_dict)
        self._share()


class LRSchedule:
    """The factor on every learning rate: a linear warm-up from nearly 0, then the decay of the recipe.

    A pure function of the step, except for "plateau", which remembers how often it has cut.
    """

    def __init__(self, recipe: Recipe, batches: int, epochs: int) -> None:
        self.options, self.batches, self.steps = recipe.schedule, batches, batches * epochs
        share = recipe.schedule.warmup
        self.warm = max(1, round(share * self.steps)) if share else 0  # at least one step
        self.cuts, self.waited, self.best = 0, 0, -math.inf

    def factor(self, step: int) -> float:
        """Of the step with this number, counted from 0."""
        if step < self.warm:
            return (step + 1) / (self.warm + 1)
        options = self.options
        if options.decay == "cosine":
            done = (step - self.warm) / max(1, self.steps - self.warm)
            floor = options.floor or 0.0
            return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2
        if options.decay == "step":
            assert options.every is not None and options.factor is not None
            return float(options.factor ** (step // self.batches // options.every))
        if options.decay == "plateau":
            assert options.factor is not None
            return float(options.factor**self.cuts)
        return 1.0

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        factor = self.factor(step)
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * factor
        return factor

    def measured(self, value: float) -> None:
        """After a validation; larger is better."""
        if self.options.decay != "plateau":
            return
        assert self.options.patience is not None
        if value > self.best:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if self.waited >= self.options.patience:
            self.cuts, self.waited = self.cuts + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"cuts": self.cuts, "waited": self.waited, "best": None if math.isinf(self.best) else self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cuts, self.waited = state["cuts"], state["waited"]
        self.best = -math.inf if state["best"] is None else state["best"]
