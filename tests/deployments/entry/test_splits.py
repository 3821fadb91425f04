"""Versions of a model: asked by name, by the split where none is named, and copied to shadows."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.entry.service.python_handle import TenutoHandle
from tenuto.deployments.entry.service.traffic_split import traffic_splits
from tenuto.errors import InvalidInputError
from tenuto.placement import Plan
from tenuto.placement.versions import versioned
from tenuto.profiles.networks.catalogue import ModelSignature
from tests.deployments.entry.test_dispatcher_client import Start, start
from tests.deployments.entry.test_gateway import TENSOR, Bench
from tests.instruments.asking import until, until_ready
from tests.instruments.fake_gpulet import FakeGpulet, make_plan
from tests.instruments.live import PATIENCE_S

__all__ = ["start"]  # the fixture


def plan_of(*terms: tuple[str, dict[str, Any]], slo_ms: float = 60_000.0) -> Plan:
    """Return a plan of versions, each on a gpu-let of its own that is called as it is, with what their entries say."""
    return make_plan(*((name, (name,)) for name, _ in terms), slo_ms=slo_ms, terms=dict(terms))


class Versions(Bench):
    """A gateway over gpu-lets of versions."""

    def __init__(self) -> None:
        super().__init__()
        self.gpulets.clear()

    async def serve(self, *terms: tuple[str, dict[str, Any]]) -> None:
        for name, _ in terms:
            if name not in self.gpulets:
                self.gpulets[name] = FakeGpulet(name, (name,))
                await self.gpulets[name].start()
        await self.follow(plan_of(*terms))
        await until_ready(self.client)

    async def chosen(self, count: int, path: str = "/v2/models/m/infer") -> Counter[str]:
        """Ask so many times, and return which versions answered."""
        found: Counter[str] = Counter()
        for _ in range(count):
            answer = await self.client.post(path, json={"inputs": [TENSOR]})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model_name"] == "m"
            found[answer.json()["model_version"]] += 1
        return found

    async def seen(self, name: str, count: int) -> None:
        """Wait until a version's gpu-let has run so many requests."""
        await until(lambda: sum(self.gpulets[name].sizes) >= count)


@pytest.fixture
async def versions() -> AsyncIterator[Versions]:
    made = Versions()
    yield made
    await made.close()


async def test_a_version_is_asked_by_its_number_and_by_the_split(versions: Versions) -> None:
    await versions.serve(("m", {}), ("m:2", {"share_pct": 40}))
    assert await versions.chosen(5, "/v2/models/m/versions/2/infer") == {"2": 5}
    assert await versions.chosen(5, "/v2/models/m/versions/1/infer") == {"1": 5}
    split = await versions.chosen(200)
    assert split.keys() == {"1", "2"}
    models = (await versions.status())["models"]
    assert {name: each["ok"] for name, each in models.items()} == {"m": 5 + split["1"], "m:2": 5 + split["2"]}
    metadata = (await versions.client.get("/v2/models/m")).json()
    assert (metadata["name"], metadata["versions"]) == ("m", ["1", "2"])
    assert (await versions.client.get("/v2/models/m/versions/2")).json() == metadata
    stats = (await versions.client.get("/v2/models/m/stats")).json()["model_stats"]
    assert {(each["name"], each["version"], each["inference_count"]) for each in stats} == {
        ("m", "1", 5 + split["1"]),
        ("m", "2", 5 + split["2"]),
    }
    of_two = (await versions.client.get("/v2/models/m/versions/2/stats")).json()["model_stats"]
    assert [each["version"] for each in of_two] == ["2"]
    index = (await versions.client.post("/v2/repository/index")).json()
    assert [(each["name"], each["version"]) for each in index] == [("m", "1"), ("m", "2")]
    metrics = (await versions.client.get("/metrics")).text
    assert 'model="m:2"' in metrics


@pytest.mark.parametrize("path", ["/v2/models/m/versions/7/infer", "/v2/models/m/versions/7", "/predict/m/versions/7"])
async def test_an_unknown_version_is_not_found_and_those_there_are_are_named(versions: Versions, path: str) -> None:
    await versions.serve(("m", {}), ("m:2", {"share_pct": 0}))
    ask = versions.client.get if path.endswith("7") and "predict" not in path else versions.client.post
    answer = await ask(path)
    assert (answer.status_code, answer.json()["error"]) == (
        404,
        "Request for unknown model: 'm' has no version '7'. Versions here: 1, 2.",
    )
    odd = await versions.client.post("/v2/models/m:2/infer", json={"inputs": [TENSOR]})
    assert (odd.status_code, odd.json()["error"]) == (
        404,
        "Request for unknown model: 'm:2' is not found. Models here: m.",
    )
    assert await versions.chosen(20) == {"1": 20}


async def test_a_canary_that_cannot_be_asked_is_sent_nothing(versions: Versions) -> None:
    await versions.serve(("m", {}), ("m:2", {"share_pct": 90}))
    versions.gpulets["m:2"].die()
    async with asyncio.timeout(PATIENCE_S):
        while (await versions.client.get("/v2/models/m/versions/2/ready")).status_code == 200:
            await asyncio.sleep(0.001)
    assert await versions.chosen(20) == {"1": 20}
    assert (await versions.client.post("/v2/models/m/versions/2/infer", json={"inputs": [TENSOR]})).status_code == 503


async def test_another_version_takes_the_rest_without_a_new_connection(versions: Versions) -> None:
    await versions.serve(("m", {}), ("m:2", {"share_pct": 50}))
    assert (await versions.chosen(100)).keys() == {"1", "2"}
    await versions.serve(("m:2", {}))
    assert await versions.chosen(20) == {"2": 20}
    assert (await versions.client.get("/v2/models/m")).json()["versions"] == ["2"]
    gone = await versions.client.post("/v2/models/m/versions/1/infer", json={"inputs": [TENSOR]})
    assert gone.json()["error"] == "Request for unknown model: 'm' has no version '1'. Versions here: 2."


async def test_a_shadow_gets_copies_and_clients_never_notice(versions: Versions) -> None:
    await versions.serve(("m", {}), ("m:3", {"shadow": True}))
    assert await versions.chosen(10) == {"1": 10}
    await versions.seen("m:3", 1)
    assert await versions.chosen(5, "/v2/models/m/versions/1/infer") == {"1": 5}
    shadow = versions.gpulets["m:3"]
    shadow.error = "broken"  # its batches fail from now on
    assert await versions.chosen(10) == {"1": 10}
    shadow.error, shadow.hold = None, True  # or never come back
    assert await versions.chosen(200) == {"1": 200}
    status = await versions.status()
    assert status["models"]["m"]["ok"] == 225
    assert status["models"]["m"]["rejected"] == 0
    assert status["models"]["m:3"]["queued"] <= 1
    shadow.die()
    assert await versions.chosen(10) == {"1": 10}


async def test_a_shadow_may_leave_while_requests_are_under_way(
    versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, the first of them that was answered ended the gpu-let's connection."""
    await versions.serve(("m", {}), ("m:3", {"shadow": True}))
    first = versions.gpulets["m"]
    first.hold = True
    document = {"inputs": [TENSOR]}
    asked = [asyncio.create_task(versions.client.post("/v2/models/m/infer", json=document)) for _ in range(3)]
    await until(lambda: sum(first.sizes) >= 1)
    await versions.serve(("m", {}))
    first.hold = False
    first.release()
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 3
    assert await versions.chosen(3) == {"1": 3}
    assert first.is_connected
    assert "Traceback" not in caplog.text


async def test_large_inputs_are_copied_from_where_they_lie(versions: Versions) -> None:
    await versions.serve(("m", {}), ("m:3", {"shadow": True}))
    data = np.arange(80, dtype=np.float32)
    header = b'{"inputs":[{"name":"x","shape":[40,2],"datatype":"FP32","parameters":{"binary_data_size":320}}]}'
    answer = await versions.client.post(
        "/v2/models/m/infer",
        content=header + b" " * 60_000 + data.tobytes(),
        headers={"Inference-Header-Content-Length": str(len(header) + 60_000)},
    )
    assert answer.status_code == 200
    await versions.seen("m:3", 1)


async def test_requests_are_answered_as_long_as_any_version_can_be_asked(versions: Versions) -> None:
    """In any order of deaths and returns, a request that names no version fails only when none is ready that has a
    part in the split, and what is asked of the model is answered by one that is."""
    terms = {"m": {}, "m:2": {"share_pct": 20}, "m:3": {"share_pct": 30}, "m:4": {"share_pct": 0}}
    await versions.serve(*terms.items())
    draw, alive = random.Random(5), set(terms)
    for _ in range(12):
        name = draw.choice(sorted(terms))
        if name in alive:
            versions.gpulets[name].die()
        else:
            await versions.gpulets[name].start()
        alive ^= {name}
        url = "/v2/models/m/versions/{}/ready".format(name.partition(":")[2] or "1")
        async with asyncio.timeout(PATIENCE_S):
            while ((await versions.client.get(url)).status_code == 200) != (name in alive):
                await asyncio.sleep(0.001)
        is_asked = bool(alive - {"m:4"})
        for path in ("", "/ready", "/config"):
            answer = await versions.client.get(f"/v2/models/m{path}")
            assert answer.status_code == (200 if is_asked else 503), (alive, path)
        for _ in range(10):
            answer = await versions.infer()
            assert answer.status_code == (200 if is_asked else 503), (alive, answer.text)
            version = answer.json().get("model_version", "4")
            assert not is_asked or versioned("m", version) in alive - {"m:4"}


SIGNATURES: dict[str, ModelSignature | None] = dict.fromkeys(["m", "m:2", "m:3", "m:4", "m:5"])
TERMS = (("m", {}), ("m:2", {"share_pct": 5}), ("m:3", {"share_pct": 20}), ("m:4", {"share_pct": 0}))


def test_a_split_is_without_bias_and_adds_up() -> None:
    split = traffic_splits(plan_of(*TERMS).models, SIGNATURES.__contains__, SIGNATURES.__getitem__)["m"]
    draw = random.Random(7)
    count = 100_000
    found = Counter(split.choose(draw.random()) for _ in range(count))
    for name, part in {"m": 0.75, "m:2": 0.05, "m:3": 0.2}.items():
        assert abs(found[name] - part * count) < 5.0 * (count * part * (1.0 - part)) ** 0.5  # five standard deviations
    assert found["m:4"] == 0


def test_what_is_not_ready_gives_its_share_to_what_is() -> None:
    """Whatever is ready: what is not gets nothing, a version without a part in the split gets nothing, canaries keep
    their proportions, and all of it is the whole."""
    shares = {"m:2": 5.0, "m:3": 20.0, "m:5": 60.0}
    specs = plan_of(*TERMS, ("m:5", {"share_pct": 60})).models
    names = sorted(SIGNATURES)
    for ready in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1)):
        split = traffic_splits(specs, ready.__contains__, SIGNATURES.__getitem__)["m"]
        part, last = {}, 0.0
        for below, name in (*split.canaries, (1.0, split.rest)):
            part[name], last = below - last, below
        asked = {name: share for name, share in shares.items() if name in ready}
        if "m" in ready:
            expected = {name: share / 100.0 for name, share in asked.items()}
            expected["m"] = 1.0 - sum(expected.values())
        elif asked:
            expected = {name: share / sum(asked.values()) for name, share in asked.items()}
        else:
            expected = {"m": 1.0}  # which says why nothing is answered
        assert part == pytest.approx(expected), ready


def test_a_version_of_other_tensors_has_no_part_in_the_split(caplog: pytest.LogCaptureFixture) -> None:
    specs = plan_of(("m", {}), ("m:2", {"share_pct": 5})).models
    signature = FakeGpulet("m", ("m",)).signatures()["m"]
    other = replace(signature, inputs=(replace(signature.inputs[0], shape=(3,)),))
    signatures = {"m": signature, "m:2": other}
    for ready in (["m", "m:2"], ["m:2"]):
        assert traffic_splits(specs, ready.__contains__, signatures.__getitem__)["m"].canaries == ()
        assert "m:2 is sent none of the requests of 'm': it has inputs x float32[3]" in caplog.text
        caplog.clear()


async def test_a_handle_names_a_version_or_leaves_it_to_the_split(start: Start) -> None:
    plan = plan_of(("m", {}), ("m:2", {"share_pct": 50}), ("m:3", {"shadow": True}))
    gpulets = [FakeGpulet(name, (name,)) for name in ("m", "m:2", "m:3")]
    cluster = await start(plan, *gpulets)
    handle = TenutoHandle(await cluster.gateway())
    for _ in range(3):
        await handle.infer("m", {"x": [1, 2]}, version="2")
    assert [sum(gpulet.sizes) for gpulet in gpulets] == [0, 3, 0]
    for _ in range(60):
        assert (await handle.infer("m", {"x": [1, 2]}))["y"].tolist() == [2, 4]
    assert sum(gpulets[0].sizes) > 0
    assert sum(gpulets[1].sizes) > 3
    assert sum(gpulets[2].sizes) > 0
    with pytest.raises(InvalidInputError, match=r"'m' has no version '7'\. Versions here: 1, 2, 3\."):
        await handle.infer("m", {"x": [1, 2]}, version="7")
    gpulets[0].die()
    await until(lambda: "m" not in handle.models)
    before = sum(gpulets[1].sizes)
    for _ in range(20):
        assert (await handle.infer("m", {"x": [1, 2]}))["y"].tolist() == [2, 4]
    assert sum(gpulets[1].sizes) == before + 20
