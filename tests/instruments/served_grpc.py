"""A gateway with gRPC over one fake gpu-let, and its clients; its tests are skipped without their packages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.user_config import read_gateway_config
from tenuto.placement import Plan
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S

grpc = pytest.importorskip("grpc")
pytest.importorskip("h2")
client = pytest.importorskip("tritonclient.grpc.aio")

__all__ = ["PLAN", "Served", "client", "grpc", "served"]

PLAN = make_plan(("a", ("m",)), slo_ms=60_000.0)


class Served:
    """A gateway with gRPC over one gpu-let that doubles, and Triton's client."""

    def __init__(self) -> None:
        self.gpulet = FakeGpulet("a", ("m",))
        self.port, self.grpc_port = unused_port(), unused_port()
        self.entry = Entry(finder({"a": self.gpulet}))
        self.triton = client.InferenceServerClient(f"127.0.0.1:{self.grpc_port}")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}")

    async def follow(self, plan: Plan = PLAN, **options: Any) -> None:
        listen = {"host": "127.0.0.1", "port": self.port}
        sockets = {"listen": listen, "grpc": {"host": "127.0.0.1", "port": self.grpc_port}}
        config = {"plan": plan.to_data(), "scheduler": {"name": "eager"}, **sockets, **options}
        await self.entry.follow(read_gateway_config(config))

    async def start(self, **options: Any) -> None:
        """Start both, and return when the gateway says that it is ready."""
        await self.gpulet.start()
        await self.follow(**options)
        async with asyncio.timeout(PATIENCE_S):
            while not await self.is_ready():
                await asyncio.sleep(0.005)

    async def is_ready(self) -> bool:
        """Return whether it answers that it is; a connection that is not made yet is none."""
        try:
            return bool(await self.triton.is_server_ready())
        except client.InferenceServerException:
            return False

    async def code(self, data: bytes, **metadata: str) -> str:
        """Send bytes as the message of an infer call; returns the name of the code that it ends with."""
        call = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        pairs = tuple(metadata.items())
        found: str = (await call(data, metadata=pairs, timeout=PATIENCE_S, wait_for_ready=True).code()).name
        return found

    async def send(self, data: bytes) -> bytes:
        """Send bytes as the message of an infer call; returns those of the answer."""
        call = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer: bytes = await call(data, timeout=PATIENCE_S, wait_for_ready=True)
        return answer

    async def close(self) -> None:
        await self.triton.close()
        await self.channel.close()
        await self.entry.close()
        self.gpulet.die()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    await made.start()
    yield made
    await made.close()
