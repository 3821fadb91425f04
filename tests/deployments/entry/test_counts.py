"""What is counted, against what clients were told: requests of one or more samples, with every end there is. The
scheduler is in the gateway's process, or in another."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.dispatcher_process import BundleServer
from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.user_config import read_gateway_config
from tenuto.deployments.wire.peer import Endpoint
from tenuto.placement import Plan
from tests.instruments.asking import http_client, until_ready
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S

PLAN = make_plan(("a", ("m",)), slo_ms=60_000.0, batch_size=4)


def _eager(plan: Plan, network: NetworkDelay) -> Scheduler:
    return make_scheduler("eager", from_plan(plan, network), {})


class Counted:
    """A gateway over one gpu-let, and what its client was told."""

    def __init__(self) -> None:
        self.gpulet = FakeGpulet("a", ("m",))
        self.port = unused_port()
        self.client = http_client(self.port)
        self.server: BundleServer | None = None
        self.told: Counter[str] = Counter()
        self.samples_run = 0

    async def start(self, *, is_beside: bool) -> None:
        await self.gpulet.start()
        more: dict[str, Any] = {"scheduler": {"name": "eager"}} if is_beside else {"sub_clusters": {"0": ["m"]}}
        dispatcher = Dispatcher(_eager, finder({"a": self.gpulet}), on_change=self._announce)
        self.server = BundleServer(dispatcher)
        endpoint = await self.server.listen()
        if not is_beside:
            dispatcher.apply(PLAN)

        async def find() -> Endpoint:
            return endpoint

        self.entry = Entry(finder({"a": self.gpulet}), lambda _name: find)
        listen = {"host": "127.0.0.1", "port": self.port}
        await self.entry.follow(read_gateway_config({"plan": PLAN.to_data(), "listen": listen, **more}))
        await until_ready(self.client)

    def _announce(self) -> None:
        if self.server is not None:
            self.server.announce()

    async def ask(self, samples: int, **parameters: Any) -> None:
        tensor = {"name": "x", "shape": [samples, 2], "datatype": "FP32", "data": [1, 2] * samples}
        found = await self.client.post("/v2/models/m/infer", json={"inputs": [tensor], "parameters": parameters})
        self.told["ok" if found.is_success else found.json()["outcome"]] += 1
        self.samples_run += samples if found.status_code == 200 else 0

    async def leave(self, samples: int) -> None:
        """Ask, and leave before the answer."""
        before = len(self.gpulet.sizes)
        asked = asyncio.create_task(self.ask(samples))
        while len(self.gpulet.sizes) == before:
            await asyncio.sleep(0.001)
        asked.cancel()
        self.told["cancelled"] += 1
        async with asyncio.timeout(PATIENCE_S):
            while (await self.metrics())["tenuto_requests_cancelled_total", ""] < self.told["cancelled"]:
                await asyncio.sleep(0.001)

    async def statistics(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get("/v2/models/m/stats")).json()["model_stats"][0]
        return found

    async def metrics(self) -> dict[tuple[str, str], float]:
        text = (await self.client.get("/metrics")).text
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        return {(each.name, each.labels.get("outcome", "")): each.value for each in samples}

    async def close(self) -> None:
        await self.client.aclose()
        await self.entry.close()
        if self.server is not None:
            await self.server.close(0.0)
        self.gpulet.die()


@pytest.fixture(params=["beside", "elsewhere"])
async def counted(request: pytest.FixtureRequest) -> AsyncIterator[Counted]:
    made = Counted()
    await made.start(is_beside=request.param == "beside")
    yield made
    await made.close()


@pytest.mark.parametrize("seed", range(2))
async def test_every_figure_counts_requests_and_tells_samples_apart(counted: Counted, seed: int) -> None:
    draw = random.Random(seed)
    for end in draw.sample(("run", "run", "expire", "leave") * 6 + ("fail",), 25):
        samples = draw.choice((1, 1, 2, 3, 8, 64))
        counted.gpulet.error = "running 'm' failed" if end == "fail" else None
        counted.gpulet.hold = end == "leave"
        if end == "leave":
            await counted.leave(samples)
            counted.gpulet.hold = False
            counted.gpulet.release()
        elif end == "fail":
            await counted.ask(samples)
            while not (await counted.client.get("/v2/health/ready")).is_success:
                await asyncio.sleep(0.005)
        else:
            await counted.ask(samples, **({"slo_ms": -1.0} if end == "expire" else {}))
    told = counted.told
    async with asyncio.timeout(PATIENCE_S):
        while (await counted.statistics())["inference_stats"]["fail"]["count"] < told["failed"] + told["expired"]:
            await asyncio.sleep(0.005)
    found = await counted.statistics()
    stats = found["inference_stats"]
    counts = {name: stats[name]["count"] for name in ("success", "queue", "compute_infer")}
    assert counts == dict.fromkeys(counts, told["ok"])
    assert stats["fail"]["count"] == told["failed"] + told["expired"]
    assert found["inference_count"] >= counted.samples_run  # and those of requests of which others failed
    metrics = await counted.metrics()
    for outcome in ("ok", "failed", "expired"):
        assert metrics["tenuto_requests_total", outcome] == told[outcome]
    assert metrics["tenuto_requests_cancelled_total", ""] == told["cancelled"]
    assert metrics["tenuto_requests_received_total", ""] == sum(told.values())
    assert metrics["tenuto_request_duration_seconds_count", ""] == told["ok"]


async def test_a_request_of_eight_samples_is_one_request_and_eight_inferences(counted: Counted) -> None:
    await counted.ask(8)
    found = await counted.statistics()
    assert (found["inference_count"], found["execution_count"]) == (8, len(counted.gpulet.sizes))
    assert found["inference_stats"]["success"]["count"] == 1
    assert (await counted.metrics())["tenuto_inferences_total", ""] == 8
