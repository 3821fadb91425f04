"""Online corrections of what the scheduler plans with: execution times per model and gpu-let, and delays around
them."""

from __future__ import annotations

from collections import deque

from tenuto.batching.core.system import NetworkDelay

__all__ = ["LatencyCorrection", "NetworkMeter"]

_SOME_REQUESTS = 8  # of a batch, when judging whether a delay per request has moved


class LatencyCorrection:
    """Follows the ratio of measured to planned execution time for each (model, gpu-let).

    The median of the last three batches feeds a moving average: one outlier never passes the median, a real change
    passes with the second batch and is followed to 90 % within about six more.
    """

    _WEIGHT = 0.3
    _REPORT = 0.02  # changes below this are not worth a new plan of the queue

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self._average: dict[tuple[int, int], float] = {}
        self._reported: dict[tuple[int, int], float] = {}

    def restart(self) -> None:
        """Forget everything; indices mean something else now."""
        self._recent.clear()
        self._average.clear()
        self._reported.clear()

    def record(self, model: int, gpulet: int, ratio: float) -> float | None:
        """Take one batch's measured/planned ratio; return the new factor when it moved enough to matter."""
        key = (model, gpulet)
        recent = self._recent.setdefault(key, deque(maxlen=3))
        recent.append(ratio)
        if len(recent) < 3:
            return None
        median = sorted(recent)[1]
        average = self._average.get(key, 1.0)
        average += self._WEIGHT * (median - average)
        self._average[key] = average
        if abs(average - self._reported.get(key, 1.0)) < self._REPORT * self._reported.get(key, 1.0):
            return None
        self._reported[key] = average
        return average

    def factor(self, model: int, gpulet: int) -> float:
        """Return the present factor; 1.0 before anything was measured."""
        return self._reported.get((model, gpulet), 1.0)


class NetworkMeter:
    """Measures the delays around execution and turns their 95th percentiles into the scheduler's budget.

    `travel` is the time of a batch from dispatch to the arrival of its answer, less its queueing, execution and copies
    at the gpu-let; `copies` those copies by request, where streaming keeps them apart from the execution; `answer` the
    time from the arrival until the last response of the batch was handed to the socket.
    """

    _EVERY = 64
    _QUANTILE = 0.95
    _MOVED_MS = 0.05  # smaller changes are not worth a new plan of the queue

    def __init__(self, client_ms: float, ctrl_ms: float = 1.0) -> None:
        self.client_ms = client_ms  # reserved for what happens beyond the socket, which the server cannot see
        self._ctrl_ms = ctrl_ms  # until enough batches were measured
        self._travel: deque[float] = deque(maxlen=512)
        self._copies: deque[float] = deque(maxlen=512)
        self._answer: deque[float] = deque(maxlen=512)
        self._since = 0
        self._told = NetworkDelay(ctrl_ms=ctrl_ms, response_ms=client_ms)

    def record(self, travel_ms: float, batch_size: int, copies_ms: float = 0.0) -> None:
        """Take one batch's delay outside of its execution, and what of it its copies were."""
        self._travel.append(max(0.0, travel_ms - copies_ms))
        self._copies.append(copies_ms / batch_size)
        self._since += 1

    def record_answer(self, answer_ms: float) -> None:
        """Take the time from a batch's answer to one response handed to the socket."""
        self._answer.append(max(0.0, answer_ms))

    def news(self) -> NetworkDelay | None:
        """Return the delays to budget when enough was recorded since the last call and one has moved; else None."""
        if self._since < self._EVERY:
            return None
        self._since = 0
        found, told = self.delay(), self._told
        moved_ms = max(
            abs(found.ctrl_ms - told.ctrl_ms),
            abs(found.response_ms - told.response_ms),
            _SOME_REQUESTS * abs(found.data_ms_per_request - told.data_ms_per_request),
        )
        if moved_ms < self._MOVED_MS:
            return None
        return self.tell()

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
            ctrl_ms=_quantile(self._travel, self._QUANTILE, self._ctrl_ms),
            data_ms_per_request=_quantile(self._copies, self._QUANTILE, 0.0),
            response_ms=self.client_ms + _quantile(self._answer, self._QUANTILE, 0.0),
        )


def _quantile(values: deque[float], quantile: float, default: float) -> float:
    if len(values) < 16:
        return default
    return sorted(values)[min(len(values) - 1, int(quantile * len(values)))]
