"""A model's options by whom they concern: every wrong key by itself, contradictions, and what merging refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.model_options import (
    CostOptions,
    ModelOptions,
    RunOptions,
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


@pytest.mark.parametrize("options", [
    {},
    {"dtype": "bf16", "channels_last": True, "pad_batches": True, "compile": True, "warmup_runs": 3},
    {"cuda_graphs": True, "compile": False},
    {"cuda_graphs": "true", "warmup_runs": "3"},  # as `--option K=V` gives them
    {"image_size": "large", "depth": [1], "copy_in_ms": 1.0},  # says how it is built, or is emulated
])
def test_what_a_gpulet_would_load_passes(options: dict[str, Any]) -> None:
    assert run_option_problems(options, "models.0.options") == []
    ModelOptions.parse(options, "options of m")


def test_every_wrong_key_is_told_with_its_own_path() -> None:
    options = {"dtype": "fp8", "compile": True, "cuda_graphs": True, "warmup_runs": 0, "channels_last": "very"}
    found = run_option_problems(options, "models.3.options", on_cpu=True)
    assert [(p.path, p.value) for p in found] == [
        ("models.3.options.dtype", "fp8"), ("models.3.options.warmup_runs", 0),
        ("models.3.options.channels_last", "very"), ("models.3.options.cuda_graphs", True),
        ("models.3.options.cuda_graphs", True),
    ]  # fmt: skip
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
