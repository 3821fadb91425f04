"""Executors in three steps: what overlaps, that results stay those of a plain run, and wrong options."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.deployments.gpulet.executors import streamed
from tenuto.deployments.gpulet.executors.emulated import EmulatedExecutor
from tenuto.deployments.gpulet.executors.streamed import EmulatedStreaming, TorchStreaming, make_streaming
from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tests.deployments.programs import blocks, load, run
from tests.instruments.fake_cuda import FakeCuda, late_model

X = {"INPUT0": [np.zeros((4, 1), np.float32)]}


class Clock:
    """A monotonic clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(streamed, "time", made)
    return made


def emulated(**options: Any) -> EmulatedExecutor:
    executor = EmulatedExecutor("v100")
    latency = {"alpha_ms": 2.0, "beta_ms": 2.0}
    load(executor, "m", options=options, latency=latency, batch_sizes=range(1, 5))
    return executor


def run_two_deep(streaming: EmulatedStreaming, count: int) -> list[Any]:
    under_way: list[Any] = []
    times = []
    for _ in range(count):
        under_way.append(streaming.stage("m", X, 4))
        streaming.launch(under_way[-1])
        if len(under_way) == 2:
            times.append(streaming.finish(under_way.pop(0))[1])
    times += [streaming.finish(rest)[1] for rest in under_way]
    return times


def test_an_emulated_gpu_can_turn_out_slower_than_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = tmp_path / "slower.json"
    factors.write_text("{}")
    monkeypatch.setenv("TENUTO_EMULATED_SLOWER", str(factors))
    executor = emulated()
    assert executor.latency_ms("m", [()] * 4) == 10.0
    factors.write_text('{"m": 1.2}')
    assert executor.latency_ms("m", [()] * 4) == pytest.approx(12.0)


def test_tensors_that_are_described_by_halves_say_what_is_missing() -> None:
    with pytest.raises(InvalidInputError, match="dtype"):
        emulated(inputs=[{"name": "x", "shape": [2]}], outputs=[])


def test_emulated_copies_overlap_with_the_execution_of_the_batch_before(clock: Clock) -> None:
    times = run_two_deep(EmulatedStreaming(emulated(copy_in_ms=0.5, copy_out_ms=0.25)), 5)  # 10 ms: 2 in, 1 out
    assert clock.now_s == pytest.approx((2 + 5 * 7 + 1) / 1000)
    assert [t.execution_ms for t in times] == pytest.approx([7.0] * 5)
    assert [t.copy_in_ms for t in times] == pytest.approx([2.0, 4.0, 2.0, 2.0, 2.0])  # one copy at a time
    assert [t.copy_out_ms for t in times] == pytest.approx([1.0] * 5)
    assert times[0].wait_ms == 0.0
    assert all(t.wait_ms > 0 for t in times[1:])


def test_without_copies_nothing_is_won(clock: Clock) -> None:
    times = run_two_deep(EmulatedStreaming(emulated()), 5)
    assert clock.now_s == pytest.approx(5 * 10 / 1000)
    assert times[1].copy_in_ms == 0.0


def test_one_batch_alone_takes_as_long_as_without_streaming(clock: Clock) -> None:
    streaming = EmulatedStreaming(emulated(copy_in_ms=0.5, copy_out_ms=0.25))
    staged = streaming.stage("m", X, 4)
    streaming.launch(staged)
    outputs, _ = streaming.finish(staged)
    assert clock.now_s == pytest.approx(0.010)
    assert outputs[0]["OUTPUT0"].shape == (4, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copy_in_ms": -1}, "copy_in_ms: -1.*at least 0"),
        ({"copy_out_ms": "fast"}, "copy_out_ms: .*must be ms"),
        ({"copy_out_ms": True}, "copy_out_ms: "),
        ({"copy_in_ms": 2.0, "copy_out_ms": 0.5}, "a batch of 4 takes 10 ms in all"),
    ],
)
def test_wrong_copy_times_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        emulated(**options)


def test_on_a_cpu_two_batches_are_under_way_and_answer_as_plain_ones() -> None:
    executor = TorchExecutor("cpu", cores=1)
    load(executor, "m", "tests.instruments.own_models:scale", {"copy_in_ms": 1.0}, batch_sizes=[1, 2])
    streaming = make_streaming(executor)
    assert isinstance(streaming, TorchStreaming)
    inputs = [{"x": np.full((2, 4), float(n), np.float32)} for n in range(2)]
    staged = [streaming.stage("m", blocks(given), 2) for given in inputs]
    for handle, given in zip(staged, inputs, strict=True):
        streaming.launch(handle)
        outputs, times = streaming.finish(handle)
        plain, _ = run(executor, "m", given, 2)
        np.testing.assert_array_equal(outputs[0]["y"], plain["y"])
        assert times.execution_ms > 0
    assert executor.sm_count() is None
    executor.close()


def test_on_cuda_one_stream_of_kernels_serves_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    monkeypatch.setattr("tenuto.profiles.networks.models.build", lambda *_args, **_options: late_model(cuda))
    executor = TorchExecutor("cuda", memory_mib=4096, streaming=True)
    for name in ("m", "n"):
        load(executor, name, options={"cuda_graphs": name == "n"}, batch_sizes=[1, 2])
    streaming = make_streaming(executor)
    assert executor.sm_count() == 66
    staged = []
    for number, name in enumerate(("m", "n", "m")):
        staged.append(streaming.stage(name, {"x": [np.full((2, 2), float(number), np.float32)]}, 2))
        streaming.launch(staged[-1])
        if number == 0:
            continue
        outputs, _ = streaming.finish(staged.pop(0))
        assert outputs[0]["y"][0, 0] == 2.0 * (number - 1) + 1
    assert streaming.finish(staged.pop())[0][0]["y"][0, 0] == 5.0
    assert {name for name, what in cuda.executed if what == "kernels"} == {"stream 0"}
    assert len(cuda.streams) == 3
    gone = weakref.ref(executor.program("m"))
    staged.clear()
    executor.unload("m")
    gc.collect()
    assert gone() is None  # nothing keeps its memory
    executor.close()


def test_too_little_memory_for_the_second_batch_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    monkeypatch.setattr("tenuto.profiles.networks.models.build", lambda *_args, **_options: late_model(cuda))
    cuda.device_bytes_left = 40  # of 32 for each batch
    load(TorchExecutor("cuda"), "m", batch_sizes=[4])
    cuda.device_bytes_left = 40
    with pytest.raises(EnvironmentFaultError, match=r"'m' does not fit .* at batch 4.*`streaming: false`"):
        load(TorchExecutor("cuda", streaming=True), "m", batch_sizes=[4])


def test_an_executor_that_cannot_stream_is_refused() -> None:
    class Other:
        device = "abacus"

    with pytest.raises(EnvironmentFaultError, match=r"abacus cannot stream.*streaming: false"):
        make_streaming(Other())  # type: ignore[arg-type]
