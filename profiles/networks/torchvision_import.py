"""Imports torchvision with a build of torch that its compiled operators do not fit; reads ImageNet names without torch.

The wheels of the package index are CUDA builds. Beside a CPU build of torch their library of operators (nms, roi_align,
…) cannot be loaded; torchvision tolerates that itself, except that two modules then register rules for operators which
do not exist, and the import fails. The models and transforms are Python and need none of these operators, so exactly
those two modules are replaced by empty ones, and only after the ordinary import has failed for that reason. The
operators stay absent: calling one raises torchvision's own error. A matching build is used untouched.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from tenuto.errors import EnvironmentFaultError

# Modules that only serve the missing operators: their shape rules for fake tensors, and their gradients.
_OPERATOR_RULES = ("torchvision._meta_registrations", "torchvision._autograd_registrations")
_CURE = "Install the torchvision that belongs to this torch, or torchvision 0.28 with --no-deps beside torch 2.13.0."


def import_torchvision() -> ModuleType:
    """Return the torchvision package with `models` and `transforms` imported; cached by Python's own module table.

    Raises:
        EnvironmentFaultError: torchvision is not installed, or its import fails for another reason.
    """
    try:
        return _import()
    except ModuleNotFoundError as error:
        raise EnvironmentFaultError(f"torchvision cannot be imported ({error}). {_CURE}") from error
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise EnvironmentFaultError(f"torchvision cannot be imported ({error}). {_CURE}") from error
    _forget()
    for name in _OPERATOR_RULES:
        sys.modules[name] = ModuleType(name, "Empty: torchvision's compiled operators do not fit this torch.")
    try:
        return _import()
    except Exception as error:
        _forget()
        raise EnvironmentFaultError(f"torchvision cannot be imported without operators ({error}). {_CURE}") from error


def _import() -> ModuleType:
    module = importlib.import_module("torchvision")
    importlib.import_module("torchvision.models")
    importlib.import_module("torchvision.transforms")
    return module


def _forget() -> None:
    """Remove what a failed import left behind."""
    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]


@cache
def imagenet_categories() -> tuple[str, ...]:
    """Return torchvision's names of the 1000 ImageNet classes, in the order of the logits, without importing torch.

    Raises:
        EnvironmentFaultError: torchvision is not installed or keeps its names elsewhere.
    """
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        raise EnvironmentFaultError(f"torchvision is not installed. {_CURE}")
    file = Path(package.origin).parent / "models" / "_meta.py"
    spec = importlib.util.spec_from_file_location("tenuto_torchvision_names", file)
    if spec is None or spec.loader is None or not file.exists():
        raise EnvironmentFaultError(f"{file} does not exist. {_CURE}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names: list[str] = module._IMAGENET_CATEGORIES
    return tuple(names)
