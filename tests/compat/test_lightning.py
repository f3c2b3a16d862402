"""`nearkin.compat.lightning`: it trains, and its figures are those of the evaluation itself."""

import re
from pathlib import Path

import pytest
import torch

from nearkin import evaluation, losses

pytest.importorskip("lightning", reason="the package lightning is not installed")

import lightning

from nearkin.compat import pml
from nearkin.compat.lightning import ExactEvaluation, MetricLearning, in_order

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "lightning.md"
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


def blobs(seed, items=6):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(8).repeat_interleave(items)
    means = 3 * torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    rows = means[labels] + 4 * torch.randn(len(labels), 16, generator=g)
    return torch.utils.data.TensorDataset(rows, labels)


def names():
    train, validation = blobs(1, 12), blobs(2)
    return {
        "train_set": train,
        "validation_set": validation,
        "train_labels": train.tensors[1],
        "quiet": {**QUIET, "accelerator": "cpu", "devices": 1},
    }


def test_the_page_runs_and_its_figures_are_exact():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    *lines, last = block.strip().splitlines()
    known = names()
    torch.manual_seed(0)
    exec("\n".join(lines), known)
    logged, map_at_r = eval(last, known)
    rows, labels = known["validation_set"].tensors
    with torch.no_grad():
        expected = evaluation.retrieval(known["encoder"](rows), labels, ks=(1, 5))
    assert float(logged) == pytest.approx(expected["recall@1"]) and map_at_r == expected["map@r"]
    assert known["evaluation"].scores == dict(expected)


def trained(module, callback, **options):
    trainer = lightning.Trainer(max_epochs=1, callbacks=[callback], accelerator="cpu", devices=1, **QUIET, **options)
    loader = torch.utils.data.DataLoader(blobs(1, 12), 32, shuffle=True, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, loader, torch.utils.data.DataLoader(blobs(2), 7))
    return trainer


def test_batches_do_not_change_the_figures_and_the_loss_learns():
    loss = losses.ArcFaceLoss(8, 4, scale=8.0)
    module = MetricLearning(torch.nn.Linear(16, 4), loss, lr=0.05)
    before = loss.weight.detach().clone()
    callback = ExactEvaluation()
    trainer = trained(module, callback)
    assert not torch.equal(before, loss.weight)
    rows, labels = blobs(2).tensors
    expected = dict(evaluation.retrieval(module(rows).detach(), labels))
    assert callback.scores == expected and "train_loss" in trainer.callback_metrics
    trainer.test(module, torch.utils.data.DataLoader(blobs(2), 48), verbose=False)
    assert float(trainer.callback_metrics["test_map@r"]) == pytest.approx(expected["map@r"])
    (rate,) = {
        group["lr"]
        for group in MetricLearning(module.encoder, losses.TripletLoss()).configure_optimizers().param_groups
    }
    assert rate == 1e-3
    proxies = MetricLearning(module.encoder, losses.ProxyAnchorLoss(8, 4), lr=0.01).configure_optimizers()
    assert [group["lr"] for group in proxies.param_groups] == [0.01, pytest.approx(1.0)]


def test_modules_of_ones_own_and_miners():
    class Plain(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 4)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, i):
            return losses.supcon_loss(self(batch[0]), batch[1])

        def validation_step(self, batch, i):
            return None

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module, callback = Plain(), ExactEvaluation(ks=(1,), metrics=("recall",))
    trained(module, callback)
    rows, labels = blobs(2).tensors
    assert callback.scores == dict(evaluation.retrieval(module(rows).detach(), labels, ks=(1,), metrics=("recall",)))
    miner = pml.miners.BatchHardMiner()
    trained(MetricLearning(torch.nn.Linear(16, 4), pml.losses.TripletMarginLoss(), miner=miner), callback)
    assert miner.num_triplets > 0


def test_the_copies_that_fill_up_the_last_round_are_left_out():
    """As torch's sampler deals a set of 10 to 4 processes: the first two come twice."""
    rows = torch.arange(10.0)[:, None]
    parts = torch.stack(
        [rows[list(torch.utils.data.DistributedSampler(rows, 4, rank, shuffle=False))] for rank in range(4)]
    )
    assert parts.shape == (4, 3, 1) and torch.equal(in_order(parts, 10), rows)
    with pytest.raises(ValueError, match="a set of 10 on 4 processes must give 3 rows each, got 2"):
        in_order(parts[:, :2], 10)


def test_several_loaders_are_refused():
    callback = ExactEvaluation()
    with pytest.raises(ValueError, match="takes one validation loader, got a batch of number 1"):
        callback.on_validation_batch_end(None, None, None, None, 0, 1)
