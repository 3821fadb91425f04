"""The points of a request as the worker measures and reports them."""

import io
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from tenuto.errors import InvalidInputError
from tenuto.profiles import ProfilePoint
from tenuto.profiles.measuring.events import EVENTS, Built, Doubt, Event, Failed, Machine, PointMeasured, StoppedEarly
from tenuto.profiles.measuring.measure import REQUESTS, MeasureRequest
from tenuto.profiles.measuring.profile_worker import main, measure_points
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, SizeRange, TensorSignature
from tenuto.profiles.networks.model_options import RunOptions
from tenuto.profiles.networks.models import build
from tests.profiles.measuring.test_timing import Clock

OWN = "tests.instruments.own_models:scale"


class FixedMemory:
    def reset(self) -> None:
        pass

    def peak_mib(self) -> float | None:
        return 12.34


def measured_events(request: MeasureRequest) -> list[Event]:
    events: list[Event] = []
    loaded = build(request.source, options=request.options)
    measure_points(loaded, request, device="cpu", options=RunOptions(), memory=FixedMemory(), report=events.append)
    return events


def points_of(events: list[Event]) -> list[ProfilePoint]:
    return [event.point for event in events if isinstance(event, PointMeasured)]


def test_points_are_measured_in_the_most_useful_order() -> None:
    request = MeasureRequest(OWN, batch_sizes=(2, 1), shares=(50.0, 100.0), budget_s=0.02)
    events = measured_events(request)
    points = points_of(events)
    assert [(p.share_pct, p.batch_size) for p in points] == [(100, 1), (100, 2), (50, 1), (50, 2)]
    assert all(p.latency_ms > 0 and p.memory_mib == 12.3 and p.metrics["runs"] >= 3 for p in points)
    assert isinstance(events[0], Built)
    assert events[0].weights_mib == pytest.approx(4 / 2**20)


def test_running_out_of_memory_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tests.instruments.own_models import Scale

    original = Scale.forward

    def limited(self: Scale, x: torch.Tensor) -> Any:
        if len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self, x)

    monkeypatch.setattr(Scale, "forward", limited)
    events = measured_events(MeasureRequest(OWN, batch_sizes=(1, 2, 4), budget_s=0.01))
    assert len(points_of(events)) == 1
    assert "batch 2 and above at 100 %: out of memory" in " ".join(e.text for e in events if isinstance(e, Doubt))


def test_no_point_begins_after_the_time_limit() -> None:
    clock = Clock(0.0)
    request = MeasureRequest(OWN, batch_sizes=(1, 2, 4), budget_s=0.02, time_limit_s=10)
    events: list[Event] = []

    def report(event: Event) -> None:
        events.append(event)
        clock.now += 6.0 if isinstance(event, PointMeasured) else 0.0

    class Counting(Clock):
        def __call__(self) -> float:
            clock.now += 1e-4
            return clock.now

    measure_points(
        build(OWN), request, device="cpu", options=RunOptions(), memory=FixedMemory(), report=report, clock_s=Counting()
    )
    seen = [type(e) for e in events if isinstance(e, (PointMeasured, StoppedEarly))]
    assert seen == [PointMeasured, PointMeasured, StoppedEarly]


def test_known_points_are_not_measured_again() -> None:
    known = tuple(ProfilePoint(batch_size=size, latency_ms=1.0) for size in (1, 4))
    request = MeasureRequest(OWN, batch_sizes=(1, 2, 4), budget_s=0.02, known=known)
    assert [point.batch_size for point in points_of(measured_events(request))] == [2]
    assert request.left() == 1


def test_the_worker_reports_faults_as_events(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    request = MeasureRequest(OWN, device="cpu", options={"depth": 1})
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(REQUESTS.dump_json(request) + b"\n")))
    stdout = os.dup(1)
    try:
        main()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    machine, failed = (EVENTS.validate_json(line) for line in capfd.readouterr().out.splitlines())
    assert isinstance(machine, Machine)
    assert isinstance(failed, Failed)
    assert failed.is_input
    assert "cannot be called with the options" in failed.text


def sized(request: MeasureRequest) -> list[Event]:
    signature = ModelSignature(
        "tensor",
        (TensorSignature("x", "float32", ("n", "m")),),
        (TensorSignature("y", "float32", ("n", "m")), TensorSignature("total", "float32", ())),
        sizes={"n": SizeRange(8), "m": SizeRange(6, 1, 2)},
    )

    class Sums(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * 2, x.sum(dim=(1, 2))

    events: list[Event] = []
    loaded = LoadedModel(Sums().eval(), signature)
    measure_points(loaded, request, device="cpu", options=RunOptions(), memory=FixedMemory(), report=events.append)
    return events


def test_every_batch_is_measured_at_every_combination_of_the_sizes_asked_for() -> None:
    request = MeasureRequest(OWN, batch_sizes=(1, 2), budget_s=0.02, sizes={"n": (1, 4), "m": (6,)})
    assert request.left() == 4
    points = points_of(sized(request))
    assert [(p.sizes, p.batch_size) for p in points] == [({"n": n, "m": 6}, batch) for n in (1, 4) for batch in (1, 2)]
    rest = replace(request, known=tuple(points[:3]))
    assert rest.left() == 1
    assert [(p.sizes, p.batch_size) for p in points_of(sized(rest))] == [({"n": 4, "m": 6}, 2)]


def test_what_is_not_asked_for_is_measured_in_its_range_and_every_share_at_the_same_sizes() -> None:
    request = MeasureRequest(OWN, batch_sizes=(1,), shares=(50.0, 100.0), budget_s=0.02)
    points = points_of(sized(request))
    whole = [tuple(p.sizes.values()) for p in points if p.share_pct == 100.0]
    assert {(1, 2), (1, 6), (8, 2), (8, 6)} <= {*whole}
    assert [tuple(p.sizes.values()) for p in points if p.share_pct == 50.0] == whole
    # A process of another share, and one that goes on, find the same sizes.
    other = replace(request, shares=(50.0,), known=tuple(p for p in points if p.share_pct == 100.0))
    assert [tuple(p.sizes.values()) for p in points_of(sized(other))] == whole
    rest = points_of(sized(replace(request, known=tuple(points[:-1]))))
    assert [(p.share_pct, p.sizes) for p in rest] == [(50.0, points[-1].sizes)]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({"k": (1,)}, "'k': is no size of the network"), ({"n": (9,)}, "n=9.*1 to 8"), ({"m": (3,)}, "multiples of 2")],
)
def test_sizes_that_the_network_does_not_take_are_refused(sizes: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        sized(MeasureRequest(OWN, batch_sizes=(1,), sizes=sizes))
