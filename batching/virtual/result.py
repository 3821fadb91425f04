"""The result of a simulated run: raw times and outcome of every request, and the figures of `simulate --json`.

Latency counts from the scheduled arrival; attainment divides by offered requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.scheduler_status import SchedulerStatus
from tenuto.batching.core.system import TIME_TOLERANCE_MS, System
from tenuto.batching.virtual.offline_backlog import OfflineBacklog
from tenuto.batching.virtual.virtual_steps import VirtualSteps
from tenuto.batching.virtual.writing import Writing
from tenuto.outcome import OUTCOMES, WARM_UP, Outcome
from tenuto.placement.generates import TokenSlo

P99_SAMPLES = 459  # derived: with fewer, the 99th percentile has no 99 % confidence bound (0.99**459 < 0.01)


class BatchLog:
    """Every batch that was started, in order of its end; columns are plain lists for speed."""

    __slots__ = ("dispatched_ms", "finish_ms", "gpulet", "offline", "preempted", "program", "requests", "start_ms")

    def __init__(self) -> None:
        self.gpulet: list[int] = []
        self.program: list[int] = []
        self.requests: list[list[int]] = []
        self.dispatched_ms: list[float] = []
        self.start_ms: list[float] = []
        self.finish_ms: list[float] = []
        self.preempted: list[bool] = []
        self.offline: list[int] = []  # requests in it beside those in `requests`

    def add(
        self,
        gpulet: int,
        program: int,
        requests: list[int],
        dispatched_ms: float,
        start_ms: float,
        finish_ms: float,
        preempted: bool,
        offline: int = 0,
    ) -> None:
        """Record a batch that ended or was aborted."""
        self.gpulet.append(gpulet)
        self.program.append(program)
        self.requests.append(requests)
        self.dispatched_ms.append(dispatched_ms)
        self.start_ms.append(start_ms)
        self.finish_ms.append(finish_ms)
        self.preempted.append(preempted)
        self.offline.append(offline)


@dataclass(frozen=True)
class SimulationResult:
    """A run, request by request (arrays of equal length, in order of arrival) and batch by batch.

    Times are ms; NaN where a request was never dispatched. `finish_ms` is when the batch ended, `answered_ms` when the
    answer reached the client. `outcome` indexes `OUTCOMES`; `measured` is False for the warm-up.
    """

    system: System
    arrival_ms: NDArray[np.float64]
    model: NDArray[np.int32]
    dispatched_ms: NDArray[np.float64]
    start_ms: NDArray[np.float64]
    finish_ms: NDArray[np.float64]
    answered_ms: NDArray[np.float64]
    outcome: NDArray[np.int8]
    batch_size: NDArray[np.int32]
    gpulet: NDArray[np.int32]
    measured: NDArray[np.bool_]
    batches: BatchLog
    duration_s: float
    warmup_s: float
    wall_s: float
    scheduler: SchedulerStatus | None  # at the end of the run
    writing: Writing | None = None  # what models that generate did
    offline: OfflineBacklog | None = None  # what ran beside these requests

    @classmethod
    def build(
        cls,
        system: System,
        arrival_ms: NDArray[np.float64],
        model: NDArray[np.int32],
        deadline_ms: NDArray[np.float64],
        log: BatchLog,
        lost: Mapping[Outcome, NDArray[np.int64]],
        *,
        duration_s: float,
        warmup_s: float | None,
        wall_s: float,
        scheduler: SchedulerStatus | None,
        writing: Writing | None = None,
        offline: OfflineBacklog | None = None,
    ) -> SimulationResult:
        """Join the batch log with the arrivals; `lost` has the requests without an answer. A request that never left
        its queue counts as expired."""
        total = len(arrival_ms)
        warmup_s = WARM_UP * duration_s if warmup_s is None else warmup_s
        ended = [i for i, preempted in enumerate(log.preempted) if not preempted]
        sizes = np.array([len(log.requests[i]) for i in ended], dtype=np.int64)
        ids = np.fromiter(chain.from_iterable(log.requests[i] for i in ended), dtype=np.int64, count=int(sizes.sum()))

        def spread(column: list[Any], dtype: Any, missing: float) -> NDArray[Any]:
            values = np.full(total, missing, dtype=dtype)
            values[ids] = np.repeat(np.array([column[i] for i in ended], dtype=dtype), sizes)
            return values

        finish = spread(log.finish_ms, np.float64, np.nan)
        answered = finish + system.network.response_ms
        batch_size = np.zeros(total, dtype=np.int32)
        batch_size[ids] = np.repeat(sizes, sizes)
        outcome = np.full(total, Outcome.EXPIRED, dtype=np.int8)
        outcome[ids] = np.where(answered[ids] <= deadline_ms[ids] + TIME_TOLERANCE_MS, Outcome.OK, Outcome.LATE)
        for how, requests in lost.items():
            outcome[requests] = how
        dispatched, start = spread(log.dispatched_ms, np.float64, np.nan), spread(log.start_ms, np.float64, np.nan)
        gpulet = spread(log.gpulet, np.int32, -1)
        if writing is not None:
            written = writing.requests
            finish[written] = writing.last_ms[written]
            answered[written] = finish[written] + system.network.response_ms
            dispatched[written] = start[written] = arrival_ms[written]
            batch_size[written] = 1
            places = np.array([one.gpulet for one in system.generating], dtype=np.int32)
            gpulet[written] = places[writing.replica[written]]
            in_time = writing.in_time(written, model, arrival_ms)
            outcome[written] = np.where(in_time, Outcome.OK, Outcome.LATE)
        return cls(
            system=system,
            arrival_ms=arrival_ms,
            model=model,
            dispatched_ms=dispatched,
            start_ms=start,
            finish_ms=finish,
            answered_ms=answered,
            outcome=outcome,
            batch_size=batch_size,
            gpulet=gpulet,
            measured=arrival_ms >= warmup_s * 1000.0 - TIME_TOLERANCE_MS,
            batches=log,
            duration_s=duration_s,
            warmup_s=warmup_s,
            wall_s=wall_s,
            scheduler=scheduler,
            writing=writing,
            offline=offline,
        )

    def counts(self) -> NDArray[np.int64]:
        """Return measured requests by model (rows) and outcome (columns, in the order of `OUTCOMES`)."""
        rows = len(self.system.reported)
        flat = self.model[self.measured].astype(np.int64) * len(OUTCOMES) + self.outcome[self.measured]
        counts: NDArray[np.int64] = np.bincount(flat, minlength=rows * len(OUTCOMES)).astype(np.int64)
        return counts.reshape(rows, len(OUTCOMES))

    @property
    def token_slos(self) -> Mapping[int, TokenSlo]:
        """The SLOs of models that generate, by index."""
        return {} if self.writing is None else self.writing.slos

    @property
    def window_s(self) -> float:
        """The length of the measured window."""
        return max(self.duration_s - self.warmup_s, 1e-9)

    @property
    def goodput_rps(self) -> float:
        """Requests per second answered in time, over the measured window."""
        return float(self.counts()[:, Outcome.OK].sum()) / self.window_s

    def attainments(self) -> NDArray[np.float64]:
        """Return ok / offered by model; NaN for a model without measured requests."""
        counts = self.counts()
        offered = counts.sum(axis=1)
        with np.errstate(invalid="ignore"):
            return np.where(offered > 0, counts[:, Outcome.OK] / np.maximum(offered, 1), np.nan)

    def busy_ms(self) -> NDArray[np.float64]:
        """Return the time each gpu-let ran batches within the measured window, lost work included."""
        gpulet, start, finish = self._ran()
        busy = np.bincount(gpulet, weights=finish - start, minlength=len(self.system.gpulets))
        return busy.astype(np.float64)

    def _ran(self, *, with_offline: bool = True) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Return when which gpu-let ran, within the measured window; of a batch, offline requests have their part."""
        log, low, high = self.batches, self.warmup_s * 1000.0, self.duration_s * 1000.0
        busy = [
            (place, *span)
            for place, replica in self._writers()
            for span in (replica.busy if with_offline else replica.busy_online())
        ]
        gpulet = np.array([*log.gpulet, *(place for place, _, _ in busy)], dtype=np.int64)
        start = np.array([*log.start_ms, *(begin for _, begin, _ in busy)], dtype=np.float64)
        finish = np.array([*log.finish_ms, *(end for _, _, end in busy)], dtype=np.float64)
        if not with_offline:
            offline = np.array(log.offline, dtype=np.float64)
            part = offline / np.maximum(offline + np.array([len(ids) for ids in log.requests], dtype=np.float64), 1.0)
            finish[: len(part)] -= part * (finish - start)[: len(part)]
        return gpulet, np.clip(start, low, high), np.clip(finish, low, high)

    def _writers(self) -> list[tuple[int, VirtualSteps]]:
        """Return the replicas that generate, with the indices of their gpu-lets."""
        replicas = self.writing.replicas if self.writing is not None else ()
        return [(one.gpulet, replica) for one, replica in zip(self.system.generating, replicas, strict=False)]

    @property
    def offline_alone(self) -> list[str]:
        """The models and applications that are asked nothing but offline requests."""
        targets = [] if self.offline is None else self.offline.came
        alone = [each for each in targets if isinstance(each, str) or not (self.model == each).any()]
        return [each if isinstance(each, str) else self.system.reported[each].name for each in alone]

    def _offline_figures(self, offline: OfflineBacklog) -> dict[str, Any]:
        """Return what offline requests had in the measured window."""
        whole_ms = max(1.0, len(self.gpu_busy_ms()) * self.window_s * 1000.0)
        both, others = (sum(self.gpu_busy_ms(with_offline=each).values()) / whole_ms for each in (True, False))
        tokens = sum(replica.offline_tokens for _, replica in self._writers())
        return offline.figures([model.name for model in self.system.reported], tokens, both - others, others)

    def gpu_busy_ms(self, *, with_offline: bool = True) -> dict[str, float]:
        """Return the time each GPU ran at least one of its gpu-lets within the measured window."""
        ran_on, start, finish = self._ran(with_offline=with_offline)
        busy = np.bincount(ran_on, weights=finish - start, minlength=len(self.system.gpulets))
        members: dict[str, list[int]] = {}
        for index, gpulet in enumerate(self.system.gpulets):
            for gpu in gpulet.gpus:
                members.setdefault(gpu, []).append(index)
        result = {gpu: float(busy[indices[0]]) for gpu, indices in members.items() if len(indices) == 1}
        shared = {gpu: indices for gpu, indices in members.items() if len(indices) > 1}
        if shared:
            for gpu, indices in shared.items():
                chosen = np.isin(ran_on, indices)
                result[gpu] = _union_ms(start[chosen], finish[chosen])
        return {gpu: result[gpu] for gpu in members}

    def summary(self) -> dict[str, Any]:
        """Return the figures of `simulate --json`; equal runs differ in `wall_s` only."""
        counts = self.counts()
        window_s, window_ms = self.window_s, self.window_s * 1000.0
        offered = int(counts.sum())
        gpu_busy = self.gpu_busy_ms()
        return {
            "offered_rps": offered / window_s,
            "goodput_rps": float(counts[:, Outcome.OK].sum()) / window_s,
            "attainment": float(counts[:, Outcome.OK].sum()) / offered if offered else None,
            "gpu_utilisation": sum(gpu_busy.values()) / (len(gpu_busy) * window_ms) if gpu_busy else 0.0,
            "wall_s": self.wall_s,
            "requests": offered,
            "models": {spec.name: self._model_figures(i, counts[i]) for i, spec in enumerate(self.system.reported)},
            "gpulets": self._gpulet_figures(window_ms),
            "duration_s": self.duration_s,
            "warmup_s": self.warmup_s,
            "preempted_batches": sum(self.batches.preempted),
            "schedulers": [self.scheduler.to_data()] if self.scheduler else [],
            **({} if self.offline is None else {"offline": self._offline_figures(self.offline)}),
        }

    def _model_figures(self, index: int, counts: NDArray[np.int64]) -> dict[str, Any]:
        mine = self.measured & (self.model == index)
        answered = mine & ((self.outcome == Outcome.OK) | (self.outcome == Outcome.LATE))
        latency = self.answered_ms[answered] - self.arrival_ms[answered]
        offered = int(counts.sum())
        figures: dict[str, Any] = {"offered": offered}
        figures.update({word: int(counts[code]) for code, word in enumerate(OUTCOMES)})
        figures["attainment"] = int(counts[Outcome.OK]) / offered if offered else None
        for percent, least in ((50, 1), (90, 1), (99, P99_SAMPLES)):
            figures[f"p{percent}_ms"] = float(np.percentile(latency, percent)) if len(latency) >= least else None
        # Each request carries its batch's size; the mean over batches weighs it by its inverse.
        inverse = float((1.0 / self.batch_size[answered]).sum()) if len(latency) else 0.0
        figures["mean_batch"] = len(latency) / inverse if inverse else None
        writing = self.writing
        if writing is not None and any(
            self.system.reported_of[gpulet.model] == index for gpulet in self.system.generating
        ):
            requests = np.flatnonzero(answered)
            figures |= writing.figures(requests, self.arrival_ms, self.answered_ms, self.window_s, P99_SAMPLES)
        return figures

    def _gpulet_figures(self, window_ms: float) -> dict[str, Any]:
        log, low, high = self.batches, self.warmup_s * 1000.0, self.duration_s * 1000.0
        start = np.array(log.start_ms, dtype=np.float64)
        inside = (start >= low) & (start < high) & (np.array([len(ids) for ids in log.requests], dtype=np.int64) > 0)
        gpulet = np.array(log.gpulet, dtype=np.int64)[inside]
        sizes = np.array([len(ids) for ids in log.requests], dtype=np.float64)[inside]
        rows = len(self.system.gpulets)
        batches = np.bincount(gpulet, minlength=rows)
        requests = np.bincount(gpulet, weights=sizes, minlength=rows)
        busy = self.busy_ms()
        written = {
            self.system.gpulets[place].id: {
                "utilisation": float(busy[place]) / window_ms,
                "batches": replica.steps,
                "mean_batch": replica.worked / replica.steps if replica.steps else None,
                "preempted": replica.preempted,
            }
            for place, replica in self._writers()
        }
        figures: dict[str, Any] = {
            spec.id: {
                "utilisation": float(busy[i]) / window_ms,
                "batches": int(batches[i]),
                "mean_batch": float(requests[i] / batches[i]) if batches[i] else None,
            }
            for i, spec in enumerate(self.system.gpulets)
        }
        return figures | written


def _union_ms(start: NDArray[np.float64], finish: NDArray[np.float64]) -> float:
    """Return the length of the union of intervals."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, finish = start[order], np.maximum.accumulate(finish[order])
    before = np.concatenate(([-np.inf], finish[:-1]))
    return float(np.maximum(0.0, finish - np.maximum(start, before)).sum())
