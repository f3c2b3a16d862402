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
    "selection": 'which pairs or triplets count: "all", a name of `nearkin.mining`, or a function of your own',
    "squared": "squared distances (or hinges) instead of plain ones",
    "normalize": "embeddings are scaled to unit length first",
    "reduction": '"mean" over all terms, "active" over those above 0, "sum", or "none": one value per anchor',
    "sampling_dim": 'dimensions that "distance_weighted" supposes; None: the vectors\', "fitted": those that they fill',
    "generator": "random generator of selections that draw; None: torch's own",
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
    "CircleLoss": {
        "margin": "m, the relaxation of the optima 1 and 0; 0.4: the paper's retrieval experiments",
        "scale": "γ; 80: the paper's retrieval experiments",
    },
    "ContrastiveLoss": {
        "margin": "distance beyond which a negative pair costs nothing; 1: the paper's",
        "positive_margin": "distance within which a positive pair costs nothing; 0: the paper's",
        "squared": "hinges are squared, as in the paper",
        "balance": "positive and negative pairs are averaged apart; False: one mean over all pairs, the paper's",
    },
    "CosFaceLoss": {
        "margin": "m, taken off the own class's cosine; 0.35: the paper's",
        "scale": f"{_SCALE}; 64: the paper's",
        "max_memory": _CLASS_MEMORY,
    },
    "FacilityLocationLoss": {
        "gamma": "γ, the weight of 1 - NMI at the first step; 1: ours",
        "sweeps": "rounds in which medoids may change places; 5: TensorFlow's version",
        "decay": "factor of γ every `decay_steps` steps; 0.94: the paper's",
        "decay_steps": "training steps per decay; 1,000: ours",
        "num_clusters": "number of classes of every batch, where it is constant; None: counted",
    },
    "FastAPLoss": {"bins": "intervals of the distance histogram; 10: the released code's"},
    "HeatedSoftmaxLoss": {
        "scale": "α before the heat; 16: the released code's",
        "heated_scale": "α after it; 4: the released code's",
        "heat_after": "training steps before the scale drops; None: never",
        "norm": '"l2": embeddings of unit length; "batch": standardised over the batch',
    },
    "InfoNCELoss": {"temperature": "t, what similarities are divided by; 0.07: MoCo's"},
    "LiftedStructureLoss": {
        "margin": "α, the distance at which a negative starts to count; 1: the released code's",
        "form": '"smooth": log-sum-exp over negatives (eq. 4); "max": the hardest one (eq. 3)',
    },
    "LogRatioLoss": {
        "epsilon": "ε, added to squared distances; 1e-6: stands for the official code's 1e-4/128",
        "anchors": "how many of the first rows are anchors; None: all, 1: dense triplet mining as in the paper",
        "ties": '"drop": references at the same label distance are not compared, as in the paper; "keep": they are',
    },
    "LosslessTripletLoss": {
        "sigmoid": "maps embeddings into the unit cube; False where the encoder ends in a sigmoid",
        "epsilon": "ε inside the logarithms; 1e-8: the blog's",
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
    "MarginLoss": {
        "margin": "α, how far on its side of β a pair must be; 0.2: the authors' code",
        "beta": "where the boundary β starts; 1.2: the authors' code",
        "num_classes": "number of classes, for a β per class; None: one for all",
        "nu": "ν, the weight of the penalty on β; 0: the authors' code",
        "num_items": "number of training items, for a β per item beside the others; None: none",
    },
    "MultiSimilarityLoss": {
        "alpha": "α, how sharply positives are weighed; 2: the paper's",
        "beta": "β, how sharply negatives are weighed; 50: the paper's",
        "base": "λ, the similarity at which weights turn; 0.5: the released code's",
        "epsilon": "ε, the slack of the mining; 0.1: the paper's",
        "selection": '"multi_similarity", the paper\'s mining; "all"; another pair selection or function',
    },
    "NPairLoss": {"penalty": "weight of the embeddings' squared length; 0.002: TensorFlow's version"},
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
    "QuadrupletLoss": {
        "margin": "how much nearer than its anchor's negative a positive must be; 0.2: FaceNet's",
        "second_margin": "the same against a pair of two other classes; 0.1, half of the first: ours",
        "selection": 'which triplets count: "all", a triplet selection of `nearkin.mining`, or your own function',
    },
    "SiameseLoss": {},
    "SigmoidLoss": {
        "log_scale": "where t', the logarithm of the scale, starts; log 10: the paper's",
        "bias": "where the bias b starts; -10: the paper's",
    },
    "SmoothAPLoss": {
        "temperature": "t of the sigmoid; 0.01: the paper's",
        "max_positives": "most positives of an anchor, where they cannot be counted without waiting; None: any",
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
    "SupConLoss": {"temperature": "t, what similarities are divided by; 0.1: the paper's"},
    "TripletLoss": {
        "margin": "how much nearer than the negative the positive must be; 0.2: FaceNet's. None: softplus instead",
        "squared": "squared distances, as in FaceNet; False: plain, as in Hermans et al.",
        "swap": "the negative's distance to the positive counts where it is the smaller one",
        "selection": 'which triplets count: "all", a triplet selection of `nearkin.mining`, or your own function',
    },
    "VICRegLoss": {
        "invariance": "λ, the weight of the distance between positives; 25: the paper's",
        "variance": "μ, the weight of the dimensions' deviations below γ; 25: the paper's",
        "covariance": "ν, the weight of the covariances between dimensions; 1: the paper's",
        "deviation": "γ, the standard deviation that every dimension is to reach; 1: the paper's",
        "epsilon": "ε, added to variances under the root; 1e-4: the paper's",
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
