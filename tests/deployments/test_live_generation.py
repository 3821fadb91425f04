"""Generations on a real local Ray, through two gateways and a dispatcher of its own process: a tiny language model on
the CPU, and one on an emulated GPU."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tenuto.deployments.entry.service.python_handle import TenutoHandle
from tests.deployments.entry.test_generation import BLOCKS, PROMPT, written
from tests.instruments.asking import http_client
from tests.instruments.live import PATIENCE_S, pids
from tests.instruments.shared_deployment import SharedDeployment

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]


def told(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/status", timeout=PATIENCE_S).json()["gpulets"]
    return found


def gpulet(url: str, name: str) -> dict[str, Any]:
    return next(each for each in told(url) if each["id"] == name)


async def ask(client: httpx.AsyncClient, **document: Any) -> str:
    """Return the text of a stream."""
    async with client.stream("POST", "/v1/completions", json={"stream": True, **document}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_a_gpulet_on_two_gpus_is_shown_on_both(shared_url: str) -> None:
    told = gpulet(shared_url, "b")
    assert told["up"]
    assert (told["gpu"], told["also_on"]) == ("v", ["w"])


async def test_streams_through_all_processes_are_those_of_generate(shared_url: str) -> None:
    url = shared_url
    expected = written(PROMPT, 24)
    async with http_client(url) as client:
        asked = {"model": "real", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        assert await asyncio.gather(*(ask(client, **asked) for _ in range(8))) == [expected] * 8
        async with client.stream(
            "POST", "/v1/completions", json={"model": "slow", "prompt": "x", "max_tokens": 300, "stream": True}
        ) as left:
            async for _ in left.aiter_lines():
                break
    async with asyncio.timeout(PATIENCE_S):
        while (told := gpulet(url, "b"))["generating"] or told["free_blocks"] != BLOCKS:
            await asyncio.sleep(0.05)
    async with await TenutoHandle.connect() as tenuto:
        parts = [part async for part in tenuto.generate("real", PROMPT, max_tokens=24)]
    assert "".join(parts) == expected


async def test_streams_go_on_when_their_gpulet_is_taken_away_or_killed(shared: SharedDeployment) -> None:
    """What is written are letters in the order of the alphabet, so that each shows that is lost or comes twice."""
    url = shared.url

    async def all_whole(strike: Callable[[], None]) -> None:
        async with http_client(url) as client:
            asked = [{"model": "slow", "prompt": f"{n}", "max_tokens": 150} for n in range(6)]
            streams = [asyncio.create_task(ask(client, **each)) for each in asked]
            async with asyncio.timeout(PATIENCE_S):
                while sum(each["generating"] for each in await asyncio.to_thread(told, url)) < len(asked):
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(strike)
            for text in await asyncio.gather(*streams):
                assert text == "".join(chr(97 + (ord(text[0]) - 97 + n) % 26) for n in range(150))

    await all_whole(lambda: shared.apply(slow_on=("e", "f")))
    await all_whole(lambda: os.kill(pids(url)["e"], signal.SIGKILL))
