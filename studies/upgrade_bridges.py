"""How well new queries find old rows over a bridge, by kind of bridge, on classes that the bridge was not fitted on.

    nearkin embed runs/small glyphs --part test --out old.npz
    nearkin embed runs/glyphs glyphs --part test --out new.npz
    python studies/upgrade_bridges.py glyphs old.npz new.npz

The bridge is fitted on half of the classes, its kind and settings chosen within them; a quarter measures the scale, and
retrieval is judged on the half that was not fitted on.
"mixed" is a gallery whose rows are bridged and renewed at random, with the cosines as they are and on one scale. Writes
results/upgrade_bridges.json, one entry per name.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearkin.evaluation.statistics.cluster_bootstrap import share_interval
from nearkin.gallery import bridge, bridge_scale
from nearkin.gallery.schema import unit

RESULTS = Path(__file__).parent / "results" / "upgrade_bridges.json"


def row(name: str, values: tuple[list[float], list[float], list[int]], classes: Any) -> dict[str, Any]:
    first, precision, places = values
    groups = torch.from_numpy(classes[places])
    figures: dict[str, Any] = {"rows": name}
    for key, one in (("recall@1", first), ("map@r", precision)):
        low, high = share_interval(torch.tensor(one, dtype=torch.float64), groups)
        figures |= {key: round(float(np.mean(one)), 4), f"{key}_interval": [round(low, 4), round(high, 4)]}
    print(
        f"{name:24s} R@1 {100 * figures['recall@1']:5.1f} {figures['recall@1_interval']}  "
        f"MAP@R {100 * figures['map@r']:5.1f} {figures['map@r_interval']}",
        flush=True,
    )
    return figures


def plain_procrustes(old: Any, new: Any, rows: Any) -> Any:
    """A rotation without whitening, means taken out: the usual baseline."""
    width = max(old.shape[1], new.shape[1])
    wide = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in (old - old.mean(0), new - new.mean(0))]
    left, _, right = np.linalg.svd(wide[0].T.astype(np.float64) @ wide[1])
    moved = np.pad(rows - old.mean(0), ((0, 0), (0, width - rows.shape[1]))) @ (left @ right)
    return unit(moved[:, : new.shape[1]] + new.mean(0))


def mixed(new: Any, mapped: Any, classes: Any, scale: bridge_scale.Scale | None) -> Any:
    """`bridge.per_query` where half of the rows are bridged; scale None: cosines as they are."""
    bridged = np.random.default_rng(1).random(len(new)) < 0.5
    near = np.where(bridged, new @ mapped.T if scale is None else scale(new @ mapped.T), new @ new.T)
    np.fill_diagonal(near, -np.inf)
    sizes = np.bincount(classes)[classes] - 1
    most = int(sizes.max())
    top = np.argsort(-near, axis=1, kind="stable")[:, :most]
    hit = (classes[top] == classes[:, None]) & (np.arange(most) < sizes[:, None])
    precision = (hit * hit.cumsum(1) / np.arange(1, most + 1)).sum(1) / np.maximum(sizes, 1)
    keep = sizes > 0
    return hit[keep, 0].astype(float).tolist(), precision[keep].tolist(), np.flatnonzero(keep).tolist()


def study(old_path: str, new_path: str, seed: int) -> dict[str, Any]:
    old_file, new_file = np.load(old_path, allow_pickle=False), np.load(new_path, allow_pickle=False)
    assert (old_file["names"] == new_file["names"]).all()
    old, new = unit(old_file["embeddings"]), unit(new_file["embeddings"])
    _, classes = np.unique(old_file["labels"], return_inverse=True)
    order = np.random.default_rng(seed).permutation(classes.max() + 1)
    quarter = len(order) // 4
    fit, measured = np.isin(classes, order[: 2 * quarter]), np.isin(classes, order[2 * quarter : 3 * quarter])
    judged = ~fit
    _, codes = np.unique(classes[judged], return_inverse=True)
    print(f"{fit.sum()} pairs of {2 * quarter} classes; judged on {judged.sum()} items of {codes.max() + 1} others")
    table = [row("old-old", bridge.per_query(old[judged], old[judged], codes), codes)]
    plain = plain_procrustes(old[fit], new[fit], old[judged])
    table.append(row("new-old, rotation alone", bridge.per_query(new[judged], plain, codes), codes))
    started = time.perf_counter()
    chosen = bridge.choose(old[fit], new[fit], classes[fit])
    seconds = round(time.perf_counter() - started, 1)
    for kind, settings in chosen.best.items():
        made = bridge.fit(kind, settings, old[fit], new[fit])
        name = f"new-old, {kind}{' (chosen)' if kind == chosen.bridge.kind else ''}"
        values = bridge.per_query(new[judged], made(old[judged]), codes)
        table.append(row(name, values, codes) | {"settings": list(settings)})
    mapped = chosen.bridge(old)
    scale = bridge_scale.measure_scale(new[measured], mapped[measured])
    table.append(row("mixed, cosines", mixed(new[judged], mapped[judged], codes, None), codes))
    table.append(row("mixed, on one scale", mixed(new[judged], mapped[judged], codes, scale), codes))
    table.append(row("new-new", bridge.per_query(new[judged], new[judged], codes), codes))
    return {
        "pairs": int(fit.sum()),
        "judged": int(judged.sum()),
        "classes": int(codes.max() + 1),
        "dims": [old.shape[1], new.shape[1]],
        "table": table,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = study(arguments.old, arguments.new, arguments.seed)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(results | {arguments.name: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
