"""What this machine and this installation offer: versions, devices, kernels, extras, room on disk."""

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from nearkin import kernels
from nearkin.core import devices, paths
from nearkin.core.versions import is_installed, packages_of_extras, version_of

__all__ = ["examine", "sentences"]

PACKAGES = ("torch", "numpy", "pillow", "safetensors", "pydantic", "typer", "rich")
# What an extra is for, in the order in which people need them; those for development are not shown.
EXTRAS = {
    "lite": "EfficientNet-Lite0, a pretrained encoder",
    "lite1": "EfficientNet-Lite1",
    "lite2": "EfficientNet-Lite2",
    "vision": "timm: encoders",
    "hf": "hf: encoders of transformers",
    "datasets": "Hugging Face datasets as a source (hf-dataset:NAME)",
    "report": "t-SNE maps and plots of the report, HDBSCAN",
    "serve": "nearkin serve",
    "glyphs": "typefaces of the glyphs set",
    "compare": "nearkin compare",
    "ann": "FAISS indexes",
    "parquet": "Parquet tables and exports",
    "postgres": "galleries in PostgreSQL",
    "export": "ONNX",
    "track": "TensorBoard",
    "pml": "nearkin.compat.pml, over pytorch-metric-learning",
}
LEAST_FREE = 2**30  # bytes on a disk, below which a sentence says so


def examine(folder: str | Path = ".") -> dict[str, Any]:
    """The state as JSON has it. folder: where runs would be written."""
    return {
        "nearkin": version_of("nearkin"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version_of(name) for name in PACKAGES},
        "devices": _devices(),
        "kernels": _kernels(),
        "extras": _extras(),
        "disk": _disk(Path(folder)),
    }


def sentences(state: dict[str, Any]) -> list[str]:
    """What is missing or short, each with the way out."""
    notes = []
    if len(state["devices"]) == 1:
        notes.append("no GPU: training takes the CPU; encoders that are pretrained are slow to fine-tune there")
    elif not state["kernels"]["available"]:
        notes.append(f"the kernel of very many classes is not used: {state['kernels']['why']}")
    wanted = (e for e in state["extras"] if e["missing"] and e["name"] in ("lite", "report", "serve"))
    notes += [f"{extra['for']}: {extra['install']}" for extra in wanted]
    for disk in state["disk"]:
        if disk["free_bytes"] is None:
            notes.append(f"{disk['what']}: {disk['folder']} cannot be written")
        elif disk["free_bytes"] < LEAST_FREE:
            notes.append(f"{disk['what']}: only {disk['free_bytes'] / 2**20:,.0f} MiB are free in {disk['folder']}")
    return notes


def _devices() -> list[dict[str, Any]]:
    capability = torch.backends.cpu.get_cpu_capability()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    entries: list[dict[str, Any]] = [
        {"name": "cpu", "line": f"{cores} cores, {torch.get_num_threads()} threads of torch, {capability}"}
    ]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        major, minor = devices.capability(torch.device("cuda", index))
        line = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability {major}.{minor}"
        entries.append({"name": f"cuda:{index}", "line": line})
    if torch.backends.mps.is_available():
        entries.append({"name": "mps", "line": "an Apple GPU"})
    return entries


def _kernels() -> dict[str, Any]:
    """Whether losses over very many class weights take the Triton kernel on a CUDA GPU; a GPU is another question."""
    why = kernels.missing()
    return {"available": why is None, "triton": None if why else version_of("triton"), "why": why}


def _extras() -> list[dict[str, Any]]:
    """Empty where the installation does not say what an extra needs."""
    packages = packages_of_extras()
    return [_extra(name, packages[name]) for name in EXTRAS if name in packages]


def _extra(name: str, packages: list[str]) -> dict[str, Any]:
    missing = [package for package in packages if not is_installed(package)]
    entry = {"name": name, "for": EXTRAS[name], "packages": packages, "missing": missing}
    return entry | {"install": f"pip install 'nearkin[{name}]'" if missing else None}


def _disk(folder: Path) -> list[dict[str, Any]]:
    places = [("runs", folder)]
    try:
        places.append(("cache of pictures", paths.cache_dir()))
    except RuntimeError:  # a user without a home
        places.append(("cache of pictures", Path(sys.prefix)))
    return [{"what": what, "folder": str(place), "free_bytes": _free(place)} for what, place in places]


def _free(folder: Path) -> int | None:
    """Bytes that are free where the folder is or would be made; None if it cannot be written."""
    existing = next(part for part in (folder.absolute(), *folder.absolute().parents) if part.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return None
    return shutil.disk_usage(existing).free
