"""The JSON that operators read keeps its keys: keys are added, never renamed, and a figure stays a figure."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.user_config import read_gateway_config
from tests.deployments.entry.test_fellows import gateways  # noqa: F401  # two of them, with a controller
from tests.instruments.asking import http_client, until_ready
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S

SHAPES = Path(__file__).parent / "shapes"
TENSOR = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
PAGES = ("/status", "/status/queue", "/live", "/requests")


def shape(data: Any) -> Any:
    """What a document is made of: the keys of objects, the kinds of values, the first entry of lists."""
    if isinstance(data, dict):
        return {key: shape(value) for key, value in data.items()}
    if isinstance(data, list):
        return [shape(entry) for entry in data[:1]]
    if data is None or isinstance(data, bool):
        return str((data is None and "null") or "boolean")
    return "text" if isinstance(data, str) else "number"


def missing(golden: Any, found: Any, place: str = "") -> list[str]:
    """What of a golden shape a document lacks, or has as something else; what was null may have become known."""
    if golden == "null" or golden == []:
        return []
    if isinstance(golden, dict):
        if not isinstance(found, dict):
            return [f"{place}: {found}"]
        return [
            problem
            for key, inside in golden.items()
            for problem in ([f"{place}.{key}"] if key not in found else missing(inside, found[key], f"{place}.{key}"))
        ]
    if isinstance(golden, list):
        return (
            missing(golden[0], found[0], f"{place}[]") if found and isinstance(found, list) else [f"{place}: {found}"]
        )
    return [] if golden == found else [f"{place}: {found}"]


async def shapes_of(client: httpx.AsyncClient, operators: str) -> dict[str, Any]:
    """Ask for answers until the live page's figures, which are of the last seconds, have one; and then for everything
    that operators can ask."""
    ended = None
    async with asyncio.timeout(PATIENCE_S):
        while ended is None:
            answer = await client.post("/v2/models/m/infer", json={"inputs": [TENSOR]}, headers={"X-Api-Key": "key"})
            assert answer.status_code in (200, 429)  # the key has a limit, too
            await asyncio.sleep(0.05)
            ended = (await client.get(operators + "/live")).json()["window"]["models"]["m"]["attainment"]
    return {page: shape((await client.get(operators + page)).json()) for page in PAGES}


def compare(name: str, found: dict[str, Any]) -> None:
    golden = json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8"))
    assert missing(golden, found) == []


async def test_one_gateway_that_schedules_by_itself() -> None:
    gpulet = FakeGpulet("a", ("m",))
    await gpulet.start()
    entry, port = Entry(finder({"a": gpulet})), unused_port()
    options = {"scheduler": {"name": "deferred", "options": {"rehearse": True}}}
    config = {"plan": make_plan(("a", ("m",))).to_data(), "listen": {"port": port}, **options}
    await entry.follow(read_gateway_config(config))
    async with http_client(port) as client:
        await until_ready(client)
        compare("one_gateway", await shapes_of(client, ""))
    await entry.close()
    gpulet.die()


async def test_two_gateways_over_a_dispatcher_with_a_controller(
    gateways: list[tuple[Entry, httpx.AsyncClient]],  # noqa: F811
) -> None:
    (_, _first), (_, second) = gateways
    compare("two_gateways", await shapes_of(second, second.operators))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("golden", "found", "problems"),
    [
        ({"a": "number"}, {"a": "number", "b": "text"}, []),
        ({"a": {"b": "number"}}, {"a": {"c": "number"}}, [".a.b"]),
        ({"a": [{"b": "text"}]}, {"a": [{"b": "number"}]}, [".a[].b: number"]),
        ({"a": "null"}, {"a": {"b": "number"}}, []),
    ],
)
def test_the_comparison_finds_what_is_gone(golden: Any, found: Any, problems: list[str]) -> None:
    assert missing(golden, found) == problems
