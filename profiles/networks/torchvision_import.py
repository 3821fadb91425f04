"""Imports torchvision with a build of torch that its compiled operators do not fit; reads ImageNet names without torch.

The wheels of the package index are CUDA builds. Beside a CPU build of torch their library of operators (nms, roi_align,
…) cannot be loaded. torchvision tolerates that itself, except that two modules then register rules for operators which
do not exist, and the import fails. The models and transforms are Python and need none of these operators, so these two
modules are allowed to fail for that reason, whoever imports torchvision: the catalogue, transformers or a user's
factory. The operators stay absent: calling one raises torchvision's own error. A matching build is not touched.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from tenuto.errors import EnvironmentFaultError

if TYPE_CHECKING:
    import torch

# Modules that only serve the missing operators: their shape rules for fake tensors, and their gradients.
_OPERATOR_RULES = ("torchvision._meta_registrations", "torchvision._autograd_registrations")
_CURE = "Install the torchvision that belongs to this torch, or torchvision 0.28 with --no-deps beside torch 2.13.0."


def import_torchvision() -> ModuleType:
    """Return the torchvision package with `models` and `transforms` imported; cached by Python's own module table.

    Raises:
        EnvironmentFaultError: torchvision is not installed, or its import fails for another reason.
    """
    tolerate_missing_operators()
    try:
        module = importlib.import_module("torchvision")
        importlib.import_module("torchvision.models")
        importlib.import_module("torchvision.transforms")
    except (ImportError, RuntimeError) as error:
        raise EnvironmentFaultError(f"torchvision cannot be imported ({error}). {_CURE}") from error
    return module


def import_detection() -> ModuleType:
    """Return torchvision's detectors. Where the operators are absent, overlapping boxes are suppressed in numpy, and
    features are pooled by torchvision's own Python, which it would compile first. Raises as `import_torchvision` does.
    """
    import_torchvision()
    if not importlib.import_module("torchvision.extension")._has_ops():
        boxes: Any = importlib.import_module("torchvision.ops.boxes")
        boxes.batched_nms = _suppressed
        pooling: Any = importlib.import_module("torchvision.ops.roi_align")
        pooling._roi_align = inspect.unwrap(pooling._roi_align)
    return importlib.import_module("torchvision.models.detection")


def _suppressed(boxes: torch.Tensor, scores: torch.Tensor, idxs: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the places of the boxes that stay, the best first: from the best on, each box takes away those of its
    class whose intersection with it is more than `iou_threshold` of their union."""
    import torch

    corners, classes = boxes.detach().cpu().double().numpy(), idxs.cpu().numpy()
    order = scores.detach().sort(descending=True, stable=True).indices.cpu().numpy()
    areas = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    stays = np.zeros(len(order), bool)
    for each in np.unique(classes):
        left = order[classes[order] == each]
        while left.size:
            best, left = left[0], left[1:]
            stays[best] = True
            low = np.maximum(corners[best, :2], corners[left, :2])
            high = np.minimum(corners[best, 2:], corners[left, 2:])
            shared = np.prod(np.clip(high - low, 0.0, None), axis=1)
            left = left[shared <= iou_threshold * (areas[best] + areas[left] - shared)]
    return torch.from_numpy(order[stays[order]]).to(boxes.device)


def tolerate_missing_operators() -> None:
    """Let every later import of torchvision in this process succeed without its compiled operators."""
    if not any(isinstance(finder, _OperatorRules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OperatorRules())


class _OperatorRules(MetaPathFinder):
    """Finds the modules that may fail where the operators are absent."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where Python would find one of these modules, with a loader that tolerates its failure."""
        if fullname not in _OPERATOR_RULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Tolerant(spec.loader)
        return spec


class _Tolerant(Loader):
    """Loads a module with another loader. What the module lacks when its operators are absent, it goes without."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let the other loader make it."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module until an operator is absent."""
        try:
            self._loader.exec_module(module)
        except RuntimeError as error:
            if "operator torchvision::" not in str(error):
                raise


def imagenet_categories() -> tuple[str, ...]:
    """Return torchvision's names of the 1000 ImageNet classes, in the order of the logits, without importing torch.
    Raises as `categories` does."""
    return categories("_IMAGENET_CATEGORIES")


@cache
def categories(name: str) -> tuple[str, ...]:
    """Return one of torchvision's lists of names, without importing torch.

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
    names: list[str] = getattr(module, name)
    return tuple(names)
