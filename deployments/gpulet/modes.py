"""How a gpu-let runs, for the status: what it got of its GPU, and which of the ways to run batches it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.deployments.serve.user_config import ProgramEntry

__all__ = ["describe_mode", "mode_of"]


def mode_of(
    programs: Sequence[ProgramEntry], *, is_shared: bool, is_streaming: bool, is_emulated: bool
) -> dict[str, Any]:
    """Return the mode of a gpu-let as plain data.

    `share`: its compute share is held by CUDA MPS; `streaming`: copies overlap with execution; each on or off, these
    are the four modes of the thesis' dispatcher. `programs`: how each runs, `plain`, `compile`, `cuda_graphs`,
    `merged` or `emulated`.

    Args:
        programs: the entries of what is resident.
        is_shared: whether the process is a client of CUDA MPS.
        is_streaming: whether it streams.
        is_emulated: whether nothing really runs.
    """
    return {
        "share": is_shared,
        "streaming": is_streaming,
        "programs": {entry.name: "emulated" if is_emulated else _way(entry) for entry in programs},
    }


def _way(entry: ProgramEntry) -> str:
    if len(entry.members) > 1:
        return "merged"
    options = entry.members[0].options
    return next((way for way in ("compile", "cuda_graphs") if options.get(way)), "plain")


def describe_mode(mode: Mapping[str, Any]) -> str:
    """Return a mode in a few words, such as `share, streaming, cuda_graphs`."""
    words = [word for word in ("share", "streaming") if mode.get(word)]
    words += sorted(set(mode.get("programs", {}).values()) - {"plain", "emulated"})
    return ", ".join(words) or "plain"
