"""How a gpu-let runs, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_mode(mode: Mapping[str, Any]) -> str:
    """Return a `GpuletMode` as data in a few words, such as `share, streaming, cuda_graphs`. Share and streaming, each
    on or off, are the four modes of the thesis' dispatcher."""
    words = [word for word in ("share", "streaming") if mode.get(word)]
    words += sorted(set(mode.get("programs", {}).values()) - {"plain", "emulated"})
    return ", ".join(words) or "plain"
