"""Whole runs against a fake endpoint: what is counted, what is judged, and every way an endpoint can fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.clients.client import ClientJob, ClientReport
from tenuto.loadgen.clients.group import LocalClient
from tenuto.outcome import Outcome
from tenuto.placement import Arrival, ModelSpec
from tests.instruments.fake_server import Answer, fake_server, signature
from tests.instruments.live import LONG_MS, PATIENCE_S


def spec(name: str = "m", rate: float = 300.0, slo: float = LONG_MS) -> ModelSpec:
    return ModelSpec(name=name, rate_rps=rate, slo_ms=slo, arrival=Arrival(process="uniform"))


def options(address: str, **settings: Any) -> BenchOptions:
    return BenchOptions(
        **{"url": address, "duration_s": 0.1, "clients": 0, "grace_s": PATIENCE_S, "warmup_s": 0.0, **settings}
    )


def test_every_scheduled_request_is_sent_and_counted_once() -> None:
    with fake_server() as server:
        result = run_bench([spec()], options(server.url))
    assert len(server.requests) == len(result.schedule) == 30
    model = result.summary["models"]["m"]
    assert (model["offered"], model["ok"], model["attainment"]) == (30, 30, 1.0)
    assert result.verdict.conditions["sent"] == 30
    assert np.array_equal(result.records.request, np.arange(30))
    assert np.all(result.records.sent_ms >= result.records.scheduled_ms)
    assert np.all(result.records.answered_ms >= result.records.sent_ms)


def test_what_the_server_reports_is_recorded() -> None:
    with fake_server() as server:
        result = run_bench([spec()], options(server.url))
    records = result.records
    assert set(records.gpulet) == {"n0/0/A"}
    assert records.batching_ms[0] == 2.0
    assert records.gpulet_queue_ms[0] == 1.0
    assert records.execution_ms[0] == 5.0
    assert result.summary["models"]["m"]["mean_batch"] == pytest.approx(4.0)
    assert result.summary["models"]["m"]["split_p95_ms"]["execution"] == 5.0
    # 30 requests in batches of 4 that take 5 ms each, over 0.1 s.
    assert result.summary["gpulets"]["n0/0/A"]["utilisation"] == pytest.approx(30 / 4 * 0.005 / 0.1)


def test_bodies_follow_the_signature_and_come_from_a_pool() -> None:
    models = {"m": signature(2, 3), "t": signature(7, datatype="INT64", name="input_ids")}
    with fake_server(models) as server:
        run_bench([spec(), spec("t", rate=150)], options(server.url))
    bodies = {}
    for path, headers, body in server.requests:
        length = int(headers["inference-header-content-length"])
        document = json.loads(body[:length])
        tensor = document["inputs"][0]
        assert len(body) - length == tensor["parameters"]["binary_data_size"]
        bodies.setdefault(path.split("/")[3], set()).add(body)
        assert tensor["shape"] == ([1, 2, 3] if path.endswith("m/infer") else [1, 7])
    assert {name: len(found) for name, found in bodies.items()} == {"m": 8, "t": 8}


def test_bodies_that_a_model_does_not_read_are_refused_before_the_load(tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"neither a picture nor a text")
    with fake_server() as server, pytest.raises(InvalidInputError, match="is refused by the model: unknown"):
        run_bench([spec()], options(server.url, bodies={"m": str(tmp_path)}))
    assert server.requests == []


def test_statuses_become_outcomes() -> None:
    statuses = (200, 504, 429, 500, 503, 404)

    def answer(number: int, *_: Any) -> Answer:
        status = statuses[number % 6]
        return Answer() if status == 200 else Answer(status, body=b'{"error":"no luck"}', headers="")

    with fake_server(answer=answer) as server:
        result = run_bench([spec()], options(server.url))
    model = result.summary["models"]["m"]
    assert [model[key] for key in ("ok", "expired", "rejected", "failed", "offered")] == [5, 5, 5, 15, 30]
    assert model["attainment"] == pytest.approx(5 / 30)
    assert result.verdict.result in ("FAIL", "INVALID")
    assert sorted(result.errors) == [f"5 × HTTP {status}: no luck" for status in sorted(statuses[1:])]


def test_an_answer_after_the_slo_is_late() -> None:
    with fake_server(answer=lambda number, *_: Answer(delay_s=0.15 if number < 10 else 0.0)) as server:
        result = run_bench([spec(slo=120.0)], options(server.url))
    records = result.records
    late = records.outcome == Outcome.LATE
    assert late[:10].all()
    assert np.all(records.latency_ms[late] > 120.0)


def test_latency_counts_from_the_scheduled_time() -> None:
    with fake_server() as server:
        records = run_bench([spec()], options(server.url)).records
    assert np.allclose(records.latency_ms, records.answered_ms - records.scheduled_ms)


def test_chunked_answers_are_read() -> None:
    with fake_server(answer=lambda *_: Answer(chunked=True)) as server:
        result = run_bench([spec()], options(server.url))
    assert result.summary["models"]["m"]["ok"] == 30


def test_stragglers_count_as_misses_after_the_grace_period() -> None:
    with fake_server(answer=lambda number, *_: Answer(None if number in (3, 4) else 200)) as server:
        result = run_bench([spec()], options(server.url, grace_s=2.0))
    model = result.summary["models"]["m"]
    assert (model["ok"], model["failed"], model["offered"]) == (28, 2, 30)
    assert any("no answer within 2 s" in line for line in result.errors)


def test_slow_answers_do_not_hold_back_sending() -> None:
    with fake_server() as server:
        server.answer = lambda *_: Answer(once=lambda: len(server.requests) == 30)
        result = run_bench([spec()], options(server.url))
    assert result.summary["models"]["m"]["ok"] == 30  # all were under way at once


def test_an_endpoint_that_dies_in_the_middle() -> None:
    with fake_server() as server:

        def answer(number: int, *_: Any) -> Answer:
            if number == 10:
                server.die()
            return Answer(0 if number >= 10 else 200)

        server.answer = answer
        result = run_bench([spec()], options(server.url))
    model = result.summary["models"]["m"]
    assert model["offered"] == 30
    assert model["failed"] >= 15
    assert model["ok"] + model["failed"] == 30
    assert any("connect" in line for line in result.errors)


def test_an_endpoint_that_is_down() -> None:
    with pytest.raises(EnvironmentFaultError, match="Start the server"):
        run_bench([spec()], options("http://127.0.0.1:9"))


def test_a_model_the_endpoint_does_not_know() -> None:
    with fake_server() as server, pytest.raises(EnvironmentFaultError, match="unknown model 'x'"):
        run_bench([spec("x")], options(server.url))


@pytest.mark.parametrize(
    "wrong",
    [
        {"warmup_s": 1.0},
        {"warmup_s": -1.0},
        {"slo_scale": 0.0},
        {"clients": -1},
        {"grace_s": -1.0},
        {"rate_scale": 0.0},
        {"seed": -1},
        {"duration_s": 0.0},
        {"url": "ftp://x"},
        {"url": "http://x:port"},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        run_bench([spec()], options("http://127.0.0.1:9", **wrong))


def test_no_models() -> None:
    with pytest.raises(InvalidInputError, match="serves no model"):
        run_bench([], options("http://127.0.0.1:9"))


def test_an_input_that_cannot_be_generated() -> None:
    models = {"m": signature(4, datatype="FP8")}
    with fake_server(models) as server, pytest.raises(InvalidInputError, match="FP8"):
        run_bench([spec()], options(server.url))


def test_json_tensors_carry_the_same_values() -> None:
    def values(tensors: str) -> list[Any]:
        found = []
        with fake_server({"m": signature(2, 3)}) as server:
            assert run_bench([spec()], options(server.url, tensors=tensors)).summary["models"]["m"]["ok"] == 30
        for _, headers, body in server.requests:
            if tensors == "json":
                found.append(np.array(json.loads(body)["inputs"][0]["data"], np.float32).tolist())
            else:
                found.append(
                    np.frombuffer(body[int(headers["inference-header-content-length"]) :], np.float32).tolist()
                )
        return sorted(found)  # on a busy machine connections overtake each other

    assert values("json") == values("binary")


def test_the_slo_is_sent_only_when_scaled() -> None:
    with fake_server() as server:
        run_bench([spec()], options(server.url))
        assert "x-slo-ms" not in server.requests[0][1]
        run_bench([spec()], options(server.url, slo_scale=0.5))
        assert server.requests[-1][1]["x-slo-ms"] == f"{LONG_MS / 2:g}"


def test_one_line_of_progress_a_second() -> None:
    lines: list[str] = []
    with fake_server() as server:
        result = run_bench([spec()], options(server.url, duration_s=1.2), lines.append)
    assert 1 <= len(lines) <= result.wall_s
    assert "sent" in lines[0]
    assert "/360" in lines[0]


class Interrupting(LocalClient):
    """Raises Ctrl-C in the waiting loop after some answers."""

    def is_done(self) -> bool:
        if self.progress().get("answered", 0) >= 10:
            raise KeyboardInterrupt
        return super().is_done()


def test_an_interrupted_run_keeps_its_first_part_and_says_so() -> None:
    with fake_server() as server:
        result = run_bench([spec(rate=100.0)], options(server.url, duration_s=30.0), clients=Interrupting())
    assert result.verdict.result == "INVALID"
    assert "interrupted" in result.verdict.reasons[0]
    assert 10 <= len(result.records) < 3000
    assert result.summary["models"]["m"]["failed"] == 0


class OneOfTwoLost:
    """Two clients, of which the second never reports."""

    def __init__(self) -> None:
        self._first = LocalClient()

    def prepare(self, jobs: Sequence[ClientJob]) -> None:
        assert len(jobs) == 2
        self._first.prepare(jobs[:1])

    def start(self, start_at: float) -> None:
        self._first.start(start_at)

    def progress(self) -> dict[str, int]:
        return self._first.progress()

    def is_done(self) -> bool:
        return self._first.is_done()

    def stop(self) -> None:
        self._first.stop()

    def results(self) -> tuple[list[ClientReport], list[str]]:
        found, _ = self._first.results()
        return found, ["client 1 was lost (ActorDiedError); its requests count as not sent"]

    def close(self) -> None:
        self._first.close()


def test_a_lost_client_makes_the_run_invalid_and_keeps_the_rest() -> None:
    with fake_server() as server:
        result = run_bench([spec()], options(server.url, clients=2), clients=OneOfTwoLost())
    assert result.verdict.result == "INVALID"
    assert result.verdict.reasons[0].startswith("client 1 was lost")
    model = result.summary["models"]["m"]
    assert (model["offered"], model["ok"], model["failed"]) == (30, 15, 15)
    assert np.isnan(result.records.sent_ms).sum() == 15
    assert np.array_equal(np.sort(result.records.request), np.arange(30))


def test_nothing_outlives_a_run() -> None:
    with fake_server() as server:
        run_bench([spec()], options(server.url))
    assert not any(thread.name == "load client" for thread in threading.enumerate())


def test_the_same_seed_gives_the_same_schedule_and_bodies() -> None:
    bodies, hashes = [], []
    for _ in range(2):
        with fake_server() as server:
            result = run_bench([spec()], options(server.url))
        bodies.append([body for _, _, body in server.requests])
        hashes.append(result.schedule.hash)
    assert hashes[0] == hashes[1]
    assert bodies[0] == bodies[1]


@settings(max_examples=settings.default.max_examples // 3)  # each opens a server
@given(
    statuses=st.lists(st.sampled_from([200, 200, 429, 503, 504, 500, 0, None]), min_size=30, max_size=30),
    warmup=st.integers(0, 29),
)
def test_the_failures_listed_are_those_of_the_table(statuses: list[int | None], warmup: int) -> None:
    def answer(_number: int, _model: str, headers: dict[str, str]) -> Answer:
        return Answer(statuses[int(headers["x-request-id"].rpartition("-")[2])], body=b'{"error": "as told"}')

    times = options("").duration_s / 30
    with fake_server(answer=answer) as server:
        result = run_bench([spec()], options(server.url, clients=0, warmup_s=warmup * times, grace_s=0.2))
    row = result.summary["models"]["m"]
    failed = row["expired"] + row["rejected"] + row["failed"]
    assert sum(int(line.split(" × ")[0]) for line in result.errors) == failed
