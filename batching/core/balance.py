"""Who gives way when not everything can be served: a small head start for the models that lose more than their part.

Ranking by urgency alone is not fair: a model with a short SLO and a small cost per request has little time between the
moment its batch is complete and the moment it is too late, so it loses requests while models with long batches lose
none. Here each model carries an offset (ms) on its latest moment. It grows with every request the model gives up and
shrinks with every request it serves, so that it comes to rest where the model loses its part of all losses. This is a
correction of our own; the papers have none. The offsets are bounded by 15 % of the SLO, so no model can be starved by
another's head start.
"""

from __future__ import annotations

__all__ = ["Balance"]


class Balance:
    """The offsets of all models. `offset_ms[m]` > 0: the model is served earlier than its urgency alone would give.

    With `total` false every model is to lose the same share of its requests. With `total` true the share follows the
    square of what a request of the model costs in GPU time, which loses the fewest requests of all models together.
    """

    __slots__ = ("_bound_ms", "_costs", "_lost", "_scale", "_step_ms", "_sum", "_total", "offset_ms")

    STEP = 0.006  # of the SLO, per request given up
    BOUND = 0.15  # of the SLO
    MEMORY = 2000.0  # requests over which the common loss is averaged
    LARGEST_PART = 0.5
    LEAST_LOSS = 0.001  # a model that loses nothing gives its head start back at this pace

    def __init__(self, slo_ms: list[float], total: bool) -> None:
        self._total = total
        self._step_ms = [self.STEP * slo for slo in slo_ms]
        self._bound_ms = [self.BOUND * slo for slo in slo_ms]
        self._lost = 0.0  # the share of requests given up lately, over all models
        self._costs = [1.0] * len(slo_ms)
        self._sum = float(len(slo_ms))
        self.offset_ms = [0.0] * len(slo_ms)
        self._scale = 1.0

    def set_cost(self, model: int, ms_per_request: float) -> None:
        """Tell what one request of a model costs in GPU time at its target batch."""
        if self._total:
            cost = ms_per_request * ms_per_request
            self._sum += cost - self._costs[model]
            self._costs[model] = cost
            self._scale = len(self._costs) / self._sum

    def weight(self, model: int) -> float:
        """Return the part of all losses that is to be this model's, relative to its part of the requests."""
        return self._costs[model] * self._scale

    def gave_up(self, model: int, count: int) -> float:
        """Record requests that were given up; returns the model's offset."""
        self._lost += count * (1.0 - self._lost) / self.MEMORY
        part = min(self.LARGEST_PART, self._lost * self._costs[model] * self._scale)
        offset = self.offset_ms[model] + self._step_ms[model] * count * (1.0 - part)
        bound = self._bound_ms[model]
        self.offset_ms[model] = offset = offset if offset < bound else bound
        return offset

    def served(self, model: int, count: int) -> float:
        """Record requests that were served; returns the model's offset."""
        self._lost -= count * self._lost / self.MEMORY
        lost = self._lost if self._lost > self.LEAST_LOSS else self.LEAST_LOSS
        part = min(self.LARGEST_PART, lost * self._costs[model] * self._scale)
        offset = self.offset_ms[model] - self._step_ms[model] * count * part
        bound = -self._bound_ms[model]
        self.offset_ms[model] = offset = offset if offset > bound else bound
        return offset
