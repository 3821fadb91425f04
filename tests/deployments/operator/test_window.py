"""Figures between two statuses, against the same figures computed from the raw values."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenuto.deployments.dispatch.histogram import Histogram, buckets_around
from tenuto.deployments.operator.window import between, quantile_s
from tenuto.deployments.wire.status import ModelStatus, SystemStatus
from tests.instruments.shown_status import ShownServer, WatchedServer


@example([0.25, 0.03125], 0.5, 229.0)
@given(
    st.lists(st.floats(0.0, 0.3), min_size=1, max_size=200),
    st.sampled_from([0.01, 0.5, 0.9, 0.99]),
    st.floats(5.0, 500.0),
)
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], quantile: float, slo_ms: float) -> None:
    histogram = Histogram(buckets_around(slo_ms))
    for value in values:
        histogram.add(value)
    found = quantile_s(histogram.buckets(), quantile)
    true = float(np.quantile(values, quantile, method="inverted_cdf"))
    bounds = np.array([0.0, *histogram.bounds])
    bucket = max(1, int(np.searchsorted(bounds, true)))
    assert found is not None
    if bucket == len(bounds):
        assert found == bounds[-1]
    else:
        assert bounds[bucket - 1] <= found <= bounds[bucket]


def test_figures_are_those_of_the_seconds_between() -> None:
    server = ShownServer(models=4, gpulets=4)
    server.second()
    before = server.status()
    for _ in range(10):
        server.second()
    after = server.status()
    window = between(before, after, 10.0)
    for name, model in after.models.items():
        grown = model.submitted - before.models[name].submitted
        assert window.models[name].offered_rps == pytest.approx(grown / 10.0)
    bad = window.models["network_03"]
    assert bad.attainment is not None
    assert bad.attainment == pytest.approx(bad.goodput_rps / bad.offered_rps)
    assert bad.attainment < 0.99
    assert window.models["network_00"].unknown_proxy_share == 1.0
    assert window.models["network_01"].unknown_proxy_share == 0.0
    assert window.gpulets["n0/0/b"].utilisation == pytest.approx(0.27)
    assert window.gpulets["n0/0/b"].measured_to_predicted == pytest.approx(1 / 0.92)


def test_an_applications_stages_are_those_of_the_seconds_between() -> None:
    shown = ShownServer(models=1, gpulets=1)
    shown.second()
    before = shown.status()
    for _ in range(2):
        shown.second()
    figures = between(before, shown.status(), 2.0).applications["ocr"]
    assert (figures.requests.offered_rps, figures.requests.goodput_rps) == (50.0, 48.0)
    assert figures.requests.attainment == pytest.approx(0.96)
    detect, recognise = figures.stages["detect"], figures.stages["recognise"]
    assert (detect.part, recognise.part) == (pytest.approx(0.25), pytest.approx(0.75))
    assert (detect.lost_rps, recognise.lost_rps) == (0.0, 2.0)
    assert recognise.p50_ms == figures.requests.p50_ms == pytest.approx(150.0)  # of a bucket from 100 to 200 ms


def test_padding_is_that_of_the_seconds_between() -> None:
    def status(*rows: dict[str, Any]) -> SystemStatus:
        return msgspec.convert({"models": {"m": {"by_size": rows}}}, SystemStatus)

    small, other = {"sizes": {"tokens": 8}}, {"sizes": None}
    before = status({**small, "ok": 5, "input_elements": 10, "computed_elements": 20})
    after = status(
        {**small, "ok": 9, "late": 1, "input_elements": 40, "computed_elements": 60}, {**other, "rejected": 2}
    )
    figures = between(before, after, 2.0).models["m"]
    assert figures.padding == pytest.approx(0.25)
    assert [(row.sizes, row.goodput_rps, row.ended_rps, row.attainment) for row in figures.by_size] == [
        ({"tokens": 8}, 2.0, 2.5, 0.8),
        (None, 0.0, 1.0, 0.0),
    ]
    assert [row.padding for row in figures.by_size] == [pytest.approx(0.25), None]


def test_a_server_started_anew_counts_from_zero() -> None:
    old, new = ShownServer(models=1, gpulets=1), ShownServer(models=1, gpulets=1)
    for _ in range(50):
        old.second()
    new.second()
    figures = between(old.status(), new.status(), 1.0).models["network_00"]
    assert 0.0 <= figures.goodput_rps == figures.offered_rps <= 30.0
    assert figures.attainment == 1.0


async def test_nothing_is_sampled_while_nobody_looks() -> None:
    watched = WatchedServer(ShownServer(models=2, gpulets=2))
    view = watched.view
    await asyncio.sleep(0)
    assert watched.asked == 0
    first, other = await asyncio.gather(view.look(), view.look())
    assert watched.asked == 2
    assert first == other
    assert (first.window.seconds, first.history.at_s) == (1.0, [0.0])
    await watched.sample(14)
    shown = await view.look()
    view.close()
    assert shown.window.seconds == 10.0
    assert shown.history.at_s == [float(at) for at in range(-14, 1)]
    line = shown.history.models["network_01"]
    assert len(line.goodput_rps) == len(line.offered_rps) == 15
    told = msgspec.to_builtins(shown)
    assert "plan" not in told
    assert "latency_s" not in told["models"]["network_01"]


async def test_the_first_look_shows_what_happens_then_and_not_since_the_start() -> None:
    """Whatever the server did before: its figures are of the seconds that they are said to be of."""
    server = ShownServer(models=2, gpulets=2)
    for _ in range(500):
        server.second()
    view = WatchedServer(server, moves=False).view
    first = await view.look()
    view.close()
    assert first.window.attainment is None
    assert all((f.offered_rps, f.attainment) == (0.0, None) for f in first.window.models.values())
    assert all(figures.utilisation == 0.0 for figures in first.window.gpulets.values())


def test_a_model_that_loses_everything_counts_in_the_attainment_of_all() -> None:
    def status(ok: int, expired: int) -> SystemStatus:
        return SystemStatus(models={"a": ModelStatus(ok=ok), "b": ModelStatus(expired=expired)})

    window = between(status(0, 0), status(30, 10), 10.0)
    assert window.attainment == pytest.approx(0.75)
    assert window.models["b"].attainment == 0.0
