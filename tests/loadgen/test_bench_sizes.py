"""Loads whose requests vary in size: what is drawn is what is sent, simulated, recorded and judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from tenuto.errors import InvalidInputError
from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.report.run_page import render_page
from tenuto.loadgen.run import load_run
from tenuto.loadgen.run_files import describe, write_run_files
from tenuto.loadgen.schedule import make_client_schedule, make_load
from tenuto.loadgen.senders.payloads import SizedBodies
from tenuto.loadgen.simulated import Simulation
from tenuto.outcome import Outcome
from tenuto.placement import Arrival, ModelSpec, Plan
from tenuto.placement.application import Application
from tenuto.placement.workload import client_targets
from tests.instruments.fake_server import FakeServer, fake_server, signature
from tests.instruments.live import LONG_MS, PATIENCE_S

DIMENSIONS = [None, "height", "width"]
METADATA = {
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [-1, -1, -1], "dimensions": DIMENSIONS},
        {"name": "mask", "datatype": "INT64", "shape": [-1, -1], "dimensions": [None, "width"]},
    ],
    "outputs": [],
    "sizes": {"height": {"least": 1, "most": 16, "multiple": 1}, "width": {"least": 3, "most": 64, "multiple": 1}},
}
# The workload names the sizes in another order than the server.
DRAWN = {"width": {"quantiles": {0: 3, 100: 40}}, "height": {"lognormal": {"median": 4, "sigma": 0.5, "most": 16}}}


def spec(name: str = "m", sizes: Any = DRAWN, rate: float = 300.0) -> ModelSpec:
    return ModelSpec(name=name, rate_rps=rate, slo_ms=LONG_MS, arrival=Arrival(process="uniform"), sizes=sizes)


def options(address: str, **settings: Any) -> BenchOptions:
    return BenchOptions(
        **{"url": address, "duration_s": 0.1, "clients": 0, "grace_s": PATIENCE_S, "warmup_s": 0.0, **settings}
    )


def sent(server: FakeServer) -> dict[int, list[dict[str, Any]]]:
    """The inputs of every request by its number."""
    inputs = {}
    for _, headers, body in server.requests:
        length = int(headers.get("inference-header-content-length", len(body)))
        inputs[int(headers["x-request-id"].rpartition("-")[2])] = json.loads(body[:length])["inputs"]
    return inputs


@pytest.mark.parametrize("tensors", ["binary", "json"])
def test_each_request_has_the_sizes_that_are_drawn_for_it(tensors: str) -> None:
    with fake_server({"m": METADATA, "f": signature(4)}) as server:
        result = run_bench([spec("f", {}), spec()], options(server.url, seed=5, tensors=tensors))
    drawn = make_client_schedule([spec("f", {}), spec()], (), 0.1, 5)
    assert drawn.sizes is not None
    assert np.array_equal(result.records.sizes, drawn.sizes[result.records.request])
    assert result.schedule.hash == drawn.hash
    assert result.schedule.notes == ()
    shapes = {number: [each["shape"] for each in inputs] for number, inputs in sent(server).items()}
    for number, model, (width, height) in zip(
        result.records.request, result.records.model, result.records.sizes, strict=True
    ):
        assert shapes[number] == ([[1, height, width], [1, width]] if model else [[1, 4]])
    assert len({tuple(sizes) for sizes in result.records.sizes[result.records.model == 1]}) > 10
    assert (result.records.sizes[result.records.model == 0] == 0).all()


@pytest.mark.parametrize(("more", "most"), [({"below": 7}, 6), ({"example": 3}, 3), ({}, 1)])
def test_whole_numbers_are_those_that_the_model_knows(more: dict[str, int], most: int) -> None:
    ids = {"name": "ids", "datatype": "INT64", "shape": [-1, -1], "dimensions": [None, "width"], **more}
    sizes = {"width": METADATA["sizes"]["width"]}  # type: ignore[index]
    with fake_server({"m": {"inputs": [ids], "outputs": [], "sizes": sizes}}) as server:
        result = run_bench([spec(sizes={"width": 40})], options(server.url, tensors="json"))
    assert {*np.concatenate([inputs[0]["data"] for inputs in sent(server).values()])} == (
        {3} if "example" in more else {*range(most + 1)}
    )
    assert [note.startswith("m: nothing says which numbers it knows for ids") for note in result.schedule.notes] == (
        [] if more else [True]
    )


def test_without_sizes_in_the_workload_requests_are_spread_over_what_the_model_takes() -> None:
    stepped = METADATA["sizes"] | {"width": {"least": 4, "most": 64, "multiple": 4}}  # type: ignore[operator]
    with fake_server({"m": {**METADATA, "sizes": stepped}}) as server:
        result = run_bench([spec(sizes={}, rate=2000.0)], options(server.url))
    height, width = result.records.sizes.T
    assert (height.min(), height.max()) == (1, 16)
    assert set(width) == set(range(4, 65, 4))
    assert {tuple(inputs[0]["shape"]) for inputs in sent(server).values()} == {
        (1, *each) for each in result.records.sizes.tolist()
    }
    (note,) = result.schedule.notes
    assert note.startswith("m: its workload gives no `sizes`, so each is spread evenly")
    assert note.endswith("(height up to 16, width up to 64)")


def test_sizes_that_the_model_has_not_are_refused() -> None:
    with fake_server({"m": METADATA, "f": signature(4)}) as server:
        with pytest.raises(InvalidInputError, match=r"models\.m\.sizes: 'tokens': are not those.*height, width"):
            run_bench([spec(sizes={"tokens": 4})], options(server.url))
        with pytest.raises(InvalidInputError, match=r"models\.f\.sizes.*its inputs have one shape"):
            run_bench([spec("f")], options(server.url))
        with pytest.raises(InvalidInputError, match=r"'x' larger than the 64 MiB that a gateway takes"):
            run_bench([spec(sizes={"height": 20_000, "width": 20_000})], options(server.url))
        assert not server.requests


def test_requests_of_stages_have_sizes_too() -> None:
    stages = [{"model": "m", "count": 2}, {"name": "again", "model": "m", "after": ["m"]}]
    application = Application.model_validate({"name": "a", "rate_rps": 50, "slo_ms": LONG_MS, "stages": stages})
    models = [spec("a.m"), spec("a.again"), spec("alone")]
    targets = client_targets(models, [application])
    schedule, other = (make_client_schedule(targets, [application], 2.0, seed) for seed in (3, 4))
    load = make_load(models, schedule, 3)
    assert load.sizes is not None
    assert (load.sizes >= [3, 1]).all()
    assert schedule.sizes is not None
    assert schedule.hash != other.hash
    lone = make_client_schedule([models[2]], (), 2.0, 3)
    assert lone.sizes is not None
    assert np.array_equal(load.sizes[load.model_index == 2], lone.sizes)
    sent = schedule.sizes[schedule.model_index == 1]  # the client's, which both requests of the first stage have
    assert np.array_equal(load.sizes[load.model_index == 0], np.repeat(sent, 2, axis=0))
    again = load.sizes[load.model_index == 1]
    assert again.shape == sent.shape
    assert not np.array_equal(again, sent)


def test_bodies_of_all_sizes_are_pieces_of_one_tensor() -> None:
    bodies = SizedBodies({"name": "m", **METADATA}, {"height": 16, "width": 64}, np.random.default_rng(0), binary=True)
    made = [bodies.body(number, 2, 3) for number in range(100)]
    assert len({body.data for body in made}) == 100
    first = made[0]
    assert first.json_length is not None
    x, mask = first.data[first.json_length :][: 2 * 3 * 4], first.data[first.json_length :][2 * 3 * 4 :]
    assert np.abs(np.frombuffer(x, np.float32)).max() < 10
    assert np.frombuffer(mask, np.int64).tolist() == [1, 1, 1]


BY_SIZE = [
    {"sizes": {"width": width, "height": 16}, "latency": {"points": {1: width / 10, 4: width / 5}}} for width in (8, 32)
]
PLAN = Plan.from_data(
    {
        "policy": {"name": "test"},
        "gpus": [{"id": "g", "type": "v100"}],
        "gpulets": [
            {
                "id": "n0/0/A",
                "gpu": "g",
                "models": [{"name": "m", "batch_size": 4, "latency": {"points": {1: 2.0, 4: 4.0}}, "by_size": BY_SIZE}],
            }
        ],
        "models": [spec().model_dump(exclude_defaults=True)],
    }
)


def test_files_of_measured_and_simulated_runs_have_the_same_sizes_and_classes(tmp_path: Path) -> None:
    with fake_server({"m": METADATA}) as server:
        asked = options(server.url, seed=7, duration_s=0.5)
        result = run_bench(PLAN.models, asked)
        live = describe(result, asked, PLAN, command=[])
    (tmp_path / "live").mkdir()
    write_run_files(tmp_path / "live", live, result.records, result.schedule)
    run = Simulation.of_plan(PLAN, duration_s=0.5, warmup_s=0.0, seed=7).run()
    simulated, records = run.describe(PLAN, options={"seed": 7}, command=[])
    (tmp_path / "simulated").mkdir()
    write_run_files(tmp_path / "simulated", simulated, records, run.schedule)
    tables = [parquet.read_table(tmp_path / name / "requests.parquet") for name in ("live", "simulated")]
    for column in ("request", "size_width", "size_height"):
        assert tables[0][column].to_pylist() == tables[1][column].to_pylist()
    rows = [document["models"]["m"]["by_size"] for document in (live, simulated)]
    for each in rows:
        assert [row["sizes"] for row in each] == [{"width": 8, "height": 16}, {"width": 32, "height": 16}, None]
    assert [row["offered"] for row in rows[0]] == [row["offered"] for row in rows[1]]
    width = result.records.sizes[:, 0]
    assert [row["offered"] for row in rows[0]] == [
        (width <= 8).sum(),
        ((width > 8) & (width <= 32)).sum(),
        (width > 32).sum(),
    ]
    assert rows[1][2][Outcome.REJECTED.word] == rows[1][2]["offered"] > 0
    assert rows[0][0]["goodput_rps"] == rows[0][0]["ok"] / 0.5
    assert "m, width up to 8, height up to 16" in render_page(load_run(tmp_path / "live"))
