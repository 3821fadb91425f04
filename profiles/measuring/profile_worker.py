"""The process that measures one model: reads a request on stdin, reports events on stdout, one JSON object a line.

Started as `python -m tenuto.profiles.measuring.profile_worker` by `tenuto.profiles.measuring.measure`; not meant to be
run by hand.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tenuto.errors import TenutoError, first_line
from tenuto.profiles.gpu_types import gpu_type_of
from tenuto.profiles.measuring.events import Built, ContextSize, Doubt, Event, Machine, PointMeasured, StoppedEarly
from tenuto.profiles.measuring.kernels.chrome_trace import KernelTrace
from tenuto.profiles.measuring.kernels.metrics import kernel_metrics
from tenuto.profiles.measuring.kernels.recording import record_kernels
from tenuto.profiles.measuring.measure import REQUESTS, MeasureRequest
from tenuto.profiles.measuring.memory_meter import CudaMemory, MemoryMeter, ResidentMemory, reserved_mib
from tenuto.profiles.measuring.row_check import check_rows
from tenuto.profiles.measuring.size_grid import Axis, count_sizes, largest, next_sizes, size_axes, smallest
from tenuto.profiles.measuring.telemetry import NvmlTelemetry, Telemetry, first_visible_uuid, watch
from tenuto.profiles.measuring.timing import AGREEMENT_PCT, measure_repeatedly
from tenuto.profiles.measuring.worker_process import serve_parent
from tenuto.profiles.networks.catalogue import LoadedModel, is_exported, is_factory, lookup
from tenuto.profiles.networks.cpu_share import cpu_cores, cpu_threads
from tenuto.profiles.networks.device import cuda_streams, is_fast_device, pick_device
from tenuto.profiles.networks.inputs import as_blocks, random_inputs, sends_pixels
from tenuto.profiles.networks.model_options import ModelOptions, RunOptions, with_most_sizes
from tenuto.profiles.networks.programs import capability_of, lone_program
from tenuto.profiles.networks.runner import BatchTimes, ProgramRunner
from tenuto.profiles.profile import ProfilePoint
from tenuto.profiles.size_classes import Sizes

Report = Callable[[Event], None]
Record = Callable[[Callable[[], object]], KernelTrace]

# The times of a batch on the device: their names in a profile, and the names that the runner uses.
DEVICE_TIMES = {"h2d_ms": "copy_in_ms", "kernels_ms": "execution_ms", "d2h_ms": "copy_out_ms"}

_NOISY_PCT = 10.0  # limit: a median that is less certain than this is recorded with a doubt
_WATCH_S = 1.0  # derived: time to watch power and clocks, as the driver's power is a moving average of up to a second


class BatchOfOne:
    """The batch that is repeated: random rows for a program of one model, with pictures in the form that gateways send.
    A call runs the batch once."""

    def __init__(self, runner: ProgramRunner, rows: int, seed: int, sizes: Sequence[int] = ()) -> None:
        """Draw the inputs, in these sizes where shapes vary."""
        ((name, signature),) = runner.signatures.items()
        signature = signature.at(sizes)
        self._runner = runner
        self._inputs = {name: as_blocks(random_inputs(signature, rows, seed, pixels=sends_pixels(signature)))}
        self._rows = {name: rows}

    def __call__(self) -> BatchTimes:
        """Run the batch from numpy to numpy; return where its time went."""
        return self._runner.run_timed(self._inputs, self._rows)[1]


def measure_points(
    loaded: LoadedModel,
    request: MeasureRequest,
    *,
    device: str,
    options: RunOptions,
    memory: MemoryMeter,
    report: Report,
    clock_s: Callable[[], float] = time.perf_counter,
    began_s: float | None = None,
    telemetry: Telemetry | None = None,
    record: Record | None = None,
) -> None:
    """Measure the points of a request that are not known yet and report each.

    The whole device comes first, and the smallest batch, so that what is reported early is the most useful.
    When memory runs out, larger batches are left out and the reason is reported as a doubt.

    Args:
        loaded: the model.
        request: what to measure.
        device: `cpu` or `cuda`.
        options: how the model is run.
        memory: the meter of this device.
        report: takes the events.
        clock_s: monotonic clock.
        began_s: when on this clock the request's time limit began; default now.
        telemetry: of the GPU, for power and clocks; None leaves them out.
        record: records the kernels of one run; None leaves kernel metrics out.
    """
    import torch

    began_s = clock_s() if began_s is None else began_s
    # On fast devices, gpu-lets stream by default. So the measured memory includes room for a second batch.
    streams = cuda_streams(device, overlapping=is_fast_device(device))
    runner = lone_program(request.source, loaded, options, request.batch_sizes, streams)
    signature = loaded.signature
    pads = signature.padded_sizes >= {*signature.sizes}
    multiples = {name: allowed.multiple for name, allowed in signature.sizes.items() if allowed.multiple > 1}
    report(Built(runner.network.weights_mib, options.chosen(capability_of(streams)).to_data(), pads, multiples))
    axes = size_axes(signature, request.sizes)
    cells = len(request.batch_sizes) * len(request.shares) * count_sizes(axes) - len(request.known)
    budget_s = request.budget_s / max(1, cells)
    instruments = _Instruments(memory, clock_s, telemetry, record, report)
    unequal: list[str] = []
    notes: list[str] | None = None
    for share, sizes, times in _cells(axes, request):
        if device == "cpu":
            torch.set_num_threads(cpu_threads(share))
        for size in sorted(set(request.batch_sizes) - times.keys()):
            if request.time_limit_s is not None and clock_s() - began_s >= request.time_limit_s:
                report(StoppedEarly())
                return
            try:
                point = _measure_point(runner, size, share, sizes, budget_s, request.seed, instruments)
            except (torch.OutOfMemoryError, MemoryError) as error:
                report(
                    Doubt(f"{_where(size, sizes, ' and above')} at {share:g} %: out of memory ({first_line(error)})")
                )
                break
            times[size] = point.latency_ms
            if notes is None:  # after the smallest point, whose memory would else be that of the check
                notes = _row_notes(runner, [tuple(map(end, axes)) for end in (smallest, largest)], request)
            report(PointMeasured(point))
            if point.metrics["uncertainty_pct"] > _NOISY_PCT:
                report(Doubt(_noisy(point)))
            elif point.metrics["repeat_pct"] > AGREEMENT_PCT:
                unequal.append(f"{_where(size, sizes)} at {share:g} % ({point.metrics['repeat_pct']:.1f} %)")
    for note in (*runner.network.notes, *(notes or ())):
        report(Doubt(note))
    if unequal:
        text = f"repeated medians differ by more than {AGREEMENT_PCT:g} %: {', '.join(unequal)}"
        report(Doubt(text))


def _cells(axes: Sequence[Axis], request: MeasureRequest) -> Iterator[tuple[float, Sizes, dict[int, float]]]:
    """Yield the shares and sizes to measure, with what batches are known to take there by batch size; the caller adds
    what it measures. The largest share says which sizes the others are measured at, too."""
    known: dict[float, dict[Sizes, dict[int, float]]] = {}
    for point in request.known:
        at = known.setdefault(point.share_pct, {}).setdefault(tuple(point.sizes.values()), {})
        at[point.batch_size] = point.latency_ms
    first = max((*request.shares, *known))
    chosen: dict[Sizes, dict[int, float]] = {}
    while (sizes := next_sizes(axes, chosen)) is not None:
        chosen[sizes] = known.get(first, {}).get(sizes, {})
        if first in request.shares:
            yield first, sizes, chosen[sizes]
    for share in sorted(set(request.shares) - {first}, reverse=True):
        for sizes in chosen:
            yield share, sizes, known.get(share, {}).get(sizes, {})


def _row_notes(runner: ProgramRunner, grid: Sequence[tuple[int, ...]], request: MeasureRequest) -> list[str]:
    import torch

    try:
        return check_rows(runner, grid, max(request.batch_sizes), request.seed)
    except (torch.OutOfMemoryError, MemoryError):
        return ["rows of a batch were not compared with rows alone: out of memory"]


def _where(batch: int, sizes: Sequence[int], more: str = "") -> str:
    return f"batch {batch}{more}" + (f" of sizes {'x'.join(map(str, sizes))}" if sizes else "")


@dataclass(frozen=True)
class _Instruments:
    """The instruments that measure a point."""

    memory: MemoryMeter
    clock_s: Callable[[], float]
    telemetry: Telemetry | None
    record: Record | None
    report: Report

    def readings(self, run: Callable[[], object], budget_s: float) -> dict[str, float]:
        """Return power, clocks and kernel metrics of a run. A reading that fails is reported as a doubt and left
        out."""
        metrics: dict[str, float] = {}
        try:
            if self.telemetry is not None:
                metrics |= watch(self.telemetry, run, self.clock_s, seconds=min(_WATCH_S, budget_s))
        except TenutoError as error:
            self.report(Doubt(f"no power and clocks: {error}"))
        try:
            if self.record is not None:
                trace = self.record(run)
                metrics |= kernel_metrics(trace.kernels, trace.device)
                metrics |= {f"{way}_bytes": float(size) for way, size in trace.copied_bytes.items()}
        except TenutoError as error:
            self.report(Doubt(f"no kernel metrics: {error}"))
        return metrics


def _noisy(point: ProfilePoint) -> str:
    return (
        f"{_where(point.batch_size, tuple(point.sizes.values()))} at {point.share_pct:g} %: the median is known within "
        f"±{point.metrics['uncertainty_pct']:.0f} % only; other work disturbed it, or --budget-s is too short"
    )


def _measure_point(
    runner: ProgramRunner,
    size: int,
    share_pct: float,
    sizes: tuple[int, ...],
    budget_s: float,
    seed: int,
    instruments: _Instruments,
) -> ProfilePoint:
    run = BatchOfOne(runner, size, seed, sizes)
    memory, clock_s = instruments.memory, instruments.clock_s
    memory.reset()
    runner.reserve(size)
    # Warm-up: at least once (allocations, kernel choice), then up to four more while that costs a tenth of the budget.
    began = clock_s()
    for _ in range(5):
        run()
        if clock_s() - began > budget_s / 10:  # derived: see above
            break
    timing, repeat_pct = measure_repeatedly(run, clock_s, budget_s=budget_s)
    peak_mib = memory.peak_mib()
    metrics = {
        "runs": float(timing.runs),
        "uncertainty_pct": round(timing.uncertainty_pct, 2),
        "repeat_pct": round(repeat_pct, 2),
        "fastest_ms": round(timing.fastest_ms, 4),
    }
    if runner.on_cuda:
        metrics |= {"sm_count": float(_sm_count()), **_device_times([run() for _ in range(10)])}
    metrics |= instruments.readings(run, budget_s)
    (signature,) = runner.signatures.values()
    return ProfilePoint(
        batch_size=size,
        sizes=dict(zip(signature.sizes, sizes, strict=True)),
        share_pct=share_pct,
        latency_ms=round(timing.median_ms, 4),
        latency_spread_ms=round(timing.spread_ms, 4),
        memory_mib=None if peak_mib is None else round(peak_mib, 1),
        metrics=metrics,
    )


def _device_times(batches: Sequence[BatchTimes]) -> dict[str, float]:
    """Return the medians of the batches' times from CUDA events."""
    return {
        name: round(statistics.median(getattr(times, key) for times in batches), 4)
        for name, key in DEVICE_TIMES.items()
    }


def _sm_count() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def describe_machine(device: str) -> Machine:
    """Return the machine; on CUDA it names the first visible device."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchvision", "transformers", "numpy", "tenuto"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        name, properties = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0)
        versions["cuda"] = str(torch.version.cuda)
        # Under CUDA MPS the SM count is that of the share, so the device's name must not contain it.
        return Machine(
            device, gpu_type_of(name), name, properties.total_memory / 2**20, versions, properties.multi_processor_count
        )
    memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Machine(device, "cpu", f"{_processor()}, {cpu_cores()} cores", memory_mib, versions)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _import_libraries(source: str) -> None:
    """Import what a model of this kind needs, so that it is not counted as the model's memory."""
    import torch  # noqa: F401

    if is_factory(source) or is_exported(source):
        return  # the memory of a user module's imports is a part of what its model costs
    family = "transformers" if os.path.isdir(source) else lookup(source).source.partition("/")[0]
    try:
        if family == "torchvision":
            from tenuto.profiles.networks.torchvision_import import import_torchvision

            import_torchvision()
        else:
            from tenuto.profiles.networks.text_networks import prepare_transformers

            prepare_transformers(source)
    except (TenutoError, ImportError):
        pass  # building reports it


def main(clock_s: Callable[[], float] = time.perf_counter) -> None:
    """Measure one request; faults are reported as events, so that the parent can raise them again."""
    serve_parent(lambda report: _measure(REQUESTS.validate_json(sys.stdin.buffer.readline()), report, clock_s))


def _measure(request: MeasureRequest, report: Report, clock_s: Callable[[], float]) -> None:
    from tenuto.profiles.networks.models import build

    began_s = clock_s()
    telemetry, used_mib = (None, None) if request.device == "cpu" else _before_cuda()
    device = pick_device(request.device)
    report(describe_machine(device))
    if not request.batch_sizes:
        return
    if device == "cuda" and telemetry is None:
        report(Doubt("no power and clocks: NVML does not answer for the GPU"))
    options = ModelOptions.parse(request.options, f"options of {request.source}")
    _import_libraries(request.source)
    memory: MemoryMeter = CudaMemory() if device == "cuda" else ResidentMemory()
    given = options.build
    if is_exported(request.source):
        given = with_most_sizes(given, {name: largest(axis) for name, axis in request.sizes.items()})
    loaded = build(request.source, weights_path=request.weights_path, seed=request.seed, options=given)
    measure_points(
        loaded,
        request,
        device=device,
        options=options.run,
        memory=memory,
        report=report,
        clock_s=clock_s,
        began_s=began_s,
        telemetry=telemetry if device == "cuda" else None,
        record=record_kernels if device == "cuda" else None,
    )
    if telemetry is not None and used_mib is not None and device == "cuda":
        report(ContextSize(round(max(0.0, telemetry.used_mib() - used_mib - reserved_mib()), 1)))


def _before_cuda() -> tuple[Telemetry | None, float | None]:
    """Return NVML of the GPU that CUDA will use, and the memory that other processes hold there. Both are None without
    NVML, as the rest can still be measured."""
    try:
        telemetry = NvmlTelemetry(first_visible_uuid())
    except TenutoError:
        return None, None
    try:
        return telemetry, telemetry.used_mib()
    except TenutoError:
        return telemetry, None


if __name__ == "__main__":
    main()
