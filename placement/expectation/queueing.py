"""What random arrivals cost: requests that wait too long although the GPUs have enough time on average.

There are three causes, each with a formula of queueing theory.

- *Fluctuation*. The work that waits in front of `n` gpu-lets is a random walk. When a request finds more work than it
  may wait for, it is lost. For exponential services the formula is exact (M/M/n with impatient customers: Barrer,
  Operations Research 5, 1957; Gnedenko and Kovalenko, 1968). Here its exponent is scaled to the variance of the
  batches, as in heavy traffic. That agrees with M/D/1 within 0.05.
- *A batch of the same program*. When a request arrives early in a batch that takes longer than the request may wait, it
  is lost unless another gpu-let is free.
- *Blocking*. The same happens behind a batch of another program.

The scheduler chooses which requests the first two causes cost: those that serve least per ms of GPU time. Among these,
the ones that can wait least come too late first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

NO_WAIT_S = 1e-4  # derived: shortest assumed wait, below what is measured; it keeps quotients finite
_NORMAL = NormalDist()
_FURTHEST = 10.0  # limit: standard deviations; a normal variable is never further from its mean
_CLOSE = 1e-3  # derived: of a standard deviation, which is less than any rate is known


@dataclass(frozen=True)
class MeanBatch:
    """The batch in which a program's requests run on a gpu-let: its mean size, and its time beside the neighbours.

    `stated_ms` is the time that the scheduler expects, and gives requests up by, if that is longer.
    """

    size: float
    latency_ms: float
    stated_ms: float = 0.0

    @property
    def time_s(self) -> float:
        """Seconds of a gpu-let per request."""
        return self.latency_ms / self.size / 1000.0


@dataclass(frozen=True)
class Stream:
    """Requests of one program: how many per second, in which batches, how long they may take, what each counts, and the
    index of dispersion of the number in a second."""

    rate_rps: float
    batch: MeanBatch
    slo_ms: float
    weight: float = 1.0
    dispersion: float = 1.0

    @property
    def work(self) -> float:
        """Seconds of a gpu-let per second."""
        return self.rate_rps * self.batch.time_s

    @property
    def may_wait_s(self) -> float:
        return max(0.0, self.slo_ms - max(self.batch.latency_ms, self.batch.stated_ms)) / 1000.0


def used_part(load: float, streams: Sequence[Stream], gpulets: int) -> float:
    """Return the part of their time that gpu-lets work on requests in time, at a load per gpu-let.

    Arrivals are Poisson, or as their index of dispersion says. The result is at most 1 and at most the load.
    """
    works, times_s = [stream.work for stream in streams], [stream.batch.time_s for stream in streams]
    batches_s, work = [stream.batch.latency_ms / 1000.0 for stream in streams], sum(works)
    if load <= 0.0 or work <= 0.0:
        return 0.0
    variance_s = sum(s.dispersion * w * t for s, w, t in zip(streams, works, times_s, strict=True)) / gpulets**2
    # The harmonic mean: a patient program does not help an impatient one.
    waits_s = [max(NO_WAIT_S, stream.may_wait_s) for stream in streams]
    may_wait_s = work / sum(w / waits for w, waits in zip(works, waits_s, strict=True))
    batch_s = sum(w * b for w, b in zip(works, batches_s, strict=True)) / work
    # A request that finds the next batch full waits for whole batches: half a batch more on average.
    others_s = sum(w * (b - t) for w, b, t in zip(works, batches_s, times_s, strict=True)) / work
    patience_s = max(NO_WAIT_S, may_wait_s - 0.5 * others_s / gpulets)
    in_time = 1.0 - _turned_away(load, 2.0 * load * patience_s / variance_s, gpulets)
    # Gpu-lets of one program run out of phase, so one becomes free within part of a batch.
    phases = gpulets if len(streams) == 1 else 1
    free = _found_free(load, max(0.0, 1.0 - phases * may_wait_s / batch_s), gpulets)
    used = min(1.0, load, load * min(in_time, free))
    if load <= 1.0 or len(streams) > 1:
        return used
    # Under losses, a waiting request is there whenever a batch ends. The idle time is at most one gap between requests
    # per batch.
    at_once = streams[0].rate_rps * batch_s / gpulets
    return max(used, at_once / (1.0 + at_once))


def lost_parts(streams: Sequence[Stream], lost: float) -> list[float]:
    """Return the lost part of each program's requests when so much work is lost, in seconds of a gpu-let per second.

    The parts are in proportion to GPU time per request, divided by how long it may wait and what it counts, at most 1.
    """
    parts = [0.0] * len(streams)
    if lost <= 0.0:
        return parts
    per_part = [s.batch.time_s / max(NO_WAIT_S, s.may_wait_s) / max(1e-9, s.weight) for s in streams]
    left, rest = lost, [index for index, stream in enumerate(streams) if stream.work > 0.0]
    while rest and left > 0.0:  # programs lost whole leave more to the rest
        scale = left / sum(streams[index].work * per_part[index] for index in rest)
        gone = [index for index in rest if scale * per_part[index] >= 1.0]
        for index in gone or rest:
            parts[index] = min(1.0, scale * per_part[index])
            left -= parts[index] * streams[index].work
            rest = [other for other in rest if other != index]
    return parts


def _turned_away(load: float, patience: float, gpulets: int) -> float:
    """Return the part of requests that find more work than they may wait for.

    Args:
        load: per gpu-let.
        patience: how long a request may wait, in services of all gpu-lets together (twice that for services without
            variance).
        gpulets: that serve the queue.
    """
    blocked = 1.0  # Erlang's formula for one gpu-let fewer
    for count in range(1, gpulets):
        blocked = load * gpulets * blocked / (count + load * gpulets * blocked)
    drift = (1.0 - load) * patience
    if drift > 600.0:  # derived: e^600 is near the largest float
        return 0.0
    if drift < -600.0:  # derived: likewise
        return 1.0 - 1.0 / load
    end = math.exp(-drift)
    waiting = load * (patience if abs(drift) < 1e-9 else -math.expm1(-drift) / (1.0 - load))
    return load * blocked * end / (1.0 + blocked * (waiting + load * end))


def _found_free(load: float, too_long: float, gpulets: int) -> float:
    """Return the part of requests that arrive while a gpu-let is free, or already past the first `too_long` part of a
    batch. The busy time depends on what is kept: the root of y = 1 - (load y too_long)^n, found by halving."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2.0
        if middle > 1.0 - (min(1.0, load * middle) * too_long) ** gpulets:
            high = middle
        else:
            low = middle
    return high


def blocked_part(may_wait_ms: float, running: Sequence[tuple[float, float]], gpulets: int) -> float:
    """Return the part of a program's requests that arrive while every gpu-let runs a batch for longer than they may
    wait.

    Args:
        may_wait_ms: SLO less the time of a batch of one.
        running: for each other program of a gpu-let: the part of its time, and its batch time in ms.
        gpulets: that could run the program.
    """
    one = sum(part * max(0.0, 1.0 - may_wait_ms / batch_ms) for part, batch_ms in running if batch_ms > 0.0)
    return min(1.0, one) ** gpulets


def rate_with_bursts(rate_rps: float, dispersion: float, patience_s: float, lost: float) -> float:
    """Return the rate of Poisson arrivals for which servers carry these arrivals, of an index of dispersion above 1.

    Requests wait for `patience_s`. What comes in such a time beyond what servers do in it is lost; its number is about
    normal. Servers do as much more as loses the part `lost`, less what Poisson arrivals take.
    """
    most, mean = max(1.0, dispersion), rate_rps * patience_s
    if mean <= 0.0:
        return rate_rps

    def spare(spread: float) -> float:
        """Return by how many requests servers must exceed the mean: spread x L(z) = lost x mean, by the normal loss
        L(z) = density(z) - z x (1 - distribution(z)), which falls."""
        low, high = -_FURTHEST, _FURTHEST
        while high - low > _CLOSE:
            z = (low + high) / 2.0
            if spread * (_NORMAL.pdf(z) - z * (1.0 - _NORMAL.cdf(z))) > lost * mean:
                low = z
            else:
                high = z
        return max(0.0, high * spread)

    return rate_rps + (spare(math.sqrt(most * mean)) - spare(math.sqrt(mean))) / patience_s
