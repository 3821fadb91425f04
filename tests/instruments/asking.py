"""Asking a dispatcher or a remote one from a test: one request, a future of its answer."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import httpx
import numpy as np

from tenuto.deployments.entry.service.dispatching import Dispatching, ask
from tenuto.deployments.wire.answers import Answer
from tenuto.deployments.wire.tensors import Buffer, InputPart
from tests.instruments.live import PATIENCE_S

if TYPE_CHECKING:
    import openai

__all__ = ["X", "answer", "http_client", "openai_client", "outputs", "submit", "until", "until_ready"]

X = [np.array([1, 2], np.float32).tobytes()]


def http_client(where: int | str | httpx.URL) -> httpx.AsyncClient:
    """A client of a gateway, by its port or its URL. No TLS is asked: to read all certificates that this machine trusts
    takes 25 ms of a core."""
    url = f"http://127.0.0.1:{where}" if isinstance(where, int) else where
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False)


def openai_client(url: str, key: str = "none") -> "openai.AsyncOpenAI":
    """OpenAI's own client, likewise."""
    import openai

    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE_S, http_client=http)


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


async def until_ready(client: httpx.AsyncClient, path: str = "/v2/health/ready") -> None:
    """Wait until a gateway says that it is ready, or a model of it."""
    async with asyncio.timeout(PATIENCE_S):
        while (await client.get(path)).status_code != 200:
            await asyncio.sleep(0.005)


def outputs(found: Answer) -> dict[str, list[float]]:
    return {t.name: np.frombuffer(t.data, np.float32).tolist() for t in found.outputs}
