"""How a gpu-let runs, for the status: what it got of its GPU, and which of the ways to run batches it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.deployments.serve.user_config import ProgramEntry
from tenuto.deployments.wire.messages import GpuletMode

__all__ = ["describe_mode", "mode_of"]


def mode_of(
    programs: Sequence[ProgramEntry], *, is_shared: bool, is_streaming: bool, is_emulated: bool
) -> GpuletMode:
    """Return the mode of a gpu-let. Share and streaming, each on or off, are the four modes of the thesis' dispatcher.

    Args:
        programs: the entries of what is resident.
        is_shared: whether the process is a client of CUDA MPS.
        is_streaming: whether it streams.
        is_emulated: whether nothing really runs.
    """
    ways = {entry.name: "emulated" if is_emulated else _way(entry) for entry in programs}
    return GpuletMode(is_shared, is_streaming, ways)


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
