"""Measured times of batches: execution times per program and gpu-let, and delays on the way to a gpu-let.

This is one of the loops of docs/reference/scheduling.md. Its signal is measured over planned execution time. It
is shown as `slowdown` of every gpu-let and as `network` in the status. To learn costs the same however many gpu-lets
and models there are. Differences between single batches are not learned.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tenuto.batching.core.system import NetworkDelay
from tenuto.placement import Plan
from tenuto.placement.copy_times import longest_copies_ms

_WEIGHT = 0.3  # fitted: weight of the newest batch in the average: seven batches follow a change to 90 %
# derived: in mean deviations of single batches: an average is that far off by chance once in a hundred batches
_CHANCE = 3.0
_FADES_AFTER_S = 2.0  # fitted: time without a batch after which a factor fades: longer than any client waits
_FADES_TO = 0.7  # derived: each second this part of a factor's excess over 1 is left: 40 falls below 2 within 10 s
_LOOKED_AT = 128  # derived: batches that a median is taken over, so that it is within 0.1 standard deviations
_LEAST = 16  # derived: batches that give their median within 0.3 standard deviations; before, the starting value holds
# fitted: a longer delay comes from a busy processor and not from the network; without a bound it could stop all sending
_MOST_WAY_MS = 4.0


@dataclass(slots=True)
class _Ratio:
    """The ratio of one program on one gpu-let."""

    average: float = 1.0
    told: float = 1.0
    deviation: float = 0.0  # mean deviation of single batches from the average
    recorded_s: float = 0.0


class LatencyRatios:
    """Follows the ratio of measured to planned execution time for each (program, gpu-let).

    A factor that no batch confirms fades towards 1. Without that, a factor so large that no deadline can be met would
    let no batch run, and would never be measured again.
    """

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int], _Ratio] = {}

    def restart(self) -> None:
        """Forget everything, as indices have another meaning in a new plan."""
        self._ratios.clear()

    def record(self, program: int, gpulet: int, ratio: float, now_s: float) -> float | None:
        """Take the measured/planned ratio of one batch. Return the new factor when the average moved by more than
        chance explains; else None."""
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
        """Lower the factors that no batch confirms; return them as (program, gpu-let, factor). Call once a second."""
        faded = []
        for (program, gpulet), known in self._ratios.items():
            if known.told > 1.0 and now_s - known.recorded_s > _FADES_AFTER_S:
                known.average = known.told = 1.0 + _FADES_TO * (known.told - 1.0)
                faded.append((program, gpulet, known.told))
        return faded

    def measured(self, now_s: float) -> dict[int, dict[int, float]]:
        """Return the factors that batches of the last seconds confirm, by gpu-let and program."""
        ratios: dict[int, dict[int, float]] = {}
        for (program, gpulet), known in self._ratios.items():
            if now_s - known.recorded_s <= _FADES_AFTER_S:
                ratios.setdefault(gpulet, {})[program] = known.told
        return ratios


class WayMeter:
    """Measures how long batches are on their way to gpu-lets and how long their copies take, and says which delays the
    core must plan with.

    It takes the median; the margin covers longer delays, which are rare. The time that a batch waits at the gpu-let is
    not part of the way: we cause it ourselves, and if it were budgeted it would grow by itself. The way back to the
    client is no part either: see `tenuto.deployments.entry.service.margin`.
    """

    def __init__(self, ctrl_ms: float = 1.0, response_ms: float = 0.0) -> None:
        """`ctrl_ms`: the delay to budget until enough is measured; `response_ms`: the same for the way back."""
        self.told = NetworkDelay(response_ms=response_ms)  # what the core budgets
        self._reserved_ms, self._reserved = (0.0, 0)  # sum and count of requests since the last budget
        self._copied = 0  # requests of the largest batch, when the plan streams and copies are part of the way
        self._copies_ms = 0.0  # planned time of these copies, until they are measured
        self._ctrl_ms = ctrl_ms
        self._way: deque[float] = deque(maxlen=_LOOKED_AT)
        self._copy_ms: deque[float] = deque(maxlen=_LOOKED_AT)

    def follow(self, plan: Plan) -> None:
        """Take over a plan: when it streams, copies are part of the way."""
        self._copied, self._copies_ms = 0, 0.0
        if plan.streaming:
            self._copied = max((p.batch_size for gpulet in plan.gpulets for p in gpulet.programs), default=1)
            self._copies_ms = longest_copies_ms(plan)

    def reserve(self, kept_ms: Sequence[float]) -> None:
        """Note how much time the requests of a batch keep of their deadlines for the way back."""
        self._reserved_ms += sum(kept_ms)
        self._reserved += len(kept_ms)

    def record_way(self, way_ms: float) -> None:
        """Note the time from a batch's dispatch to its arrival at the gpu-let."""
        self._way.append(min(_MOST_WAY_MS, max(0.0, way_ms)))

    def record_copies(self, copies_ms: float, batch_size: int) -> None:
        """Note how long the copies of a streamed batch took."""
        self._copy_ms.append(copies_ms / batch_size)

    def delay(self) -> NetworkDelay:
        """Return the delays to budget now, in ms."""
        return NetworkDelay(ctrl_ms=_median(self._way, self._ctrl_ms), data_ms_per_request=_median(self._copy_ms, 0.0))

    def budget(self) -> NetworkDelay:
        """Return the delays that the core must plan with from now on, and keep them as `told`."""
        way = self.delay()
        ctrl_ms, data_ms = way.ctrl_ms, way.data_ms_per_request
        if self._copied:
            # The copies of the largest batch are budgeted for every batch. A batch is sent ahead before its size is
            # known; with a delay per request, it was guessed too small under overload, and 26 % less was served
            # (test_streaming_dispatch.py).
            ctrl_ms, data_ms = ctrl_ms + (data_ms * self._copied or self._copies_ms), 0.0
        kept_ms = self._reserved_ms / self._reserved if self._reserved else self.told.response_ms
        self._reserved_ms, self._reserved = 0.0, 0
        self.told = NetworkDelay(ctrl_ms, data_ms, kept_ms)
        return self.told


def _median(values: deque[float], default: float) -> float:
    return default if len(values) < _LEAST else statistics.median(values)
