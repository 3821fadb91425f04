"""How large a batch is worth waiting for and giving requests up for, at the rate that is really offered."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque

from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS

__all__ = ["ArrivalRate", "BatchSizes", "Burstiness", "batch_sizes", "reserve_ms", "target_batch", "wait_reserve_ms"]

LARGEST_RESERVE = 0.6  # of the time a batch could be held
RESERVE_WITHOUT_GAIN = 0.5  # for a model that gains nothing by batching
COLLISIONS = 0.002  # of batches that may meet only busy gpu-lets, per gpu-let
RESERVE_FOR_BURSTS = 0.35  # per tenfold index of dispersion


def target_batch(latency_ms: list[float], budget_ms: float, rate_rps: float | None) -> int:
    """Return the largest batch of the staggered pattern: (1 + 1/n) l(b) <= budget (Symphony §3.3, table 2).

    n is the number of GPUs the model needs by itself, n = rate * l(b) / b, so that l(b)/n is the time in which b
    requests arrive and the condition reads l(b) + b/rate <= budget. Where n <= 1 that is the residual rule of Nexus:
    one formula serves both. While the rate is unknown, two equal batches must fit: l(b) <= budget / 2.

    Args:
        latency_ms: l(b) by batch size, any delay per request included.
        budget_ms: the time from arrival to the end of the batch.
        rate_rps: offered rate of this model; None: unknown.

    Returns:
        At least 1.
    """
    budget_ms += TIME_TOLERANCE_MS
    if rate_rps is None:
        return max(1, bisect_right(latency_ms, budget_ms / 2.0) - 1)
    gap_ms = 1000.0 / rate_rps
    low, high = 1, len(latency_ms)  # low fits, or is 1; high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if latency_ms[middle] + middle * gap_ms <= budget_ms:
            low = middle
        else:
            high = middle
    return low


class BatchSizes:
    """The three sizes that steer a model: the staggered `target`, what to `defend` by giving up, when to `release`."""

    __slots__ = ("defend", "release", "target")

    def __init__(self, target: int, defend: int, release: int) -> None:
        self.target = target
        self.defend = defend
        self.release = release


def batch_sizes(
    latency_ms: list[float], budget_ms: float, rate_rps: float | None, gpulets: int, contended: bool
) -> BatchSizes:
    """Return the sizes for a model that `gpulets` gpu-lets hold; `contended`: most batches have to wait for a gpu-let.

    Corrections to the target, all measured (docs/benchmarks-batching.md):

    * The staggered pattern assumes even arrivals. A model that occupies the share s of its gpu-lets has to absorb its
      own bursts of about sqrt(b) requests: it defends 3/4 s sqrt(b) less, and is released s sqrt(b) / 2 earlier.
    * Where many models share the gpu-lets (s near 0) waiting until frontrun is free and gathers what bursts bring, so
      the release size goes towards the largest batch as s falls.
    * Where gpu-lets are scarce, a batch need not wait when that cannot pay: with a gpu-let idle, one more request costs
      1/rate of idle time and spreads beta over one more, so waiting pays while b < beta * rate. Three times that is
      used, as an idle gpu-let is worth less than a busy one.
    """
    target = target_batch(latency_ms, budget_ms, rate_rps)
    cap = len(latency_ms) - 1
    slope = latency_ms[2] - latency_ms[1] if cap > 1 else 0.0
    fixed_ms = max(0.0, latency_ms[1] - slope)
    share = 0.0
    release = float(cap)
    if rate_rps is not None:
        share = min(1.0, rate_rps * latency_ms[target] / (1000.0 * target * max(1, gpulets)))
        release = target - 0.5 * share * math.sqrt(target) + (1.0 - share) * (cap - target)
        if contended:
            release = min(release, math.ceil(3.0 * fixed_ms * rate_rps / 1000.0))
    defend = target - 0.75 * share * math.sqrt(target)
    return BatchSizes(target, max(1, round(defend)), max(1, min(cap, round(release))))


def reserve_ms(latency_ms: list[float], target: int, budget_ms: float, rate_rps: float, dispersion: float) -> float:
    """Return how long before frontrun a batch is released, so that its gpu-let need not be free at once, in ms.

    Between frontrun and the latest moment lies the time of one request only. Where batches collide, that is too little:
    the later one shrinks or loses its head. Starting earlier costs the requests that would still have come, which is
    dear where the fixed cost of a batch is a large part f of it, and cheap where it is small or where the model keeps
    n > 1 gpu-lets busy and so meets a free one soon. Bursts make collisions likelier: they are measured by the index of
    dispersion I of the arrivals. Of the time a batch of `target` could be held, budget - l(b), the part
    min(0.6, (1 - 2 f) / (2 max(1, n)) + 0.35 log10(I)) is kept in reserve. The papers have no such rule; its constants
    were found on Symphony's synthetic grid (docs/benchmarks-batching.md).
    """
    batch_ms = latency_ms[target]
    slope = latency_ms[2] - latency_ms[1] if len(latency_ms) > 2 else 0.0
    fixed_part = max(0.0, latency_ms[1] - slope) / batch_ms
    gpulets = rate_rps * batch_ms / (1000.0 * target)
    part = RESERVE_WITHOUT_GAIN * max(0.0, 1.0 - 2.0 * fixed_part) / max(1.0, gpulets)
    part += RESERVE_FOR_BURSTS * max(0.0, math.log10(max(1.0, dispersion)))
    return min(LARGEST_RESERVE, part) * max(0.0, budget_ms - batch_ms)


def wait_reserve_ms(load: float, load_ms: float, gpulets: int, others: int) -> float:
    """Return how long before frontrun a batch has to be due so that a gpu-let is free in time, but for few batches.

    The other models keep u n = `load` of n gpu-lets busy, with batches of length L = load_ms / load. All n are busy
    with the chance p = u^n; what is left of the batch that ends first exceeds t with the chance (1 - t/L)^n. So
    p (1 - t/L)^n = n `COLLISIONS` gives t: the more gpu-lets, the sooner one is free and the less a collision costs.
    Where p is far larger, a further batch may have come in before: then p falls by (u/2)^n, about as the tail of the
    queue M/D/1 does, and t grows by L, for as many batches as there are other models. With many gpu-lets the reserve
    vanishes, and Symphony's rule stands; with one or two, a batch held until frontrun would meet another model's batch
    and miss its deadline however small the load is. Ours; the papers have no such rule.

    Args:
        load: gpu-lets that the other models keep busy.
        load_ms: that times the length of their batches.
        gpulets: n, those the model can use.
        others: other models on them.
    """
    busy = min(1.0, load / gpulets)
    chance: float = busy**gpulets
    again: float = (busy / 2.0) ** gpulets
    few = COLLISIONS * gpulets
    if chance <= few:
        return 0.0
    before = 0
    while before < others - 1 and chance * again > few:
        chance *= again
        before += 1
    free_part: float = (few / chance) ** (1.0 / gpulets)
    return load_ms / load * (before + 1.0 - free_part)


class Burstiness:
    """Index of dispersion of the arrivals (variance over mean of counts; 1: Poisson), averaged over all models."""

    __slots__ = ("_samples", "dispersion")

    MEMORY = 300  # samples over which it is averaged
    LARGEST = 100.0  # what one sample may count

    def __init__(self) -> None:
        self.dispersion = 1.0
        self._samples = 1

    def add(self, sample: float) -> None:
        """Take over (count - expected)^2 / expected of one step of one model."""
        self._samples = min(self.MEMORY, self._samples + 1)
        self.dispersion += (min(sample, self.LARGEST) - self.dispersion) / self._samples


class ArrivalRate:
    """The offered rate of one model over the last seconds: add to `count`, and call `roll` once past `next_at`."""

    __slots__ = ("_marks", "count", "next_at", "rps")

    LEAST_EXPECTED = 3.0  # arrivals in a step whose deviation says something

    STEP_MS = 250.0
    WINDOW_STEPS = 20  # 5 s

    def __init__(self, first_guess_rps: float | None = None) -> None:
        self.rps = first_guess_rps
        self.count = 0
        self.next_at = -INF
        self._marks: deque[tuple[float, int]] = deque(maxlen=self.WINDOW_STEPS)

    def roll(self, now_ms: float) -> float | None:
        """Close a step: the rate is the mean since the oldest mark, once a step and ten requests lie behind it.

        Returns:
            The step's squared deviation from its expected count over that count; None where too few were expected.
        """
        deviation = None
        if self._marks:
            if self.rps:
                begin, before = self._marks[-1]
                expected = self.rps * (now_ms - begin) / 1000.0
                if expected >= self.LEAST_EXPECTED:
                    deviation = (self.count - before - expected) ** 2 / expected
            oldest, count = self._marks[0]
            if now_ms - oldest >= self.STEP_MS and self.count - count >= 10:
                self.rps = 1000.0 * (self.count - count) / (now_ms - oldest)
        self._marks.append((now_ms, self.count))
        self.next_at = now_ms + self.STEP_MS
        return deviation
