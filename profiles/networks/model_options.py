"""A model's `options`, separated by whom they concern; read without torch, so that a plan can be checked anywhere.

How a model is run and what a batch costs on an emulated GPU have names of their own; every other key says how the model
is built: `BuildOptions` for a network of the catalogue, keyword arguments for a user's factory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from tenuto.documents import StrictModel, parse_document
from tenuto.errors import InvalidInputError, Problem

__all__ = [
    "BuildOptions",
    "CostOptions",
    "ModelOptions",
    "RunOptions",
    "fixed_sizes",
    "run_option_problems",
    "unmergeable_options",
]


class BuildOptions(StrictModel):
    """How a catalogue model departs from its entry.

    `config` overrides arguments of the network itself (`{"width_mult": 0.25}`, `{"num_hidden_layers": 2}`): smaller
    networks for tests, other sizes of the same family. `tokenizer` is a local `tokenizer.json`.
    """

    seed: int = 0
    config: dict[str, Any] = Field(default_factory=dict)
    image_size: int | None = Field(default=None, ge=1)
    sequence_length: int | None = Field(default=None, ge=1)
    num_labels: int | None = Field(default=None, ge=1)
    labels: tuple[str, ...] = ()
    tokenizer: str | None = None


class RunOptions(StrictModel):
    """How a model is run.

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


class CostOptions(StrictModel):
    """What a batch costs on an emulated GPU beyond its plan: the copies of one request in and out, in ms."""

    copy_in_ms: float | None = Field(default=None, ge=0, strict=True)
    copy_out_ms: float | None = Field(default=None, ge=0, strict=True)


_BOTH, _KEEP_ONE = "gives both 'compile' and 'cuda_graphs'", "Keep one of them."


@dataclass(frozen=True)
class ModelOptions:
    """The options of one model in three parts; `build` is still unread, as only who builds knows its keys."""

    build: Mapping[str, Any]
    run: RunOptions
    cost: CostOptions

    @classmethod
    def parse(cls, options: Mapping[str, Any], origin: str) -> ModelOptions:
        """Separate and check a model's options.

        Raises:
            InvalidInputError: a value of how the model is run, or of what it costs, is wrong.
        """
        run = {key: value for key, value in options.items() if key in RunOptions.model_fields}
        cost = {key: value for key, value in options.items() if key in CostOptions.model_fields}
        build = {key: value for key, value in options.items() if key not in run and key not in cost}
        return cls(
            build, parse_document(RunOptions, run, origin=origin), parse_document(CostOptions, cost, origin=origin)
        )


def fixed_sizes(largest: int) -> tuple[int, ...]:
    """Return the batch sizes that are compiled or captured: powers of two below the largest, and the largest."""
    return (*(2**k for k in range((largest - 1).bit_length())), largest)


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
