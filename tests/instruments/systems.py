"""Systems for tests of schedulers, from a line per model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tenuto.batching.core.build import NO_DELAY
from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, System
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
