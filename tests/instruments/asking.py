"""Asking a dispatcher or a remote one from a test: one request, a future of its answer."""

import asyncio
from collections.abc import Callable, Sequence

import httpx
import numpy as np

from tenuto.deployments.entry.service.dispatching import Dispatching, ask
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.tensors import Buffer, InputPart
from tests.instruments.live import PATIENCE_S

__all__ = ["X", "answer", "outputs", "submit", "until", "until_ready"]

X = [np.array([1, 2], np.float32).tobytes()]


def submit(
    dispatching: Dispatching,
    model: str,
    parts: Sequence[Buffer],
    slo_ms: float | None = None,
    client_id: str = "",
    reserve_ms: float = 0.0,
) -> asyncio.Future[Answer]:
    return ask(
        dispatching,
        model,
        [InputPart(part) for part in parts],
        slo_ms=slo_ms,
        client_id=client_id,
        reserve_ms=reserve_ms,
    )


async def answer(future: asyncio.Future[Answer]) -> Answer:
    return await asyncio.wait_for(future, PATIENCE_S)


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not claim():
            await asyncio.sleep(0.001)


async def until_ready(client: httpx.AsyncClient) -> None:
    """Wait until a gateway says that it is ready."""
    async with asyncio.timeout(PATIENCE_S):
        while (await client.get("/v2/health/ready")).status_code != 200:
            await asyncio.sleep(0.005)


def outputs(found: Answer) -> dict[str, list[float]]:
    return {t.name: np.frombuffer(t.data, np.float32).tolist() for t in found.outputs}
