"""Systems for tests of schedulers, from a line per model, and trials of schedulers under given arrivals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.core.build import NO_DELAY
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, System
from tenuto.batching.virtual.criterion import Goal, HostedModels, Trial, try_load
from tenuto.batching.virtual.simulator import simulate
from tenuto.errors import raise_if_any


def everywhere_linear(
    models: Sequence[tuple[str, float, float, float, float | None]], n_gpus: int, network: NetworkDelay = NO_DELAY
) -> System:
    """Return Symphony's plain setting, in which every GPU hosts every model, for models given as (name, alpha_ms,
    beta_ms, slo_ms, rate_rps or None).

    Raises:
        InvalidInputError: the system has problems, or an SLO that no batch can meet.
    """
    hosts: dict[int, Host] = {}
    for position, (_, alpha_ms, beta_ms, slo_ms, _) in enumerate(models):
        largest = max(1, math.floor((slo_ms - beta_ms) / alpha_ms + 1e-9))
        hosts[position] = Host((0.0, *(alpha_ms * size + beta_ms for size in range(1, largest + 1))))
    gpulets = tuple(ScheduledGpulet(f"g{number}/a", f"g{number}", hosts) for number in range(n_gpus))
    system = System(tuple(Model(name, slo, rate) for name, _, _, slo, rate in models), gpulets, network)
    raise_if_any(system.unserveable())
    return system


def try_arrivals(
    scheduler: Scheduler,
    times_ms: NDArray[np.float64],
    model_index: NDArray[np.int32],
    goal: Goal,
    *,
    duration_s: float,
) -> Trial:
    """Run arrivals under a fresh scheduler and judge all hosted models; see `try_load` and `simulate`."""
    judged = HostedModels(scheduler.system, times_ms, model_index, 1000.0 * 0.05 * duration_s)
    return try_load(
        lambda stop: simulate(scheduler, times_ms, model_index, duration_s=duration_s, stop=stop), judged, goal
    )
