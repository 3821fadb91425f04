"""What `tenuto status` says of a gpu-let's part in a shared GPU, from its description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.mps.others import OtherProcess


def describe_share(gpulet: Mapping[str, Any]) -> str:
    """Return a gpu-let's share as planned, with the multiprocessors it really has where CUDA told them."""
    share, given = gpulet.get("share_pct"), gpulet.get("cuda_mps") or {}
    planned = "-" if share is None else f"{share:g} %"
    if given.get("sm_count") is None or given.get("gpu_sm_count") is None:
        return planned
    return f"{planned} ({given['sm_count']}/{given['gpu_sm_count']} SMs)"


def sharing_notes(gpulets: list[dict[str, Any]]) -> list[str]:
    """Return what is unusual: an attachment that could not be proved by the process's own pid, and other processes."""
    notes = []
    for gpulet in gpulets:
        given = gpulet.get("cuda_mps") or {}
        if given.get("proof") not in (None, "pid"):
            notes.append(f"{gpulet['id']}: its attachment to CUDA MPS was proved by: {given['proof']}")
        if given.get("others"):
            others = ", ".join(str(OtherProcess(**other)) for other in given["others"])
            notes.append(f"{gpulet['id']}: when it started its GPU was also used outside CUDA MPS by {others}")
    return notes
