"""Applications asked like models at the gateway: what flows, what the answer says, and how a request ends when a stage
does not answer."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tenuto.batching.core.build import from_plan
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.dispatcher_process import BundleServer
from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.entry.service.running_graph import RunningGraph, StageRequests
from tenuto.deployments.entry.service.traces import Traces
from tenuto.deployments.wire.peer import Endpoint
from tenuto.deployments.wire.tensors import Blocks
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
from tests.deployments.entry.test_gateway import TENSOR, Bench
from tests.deployments.gpulet.test_streaming_gpulet import OWN, start
from tests.instruments.asking import http_client, until, until_ready
from tests.instruments.fake_gpulet import SIGNATURE, FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S

WIDE = 1 << 14  # numbers of a tensor that is handed on in shared memory
VECTOR = {
    size: (TensorSignature("x", "float32", (size,)), TensorSignature("y", "float32", (size,))) for size in (2, WIDE)
}


def doubling(size: int) -> ModelSignature:
    taken, made = VECTOR[size]
    return ModelSignature("tensor", (taken,), (made,), platform="fake")


class Gpulets(FakeGpulet):
    """Knows m and n (y = 2x), `sum` (z = a + b), and `wide` and `wider`, which double long tensors."""

    SIGNATURES: Mapping[str, ModelSignature] = {
        "m": SIGNATURE,
        "n": SIGNATURE,
        "sum": ModelSignature(
            "tensor",
            (TensorSignature("a", "float32", (2,)), TensorSignature("b", "float32", (2,))),
            (TensorSignature("z", "float32", (2,)),),
        ),
        "wide": doubling(WIDE),
        "wider": doubling(WIDE),
    }

    def signatures(self) -> dict[str, ModelSignature]:
        return {name: self.SIGNATURES[name] for name in self.programs}

    def compute(self, model: str, blocks: Blocks) -> dict[str, np.ndarray]:
        if model == "sum":
            return {"z": np.concatenate(blocks["a"]) + np.concatenate(blocks["b"])}
        return super().compute(model, blocks)


MODELS = ("m", "n", "sum", "wide", "wider")


def plan(*stages: Mapping[str, Any], slo_ms: float = 60_000.0, **more: Any) -> Plan:
    """A plan of five models, each on a gpu-let of its name, and an application `app` of these stages."""
    application = {"name": "app", "rate_rps": 10, "slo_ms": slo_ms, "stages": [{"shared": True, **s} for s in stages]}
    data = make_plan(*((name, (name,)) for name in MODELS), slo_ms=60_000.0).to_data()
    return Plan.from_data({**data, "applications": [{**application, **more}]})


CHAIN = ({"model": "m"}, {"model": "n", "inputs": {"x": "m.y"}})
DIAMOND = (
    {"model": "m", "inputs": {"x": "left"}},
    {"model": "n", "inputs": {"x": "right"}},
    {"model": "sum", "inputs": {"a": "m.y", "b": "n.y"}},
    {"model": "m", "name": "last", "inputs": {"x": "sum.z"}},
)


class Served(Bench):
    """A gateway over gpu-lets of all models, with the dispatcher in it or beside it."""

    def __init__(self, *, is_beside: bool = True) -> None:
        super().__init__()
        self.gpulets.clear()
        self.gpulets |= {name: Gpulets(name, (name,)) for name in MODELS}
        self.server: BundleServer | None = None
        if not is_beside:
            self.begin_dispatcher()
            self.entry = Entry(finder(self.gpulets), lambda _name: self.find)

    def begin_dispatcher(self) -> None:
        """Be a dispatcher beside the gateway, in the place of one that has ended."""
        dispatcher = Dispatcher(
            lambda plan, network: make_scheduler("eager", from_plan(plan, network), {}),
            finder(self.gpulets),
            on_change=lambda: server.announce(),
        )
        self.server = server = BundleServer(dispatcher)

    async def end_dispatcher(self) -> None:
        """End the dispatcher beside the gateway at once; another one takes its place."""
        assert self.server is not None
        server = self.server
        self.begin_dispatcher()
        await server.dispatcher.close()
        await server.close(0.0)

    async def find(self) -> Endpoint:
        assert self.server is not None
        return await self.server.listen()

    async def start(self, plan: Plan, **options: Any) -> None:
        for gpulet in self.gpulets.values():
            await gpulet.start()
        await self.serve(plan, **options)

    async def serve(self, plan: Plan, **options: Any) -> None:
        if self.server is not None:
            self.server.dispatcher.apply(plan)
            options = {"sub_clusters": {"0": [spec.name for spec in plan.models]}, **options}
        await self.follow(plan, **options)
        await until_ready(self.client)

    async def close(self) -> None:
        await super().close()
        if self.server is not None:
            await self.server.close(0.0)
        for gpulet in self.gpulets.values():
            gpulet.die()  # also those whose gateway has left them

    async def open_requests(self) -> dict[str, int]:
        """What waits for a batch, by model, where anything does."""
        try:
            waiting = await self.entry.service.dispatching.waiting()
        except TimeoutError:  # a loop that stood still for seconds has lost its dispatcher, and finds it again
            return {"unknown": 1}
        return {name: count for name, count in waiting.items() if count}

    async def until_open(self, **requests: int) -> None:
        """Wait until so many requests wait for a batch, by model, and no others."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.open_requests() != requests:
                await asyncio.sleep(0.001)


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    made = Served(is_beside=getattr(request, "param", "beside") == "beside")
    await made.start(plan(*CHAIN))
    yield made
    await nothing_is_left(made)
    await made.close()


async def nothing_is_left(served: Served) -> None:
    """No request is open and no memory held, and every request that began is counted once."""
    arena = served.entry.service.arena
    assert arena is not None

    def under_way() -> dict[str, int]:
        counts = served.entry.service.application_counters.status()
        return {name: each.under_way for name, each in counts.items() if each.under_way}

    async with asyncio.timeout(PATIENCE_S):
        # A gpu-let may still run what was withdrawn, and a client that has left may not be missed yet.
        while await served.open_requests() or arena.used_bytes or under_way():
            await asyncio.sleep(0.005)


WAYS = pytest.mark.parametrize("served", ["beside", "elsewhere"], indirect=True)


async def post_in_bytes(client: httpx.AsyncClient, values: NDArray[np.float32]) -> httpx.Response:
    """Ask the application with a tensor in bytes."""
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, len(values)],
        "parameters": {"binary_data_size": values.nbytes},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return await client.post("/v2/models/app/infer", content=head + values.tobytes(), headers=headers)


async def ask_in_bytes(
    client: httpx.AsyncClient, values: NDArray[np.float32]
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Ask the application with a tensor in bytes; return the JSON of its answer and the numbers behind it."""
    answer = await post_in_bytes(client, values)
    assert answer.status_code == 200, answer.text
    length = int(answer.headers["inference-header-content-length"])
    return json.loads(answer.content[:length]), np.frombuffer(answer.content[length:], np.float32)


def outputs(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {each["name"]: (each["shape"], each["data"]) for each in answer.json()["outputs"]}


@WAYS
async def test_outputs_of_one_stage_are_inputs_of_the_next(served: Served) -> None:
    answer = await served.infer("app", X_Request_Id="mine")
    assert outputs(answer) == {"y": ([1, 2], [4.0, 8.0])}
    said = answer.json()
    assert (said["model_name"], said["model_version"]) == ("app", "1")
    parameters = said["parameters"]
    assert (
        0.0 < parameters["m.begin_ms"] <= parameters["m.end_ms"] <= parameters["n.begin_ms"] <= parameters["n.end_ms"]
    )
    assert (parameters["m.requests"], parameters["emulated"]) == (1, False)
    assert answer.headers["x-tenuto-request-id"] == "mine"
    assert answer.headers["x-tenuto-stages"].startswith("m;begin=")
    ended = (await served.client.get("/requests", params={"id": "mine"})).json()
    assert {each["model"]: each["outcome"] for each in ended} == {"m": "ok", "n": "ok", "app": "ok"}


def diamond(samples: int) -> dict[str, Any]:
    values = np.arange(2 * samples, dtype=np.float32)
    tensors = {"left": values, "right": 10 * values}
    given = [{"name": n, "datatype": "FP32", "shape": [samples, 2], "data": v.tolist()} for n, v in tensors.items()]
    return {"inputs": given}


@pytest.mark.parametrize("samples", [1, 3])
async def test_stages_fork_and_join_for_each_sample(served: Served, samples: int) -> None:
    await served.serve(plan(*DIAMOND))
    answer = await served.infer("app", diamond(samples))
    assert outputs(answer) == {"y": ([samples, 2], [44.0 * each for each in range(2 * samples)])}


async def test_an_answer_names_outputs_of_several_stages_and_of_several_requests(served: Served) -> None:
    stages = ({"model": "m"}, {"model": "n", "count": 3, "inputs": {"x": "m.y"}})
    await served.serve(plan(*stages, outputs={"first": "m.y", "all": "n.y"}))
    answer = await served.infer("app")
    assert outputs(answer) == {"first": ([1, 2], [2.0, 4.0]), "all": ([1, 3, 2], [4.0, 8.0] * 3)}
    assert answer.json()["parameters"]["n.requests"] == 3
    one = await served.infer("app", {"inputs": [TENSOR], "outputs": [{"name": "first"}]})
    assert outputs(one) == {"first": ([1, 2], [2.0, 4.0])}
    none = await served.infer("app", {"inputs": [TENSOR], "outputs": [{"name": "y"}]})
    assert (none.status_code, none.json()["error"]) == (400, "unknown output 'y'. The model's outputs: first, all.")
    await served.serve(plan({"model": "m"}, {"model": "n"}))
    assert outputs(await served.infer("app")) == {"m.y": ([1, 2], [2.0, 4.0]), "n.y": ([1, 2], [2.0, 4.0])}


@WAYS
@pytest.mark.parametrize("is_answered", [False, True])
async def test_long_tensors_are_handed_on_in_shared_memory(served: Served, is_answered: bool) -> None:
    stages = ({"model": "wide"}, {"model": "wider", "count": 2, "inputs": {"x": "wide.y"}})
    await served.serve(plan(*stages, outputs={"first": "wide.y", "y": "wider.y"} if is_answered else None))
    values = np.arange(WIDE, dtype=np.float32)
    _, found = await ask_in_bytes(served.client, values)
    expected = [2 * values] * is_answered + [4 * values, 4 * values]
    assert np.array_equal(found, np.concatenate(expected))
    assert [served.gpulets[name].bodies for name in ("wide", "wider")] == [[0], [0, 0]]  # nothing went by socket


async def test_a_request_has_one_deadline_which_its_client_may_shorten(served: Served) -> None:
    for gpulet in served.gpulets.values():
        gpulet.hold = True
    in_body = {"inputs": [TENSOR], "parameters": {"slo_ms": 1}}
    for answer in (await served.infer("app", X_SLO_Ms="1"), await served.infer("app", in_body)):
        assert (answer.status_code, answer.json()["outcome"]) == (504, "expired")
        assert "stage 'm' and what follows cannot end" in answer.json()["error"]
    assert served.gpulets["m"].sizes == []  # turned away before it cost anything


async def test_what_can_no_longer_end_is_given_up_before_the_next_stage(served: Served) -> None:
    served.gpulets["m"].hold = True
    asked = asyncio.create_task(served.infer("app", X_SLO_Ms="400"))
    await asyncio.wait_for(served.gpulets["m"].arrived.wait(), PATIENCE_S)
    answer = await asked
    assert (answer.status_code, answer.json()["error"].partition(":")[0]) == (504, "stage 'm'")
    served.gpulets["m"].release()
    assert served.gpulets["n"].sizes == []


@WAYS
async def test_when_a_stage_fails_the_others_are_withdrawn_and_the_answer_names_it(served: Served) -> None:
    await served.serve(plan(*DIAMOND))
    served.gpulets["m"].hold = True
    served.gpulets["n"].error = "its weights are gone"
    other = asyncio.create_task(served.infer("m"))  # holds the gpu-let, so that stage m waits for a batch
    await asyncio.wait_for(served.gpulets["m"].arrived.wait(), PATIENCE_S)
    answer = await served.infer("app", diamond(2))
    assert (answer.status_code, answer.json()["error"]) == (500, "stage 'n': its weights are gone")
    assert await served.open_requests() == {}
    served.gpulets["m"].release()
    assert (await other).status_code == 200
    assert served.gpulets["m"].sizes == [1]


@pytest.mark.parametrize(("place", "status"), [(0, 503), (1, 503), (2, 503)])
async def test_a_gpulet_that_dies_is_answered_once_and_by_name(served: Served, place: int, status: int) -> None:
    await served.serve(plan(*DIAMOND[:3]))
    name = ("m", "n", "sum")[place]
    served.gpulets[name].hold = True
    asked = asyncio.create_task(served.infer("app", diamond(1)))
    await asyncio.wait_for(served.gpulets[name].arrived.wait(), PATIENCE_S)
    for _ in range(2):  # what it ran is tried once more
        served.gpulets[name].die()
        if asked.done():
            break
        served.gpulets[name].arrived.clear()
        await served.gpulets[name].start()
        await asyncio.wait(
            [asked, asyncio.create_task(served.gpulets[name].arrived.wait())], return_when=asyncio.FIRST_COMPLETED
        )
    answer = await asked
    assert answer.status_code == status
    assert answer.json()["error"].startswith(f"stage '{name}': the gpu-let that executed this batch died")
    served.gpulets[name].hold = False


@WAYS
async def test_a_client_that_leaves_takes_all_its_stages_along(served: Served) -> None:
    await served.serve(plan(*DIAMOND))
    served.gpulets["m"].hold = served.gpulets["n"].hold = True
    other = [asyncio.create_task(served.infer(name)) for name in ("m", "n")]
    for name in ("m", "n"):
        await asyncio.wait_for(served.gpulets[name].arrived.wait(), PATIENCE_S)
    async with http_client(served.client.base_url) as leaving:
        asked = asyncio.create_task(leaving.post("/v2/models/app/infer", json=diamond(2)))
        await served.until_open(m=2, n=2)
        asked.cancel()
    await served.until_open()
    for name in ("m", "n"):
        served.gpulets[name].release()
    assert [(await each).status_code for each in other] == [200, 200]


@WAYS
async def test_requests_under_way_end_on_the_graph_that_they_began_with(served: Served) -> None:
    served.gpulets["m"].hold = True
    before = asyncio.create_task(served.infer("app"))
    await asyncio.wait_for(served.gpulets["m"].arrived.wait(), PATIENCE_S)
    await served.serve(plan({"model": "m"}))
    served.gpulets["m"].hold = False
    served.gpulets["m"].release()
    assert outputs(await before) == {"y": ([1, 2], [4.0, 8.0])}
    assert outputs(await served.infer("app")) == {"y": ([1, 2], [2.0, 4.0])}


async def test_requests_whose_next_model_is_gone_are_told_so(served: Served) -> None:
    served.gpulets["m"].hold = True
    asked = asyncio.create_task(served.infer("app"))
    await asyncio.wait_for(served.gpulets["m"].arrived.wait(), PATIENCE_S)
    await served.serve(make_plan(("m", ("m",)), slo_ms=60_000.0))
    served.gpulets["m"].release()
    answer = await asked
    assert (answer.status_code, answer.json()["error"]) == (503, "stage 'n': 'n' was removed from the plan")
    assert (await served.infer("app")).status_code == 404


@pytest.mark.parametrize(
    ("stages", "more", "problem"),
    [
        (
            [{"model": "m"}, {"model": "sum", "inputs": {"a": "m.y"}}],
            {},
            "'b': is an input of its model without a source. Name one, `inputs: {b: …}`, or make",
        ),
        ([{"model": "m", "inputs": {"x": "x", "u": "x"}}], {}, "'u': is no input of its model"),
        (
            [{"model": "m"}, {"model": "n", "inputs": {"x": "m.z"}}],
            {},
            "'z': is no output of stage 'm'. Its outputs: y",
        ),
        ([{"model": "m"}], {"outputs": {"y": "m.z"}}, "outputs.y: 'z': is no output of stage 'm'"),
        ([{"model": "m"}, {"model": "wide", "inputs": {"x": "m.y"}}], {}, "does not fit input 'x': its shape is [2]"),
        ([{"model": "m"}, {"model": "wide"}], {}, "'x': is an input of another stage as well, and does not fit"),
    ],
)
async def test_an_application_that_does_not_fit_its_models_is_not_ready_and_says_why(
    served: Served, stages: list[dict[str, Any]], more: dict[str, Any], problem: str
) -> None:
    await served.serve(plan(*stages, **more))
    answer = await served.infer("app")
    assert (answer.status_code, problem in answer.json()["error"]) == (503, True), answer.text
    assert outputs(await served.infer("m")) == {"y": ([1, 2], [2.0, 4.0])}


async def test_a_stage_without_a_host_is_named(served: Served) -> None:
    served.gpulets["n"].die()
    await until(lambda: not served.entry.service.dispatching.is_ready("n"))
    answer = await served.infer("app")
    assert answer.status_code == 503
    assert answer.json()["error"] == "no gpu-let of stage n of 'app' is ready. Retry in a few seconds."
    await served.gpulets["n"].start()
    await until(lambda: served.entry.service.dispatching.is_ready("n"))
    assert outputs(await served.infer("app")) == {"y": ([1, 2], [4.0, 8.0])}


async def test_the_answer_has_what_is_left_where_the_application_says_so(served: Served) -> None:
    stages = ({"model": "m"}, {"model": "n", "allow_missing": True}, {"model": "sum", "inputs": {"a": "m.y", "b": "x"}})
    await served.serve(plan(*stages, outputs={"sum": "sum.z", "extra": "n.y"}))
    assert outputs(await served.infer("app")) == {"sum": ([1, 2], [3.0, 6.0]), "extra": ([1, 2], [2.0, 4.0])}
    served.gpulets["n"].error = "broken"
    assert outputs(await served.infer("app")) == {"sum": ([1, 2], [3.0, 6.0])}


async def test_an_answer_may_lack_the_stage_that_ends_last(served: Served) -> None:
    stages = ({"model": "m"}, {"model": "n", "after": ["m"], "inputs": {"x": "m.y"}, "allow_missing": True})
    await served.serve(plan(*stages, outputs={"y": "m.y", "extra": "n.y"}))
    served.gpulets["n"].error = "broken"
    assert outputs(await served.infer("app")) == {"y": ([1, 2], [2.0, 4.0])}


async def test_an_application_is_described_as_a_model_is(served: Served) -> None:
    await served.serve(plan(*DIAMOND))
    for prefix in ("/v2/models/app", "/v2/models/app/versions/1"):
        metadata = (await served.client.get(prefix)).json()
        assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("app", ["1"], "ensemble")
        assert [each["name"] for each in metadata["inputs"]] == ["left", "right"]
        assert metadata["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}]
        assert (await served.client.get(f"{prefix}/ready")).json() == {"name": "app", "ready": True}
        config = (await served.client.get(f"{prefix}/config")).json()
        assert (config["max_batch_size"], config["input"][1]["dims"]) == (1024, [2])
    index = (await served.client.post("/v2/repository/index")).json()
    assert {"name": "app", "version": "1", "state": "READY"} in index
    assert (await served.client.get("/v2/models/app/versions/2")).status_code == 404
    served.gpulets["sum"].die()
    await until(lambda: not served.entry.service.dispatching.is_ready("sum"))
    ready = await served.client.get("/v2/models/app/ready")
    assert (ready.status_code, "stage sum" in ready.json()["error"]) == (503, True)
    index = (await served.client.post("/v2/repository/index")).json()
    assert {"name": "app", "version": "1", "state": "UNAVAILABLE"} in index
    await served.gpulets["sum"].start()
    await until(lambda: served.entry.service.dispatching.is_ready("sum"))


async def test_requests_of_applications_are_counted_and_kept_by_themselves(served: Served) -> None:
    await served.serve(plan({"model": "m"}, {"model": "n", "count": 2, "inputs": {"x": "m.y"}}))
    assert (await served.infer("app", X_Request_Id="good")).status_code == 200
    samples = {"inputs": [{**TENSOR, "shape": [3, 2], "data": [1.0] * 6}]}
    assert (await served.infer("app", samples)).status_code == 200
    assert (await served.infer("app", X_SLO_Ms="0.5", X_Request_Id="late")).status_code == 504
    served.gpulets["n"].error = "broken"
    assert (await served.infer("app", X_Request_Id="broken")).status_code == 500
    counts = (await served.status())["applications"]["app"]
    assert {key: counts[key] for key in ("ok", "expired", "failed", "submitted", "samples", "inferences")} == {
        "ok": 2,
        "expired": 1,
        "failed": 1,
        "submitted": 4,
        "samples": 6,
        "inferences": 4,
    }
    assert counts["lost_at"] == {"m": 1, "n": 1}
    for path in ("/v2/models/app/stats", "/v2/models/stats"):
        rows = (await served.client.get(path)).json()["model_stats"]
        (row,) = (each for each in rows if each["name"] == "app")
        success, fail = row["inference_stats"]["success"]["count"], row["inference_stats"]["fail"]["count"]
        assert (row["inference_count"], success, fail) == (4, 2, 2)
    metrics = (await served.client.get("/metrics")).text
    assert 'tenuto_application_requests_total{application="app",outcome="ok"} 2' in metrics
    assert 'tenuto_application_stage_seconds_count{application="app",stage="n"} 2' in metrics
    assert 'tenuto_application_requests_running{application="app"} 0' in metrics
    assert 'tenuto_application_stage_lost_requests_total{application="app",stage="n"} 1' in metrics
    (good,) = [each for each in await requests(served, "good") if each["model"] == "app"]
    assert (good["outcome"], good["stages"]["m"]["requests"], good["stages"]["n"]["requests"]) == ("ok", 1, 2)
    assert 0.0 <= good["stages"]["m"]["end_ms"] <= good["stages"]["n"]["begin_ms"] <= good["answered_ms"]
    assert [each["model"] for each in await requests(served, "good")].count("n") == 2
    (late,) = await requests(served, "late")
    assert (late["model"], late["outcome"], late["stages"]) == ("app", "expired", {})
    (broken,) = [each for each in await requests(served, "broken") if each["model"] == "app"]
    assert (broken["outcome"], [*broken["stages"]]) == ("failed", ["m"])
    served.gpulets["n"].error = None


async def requests(served: Served, id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await served.client.get("/requests", params={"id": id})).json()
    return found


@pytest.mark.parametrize("served", ["elsewhere"], indirect=True)
async def test_a_request_is_found_whichever_gateway_answered_it(served: Served) -> None:
    other = Bench()
    other.entry = Entry(finder(served.gpulets), lambda _name: served.find)
    await other.follow(plan(*CHAIN), sub_clusters={"0": MODELS})
    assert (await served.infer("app", X_Request_Id="mine")).status_code == 200

    async def found_over(bench: Bench) -> list[dict[str, Any]]:
        ended = (await bench.client.get("/requests", params={"id": "mine"})).json()
        return [each for each in ended if each["model"] == "app"]

    first = await found_over(served)
    async with asyncio.timeout(PATIENCE_S):
        while (there := await found_over(other)) != first:
            await asyncio.sleep(0.05)
    assert [[*each["stages"]] for each in there] == [["m", "n"]]
    await other.close()
    assert await found_over(served) == first  # once, now that a dispatcher has it


async def test_a_key_for_an_application_does_not_need_its_models(served: Served) -> None:
    key, other = "k" * 40, "o" * 40
    digests = [hashlib.sha256(each.encode()).hexdigest() for each in (key, other)]
    keys = [
        {"name": "theirs", "sha256": digests[0], "models": ["app"], "rate_rps": 2.0, "burst": 2},
        {"name": "others", "sha256": digests[1], "models": ["m", "n"]},
    ]
    await served.follow(plan(*CHAIN), keys=keys)
    allowed = await served.infer("app", X_Api_Key=key)
    assert (allowed.status_code, outputs(allowed)) == (200, {"y": ([1, 2], [4.0, 8.0])})
    assert (await served.infer("m", X_Api_Key=key)).status_code == 403
    assert (await served.infer("app", X_Api_Key=other)).status_code == 403
    index = (await served.client.post("/v2/repository/index", headers={"X-Api-Key": other})).json()
    assert {each["name"] for each in index} == {"m", "n"}
    await served.serve(plan(*CHAIN))


async def test_a_traced_request_has_a_span_for_each_stage(served: Served) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    traces = served.entry.service.traces = Traces(exporter, ratio=1.0)
    assert (await served.infer("app")).status_code == 200
    served.gpulets["n"].error = "broken"
    assert (await served.infer("app")).status_code == 500
    served.gpulets["n"].error = None
    served.entry.service.traces = None
    traces.close()
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.name == "infer app"]
    assert [span.attributes["tenuto.outcome"] for span in roots] == ["ok", "failed"]
    names = [[each.name for each in spans if each.parent == root.context] for root in roots]
    assert names == [["m", "n"], ["m"]]


async def test_a_version_on_trial_gets_its_share_of_what_stages_ask(served: Served) -> None:
    """As of plain requests; then it is the one that the stage names, and the next is on trial."""
    doubling_again = Gpulets("m:2", ("m:2",))
    doubling_again.SIGNATURES = {"m:2": SIGNATURE}  # type: ignore[misc]
    served.gpulets["m:2"] = doubling_again
    await doubling_again.start()

    def tried(main: str, other: str) -> Plan:
        terms = {other: {"share_pct": 50.0}}
        data = make_plan(*((name, (name,)) for name in ("m", "m:2", "n")), slo_ms=60_000.0, terms=terms).to_data()
        stages = [{"model": main, "name": "m"}, {"model": "n", "inputs": {"x": "m.y"}}]
        app = {"name": "app", "rate_rps": 10, "slo_ms": 60_000.0, "stages": [{"shared": True, **s} for s in stages]}
        return Plan.from_data({**data, "applications": [app]})

    for main, other in (("m", "m:2"), ("m:2", "m")):
        await served.serve(tried(main, other))
        for name in ("m", "m:2"):
            served.gpulets[name].sizes.clear()
        for _ in range(40):
            assert outputs(await served.infer("app")) == {"y": ([1, 2], [4.0, 8.0])}
        ran = {name: sum(served.gpulets[name].sizes) for name in ("m", "m:2")}
        assert sum(ran.values()) == 40
        assert 0 < ran["m"] < 40
    await served.serve(plan(*CHAIN))


async def test_a_shadow_gets_copies_of_what_stages_ask(served: Served) -> None:
    """Also of what lies in shared memory; whatever it does with them, nobody notices."""
    shadow = Gpulets("wide:2", ("wide:2",))
    shadow.SIGNATURES = {"wide:2": doubling(WIDE)}  # type: ignore[misc]
    served.gpulets["wide:2"] = shadow
    await shadow.start()
    names, terms = ("wide", "wide:2", "wider"), {"wide:2": {"shadow": True}}
    data = make_plan(*((name, (name,)) for name in names), slo_ms=60_000.0, terms=terms).to_data()
    stages = [{"model": "wider"}, {"model": "wide", "inputs": {"x": "wider.y"}}]
    app = {"name": "app", "rate_rps": 10, "slo_ms": 60_000.0, "stages": [{"shared": True, **s} for s in stages]}
    await served.serve(Plan.from_data({**data, "applications": [app]}))
    values = np.arange(WIDE, dtype=np.float32)
    given = {"name": "x", "datatype": "FP32", "shape": [1, WIDE], "data": values.tolist()}
    for error in (None, "broken"):
        shadow.error = error
        for _ in range(10):
            assert (await served.infer("app", {"inputs": [given]})).status_code == 200
    await until(lambda: sum(shadow.sizes) > 0)
    status = (await served.client.get("/status")).json()["models"]
    assert (status["wide"]["ok"], status["wide"]["submitted"]) == (20, 20)
    assert status["wide:2"]["submitted"] == 20
    shadow.die()
    assert (await served.infer("app", {"inputs": [given]})).status_code == 200
    await served.serve(plan(*CHAIN))


async def test_a_stage_that_is_turned_away_gives_its_status(served: Served) -> None:
    await served.follow(plan(*CHAIN), max_queued=1)
    served.gpulets["n"].hold = True
    others = [asyncio.create_task(served.infer("n")) for _ in range(2)]  # one runs, one waits
    await served.until_open(n=1)
    answer = await served.infer("app")
    assert (answer.status_code, answer.json()["outcome"]) == (429, "rejected")
    assert answer.json()["error"].startswith("stage 'n': 1 requests of 'n' are waiting")
    assert "retry-after" in answer.headers
    served.gpulets["n"].hold = False
    served.gpulets["n"].release()
    assert [(await each).status_code for each in others] == [200, 200]


@WAYS
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_every_request_ends_once_and_nothing_is_left(served: Served, seed: int) -> None:
    """Gpu-lets hold and fail batches, lose them and come back; clients leave; deadlines are short and long."""
    dice = random.Random(seed)
    branches = [{"model": "wider", "count": 2, "inputs": {"x": "wide.y"}}, {"model": "m", "allow_missing": True}]
    await served.serve(plan({"model": "wide", "inputs": {"x": "long"}}, *branches, {"model": "n", "after": ["wider"]}))
    values = np.arange(WIDE, dtype=np.float32)
    tensors = [
        {"name": "long", "datatype": "FP32", "shape": [1, WIDE], "parameters": {"binary_data_size": values.nbytes}},
        {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]},
    ]
    head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    statuses: list[int] = []

    async def ask(client: httpx.AsyncClient) -> None:
        slo_ms = dice.choice(("1", "50", "60000"))
        headers = {"Inference-Header-Content-Length": str(len(head)), "X-SLO-Ms": slo_ms}
        answer = await client.post("/v2/models/app/infer", content=head + values.tobytes(), headers=headers)
        statuses.append(answer.status_code)

    async with http_client(served.client.base_url) as client:
        asked = []
        for _ in range(60):
            asked.append(asyncio.create_task(ask(client)))
            gpulet = served.gpulets[dice.choice(("wide", "wider", "m", "n"))]
            match dice.randrange(8):
                case 0:
                    gpulet.hold = True
                case 1:
                    gpulet.error = dice.choice((None, "broken"))
                case 2:
                    dice.choice(asked).cancel()
                case 3:
                    gpulet.die()
                    await gpulet.start()
                case _:
                    gpulet.hold = False
                    gpulet.release()
            await asyncio.sleep(dice.choice((0.0, 0.002)))
        for gpulet in served.gpulets.values():
            gpulet.hold, gpulet.error = False, None
            gpulet.release()
        await asyncio.gather(*asked, return_exceptions=True)
    assert set(statuses) <= {200, 429, 500, 503, 504}, statuses
    await nothing_is_left(served)
    counts = served.entry.service.application_counters.status()["app"]
    assert counts.submitted == counts.ended + counts.cancelled
    assert counts.ended >= len([each for each in statuses if each == 200])


async def test_requests_that_have_ended_leave_nothing_to_pythons_collector(served: Served) -> None:
    """With very many objects it stops the process for a while."""

    def running() -> int:
        return sum(isinstance(each, RunningGraph | StageRequests) for each in gc.get_objects())

    await served.serve(plan(*DIAMOND))
    gc.collect()
    gc.disable()
    try:
        for error in (None, "broken"):
            served.gpulets["sum"].error = error
            for samples in (1, 3):
                assert (await served.infer("app", diamond(samples))).status_code == (500 if error else 200)
        assert (await served.infer("app", diamond(1), X_SLO_Ms="1")).status_code == 504
        served.gpulets["sum"].error = None
        assert running() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("slo_ms", ["nan", "inf", "-inf", "1e308", "1e400", "", "1,2"])
async def test_a_deadline_that_is_no_number_is_refused(served: Served, slo_ms: str) -> None:
    in_body = {"inputs": [TENSOR], "parameters": {"slo_ms": slo_ms}}
    for answer in (await served.infer("app", X_SLO_Ms=slo_ms), await served.infer("app", in_body)):
        assert (answer.status_code, "Give a number of at most 3600000" in answer.json()["error"]) == (400, True)
    assert served.gpulets["m"].sizes == []


@pytest.mark.parametrize("slo_ms", [-1, 0, -1e30])
async def test_a_deadline_that_is_over_costs_nothing(served: Served, slo_ms: float) -> None:
    in_body = {"inputs": [TENSOR], "parameters": {"slo_ms": slo_ms}}
    for answer in (await served.infer("app", X_SLO_Ms=f"{slo_ms:g}"), await served.infer("app", in_body)):
        assert answer.status_code == 504
    assert served.gpulets["m"].sizes == []


@pytest.mark.parametrize(
    "tensor",
    [
        {"shape": [2, 2]},
        {"shape": [1, -2]},
        {"shape": [10**18, 2]},
        {"shape": [0, 2], "data": []},
        {"datatype": "BYTES"},
        {"name": "body"},
        {"name": "m.y"},
        *({"data": [], "parameters": {"binary_data_size": size}} for size in (10**12, -1, 7, "x")),
    ],
)
async def test_a_body_that_lies_of_its_tensors_costs_nothing(served: Served, tensor: dict[str, Any]) -> None:
    head = json.dumps({"inputs": [{**TENSOR, **tensor}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = await served.client.post("/v2/models/app/infer", content=head + bytes(8), headers=headers)
    assert answer.status_code == 400, answer.text
    assert served.gpulets["m"].sizes == []


async def test_an_application_is_no_model_of_another_interface_and_its_stages_have_no_names(served: Served) -> None:
    for path, document in (
        ("/v1/chat/completions", {"model": "app", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"model": "app", "input": "x"}),
        ("/v2/models/app/generate", {"text_input": "x"}),
        ("/v2/models/app.m/infer", {"inputs": [TENSOR]}),
        ("/v2/models/app:1/infer", {"inputs": [TENSOR]}),
        ("/v2/models/app/versions/2/infer", {"inputs": [TENSOR]}),
    ):
        assert (await served.client.post(path, json=document)).status_code in (400, 404), path
    assert served.gpulets["m"].sizes == []


async def test_so_many_samples_that_one_turn_would_be_long_are_refused(served: Served) -> None:
    await served.serve(plan({"model": "m", "count": 5}))
    tensor = {"name": "x", "datatype": "FP32", "shape": [205, 2], "data": [1.0] * 410}
    answer = await served.infer("app", {"inputs": [tensor]})
    assert (answer.status_code, "begin 1025 requests; 1024 are the most" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("executor", ["torch", "emulated"])
async def test_real_gpulets_hand_on_what_their_networks_made(executor: str) -> None:
    """In a process of their own; long tensors lie in the gateway's memory."""
    pytest.importorskip("torch")
    latency = {"alpha_ms": 1.0, "beta_ms": 6.0}
    tensors = {
        key: [{"name": name, "dtype": "float32", "shape": [WIDE]}] for key, name in (("inputs", "x"), ("outputs", "y"))
    }
    options = {"width": WIDE} if executor == "torch" else tensors
    source = {"source": f"{OWN}:scale"} if executor == "torch" else {}
    names = ("first", "second")
    stages = [{"model": "first"}, {"model": "second", "inputs": {"x": "first.y"}}]
    replica = {"batch_size": 4, "latency": latency, "latency_ms": 10.0}
    app = {"name": "app", "rate_rps": 1, "slo_ms": 60_000, "stages": [{"shared": True, **stage} for stage in stages]}
    made = Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "n0/0", "type": "cpu" if executor == "torch" else "v100"}],
            "gpulets": [{"id": "n0/0/a", "gpu": "n0/0", "models": [{"name": name, **replica} for name in names]}],
            "models": [
                {"name": name, "rate_rps": 9, "slo_ms": 60_000, "latency": latency, "options": options, **source}
                for name in names
            ],
            "applications": [{**app, "outputs": {"y": "second.y"}}],
        }
    )
    gpulet = await start(made, executor)
    bench = Bench()
    bench.entry = Entry(lambda _: gpulet.endpoint)
    await bench.follow(made)
    await until_ready(bench.client, "/v2/models/app/ready")
    values = np.arange(WIDE, dtype=np.float32)
    document, found = await ask_in_bytes(bench.client, values)
    expected = 4 * values if executor == "torch" else 0 * values
    assert np.array_equal(found, expected)
    assert document["parameters"]["emulated"] is (executor == "emulated")
    await bench.close()
    await gpulet.close()
