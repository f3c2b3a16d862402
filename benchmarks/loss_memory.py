"""Peak memory of every loss, forward and backward, beside pytorch-metric-learning's: python benchmarks/loss_memory.py

B = 1,024, D = 128, float32 on the CPU, 4 items per class, 256 classes. Each figure is the rise of the process's peak
resident memory over what it used just before, in a separate process, after a small warm-up batch; the allocator is
set to return freed blocks at once. The bound is 16 matrices of B × B float32. Linux only.
"""

import argparse
import resource
import subprocess
import sys
from pathlib import Path

import measure

B, D, CLASSES = 1024, 128, 256
LIMIT_MIB = 16 * B * B * 4 / 2**20
CEILING_GIB = 16  # a peer that wants more is stopped there
OURS = {
    "ContrastiveLoss": ("ContrastiveLoss()", "ContrastiveLoss()"),
    "MarginLoss": ("MarginLoss()", "MarginLoss()"),
    "MultiSimilarityLoss": ("MultiSimilarityLoss()", "MultiSimilarityLoss()"),
    "CircleLoss": ("CircleLoss()", "CircleLoss()"),
    "TripletLoss, semi-hard": ("TripletLoss()", None),
    "TripletLoss, all": ("TripletLoss(selection='all')", "TripletMarginLoss()"),
    "TripletLoss, batch-hard": ("TripletLoss(selection='batch_hard')", None),
    "QuadrupletLoss": ("QuadrupletLoss()", None),
    "LosslessTripletLoss": ("LosslessTripletLoss()", None),
    "LiftedStructureLoss, smooth": ("LiftedStructureLoss()", "LiftedStructureLoss()"),
    "LiftedStructureLoss, max": ("LiftedStructureLoss(form='max')", None),
    "NPairLoss": ("NPairLoss()", "NPairsLoss()"),
    "SupConLoss": ("SupConLoss()", "SupConLoss()"),
    "InfoNCELoss": ("InfoNCELoss()", "NTXentLoss()"),
    "SigmoidLoss": ("SigmoidLoss()", None),
    "VICRegLoss": ("VICRegLoss()", None),
    "SmoothAPLoss": ("SmoothAPLoss()", "SmoothAPLoss()"),
    "FastAPLoss": ("FastAPLoss()", "FastAPLoss()"),
    "SiameseLoss": (f"SiameseLoss({D})", None),
    "LogRatioLoss": ("LogRatioLoss()", None),
    "FacilityLocationLoss": ("FacilityLocationLoss(sweeps=0)", None),
    "ProxyNCALoss": (f"ProxyNCALoss({CLASSES}, {D})", f"ProxyNCALoss({CLASSES}, {D})"),
    "ProxyNCALoss, dynamic": (f"ProxyNCALoss({CLASSES}, {D}, assignment='dynamic')", None),
    "ProxyAnchorLoss": (f"ProxyAnchorLoss({CLASSES}, {D})", f"ProxyAnchorLoss({CLASSES}, {D})"),
    "SoftTripleLoss": (f"SoftTripleLoss({CLASSES}, {D})", f"SoftTripleLoss({CLASSES}, {D})"),
    "CenterLoss": (f"CenterLoss({CLASSES}, {D})", None),
    "NormalizedSoftmaxLoss": (f"NormalizedSoftmaxLoss({CLASSES}, {D})", f"NormalizedSoftmaxLoss({CLASSES}, {D})"),
    "HeatedSoftmaxLoss": (f"HeatedSoftmaxLoss({CLASSES}, {D})", None),
    "SphereFaceLoss": (f"SphereFaceLoss({CLASSES}, {D})", f"SphereFaceLoss({CLASSES}, {D})"),
    "CosFaceLoss": (f"CosFaceLoss({CLASSES}, {D})", f"CosFaceLoss({CLASSES}, {D})"),
    "ArcFaceLoss": (f"ArcFaceLoss({CLASSES}, {D})", f"ArcFaceLoss({CLASSES}, {D})"),
    "ArcFaceLoss, 3 sub-centres": (
        f"ArcFaceLoss({CLASSES}, {D}, sub_centers=3)",
        f"SubCenterArcFaceLoss(num_classes={CLASSES}, embedding_size={D}, sub_centers=3)",
    ),
    "AdaFaceLoss": (f"AdaFaceLoss({CLASSES}, {D})", None),
    "MagFaceLoss": (f"MagFaceLoss({CLASSES}, {D})", None),
    "AdaCosLoss": (f"AdaCosLoss({CLASSES}, {D})", None),
}


def peak_in_this_process(library: str, expression: str) -> float:
    """MiB of resident memory that one step of the loss adds at its peak."""
    import torch

    if library == "nearkin":
        from nearkin import losses
    else:
        from pytorch_metric_learning import losses
    torch.manual_seed(0)
    loss = eval(expression, vars(losses))  # expressions of the table above, nothing else

    def step(size: int) -> None:
        x = torch.randn(size, D, requires_grad=True)
        y = torch.arange(size) // 4
        loss(x, y.float() if "LogRatio" in expression else y).backward()

    step(16)
    step(16)
    bound = CEILING_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (measure.status("VmSize") * 1024 + bound, resource.RLIM_INFINITY))
    return measure.peak_mib(lambda: step(B), "cpu")


def figure(library: str, expression: str | None) -> float | str | None:
    """The figure from a fresh process, or that it asked for more than the ceiling."""
    if expression is None:
        return None
    done = subprocess.run(
        [sys.executable, __file__, "--peak", library, expression],
        capture_output=True,
        text=True,
        env=measure.frugal_environment(),
    )
    if done.returncode == 0:
        return float(done.stdout)
    if "can't allocate memory" in done.stderr or "out of memory" in done.stderr:
        return f"> {CEILING_GIB} GiB"
    raise RuntimeError(done.stderr)


def main() -> None:
    path = Path(__file__).parent / "results" / "loss_memory.csv"
    rows, over = [], []
    print(f"{'loss':32}{'nearkin MiB':>12}{'peer MiB':>12}   bound {LIMIT_MIB:.0f} MiB")
    for name, (expression, peer_expression) in OURS.items():
        ours, peer = figure("nearkin", expression), figure("peer", peer_expression)
        shown = "" if peer is None else peer if isinstance(peer, str) else f"{peer:.1f}"
        if isinstance(ours, str) or ours is None or ours > LIMIT_MIB:
            over.append(name)
        print(f"{name:32}{ours:>12.1f}{shown:>12}", flush=True)
        rows.append([name, "cpu", B, D, "float32", f"{ours:.1f}", peer_expression or "", shown, f"{LIMIT_MIB:.0f}"])
    header = ["loss", "device", "B", "D", "dtype", "mib", "peer", "peer_mib", "bound_mib"]
    measure.write_csv(path, header, rows)
    if over:
        sys.exit(f"over the bound of {LIMIT_MIB:.0f} MiB: {', '.join(over)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", nargs=2, metavar=("LIBRARY", "LOSS"), help="one figure; meant for a separate process")
    options = parser.parse_args()
    if options.peak:
        try:
            print(peak_in_this_process(*options.peak))
        except MemoryError:
            sys.exit("out of memory")
    else:
        main()
