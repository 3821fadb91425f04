"""Batches in three steps: on a fake that runs everything as late as it may, on the CPU, and on a GPU where one is."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.profiles.networks.catalogue import (
    ImageInput,
    LoadedModel,
    ModelSignature,
    SizeRange,
    TensorSignature,
    image_signature,
)
from tenuto.profiles.networks.device import cuda_streams
from tenuto.profiles.networks.inputs import Arrays, as_blocks, sends_pixels
from tenuto.profiles.networks.model_options import RunOptions
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.network import LoneModel
from tenuto.profiles.networks.preprocess import normalised
from tenuto.profiles.networks.programs import lone_program
from tenuto.profiles.networks.runner import BatchTimes, StagedBatch
from tests.instruments.fake_cuda import COPY_MS, KERNELS_MS, FakeCuda, LateNet, late_model
from tests.instruments.own_models import same_bytes
from tests.instruments.small_networks import SMALL


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    made.install(monkeypatch)
    return made


class Alone:
    """A program of one model, with the model's name left out."""

    def __init__(
        self, loaded: LoadedModel, sizes: list[int], *, device: str = "cuda", streams: bool = True, **options: Any
    ) -> None:
        made = cuda_streams(device, overlapping=streams)
        self.runner = lone_program("m", loaded, RunOptions(**options), sizes, made)

    @property
    def net(self) -> Any:
        assert isinstance(self.runner.network, LoneModel)
        return self.runner.network.module

    def stage(self, arrays: Arrays, rows: int) -> StagedBatch:
        return self.runner.stage({"m": as_blocks(arrays)}, {"m": rows})

    def launch(self, staged: StagedBatch) -> None:
        self.runner.launch(staged)

    def finish(self, staged: StagedBatch) -> tuple[Arrays, BatchTimes]:
        outputs, times = self.runner.finish(staged)
        (part,) = outputs["m"]
        return part, times

    def run(self, arrays: Arrays, rows: int) -> Arrays:
        return self.runner.run({"m": as_blocks(arrays)}, {"m": rows})["m"]


def streamed(cuda: FakeCuda, *, syncs: bool = False, **options: Any) -> Alone:
    return Alone(late_model(cuda, syncs=syncs), [1, 2, 3, 4], **options)


def batch(number: int, size: int = 2) -> dict[str, Any]:
    return {"x": np.full((size, 2), float(number), np.float32)}


def run_two_deep(runner: Alone, count: int, size: int = 2) -> list[tuple[dict[str, Any], BatchTimes]]:
    """Stage and launch each batch before the one before is finished."""
    under_way: deque[StagedBatch] = deque()
    answers = []
    for number in range(count):
        under_way.append(runner.stage(batch(number, size), size))
        runner.launch(under_way[-1])
        if len(under_way) == 2:
            answers.append(runner.finish(under_way.popleft()))
    return [*answers, *(runner.finish(rest) for rest in under_way)]


def test_every_batch_gets_its_own_results_while_another_is_under_way(cuda: FakeCuda) -> None:
    for number, (outputs, _) in enumerate(run_two_deep(streamed(cuda), 7)):
        np.testing.assert_array_equal(outputs["y"], np.full((2, 2), 2.0 * number + 1))


@pytest.mark.parametrize("capability", [(7, 0), (9, 0)])
def test_strings_stay_on_the_host_while_the_numbers_beside_them_go_to_the_device(
    cuda: FakeCuda, capability: tuple[int, int]
) -> None:
    """On newer GPUs the defaults are CUDA graphs and folded batch norms, which strings rule out."""
    cuda.capability = capability
    runner = Alone(same_bytes(shape=(2,)), [1, 2, 3, 4])
    runner.runner.warm_up(1)
    texts = [np.array([[b"", b"\0"], [b"%d" % number, b"a\0"]], object) for number in range(5)]
    numbers = [np.full((2, 1), number, np.int32) for number in range(5)]
    under_way: deque[StagedBatch] = deque()
    found = []
    for x, n in zip(texts, numbers, strict=True):
        under_way.append(runner.stage({"x": x, "n": n}, 2))
        runner.launch(under_way[-1])
        if len(under_way) == 2:
            found.append(runner.finish(under_way.popleft())[0])
    found += [runner.finish(rest)[0] for rest in under_way]
    assert [(each["y"].tolist(), each["m"].tolist()) for each in found] == [
        (x.tolist(), n.tolist()) for x, n in zip(texts, numbers, strict=True)
    ]


def test_the_fake_notices_a_buffer_that_is_overwritten_in_use(cuda: FakeCuda) -> None:
    runner = streamed(cuda)
    under_way = runner.stage(batch(1), 2)
    runner.launch(under_way)
    assert under_way.slot is not None
    under_way.slot.pinned["m", "x", "float32"].fill_(5.0)
    np.testing.assert_array_equal(runner.finish(under_way)[0]["y"], np.full((2, 2), 11.0))


def test_the_next_copy_is_queued_before_the_kernels_of_this_batch_have_run(cuda: FakeCuda) -> None:
    runner = streamed(cuda)
    first = runner.stage(batch(1), 2)
    runner.launch(first)
    second = runner.stage(batch(2), 2)
    assert [what for _, what in cuda.enqueued] == ["copy", "kernels", "copy", "copy"]
    assert [name for name, _ in cuda.enqueued] == ["stream 1", "stream 0", "stream 2", "stream 1"]
    assert cuda.executed == []
    runner.launch(second)
    runner.finish(first)
    assert [what for _, what in cuda.executed] == ["copy", "kernels", "copy"]
    runner.finish(second)


def test_copies_overlap_with_kernels_and_waiting_is_not_execution(cuda: FakeCuda) -> None:
    runner = streamed(cuda)
    count = 6
    times = [times for _, times in run_two_deep(runner, count)]
    assert all(t.execution_ms == KERNELS_MS for t in times)
    assert all(t.copy_in_ms >= COPY_MS and t.copy_out_ms == COPY_MS for t in times)
    assert times[0].wait_ms == 0.0
    assert all(t.wait_ms > 0.0 for t in times[1:])
    copy_in, kernels, copy_out = cuda.streams[1], cuda.streams[0], cuda.streams[2]
    assert kernels.clock_ms == COPY_MS + count * KERNELS_MS  # the kernels never waited for a copy but the first
    assert copy_in.clock_ms == count * COPY_MS
    assert copy_out.clock_ms == kernels.clock_ms + COPY_MS


def test_without_streaming_the_copies_are_part_of_every_batch(cuda: FakeCuda) -> None:
    runner = Alone(late_model(cuda), [2], streams=False)
    for number in range(3):
        np.testing.assert_array_equal(runner.run(batch(number), 2)["y"], np.full((2, 2), 2.0 * number + 1))
    assert cuda.streams[0].clock_ms == 3 * (2 * COPY_MS + KERNELS_MS)


def test_a_third_batch_is_refused_and_buffers_are_kept(cuda: FakeCuda) -> None:
    runner = streamed(cuda)
    runner.runner.reserve()
    under_way = [runner.stage(batch(n), 2) for n in range(2)]
    slots = [staged.slot for staged in under_way]
    with pytest.raises(RuntimeError, match="finish one first"):
        runner.stage(batch(2), 2)
    for staged in under_way:
        runner.launch(staged)
        runner.finish(staged)
    cuda.pinned_rows.clear()
    run_two_deep(runner, 4)
    assert cuda.pinned_rows == [2] * 4  # of the answers; the inputs have theirs, for the largest batch
    assert [slot.pinned["m", "x", "float32"].shape[0] for slot in slots if slot is not None] == [4, 4]


def test_an_answer_is_not_overwritten_by_a_later_batch(cuda: FakeCuda) -> None:
    answers = run_two_deep(streamed(cuda), 5)
    memory = {outputs["y"].__array_interface__["data"][0] for outputs, _ in answers}
    assert len(memory) == 5


def test_a_failed_launch_gives_its_buffers_back(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = streamed(cuda)

    def fail(_self: LateNet, _x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(LateNet, "forward", fail)
        for number in range(3):
            staged = runner.stage(batch(number), 2)
            with pytest.raises(RuntimeError, match="illegal memory"):
                runner.launch(staged)
            runner.runner.discard(staged)
    outputs, _ = run_two_deep(runner, 1)[0]
    assert outputs["y"].tolist() == [[1.0, 1.0]] * 2


def test_a_wrong_integer_takes_no_buffer(cuda: FakeCuda) -> None:
    signature = ModelSignature(
        "tensor", (TensorSignature("ids", "int64", (2,), below=10),), (TensorSignature("y", "int64", (2,)),)
    )
    runner = Alone(LoadedModel(LateNet(cuda), signature), [1])
    for _ in range(3):
        with pytest.raises(InvalidInputError, match="ids: 99"):
            runner.stage({"ids": np.full((1, 2), 99)}, 1)
    staged = runner.stage({"ids": np.full((1, 2), 9)}, 1)
    runner.launch(staged)
    assert runner.finish(staged)[0]["y"].tolist() == [[19, 19]]


def test_blocks_go_to_the_device_without_being_put_together_first(cuda: FakeCuda) -> None:
    runner = streamed(cuda)
    blocks = {"x": [np.full((1, 2), 1.0, np.float32), np.full((2, 2), 2.0, np.float32)]}
    outputs = runner.runner.run({"m": blocks}, {"m": 3})["m"]
    assert outputs["y"].tolist() == [[3.0, 3.0], [5.0, 5.0], [5.0, 5.0]]


# --- pictures as pixels -----------------------------------------------------------------------------------------

PICTURE = ImageInput(resize_px=4, crop_px=4)


class Sum(torch.nn.Module):
    """Of a picture's values; on a fake it runs as late as it may."""

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        super().__init__()
        self.cuda = cuda

    def to(self, *_where: Any, **_how: Any) -> Sum:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = torch.full((len(x), 1), float("nan"))

        def add() -> None:
            answer.copy_(x.float().sum(dim=(1, 2, 3))[:, None])

        if self.cuda is None:
            add()
        else:
            self.cuda.kernels(add)
        return answer


def picture_model(cuda: FakeCuda | None = None) -> LoadedModel:
    return LoadedModel(Sum(cuda), image_signature(PICTURE, 1))


def pixels(number: int, rows: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, (rows, 3, 4, 4), dtype=np.uint8)


@pytest.mark.parametrize("options", [{}, {"uint8_input": False}, {"cuda_graphs": False}])
def test_pixels_are_normalised_behind_their_copy_whatever_else_is_chosen(
    cuda: FakeCuda, options: dict[str, Any]
) -> None:
    cuda.capability = (9, 0)
    runner = Alone(picture_model(cuda), [3], dtype="fp32", channels_last=False, **options)
    runner.runner.warm_up(1)
    signature = runner.runner.signatures["m"]
    assert sends_pixels(signature) is options.get("uint8_input", True)
    assert (signature.inputs[0].dtype, signature.inputs[0].accepts) == ("float32", ("uint8", "float16"))
    for number in range(4):
        given = pixels(number, 3)
        expected = normalised(given, PICTURE).sum(axis=(1, 2, 3))
        np.testing.assert_allclose(runner.run({"image": given}, 3)["logits"][:, 0], expected, rtol=1e-4, atol=1e-3)
        for dtype, rtol in ((np.float32, 1e-4), (np.float16, 2e-3)):
            as_floats = {"image": normalised(given, PICTURE).astype(dtype)}
            np.testing.assert_allclose(runner.run(as_floats, 3)["logits"][:, 0], expected, rtol=rtol, atol=2e-2)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_a_batch_may_hold_pixels_and_normalised_pictures_of_either_float(cuda: FakeCuda, on_cuda: bool) -> None:
    device = "cuda" if on_cuda else "cpu"
    runner = Alone(picture_model(cuda if on_cuda else None), [4], device=device, pad_batches=True)
    rows = [pixels(number, 1) for number in range(3)]
    halves = normalised(rows[2], PICTURE).astype(np.float16)
    expected = [normalised(rows[0], PICTURE).sum(), normalised(rows[1], PICTURE).sum(), halves.astype(np.float32).sum()]
    for first in (rows[0], normalised(rows[0], PICTURE)):
        blocks = {"image": [first, normalised(rows[1], PICTURE), halves]}
        found = runner.runner.run({"m": blocks}, {"m": 3})["m"]["logits"]
        np.testing.assert_allclose(found[:, 0], expected, rtol=1e-4, atol=1e-3)
    alone = runner.runner.run({"m": {"image": [halves]}}, {"m": 1})["m"]["logits"]
    np.testing.assert_allclose(alone[:, 0], expected[2:], rtol=1e-4, atol=1e-3)


def test_an_integer_input_of_a_model_without_pictures_stays_one() -> None:
    signature = ModelSignature("tensor", (TensorSignature("n", "uint8", (2,)),), (TensorSignature("y", "uint8", (2,)),))
    runner = Alone(LoadedModel(torch.nn.Identity(), signature), [1], device="cpu")
    given = np.array([[3, 250]], np.uint8)
    np.testing.assert_array_equal(runner.run({"n": given}, 1)["y"], given)


# --- what PyTorch keeps for the process -------------------------------------------------------------------------


@pytest.mark.parametrize("is_fast", [False, True])
def test_every_model_runs_with_its_own_tf32_whatever_ran_before(cuda: FakeCuda, is_fast: bool) -> None:
    backends = torch.backends
    before = backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32, backends.cudnn.benchmark
    runner = Alone(late_model(cuda), [2], tf32=is_fast, cudnn_benchmark=is_fast)
    try:
        backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = backends.cudnn.benchmark = not is_fast
        runner.run(batch(1), 2)
        # PyTorch's own default is TF32 for convolutions: what asks for fp32 must say so.
        assert (backends.cudnn.conv.fp32_precision == "tf32") is is_fast
        assert (backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32) == (is_fast, is_fast)
        assert backends.cudnn.benchmark is is_fast
    finally:
        backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32, backends.cudnn.benchmark = before


# --- CUDA graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_graphs_are_captured_once_per_size_and_replayed(cuda: FakeCuda, is_streamed: bool) -> None:
    runner = streamed(cuda, cuda_graphs=True)
    net = runner.net
    runner.runner.warm_up(1)
    assert len(cuda.graphs) == 4  # from the largest down
    assert net.forwards == 4 * (2 + 1)  # two runs to warm up and the capture
    expected = [2.0 * n + 1 for n in range(6)]
    if is_streamed:
        got = [outputs["y"] for outputs, _ in run_two_deep(runner, 6, size=3)]
    else:
        got = [runner.run(batch(n, 3), 3)["y"] for n in range(6)]
    for value, answer in zip(expected, got, strict=True):
        np.testing.assert_array_equal(answer, np.full((3, 2), value))
    assert net.forwards == 12
    assert [graph.replays for graph in cuda.graphs] == [1, 1 + 6, 1, 1]


def test_what_cannot_be_captured_is_named_with_the_cure(cuda: FakeCuda) -> None:
    runner = streamed(cuda, syncs=True, cuda_graphs=True)
    with pytest.raises(
        EnvironmentFaultError, match=r"'m' cannot be captured .* at batch 2: CUDA error: .*remove `cuda_graphs: true`"
    ) as caught:
        runner.run(batch(1), 2)
    assert "\n" not in str(caught.value)


def test_a_size_that_was_not_captured_is_padded_to_the_next(cuda: FakeCuda) -> None:
    runner = Alone(late_model(cuda), [20], cuda_graphs=True)
    runner.runner.warm_up(1)
    np.testing.assert_array_equal(runner.run(batch(3, 18), 18)["y"], np.full((18, 2), 7.0))
    assert cuda.graphs[0].replays == 2  # the one of 20


def test_where_graphs_were_only_the_devices_choice_a_network_goes_without(cuda: FakeCuda) -> None:
    cuda.capability = (9, 0)
    runner = Alone(late_model(cuda, syncs=True), [2], dtype="fp32")
    np.testing.assert_array_equal(runner.run(batch(1), 2)["y"], np.full((2, 2), 3.0))
    (note,) = runner.runner.network.notes
    assert "runs without CUDA graphs: 'm' cannot be captured" in note
    np.testing.assert_array_equal(runner.run(batch(2), 2)["y"], np.full((2, 2), 5.0))


def test_too_little_memory_for_a_graph_stays_what_it_is(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: LateNet, _x: torch.Tensor) -> torch.Tensor:
        if cuda.capturing is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return _x

    runner = streamed(cuda, cuda_graphs=True)
    monkeypatch.setattr(LateNet, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        runner.run(batch(1), 2)


# --- without a fake ---------------------------------------------------------------------------------------------


def images(number: int) -> dict[str, Any]:
    return {"image": np.random.default_rng(number).standard_normal((4, 3, 32, 32), dtype=np.float32)}


def test_on_a_cpu_results_are_those_of_a_plain_run() -> None:
    runner = Alone(build("mobilenet_v2", options=SMALL["mobilenet_v2"]), [4], device="cpu")
    first, second = runner.stage(images(0), 4), runner.stage(images(1), 4)
    for number, staged in enumerate((first, second)):
        runner.launch(staged)
        outputs, times = runner.finish(staged)
        np.testing.assert_array_equal(outputs["logits"], runner.run(images(number), 4)["logits"])
        assert times.execution_ms > 0
        assert times.wait_ms >= 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graphs": False, "channels_last": False},
        {"cuda_graphs": True},
        {"channels_last": True, "cuda_graphs": True},
    ],
)
def test_on_a_gpu_streamed_results_are_those_of_a_plain_forward_pass(options: dict[str, Any]) -> None:
    module = build("mobilenet_v2", options=SMALL["mobilenet_v2"]).module
    with torch.inference_mode():
        plain = [module(torch.from_numpy(images(n)["image"])).numpy() for n in range(6)]
    exact = {"dtype": "fp32", "tf32": False}  # with random weights this network magnifies bf16's rounding to 0.4
    runner = Alone(build("mobilenet_v2", options=SMALL["mobilenet_v2"]), [4], **exact, **options)
    runner.runner.warm_up(1)
    under_way: deque[StagedBatch] = deque()
    answers = []
    for number in range(6):
        under_way.append(runner.stage(images(number), 4))
        runner.launch(under_way[-1])
        if len(under_way) == 2:
            answers.append(runner.finish(under_way.popleft())[0]["logits"])
    answers.append(runner.finish(under_way.popleft())[0]["logits"])
    for expected, answer in zip(plain, answers, strict=True):
        np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=2e-2 * np.abs(expected).max())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_pixels_give_what_normalised_pictures_give() -> None:
    loaded = build("mobilenet_v2", options=SMALL["mobilenet_v2"])
    assert loaded.signature.image is not None
    runner = Alone(loaded, [4], dtype="fp32", tf32=False, uint8_input=True)
    runner.runner.warm_up(1)
    given = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    expected = runner.run({"image": normalised(given, loaded.signature.image)}, 4)["logits"]
    found = runner.run({"image": given}, 4)["logits"]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize("pad", [None, 0.0])
@pytest.mark.parametrize("capability", [(7, 0), (9, 0)])
def test_batches_of_several_sizes_overlap_on_a_device_and_get_their_own_results(
    cuda: FakeCuda, capability: tuple[int, int], pad: float | None
) -> None:
    """The defaults of newer GPUs, CUDA graphs among them, are off for these."""
    cuda.capability = capability
    x, y = TensorSignature("x", "float32", ("n",), pad=pad), TensorSignature("y", "float32", ("n",))
    net = LateNet(cuda)
    loaded = LoadedModel(net, ModelSignature("tensor", (x,), (y,), sizes={"n": SizeRange(9)}))
    runner = Alone(loaded, [1, 3], dtype="fp32").runner
    runner.warm_up(1)
    assert runner.network.way == "plain"
    net.forwards = 0
    dice, under_way = np.random.default_rng(6), deque[tuple[list[Any], StagedBatch]]()
    found: list[tuple[list[Any], list[Arrays]]] = []

    def finish() -> None:
        rows, staged = under_way.popleft()
        found.append((rows, runner.finish(staged)[0]["m"]))

    for _ in range(6):
        rows = [dice.random((1, int(dice.integers(1, 10))), np.float32) for _ in range(3)]
        under_way.append((rows, runner.stage({"m": {"x": rows}}, {"m": 3})))
        runner.launch(under_way[-1][1])
        if len(under_way) == 2:
            finish()
    while under_way:
        finish()
    for rows, parts in found:
        answers = [row for part in parts for row in part["y"]]
        for given, answer in zip(rows, answers, strict=True):
            np.testing.assert_array_equal(answer, given[0] * 2 + 1)
    sizes = [len({row.shape for row in rows}) for rows, _ in found]
    assert net.forwards == (sum(sizes) if pad is None else len(sizes))
