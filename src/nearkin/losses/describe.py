"""The help text of a loss class: its function's formula, and every setting with its default.

Meanings that all losses share are in `SHARED`; what a setting means in one loss alone is in `OWN`, with the source of
the default. `losses/__init__.py` puts them together when the package is imported.
"""

import inspect
import textwrap

from nearkin.losses.module import LossModule

__all__ = ["OWN", "SHARED", "describe", "meaning"]

SHARED = {
    "num_classes": "number of classes C; labels are 0..C-1, or -1 for unknown",
    "dim": "dimensions D of the embeddings",
    "normalize": "embeddings are scaled to unit length first",
    "reduction": '"mean" over all terms, "active" over those above 0, "sum", or "none": one value per anchor',
    "max_memory": "bytes that the loss may use beside its arguments and gradients; None: blocks of about 1 GiB",
    "impl": '"torch" runs anywhere, "triton" takes a kernel where it serves, "auto" chooses',
    "sample_rate": "share of the classes in a training step (Partial FC); 1: all",
    "shard": "each process of torch.distributed holds its own part of the classes",
}

_CLASS_MEMORY = "bytes of logits at once; beyond it blocks of classes pass by. None: a modest size"
_SCALE = "s, what cosines are multiplied by"

OWN: dict[str, dict[str, str]] = {
    "AdaCosLoss": {
        "dynamic": "the scale follows each batch (eq. 15); False: fixed at √2 ln(C - 1) (eq. 12)",
        "max_memory": _CLASS_MEMORY,
    },
    "AdaFaceLoss": {
        "margin": "m, an angle in radians and a cosine; 0.4: the paper's",
        "scale": f"{_SCALE}; 64: the paper's",
        "concentration": "h, how much of the lengths' spread the margins cover; 0.333: the paper's, 0: CosFace",
        "momentum": "weight of a batch in the running mean and deviation of the lengths; 0.01: the paper's",
        "max_memory": _CLASS_MEMORY,
    },
    "ArcFaceLoss": {
        "margin": "m in radians, in [0, π); 0.5: the paper's",
        "scale": f"{_SCALE}; 64: the paper's, 16 to 32 for few classes",
        "sub_centers": "K, class weights per class, of which the nearest counts; 1: the paper's of 2019, 3: of 2020",
        "straight_through": "the target has the slope of a plain cosine, as in InsightFace's PyTorch code",
        "max_memory": _CLASS_MEMORY,
    },
    "CenterLoss": {
        "pull": "λ, the weight of the centre term; 0.003: the paper's",
        "alpha": "α, how far a centre moves towards its items per step; 0.5: the paper's",
    },
    "CosFaceLoss": {
        "margin": "m, taken off the own class's cosine; 0.35: the paper's",
        "scale": f"{_SCALE}; 64: the paper's",
        "max_memory": _CLASS_MEMORY,
    },
    "HeatedSoftmaxLoss": {
        "scale": "α before the heat; 16: the released code's",
        "heated_scale": "α after it; 4: the released code's",
        "heat_after": "training steps before the scale drops; None: never",
        "norm": '"l2": embeddings of unit length; "batch": standardised over the batch',
    },
    "MagFaceLoss": {
        "lower_margin": "l_m in radians, the margin at `lower_length` and below; 0.45: the paper's",
        "upper_margin": "u_m in radians, the margin at `upper_length` and beyond; 0.8: the paper's",
        "scale": f"{_SCALE}; 64: the paper's",
        "lower_length": "l_a, the length below which embeddings are drawn out; 10: the paper's",
        "upper_length": "u_a, the length from which the penalty is level; 110: the paper's",
        "penalty": "λ_g, the weight of g(a) = a / u_a² + 1 / a; 35: the paper's",
        "max_memory": _CLASS_MEMORY,
    },
    "NormalizedSoftmaxLoss": {
        "scale": f"{_SCALE}; 20: temperature 0.05 of Zhai and Wu",
        "max_memory": _CLASS_MEMORY,
    },
    "ProxyAnchorLoss": {
        "margin": "δ; 0.1: the paper's",
        "scale": "α; 32: the paper's",
        "max_memory": _CLASS_MEMORY,
    },
    "ProxyNCALoss": {
        "scale": "length to which embeddings and proxies are scaled; 3: temperature 1/9 of Proxy-NCA++",
        "form": '"softmax": the own proxy is in the sum (Proxy-NCA++); "original": it is not',
        "assignment": '"static": proxies belong to classes; "dynamic": an item is replaced by its nearest proxy',
        "proxies_per_class": "K; 1: the paper's",
        "max_memory": _CLASS_MEMORY,
    },
    "SoftTripleLoss": {
        "margin": "δ; 0.01: the paper's",
        "scale": "λ; 20: the paper's",
        "centers_per_class": "K; 10: the paper's",
        "gamma": "γ, the temperature between a class's centres; 0.1: the paper's",
        "tau": "τ, the weight of what draws a class's centres together; 0.2: the paper's",
        "max_memory": _CLASS_MEMORY,
    },
    "SphereFaceLoss": {
        "margin": "m, an integer; 4: the paper's",
        "start": "λ at the first step; 1000: the released code's",
        "decay": "how fast λ falls with the steps; 0.12: the released code's",
        "floor": "the least λ; 5: the released code's, 0 ends in the bare loss",
        "max_memory": _CLASS_MEMORY,
    },
}


def meaning(loss: str, setting: str) -> str:
    """What a setting of a loss class means; "" if it is not documented."""
    return OWN.get(loss, {}).get(setting) or SHARED.get(setting, "")


def describe(loss: type[LossModule]) -> None:
    """Gives a loss class the docstring of its function, its own, and a line for each setting."""
    lines = []
    for name, parameter in list(inspect.signature(loss).parameters.items()):
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        line = f"{name}{default}: {meaning(loss.__name__, name)}"
        lines.append(textwrap.fill(line, 116, initial_indent="  ", subsequent_indent="      "))
    parts = [inspect.cleandoc(part) for part in (loss.function.__doc__, loss.__doc__) if part]  # none under python -OO
    loss.__doc__ = "\n\n".join([*parts, "Settings\n\n" + "\n".join(lines)])
