"""The process that measures one model: reads a request on stdin, reports events on stdout, one JSON object a line.

Started as `python -m tenuto.profiles.measuring.worker` by `tenuto.profiles.measuring.measure`; not meant to be run by
hand.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tenuto.errors import InvalidInputError, TenutoError
from tenuto.profiles.measuring.kernels.chrome_trace import KernelTrace
from tenuto.profiles.measuring.kernels.metrics import kernel_metrics
from tenuto.profiles.measuring.kernels.recording import record_kernels
from tenuto.profiles.measuring.measure import MeasureRequest, gpu_type_of
from tenuto.profiles.measuring.memory import CudaMemory, MemoryMeter, ResidentMemory
from tenuto.profiles.measuring.sampling import next_batch
from tenuto.profiles.measuring.telemetry import NvmlTelemetry, Telemetry, watch
from tenuto.profiles.measuring.timing import measure_repeatedly, quantile
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, is_factory, lookup
from tenuto.profiles.networks.cpu_share import cpu_cores, cpu_threads
from tenuto.profiles.networks.torch_runner import Arrays, RunOptions, TorchRunner, pick_device, split_options
from tenuto.profiles.profile import ProfilePoint

__all__ = ["describe_machine", "main", "measure_points", "random_inputs"]

Report = Callable[[Mapping[str, Any]], None]
Record = Callable[[Callable[[], object]], KernelTrace]

_NOISY_PCT = 10.0  # a median less certain than this is recorded with a doubt
_REPEAT_PCT = 3.0  # repeated medians that differ by more are flagged
_WATCH_S = 1.0  # for power and clocks: the driver's power is a moving average of up to a second


def random_inputs(signature: ModelSignature, size: int, seed: int = 0) -> Arrays:
    """Return a batch of seeded noise: identifiers from the whole vocabulary, every position attended."""
    generator = np.random.default_rng(seed)
    inputs: Arrays = {}
    for tensor in signature.inputs:
        shape = (size, *tensor.shape)
        if tensor.name == "attention_mask":
            inputs[tensor.name] = np.ones(shape, dtype=np.dtype(tensor.dtype))
        elif np.issubdtype(np.dtype(tensor.dtype), np.floating):
            inputs[tensor.name] = generator.standard_normal(shape, dtype=np.float32).astype(np.dtype(tensor.dtype))
        else:
            inputs[tensor.name] = generator.integers(0, tensor.below or 2, shape).astype(np.dtype(tensor.dtype))
    return inputs


def measure_points(
    loaded: LoadedModel, request: MeasureRequest, *, device: str, run_options: RunOptions, memory: MemoryMeter,
    report: Report, clock_s: Callable[[], float] = time.perf_counter, began_s: float | None = None,
    telemetry: Telemetry | None = None, record: Record | None = None,
) -> None:
    """Measure the points of a request that are not known yet and report each.

    The whole device comes first and, unless the request is adaptive, the smallest batch, so that what is reported early
    is the most useful. When memory runs out, larger batches are left out and the reason is reported as a doubt.

    Args:
        loaded: the model.
        request: what to measure.
        device: `cpu` or `cuda`.
        run_options: how the model is run.
        memory: the meter of this device.
        report: takes the events.
        clock_s: monotonic clock.
        began_s: when on this clock the request's time limit began; default now.
        telemetry: of the GPU, for power and clocks; None leaves them out.
        record: records the kernels of one run; None leaves kernel metrics out.
    """
    import torch

    began_s = clock_s() if began_s is None else began_s
    runner = TorchRunner(loaded, device, run_options, batch_sizes=request.batch_sizes)
    report({"event": "built", "weights_mib": runner.weights_mib})
    budget_s = request.budget_s / max(1, request.left())
    instruments = _Instruments(memory, clock_s, telemetry, record, report)
    unequal: list[str] = []
    for share in sorted(request.shares, reverse=True):
        if device == "cpu":
            torch.set_num_threads(cpu_threads(share))
        wanted = set(request.batch_sizes)
        known = {batch: ms for batch, at, ms in request.known if at == share}
        while (size := next_batch(wanted, known, request.tolerance_pct)) is not None:
            if request.time_limit_s is not None and clock_s() - began_s >= request.time_limit_s:
                report({"event": "stopped"})
                return
            try:
                point = _measure_point(runner, size, share, budget_s, request.seed, instruments)
            except (torch.OutOfMemoryError, MemoryError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                report({"event": "doubt", "text": f"batch {size} and above at {share:g} %: out of memory ({reason})"})
                wanted = {batch for batch in wanted if batch < size}
                continue
            known[size] = point.latency_ms
            report({"event": "point", "point": point.model_dump(mode="json", exclude_none=True)})
            if point.metrics["uncertainty_pct"] > _NOISY_PCT:
                report({"event": "doubt", "text": _noisy(point)})
            elif point.metrics["repeat_pct"] > _REPEAT_PCT:
                unequal.append(f"batch {size} at {share:g} % ({point.metrics['repeat_pct']:.1f} %)")
        if left_out := sorted(wanted - set(known)):
            text = f"batches {', '.join(map(str, left_out))} at {share:g} %: not measured, as the others predict them "
            report({"event": "doubt", "text": text + f"within {request.tolerance_pct:g} %"})
    if unequal:
        text = f"repeated medians differ by more than {_REPEAT_PCT:g} %: {', '.join(unequal)}"
        report({"event": "doubt", "text": text})


@dataclass(frozen=True)
class _Instruments:
    """What a point is measured with."""

    memory: MemoryMeter
    clock_s: Callable[[], float]
    telemetry: Telemetry | None
    record: Record | None
    report: Report

    def readings(self, run: Callable[[], object], budget_s: float) -> dict[str, float]:
        """Return power, clocks and kernel metrics of a run; what fails is reported as a doubt and left out."""
        found: dict[str, float] = {}
        try:
            if self.telemetry is not None:
                found |= watch(self.telemetry, run, self.clock_s, seconds=min(_WATCH_S, budget_s))
        except TenutoError as error:
            self.report({"event": "doubt", "text": f"no power and clocks: {error}"})
        try:
            if self.record is not None:
                trace = self.record(run)
                found |= kernel_metrics(trace.kernels, trace.device)
                found |= {f"{way}_bytes": float(size) for way, size in trace.copied_bytes.items()}
        except TenutoError as error:
            self.report({"event": "doubt", "text": f"no kernel metrics: {error}"})
        return found


def _noisy(point: ProfilePoint) -> str:
    return (
        f"batch {point.batch_size} at {point.share_pct:g} %: the median is known within "
        f"±{point.metrics['uncertainty_pct']:.0f} % only; other work disturbed it, or --budget-s is too short"
    )


def _measure_point(
    runner: TorchRunner, size: int, share_pct: float, budget_s: float, seed: int, instruments: _Instruments
) -> ProfilePoint:
    inputs = random_inputs(runner.signature, size, seed)
    memory, clock_s = instruments.memory, instruments.clock_s

    def run() -> object:
        return runner.run(inputs, size)

    memory.reset()
    # Warm-up: at least once (allocations, kernel choice), then up to four more while that costs a tenth of the budget.
    began = clock_s()
    for _ in range(5):
        run()
        if clock_s() - began > budget_s / 10:
            break
    timing, repeat_pct = measure_repeatedly(run, clock_s, budget_s=budget_s)
    peak_mib = memory.peak_mib()
    metrics = {
        "runs": float(timing.runs), "uncertainty_pct": round(timing.uncertainty_pct, 2),
        "repeat_pct": round(repeat_pct, 2), "fastest_ms": round(timing.fastest_ms, 4),
    }
    if runner.on_cuda:
        metrics["sm_count"] = float(_sm_count())
    splits = [runner.split_times_ms(inputs, size) for _ in range(10)] if runner.on_cuda else []
    for key in splits[0] if splits else ():
        metrics[key] = round(quantile(sorted(split[key] for split in splits), 0.5), 4)
    metrics |= instruments.readings(run, budget_s)
    return ProfilePoint(
        batch_size=size, share_pct=share_pct, latency_ms=round(timing.median_ms, 4),
        latency_spread_ms=round(timing.spread_ms, 4),
        memory_mib=None if peak_mib is None else round(peak_mib, 1), metrics=metrics,
    )


def _sm_count() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def describe_machine(device: str) -> dict[str, Any]:
    """Return `device`, `gpu_type`, `hardware`, `memory_mib`, `versions` and on CUDA `sm_count` of what is measured."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchvision", "transformers", "numpy", "tenuto"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        name = torch.cuda.get_device_name(0)
        properties = torch.cuda.get_device_properties(0)
        versions["cuda"] = str(torch.version.cuda)
        hardware = name  # the SM count is the share's under CUDA MPS, so it does not name the device
        return {"device": device, "gpu_type": gpu_type_of(name), "hardware": hardware, "versions": versions,
                "memory_mib": properties.total_memory / 2**20, "sm_count": properties.multi_processor_count}
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    hardware = f"{_processor()}, {cpu_cores()} cores"
    return {"device": device, "gpu_type": "cpu", "hardware": hardware, "versions": versions,
            "memory_mib": pages * page_size / 2**20}


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

    if is_factory(source):
        return  # what a user's module imports is part of what its model costs
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
    with os.fdopen(os.dup(1), "w", buffering=1) as reports:
        os.dup2(2, 1)  # whatever a model prints goes to stderr

        def report(event: Mapping[str, Any]) -> None:
            reports.write(json.dumps(event) + "\n")

        data = json.load(sys.stdin)
        data |= {key: tuple(data[key]) for key in ("batch_sizes", "shares")}
        request = MeasureRequest(**{**data, "known": tuple((b, share, ms) for b, share, ms in data["known"])})
        try:
            _measure(request, report, clock_s)
        except TenutoError as error:
            kind = "InvalidInputError" if isinstance(error, InvalidInputError) else "EnvironmentFaultError"
            report({"event": "error", "kind": kind, "text": str(error)})
        except KeyboardInterrupt:
            sys.exit(130)


def _measure(request: MeasureRequest, report: Report, clock_s: Callable[[], float]) -> None:
    from tenuto.profiles.networks.models import build

    began_s = clock_s()
    device = pick_device(request.device)
    report({"event": "machine", **describe_machine(device)})
    if not request.batch_sizes:
        return
    run_options, build_options = split_options(request.options, f"options of {request.source}")
    _import_libraries(request.source)
    memory: MemoryMeter = CudaMemory() if device == "cuda" else ResidentMemory()
    loaded = build(request.source, weights_path=request.weights_path, seed=request.seed, options=build_options)
    telemetry = _telemetry(report) if device == "cuda" else None
    measure_points(
        loaded, request, device=device, run_options=run_options, memory=memory, report=report, clock_s=clock_s,
        began_s=began_s, telemetry=telemetry, record=record_kernels if device == "cuda" else None,
    )


def _telemetry(report: Report) -> Telemetry | None:
    """Return NVML of the first visible GPU; without it the rest is still worth measuring."""
    import torch

    try:
        return NvmlTelemetry(str(torch.cuda.get_device_properties(0).uuid))
    except TenutoError as error:
        report({"event": "doubt", "text": f"no power and clocks: {error}"})
        return None


if __name__ == "__main__":
    main()
