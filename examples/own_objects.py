"""Your own dataset, encoder and loss in nearkin's trainer: plain PyTorch objects, as you have them already.

    python examples/own_objects.py

About half a minute on two cores. Trains a small network on some characters of `glyphs` and prints how often the nearest
neighbour of a character that it has never seen is of the same kind. The folder of the run holds the weights, the
figures and report.html. A run that was stopped goes on when it gets the same objects again:

    training.train(dataset, encoder=network, loss=loss, resume="runs/own-objects")
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from nearkin import evaluation, training
from nearkin.data import glyphs


class Characters(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """dataset[i] is (picture, label). Any label serves: a number, a name, or floats for continuous targets."""

    def __init__(self, classes: int) -> None:
        drawn = glyphs.load()
        kept = torch.from_numpy(drawn.labels) < classes
        self.pictures = F.avg_pool2d(torch.from_numpy(drawn.images)[kept].float().unsqueeze(1) / 255, 2)
        self.targets = torch.from_numpy(drawn.labels)[
            kept
        ]  # read at once; without it every item is asked for its label

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.pictures[i], int(self.targets[i])


class Network(nn.Module):
    """(B, 1, H, W) → (B, 32): the output is the embedding as it is."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 32))

    def forward(self, pictures: Tensor) -> Tensor:
        return F.normalize(self.layers(pictures))


class SoftNeighbours(nn.Module):
    """-log of the share that an item's own class has among its neighbours; the sharpness is learned too."""

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(10.0))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        logits = (embeddings @ embeddings.T * self.sharpness).masked_fill(itself, -1e9)
        other = labels[:, None] != labels
        return (logits.logsumexp(1) - logits.masked_fill(other, -1e9).logsumexp(1)).mean()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("runs/own-objects"), help="a new folder for the run")
    options.add_argument("--classes", type=int, default=200, help="characters to take")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--batches", type=int, default=25, help="of an epoch")
    given = options.parse_args()

    dataset, network = Characters(given.classes), Network()
    settings = {"training.epochs": given.epochs, "training.batches": given.batches, "sampler.batch": 64}
    outcome = training.train(
        dataset, given.out, encoder=network, loss=SoftNeighbours(), settings=settings, progress=True
    )
    for who in ("baseline", "untrained", "trained"):
        print(f"{outcome.results['test'][who]['recall@1']['value']:.3f} recall@1, {who}")
    print(outcome.report)

    # `network` holds the best weights now. A network made anew takes them from the folder:
    again = Network()
    again.load_state_dict(load_file(given.out / "model.safetensors"))
    tested = outcome.test.indices
    with torch.no_grad():
        embeddings = again.eval()(dataset.pictures[tested])
    print(f"{evaluation.retrieval(embeddings, dataset.targets[tested])['recall@1']:.3f} recall@1, from the folder")


if __name__ == "__main__":
    main()
