"""After any step of the load, a scheduler serves what a fresh one would serve, once the offered rate is known."""

from __future__ import annotations

import numpy as np
import pytest

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tests.instruments.seeds import seeds
from tests.instruments.systems import everywhere_linear

WINDOW_S = 5.0  # of the offered rate


@pytest.mark.parametrize("seed", seeds(1, 3))
@pytest.mark.parametrize(
    ("alpha_ms", "beta_ms", "slo_ms", "gpulets", "before_rps", "after_rps"),
    [
        (1.053, 5.072, 25.0, 2, 850.0, 1498.0),
        (1.053, 5.072, 25.0, 2, 1498.0, 850.0),
        (4.212, 20.288, 100.0, 4, 570.0, 900.0),
    ],
)
def test_a_step_of_the_load_leaves_no_trace(
    alpha_ms: float, beta_ms: float, slo_ms: float, gpulets: int, before_rps: float, after_rps: float, seed: int
) -> None:
    """When the rate rises beyond capacity, it was 0.62 of the requests in place of 0.80: what rehearsals had found
    under the smaller load was kept for as long as 22,500 requests."""
    rng = np.random.default_rng(seed)
    network = NetworkDelay(ctrl_ms=0.04 * slo_ms, response_ms=0.12 * slo_ms)
    system = everywhere_linear([("m", alpha_ms, beta_ms, slo_ms, None)], gpulets, network)
    before, after = (np.cumsum(rng.exponential(1000.0 / rps, int(10.0 * rps))) for rps in (before_rps, after_rps))
    served = []
    for times, warmup_ms in ((np.concatenate([before, before[-1] + after]), before[-1]), (after, 0.0)):
        scheduler = make_scheduler("deferred", system)
        warmup_s = warmup_ms / 1000.0 + WINDOW_S
        result = simulate(scheduler, times, np.zeros(len(times), dtype=np.int32), warmup_s=warmup_s)
        served.append(result.attainments()[0])
    assert served[0] > served[1] - 0.02


def test_a_burst_that_loses_requests_leaves_no_trace() -> None:
    """Batches were held in full for ten seconds after any loss. Where seven models share a gpu-let, this itself lost
    requests, so that it never ended: models kept 98 to 99 % (in a plan 86 %) in place of all. Replays, which
    begin idle, did not see it."""
    models = [  # alpha and beta of l(b), SLO, requests per second
        (3.78, 0.26, 100.0, 14.8),
        (4.57, 1.4, 100.0, 6.9),
        (0.053, 0.45, 50.0, 935.0),
        (0.24, 4.4, 300.0, 198.0),
        (0.49, 6.0, 300.0, 82.0),
        (0.87, 6.5, 75.0, 32.0),
        (0.24, 4.4, 300.0, 54.0),
    ]
    programs = [(f"m{place}", alpha, beta, slo, None) for place, (alpha, beta, slo, _) in enumerate(models)]
    system = everywhere_linear(programs, 1)
    rng = np.random.default_rng(5)
    steady = [np.cumsum(rng.exponential(1000.0 / rps, int(60.0 * rps))) for *_, rps in models]
    bursts = [5000.0 + np.cumsum(rng.exponential(300.0 / rps, int(3.0 * rps))) for *_, rps in models]
    served = []
    for streams in ([np.sort(np.concatenate(both)) for both in zip(steady, bursts, strict=True)], steady):
        times = np.concatenate(streams)
        order = np.argsort(times, kind="stable")
        index = np.concatenate([np.full(len(one), place, np.int32) for place, one in enumerate(streams)])[order]
        scheduler = make_scheduler("deferred", system, {"hold": 1.0, "rehearse": False})
        served.append(simulate(scheduler, times[order], index, warmup_s=20.0).attainments())
    assert np.min(served) > 0.995
