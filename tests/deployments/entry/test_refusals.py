"""Refusals that may pass say when to ask again, over every protocol; those that cannot pass do not."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenuto.deployments.entry.gateway import Entry
from tenuto.placement import Plan
from tests.instruments.asking import until
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S
from tests.instruments.served_grpc import Served

grpc = pytest.importorskip("grpc")
pytest.importorskip("h2")
messages = pytest.importorskip("tenuto.deployments.entry.protocols.grpc_messages")
message = messages.message

ROOT = Path(__file__).parents[3] / "deployments"

# Refusals with 429 or 503 without a time, by module and function, and why they cannot pass by waiting.
NEVER = {
    "entry/service/served_models.py: ready_interface": "the plan leaves the model unserved",
    "entry/protocols/embeddings.py: read_question": "the gateway's node cannot read the tokenizer",
    "entry/service/running_graph.py: _send_some": "the plan has the model no longer",
    "entry/service/running_graph.py: _send_request": "its inputs do not fit the model any more",
    "entry/service/running_graph.py: _send_prompt": "the plan has the model no longer",
    "entry/service/stage_text.py: _read": "the plan's model no longer generates",
    "offline/batch_routes.py: _refusal": "the path or the method is none of files and batches",
    "offline/batch_routes.py: checked": "the file does not have these bytes",
    "dispatch/dispatcher.py: _add": "the scheduler runs no offline work",
    "dispatch/open_requests.py: refuse_larger": "the model is not profiled for so large a request",
    "dispatch/open_requests.py: refuse_removed": "the plan has the model no longer",
    "dispatch/dispatcher_process.py: _generate": "the plan has the model no longer",
    "dispatch/dispatcher_process.py: _take": "the plan has the model no longer, or the request cannot be read",
    "dispatch/dispatcher_process.py: _give_back": "nobody reads it: the client has left",
}


def without_time(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Yield the functions that make a refusal with 429 or 503 and give no time to ask again."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and is_silent(node, node.func.id):
            yield inside
        yield from without_time(node, inside)


def is_silent(call: ast.Call, name: str) -> bool:
    given = {each.arg: each.value for each in call.keywords}
    constants = [each.value for each in call.args if isinstance(each, ast.Constant)]
    status = next((each for each in constants if type(each) is int), None)
    if name == "Refused":
        time = call.args[2] if len(call.args) > 2 else given.get("retry_after_s")
        if any(rule in ast.unparse(call) for rule in ("Rule.RAISED", "Rule.INPUT")):  # answered 500 or 400
            return False
    elif name == "HttpError":
        time = given.get("retry_after_s")
        status = status if isinstance(call.args[0], ast.Constant) else 503  # of a variable: it may be any
    elif name in ("JSONResponse", "Response"):
        return status in (429, 503) and "retry-after" not in ast.unparse(call)
    else:
        return False
    is_missing = time is None or (isinstance(time, ast.Constant) and time.value is None)
    return is_missing and (name == "Refused" or status in (429, 503))


def test_every_refusal_says_when_to_ask_again_or_why_never() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {function}"
        for path in sorted(ROOT.rglob("*.py"))
        for function in without_time(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == NEVER.keys()


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("HttpError(503, 'x')", True),
        ("HttpError(429, 'x', retry_after_s=None)", True),
        ("HttpError(status, 'x')", True),
        ("HttpError(404, 'x')", False),
        ("HttpError(503, 'x', retry_after_s=wait_s)", False),
        ("Refused(Outcome.REJECTED, 'x')", True),
        ("Refused(Outcome.FAILED, 'x', None, 'a', Rule.LOST)", True),
        ("Refused(Outcome.FAILED, 'x', None, 'a', Rule.RAISED)", False),
        ("Refused(Outcome.FAILED, 'x', 1.0)", False),
        ("JSONResponse({}, 503)", True),
        ("JSONResponse({}, 503, {'retry-after': '2'})", False),
        ("JSONResponse({}, 400)", False),
    ],
)
def test_the_search_knows_a_refusal(source: str, is_found: bool) -> None:
    assert list(without_time(ast.parse(f"def f():\n    return {source}"))) == ["f"] * is_found


def plan() -> Plan:
    """`m` is served, the gpu-let of `starts` does not come, and `never` is not served."""
    data = make_plan(("a", ("m",)), ("b", ("starts",)), models=("m", "starts", "never"), slo_ms=60_000.0).to_data()
    return Plan.from_data({**data, "unserved": ["never"], "unserved_reasons": {"never": "no room"}})


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    gpulets = {"a": made.gpulet, "b": FakeGpulet("b", ("starts",))}
    made.entry = Entry(finder(gpulets))
    keys: list[dict[str, Any]] = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "models": ["*"]} for name in ("anna", "ben")
    ]
    keys[1] |= {"rate_rps": 0.001, "burst": 1}
    await made.gpulet.start()
    await made.follow(plan(), keys=keys)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("model", "key", "status", "says", "retry_after_s"),
    [
        ("never", "anna", 503, "leaves 'never' unserved", None),
        ("starts", "anna", 503, "no gpu-let of 'starts' is ready", 2.0),
        ("m", "ben", 429, "more often than its key allows", 1000.0),
    ],
)
async def test_a_refusal_says_over_every_protocol_when_to_ask_again(
    served: Served, model: str, key: str, status: int, says: str, retry_after_s: float | None
) -> None:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", headers=headers) as http:
        await until(lambda: served.gpulet.is_connected)
        await http.get("/v2")  # which takes what the rate of one key allows
        body = {"model": model, "prompt": "x"}
        for answer in (
            await http.post(f"/v2/models/{model}/infer", json={"inputs": []}),
            await http.post("/v1/completions", json=body),
            await http.get(f"/v2/models/{model}/ready"),
            await http.get(f"/v2/models/{model}/config"),
        ):
            assert (answer.status_code, says in answer.text) == (status, True), answer.text
            header, told_s = answer.headers.get("retry-after"), answer.json().get("retry_after_s")
            if retry_after_s is None:
                assert (header, told_s) == (None, None)
            else:
                assert 0.9 * retry_after_s < told_s <= int(header) <= retry_after_s
        ready = await http.get("/v2/health/ready")
        assert (ready.status_code, ready.headers["retry-after"], ready.json()["ready"]) == (503, "2", False)
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 2]}]
    asked = messages.InferRequest(model_name=model, inputs=inputs, raw_input_contents=[bytes(8)]).SerializeToString()
    metadata = tuple(headers.items())
    call = served.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.aio.AioRpcError, match=says) as caught:
        await call(asked, metadata=metadata, timeout=PATIENCE_S, wait_for_ready=True)
    trailers = dict(caught.value.trailing_metadata())
    stream = served.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    if key == "anna":
        (answer,) = [each async for each in stream(iter([asked]), metadata=metadata, timeout=PATIENCE_S)]
        refused = message("inference.ModelStreamInferResponse").FromString(answer)
        told = {name: each.double_param for name, each in refused.infer_response.parameters.items()}
        assert says in refused.error_message
        assert told == ({} if retry_after_s is None else {"retry_after_s": retry_after_s})
    if retry_after_s is None:
        assert trailers.keys().isdisjoint({"retry-after", "grpc-retry-pushback-ms"})
    else:
        assert 0.9 * retry_after_s < int(trailers["grpc-retry-pushback-ms"]) / 1000.0 <= int(trailers["retry-after"])
