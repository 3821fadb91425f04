"""How a model is run, as its `options` in the workload say; read without torch, so that a plan can be checked anywhere.

Keys that are not named here say how the model is built, and belong to the catalogue or to a user's factory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tenuto.documents import StrictModel, parse_document
from tenuto.errors import InvalidInputError, Problem

__all__ = ["RunOptions", "run_option_problems", "split_options", "unmergeable_options"]


class RunOptions(StrictModel):
    """How a model is run; part of its `options` in the workload, beside those that say how it is built.

    `pad_batches` runs every batch at the next planned size, filled up with blank rows; without it a batch of three runs
    as three. `compile` runs the module through `torch.compile` with fixed shapes: batches are padded to the next of the
    powers of two up to the planned batch, so that none is compiled while requests wait. `cuda_graphs` captures the
    kernels of the same fixed sizes and replays them; it needs a GPU and goes without `compile`. Half
    precision (`fp16`, `bf16`) changes the results within its own tolerance.
    """

    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    channels_last: bool = False
    pad_batches: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    warmup_runs: int = Field(default=2, ge=1)

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether batches are padded to a few sizes, each prepared before requests come."""
        return self.compile or self.cuda_graphs

    @model_validator(mode="after")
    def _one_way(self) -> RunOptions:
        if self.compile and self.cuda_graphs:
            raise ValueError(f"{_BOTH}; cure: {_KEEP_ONE}")
        return self


_BOTH, _KEEP_ONE = "gives both 'compile' and 'cuda_graphs'", "Keep one of them."
# Keys of a replica's options that concern the emulated executor.
_FOREIGN = ("latency", "slowdown", "copy_in_ms", "copy_out_ms")


def split_options(options: Mapping[str, Any], origin: str) -> tuple[RunOptions, dict[str, Any]]:
    """Return how a model is run, and what is left to say how it is built; raises `InvalidInputError` if wrong."""
    mine = {key: value for key, value in options.items() if key in RunOptions.model_fields}
    rest = {key: value for key, value in options.items() if key not in mine and key not in _FOREIGN}
    return parse_document(RunOptions, mine, origin=origin), rest


def run_option_problems(options: Mapping[str, Any], path: str, *, on_cpu: bool = False) -> list[Problem]:
    """Return all that is wrong with how a model shall be run, one problem per key.

    Args:
        options: of the model in a workload or plan; keys that say how it is built are not judged.
        path: of the options, such as `models.0.options`.
        on_cpu: whether it runs on a CPU, where there are no CUDA graphs.
    """
    found: list[Problem] = []
    chosen: dict[str, Any] = {}  # key by key: one wrong value must not hide what the others contradict
    for key, value in options.items():
        if key not in RunOptions.model_fields:
            continue
        try:
            chosen[key] = getattr(parse_document(RunOptions, {key: value}), key)
        except InvalidInputError as error:
            found += [Problem(f"{path}.{key}", p.value, p.rule, p.cure) for p in error.problems]
    if chosen.get("cuda_graphs") and chosen.get("compile"):
        found.append(Problem(f"{path}.cuda_graphs", options["cuda_graphs"], _BOTH, _KEEP_ONE))
    if chosen.get("cuda_graphs") and on_cpu:
        rule = "CUDA graphs need an NVIDIA GPU, and it runs on a CPU"
        cure = "Remove it; `compile: true` works on a CPU."
        found.append(Problem(f"{path}.cuda_graphs", options["cuda_graphs"], rule, cure))
    return found


def unmergeable_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a merged program does not know, by key: a type other than fp32, whose rounding exceeds
    the tolerance, and all that say how a single module is run. Keys with wrong values are left out."""
    plain = RunOptions()
    found = {}
    for key, value in options.items():
        if key not in RunOptions.model_fields or key == "warmup_runs" or run_option_problems({key: value}, ""):
            continue
        if getattr(parse_document(RunOptions, {key: value}), key) != getattr(plain, key):
            found[key] = value
    return found
