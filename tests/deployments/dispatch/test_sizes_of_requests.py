"""Live requests of different sizes: which size class of the scheduler each is given to, and how it is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.deployments.dispatch.counters import Counters, ModelCounters
from tenuto.deployments.dispatch.in_flight import Batch, Request
from tenuto.deployments.dispatch.open_requests import OpenRequests
from tenuto.deployments.gpulet.executors.emulated import EmulatedExecutor
from tenuto.deployments.serve.user_config import MemberEntry, ProgramEntry
from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.outcome import Outcome, Rule
from tenuto.placement import Plan
from tenuto.placement.program import SizedLatency
from tenuto.profiles import LatencyTable
from tenuto.profiles.networks.catalogue import ModelSignature, SizeRange, TensorSignature

RANGES = {"width": SizeRange(64), "height": SizeRange(64)}
SIGNATURE = ModelSignature(
    "tensor",
    (TensorSignature("x", "float32", ("height", "width"), pad=0.0),),
    (TensorSignature("y", "float32", (2,)),),
    platform="fake",
    sizes=RANGES,
)
BY_SIZE = [
    {"sizes": {"height": h, "width": w}, "latency": {"points": {1: h * w / 64, 2: h * w / 40}}}
    for h, w in ((8, 8), (8, 32), (32, 32))
]
PLAN = Plan.from_data(
    {
        "schema": 1,
        "policy": {"name": "test"},
        "gpus": [{"id": "g", "type": "v100"}],
        "gpulets": [
            {
                "id": "a",
                "gpu": "g",
                "models": [
                    {"name": "f", "batch_size": 1, "latency": {"points": {1: 1.0}}},
                    {"name": "m", "batch_size": 2, "latency": {"points": {1: 8.0, 2: 12.0}}, "by_size": BY_SIZE},
                ],
            }
        ],
        "models": [
            {"name": "f", "rate_rps": 1, "slo_ms": 100},
            {"name": "m", "rate_rps": 1, "slo_ms": 100, "sizes": {"height": 8, "width": 20}},
        ],
    }
)


class _Asker:
    def __init__(self) -> None:
        self.refusals: list[Refused] = []

    def executed(self, request: Request, executed: Executed, row: int) -> None: ...

    def refused(self, request: Request, refused: Refused) -> None:
        self.refusals.append(refused)


EXECUTED = Executed(3, "a", True, 0.0, 0.0, 0.0, 1.0, 3, (), (), 1.0)


def test_a_request_is_given_to_the_smallest_class_that_covers_it() -> None:
    """The plan names height first, and the network's signature width."""
    requests = OpenRequests(Counters(), lambda: 0.0, lambda _model: SIGNATURE)
    system = from_plan(PLAN)
    requests.follow(PLAN, system)
    found = {sizes: requests.find("m", sizes) for sizes in ((8, 8), (32, 8), (9, 9), (64, 1))}
    assert [None if each is None else system.models[each.index].sizes for each in found.values()] == [
        (8, 8),
        (8, 32),
        (32, 32),
        None,
    ]
    assert [each.alone_ms for each in found.values() if each is not None] == [1.0, 4.0, 16.0]
    assert requests.find("f", ()) is requests.models["f"]
    assert requests.models["m"].index == 3


def test_a_request_that_no_class_of_a_new_plan_covers_is_refused() -> None:
    requests, asker = OpenRequests(Counters(), lambda: 0.0, lambda _model: SIGNATURE), _Asker()
    requests.follow(PLAN, from_plan(PLAN))
    waiting = Request(1, "m", 0, 0.0, 100.0, asker, sizes=(64, 1))
    requests.add(waiting)
    requests.follow(PLAN, from_plan(PLAN))
    (refused,) = asker.refusals
    assert (refused.outcome, refused.rule) == (Outcome.REJECTED, Rule.SIZE)
    assert "profile it with larger --sizes" in refused.reason
    assert not requests.is_open(waiting)


def test_outcomes_and_padding_are_counted_by_size_class() -> None:
    counters, asker = Counters(), _Asker()
    requests = OpenRequests(counters, lambda: 0.0, lambda _model: SIGNATURE)
    requests.follow(PLAN, from_plan(PLAN))

    def opened(*sizes: int, deadline_ms: float = 100.0) -> Request:
        served = requests.find("m", sizes)
        index = requests.models["m"].index if served is None else served.index
        request = Request(sum(sizes), "m", index, 0.0, deadline_ms, asker, sizes=sizes)
        requests.add(request)
        return request

    small, late, large = opened(8, 8), opened(8, 7, deadline_ms=-1.0), opened(20, 8)
    counters.batch_sent(Batch(0, 1, "m", [small, late, large], 0, 0.0, 0.0, 1.0), SIGNATURE)
    requests.executed([small, late], EXECUTED)
    requests.expire(large, Rule.CUT)
    requests.refuse_larger(opened(64, 1))
    rows = counters.status(PLAN, {"f": 0, "m": 0}, {})["m"].by_size
    assert [(row.sizes, row.by_outcome) for row in rows] == [
        ({"height": 8, "width": 8}, {"ok": 1, "late": 1, "expired": 0, "rejected": 0, "failed": 0}),
        ({"height": 8, "width": 32}, {"ok": 0, "late": 0, "expired": 1, "rejected": 0, "failed": 0}),
        ({"height": 32, "width": 32}, {"ok": 0, "late": 0, "expired": 0, "rejected": 0, "failed": 0}),
        (None, {"ok": 0, "late": 0, "expired": 0, "rejected": 1, "failed": 0}),
    ]
    computed = 20 * 8  # all are padded to the largest of the batch
    assert [(row.input_elements, row.computed_elements) for row in rows] == [
        (8 * 8 + 8 * 7, 2 * computed),
        (20 * 8, computed),
        (0, 0),
        (0, 0),
    ]
    counters.executed([small], EXECUTED, 0.0)
    assert rows[0].ok == 1  # a status does not change any more


def test_very_many_size_classes_are_counted_with_the_next_larger_ones() -> None:
    counters = ModelCounters()
    spec = PLAN.model("m")
    counters.follow(spec, {index: (index + 1, index + 1) for index in range(1000)})
    assert len(counters.by_size) <= 33
    assert counters.class_rows[999].sizes == {"height": 1000, "width": 1000}
    assert all(row.sizes["height"] > index for index, row in counters.class_rows.items() if row.sizes)


def emulated(mean: LatencyTable, by_size: list[dict[str, Any]], **described: Any) -> EmulatedExecutor:
    """Model `m`, on an emulated GPU."""
    known = tuple(SizedLatency.model_validate(each) for each in by_size)
    member, executor = MemberEntry(name="m", source="a.b:c", options=described), EmulatedExecutor("v100")
    pads = bool(described)
    entry = ProgramEntry(name="m", batch_size=mean.largest, members=(member,), latency=mean, by_size=known, pads=pads)
    executor.load(entry, range(1, mean.largest + 1))
    return executor


def test_an_emulated_batch_takes_what_its_padded_sizes_take() -> None:
    described = {
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["height", "width"], "pad": 0.0}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [2]}],
        "sizes": {"width": {"most": 64}, "height": {"most": 64}},
    }
    executor = emulated(LatencyTable(points={1: 8.0, 2: 12.0}), BY_SIZE, **described)
    sizes = [[(8, 8)], [(8, 8), (32, 1)], [(1, 9), (1, 1)], [(64, 64)]]
    assert [executor.latency_ms("m", each) for each in sizes] == [1.0, 6.4, 25.6, 16.0]


@pytest.mark.parametrize("quantiles", [{0: 48, 100: 48}, {0: 48, 50: 48, 51: 64, 100: 64}, {0: 17, 100: 64}])
def test_batches_that_cannot_be_padded_take_what_is_planned_in_the_mean(quantiles: dict[float, int]) -> None:
    """One shape, two of them, or 48: the requests of each run by themselves."""
    line = {"points": {b: 5.0 + b for b in range(1, 9)}}
    replica = {"name": "m", "batch_size": 8, "latency": line, "pads": False}
    by_size = [{"sizes": {"width": width}, "latency": line} for width in (16, 64)]
    gpulets = [{"id": "a", "gpu": "g", "models": [{**replica, "by_size": by_size}]}]
    model = {"name": "m", "rate_rps": 1, "slo_ms": 100, "sizes": {"width": {"quantiles": quantiles}}}
    plan = Plan.from_data({**PLAN.to_data(), "gpulets": gpulets, "models": [model], "unserved": []})
    planned_ms = from_plan(plan).gpulets[0].hosts[1].latency_ms
    executor = emulated(LatencyTable.model_validate(line), by_size)
    drawn = plan.models[0].sizes["width"].draw(8 * 2000, np.random.default_rng(1)).reshape(-1, 8, 1).tolist()
    for size in (1, 2, 8):
        took_ms = np.mean([executor.latency_ms("m", [*map(tuple, batch[:size])]) for batch in drawn])
        assert took_ms == pytest.approx(planned_ms[size], rel=0.02)
