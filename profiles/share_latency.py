"""Latency on a share of a GPU: as measured, or from the SM utilisation where only the whole GPU was measured."""

from __future__ import annotations

from typing import Literal

from tenuto.errors import MissingProfileError
from tenuto.profiles.latency import LatencyTable, LinearLatency
from tenuto.profiles.profile import ModelProfile, ProfilePoint

__all__ = ["SM_UTILISATION", "ShareRule", "latency_on_share", "utilisation_factor", "with_share"]

SM_UTILISATION = "wavg_sm_util_pct"  # time-weighted SM utilisation alone on the GPU (Elvinger's thesis, section 5.3.2)

ShareRule = Literal["measured", "utilisation"]
"""Where a latency on a share comes from."""


def utilisation_factor(busy_pct: float, share_pct: float) -> float:
    """Return l on a share over l on the whole GPU, u/s + 1 - u with u the SM utilisation and s the share, at least 1.

    The part of the time in which all SMs work grows with 1/s, the rest does not. Our assumption, no paper's.
    """
    busy = busy_pct / 100.0
    return max(1.0, busy * 100.0 / share_pct + 1.0 - busy)


def latency_on_share(profile: ModelProfile, share_pct: float) -> tuple[LatencyTable | LinearLatency, ShareRule]:
    """Return l(b) on a share in percent, and whether it was measured or follows from the SM utilisation.

    Raises:
        MissingProfileError: the share was not measured, and neither was the SM utilisation on the whole GPU.
    """
    try:
        return profile.latency(share_pct), "measured"
    except MissingProfileError:
        busy = {p.batch_size: p.metrics[SM_UTILISATION] for p in profile.points
                if p.share_pct == 100.0 and SM_UTILISATION in p.metrics}  # fmt: skip
        if not busy or len(profile.shares()) > 1:
            raise
    whole = {p.batch_size: p.latency_ms for p in profile.points if p.share_pct == 100.0}
    largest = max(busy)
    points = {
        size: latency * utilisation_factor(busy[min((b for b in busy if b >= size), default=largest)], share_pct)
        for size, latency in whole.items()
    }
    return LatencyTable(points=points), "utilisation"


def with_share(profile: ModelProfile, share_pct: float) -> tuple[ModelProfile, ShareRule]:
    """Return a profile that knows its latencies on a share, and whether they were measured.

    Raises:
        MissingProfileError: as `latency_on_share`.
    """
    latency, rule = latency_on_share(profile, share_pct)
    if rule == "measured" or not isinstance(latency, LatencyTable):
        return profile, rule
    memory = {p.batch_size: p.memory_mib for p in profile.points}
    points = tuple(
        ProfilePoint(batch_size=size, share_pct=share_pct, latency_ms=ms, memory_mib=memory[size])
        for size, ms in latency.points.items()
    )
    return profile.model_copy(update={"points": (*profile.points, *points)}), rule
