import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tenuto.errors import InvalidInputError
from tenuto.profiles.measuring.kernels.chrome_trace import load_chrome_trace, parse_chrome_trace
from tenuto.profiles.measuring.kernels.metrics import Launch, kernel_metrics, weighted_sm_utilisation_pct
from tenuto.profiles.measuring.kernels.occupancy import blocks_that_fit, estimated_occupancy_pct, sms_needed
from tenuto.profiles.measuring.kernels.record import Device, Kernel, sm_limits

V100 = sm_limits((7, 0))
DATA = Path(__file__).parents[2] / "data"
ORION = Path(__file__).parents[3] / "data" / "orion_v100_kernels.json"


def kernel(
    blocks: int = 80,
    threads: int = 256,
    registers: int | None = 32,
    shared: int | None = 0,
    start: float = 0.0,
    duration: float = 10.0,
    occupancy: float | None = None,
) -> Kernel:
    return Kernel(
        "k", (blocks, 1, 1), (threads, 1, 1), start, duration, registers, shared, achieved_occupancy_pct=occupancy
    )


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "fit", "binding"),
    [
        (256, 32, 0, 8, "threads"),  # 64 warps of 8
        (256, 128, 0, 2, "registers"),  # 4096 registers a warp: 16 warps
        (64, 16, 33_000, 2, "shared_memory"),  # 33,024 of 98,304 bytes
        (32, 16, 0, 32, "blocks"),
        (1024, 64, 0, 1, "registers"),
        (33, 32, 0, 32, "blocks"),  # two warps each: 32 blocks, which is also the block limit
    ],
)
def test_each_of_the_four_bounds_can_bind(threads: int, registers: int, shared: int, fit: int, binding: str) -> None:
    assert blocks_that_fit(kernel(threads=threads, registers=registers, shared=shared), V100) == (fit, binding)


def test_newer_gpus_keep_a_kibibyte_of_each_block() -> None:
    assert blocks_that_fit(kernel(threads=32, shared=32 * 1024), sm_limits((8, 0))) == (4, "shared_memory")
    assert blocks_that_fit(kernel(threads=32, shared=32 * 1024), V100) == (3, "shared_memory")


def test_what_was_not_recorded_does_not_bind_and_impossible_kernels_are_refused() -> None:
    assert blocks_that_fit(kernel(registers=None, shared=None), V100)[1] == "threads"
    with pytest.raises(InvalidInputError, match="does not fit on an SM by its shared_memory"):
        blocks_that_fit(kernel(shared=200_000), V100)
    with pytest.raises(InvalidInputError, match="occupancy limits are not known"):
        sm_limits((3, 5))


def test_sms_and_occupancy_of_a_launch() -> None:
    assert sms_needed(kernel(blocks=98, registers=128), V100) == 49
    assert estimated_occupancy_pct(kernel(blocks=80, threads=1024, registers=32), V100, 80) == 50
    assert estimated_occupancy_pct(kernel(blocks=10_000, threads=1024, registers=32), V100, 80) == 100
    assert estimated_occupancy_pct(kernel(blocks=40, threads=1024, registers=32), V100, 80) == 25


def test_weighted_sm_utilisation_of_kernels_in_sequence_and_side_by_side() -> None:
    one, two = Launch(0, 30, 40), Launch(30, 10, 200)
    assert weighted_sm_utilisation_pct([one, two], 80) == pytest.approx(100 * (0.5 * 30 + 10) / 40)
    assert weighted_sm_utilisation_pct([one, Launch(0, 30, 20)], 80) == pytest.approx(75)
    assert weighted_sm_utilisation_pct([one, Launch(100, 30, 40)], 80) == pytest.approx(50)  # idle time does not count
    with pytest.raises(InvalidInputError, match="no kernel ran"):
        weighted_sm_utilisation_pct([], 80)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("resnet50_b4", 54.748),
        ("mobilenet_v2_b4", 51.512),
        ("resnet101_b4", 52.157),
        ("bert_b2", 97.474),
        ("efficientnet_b4", 33.069),
        ("transformer_xl_b4", 82.495),
    ],
)
def test_weighted_sm_utilisation_of_orions_sequences(model: str, expected: float) -> None:
    """Expected: sum(min(sms, 80)/80 * t)/sum(t) over the published rows, computed outside this package."""
    data = json.loads(ORION.read_text())
    rows = data["models"][model]["kernels"]
    now, sequence = 0.0, []
    for _, _, sms, duration_ns in rows:
        sequence.append(Launch(now, duration_ns / 1000, sms))
        now += duration_ns / 1000
    assert now / 1000 == pytest.approx(data["sum_check_ms"][model])
    assert weighted_sm_utilisation_pct(sequence, 80) == pytest.approx(expected, abs=0.001)


def test_a_trace_in_kinetos_format() -> None:
    trace = load_chrome_trace(DATA / "kineto_trace.json")
    assert trace.device == Device("Tesla V100-SXM2-16GB", (7, 0), 80)
    assert [k.start_us for k in trace.kernels] == [1070, 1171, 1171, 1220]
    first = trace.kernels[0]
    assert (first.grid, first.block) == ((98, 1, 1), (256, 1, 1))
    assert (first.registers_per_thread, first.shared_memory_bytes) == (128, 12544)
    assert trace.copied_bytes == {"h2d": 602112, "d2h": 4000}
    assert trace.copy_ms == pytest.approx({"h2d": 0.06, "d2h": 0.004})


def test_metrics_of_a_trace() -> None:
    trace = load_chrome_trace(DATA / "kineto_trace.json")
    metrics = kernel_metrics(trace.kernels, trace.device)
    # 49, 16 (+ 3 beside it) and 160 of 80 SMs for 100, 20 (+20) and 80 us; occupancies 15.3, 20 + 3.1 and 25 %.
    needed = [sms_needed(k, V100) for k in trace.kernels]
    assert needed == [49, 16, 3, 160]
    expected = 100 * (49 / 80 * 100 + 19 / 80 * 20 + 16 / 80 * 20 + 80) / 220
    assert metrics["wavg_sm_util_pct"] == pytest.approx(expected, abs=1e-3)
    assert metrics["kernels"] == 4
    assert metrics["kernel_ms"] == 0.22
    assert metrics["overlap_pct"] == pytest.approx(100 * 20 / 220, abs=1e-3)
    assert metrics["occupancy_estimated"] == 1
    occupancies = [estimated_occupancy_pct(k, V100, 80) for k in trace.kernels]
    largest = max(occupancies[0], occupancies[3], sum(occupancies[1:3]))
    assert metrics["achieved_occupancy_pct"] == pytest.approx(largest, abs=1e-3)
    # Kernels two and three start together; 100, 20 of both, 20 of the longer one, 80 us.
    alone, both = occupancies[1], occupancies[1] + occupancies[2]
    weighted = (occupancies[0] * 100 + both * 20 + alone * 20 + occupancies[3] * 80) / 220
    assert metrics["wavg_ach_occ_pct"] == pytest.approx(weighted, abs=1e-3)


def test_weighted_occupancy_adds_kernels_that_overlap_and_idle_time_does_not_count() -> None:
    one, beside = kernel(duration=30, occupancy=50), kernel(duration=10, occupancy=90)
    later = dataclasses.replace(kernel(duration=10, occupancy=20), start_us=100.0)
    metrics = kernel_metrics([one, beside, later], Device("v100", (7, 0), 80))
    assert metrics["wavg_ach_occ_pct"] == pytest.approx((100 * 10 + 50 * 20 + 20 * 10) / 40)
    assert metrics["achieved_occupancy_pct"] == 100


def test_a_gzipped_trace_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress((DATA / "kineto_trace.json").read_bytes()))
    assert load_chrome_trace(path) == load_chrome_trace(DATA / "kineto_trace.json")


def trace_with(**changes: Any) -> dict[str, Any]:
    return {**json.loads((DATA / "kineto_trace.json").read_text()), **changes}


def test_wrong_traces_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="traceEvents"):
        parse_chrome_trace([])
    with pytest.raises(InvalidInputError, match="no kernel of this device"):
        parse_chrome_trace(trace_with(traceEvents=[]))
    with pytest.raises(InvalidInputError, match="does not describe this device"):
        parse_chrome_trace(trace_with(deviceProperties=[]))
    bare = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": {"device": 0}}
    with pytest.raises(InvalidInputError, match="without a readable 'grid'"):
        parse_chrome_trace(trace_with(traceEvents=[bare]))
    broken = tmp_path / "broken.json"
    broken.write_text('{"traceEvents": [')
    with pytest.raises(InvalidInputError, match="not valid JSON"):
        load_chrome_trace(broken)
    with pytest.raises(InvalidInputError, match="no such file"):
        load_chrome_trace(tmp_path / "absent.json")
