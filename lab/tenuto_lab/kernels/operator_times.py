"""Times every operator of a model where it really runs; the estimator learns single kernels from this (USHER, 4.1).

A timed operator has the same fields as a traced one, so that no names of two tools have to be matched.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from tenuto.documents import StrictModel, dump_yaml
from tenuto.errors import InvalidInputError, refused
from tenuto.profiles.measuring.kernels.recording import write_trace
from tenuto.profiles.networks.inputs import random_inputs
from tenuto_lab.estimator.trace import Operator, operator_recorder
from tenuto_lab.kernels.by_operator import RANGE_NAME, OperatorKernel, load_operator_kernels

_WARM_UP_RUNS = 2
_REPEATS = 5


class TimedKernel(StrictModel):
    """One kernel of an operator, with its duration in ms and its occupancy in percent."""

    name: str
    time_ms: Annotated[float, Field(ge=0)]
    occupancy_pct: Annotated[float, Field(ge=0, le=100)] | None = None


class TimedOperator(StrictModel):
    """One operator with its work in FLOPs and bytes, the median of its times in ms, and on a GPU its occupancy.

    `kernels` are those it launched, in order, where a GPU's were recorded; its time is then the sum of theirs.
    `occupancy_pct` is the largest of them, estimated from their launch configurations; None where not recorded.
    """

    name: str
    kind: str
    flops: Annotated[float, Field(ge=0)]
    read_bytes: Annotated[float, Field(ge=0)]
    written_bytes: Annotated[float, Field(ge=0)]
    weight_bytes: Annotated[float, Field(ge=0)]
    time_ms: Annotated[float, Field(ge=0)]
    occupancy_pct: Annotated[float, Field(ge=0, le=100)] | None = None
    kernels: tuple[TimedKernel, ...] = ()

    def operator(self) -> Operator:
        """Return it as the trace's operator, without its inputs."""
        return Operator(self.name, self.kind, self.flops, self.read_bytes, self.written_bytes, self.weight_bytes, ())


class TimedRun(StrictModel):
    """The operators of a model at one batch size, in order, and the time of a whole batch without instruments.

    `timed_by` says how operators were timed: by the durations of their kernels, by events around their launches, which
    hold the launch as well, or by the clock of a CPU.
    """

    model: str
    batch_size: Annotated[int, Field(ge=1)]
    latency_ms: Annotated[float, Field(gt=0)]
    timed_by: Literal["clock", "events", "kernels"] = "clock"
    operators: Annotated[tuple[TimedOperator, ...], Field(min_length=1)]


def models_learnt_from(runs: Iterable[TimedRun]) -> tuple[str, ...]:
    """Return the models of timed runs.

    Raises:
        InvalidInputError: fewer than two; nothing could be told from one.
    """
    models = tuple(sorted({run.model for run in runs}))
    if len(models) < 2:
        raise refused(
            "operator times",
            list(models),
            "an estimate needs operators of at least two other models",
            "Time more models with `tenuto kernels time`.",
        )
    return models


class OperatorFile(StrictModel):
    """Timed operators of several models on one GPU type."""

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=1)] = 1
    gpu_type: str
    hardware: str
    runs: Annotated[tuple[TimedRun, ...], Field(min_length=1)]

    def without(self, is_left_out: Callable[[str], bool]) -> OperatorFile | None:
        """Return the file without the models of these names; None if nothing is left."""
        runs = tuple(run for run in self.runs if not is_left_out(run.model))
        return self.model_copy(update={"runs": runs}) if runs else None

    def dump(self) -> str:
        """Render as YAML; `load` of the text gives an equal file."""
        return dump_yaml({"schema": 1, **self.model_dump(mode="json", by_alias=True)})


class _Timer(Protocol):
    def begin(self) -> None: ...

    def end(self, *, recorded: bool) -> None: ...

    def times_ms(self) -> list[float]: ...


class _ClockTimer:
    """For a CPU: an operator is done when its call returns."""

    def __init__(self) -> None:
        self._began = 0.0
        self._times: list[float] = []

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self, *, recorded: bool) -> None:
        if recorded:
            self._times.append((time.perf_counter() - self._began) * 1000.0)

    def times_ms(self) -> list[float]:
        return self._times


class _EventTimer:
    """For CUDA without CUPTI: an event before and after, read when all are done."""

    def __init__(self) -> None:
        self._began: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self._began = _event()

    def end(self, *, recorded: bool) -> None:
        if recorded:
            self._pairs.append((self._began, _event()))

    def times_ms(self) -> list[float]:
        import torch

        torch.cuda.synchronize()
        return [float(began.elapsed_time(ended)) for began, ended in self._pairs]


class _RangeTimer:
    """Marks a range of the profiler around every operator, and remembers which operators launched something."""

    def __init__(self) -> None:
        self.recorded: list[bool] = []
        self._range: Any = None

    def begin(self) -> None:
        from torch.profiler import record_function

        self._range = record_function(RANGE_NAME)
        self._range.__enter__()

    def end(self, *, recorded: bool) -> None:
        self._range.__exit__(None, None, None)
        self.recorded.append(recorded)


def _kernels(module: Any, inputs: Sequence[Any], weights: Mapping[int, int]) -> list[list[OperatorKernel]]:
    """Return the kernels of each operator of one run; empty if CUPTI does not record."""
    import torch

    timer = _RangeTimer()

    def run() -> None:
        with torch.no_grad(), operator_recorder(weights, timer):
            module(*inputs)

    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            write_trace(run, path)
            found = load_operator_kernels(path)
    except InvalidInputError:
        return []
    if len(found) != len(timer.recorded):
        return []
    return [one for one, recorded in zip(found, timer.recorded, strict=True) if recorded]


def _event() -> Any:
    import torch

    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def time_operators(
    source: str,
    batch_sizes: Sequence[int],
    options: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    name: str | None = None,
    seed: int = 0,
) -> list[TimedRun]:
    """Build a model and time its operators at each batch size, the median of several runs; blocks.

    On a GPU an operator takes as long as its kernels, without the launches; elsewhere they are launched one by one, so
    that short ones include the cost of a launch, as they do in eager PyTorch.

    Args:
        source: as `tenuto.profiles.networks.models.build` takes it.
        batch_sizes: to run.
        options: of the model as it is built.
        device: `cpu` or `cuda`.
        name: of the model in the result; default the source.
        seed: of random weights and inputs.

    Raises:
        InvalidInputError: unknown model, or one that runs other operators from one run to the next.
    """
    import torch

    from tenuto.profiles.networks.models import build

    loaded = build(source, seed=seed, options=dict(options or {}))
    module = loaded.module.to(device)
    weights = {id(t): t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers())}
    runs = []
    for size in batch_sizes:
        arrays = random_inputs(loaded.signature, size, seed)
        inputs = [torch.from_numpy(arrays[t.name]).to(device) for t in loaded.signature.inputs]
        whole: list[float] = []
        rows: list[list[float]] = []
        operators: list[Operator] = []
        with torch.no_grad():
            for attempt in range(_WARM_UP_RUNS + _REPEATS):
                _wait(device)
                began = time.perf_counter()
                module(*inputs)
                _wait(device)
                took_ms = (time.perf_counter() - began) * 1000.0
                timer: _Timer = _EventTimer() if device == "cuda" else _ClockTimer()
                recorder = operator_recorder(weights, timer)
                with recorder:
                    module(*inputs)
                if attempt < _WARM_UP_RUNS:
                    continue
                whole.append(took_ms)
                rows.append(timer.times_ms())
                operators = recorder.operators
        if len({len(row) for row in rows}) != 1:
            raise InvalidInputError(f"'{source}' runs other operators each time. It cannot be learnt from.")
        kernels = [_kernels(module, inputs, weights) for _ in range(_REPEATS)] if device == "cuda" else []
        by_kernels = bool(kernels) and all(len(run) == len(operators) for run in kernels)
        medians = [statistics.median(times) for times in zip(*rows, strict=True)]
        timed = (
            [_by_kernels(o, [run[index] for run in kernels]) for index, o in enumerate(operators)]
            if by_kernels
            else [_timed(o, ms) for o, ms in zip(operators, medians, strict=True)]
        )
        runs.append(
            TimedRun(
                model=name or source,
                batch_size=size,
                latency_ms=statistics.median(whole),
                operators=tuple(timed),
                timed_by="kernels" if by_kernels else "events" if device == "cuda" else "clock",
            )
        )
    return runs


def _timed(o: Operator, time_ms: float, **more: Any) -> TimedOperator:
    return TimedOperator(
        name=o.name,
        kind=o.kind,
        flops=o.flops,
        read_bytes=o.read_bytes,
        written_bytes=o.written_bytes,
        weight_bytes=o.weight_bytes,
        time_ms=round(time_ms, 6),
        **more,
    )


def _by_kernels(o: Operator, runs: Sequence[Sequence[OperatorKernel]]) -> TimedOperator:
    """Return an operator with its kernels of the first run, each timed by the median of those that are alike."""
    names = [kernel.name for kernel in runs[0]]
    alike = [run for run in runs if [kernel.name for kernel in run] == names]
    kernels = tuple(
        TimedKernel(
            name=first.name,
            time_ms=round(statistics.median(run[index].time_ms for run in alike), 6),
            occupancy_pct=round(first.occupancy_pct, 3),
        )
        for index, first in enumerate(runs[0])
    )
    largest = max((kernel.occupancy_pct or 0.0 for kernel in kernels), default=0.0)
    return _timed(o, sum(kernel.time_ms for kernel in kernels), occupancy_pct=largest, kernels=kernels)


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
