"""Reads local weights and puts them into a network. It never unpickles objects. Imports torch when called."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tenuto.errors import first_line, refused

if TYPE_CHECKING:
    import torch

# torchvision's published DenseNet files use names from before torch refused dots in module names.
_OLD_DENSENET = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)$")


def read_state(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.safetensors` file or of a state dict saved by torch.

    Raises:
        InvalidInputError: the file is absent or damaged, or a pickle that contains more than tensors.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(path)
    if not file.is_file():
        raise refused("weights_path", path, "no such file", "Give a local file; nothing is downloaded.")
    try:
        if file.suffix == ".safetensors":
            state = load_file(file, device="cpu")
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # about foreign pickle protocols; loading decides
                state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, SafetensorError, RuntimeError, OSError) as error:
        raise refused(
            "weights_path",
            path,
            f"not a file of weights that is safe to read ({first_line(error)})",
            "Save it with safetensors.torch.save_file(model.state_dict(), path).",
        ) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise refused("weights_path", path, "holds something else than named tensors", "Save model.state_dict() alone.")
    return {str(key): value for key, value in state.items()}


def apply_state(module: torch.nn.Module, state: dict[str, torch.Tensor], path: str, name: str) -> None:
    """Copy weights into a network; every tensor must be there with its shape.

    Prefixes of wrappers (`module.`), old DenseNet names, Inception's auxiliary head and tied weights are understood.

    Raises:
        InvalidInputError: tensors are missing, left over or of another shape; the message names them.
    """
    own = module.state_dict(keep_vars=True)
    if state and all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    state = {_OLD_DENSENET.sub(r"\1\2", key): value for key, value in state.items()}
    if not any(key.startswith("AuxLogits.") for key in own):
        state = {key: value for key, value in state.items() if not key.startswith("AuxLogits.")}
    loaded = {id(own[key]) for key in state if key in own}
    missing = [
        key
        for key, tensor in own.items()
        if key not in state and id(tensor) not in loaded and not key.endswith("num_batches_tracked")
    ]
    unexpected = [key for key in state if key not in own]
    shapes = [
        f"{key} is {tuple(state[key].shape)}, not {tuple(own[key].shape)}"
        for key in state
        if key in own and state[key].shape != own[key].shape
    ]
    faults = [
        f"{what} {len(keys)} ({', '.join(keys[:4])}{', …' if len(keys) > 4 else ''})"
        for what, keys in (("missing", missing), ("unknown", unexpected), ("of another shape", shapes))
        if keys
    ]
    if faults:
        raise refused(
            "weights_path",
            path,
            f"does not fit '{name}': tensors {'; '.join(faults)}",
            "Give the weights of this very network, or change `options` (config, num_labels) to match the file.",
        )
    module.load_state_dict(state, strict=False)
