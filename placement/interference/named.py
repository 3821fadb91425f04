"""The interference models by name, as policies' options choose them."""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement.interference.base import InterferenceModel, NoInterference
from tenuto.placement.interference.contention import Contention
from tenuto.placement.interference.gpulet_linear import CONSTANTS, V100
from tenuto.placement.interference.igniter import IgniterInterference
from tenuto.profiles import Profiles

__all__ = ["NAMES", "canonical_name", "interference_models"]

NAMES = ("none", "gpulet", "igniter", "contention")
_SYNONYMS = {"false": "none", "no": "none", "off": "none", "0": "none",
             "true": "gpulet", "yes": "gpulet", "on": "gpulet", "1": "gpulet"}  # fmt: skip


def canonical_name(choice: bool | str, path: str = "--option interference") -> str:
    """Return the name in `NAMES` that is meant; true is gpulet's own model, false is none.

    Raises:
        InvalidInputError: there is no such model.
    """
    lower = str(choice).lower()
    name = _SYNONYMS.get(lower, lower)
    if name not in NAMES:
        raise InvalidInputError(Problem(path, choice, "no such interference model", f"Use {', '.join(NAMES)}."))
    return name


def interference_models(name: str, gpu_types: Iterable[str], profiles: Profiles) -> dict[str, InterferenceModel]:
    """Return the model of that name for each GPU type.

    `gpulet` has constants for V100, 2080 Ti and 3080; other types use those of the V100. `contention` was fitted on a
    V100 and is used for all types.

    Raises:
        InvalidInputError: no such model, or the profiles lack iGniter's hardware coefficients for a GPU type.
    """
    found: dict[str, InterferenceModel] = {}
    for kind in gpu_types:
        match canonical_name(name):
            case "none":
                found[kind] = NoInterference()
            case "gpulet":
                found[kind] = CONSTANTS.get(kind, V100)
            case "contention":
                found[kind] = Contention()
            case _:
                found[kind] = IgniterInterference(profiles.hardware(kind), kind)
    return found
