"""Saves and loads an encoder: encoder.json describes it, model.safetensors holds its weights."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nearkin.core import checks, files
from nearkin.core.errors import UnfittingWeights
from nearkin.core.versions import version_of
from nearkin.models.adapt import plain_state
from nearkin.models.encoder import PREFIX, Encoder, OwnEncoder
from nearkin.models.factory import build, shapes

__all__ = ["check_length", "fingerprint", "load", "save"]

FORMAT = 1  # raise when present readers could not read the folder
DESCRIPTION, WEIGHTS = "encoder.json", "model.safetensors"
_LONGEST = 2**24  # bytes of a description


def save(
    encoder: Encoder,
    folder: str | Path,
    preparation: dict[str, Any] | None = None,
    lengths: Sequence[int] | None = None,
    frozen: str | None = None,
    compatible: Mapping[str, Any] | None = None,
) -> None:
    """Writes both files into the folder, which is created if needed; previous files stay until both are complete.

    preparation: how inputs are prepared for the encoder (JSON); `load` returns it. lengths: to which embeddings may be
    cut, where it was trained for several (`MatryoshkaLoss`). frozen: the name of a pretrained encoder, where nothing
    was trained. compatible: the old encoder whose rows it was trained to search, {"run", "encoder", "dim"}, by the
    fingerprint "encoder". LoRA is merged into the weights. For an instant between the two renames at the end the files
    do not belong together, which the checksum in encoder.json shows.
    """
    from safetensors.torch import save as to_bytes

    state = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in plain_state(encoder.backbone if isinstance(encoder, OwnEncoder) else encoder).items()
    }
    weights = to_bytes(state, {"format": "pt"})
    description = {
        "format": FORMAT,
        "nearkin": version_of("nearkin"),
        "settings": encoder.settings,
        "pretrained": encoder.pretrained,
        "preparation": preparation or {},
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    if lengths is not None:
        description["lengths"] = list(lengths)
    if frozen is not None:
        description["frozen"] = frozen
    if compatible is not None:
        description["compatible"] = dict(compatible)
    try:
        text = json.dumps(description, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"preparation must be plain JSON values: {error}") from None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with files.replacing(folder / DESCRIPTION) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())  # so that nothing slow is left to do once the weights have their name
        files.write_bytes(folder / WEIGHTS, weights)


def fingerprint(description: Mapping[str, Any], dim: int | None = None) -> str:
    """sha256 of the weights, the architecture and the preparation: any change of an embedding changes it.

    description: the content of encoder.json; a KeyError names a missing key. dim: of embeddings that are cut to it.
    A frozen encoder is built anew on every machine: its name and configuration, which other versions of a library write
    otherwise, are left out.
    """
    parts = {key: description[key] for key in ("weights_sha256", "settings", "preparation")}
    if "frozen" in description:
        parts["settings"] = {k: v for k, v in parts["settings"].items() if k not in ("name", "config")}
    if dim is not None:
        parts["settings"] = parts["settings"] | {"dim": dim}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def check_length(description: Mapping[str, Any], dim: int, run: str | Path) -> None:
    """Raises unless the encoder was trained for embeddings of this length. description: the content of encoder.json."""
    checks.integer("dim", dim, 1)
    full, lengths = description["settings"].get("dim"), description.get("lengths")
    if lengths is None and dim != full:
        raise ValueError(
            f"dim must be left out for {run}, got {dim}: it was not trained for short embeddings, and its first "
            f"dimensions alone find less; train with loss.matryoshka = [{dim}], or measure what is lost: "
            f"nearkin evaluate {run} --dim {dim}"
        )
    if lengths is not None and dim not in lengths:
        raise ValueError(f"dim must be a length that {run} was trained for, {', '.join(map(str, lengths))}, got {dim}")


def load(folder: str | Path, device: str | torch.device = "cpu") -> tuple[Encoder, dict[str, Any]]:
    """The encoder in evaluation mode, and the preparation saved with it; nothing is downloaded.

    The description is compared with the weights before memory is allocated for the encoder.
    """
    folder = Path(folder)
    description = _description(folder / DESCRIPTION)
    name = str(description["settings"].get("name"))
    if name.startswith(PREFIX):
        raise ValueError(
            f"{folder}: its encoder is an object of the user's own ({name.removeprefix(PREFIX)}), which only its own "
            f"code can build; in Python, make it and give it the weights: "
            f'module.load_state_dict(safetensors.torch.load_file("{(folder / WEIGHTS).as_posix()}"))'
        )
    weights = _read(folder / WEIGHTS)
    digest = hashlib.sha256(weights).hexdigest()
    if digest != description["weights_sha256"]:
        raise ValueError(
            f"{folder / WEIGHTS} is corrupt or of another encoder: "
            f"its sha256 is {digest[:12]}…, {DESCRIPTION} says {str(description['weights_sha256'])[:12]}…"
        )
    state = _tensors(weights, folder / WEIGHTS)
    try:
        expected = shapes(description["settings"], len(state))
        if expected is not None:
            _compare(expected, state, folder / WEIGHTS)
        encoder = build(**description["settings"], pretrained=False)
    except (ModuleNotFoundError, UnfittingWeights):
        raise  # its sentence says what to install, or what differs
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / DESCRIPTION} describes no encoder that can be built: {reason}") from None
    _fill(encoder, state, folder / WEIGHTS)
    encoder.pretrained = description["pretrained"]
    return encoder.to(device).eval(), description["preparation"]


def _read(path: Path, longest: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(longest)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is not there; a saved encoder is a folder with {DESCRIPTION}, {WEIGHTS}"
        ) from None
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror or error}") from None


def _description(path: Path) -> dict[str, Any]:
    content = _read(path, _LONGEST + 1)
    if len(content) > _LONGEST:
        raise ValueError(f"{path} is not the description of an encoder: it is larger than {_LONGEST >> 20} MiB")
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is corrupt, not JSON: {error}") from None
    kinds = {"format": int, "settings": dict, "pretrained": bool, "preparation": dict, "weights_sha256": str}
    if not isinstance(description, dict) or not all(
        isinstance(description.get(key), kind) for key, kind in kinds.items()
    ):
        raise ValueError(f"{path} is not the description of an encoder, which has: {', '.join(kinds)}")
    if description["format"] != FORMAT:
        raise ValueError(f"{path} has format {description['format']}, this version of nearkin reads format {FORMAT}")
    return description


def _tensors(weights: bytes, path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    try:
        return from_bytes(weights)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None


def _compare(expected: Mapping[str, torch.Size], state: Mapping[str, torch.Tensor], path: Path) -> None:
    if missing := sorted(expected.keys() ^ state.keys()):
        raise UnfittingWeights(
            f"{path} does not fit its description: {len(missing)} names differ, such as {missing[0]}"
        )
    for name, shape in expected.items():
        if shape != state[name].shape:
            got = tuple(state[name].shape)
            raise UnfittingWeights(f"{path} does not fit its description: {name} is {got}, {tuple(shape)} expected")


def _fill(encoder: Encoder, state: Mapping[str, torch.Tensor], path: Path) -> None:
    _compare({name: tensor.shape for name, tensor in encoder.state_dict().items()}, state, path)
    if half := next((t.dtype for t in state.values() if t.dtype in (torch.float16, torch.bfloat16)), None):
        encoder.to(half)
    encoder.load_state_dict(state)
