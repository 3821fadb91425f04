"""A model's options by whom they concern: every wrong key by itself, contradictions, and what merging refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.model_options import (
    PLAIN,
    CostOptions,
    ModelOptions,
    RunOptions,
    captured_sizes,
    run_option_problems,
    unmergeable_options,
)


def test_options_are_told_apart_by_whom_they_concern() -> None:
    found = ModelOptions.parse({"dtype": "fp16", "image_size": 64, "copy_in_ms": 1}, "options of m")
    assert found == ModelOptions({"image_size": 64}, RunOptions(dtype="fp16"), CostOptions(copy_in_ms=1.0))


@pytest.mark.parametrize("wrong", [-1, "fast", True, float("nan")])
def test_a_wrong_cost_is_named(wrong: object) -> None:
    with pytest.raises(InvalidInputError, match=r"options of m: copy_out_ms"):
        ModelOptions.parse({"copy_out_ms": wrong}, "options of m")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bf16", "channels_last": True, "pad_batches": True, "compile": True, "warmup_runs": 3},
        {"cuda_graphs": True, "compile": False},
        {"cuda_graphs": "true", "warmup_runs": 3},
        {"image_size": "large", "depth": [1], "copy_in_ms": 1.0},  # says how it is built, or is emulated
    ],
)
def test_what_a_gpulet_would_load_passes(options: dict[str, Any]) -> None:
    assert run_option_problems(options, "models.0.options") == []
    ModelOptions.parse(options, "options of m")


def test_every_wrong_key_is_told_with_its_own_path() -> None:
    options = {"dtype": "fp8", "compile": True, "cuda_graphs": True, "warmup_runs": 0, "channels_last": "very"}
    found = run_option_problems(options, "models.3.options", on_cpu=True)
    assert [(p.path, p.value) for p in found] == [
        ("models.3.options.dtype", "fp8"),
        ("models.3.options.channels_last", "very"),
        ("models.3.options.warmup_runs", 0),
        ("models.3.options.cuda_graphs", True),
        ("models.3.options.cuda_graphs", True),
    ]
    assert all(p.rule and p.cure.endswith(".") for p in found)
    assert "both 'compile' and 'cuda_graphs'" in found[3].rule
    assert "need an NVIDIA GPU" in found[4].rule
    with pytest.raises(InvalidInputError):
        ModelOptions.parse(options, "options of m")


def test_a_merged_program_knows_only_how_often_to_warm_up() -> None:
    plain = {"dtype": "fp32", "compile": False, "warmup_runs": 5, "image_size": 64}
    assert unmergeable_options(plain) == {}
    other = {"dtype": "fp16", "compile": True, "pad_batches": "yes", "channels_last": "very"}
    assert unmergeable_options(plain | other) == {"dtype": "fp16", "compile": True, "pad_batches": "yes"}


FAST = {
    "dtype": "bf16",
    "channels_last": True,
    "cuda_graphs": True,
    "fold_batch_norms": True,
    "cudnn_benchmark": True,
    "tf32": True,
    "uint8_input": True,
}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 3)])
def test_what_is_left_open_is_fast_on_a_device_that_can(capability: tuple[int, int]) -> None:
    chosen = RunOptions().chosen(capability).to_data()
    assert {key: chosen[key] for key in FAST} == FAST


@pytest.mark.parametrize("capability", [None, (7, 0), (7, 5)])
def test_a_cpu_and_older_devices_change_nothing(capability: tuple[int, int] | None) -> None:
    assert RunOptions().chosen(capability) == PLAIN.chosen(capability)


@pytest.mark.parametrize(("key", "value"), [(key, "fp32" if key == "dtype" else False) for key in FAST])
def test_each_can_be_turned_off(key: str, value: Any) -> None:
    chosen = ModelOptions.parse({key: value}, "m").run.chosen((9, 0)).to_data()
    assert {name: chosen[name] for name in FAST} == FAST | {key: value}


def test_compiled_modules_and_other_runtimes_go_without_graphs() -> None:
    assert not RunOptions(compile=True).chosen((9, 0)).cuda_graphs
    other = RunOptions(runtime="onnxruntime").chosen((9, 0))
    assert (other.cuda_graphs, other.channels_last, other.dtype) == (False, False, "fp16")
    with pytest.raises(InvalidInputError, match="runtime that is not PyTorch"):
        ModelOptions.parse({"runtime": "onnxruntime", "compile": True}, "m")


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, (1,)), (3, (1, 2, 3)), (20, (*range(1, 17), 20)), (40, (*range(1, 17), 24, 32, 40))]
)
def test_every_size_to_16_is_captured_then_every_eighth(largest: int, sizes: tuple[int, ...]) -> None:
    assert captured_sizes(largest) == sizes
