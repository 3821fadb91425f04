"""What Serve hands our processes, as strict schemas: an unknown key is refused with its path and a cure before anything
is applied."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from tenuto.documents import StrictModel
from tenuto.profiles.latency import LatencyField

__all__ = ["GpuletConfig", "MemberEntry", "ProgramEntry"]


class MemberEntry(StrictModel):
    """One model of a program: where it comes from, and how it is built and run."""

    name: str
    source: str | None = None
    weights_path: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class ProgramEntry(StrictModel):
    """What a gpu-let loads: one or more models that run as one program.

    `latency` is l(b) of the program alone on this share, `slowdown` (>= 1) what the neighbours cost on top, the copies
    are ms of one request: what an emulated GPU goes by.
    """

    name: str
    batch_size: Annotated[int, Field(ge=1)]
    members: Annotated[tuple[MemberEntry, ...], Field(min_length=1)]
    latency: LatencyField | None = None
    slowdown: Annotated[float, Field(ge=1)] = 1.0
    copy_in_ms: Annotated[float, Field(ge=0)] | None = None
    copy_out_ms: Annotated[float, Field(ge=0)] | None = None


class GpuletConfig(StrictModel):
    """`user_config` of a gpu-let: all that can change without a restart."""

    programs: tuple[ProgramEntry, ...]

    @model_validator(mode="before")
    @classmethod
    def _from_models(cls, raw: Any) -> Any:
        """Read plan files of earlier versions, which list `models`: programs of one, and groups with `members`."""
        if not isinstance(raw, dict) or "models" not in raw or "programs" in raw:
            return raw
        entries = raw["models"]
        if not isinstance(entries, list | tuple):
            return raw
        rest = {key: value for key, value in raw.items() if key != "models"}
        return {**rest, "programs": [_with_members(entry) for entry in entries]}


def _with_members(entry: Any) -> Any:
    if not isinstance(entry, dict) or "members" in entry:
        return entry
    own = {key: entry[key] for key in ("name", "source", "weights_path", "options") if key in entry}
    shared = {key: value for key, value in entry.items() if key == "name" or key not in own}
    return {**shared, "members": [own]}
