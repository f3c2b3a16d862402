"""Your own dataset, encoder and loss in nearkin's trainer: plain PyTorch objects.

    python examples/own_objects.py

About half a minute on two cores. Trains a small network on some characters of `glyphs` and prints recall@1 on unseen
characters. The folder of the run contains the weights, the metrics and report.html. A stopped run is resumed with the
same objects:

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
    """dataset[i] is (image, label). A label is a number, a name, or floats for continuous targets."""

    def __init__(self, classes: int) -> None:
        drawn = glyphs.load()
        labels = torch.from_numpy(drawn.labels)
        chosen = labels < classes
        self.pictures = F.avg_pool2d(torch.from_numpy(drawn.images)[chosen].float().unsqueeze(1) / 255, 2)
        self.targets = labels[chosen]  # read at once; without it every item is read for its label

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.pictures[i], int(self.targets[i])


class Network(nn.Module):
    """(B, 1, H, W) → (B, 32): the output is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 32))

    def forward(self, pictures: Tensor) -> Tensor:
        return F.normalize(self.layers(pictures))


class SoftNeighbours(nn.Module):
    """-log of the softmax share of an item's own class among its neighbours, with a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        logits = (embeddings @ embeddings.T * self.scale).masked_fill(itself, -1e9)
        other = labels[:, None] != labels
        return (logits.logsumexp(1) - logits.masked_fill(other, -1e9).logsumexp(1)).mean()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("runs/own-objects"), help="a new folder for the run")
    options.add_argument("--classes", type=int, default=200, help="number of characters")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--batches", type=int, default=25, help="per epoch")
    arguments = options.parse_args()

    dataset, network = Characters(arguments.classes), Network()
    settings = {"training.epochs": arguments.epochs, "training.batches": arguments.batches, "sampler.batch": 64}
    outcome = training.train(
        dataset, arguments.out, encoder=network, loss=SoftNeighbours(), settings=settings, progress=True
    )
    for name in ("baseline", "untrained", "trained"):
        print(f"{outcome.results['test'][name]['recall@1']['value']:.3f} recall@1, {name}")
    print(outcome.report)

    # `network` has the best weights now. A new instance loads them from the folder:
    again = Network()
    again.load_state_dict(load_file(arguments.out / "model.safetensors"))
    tested = outcome.test.indices
    with torch.no_grad():
        embeddings = again.eval()(dataset.pictures[tested])
    print(f"{evaluation.retrieval(embeddings, dataset.targets[tested])['recall@1']:.3f} recall@1, from the folder")


if __name__ == "__main__":
    main()
