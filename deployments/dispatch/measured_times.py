"""What batches really took: execution times per program and gpu-let, and delays on the way to a gpu-let.

One of the three loops of docs/reference/scheduling.md. Signal: what a batch took over what was planned. Figure:
`slowdown` of every gpu-let, and `network`, in the status. Learning something costs the same however many gpu-lets and
models there are, and what single batches differ by is not learned at all.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tenuto.batching.core.system import NetworkDelay
from tenuto.placement import Plan
from tenuto.placement.copy_times import longest_copies_ms

_WEIGHT = 0.3  # derived: part of a batch in the average: a change is followed to 90 % within seven batches
# derived: mean deviations of single batches: an average is that far off by chance once in a hundred batches
_CHANCE = 3.0
_FADES_AFTER_S = 2.0  # derived: without a batch: longer than any client waits
_FADES_TO = 0.7  # derived: part of what it exceeds 1 by, each second: from 40 to below 2 within the 10 s after
_LOOKED_AT = 128  # derived: ways and copies of so many batches; their median is within 0.1 standard deviations
_LEAST = 16  # limit: batches, below which what was said at the beginning holds
# limit: more is a processor that is busy, whatever the network: without a bound it could stop all sending
_MOST_WAY_MS = 4.0


@dataclass(slots=True)
class _Ratio:
    """One program on one gpu-let."""

    average: float = 1.0
    told: float = 1.0
    deviation: float = 0.0  # of single batches from the average, in the mean
    recorded_s: float = 0.0


class LatencyRatios:
    """Follows the ratio of measured to planned execution time for each (program, gpu-let).

    A factor that nothing confirms fades towards 1: one so large that no deadline could be met would let nothing run,
    and would never be measured again.
    """

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int], _Ratio] = {}

    def restart(self) -> None:
        """Forget everything; indices mean something else now."""
        self._ratios.clear()

    def record(self, program: int, gpulet: int, ratio: float, now_s: float) -> float | None:
        """Take one batch's measured/planned ratio; return the new factor where the average moved by more than single
        batches make it move by chance."""
        key = (program, gpulet)
        known = self._ratios.get(key)
        if known is None:
            known = self._ratios[key] = _Ratio()
        known.recorded_s = now_s
        known.average += _WEIGHT * (ratio - known.average)
        known.deviation += _WEIGHT * (abs(ratio - known.average) - known.deviation)
        if abs(known.average - known.told) <= _CHANCE * known.deviation:
            return None
        known.told = known.average
        return known.told

    def fade(self, now_s: float) -> list[tuple[int, int, float]]:
        """Return the (program, gpu-let, factor) that fade; call once a second."""
        faded = []
        for (program, gpulet), known in self._ratios.items():
            if known.told > 1.0 and now_s - known.recorded_s > _FADES_AFTER_S:
                known.average = known.told = 1.0 + _FADES_TO * (known.told - 1.0)
                faded.append((program, gpulet, known.told))
        return faded

    def measured(self, now_s: float) -> dict[int, dict[int, float]]:
        """Return the factors that batches of the last seconds confirm, by gpu-let and program."""
        found: dict[int, dict[int, float]] = {}
        for (program, gpulet), known in self._ratios.items():
            if now_s - known.recorded_s <= _FADES_AFTER_S:
                found.setdefault(gpulet, {})[program] = known.told
        return found


class WayMeter:
    """Measures the way of a batch from its dispatch to its arrival at the gpu-let, and what its copies take; says which
    delays the core is to plan with.

    The median: what is longer now and then belongs to the margin. What a batch waits at the gpu-let, it waits for our
    own work: a delay of our own making that came back into the budget would feed itself. Neither are the way back and
    the way to the client a part of it: see `tenuto.deployments.entry.margin`.
    """

    def __init__(self, ctrl_ms: float = 1.0, response_ms: float = 0.0) -> None:
        """Take what to budget until enough was measured, and until requests keep something for the way back."""
        self.told = NetworkDelay(response_ms=response_ms)  # what the core budgets
        self._reserved_ms, self._reserved = 0.0, 0  # by requests that were sent since the last budget
        self._copied = 0  # requests of the largest batch whose copies are part of the way, where they are streamed
        self._copies_ms = 0.0  # by plan, until they are measured
        self._ctrl_ms = ctrl_ms
        self._way: deque[float] = deque(maxlen=_LOOKED_AT)
        self._copy_ms: deque[float] = deque(maxlen=_LOOKED_AT)

    def follow(self, plan: Plan) -> None:
        """From now on copies are part of the way where this plan streams."""
        self._copied, self._copies_ms = 0, 0.0
        if plan.streaming:
            self._copied = max((p.batch_size for gpulet in plan.gpulets for p in gpulet.programs), default=1)
            self._copies_ms = longest_copies_ms(plan)

    def reserve(self, kept_ms: Sequence[float]) -> None:
        """Take what the requests of a batch keep of their deadlines for the way back."""
        self._reserved_ms += sum(kept_ms)
        self._reserved += len(kept_ms)

    def record_way(self, way_ms: float) -> None:
        """Take the time between a batch's dispatch and its arrival at the gpu-let."""
        self._way.append(min(_MOST_WAY_MS, max(0.0, way_ms)))

    def record_copies(self, copies_ms: float, batch_size: int) -> None:
        """Take what a batch's copies took, where streaming keeps them apart from the execution."""
        self._copy_ms.append(copies_ms / batch_size)

    def delay(self) -> NetworkDelay:
        """Return the delays to budget now, in ms."""
        return NetworkDelay(ctrl_ms=_median(self._way, self._ctrl_ms), data_ms_per_request=_median(self._copy_ms, 0.0))

    def budget(self) -> NetworkDelay:
        """Return the delays that the core is to plan with from now on, and keep them as `told`."""
        way = self.delay()
        ctrl_ms, data_ms = way.ctrl_ms, way.data_ms_per_request
        if self._copied:
            # Nobody knows the size of the batch behind the one that runs: what is sent ahead would be guessed too
            # small under overload. With a delay per request 26 % less was served then (test_streaming_dispatch.py).
            ctrl_ms, data_ms = ctrl_ms + (data_ms * self._copied or self._copies_ms), 0.0
        kept_ms = self._reserved_ms / self._reserved if self._reserved else self.told.response_ms
        self._reserved_ms, self._reserved = 0.0, 0
        self.told = NetworkDelay(ctrl_ms, data_ms, kept_ms)
        return self.told


def _median(values: deque[float], default: float) -> float:
    return default if len(values) < _LEAST else statistics.median(values)
