"""The test at the end of a run: three contenders measured on items that were never trained on, and a verdict."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin import evaluation, models
from nearkin.core import devices, distances, files
from nearkin.core.versions import version_of
from nearkin.data.levels import FINEST, Level
from nearkin.evaluation.retrieval.level_metrics import by_level
from nearkin.evaluation.statistics import cluster_bootstrap
from nearkin.training.compatible_test import compatible_results
from nearkin.training.config.registry import matryoshka_dims
from nearkin.training.loader import ItemStore, embed
from nearkin.training.prepare import Prepared, build_encoder
from nearkin.training.rerank_test import rerank_results
from nearkin.training.trainer import PRECISIONS, Trainer
from nearkin.training.validation import (
    KS,
    METRICS,
    HeldOut,
    figure,
    graded_metrics,
    groups_of,
    number,
    query_and_gallery,
)
from nearkin.training.verdict import START, concluded, frozen_kept, verdict

__all__ = [
    "contenders",
    "embedded",
    "explained",
    "extra_metrics",
    "full_metrics",
    "no_interval",
    "raw",
    "results",
    "unverifiable",
]
__all__ += ["group_figures", "is_untrained", "level_results", "unwrapped"]

_PIXELS = 32  # side to which images are reduced before their pixels are compared
GROUPED = ("map", "minp")  # metrics of re-identification, added where there are groups; its CMC is recall@k
_CMC = 20  # positions of the curve


def explained(trainer: Trainer, what: str) -> AbstractContextManager[None]:
    """Turns a failed write at the end of a run into one sentence."""
    way_out = f"training is done and saved: make room, then nearkin train --resume {trainer.out}"
    return files.explained(f"{trainer.out}: {what}", way_out)


def contenders(
    trainer: Trainer,
    encoder: models.Encoder,
    prepared: Prepared,
    held_out: HeldOut,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Callable[[], Tensor]]:
    """What is tested: the trained encoder, the same one untrained, and what is to be had without training."""
    shown: dict[str, Any] = {"progress": progress}

    def trained() -> Tensor:
        return embedded(trainer, encoder, held_out, **shown)

    def untrained() -> Tensor:
        return embedded(trainer, build_encoder(prepared).to(trainer.device), held_out, **shown)

    def baseline() -> Tensor:
        if prepared.baseline == "frozen backbone":
            return embedded(trainer, build_encoder(prepared).to(trainer.device), held_out, features=True, **shown)
        return raw(trainer.store, held_out.everything)

    return {"trained": trained, "untrained": untrained, "baseline": baseline}


def embedded(
    trainer: Trainer,
    encoder: models.Encoder,
    held_out: HeldOut,
    features: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The held-out items by an encoder on the trainer's device, as the test sees them."""
    recipe = trainer.recipe
    options: dict[str, Any] = {"precision": PRECISIONS[recipe.training.precision or "fp32"], "group": trainer.group}
    options |= {"views": recipe.evaluation.views, "features": features, "progress": progress}
    return embed(encoder, trainer.store, held_out.everything, **options)


def raw(store: ItemStore, indices: NDArray[np.int64]) -> Tensor:
    """The items themselves as vectors; pixels of large images are reduced."""
    parts = []
    for start in range(0, len(indices), 256):
        items = store.eval_view(store.gather(indices[start : start + 256])).float()
        if items.dim() == 4 and items.shape[-1] > 2 * _PIXELS:
            items = torch.nn.functional.interpolate(items, size=(_PIXELS, _PIXELS), mode="area")
        parts.append(items.flatten(1).cpu())
    return torch.cat(parts)


def results(
    trainer: Trainer,
    prepared: Prepared,
    held_out: HeldOut,
    rows: dict[str, Tensor],
    facts: dict[str, Any],
    pretrained: Tensor | None = None,
    validation: Tensor | None = None,
) -> dict[str, Any]:
    """Measures every contender and writes results.json. pretrained: rows of the encoder after its pretraining.
    validation: rows of the validation items, on which re-ranking is chosen."""
    recipe, state, on = trainer.recipe, trainer.state, trainer.device
    options: dict[str, Any] = {"ks": recipe.evaluation.ks, "interval": recipe.evaluation.interval}
    options["seed"] = recipe.training.seed
    tested = {name: full_metrics(x, held_out, trainer.graded, on, **options) for name, x in rows.items()}
    settings: dict[str, Any] = {"baseline": prepared.baseline, "seed": recipe.training.seed}
    judgement = verdict(rows, held_out, trainer.graded, on, **settings)
    content = {
        "nearkin": version_of("nearkin"),
        "source": recipe.data.source,
        "protocol": prepared.parts.note,
        "test": tested,
        "baseline": prepared.baseline,
        "verdict": judgement,
        "val": facts["val"] | {"epoch": facts["epoch"], "step": facts["step"]},
        "items": {name: len(indices) for name, indices in prepared.part_indices().items()},
        "classes": prepared.class_counts(),
        "device": torch.cuda.get_device_name() if on.type == "cuda" else on.type,
        "epochs": state.epoch,
        "steps": state.step,
        "seconds": state.seconds,
        "peak_bytes": _peak(on),
        "notes": state.notes,
    }
    content |= {name: facts[name] for name in ("interpolation", "start") if name in facts}
    if facts.get("interpolation", {}).get("chosen") == "frozen":
        content["verdict"] |= frozen_kept(judgement)
    else:
        content["verdict"] |= concluded(judgement, facts.get("start"), prepared, graded=trainer.graded)
    if pretrained is not None:
        tests = full_metrics(pretrained, held_out, trainer.graded, on, **options)
        content["pretraining"] = facts["pretraining"] | {"test": tests}
    if recipe.evaluation.interval:
        content["no_interval"] = no_interval(tested["trained"], held_out)
    if trainer.group.size > 1:
        content["ranks"] = trainer.group.size
    if held_out.groups is not None and not trainer.graded:
        content["groups"] = group_figures(rows, held_out, on)
    if prepared.items.levels:
        content["levels"] = level_results(rows, held_out, prepared.items.levels, tested, on, recipe.evaluation.interval)
    if not is_untrained(facts) and (lengths := matryoshka_dims(recipe, rows["trained"].shape[1])) is not None:
        unit = bool(trainer.encoder.settings["normalize"])
        cut = {dim: _first(rows["trained"], dim, unit) for dim in lengths}
        content["lengths"] = {
            str(dim): full_metrics(x, held_out, trainer.graded, on, **options) for dim, x in cut.items()
        }
    if recipe.evaluation.rerank is not None:
        val = prepared.held_out("val")
        content["rerank"] = rerank_results(rows["trained"], held_out, validation, val, recipe, on)
    if trainer.old is not None:
        old = trainer.old.rows[torch.from_numpy(held_out.everything)]
        content["compatible"] = compatible_results(rows["trained"], old, held_out, trainer.old.record, recipe, on)
    content |= extra_metrics(rows["trained"], held_out, prepared.test_pairs(), recipe, on)
    with explained(trainer, "results.json"):
        files.write_json(trainer.out / "results.json", content)
    return content


def is_untrained(facts: Mapping[str, Any]) -> bool:
    """Whether the saved encoder is as it was before training: nothing has trained it for short embeddings."""
    return any(facts.get(part, {}).get("chosen") in ("frozen", START) for part in ("interpolation", "start"))


def _first(rows: Tensor, dim: int, unit: bool) -> Tensor:
    """The first dimensions of embeddings, as `Encoder.shorten` gives them."""
    return distances.unit(rows[:, :dim]) if unit else rows[:, :dim].contiguous()


def full_metrics(
    rows: Tensor,
    held_out: HeldOut,
    graded: bool,
    device: torch.device,
    *,
    ks: Sequence[int] | None,
    interval: bool,
    seed: int,
) -> dict[str, dict[str, float | None]]:
    """Every metric with its 95 % interval: {"recall@1": {"value", "low", "high"}, …}."""
    ks = tuple(ks or KS[graded])
    if graded:
        settings: dict[str, Any] = {"interval": True, "seed": seed} if interval else {}
        metrics: Any = graded_metrics(rows, held_out, device, ks=ks, **settings)
    else:
        queries, labels, gallery, gallery_labels = query_and_gallery(rows, held_out, device)
        options: dict[str, Any] = {"ks": ks, "metrics": METRICS, "interval": interval, **groups_of(held_out, device)}
        if held_out.groups is not None:
            options["metrics"] = (*METRICS, *GROUPED)
        metrics = evaluation.retrieval(queries, labels, gallery, gallery_labels, **options)
    result = {}
    for name, value in metrics.items():
        if name in ("queries", "without_positives", "unknown", "spearman_skipped"):
            continue
        low, high = metrics.intervals.get(name, (None, None)) if interval else (None, None)
        result[name] = figure(value, (low, high))
    return result


def level_results(
    rows: Mapping[str, Tensor],
    held_out: HeldOut,
    levels: Sequence[Level],
    tested: Mapping[str, Any],
    device: torch.device,
    interval: bool,
) -> list[dict[str, Any]]:
    """R@1 and MAP@R of all contenders at each level, the classes themselves first: [{"name", "classes", "test"}, …]."""
    names = ("recall@1", "map@r")
    labels = held_out.labels
    if labels is None or "map@r" not in tested["trained"]:
        return []

    def ids(kinds: NDArray[np.int64], beside: Tensor) -> dict[str, Tensor]:
        return {level.name: torch.from_numpy(level.of_class[kinds]).to(beside.device) for level in levels}

    content: list[dict[str, Any]] = [
        {"name": FINEST, "classes": len(np.unique(labels)), "test": {who: {} for who in rows}}
    ]
    content += [{"name": level.name, "classes": 0, "test": {}} for level in levels]
    for who, x in rows.items():
        content[0]["test"][who] = {name: tested[who][name] for name in names if name in tested[who]}
        queries, finest, gallery, _ = query_and_gallery(x, held_out, device)
        grouped = groups_of(held_out, device)
        others = None if held_out.gallery_labels is None else ids(held_out.gallery_labels, queries)
        measured = by_level(queries, finest, ids(labels, queries), gallery, others, interval=interval, **grouped)
        for entry in content[1:]:
            figures = measured[entry["name"]]
            ends = figures.get("intervals", {})
            entry["classes"] = figures["classes"]
            entry["test"][who] = {name: figure(figures[name], ends.get(name, (None, None))) for name in names}
    return content


def group_figures(rows: Mapping[str, Tensor], held_out: HeldOut, device: torch.device) -> dict[str, Any]:
    """How many groups the test items have, how many pairs are left out, and the CMC curve of every contender."""
    assert held_out.groups is not None and held_out.labels is not None
    curves = {}
    for name, x in rows.items():
        sides = query_and_gallery(x, held_out, device)
        options: dict[str, Any] = {"ks": range(1, _CMC + 1), "metrics": ("cmc",), **groups_of(held_out, device)}
        values = evaluation.retrieval(*sides, **options)
        curves[name] = [number(values[f"cmc@{k}"]) for k in range(1, _CMC + 1)]
        without = int(values["without_positives"])
    ids, labels = held_out.groups, held_out.labels
    if held_out.gallery_groups is not None and held_out.gallery_labels is not None:
        ids, labels = np.append(ids, held_out.gallery_groups), np.append(labels, held_out.gallery_labels)
    named = ids >= 0
    pair, place = np.unique(np.stack([labels[named], ids[named]]), axis=1, return_inverse=True)
    query = np.bincount(place.ravel()[: int(named[: len(held_out.indices)].sum())], minlength=pair.shape[1])
    searched = np.bincount(place.ravel(), minlength=pair.shape[1]) - query
    left_out = query * (query - 1) // 2 if held_out.gallery is None else query * searched
    groups = len(np.unique(ids[named])) + int((~named).sum())
    return {"test": groups, "pairs_left_out": int(left_out.sum()), "without_positives": without, "cmc": curves}


def no_interval(tested: dict[str, dict[str, float | None]], held_out: HeldOut) -> str | None:
    """Why the metrics of `full_metrics` have no intervals, where none of them has one."""
    if any(figure["low"] is not None for figure in tested.values()):
        return None
    items, labels = held_out.indices, held_out.labels
    return cluster_bootstrap.too_few(len(items) if labels is None else len(np.unique(labels)))


def extra_metrics(rows: Tensor, held_out: HeldOut, pairs: Any, recipe: Any, device: torch.device) -> dict[str, Any]:
    """Clustering on request, and verification of the source's own pairs."""
    metrics: dict[str, Any] = {}
    if recipe.evaluation.clustering:
        if held_out.labels is None:
            raise ValueError("evaluation.clustering needs class labels, the source has none")
        place = devices.exact(device)
        labels = torch.from_numpy(held_out.labels).to(place)
        clusters: Any = evaluation.clustering(
            rows[: len(held_out.indices)].to(place), labels, seed=recipe.training.seed
        )
        metrics["clustering"] = {name: number(clusters[name]) for name in ("nmi", "ami", "f1")}
    if pairs is not None and unverifiable(pairs) is None:
        verified = _verified(rows, pairs)
        names = ("accuracy", "accuracy_error", "threshold", "eer", "auc")
        metrics["verification"] = {name: number(verified[name]) for name in names}
        metrics["verification"] |= {name: number(v) for name, v in verified.items() if name.startswith("tar@")}
    return metrics


def unverifiable(pairs: Any) -> str | None:
    """Why the source's own pairs of test items cannot be verified; None if they can.

    Random vectors are verified, so that it is known before training.
    """
    if pairs is None:
        return None
    generator = torch.Generator().manual_seed(0)
    try:
        _verified(torch.randn(int(pairs.items.max()) + 1, 2, generator=generator), pairs)
    except ValueError as error:
        return str(error)
    return None


def _verified(rows: Tensor, pairs: Any) -> Any:
    same, folds = torch.from_numpy(pairs.same), torch.from_numpy(pairs.fold)
    return evaluation.verification(embeddings=rows, pairs=torch.from_numpy(pairs.items), same=same, folds=folds)


def unwrapped(encoder: models.Encoder, prepared: Prepared) -> models.Encoder:
    """The encoder as `models.build` makes it, without the wrappers of several ranks."""
    plain = build_encoder(prepared)
    plain.load_state_dict(encoder.state_dict())
    return plain


def _peak(on: torch.device) -> int | None:
    """Peak memory in bytes; None on a system that does not report it, as Windows."""
    if on.type == "cuda":
        return torch.cuda.max_memory_allocated(on)
    try:
        import resource
    except ImportError:
        return None
    most: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # type: ignore[attr-defined, unused-ignore]
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes, others KiB
