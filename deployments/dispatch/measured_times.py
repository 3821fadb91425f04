"""What batches really took, as the scheduler core plans with it: execution times per program and gpu-let, and delays on
the way to a gpu-let."""

from __future__ import annotations

from collections import deque

from tenuto.batching.core.system import INF, NetworkDelay

_MOVED_MS = 0.05  # smaller changes are not worth a new plan of the queue
_SOME_REQUESTS = 8  # of a batch, when judging whether a delay per request has moved


class LatencyRatios:
    """Follows the ratio of measured to planned execution time for each (program, gpu-let).

    The median of the last three batches feeds a moving average: one outlier never passes the median, a real change
    passes with the second batch and is followed to 90 % within about six more. A factor that nothing confirms fades
    towards 1: one so large that no deadline could be met would let nothing run, and would never be measured again.
    """

    _WEIGHT = 0.3
    _REPORT = 0.02  # changes below this, or of a batch by less than `_MOVED_MS`, are not worth a new plan of the queue
    _FADES_AFTER_S = 2.0
    _FADES_TO = 0.7  # of what it exceeds 1 by, each second

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self._average: dict[tuple[int, int], float] = {}
        self._reported: dict[tuple[int, int], float] = {}
        self._recorded_s: dict[tuple[int, int], float] = {}

    def restart(self) -> None:
        """Forget everything; indices mean something else now."""
        for held in (self._recent, self._average, self._reported, self._recorded_s):
            held.clear()

    def record(
        self, program: int, gpulet: int, ratio: float, now_s: float, longest_ms: float = INF
    ) -> float | None:
        """Take one batch's measured/planned ratio; return the new factor when it moved enough to matter: `longest_ms`
        is what the largest batch is planned to take."""
        key = (program, gpulet)
        self._recorded_s[key] = now_s
        recent = self._recent.setdefault(key, deque(maxlen=3))
        recent.append(ratio)
        if len(recent) < 3:
            return None
        median = sorted(recent)[1]
        average = self._average.get(key, 1.0)
        average += self._WEIGHT * (median - average)
        self._average[key] = average
        reported = self._reported.get(key, 1.0)
        if abs(average - reported) < max(self._REPORT * reported, _MOVED_MS / longest_ms):
            return None
        self._reported[key] = average
        return average

    def fade(self, now_s: float) -> list[tuple[int, int, float]]:
        """Return the (program, gpu-let, factor) that fade; call once a second."""
        faded = []
        for key, factor in self._reported.items():
            if factor > 1.0 + self._REPORT and now_s - self._recorded_s[key] > self._FADES_AFTER_S:
                self._average[key] = self._reported[key] = 1.0 + self._FADES_TO * (factor - 1.0)
                self._recent.pop(key, None)
                faded.append((*key, self._reported[key]))
        return faded

    def measured(self, now_s: float) -> dict[int, dict[int, float]]:
        """Return the factors that batches of the last seconds confirm, by gpu-let and program."""
        found: dict[int, dict[int, float]] = {}
        for (program, gpulet), average in self._average.items():
            if now_s - self._recorded_s[program, gpulet] <= self._FADES_AFTER_S:
                found.setdefault(gpulet, {})[program] = average
        return found


class WayMeter:
    """Measures the way of a batch from its dispatch to its arrival at the gpu-let, and what its copies take.

    What it waits there, it waits for our own work: a delay of our own making that came back into the budget would feed
    itself. Neither are the way back and the way to the client a part of it: see `tenuto.deployments.entry.margin`.
    """

    _EVERY = 32
    _QUANTILE = 0.9
    _MOST_MS = 4.0  # what takes longer on one machine is a busy processor, no way

    def __init__(self, ctrl_ms: float = 1.0) -> None:
        """Take what to budget until enough was measured."""
        self._ctrl_ms = ctrl_ms
        self._way: deque[float] = deque(maxlen=128)
        self._copy_ms: deque[float] = deque(maxlen=512)
        self._since = 0
        self._told = NetworkDelay(ctrl_ms=ctrl_ms)

    def record_way(self, way_ms: float) -> None:
        """Take the time between a batch's dispatch and its arrival at the gpu-let."""
        self._way.append(min(self._MOST_MS, max(0.0, way_ms)))
        self._since += 1

    def record_copies(self, copies_ms: float, batch_size: int) -> None:
        """Take what a batch's copies took, where streaming keeps them apart from the execution."""
        self._copy_ms.append(copies_ms / batch_size)
        self._since += 1

    def news(self) -> NetworkDelay | None:
        """Return the delays to budget when enough was recorded since the last call and one has moved; else None."""
        if self._since < self._EVERY:
            return None
        self._since = 0
        found, told = self.delay(), self._told
        moved_ms = max(
            abs(found.ctrl_ms - told.ctrl_ms),
            _SOME_REQUESTS * abs(found.data_ms_per_request - told.data_ms_per_request),
        )
        return None if moved_ms < _MOVED_MS else self.tell()

    @property
    def told(self) -> NetworkDelay:
        """The delays that were told last: what is budgeted."""
        return self._told

    def tell(self) -> NetworkDelay:
        """Return the delays to budget now; `news` counts from them."""
        self._told = self.delay()
        return self._told

    def delay(self) -> NetworkDelay:
        """Return the delays to budget now, in ms."""
        return NetworkDelay(
            ctrl_ms=_quantile(self._way, self._QUANTILE, self._ctrl_ms),
            data_ms_per_request=_quantile(self._copy_ms, 0.95, 0.0),
        )


def _quantile(values: deque[float], quantile: float, default: float) -> float:
    if len(values) < 16:
        return default
    return sorted(values)[min(len(values) - 1, int(quantile * len(values)))]
