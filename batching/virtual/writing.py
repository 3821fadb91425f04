"""What models that generate did in a simulated run: tokens, and the times of each request's first and last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.virtual.virtual_steps import RequestTokens, VirtualSteps
from tenuto.placement.generates import TokenSlo

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Writing:
    """By request, NaN or -1 where none was generated: tokens, times in ms, and the place of the replica. `replicas` are
    in the order of the system."""

    tokens: RequestTokens
    first_ms: Array
    last_ms: Array
    replica: NDArray[np.int32]
    slos: Mapping[int, TokenSlo]
    replicas: tuple[VirtualSteps, ...]

    @classmethod
    def of(
        cls, replicas: Sequence[VirtualSteps], tokens: RequestTokens, slos: Mapping[int, TokenSlo], requests: int
    ) -> Writing:
        """Collect what the replicas recorded of so many requests."""
        first, last = np.full(requests, np.nan), np.full(requests, np.nan)
        place = np.full(requests, -1, dtype=np.int32)
        for index, replica in enumerate(replicas):
            ended = list(replica.last_ms)
            last[ended] = list(replica.last_ms.values())
            first[ended] = [replica.first_ms[request] for request in ended]
            place[ended] = index
        return cls(tokens.of(slice(requests)), first, last, place, slos, tuple(replicas))

    @property
    def requests(self) -> NDArray[np.int64]:
        """The requests that were generated to their end."""
        return np.flatnonzero(self.replica >= 0)

    def in_time(self, requests: NDArray[np.int64], model: NDArray[np.int32], arrival_ms: Array) -> NDArray[np.bool_]:
        """Return which of these requests kept both bounds."""
        ttft, tpot = self.times(requests, arrival_ms)
        in_time = np.ones(len(requests), dtype=np.bool_)
        for index, slo in self.slos.items():
            mine = model[requests] == index
            both = (ttft <= slo.ttft_ms + 1e-6) & ((tpot <= slo.tpot_ms + 1e-6) | np.isnan(tpot))
            in_time[mine] = both[mine]
        return in_time

    def times(self, requests: NDArray[np.int64], arrival_ms: Array) -> tuple[Array, Array]:
        """Return TTFT and TPOT in ms; TPOT is NaN for an answer of one token."""
        further = self.tokens.output[requests] - 1.0
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot = np.where(further > 0, (self.last_ms[requests] - self.first_ms[requests]) / further, np.nan)
        return self.first_ms[requests] - arrival_ms[requests], tpot

    def figures(
        self, requests: NDArray[np.int64], arrival_ms: Array, answered_ms: Array, window_s: float, p99_samples: int
    ) -> dict[str, Any]:
        """Return the figures of these requests; see `token_figures`."""
        latency_ms = answered_ms[requests] - arrival_ms[requests]
        rate = float(self.tokens.output[requests].sum()) / window_s
        return token_figures(*self.times(requests, arrival_ms), latency_ms, rate, p99_samples)


def token_figures(
    ttft_ms: Array, tpot_ms: Array, latency_ms: Array, tokens_per_s: float, p99_samples: int
) -> dict[str, Any]:
    """Return what a model that generates has beside the figures of all models, in `simulate --json` and in results of
    `bench`, of its measured and answered requests; NaN: unknown."""

    def mean(values: Array) -> float | None:
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else None

    def p99(values: Array) -> float | None:
        known = values[~np.isnan(values)]
        return float(np.percentile(known, 99)) if len(known) >= p99_samples else None

    return {
        "mean_ttft_ms": mean(ttft_ms),
        "p99_ttft_ms": p99(ttft_ms),
        "mean_tpot_ms": mean(tpot_ms),
        "p99_tpot_ms": p99(tpot_ms),
        "mean_ms": mean(latency_ms),
        "tokens_per_s": tokens_per_s,
    }
