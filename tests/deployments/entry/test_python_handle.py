"""Resumable from Python: the same outcomes as over HTTP, and inputs checked before they are sent."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.entry.service.python_handle import RequestFailedError, TenutoHandle
from tenuto.errors import EnvironmentFaultError, InvalidInputError, UnavailableError
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tests.deployments.entry.test_dispatcher_client import Start, start
from tests.instruments.fake_gpulet import FakeGpulet, make_plan
from tests.instruments.live import PATIENCE_S

__all__ = ["start"]  # the fixture


async def connect(start: Start, gpulet: FakeGpulet, **settings: int) -> TenutoHandle:
    cluster = await start(make_plan(("a", ("m",)), models=("m", "away"), batch_size=4), gpulet, **settings)
    return TenutoHandle(await cluster.gateway())


async def test_a_sample_comes_back_as_arrays_by_name(start: Start) -> None:
    handle = await connect(start, FakeGpulet("a", ("m",)))
    assert handle.models == ("m",)
    inputs = [np.array([n, 1], np.float32) for n in range(8)]  # full batches, which leave at once
    answers = await asyncio.gather(*(handle.infer("m", {"x": x}) for x in inputs))

    for x, outputs in zip(inputs, answers, strict=True):
        assert np.array_equal(outputs["y"], 2 * x)


async def test_integers_are_converted_where_nothing_is_lost(start: Start) -> None:
    handle = await connect(start, FakeGpulet("a", ("m",)))

    answers = await asyncio.gather(*(handle.infer("m", {"x": [3, 4]}) for _ in range(4)))
    assert all(np.array_equal(answer["y"], np.array([6, 8], np.float32)) for answer in answers)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "inputs.x: is missing"),
        ({"x": [1.0, 2.0], "z": [1]}, "inputs.z: 'z': is no input"),
        ({"x": [[1.0, 2.0]]}, r"float64 \[1, 2\]': must be float32 \[2\]"),
        ({"x": [1j, 2j]}, "complex128"),
        ({"x": ["a", "b"]}, "must be float32"),
    ],
)
async def test_inputs_that_do_not_fit_are_refused_with_their_name(
    start: Start, inputs: dict[str, object], words: str
) -> None:
    handle = await connect(start, FakeGpulet("a", ("m",)))

    with pytest.raises(InvalidInputError, match=words):
        await handle.infer("m", inputs)


async def test_unknown_and_absent_models_are_told_apart(start: Start) -> None:
    handle = await connect(start, FakeGpulet("a", ("m",)))

    with pytest.raises(InvalidInputError, match="unknown model: 'nothing'"):
        await handle.infer("nothing", {})
    with pytest.raises(UnavailableError, match="no gpu-let of 'away' is ready"):
        await handle.infer("away", {"x": [1, 2]})


async def test_an_expired_request_carries_its_answer(start: Start) -> None:
    handle = await connect(start, FakeGpulet("a", ("m",)))

    with pytest.raises(RequestFailedError, match="m: expired") as caught:
        await handle.infer("m", {"x": [1, 2]}, slo_ms=-1.0)
    assert caught.value.answer.outcome is Outcome.EXPIRED


async def test_closing_fails_what_is_under_way(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    handle = await connect(start, gpulet)
    asked = asyncio.ensure_future(handle.infer("m", {"x": [1, 2]}, slo_ms=60_000.0))
    await asyncio.sleep(0)
    await handle.close()

    with pytest.raises(RequestFailedError, match="failed"):
        await asked


async def test_large_inputs_travel_by_shared_memory_until_it_is_closed(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m",), hold=True)
    handle = await connect(start, gpulet)
    size = 1 << 16
    for _ in range(4):  # a full batch, which leaves at once
        handle.submit("m", [bytes(size)], 60_000.0)
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    assert gpulet.bodies == [0]
    assert [place.length for place in gpulet.messages[0].places] == [size] * 4
    for _ in range(2):
        await handle.close()
        with pytest.raises(UnavailableError, match="is closed"):
            await handle.infer("m", {"x": [1, 2]})


def application(slo_ms: float = 60_000.0, **stage: Any) -> Plan:
    """A plan of m and n, and an application that asks one after the other."""
    data = make_plan(("a", ("m", "n")), slo_ms=60_000.0).to_data()
    stages = [{"model": "m", "shared": True}, {"model": "n", "shared": True, **(stage or {"inputs": {"x": "m.y"}})}]
    app = {"name": "app", "rate_rps": 1.0, "slo_ms": slo_ms, "stages": stages}
    return Plan.from_data({**data, "applications": [app]})


async def ask_application(start: Start, gpulet: FakeGpulet, plan: Plan) -> TenutoHandle:
    cluster = await start(plan, gpulet)
    return TenutoHandle(await cluster.gateway())


async def test_an_application_is_asked_as_a_model_is(start: Start) -> None:
    handle = await ask_application(start, FakeGpulet("a", ("m", "n")), application())
    assert handle.models == ("m", "n", "app")
    assert [tensor.name for tensor in handle.interface("app").inputs] == ["x"]
    outputs = await handle.infer("app", {"x": [1.0, 2.0]})
    assert np.array_equal(outputs["y"], np.array([4.0, 8.0], np.float32))
    parts = [np.array([1.0, 2.0], np.float32).tobytes()]
    answer = await handle.submit("app", parts, request_id="mine")
    assert answer.stage_ms.keys() == {"m", "n"}
    assert all(took_ms > 0.0 for took_ms in answer.stage_ms.values())
    late = await handle.submit("app", parts, 0.0)
    assert (late.outcome, late.stage_ms) == (Outcome.EXPIRED, {})
    with pytest.raises(InvalidInputError, match=r"inputs.x: is missing"):
        await handle.infer("app", {})
    with pytest.raises(ValueError, match=r"shorter|longer"):
        handle.submit("app", [])
    await handle.close()


async def test_functions_run_beside_the_handle(start: Start) -> None:
    function = {"after": ["m"], "map": "tests.instruments.graph_functions:copies", "count": 2, "most": 4}
    handle = await ask_application(start, FakeGpulet("a", ("m", "n")), application(**function))
    outputs = await handle.infer("app", {"x": [1.0, 3.0]})
    assert np.array_equal(outputs["y"], np.array([[4.0, 12.0], [6.0, 14.0], [8.0, 16.0]], np.float32))
    with pytest.raises(RequestFailedError, match=r"function tests.instruments.graph_functions:copies of stage 'n'"):
        await handle.infer("app", {"x": [-1.0, 3.0]})
    await handle.close()


async def test_what_nobody_waits_for_any_more_is_withdrawn_from_all_stages(start: Start) -> None:
    gpulet = FakeGpulet("a", ("m", "n"), hold=True)
    handle = await ask_application(start, gpulet, application())
    future = handle.submit("app", [np.array([1.0, 2.0], np.float32).tobytes()])
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    future.cancel()
    gpulet.release()
    gpulet.hold = False
    assert np.array_equal((await handle.infer("n", {"x": [1.0, 2.0]}))["y"], np.array([2.0, 4.0], np.float32))
    assert len(gpulet.sizes) == 2  # of m, and of the last request
    await handle.close()


async def test_without_ray_the_cure_is_named() -> None:
    with pytest.raises(EnvironmentFaultError, match=r"join_ray"):
        await TenutoHandle.connect()
