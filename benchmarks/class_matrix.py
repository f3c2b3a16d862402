"""Proxy-Anchor, SoftTriple and softmax + center on a GPU beside pytorch-metric-learning, a torch.compile of the formula
and the three products alone, by turns: benchmarks/class_matrix.py

D = 128, float32, milliseconds of `loss(x, y).backward()` with the gradient by the class weights, by device events, the
host's share included. `auto/busy`: on a device that never waits for the host. --launches: what runs on the device.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, softplus

import measure
from nearkin import losses

D = 128
SIZES = [(128, 100), (128, 1000), (512, 100), (512, 10_000), (2048, 100), (2048, 10_000), (4096, 10_000)]
COMPILED = [(128, 100), (2048, 10_000)]
CASES = {"Proxy-Anchor": "ProxyAnchorLoss", "SoftTriple": "SoftTripleLoss", "softmax + center": "CenterLoss"}


def anchor_formula(x: Tensor, y: Tensor, proxies: Tensor) -> Tensor:
    cosine = normalize(x) @ normalize(proxies).T
    own = y[:, None] == torch.arange(len(proxies), device=y.device)
    pulls = torch.where(own, -32 * (cosine - 0.1), -torch.inf).logsumexp(0)
    pushes = torch.where(own, -torch.inf, 32 * (cosine + 0.1)).logsumexp(0)
    present = own.any(0)
    pulls = torch.where(present, softplus(torch.where(present, pulls, 0.0)), 0.0)
    return pulls.sum() / present.sum() + softplus(pushes).mean()


def triple_formula(x: Tensor, y: Tensor, centers: Tensor) -> Tensor:
    w = normalize(centers)
    cosine = (normalize(x) @ w.T).view(len(x), -1, 10)
    similarity = ((cosine / 0.1).softmax(2) * cosine).sum(2)
    own = y[:, None] == torch.arange(similarity.shape[1], device=y.device)
    groups = w.view(-1, 10, w.shape[1])
    upper = torch.ones(10, 10, dtype=torch.bool, device=y.device).triu(1)
    squared = torch.where(upper, (2 - 2 * groups @ groups.mT).clamp(min=0) + 1e-5, 1.0)
    apart = torch.where(upper, squared.sqrt(), 0.0).sum() / (len(w) * 9)
    return cross_entropy(20 * (similarity - 0.01 * own), y) + 0.2 * apart


def center_formula(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, centers: Tensor) -> Tensor:
    return cross_entropy(x @ weight.T + bias, y) + 0.0015 * (x - centers[y]).square().sum(1).mean()


def formula(name: str, loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
    if name == "Proxy-Anchor":
        compiled = torch.compile(anchor_formula, dynamic=False)
        return lambda x, y: compiled(x, y, loss.proxies)
    if name == "SoftTriple":
        compiled = torch.compile(triple_formula, dynamic=False)
        return lambda x, y: compiled(x, y, loss.centers)
    compiled = torch.compile(center_formula, dynamic=False)

    def both(x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = compiled(x, y, loss.weight, loss.bias, loss.centers)
        loss.centers = losses.center_update(x, y, loss.centers, impl="torch")
        return value

    return both


def contenders(name: str, size: int, classes: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each contender's step on the same batch."""
    g = torch.Generator().manual_seed(size)
    y = torch.randint(classes, (size,), generator=g).cuda()
    x = torch.randn(size, D, generator=g).cuda().requires_grad_()

    def step(value: Callable[[Tensor, Tensor], Tensor], learned: list[Tensor]) -> Callable[[], None]:
        def once() -> None:
            for each in (x, *learned):
                each.grad = None
            value(x, y).backward()

        return once

    def ours() -> Any:
        return getattr(losses, CASES[name])(classes, D).cuda()

    loss = ours()
    yield "auto", step(loss, list(loss.parameters()))
    if name != "softmax + center":
        try:
            from pytorch_metric_learning import losses as peer_losses
        except ImportError:
            pass
        else:
            peer = getattr(peer_losses, CASES[name])(classes, D).cuda()
            yield "peer", step(peer, list(peer.parameters()))
    if (size, classes) in COMPILED:
        loss = ours()
        yield "compiled", step(formula(name, loss), list(loss.parameters()))
    rows = next(ours().parameters()).detach()
    yield "floor", lambda: floor(x.detach(), rows)


@torch.no_grad()
def floor(x: Tensor, rows: Tensor) -> None:
    matrix = x @ rows.T
    matrix @ rows, matrix.T @ x


def launches(step: Callable[[], None]) -> None:
    """The device's time of each kernel of a step, in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total):
        if event.self_device_time_total:
            print(f"      {event.self_device_time_total / 5:9.1f} us {event.count / 5:4.1f} x  {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=0.15, help="time spent on a cell")
    parser.add_argument("--launches", action="store_true")
    args = parser.parse_args()
    print(f"{measure.machine('cuda')}, torch {torch.__version__}")
    for name in args.losses:
        for size, classes in SIZES:
            steps = dict(contenders(name, size, classes))
            for once in steps.values():
                for _ in range(3):
                    once()
            taken = dict(zip(steps, measure.medians_by_turns(list(steps.values()), "cuda", args.seconds), strict=True))
            taken["busy"] = measure.busy_ms(steps["auto"])
            cells = "".join(f"{key:>10} {ms:7.3f}" for key, ms in taken.items())
            print(
                f"{name:18}{size:>6}{classes:>7}{cells}  MiB {measure.peak_mib(steps['auto'], 'cuda'):.0f}", flush=True
            )
            if args.launches and size in (512, 2048) and classes > 100:
                launches(steps["auto"])


if __name__ == "__main__":
    main()
