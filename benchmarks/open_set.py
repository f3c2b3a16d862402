"""Time and memory of open-set identification at the size of Stanford Online Products.

    python benchmarks/open_set.py [--items 60502] [--classes 11316] [--dim 512] [--repeats 1] [--device cpu|cuda]
        [--of open_set|identification]

Random vectors around class means. Memory is the peak of the whole process on a CPU, of what torch allocated on a GPU.
"""

import argparse
import resource
import time

import torch

from nearkin import evaluation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("items", 60_502), ("classes", 11_316), ("dim", 512), ("repeats", 1), ("budget", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--of", choices=("open_set", "identification"), default="open_set")
    chosen = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(chosen.classes, (chosen.items,), generator=generator)
    rows = torch.randn(chosen.classes, chosen.dim, generator=generator)[labels]
    rows += 1.5 * torch.randn(chosen.items, chosen.dim, generator=generator)
    cohort = torch.randn(2000, chosen.dim, generator=generator)
    rows, labels, cohort = (part.to(chosen.device) for part in (rows, labels, cohort))
    evaluation.open_set(
        rows[:400], torch.arange(400, device=rows.device) // 8, repeats=1, fpirs=(0.1,)
    )  # loads what the first call loads
    cuda = chosen.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    options = {"repeats": chosen.repeats, "budget": chosen.budget << 20, "seed": 0}
    if chosen.of == "open_set":
        scores = evaluation.open_set(rows, labels, cohort=cohort, **options)
    else:
        scores = evaluation.identification(rows, labels, **options)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if cuda else _peak()
    size = f"{chosen.items} x {chosen.dim} in {chosen.classes} classes, {chosen.repeats} halves"
    print(f"{size}, {chosen.device}, {torch.get_num_threads()} threads: {seconds:.1f} s, peak {peak / 2**20:.0f} MiB")
    for entry in scores["examples"]:
        figures = entry["methods"]["nearest"] if chosen.of == "open_set" else entry
        print(entry["examples"], entry["labels"], entry["nonmated"], figures["fnir@fpir=0.01"], figures["auroc"])


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
