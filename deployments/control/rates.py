"""Estimates how many requests per second each model is offered, and how many to plan for.

The mean is a moving average (EWMA) and starts from the declared rate. When the last seconds can hardly have come from
that mean, it starts anew from them. So a rate that triples is known within two seconds, and a steady rate is known
well. The planned rate is one that a second exceeds only as often as requests may be lost. When rates rise, it is the
rate to come by the time the plan can be ready; when they fall, the highest of the last `settle_s`. So plans grow early
and shrink late.

Requests of a model that generates wait for seconds, and plans carry its mean and what bursts bring in its TTFT. A jump
from which its rate comes back within `average_s` was a burst: the mean goes on from before it, and the need of that
time is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenuto.deployments.control.settings import RateSettings
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.expectation.queueing import rate_with_bursts

# Derived: twice the logarithm of the likelihood ratio of a change is about chi-squared with one degree of freedom. By
# chance it exceeds 24.6 with 7e-7: once in eight days for a model that is looked at twice a second.
FALSE_ALARM = 12.3
BURST_MEMORY_S = 300.0  # derived: of n seconds an index of dispersion is known within sqrt(2 / n), here 8 %


class _Need(NamedTuple):
    """What models need until a time: the mean rate, the index of dispersion of a second with the mean's uncertainty,
    and the rate that a second exceeds as rarely as requests may be lost."""

    until_s: float
    upper: NDArray[np.float64]
    mean: NDArray[np.float64]
    dispersion: NDArray[np.float64]


@dataclass(frozen=True)
class RatesMemory:
    """What survives the controller: mean rate, seconds behind it and index of dispersion of every model."""

    mean_rps: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    dispersion: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Jump:
    """A jump of a rate that may be a burst: its time, the index of dispersion with which it would be no jump, what has
    arrived since then, and the mean as if there were none with the seconds behind it."""

    at_s: float
    dispersion: float
    mean_rps: float
    seconds: float
    arrived: float = 0.0

    def explains(self, arrived: float, seconds: float) -> bool:
        """Return whether requests of the last seconds can have come from the mean as if there were none."""
        surprise = _surprise(np.array(arrived), np.array(max(1e-3, self.mean_rps) * seconds))
        return bool(surprise <= FALSE_ALARM * max(1.0, self.dispersion))


def _surprise(arrived: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of the likelihood ratio of what arrived, from any Poisson rate over the expected one."""
    surprise: NDArray[np.float64] = arrived * np.log(np.maximum(arrived, 1.0) / expected) - (arrived - expected)
    return surprise


class Rates:
    """Estimates for a set of models. Call `observe` once per look, with what arrived since the last one."""

    def __init__(
        self,
        declared_rps: Mapping[str, float],
        settings: RateSettings,
        target: float,
        memory: RatesMemory,
        *,
        ttft_s: Mapping[str, float] | None = None,
    ) -> None:
        """Start from declared rates and what an earlier process remembered. `target`: wanted attainment, which says how
        often a second may exceed the planned rate. `ttft_s`: of the models that generate, how long requests wait."""
        self._average_s, self._settle_s, self._floor_rps = settings.average_s, settings.settle_s, settings.floor_rps
        self._quantile = NormalDist().inv_cdf(target)
        self._names: tuple[str, ...] = ()
        self._mean = self._lagged = self._seconds = self._dispersion = np.empty(0)
        self._recent: deque[tuple[float, NDArray[np.float64]]] = deque()  # (seconds, arrivals) of the last looks
        self._needs: deque[_Need] = deque()  # the last `settle_s`, newest last
        self._now_s = 0.0
        self._jumps: dict[str, _Jump] = {}
        self._target = target
        self.set_models(declared_rps, memory, ttft_s=ttft_s)

    def set_models(
        self,
        declared_rps: Mapping[str, float],
        memory: RatesMemory | None = None,
        *,
        ttft_s: Mapping[str, float] | None = None,
    ) -> None:
        """Estimate these models from now on; models that stay keep their estimates."""
        known = memory or self.memory()
        names = tuple(declared_rps)
        self._mean = np.array([known.mean_rps.get(name, declared_rps[name]) for name in names])
        self._seconds = np.array([known.seconds.get(name, self._average_s) for name in names])
        self._dispersion = np.array([known.dispersion.get(name, 1.0) for name in names])
        self._lagged = self._mean.copy()
        before = {name: place for place, name in enumerate(self._names)}
        if names != self._names:
            # A new model counts as having had its declared rate all along.
            def moved(values: NDArray[np.float64], missing: Sequence[float]) -> NDArray[np.float64]:
                return np.array(
                    [values[before[n]] if n in before else other for n, other in zip(names, missing, strict=True)]
                )

            self._recent = deque((s, moved(arrived, self._mean * s)) for s, arrived in self._recent)  # type: ignore[arg-type]
            new = self._need(self._mean)
            self._needs = deque(
                _Need(old.until_s, *(moved(values, other) for values, other in zip(old[1:], new[1:], strict=True)))  # type: ignore[arg-type]
                for old in self._needs
            )
        self._names, self._ttft_s = names, dict(ttft_s or {})
        averages_s = (
            max(self._average_s, BURST_MEMORY_S) if name in self._ttft_s else self._average_s for name in names
        )
        self._averages_s = np.array([*averages_s])
        self._jumps = {name: jump for name, jump in self._jumps.items() if name in self._ttft_s}

    def observe(self, now_s: float, seconds: float, arrived: Mapping[str, int]) -> list[str]:
        """Add what arrived in the `seconds` up to now; return the models whose rate has jumped."""
        counts = np.array([float(arrived.get(name, 0)) for name in self._names])
        self._now_s = now_s
        if not self._needs:
            self._remember(now_s)  # of the declared rates, which the first seconds may fall short of
        self._recent.append((seconds, counts))
        held = sum(length for length, _ in self._recent)
        while held - self._recent[0][0] >= self._average_s:
            held -= self._recent.popleft()[0]
        second_s, in_second = self._last_second()
        self._seconds = np.minimum(self._averages_s, self._seconds + seconds)
        jumped = self._restart_where_changed()
        expected = self._mean * second_s
        steady = ~jumped & (expected > 0) & (self._seconds >= second_s - 1e-6)
        weight = min(1.0, seconds / BURST_MEMORY_S)
        sample = (in_second - expected) ** 2 / np.maximum(expected, 1e-9)
        self._dispersion[steady] += weight * (sample[steady] - self._dispersion[steady])
        step = np.minimum(1.0, seconds / self._seconds)
        self._mean[~jumped] += (step * (counts / seconds - self._mean))[~jumped]
        self._lagged = np.where(jumped, self._mean, self._lagged + step * (self._mean - self._lagged))
        self._follow_jumps(seconds, counts)
        self._remember(now_s)
        return [name for name, has in zip(self._names, jumped, strict=True) if has]

    def _last_second(self) -> tuple[float, NDArray[np.float64]]:
        """Return the length of the last looks that make up a second, and what arrived in them. Plans count on the
        bursts of a second, however often looks are taken."""
        length, arrived = 0.0, np.zeros(len(self._names))
        for seconds, counts in reversed(self._recent):
            length, arrived = length + seconds, arrived + counts
            if length >= 1.0 - 1e-6:
                break
        return length, arrived

    def _restart_where_changed(self) -> NDArray[np.bool_]:
        """When chance does not explain the last seconds, start the mean anew from them, from as many as make a change
        likeliest (generalised likelihood ratio of a Poisson rate, divided by the dispersion)."""
        lengths = np.cumsum([length for length, _ in reversed(self._recent)])[:, None]
        total = np.cumsum([counts for _, counts in reversed(self._recent)], axis=0)
        ratio = _surprise(total, np.maximum(self._mean, 1e-3) * lengths)
        ratio[lengths > self._seconds + 1e-6] = 0.0  # from before the mean last started anew
        best = ratio.argmax(axis=0)
        each = np.arange(len(self._names))
        surprise, latest, length = ratio[best, each], total[best, each], lengths[best, 0]
        jumped: NDArray[np.bool_] = surprise / np.maximum(1.0, self._dispersion) > FALSE_ALARM
        for model in np.flatnonzero(jumped).tolist():
            name, before = self._names[model], self._mean[model]
            if (jump := self._jumps.get(name)) is not None and jump.explains(latest[model], length[model]):
                self._forget(model, self._jumps.pop(name))
                jumped[model] = False
            elif jump is None and name in self._ttft_s and latest[model] > before * length[model]:
                self._jumps[name] = _Jump(self._now_s, surprise[model] / FALSE_ALARM, before, self._seconds[model])
        self._mean = np.where(jumped, latest / length, self._mean)
        self._seconds = np.where(jumped, length, self._seconds)
        return jumped

    def _follow_jumps(self, seconds: float, counts: NDArray[np.float64]) -> None:
        """Follow the means as if no rate had jumped. What lasts longer than `average_s` is no burst."""
        for name, jump in [*self._jumps.items()]:
            model, since_s = self._names.index(name), self._now_s + seconds - jump.at_s
            jump.arrived += counts[model]
            jump.seconds = min(BURST_MEMORY_S, jump.seconds + seconds)
            jump.mean_rps += seconds / jump.seconds * (counts[model] / seconds - jump.mean_rps)
            if since_s > self._average_s:
                del self._jumps[name]
                if jump.explains(jump.arrived, since_s):
                    self._forget(model, jump)

    def _forget(self, model: int, burst: _Jump) -> None:
        """Go on as if a rate had not jumped; one more burst as large is no jump."""
        self._mean[model] = self._lagged[model] = burst.mean_rps
        self._seconds[model] = burst.seconds
        self._dispersion[model] = max(self._dispersion[model], burst.dispersion)
        need = self._need(np.maximum(self._floor_rps, self._mean))
        for old in self._needs:
            if old.until_s >= burst.at_s + self._settle_s:
                for values, now in zip(old[1:], need[1:], strict=True):
                    values[model] = now[model]

    def _need(self, mean: NDArray[np.float64]) -> _Need:
        """Return what a mean rate needs; the mean's uncertainty adds to how much a second varies."""
        dispersion = np.maximum(1.0, self._dispersion) * (1.0 + 1.0 / np.maximum(1.0, self._seconds))
        upper = mean + self._quantile * np.sqrt(dispersion * mean)
        return _Need(self._now_s + self._settle_s, upper, mean, dispersion)

    def _ahead(self, ahead_s: float) -> NDArray[np.float64]:
        """Return the mean `ahead_s` from now where it rises, else the mean (Brown's double exponential smoothing: the
        average lags by what its own average lags behind it)."""
        lag = np.maximum(0.0, self._mean - self._lagged)
        ahead: NDArray[np.float64] = np.maximum(self._floor_rps, self._mean + lag * (1.0 + ahead_s / self._averages_s))
        return ahead

    def _remember(self, now_s: float) -> None:
        """Keep the highest needs of the last `settle_s`: those that no newer one exceeds in every model."""
        need = self._need(np.maximum(self._floor_rps, self._mean))
        while self._needs and self._needs[0].until_s < now_s:
            self._needs.popleft()
        while self._needs and (self._needs[-1].upper <= need.upper).all():
            self._needs.pop()
        self._needs.append(need)

    @property
    def mean_rps(self) -> dict[str, float]:
        """The mean rate of every model now."""
        return self._named(self._mean)

    @property
    def dispersion(self) -> dict[str, float]:
        """The index of dispersion of every model's arrivals in a second."""
        return self._named(self._dispersion)

    def expected_rps(self, ahead_s: float) -> dict[str, float]:
        """Return the mean rate of every model `ahead_s` from now."""
        return self._named(self._ahead(ahead_s))

    def traffic(self, ahead_s: float = 0.0) -> Traffic:
        """Return what a plan that is ready in `ahead_s` has to carry: the traffic expected then, or the highest of the
        last `settle_s`."""
        needs = [self._need(self._ahead(ahead_s)), *self._needs]
        highest = np.array([need.upper for need in needs]).argmax(axis=0).tolist()  # by model: the first of the highest
        mean = np.array([needs[at].mean[model] for model, at in enumerate(highest)])
        dispersion = np.array([needs[at].dispersion[model] for model, at in enumerate(highest)])
        for model, name in enumerate(self._names):
            if (ttft_s := self._ttft_s.get(name)) is not None:
                mean[model] = rate_with_bursts(mean[model], dispersion[model], ttft_s, 1.0 - self._target)
                dispersion[model] = 0.0
        return Traffic(self._named(mean), self._named(dispersion), self._quantile)

    def _named(self, values: NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(self._names, values.tolist(), strict=True))

    def memory(self) -> RatesMemory:
        """Return what survives the controller."""
        return RatesMemory(self.mean_rps, self._named(self._seconds), self.dispersion)
