"""The virtual-time driver, its results and the goodput search."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tenuto.batching.core.deferred import DeferredOptions, DeferredScheduler
from tenuto.batching.core.symphony import SymphonyScheduler
from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, System
from tenuto.batching.registry import make_scheduler, scheduler_class
from tenuto.batching.virtual.criterion import Goal, Trial
from tenuto.batching.virtual.highest_rate import HighestRate, SearchLimits, find_highest_rate
from tenuto.batching.virtual.simulator import simulate
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tests.instruments.systems import everywhere_linear, try_arrivals

RESNET50 = ("ResNet50", 1.053, 5.072, 25.0, None)


def poisson(rate_rps: float, duration_s: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1000.0 / rate_rps, int(2 * rate_rps * duration_s) + 10))
    times = times[times < duration_s * 1000.0]
    return times, np.zeros(len(times), dtype=np.int32)


def line(alpha: float, beta: float, largest: int, slowdown: float = 1.0) -> Host:
    return Host((0.0, *(alpha * b + beta for b in range(1, largest + 1))), slowdown)


def test_same_schedule_same_result() -> None:
    system = everywhere_linear([RESNET50], 4)
    schedule = poisson(2000.0, 3.0)
    first, second = (simulate(DeferredScheduler(system), *schedule).summary() for _ in range(2))
    first.pop("wall_s")
    second.pop("wall_s")
    assert first == second


def test_summary_has_the_documented_keys() -> None:
    summary = simulate(DeferredScheduler(everywhere_linear([RESNET50], 2)), *poisson(500.0, 3.0)).summary()
    assert list(summary)[:8] == [
        "offered_rps",
        "goodput_rps",
        "attainment",
        "gpu_utilisation",
        "wall_s",
        "requests",
        "models",
        "gpulets",
    ]
    assert list(summary["models"]["ResNet50"]) == [
        "offered",
        "ok",
        "late",
        "expired",
        "rejected",
        "failed",
        "attainment",
        "p50_ms",
        "p90_ms",
        "p99_ms",
        "mean_batch",
    ]
    assert list(summary["gpulets"]["g0/a"]) == ["utilisation", "batches", "mean_batch"]


def test_counts_add_up_and_warm_up_is_left_out() -> None:
    times, models = poisson(9000.0, 2.0)
    result = simulate(DeferredScheduler(everywhere_linear([RESNET50], 8)), times, models, duration_s=2.0, warmup_s=0.5)
    figures = result.summary()["models"]["ResNet50"]
    assert figures["offered"] == int((times >= 500.0).sum())
    assert figures["offered"] == sum(figures[word] for word in ("ok", "late", "expired", "rejected", "failed"))
    assert result.summary()["offered_rps"] == pytest.approx(figures["offered"] / 1.5)
    assert figures["expired"] > 0


def test_p99_needs_459_samples() -> None:
    system = everywhere_linear([RESNET50], 2)
    few = simulate(DeferredScheduler(system), *poisson(100.0, 4.0), warmup_s=0.0).summary()["models"]["ResNet50"]
    many = simulate(DeferredScheduler(system), *poisson(200.0, 4.0), warmup_s=0.0).summary()["models"]["ResNet50"]
    assert few["offered"] < 459 < many["offered"]
    assert few["p99_ms"] is None
    assert few["p90_ms"] is not None
    assert many["p99_ms"] is not None


def test_network_delays_count_in_the_latency() -> None:
    network = NetworkDelay(ctrl_ms=1.0, data_ms_per_request=0.5, response_ms=2.0)
    system = everywhere_linear([("a", 1.0, 5.0, 20.0, None)], 1, network)
    result = simulate(DeferredScheduler(system), np.array([0.0]), np.zeros(1, dtype=np.int32), warmup_s=0.0)
    assert result.start_ms[0] == pytest.approx(result.dispatched_ms[0] + 1.5)
    assert result.answered_ms[0] == pytest.approx(result.finish_ms[0] + 2.0)
    assert result.answered_ms[0] <= 20.0
    assert result.outcome[0] == Outcome.OK


def test_a_model_without_host_is_rejected() -> None:
    system = System((Model("a", 20.0), Model("b", 20.0)), (ScheduledGpulet("g", "g", {0: line(1, 5, 8)}),))
    result = simulate(DeferredScheduler(system), np.array([0.0, 1.0]), np.array([0, 1], dtype=np.int32), warmup_s=0.0)
    assert result.outcome.tolist() == [Outcome.OK, Outcome.REJECTED]


def test_neighbours_slow_each_other_only_while_both_run() -> None:
    models = (Model("a", 50.0), Model("b", 50.0))
    system = System(
        models,
        (ScheduledGpulet("g/a", "g", {0: line(1, 9, 1, 1.5)}), ScheduledGpulet("g/b", "g", {1: line(1, 9, 1, 2.0)})),
    )
    alone = simulate(DeferredScheduler(system), np.array([0.0]), np.array([0], dtype=np.int32), warmup_s=0.0)
    assert alone.finish_ms[0] == pytest.approx(10.0)
    both = simulate(DeferredScheduler(system), np.array([0.0, 5.0]), np.array([0, 1], dtype=np.int32), warmup_s=0.0)
    assert both.finish_ms[0] == pytest.approx(5.0 + 5.0 * 1.5)  # 5 alone, 5 beside b
    # b runs 7.5 ms beside a at half speed, then alone.
    assert both.finish_ms[1] == pytest.approx(12.5 + (10.0 - 7.5 / 2.0))
    assert both.gpu_busy_ms()["g"] <= both.busy_ms().sum()


def test_the_gpu_is_busy_once_where_two_gpulets_overlap() -> None:
    models = (Model("a", 50.0), Model("b", 50.0))
    system = System(
        models, (ScheduledGpulet("g/a", "g", {0: line(1, 9, 1)}), ScheduledGpulet("g/b", "g", {1: line(1, 9, 1)}))
    )
    result = simulate(
        DeferredScheduler(system), np.array([0.0, 5.0]), np.array([0, 1], dtype=np.int32), duration_s=0.1, warmup_s=0.0
    )
    assert result.gpu_busy_ms()["g"] == pytest.approx(15.0)
    assert result.busy_ms().tolist() == pytest.approx([10.0, 10.0])


@pytest.mark.parametrize("times", [[2.0, 1.0], [-1.0, 0.0], [0.0, float("nan")], [0.0, float("inf")]])
def test_impossible_arrivals_are_refused(times: list[float]) -> None:
    system = everywhere_linear([RESNET50], 1)
    with pytest.raises(InvalidInputError):
        simulate(DeferredScheduler(system), np.array(times), np.zeros(2, dtype=np.int32))


def test_no_arrivals() -> None:
    result = simulate(
        DeferredScheduler(everywhere_linear([RESNET50], 1)), np.zeros(0), np.zeros(0, dtype=np.int32), duration_s=1.0
    )
    summary = result.summary()
    assert summary["requests"] == 0
    assert summary["attainment"] is None


def test_nothing_is_late_and_overload_stays_flat() -> None:
    system = everywhere_linear([("a", 1.053, 5.072, 100.0, None)], 4)
    goodputs = []
    for rate in (4000.0, 8000.0):
        result = simulate(DeferredScheduler(system), *poisson(rate, 5.0))
        assert not (result.outcome == Outcome.LATE).any()
        goodputs.append(result.goodput_rps)
    assert goodputs[1] >= 0.95 * goodputs[0]


def test_an_slo_no_batch_can_meet_is_unserveable() -> None:
    with pytest.raises(InvalidInputError, match="unserveable"):
        everywhere_linear([("a", 1.0, 5.0, 5.9, None)], 4)
    with pytest.raises(InvalidInputError, match="unserveable"):
        everywhere_linear([("a", 1.0, 5.0, 7.0, None)], 4, NetworkDelay(response_ms=2.0))


def test_unknown_scheduler_and_options_list_the_known_ones() -> None:
    system = everywhere_linear([RESNET50], 1)
    with pytest.raises(InvalidInputError, match="deferred, symphony, eager"):
        scheduler_class("fifo")
    with pytest.raises(InvalidInputError, match="hold, defend, save_above, rehearse"):
        make_scheduler("deferred", system, {"batch": "3"})
    with pytest.raises(InvalidInputError, match="head-first, window"):
        make_scheduler("symphony", system, {"gather": "tail-first"})


def search(progress: Callable[[HighestRate[Trial]], None] = lambda _: None, **limits: float) -> HighestRate[Trial]:
    system = everywhere_linear([RESNET50], 2)

    def attempt(scale: float) -> Trial:
        return try_arrivals(SymphonyScheduler(system), *poisson(1000.0 * scale, 4.0), Goal(), duration_s=4.0)

    return find_highest_rate(attempt, SearchLimits(**limits), progress)  # type: ignore[arg-type]


def test_goodput_bracket_is_below_one_percent_and_the_answer_passes() -> None:
    found = search()
    assert found.best is not None
    assert found.ended == "found"
    assert found.bracket <= 0.01
    assert found.best.result.attainments().min() >= 0.99
    assert 0.6 * 2 * 5839 / 8 < found.rate_scale * 1000.0 < 2 * 5839 / 8


def test_goodput_does_not_depend_on_where_the_search_begins() -> None:
    found = [search(start_scale=start).rate_scale for start in (0.1, 30.0)]
    assert max(found) / min(found) < 1.03


def test_an_interrupted_search_keeps_the_best_answer() -> None:
    def progress(so_far: HighestRate[Trial]) -> None:
        if len(so_far.tried) == 3:
            raise KeyboardInterrupt

    found = search(progress, start_scale=0.2)
    assert found.is_interrupted
    assert len(found.tried) == 3
    assert found.rate_scale == max(scale for scale, trial in found.tried if trial.is_in_time)
    assert found.best is not None


def test_a_hopeless_rate_is_stopped_early() -> None:
    _, first = search(start_scale=16.0).tried[0]
    assert first.stopped_early
    assert not first.is_in_time


def test_expired_requests_were_never_started() -> None:
    result = simulate(DeferredScheduler(everywhere_linear([RESNET50], 1), DeferredOptions()), *poisson(2000.0, 2.0))
    expired = result.outcome == Outcome.EXPIRED
    assert expired.any()
    assert np.isnan(result.start_ms[expired]).all()
