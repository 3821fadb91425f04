"""What random arrivals cost: requests that wait too long although the GPUs would have time for them on average.

Two causes, each with a formula of queueing theory. *Fluctuation*: the work that waits in front of `n` gpu-lets is a
random walk; what would exceed the deadlines is lost. As a reflected Brownian motion between nothing and the mean time
`h` that work may wait (heavy traffic with deadlines: Kruk, Lehoczky, Ramanan and Shreve, Annals of Applied Probability
2011), with load rho and variance v per unit of time, the gpu-lets do not work for the part
(1 - rho) / (1 - exp(-2 (1 - rho) h / v)) of their time. *Blocking*: a batch that runs is not interrupted; a request
that arrives behind one that is longer than it may wait is late unless another gpu-let is free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Batch", "Stream", "blocked_part", "used_part"]


@dataclass(frozen=True)
class Batch:
    """The batch in which a program's requests run on a gpu-let: size, and what it takes beside the neighbours."""

    size: int
    latency_ms: float

    @property
    def time_s(self) -> float:
        """Seconds of a gpu-let per request."""
        return self.latency_ms / self.size / 1000.0


@dataclass(frozen=True)
class Stream:
    """Requests of one program: how many per second, in which batches, in time after how long."""

    rate_rps: float
    batch: Batch
    slo_ms: float


def used_part(load: float, streams: Sequence[Stream], gpulets: int) -> float:
    """Return the part of their time that gpu-lets work on requests in time, at a load per gpu-let of Poisson arrivals.

    At most 1, and at most the load. 0 load gives 0.
    """
    work = sum(stream.rate_rps * stream.batch.time_s for stream in streams)
    if load <= 0.0 or work <= 0.0:
        return 0.0
    variance_s = sum(stream.rate_rps * stream.batch.time_s**2 for stream in streams) / gpulets**2
    may_wait_s = sum(
        stream.rate_rps * stream.batch.time_s * max(0.0, stream.slo_ms - stream.batch.latency_ms) / 1000.0
        for stream in streams
    ) / work  # fmt: skip
    running_s = sum(s.rate_rps * s.batch.time_s * s.batch.latency_ms / 2000.0 for s in streams) / work / gpulets
    may_wait_s = max(may_wait_s - min(1.0, load) * running_s, 1e-6)
    drift = 1.0 - load
    steps = 2.0 * drift * may_wait_s / variance_s
    if abs(steps) < 1e-6:
        idle = variance_s / (2.0 * may_wait_s)
    elif steps < -700.0:
        idle = 0.0
    else:
        idle = drift / -math.expm1(-steps)
    return min(1.0, load, max(0.0, 1.0 - idle))


def blocked_part(may_wait_ms: float, running: Sequence[tuple[float, float]], gpulets: int) -> float:
    """Return the part of a program's requests that arrive while every gpu-let runs a batch for longer than they may
    wait.

    Args:
        may_wait_ms: SLO less the time of a batch of one.
        running: of the other programs of a gpu-let, the part of its time and the time of a batch in ms.
        gpulets: that could run it.
    """
    one = sum(part * max(0.0, 1.0 - may_wait_ms / batch_ms) for part, batch_ms in running if batch_ms > 0.0)
    return min(1.0, one) ** gpulets
