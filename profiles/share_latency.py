"""Latency on a share of a GPU: as measured, or else by one of three rules.

A profile never invents a number. Planning must, when a model gets a share on which it was never measured. The rule is
returned with the latency, so that plans can name it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

from tenuto.errors import MissingProfileError
from tenuto.profiles.latency import Latency, LatencyTable, LinearLatency
from tenuto.profiles.profile import ModelProfile, ProfilePoint

SM_UTILISATION = "wavg_sm_util_pct"  # time-weighted SM utilisation alone on the GPU (Elvinger's thesis, section 5.3.2)
WHOLE_GPU_PCT = 100.0  # unit
LARGEST_OF_A_LINE = 4096  # limit: batch size up to which a line is kept as two points

ShareRule = Literal["measured", "continued", "utilisation", "proportional"]
"""Where a latency on a share comes from.

* `measured`: on this share, or on the line in 1/share between two measured ones.
* `continued`: the line in 1/share through the two nearest measured shares goes on.
* `utilisation`: from the SM utilisation on the whole GPU, see `utilisation_factor`.
* `proportional`: the latency on the whole GPU over the share, an upper bound for compute-bound work.
"""

EVERY_RULE: tuple[ShareRule, ...] = ("measured", "continued", "utilisation", "proportional")


def latency_on_share(
    profile: ModelProfile, share_pct: float, allowed: Container[ShareRule] = ("measured", "utilisation")
) -> tuple[Latency, ShareRule]:
    """Return l(b) on a share in percent, and the rule it comes from: the first of `ShareRule` that applies.

    Raises:
        MissingProfileError: no allowed rule applies.
    """
    try:
        if "measured" in allowed:
            return profile.latency(share_pct), "measured"
    except MissingProfileError as error:
        reason = error
    else:
        reason = MissingProfileError(f"share {share_pct:g} %: no allowed rule gives a latency there.")
    shares = profile.shares() if profile.line is None else (WHOLE_GPU_PCT,)
    if len(shares) > 1 and "continued" in allowed:
        return LatencyTable(points=_continued(profile, shares, share_pct)), "continued"
    nearest = min(shares, key=lambda share: abs(share - share_pct))
    whole = profile.latency(nearest)
    if nearest == WHOLE_GPU_PCT and isinstance(whole, LatencyTable) and "utilisation" in allowed:
        busy = {p.batch_size: p.metrics[SM_UTILISATION] for p in profile.points if SM_UTILISATION in p.metrics}
        if busy:
            largest = max(busy)
            factors = {
                size: utilisation_factor(busy[min((b for b in busy if b >= size), default=largest)], share_pct)
                for size in whole.points
            }
            return LatencyTable(points={b: ms * factors[b] for b, ms in whole.points.items()}), "utilisation"
    if "proportional" in allowed:
        return whole.scaled(max(1.0, nearest / share_pct)), "proportional"
    raise reason


def utilisation_factor(busy_pct: float, share_pct: float) -> float:
    """Return l on a share over l on the whole GPU, u/s + 1 - u with u the SM utilisation and s the share, at least 1.

    The part of the time in which all SMs work grows with 1/s, the rest does not. Our assumption, no paper's.
    """
    busy = busy_pct / 100.0
    return max(1.0, busy * 100.0 / share_pct + 1.0 - busy)


def _continued(profile: ModelProfile, shares: tuple[float, ...], share_pct: float) -> dict[int, float]:
    """Continue the line in 1/share through the two nearest measured shares, which is how profiles interpolate
    (compute-bound work, iGniter eq. 11 with k4 = 0).

    Upwards it is kept between two bounds that hold for any program: not slower than on the largest measured share, and
    not faster than in proportion to the compute gained. Downwards it is never faster than on the smallest.
    """
    if share_pct > shares[-1]:
        far, near = shares[-2:]
    else:
        near, far = shares[:2]
    weight = (1 / far - 1 / share_pct) / (1 / far - 1 / near)
    latencies = {}
    for size in sorted(set(profile.batch_sizes(near)) & set(profile.batch_sizes(far))):
        at_far, at_near = profile.latency_ms(size, far), profile.latency_ms(size, near)
        line = at_far * (1 - weight) + at_near * weight
        up = share_pct > near
        latencies[size] = min(at_near, max(at_near * near / share_pct, line)) if up else max(at_near, line)
    if not latencies:
        raise MissingProfileError(f"no batch size was measured at both {near:g} % and {far:g} %. Profile it.")
    return latencies


def with_share(profile: ModelProfile, share_pct: float, latency: Latency) -> ModelProfile:
    """Return a profile that knows this latency on a share on which it was not measured."""
    if profile.line is None and share_pct in profile.shares():
        return profile
    if isinstance(latency, LinearLatency):  # two points are the whole line
        latency = LatencyTable(points={size: latency.at(size) for size in (1, LARGEST_OF_A_LINE)})
    memory = {p.batch_size: p.memory_mib for p in profile.points}
    points = tuple(
        ProfilePoint(batch_size=size, share_pct=share_pct, latency_ms=ms, memory_mib=memory.get(size))
        for size, ms in latency.points.items()
    )
    return profile.model_copy(update={"points": (*profile.points, *points), "line": None})
