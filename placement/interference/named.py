"""The interference models by name, for policies' options."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tenuto.errors import one_of, refused
from tenuto.placement.interference.contention import Constants, Contention, shipped_constants
from tenuto.placement.interference.gpulet_linear import CONSTANTS, V100
from tenuto.placement.interference.igniter_model import IgniterInterference
from tenuto.placement.interference.interference_model import InterferenceModel, NoInterference
from tenuto.profiles import Profiles

FROM_FILE = "contention:"
NAMES = ("none", "gpulet", "igniter", "contention")
_SYNONYMS = dict.fromkeys(("false", "no", "off", "0"), "none") | dict.fromkeys(("true", "yes", "on", "1"), "gpulet")


def canonical_name(choice: bool | str) -> str:
    """Return the name in `NAMES`, or `contention:FILE`; True means gpulet's own model, False none.

    Raises:
        InvalidInputError: there is no such model or file.
    """
    text = str(choice)
    if text.startswith(FROM_FILE):
        if not Path(text.removeprefix(FROM_FILE)).is_file():
            cure = "Give constants written with Constants.dump; see docs/reference/interference.md."
            raise refused("--option interference", choice, "no such file", cure)
        return text
    name = _SYNONYMS.get(text.lower(), text.lower())
    if name not in NAMES:
        cure = one_of(text, (*NAMES, FROM_FILE + "FILE"))
        raise refused("--option interference", choice, "no such interference model", cure)
    return name


def interference_models(name: str, gpu_types: Iterable[str], profiles: Profiles) -> dict[str, InterferenceModel]:
    """Return the model of that name for each GPU type.

    `gpulet` has constants for V100, 2080 Ti and 3080; other types use those of the V100. `contention` was fitted on a
    V100; other types use only its trend, as GPU times compare networks on one type only. `contention:FILE` uses the
    file's constants for all types.

    Raises:
        InvalidInputError: no such model, a malformed file, or the profiles lack iGniter's hardware coefficients for a
            GPU type.
    """
    name = canonical_name(name)
    match name:
        case "none":
            return {kind: NoInterference() for kind in gpu_types}
        case "gpulet":
            return {kind: CONSTANTS.get(kind, V100) for kind in gpu_types}
        case "igniter":
            return {kind: IgniterInterference(profiles.hardware(kind), kind) for kind in gpu_types}
        case "contention":
            trend_alone = Contention(shipped_constants().model_copy(update={"pairs": ()}))
            return {kind: Contention() if kind == "v100" else trend_alone for kind in gpu_types}
    return dict.fromkeys(gpu_types, Contention(Constants.load(name.removeprefix(FROM_FILE))))


def stand_ins(name: str, gpu_types: Iterable[str]) -> tuple[str, ...]:
    """Return a note for each GPU type that has no constants of its own and uses the V100's."""
    known = {"gpulet": tuple(CONSTANTS), "contention": ("v100",)}.get(name)
    return tuple(
        f"interference on {kind}: fitted on a V100, since no constants for {kind} are known"
        for kind in gpu_types
        if known is not None and kind not in known
    )
