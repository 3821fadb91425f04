"""Several gateways of one system: operators see all of them at any, a key's rate holds for all of them together."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.dispatcher_process import BundleServer
from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.entry.service.controller_cache import ControllerStatusCache
from tenuto.deployments.security.keys import Caller
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.user_config import read_gateway_config
from tenuto.deployments.wire.peer import Endpoint
from tenuto.deployments.wire.status import Beside, ControllerStatus, Event
from tenuto.placement import Plan
from tests.instruments.asking import http_client, until_ready
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S

KEY: dict[str, Any] = {"name": "anna", "sha256": hashlib.sha256(b"key").hexdigest(), "rate_rps": 30.0}
PLAN = make_plan(("a", ("m",)), slo_ms=60_000.0)
CONTROLLER = ControllerStatus(
    mode="act", paused=True, decisions={"changed": 2}, log=[Event(1.0, "changed", "more load")]
)


def _eager(plan: Plan, network: NetworkDelay) -> Scheduler:
    return make_scheduler("eager", from_plan(plan, network), {})


async def _controller() -> Beside:
    return Beside(CONTROLLER)


@pytest.fixture
async def gateways() -> AsyncIterator[list[tuple[Entry, httpx.AsyncClient]]]:
    """Two gateways over one dispatcher, each with a client that has the key; the first asks for clients' models."""
    gpulet = FakeGpulet("a", ("m",))
    await gpulet.start()
    server: BundleServer | None = None
    dispatcher = Dispatcher(_eager, finder({"a": gpulet}), on_change=lambda: server.announce() if server else None)
    server = BundleServer(dispatcher)
    endpoint = await server.listen()
    dispatcher.apply(PLAN)

    async def find() -> Endpoint:
        return endpoint

    made = []
    for _ in range(2):
        ports = unused_port(), unused_port()
        entry = Entry(find_dispatcher=lambda _name: find, ask_beside=_controller)
        await entry.follow(
            read_gateway_config(
                {
                    "plan": PLAN.to_data(),
                    "keys": [KEY],
                    "sub_clusters": {"0": ["m"]},
                    "listen": {"port": ports[0]},
                    "operators": {"port": ports[1]},
                }
            )
        )
        client = http_client(ports[0])
        client.operators = f"http://127.0.0.1:{ports[1]}"  # type: ignore[attr-defined]
        made.append((entry, client))
        await until_ready(client)
    yield made
    for entry, client in made:
        await client.aclose()
        await entry.close()
    await server.close(0.0)
    gpulet.die()


async def _asked(client: httpx.AsyncClient, key: str = "key") -> int:
    body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    return (await client.post("/v2/models/m/infer", json=body, headers={"X-Api-Key": key})).status_code


async def test_operators_see_all_gateways_at_any(gateways: list[tuple[Entry, httpx.AsyncClient]]) -> None:
    (_, first), (_, second) = gateways
    assert await _asked(first) == 200
    assert [await _asked(client, "wrong") for client in (first, second, second)] == [401, 401, 401]

    async def seen() -> dict[str, Any]:
        found: dict[str, Any] = (await second.get(second.operators + "/status")).json()  # type: ignore[attr-defined]
        return found

    status = await seen()
    async with asyncio.timeout(PATIENCE_S):
        while status["front_door"]["turned_away"] != {"key": 3}:  # within a second nobody need have asked the first
            await asyncio.sleep(0.05)
            status = await seen()
    assert len({gateway["id"] for gateway in status["gateways"]}) == 2
    assert sorted(gateway["front_door"]["turned_away"]["key"] for gateway in status["gateways"]) == [1, 2]
    assert status["front_door"]["wrong_keys"] == 3
    assert status["models"]["m"]["ok"] == 1
    assert status["controller"] == msgspec.to_builtins(CONTROLLER)
    metrics = (await first.get(first.operators + "/metrics")).text  # type: ignore[attr-defined]
    assert metrics.count('tenuto_requests_turned_away_total{reason="key"') == 2
    assert metrics.count("\ntenuto_wrong_keys_total{") == 2
    assert 'tenuto_controller_decisions_total{decision="changed"} 2' in metrics
    assert "tenuto_controller_paused 1" in metrics


def rate_of(caller: Caller) -> float:
    """Return how many requests a second it may ask for here: once its bucket is empty, one in every wait."""
    now_s = time.monotonic() + 1000.0
    for _ in range(2):
        while not (wait_s := caller.wait_s(now_s)):
            pass
        now_s += wait_s + 1e-9
    return 1.0 / wait_s


async def test_a_keys_rate_goes_where_its_client_asks(gateways: list[tuple[Entry, httpx.AsyncClient]]) -> None:
    (first, client), (second, _) = gateways
    assert [await _asked(client) for _ in range(20)] == [200] * 20
    parts = []
    for _ in range(2):
        for entry in (first, second):
            await entry.metrics.meet()
    for entry in (first, second):
        assert entry.service is not None
        caller = entry.service.callers.find(b"key")
        assert caller is not None
        parts.append(rate_of(caller) / KEY["rate_rps"])
    assert parts[0] > 10 * parts[1]
    assert sum(parts) == pytest.approx(1.0, abs=0.2)


async def test_a_controller_that_does_not_answer_keeps_nobody_waiting() -> None:
    now_s, answers = 0.0, [Beside(CONTROLLER), Beside()]
    asked = 0

    async def ask() -> Any:
        nonlocal asked
        asked += 1
        if not answers:
            raise OSError("its process ended")
        return answers.pop(0)

    figures = ControllerStatusCache(ask, clock=lambda: now_s)
    for at_s, shown, count in (
        (0.0, CONTROLLER, 1),
        (1.0, CONTROLLER, 1),
        (2.0, None, 2),
        (11.0, None, 2),
        (12.0, None, 3),
    ):
        now_s = at_s
        assert ((await figures.read()).controller, asked) == (shown, count)


async def test_what_no_plan_has_is_shown_where_no_controller_ends_it() -> None:
    gpulet, port = FakeGpulet("n0/0/a", ("m",)), unused_port()
    await gpulet.start()
    plan = make_plan(("n0/0/a", ("m",)))

    async def ask() -> Beside:
        return Beside(gpulets=frozenset({"gpulet-n0-0-a", "gpulet-n0-1-a"}))

    entry = Entry(finder({"n0/0/a": gpulet}), ask_beside=ask)
    await entry.follow(read_gateway_config({"plan": plan.to_data(), "listen": {"port": port}}))
    async with http_client(port) as client:
        for page in ("/status", "/live"):
            assert (await client.get(page)).json()["strays"] == ["gpulet-n0-1-a"]
    await entry.close()
    gpulet.die()
