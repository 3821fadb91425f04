"""Where models and hooks may come from: the factories and paths that the operator of a machine allows.

People hand plans on as files, and a plan's `source: package.module:factory` is code that runs when it is deployed. Two
environment variables of the processes that load models say what is allowed. If they are not set, as on a machine of
one's own, everything is allowed:

    TENUTO_FACTORIES    packages or modules, separated by commas; what is inside them is allowed too
    TENUTO_MODEL_PATHS  folders, separated as in PATH, for weights, transformers directories and exported networks
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from tenuto.errors import refused
from tenuto.profiles.networks.torchvision_import import tolerate_missing_operators

FACTORIES = "TENUTO_FACTORIES"
MODEL_PATHS = "TENUTO_MODEL_PATHS"


def imported(source: str, what: str) -> Any:
    """Return what `package.module:name` names; modules of the working folder are found too, as by `python -m`.

    Args:
        source: that text.
        what: the key that named it.

    Raises:
        InvalidInputError: it is outside of the allowed packages, or cannot be imported.
    """
    check_factory(source, what)
    tolerate_missing_operators()
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # so that a model beside the workload file is found
    module, _, name = source.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise refused(
            what,
            source,
            f"cannot be imported ({error})",
            "Install the package, or start where the module lies; write package.module:factory.",
        ) from error
    return value


def check_factory(source: str, what: str = "source") -> None:
    """Raise `InvalidInputError` for a factory outside of the allowed packages. Call it before anything is imported."""
    allowed = os.environ.get(FACTORIES)
    if allowed is None:
        return
    module = source.partition(":")[0]
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    if not any(module == name or module.startswith(name + ".") for name in names):
        listed = ", ".join(names) or "none"
        raise refused(what, source, f"factories are allowed from: {listed}", f"Add its package to {FACTORIES}.")


def check_path(path: str | Path, what: str) -> None:
    """Raise `InvalidInputError` for a file or folder outside of the allowed folders; links are followed first.

    Args:
        path: the path of weights or of a network.
        what: the key that named it.
    """
    allowed = os.environ.get(MODEL_PATHS)
    if allowed is None:
        return
    folders = [Path(folder).resolve() for folder in allowed.split(os.pathsep) if folder]
    real = Path(path).resolve()
    if not any(real.is_relative_to(folder) for folder in folders):
        listed = ", ".join(map(str, folders)) or "none"
        raise refused(
            what, str(path), f"models are read from: {listed}", f"Move it there, or add its folder to {MODEL_PATHS}."
        )
