"""One schedule of arrivals under one scheduler, in virtual time: a running system whose plan never changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import INF
from tenuto.batching.virtual.engine import Engine, Follows
from tenuto.batching.virtual.offline_backlog import OfflineBacklog
from tenuto.batching.virtual.result import SimulationResult
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.batching.virtual.writing import Writing
from tenuto.errors import InvalidInputError, refused
from tenuto.outcome import WARM_UP
from tenuto.placement.generates import TokenSlo

_CHUNK = 8192  # pace: arrivals that are turned into Python numbers at once, and between two calls of `stop`


def simulate(
    scheduler: Scheduler,
    times_ms: NDArray[np.float64],
    model_index: NDArray[np.int32],
    *,
    duration_s: float | None = None,
    warmup_s: float | None = None,
    stop: Callable[[list[int]], bool] = lambda _lost_by_model: False,
    deadlines_ms: NDArray[np.float64] | None = None,
    follows: Follows | None = None,
    data_ms_by_model: Sequence[float] | None = None,
    losses: Sequence[tuple[float, Collection[int]]] = (),
    tokens: RequestTokens | None = None,
    slos: Mapping[int, TokenSlo] | None = None,
    sizes: NDArray[np.int64] | None = None,
    offline: OfflineBacklog | None = None,
) -> SimulationResult:
    """Run a schedule of arrivals to its end in virtual time.

    Args:
        scheduler: a fresh one, built for the system to simulate.
        times_ms: arrival times from 0, ascending.
        model_index: the model of each arrival, an index into `scheduler.system.reported`.
        duration_s: length of the schedule; default: the last arrival.
        warmup_s: arrivals before this are served but not counted; default: the first 5 %.
        stop: called every few thousand arrivals with the number of requests lost by each model since the warm-up;
            True ends the run.
        deadlines_ms: the deadline of every request; default: its arrival plus the SLO of its model.
        follows: which requests follow on the answers of others; without it none.
        data_ms_by_model: how long the data of one request really takes to its gpu-let, if models differ. The scheduler
            still budgets the delay of its system.
        losses: (time in ms, places of gpu-lets in the system), ascending: when gpu-lets are lost for good.
        tokens: of each request's prompt and output; needed when models generate.
        slos: of the models that generate, by index.
        sizes: a row for each request, in the order of its model's size classes; needed when models have these.
        offline: what waits beside these requests; the run ends with them.

    Raises:
        InvalidInputError: arrivals that are not ascending, negative, not finite, or of unknown models.
    """
    started = time.perf_counter()
    system = scheduler.system
    reported = system.reported
    slo_ms = np.array([model.slo_ms for model in reported], dtype=np.float64)
    planned = len(times_ms) if follows is None else int(np.isfinite(times_ms).sum())
    _check_schedule(times_ms[:planned], model_index, len(reported), total=len(times_ms))
    if duration_s is None:
        duration_s = float(times_ms[planned - 1]) / 1000.0 if planned else 0.0
    warmup_s = WARM_UP * duration_s if warmup_s is None else warmup_s
    engine = Engine(
        times_ms,
        model_index,
        (times_ms + slo_ms[model_index] if planned else np.zeros(0)) if deadlines_ms is None else deadlines_ms,
        follows,
        counted_from_ms=1000.0 * warmup_s,
        tokens=tokens,
        sizes=sizes,
        offline=offline,
    )
    served = system.reported_served
    index = [model if model in served else -1 for model in range(len(reported))]
    engine.install(scheduler, index, data_ms_by_model)
    is_stopped, lost = False, set[str]()
    if offline is not None:
        offline.counted_ms = 1000.0 * warmup_s
    engine.replicas.is_ready = lambda name: name not in lost
    for until_ms, gpulets in (*losses, (INF, ())):
        last = int(np.searchsorted(times_ms[:planned], until_ms, side="right"))
        while engine.next < last and not is_stopped:
            engine.serve(min(last, engine.next + _CHUNK))
            is_stopped = stop(engine.lost_by_model)
        if gpulets and not is_stopped:
            engine.settle(until_ms, engine.now_ms)
            lost.update(system.gpulets[place].id for place in gpulets)
            engine.stop_writing(until_ms, lost)
            engine.lose_gpulets(until_ms, gpulets)
    if offline is not None:
        engine.settle(max(1000.0 * duration_s, engine.now_ms), engine.now_ms)
        offline.end()
    engine.settle(INF, engine.now_ms)
    if follows is not None:
        engine.times_ms[engine.next : planned] = np.nan  # a run that was ended early did not reach these requests
    requests = engine.next if follows is None else len(times_ms)
    return SimulationResult.build(
        system,
        engine.times_ms[:requests],
        model_index[:requests],
        engine.deadlines_ms[:requests],
        engine.gpulets.log,
        {outcome: np.fromiter(chain.from_iterable(ids), dtype=np.int64) for outcome, ids in engine.lost.items()},
        duration_s=duration_s if engine.next == planned else engine.now_ms / 1000.0,
        warmup_s=warmup_s,
        wall_s=time.perf_counter() - started,
        scheduler=engine.status(),
        writing=None if tokens is None else Writing.of(engine.replicas.steps, tokens, slos or {}, requests),
        offline=offline,
    )


def _check_schedule(times_ms: NDArray[np.float64], model_index: NDArray[np.int32], models: int, *, total: int) -> None:
    if total != len(model_index):
        raise InvalidInputError("times_ms and model_index must have the same length. Give one model per arrival.")
    if not len(times_ms):
        return
    if not np.isfinite(times_ms).all() or times_ms[0] < 0:
        raise refused("times_ms", float(times_ms[0]), "arrivals must be finite and not negative", "Correct them.")
    steps = np.diff(times_ms)
    if (steps < 0).any():
        where = int(np.argmax(steps < 0)) + 1
        raise refused(f"times_ms[{where}]", float(times_ms[where]), "arrivals must be ascending", "Sort them.")
    if model_index.min() < 0 or model_index.max() >= models:
        raise refused("model_index", int(model_index.max()), f"there are {models} models", "Use an index below.")
