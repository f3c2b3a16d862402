"""Which rule should choose between the frozen and the fine-tuned encoder, with so few validation classes?

    python studies/interpolation_rule.py --root DATA/CUB_200_2011 --out OUT [--rates 3e-4,3e-3,3e-2] [--steps 100]

EfficientNet-Lite0 is fine-tuned on the training classes of CUB-200 at several learning rates, from harmless to harmful.
Of the test classes some are drawn as if they were the validation classes of a small set, and both rules choose by them:
"interval" (`training.interpolation.judge`: the paired interval of a candidate's gain over the frozen encoder must lie
above 0) and "mean" (the highest MAP@R, the frozen encoder's included). Then all test classes say how much was gained.
OUT/interpolation_rule.json has a row per rate, number of classes and rule.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin import data, training
from nearkin.core import files
from nearkin.evaluation.retrieval import retrieval_metrics
from nearkin.training import interpolation
from nearkin.training.config.recipe import read
from nearkin.training.interpolation import FROZEN, SHARES, UNTRAINED
from nearkin.training.run import Outcome
from nearkin.training.trainer import assemble

PER_CLASS = {"train": 30, "test": 20}  # pictures: a small set, and a fast study
NUMBERS = (2, 4, 6, 10, 20)  # of classes drawn


def table(root: Path, out: Path) -> Path:
    """Some pictures of every class as files, and a table of them."""
    path = out / "birds.csv"
    if path.exists():
        return path
    items = data.load("cub200", root=root)
    assert items.labels is not None and items.pictures is not None and items.split is not None
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    used, rows = np.zeros(len(items.classes), int), ["path,label,split"]
    for i, (label, part) in enumerate(zip(items.labels.tolist(), items.split, strict=True)):
        used[label] += 1
        if used[label] <= PER_CLASS[part]:
            content = items.pictures.read(i)
            assert isinstance(content, bytes)
            (out / "pictures" / f"{i}.jpg").write_bytes(content)
            rows.append(f"pictures/{i}.jpg,c{label:03},{part}")
    files.write_text(path, "\n".join(rows) + "\n")
    return path


def trained(source: Path, out: Path, rate: str, options: argparse.Namespace) -> Outcome:
    sets = [f'data.source="{source}"', f"data.size={options.size}", "encoder.name=efficientnet-lite0"]
    sets += ["finetune.train=all", "finetune.interpolate=false", "training.epochs=2", "training.every=2"]
    sets += [f"training.batches={options.steps // 2}", "sampler.batch=48", f"optimizer.lr={rate}"]
    sets += ["training.on_collapse=warn", "evaluation.interval=false", f"training.device={options.device}"]
    if (out / "results.json").exists():
        return training.resume(out)
    return training.train(read(None, sets), out, report=False)


def embeddings(outcome: Outcome) -> dict[str | float, Tensor]:
    """Of the test items, with every candidate."""
    trainer = assemble(outcome.prepared, outcome.folder)
    trainer.restore()
    assert trainer.state.best_file is not None
    end = trainer.checkpoints.open(trainer.state.best_file)[0].section("encoder")
    encoder = training.prepare.build_encoder(outcome.prepared).to(trainer.device)
    start = {name: tensor.detach().to("cpu", copy=True) for name, tensor in encoder.state_dict().items()}
    rows: dict[str | float, Tensor] = {}
    for name in (FROZEN, UNTRAINED, *SHARES):
        if isinstance(name, float):
            encoder.load_state_dict(interpolation._between(start, end, name))
        rows[name] = trainer.embed(outcome.test.everything, encoder.pooled() if name == FROZEN else encoder)
    return rows


def values_of(rows: Mapping[str | float, Tensor], labels: Tensor) -> dict[str | float, Tensor]:
    """MAP@R of each query, searched among these rows alone."""
    return {name: retrieval_metrics.per_query(x, labels, metrics=("map@r",))["map@r"] for name, x in rows.items()}


def choices(values: Mapping[str | float, Tensor], labels: Tensor) -> dict[str, str | float]:
    """What each rule chooses."""
    facts = interpolation.judge(values, labels, "map@r")
    means = {name: float(x.nanmean()) for name, x in values.items() if name != UNTRAINED}
    return {
        "interval": FROZEN if facts["chosen"] == FROZEN else facts["a"],
        "mean": max(means, key=lambda name: means[name]),
    }


def study(rows: Mapping[str | float, Tensor], labels: Tensor, draws: int) -> list[dict[str, Any]]:
    """Per number of classes and rule: how often the frozen encoder stays, and what all classes say of the choice."""
    kinds, results = labels.unique(), []
    truth = {name: float(x.nanmean()) for name, x in values_of(rows, labels).items()}
    for number in NUMBERS:
        gains: dict[str, list[float]] = {"interval": [], "mean": []}
        for draw in range(draws):
            generator = torch.Generator().manual_seed(1000 * number + draw)
            some = torch.isin(labels, kinds[torch.randperm(len(kinds), generator=generator)[:number]])
            values = values_of({name: x[some] for name, x in rows.items()}, labels[some])
            for rule, name in choices(values, labels[some]).items():
                gains[rule].append(truth[name] - truth[FROZEN])
        for rule, one in gains.items():
            gain = np.array(one)
            figures = {
                "gain": gain.mean(),
                "worse": (gain < 0).mean(),
                "worst": gain.min(),
                "frozen": (gain == 0).mean(),
            }
            results.append({"classes": number, "rule": rule, **{key: round(float(v), 4) for key, v in figures.items()}})
    return [{"truth": {str(name): round(value, 4) for name, value in truth.items()}}, *results]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder CUB_200_2011")
    parser.add_argument("--out", type=Path, default=Path("out/interpolation_rule"))
    parser.add_argument("--rates", default="3e-4,3e-3,3e-2", help="learning rates, with commas")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    source, report = table(options.root, options.out).resolve(), {}
    for rate in options.rates.split(","):
        outcome = trained(source, options.out / f"run-{rate}", rate, options)
        assert outcome.test.labels is not None
        report[rate] = study(embeddings(outcome), torch.from_numpy(outcome.test.labels), options.draws)
        print(rate, json.dumps(report[rate][0]), flush=True)
        for row in report[rate][1:]:
            print(" ", json.dumps(row), flush=True)
        files.write_json(options.out / "interpolation_rule.json", report)


if __name__ == "__main__":
    main()
