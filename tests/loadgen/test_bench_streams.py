"""Models that generate under load: what is sent, when a stream's tokens came, and by which bounds it is judged."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.clients.client import Client, ClientJob, ClientReport, ModelTarget
from tenuto.loadgen.schedule import make_client_schedule
from tenuto.loadgen.senders.answer_reader import AnswerReader
from tenuto.loadgen.senders.http_sender import HttpSender
from tenuto.loadgen.senders.payloads import Prompts
from tenuto.outcome import Outcome
from tenuto.placement import Arrival, ModelSpec, Workload
from tests.instruments.fake_server import Answer, FakeServer, fake_server, signature
from tests.instruments.live import LONG_MS, PATIENCE_S

EVENTS = "Content-Type: text/event-stream; charset=utf-8\r\nX-Tenuto-Gpulet: n0/0/A\r\n"


def event(text: str = "", finish: str | None = None, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}], **more}).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    told = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3}}
    return b"data: " + json.dumps(told).encode() + b"\n\ndata: [DONE]\n\n"


def stream(tokens: int = 4, gap_s: float = 0.0) -> Answer:
    pieces = (*(event("x") for _ in range(tokens)), event("", "length"), usage(tokens))
    return Answer(headers=EVENTS, pieces=pieces, gap_s=gap_s)


def writes(ttft_ms: float = LONG_MS, tpot_ms: float = LONG_MS, rate: float = 100.0) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "w",
            "rate_rps": rate,
            "slo": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms},
            "generates": {"prompt_tokens": {"quantiles": {0: 1, 100: 9}}, "output_tokens": 4},
            "arrival": {"process": "uniform"},
        }
    )


def server(**settings: Any) -> Any:
    return fake_server({"m": signature(4), "w": {"max_model_len": 100, "vocabulary": 50}}, **settings)


def options(url: str, **settings: Any) -> BenchOptions:
    return BenchOptions(
        **{"url": url, "duration_s": 0.1, "clients": 0, "grace_s": PATIENCE_S, "warmup_s": 0.0, **settings}
    )


def answers(_number: int, model: str, _headers: dict[str, str]) -> Answer:
    return stream() if model == "w" else Answer()


def bodies(found: FakeServer) -> list[dict[str, Any]]:
    return [json.loads(body) for path, _, body in found.requests if path == "/v1/completions"]


def test_streams_go_beside_tensors_in_one_run() -> None:
    other = ModelSpec(name="m", rate_rps=100, slo_ms=LONG_MS, arrival=Arrival(process="uniform"))
    with server(answer=answers) as found:
        result = run_bench([writes(), other], options(found.url))
    rows = result.summary["models"]
    assert [rows[name]["ok"] for name in ("w", "m")] == [10, 10]
    assert "mean_ttft_ms" not in rows["m"]
    assert rows["w"]["tokens_per_s"] == pytest.approx(400.0)
    assert 0.0 < rows["w"]["mean_ttft_ms"] <= rows["w"]["mean_ms"]
    assert rows["w"]["p99_ttft_ms"] is None  # of ten requests
    tokens = result.schedule.tokens
    assert tokens is not None
    lengths = tokens.prompt[result.records.model == 0].tolist()
    asked = bodies(found)
    assert sorted(len(each["prompt"]) for each in asked) == sorted(lengths)
    assert {each["max_tokens"] for each in asked} == {4}
    assert max(token for each in asked for token in each["prompt"]) < 50
    assert len({each["seed"] for each in asked}) == 10
    assert set(result.records.output_tokens[result.records.model == 0]) == {4}
    assert set(result.records.gpulet) == {"n0/0/A"}


@pytest.mark.parametrize(
    ("slo", "ok"), [((LONG_MS, LONG_MS), 10), ((LONG_MS, 1.0), 0), ((1.0, LONG_MS), 0)], ids=["both", "tpot", "ttft"]
)
def test_both_bounds_count(slo: tuple[float, float], ok: int) -> None:
    def answer(_number: int, _model: str, _headers: dict[str, str]) -> Answer:
        slow = stream(gap_s=0.01)
        slow.delay_s = 0.01
        return slow

    with server(answer=answer) as found:
        result = run_bench([writes(*slo)], options(found.url))
    row = result.summary["models"]["w"]
    assert (row["ok"], row["late"]) == (ok, 10 - ok)
    assert row["mean_tpot_ms"] > 10.0
    assert row["mean_ms"] >= row["mean_ttft_ms"] + 3 * 10.0


def application() -> Workload:
    """An application whose last stage writes up to nine tokens."""
    first = {"model": "m", "inputs": {"input": "input"}, "latency": {"alpha_ms": 1, "beta_ms": 1}}
    text = {"model": "w", "after": ["m"], "map": "graphs:prompt", "most": 1}
    app = {"name": "app", "rate_rps": 100, "slo_ms": LONG_MS, "arrival": {"process": "uniform"}}
    spec = {**writes().model_dump(exclude={"slo_ms", "rate_rps"}, exclude_defaults=True), "rate_rps": 0.0}
    return Workload.model_validate(
        {"models": [spec], "applications": [{**app, "streams": True, "stages": [first, text]}]}
    )


def part(text: str, **parameters: Any) -> bytes:
    said = {"text_output": text, **({"parameters": parameters} if parameters else {})}
    return b"data: " + json.dumps(said).encode() + b"\n\n"


@pytest.mark.parametrize(("slo_scale", "ok"), [(1.0, 10), (1e-6, 0)])
def test_an_application_that_streams_is_judged_by_its_first_token(slo_scale: float, ok: int) -> None:
    pieces = (part("x"), part("y"), part("", finish_reason="length", usage={"completion_tokens": 4}))
    stages = "X-Tenuto-Stages: m;begin=0.1;end=2.1;requests=1, w;begin=2.1;end=5.1;requests=1\r\n"
    answer = Answer(headers=f"Content-Type: text/event-stream\r\n{stages}", pieces=pieces, gap_s=0.01)
    work = application()
    with server(answer=lambda *_: answer) as found:
        found.models["app"] = signature(4)
        settings = options(found.url, slo_scale=slo_scale)
        result = run_bench(work.models, settings, applications=work.applications)
    assert {path for path, *_ in found.requests} == {"/v2/models/app/generate_stream"}
    row = result.summary["applications"]["app"]
    assert (row["offered"], row["ok"], row["late"]) == (10, ok, 10 - ok)
    assert [stage["p50_ms"] for stage in row["stages"].values()] == pytest.approx([2.0, 3.0])
    assert row["mean_tpot_ms"] > 5.0
    assert row["p50_ms"] >= row["mean_ttft_ms"] + 20.0
    assert set(result.records.output_tokens) == {4}


def test_a_stream_that_breaks_off_is_no_answer_and_bodies_of_files_are_refused() -> None:
    work = application()
    broken = (part("x"), b'data: {"error":"stage \'w\': a step failed"}\n\n')
    answer = Answer(headers="Content-Type: text/event-stream\r\n", pieces=broken)
    with server(answer=lambda *_: answer) as found:
        found.models["app"] = signature(4)
        result = run_bench(work.models, options(found.url), applications=work.applications)
        with pytest.raises(InvalidInputError, match="streams, which takes tensors"):
            run_bench(work.models, options(found.url, bodies={"app": "x"}), applications=work.applications)
    assert result.summary["applications"]["app"]["failed"] == 10
    assert any("broke off: stage 'w': a step failed" in line for line in result.errors)


def test_failures_are_counted_by_what_the_server_says() -> None:
    broken = Answer(headers=EVENTS, pieces=(event("x"), b'data: {"error":{"message":"a step failed"}}\n\n'))
    empty = Answer(headers=EVENTS, pieces=(b"data: [DONE]\n\n",))
    refusal = b'{"error":{"message":"too many prompts before it","type":"rate_limit_error"}}'
    kinds = (stream(), broken, empty, Answer(429, body=refusal, headers=""), Answer(0))
    with server(answer=lambda number, *_: kinds[number % 5]) as found:
        result = run_bench([writes()], options(found.url))
    row = result.summary["models"]["w"]
    assert [row[key] for key in ("ok", "rejected", "failed")] == [2, 2, 6]
    assert row["tokens_per_s"] == pytest.approx(80.0)  # those of answers
    for said in ("broke off: a step failed", "without a token", "HTTP 429: too many prompts before it", "closed"):
        assert any(said in line for line in result.errors), said


def test_what_cannot_be_asked_is_said_before_anything_is_sent() -> None:
    with server() as found:
        with pytest.raises(InvalidInputError, match="prompts are drawn"):
            run_bench([writes()], options(found.url, bodies={"w": "x"}))
        with pytest.raises(EnvironmentFaultError, match="cannot be asked: unknown model"):
            run_bench([writes().model_copy(update={"name": "gone"})], options(found.url))
        assert not found.requests


async def run_part(url: str, tpot_ms: float, grace_s: float, *, stops: bool = False) -> ClientReport:
    """Send one request for four tokens, whose stream may take 3 * `tpot_ms`."""
    target = ModelTarget(
        "w", LONG_MS, (), made=Prompts("w", 5, 9, np.random.default_rng(0)), slo=writes(10, tpot_ms).slo
    )
    tokens = RequestTokens(np.array([3]), np.array([4]))
    schedule = replace(make_client_schedule([writes(10, tpot_ms)], (), 0.01, 0), tokens=tokens)
    client = Client(ClientJob(url, (target,), schedule, np.array([7]), grace_s, 1), HttpSender(url))
    await client.prepare()
    run = asyncio.create_task(client.run(time.time()))
    if stops:
        while not client.progress().get("sent"):
            await asyncio.sleep(0.001)
        client.stop()
    return await run


async def test_a_stream_within_its_bounds_is_waited_for() -> None:
    with server(answer=lambda *_: stream(gap_s=0.02)) as found:
        report = await run_part(found.url, LONG_MS / 10, 0.0)
    assert report.records.output_tokens.tolist() == [4]
    assert not report.errors


async def test_who_ends_a_run_early_waits_for_no_stream_and_counts_none_as_failed() -> None:
    with server(answer=lambda *_: Answer(None)) as found:
        report = await run_part(found.url, LONG_MS, 0.01, stops=True)
        assert np.isnan(report.records.sent_ms).all()  # as if it had not been sent
        assert not report.errors
        report = await run_part(found.url, 1.0, 0.1, stops=True)
    assert report.records.outcome.tolist() == [Outcome.FAILED]  # its time was over
    assert not np.isnan(report.records.sent_ms).any()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_is_read_wherever_it_is_cut(size: int) -> None:
    body = b"".join((*(event("ab") for _ in range(2)), event("", "stop"), usage(5)))
    chunked = b"".join(
        b"%x\r\n%s\r\n" % (len(body[at : at + 30]), body[at : at + 30]) for at in range(0, len(body), 30)
    )
    sent = f"HTTP/1.1 200 OK\r\n{EVENTS}Transfer-Encoding: chunked\r\n\r\n".encode() + chunked + b"0\r\n\r\n"
    read = AnswerReader()
    *before, reply = [read.feed(sent[at : at + size]) for at in range(0, len(sent), size)]
    assert before == [None] * len(before)
    assert read.keeps_connection
    assert reply is not None
    assert (reply.status, reply.tokens, reply.gpulet) == (200, 5, "n0/0/A")
    assert reply.writing_ms >= 0.0


def test_what_is_no_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"."):
        AnswerReader().feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n")


def test_prompts_have_their_length_and_differ() -> None:
    prompts = Prompts("w", 40, 1000, np.random.default_rng(3))
    made = [json.loads(prompts.body(number, 1 + number % 40, 5).data)["prompt"] for number in range(200)]
    assert [len(each) for each in made] == [1 + number % 40 for number in range(200)]
    long = [tuple(each[:8]) for each in made if len(each) >= 8]
    assert len(set(long)) > 0.95 * len(long)
    assert all(0 <= token < 1000 for each in made for token in each)
