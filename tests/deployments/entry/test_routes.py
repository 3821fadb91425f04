"""The routes beside the infer path, asked by themselves: a service that is made of answers stands behind them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.oip_requests import TensorSpec
from tenuto.deployments.entry.service.management_routes import make_app
from tenuto.deployments.operator.app import make_operator_app
from tenuto.profiles.networks.catalogue import ImageInput
from tests.instruments.plans import make_plan

PLAN = make_plan({"n0/0/a": (100.0, ["m"])})


class Service:
    """Knows the model `m`, which can be asked or not."""

    def __init__(self, *, is_up: bool, image: ImageInput | None = None) -> None:
        self.image = image
        down = SimpleNamespace(id="n0/0/a", up=is_up)
        self.dispatching = SimpleNamespace(plan=PLAN, is_ready=lambda *_: is_up, gpulets=lambda: [down], status=None)
        self.applications: dict[str, Any] = {}
        self.models = self

    def name(self, model: str, version: str = "") -> str:
        return model

    def versions(self, model: str) -> list[str]:
        return ["1"]

    def interface(self, model: str, version: str = "") -> Any:
        if model != "m":
            raise HttpError(404, f"unknown model '{model}'")
        tensor = TensorSpec("x", "float32", (3,))
        return SimpleNamespace(
            signature=SimpleNamespace(platform="emulated", image=self.image, sizes={}),
            inputs=(tensor,),
            outputs=(tensor,),
        )


def client(*, is_up: bool = True, image: ImageInput | None = None) -> httpx.AsyncClient:
    service: Any = Service(is_up=is_up, image=image)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=make_app(service)), base_url="http://test")


async def test_the_server_says_what_it_is_and_that_it_lives() -> None:
    async with client() as asked:
        assert (await asked.get("/v2")).json()["name"] == "tenuto"
        assert (await asked.get("/v2/health/live")).json() == {"live": True}


@pytest.mark.parametrize(("is_up", "status"), [(True, 200), (False, 503)])
async def test_it_is_ready_when_every_gpulet_is_there(is_up: bool, status: int) -> None:
    async with client(is_up=is_up) as asked:
        answer = await asked.get("/v2/health/ready")
        assert (answer.status_code, answer.json()["ready"]) == (status, is_up)
        assert is_up or "n0/0/a" in answer.json()["error"]
        index = (await asked.post("/v2/repository/index")).json()
        assert index == [{"name": "m", "version": "1", "state": "READY" if is_up else "UNAVAILABLE"}]


@pytest.mark.parametrize("prefix", ["/v2/models/m", "/v2/models/m/versions/1"])
async def test_a_model_is_described_with_and_without_its_version(prefix: str) -> None:
    async with client() as asked:
        metadata = (await asked.get(prefix)).json()
        assert (metadata["name"], metadata["inputs"][0]["name"]) == ("m", "x")
        config = (await asked.get(f"{prefix}/config")).json()
        assert config["max_batch_size"] == 8
        assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}]
    async with client(image=ImageInput(4, 4)) as asked:
        config = (await asked.get(f"{prefix}/config")).json()
        assert config["input"][0]["format"] == "FORMAT_NCHW"  # Triton's image_client asks for it
        assert (await asked.get(f"{prefix}/ready")).json() == {"name": "m", "ready": True}


@pytest.mark.parametrize("path", ["/v2/models/no", "/v2/models/no/ready", "/v2/models/no/config"])
async def test_an_unknown_model_is_not_found_and_named(path: str) -> None:
    async with client() as asked:
        answer = await asked.get(path)
    assert answer.status_code == 404
    assert "no" in answer.json()["error"]


async def test_shared_memory_of_clients_is_not_offered() -> None:
    async with client() as asked:
        answer = await asked.get("/v2/systemsharedmemory/status")
    assert answer.status_code == 404
    assert "Send tensors in the body" in answer.json()["error"]


def references(node: Any) -> Iterator[str]:
    """Yield what a part of an OpenAPI document refers to, also by discriminators, which can only choose among names."""
    if isinstance(node, list):
        for each in node:
            yield from references(each)
    elif isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        if "discriminator" in node:
            chosen = set(node["discriminator"]["mapping"].values())
            assert chosen == {each.get("$ref") for each in node["anyOf"]}
            yield from chosen
        for each in node.values():
            yield from references(each)


@pytest.mark.parametrize("which", ["clients", "operators", "both"])
def test_the_openapi_document_is_whole(which: str) -> None:
    """What clients are generated from: names of operations, schemas that exist, and an answer to what is wrong."""
    service: Any = Service(is_up=True)
    watched: Any = SimpleNamespace(status=None)
    makers = {"clients": lambda: make_app(service), "both": lambda: make_app(service, watched)}
    document = makers.get(which, lambda: make_operator_app(watched))().openapi()
    assert document["info"]["license"]
    assert document["servers"]
    assert "security" in document
    named = set(references(document))
    assert named == {f"#/components/schemas/{name}" for name in document.get("components", {}).get("schemas", ())}
    assert bool(named) == (which != "operators")
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    assert len({each["operationId"] for each in operations}) == len(operations) > 7
    for each in operations:
        assert any(status.startswith("4") for status in each["responses"]), each["operationId"]
        if each["tags"] == ["inference"]:
            assert "500" in each["responses"]  # a model that raised an error
