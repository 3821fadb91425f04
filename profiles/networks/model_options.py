"""A model's `options`, separated by kind. They are read without torch, so that a plan can be checked anywhere.

Known keys say how a model is run, name its hooks, or say what a batch costs on an emulated GPU. All other keys say how
the model is built: `BuildOptions` for a network of the catalogue, keyword arguments for a user's factory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tenuto.documents import Fault, ProblemsBelow, StrictModel, parse_document
from tenuto.errors import InvalidInputError, Problem
from tenuto.profiles.gpu_types import FAST_CAPABILITY
from tenuto.profiles.networks.catalogue import SizeRange, is_factory


class BuildOptions(StrictModel):
    """How a catalogue model departs from its entry.

    `config` overrides arguments of the network itself (`{"width_mult": 0.25}`, `{"num_hidden_layers": 2}`): smaller
    networks for tests, other sizes of the same family. `tokenizer` is a local `tokenizer.json`; for a model that
    generates also a folder with one, or `bytes`, which needs no file. `truncate`: whether texts with more than
    `sequence_length` tokens are cut, which classifiers do and sentence encoders and rankers do not by themselves.
    """

    seed: int = 0
    config: dict[str, Any] = Field(default_factory=dict)
    image_size: int | None = Field(default=None, ge=1)
    sequence_length: int | None = Field(default=None, ge=1)
    num_labels: int | None = Field(default=None, ge=1)
    labels: tuple[str, ...] = ()
    tokenizer: str | None = None
    truncate: bool | None = None


BATCH = "batch"  # the word for the dimension of the batch in `shapes`


class ShapeOptions(StrictModel):
    """What a file of a network does not say of its shapes.

    `sizes`: how large each size may be: its `most`, or a range of `least`, `most` and `multiple`. `pad`: the value with
    which an input may be filled up to a longer size. `shapes`: the dimensions of a tensor by name, all of them, with
    the word `batch` for that of the batch, where the file has no names, other ones, or none of the batch. `types`: of
    the tensors of TorchScript, float32 where they are not named; its `shapes` list the inputs first.
    `example`: the value of an input in made-up requests, for networks that do not run with any number. `labels`: names
    of the entries of the first output.
    """

    sizes: dict[str, SizeRange] = Field(default_factory=dict)
    pad: dict[str, float] = Field(default_factory=dict)
    shapes: dict[str, tuple[int | str, ...]] = Field(default_factory=dict)
    types: dict[str, str] = Field(default_factory=dict)
    example: dict[str, float] = Field(default_factory=dict)
    labels: tuple[str, ...] = ()

    @field_validator("sizes", mode="before")
    @classmethod
    def _numbers_are_the_most(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: {"most": size} if type(size) is int else size for name, size in given.items()}


def with_most_sizes(options: Mapping[str, Any], most: Mapping[str, int]) -> dict[str, Any]:
    """Return the options of a file with a largest of each size where they have none."""
    given = options.get("sizes", {})
    return {**options, "sizes": {**most, **given}} if most and isinstance(given, dict) else dict(options)


Runtime = Literal["torch", "aot_inductor", "onnxruntime", "tensorrt", "vllm"]


class RunOptions(StrictModel):
    """How a model is run. Options that are left open (None, `auto`) are chosen for the device; see `chosen`.

    Half precision (`bf16`, `fp16`) changes the results within its own tolerance; `tf32` does so for products of fp32
    numbers. `channels_last` is the layout of pictures inside the network. `cuda_graphs` captures the kernels of every
    batch size and replays them. `compile` runs the module through `torch.compile` with fixed shapes. Both pad batches
    to the next prepared size, and exclude each other. `fold_batch_norms` folds batch normalisations into convolutions.
    `cudnn_benchmark` lets cuDNN try its algorithms for every size. `pad_batches` fills every batch up with blank rows
    to the next planned size. `uint8_input`: pictures are sent as uint8 pixels, a quarter of the bytes, and normalised
    on the device; normalised float32 is taken too. `runtime` executes the model: PyTorch, a program that `torch.export`
    and AOTInductor compiled, ONNX Runtime with or without TensorRT, or vLLM for a model that generates.
    """

    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    channels_last: bool | None = None
    cuda_graphs: bool | None = None
    fold_batch_norms: bool | None = None
    cudnn_benchmark: bool | None = None
    tf32: bool | None = None
    uint8_input: bool | None = None
    compile: bool = False
    pad_batches: bool = False
    runtime: Runtime = "torch"
    warmup_runs: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _one_way(self) -> RunOptions:
        problems = []
        if self.compile and self.cuda_graphs:
            rule = "gives both 'compile' and 'cuda_graphs'"
            problems.append(Problem("cuda_graphs", True, rule, "Keep one of them."))
        if self.runtime != "torch" and (self.compile or self.cuda_graphs):
            rule = "gives 'compile' or 'cuda_graphs' with a runtime that is not PyTorch"
            problems.append(Problem("runtime", self.runtime, rule, "Keep one of them."))
        if problems:
            raise ProblemsBelow(problems)
        return self

    def chosen(self, capability: tuple[int, int] | None) -> ChosenOptions:
        """Return all options for a device: the given ones, and for the rest the device's defaults.

        From compute capability 8.0 on the defaults are bf16 (with ONNX Runtime and TensorRT fp16, as these have few
        kernels for bf16), channels last, CUDA graphs if the network can be captured, folded batch norms, cuDNN's own
        choice, TF32 and pictures as pixels. On older GPUs and on a CPU no default changes a result or a kernel.

        Args:
            capability: the compute capability of the CUDA device; None for a CPU.
        """
        is_fast = capability is not None and capability >= FAST_CAPABILITY

        def choose(value: bool | None, *, fast: bool = True) -> bool:
            return (is_fast and fast) if value is None else value

        own = self.runtime == "torch"
        half: Literal["fp16", "bf16"] = "fp16" if self.runtime in ("onnxruntime", "tensorrt") else "bf16"
        return ChosenOptions(
            dtype=self.dtype if self.dtype != "auto" else half if is_fast else "fp32",
            channels_last=choose(self.channels_last, fast=own),
            tf32=choose(self.tf32),
            cuda_graphs=choose(self.cuda_graphs, fast=own and not self.compile),
            graphs_are_asked_for=bool(self.cuda_graphs),
            fold_batch_norms=choose(self.fold_batch_norms),
            cudnn_benchmark=choose(self.cudnn_benchmark),
            uint8_input=choose(self.uint8_input),
            compile=self.compile,
            pad_batches=self.pad_batches,
            runtime=self.runtime,
            warmup_runs=self.warmup_runs,
        )


@dataclass(frozen=True)
class ChosenOptions:
    """How a model is run on one device, with no option left open. `graphs_are_asked_for`: when the model cannot be
    captured, that is an error; otherwise it runs without CUDA graphs."""

    dtype: Literal["fp32", "fp16", "bf16"]
    channels_last: bool
    cuda_graphs: bool
    graphs_are_asked_for: bool
    fold_batch_norms: bool
    cudnn_benchmark: bool
    tf32: bool
    uint8_input: bool
    compile: bool
    pad_batches: bool
    runtime: Runtime
    warmup_runs: int

    @property
    def prepared_sizes(self) -> bool:
        """Whether batches are padded to a few sizes, which are prepared before requests come."""
        return self.compile or self.cuda_graphs or self.runtime == "aot_inductor"

    def to_data(self) -> dict[str, Any]:
        """Return the options that decide a model's latency, for the profile and for plans that use it."""
        data = asdict(self)
        del data["warmup_runs"], data["graphs_are_asked_for"]
        return data


PLAIN = RunOptions(
    dtype="fp32",
    channels_last=False,
    cuda_graphs=False,
    fold_batch_norms=False,
    cudnn_benchmark=False,
    tf32=False,
    uint8_input=False,
)
"""Options that change no result. The outputs of a merged program are compared with originals that run like this."""


class CostOptions(StrictModel):
    """Costs on an emulated GPU that are not in the plan: the copies of one request in and out, in ms."""

    copy_in_ms: float | None = Field(default=None, ge=0, strict=True)
    copy_out_ms: float | None = Field(default=None, ge=0, strict=True)


class HookOptions(StrictModel):
    """The user's own pre- and post-processing of raw bodies and outputs: `hooks` names it (`package.module:factory`,
    see `tenuto.profiles.networks.hooks`), and `hook_processes` processes of each gateway run it."""

    hooks: str | None = None
    hook_processes: int = Field(default=2, ge=1, le=64)

    @field_validator("hooks")
    @classmethod
    def _is_named(cls, hooks: str | None) -> str | None:
        if hooks is not None and not is_factory(hooks):
            raise Fault("names no hooks", "write package.module:factory")
        return hooks


@dataclass(frozen=True)
class ModelOptions:
    """The options of one model in four parts. `build` is not checked yet, as only the builder knows its keys."""

    build: Mapping[str, Any]
    run: RunOptions
    cost: CostOptions
    hooks: HookOptions = field(default_factory=HookOptions)

    def checked_build(self, origin: str) -> BuildOptions:
        """Return `build` for a network that is built by configuration; raises `InvalidInputError`."""
        return parse_document(BuildOptions, dict(self.build), origin=origin)

    @classmethod
    def parse(cls, options: Mapping[str, Any], origin: str) -> ModelOptions:
        """Separate and check a model's options.

        Raises:
            InvalidInputError: a value of the run, hook or cost options is wrong.
        """
        kinds: Any = (RunOptions, CostOptions, HookOptions)
        named = {key for kind in kinds for key in kind.model_fields}
        build = {key: value for key, value in options.items() if key not in named}
        return cls(build, *(parse_document(kind, _of(kind, options), origin=origin) for kind in kinds))


def _of(kind: type[StrictModel], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options whose keys one kind of options has."""
    return {key: value for key, value in options.items() if key in kind.model_fields}


def run_differences(
    measured: Mapping[str, Any], options: Mapping[str, Any], capability: tuple[int, int] | None
) -> dict[str, tuple[Any, Any]]:
    """Return, by key, the options that differ between the measurement and the run: (as measured, as it would run).

    Args:
        measured: `run` of the model's profile.
        options: options of the model in a workload or plan, already checked.
        capability: compute capability of the device it would run on; None for a CPU.
    """
    would = ModelOptions.parse(options, "options").run.chosen(capability).to_data()
    return {key: (measured[key], would[key]) for key in would if key in measured and measured[key] != would[key]}


def compiled_sizes(largest: int) -> tuple[int, ...]:
    """Return the batch sizes that are compiled: powers of two below the largest, and the largest."""
    return (*(2**k for k in range((largest - 1).bit_length())), largest)


def captured_sizes(largest: int) -> tuple[int, ...]:
    """Return the batch sizes that are captured: every one to 16, then every eighth, and the largest.

    A capture costs only a few runs, and captures share their memory. Without those in between, a batch of 17 would be
    padded to 32 and take as long as one of 32.
    """
    # Derived: all sizes to 16, then every eighth, as padding costs less there.
    return tuple(sorted({*range(1, min(16, largest) + 1), *range(24, largest, 8), largest}))


def run_option_problems(options: Mapping[str, Any], path: str, *, on_cpu: bool = False) -> list[Problem]:
    """Return the problems of a model's run options and hooks, one per key.

    Args:
        options: options of the model in a workload or plan; keys that say how it is built are not checked.
        path: the path of the options, such as `models.0.options`.
        on_cpu: whether the model runs on a CPU, which has no CUDA graphs.
    """
    given = _of(RunOptions, options)
    wrong = _problems_of(RunOptions, given)
    # One wrong value must not hide a contradiction between the other values.
    right = {key: value for key, value in given.items() if key not in {problem.path for problem in wrong}}
    problems = [*wrong, *(_problems_of(RunOptions, right) if wrong else ())]
    problems += _problems_of(HookOptions, _of(HookOptions, options))
    if on_cpu and RunOptions(cuda_graphs=right.get("cuda_graphs")).cuda_graphs:
        rule = "CUDA graphs need an NVIDIA GPU, and it runs on a CPU"
        cure = "Remove it; `compile: true` works on a CPU."
        problems.append(Problem("cuda_graphs", options["cuda_graphs"], rule, cure))
    return [replace(problem, path=f"{path}.{problem.path}") for problem in problems]


def _problems_of(kind: type[StrictModel], given: Mapping[str, Any]) -> tuple[Problem, ...]:
    try:
        parse_document(kind, given)
    except InvalidInputError as error:
        return error.problems
    return ()


def unmergeable_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by key, the options that are not possible in a merged program: a type other than fp32, because its
    rounding exceeds the tolerance, and all options for a single module. Keys with wrong values are left out."""
    left_open = RunOptions()
    unmergeable = {}
    for key, value in options.items():
        if key not in RunOptions.model_fields or key == "warmup_runs" or run_option_problems({key: value}, ""):
            continue
        if getattr(parse_document(RunOptions, {key: value}), key) not in (getattr(left_open, key), getattr(PLAIN, key)):
            unmergeable[key] = value
    return unmergeable
