"""The process that measures one model: reads a request on stdin, reports events on stdout, one JSON object a line.

Started as `python -m tenuto.profiles.worker` by `tenuto.profiles.measure`; not meant to be run by hand.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tenuto.errors import InvalidInputError, TenutoError
from tenuto.profiles.catalogue import LoadedModel, ModelSignature, is_factory, lookup
from tenuto.profiles.cpu_share import cpu_cores, cpu_threads
from tenuto.profiles.measure import MeasureRequest, gpu_type_of
from tenuto.profiles.memory import CudaMemory, MemoryMeter, ResidentMemory
from tenuto.profiles.profile import ProfilePoint
from tenuto.profiles.timing import measure_until_stable, quantile
from tenuto.profiles.torch_runner import Arrays, RunOptions, TorchRunner, pick_device, split_options

__all__ = ["describe_machine", "main", "measure_points", "random_inputs"]

Report = Callable[[Mapping[str, Any]], None]

_NOISY_PCT = 10.0  # a median less certain than this is recorded with a doubt


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
    report: Report, clock_s: Callable[[], float] = time.perf_counter,
) -> None:
    """Measure every (share, batch size) of a request in ascending batch order and report a point for each.

    The smallest batch of the whole device comes first, so that what is reported early is the most useful. When memory
    runs out, larger batches are left out and the reason is reported as a doubt.
    """
    import torch

    runner = TorchRunner(loaded, device, run_options, batch_sizes=request.batch_sizes)
    report({"event": "built", "weights_mib": runner.weights_mib})
    budget_s = request.budget_s / max(1, len(request.batch_sizes) * len(request.shares))
    for share in sorted(request.shares, reverse=True):
        if device == "cpu":
            torch.set_num_threads(cpu_threads(share))
        for size in sorted(request.batch_sizes):
            try:
                point = _measure_point(runner, size, share, budget_s, memory, clock_s, request.seed)
            except (torch.OutOfMemoryError, MemoryError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                report({"event": "doubt", "text": f"batch {size} and above at {share:g} %: out of memory ({reason})"})
                break
            report({"event": "point", "point": point.model_dump(mode="json", exclude_none=True)})
            if point.metrics["uncertainty_pct"] > _NOISY_PCT:
                report({"event": "doubt", "text": _noisy(point)})


def _noisy(point: ProfilePoint) -> str:
    return (
        f"batch {point.batch_size} at {point.share_pct:g} %: the median is known within "
        f"±{point.metrics['uncertainty_pct']:.0f} % only; other work disturbed it, or --budget-s is too short"
    )


def _measure_point(
    runner: TorchRunner, size: int, share_pct: float, budget_s: float, memory: MemoryMeter,
    clock_s: Callable[[], float], seed: int,
) -> ProfilePoint:
    inputs = random_inputs(runner.signature, size, seed)
    memory.reset()
    # Warm-up: at least once (allocations, kernel choice), then up to four more while that costs a tenth of the budget.
    began = clock_s()
    for _ in range(5):
        runner.run(inputs, size)
        if clock_s() - began > budget_s / 10:
            break
    timing = measure_until_stable(lambda: runner.run(inputs, size), clock_s, budget_s=budget_s)
    peak_mib = memory.peak_mib()
    metrics = {
        "runs": float(timing.runs), "uncertainty_pct": round(timing.uncertainty_pct, 2),
        "fastest_ms": round(timing.fastest_ms, 4),
    }
    splits = [runner.split_times_ms(inputs, size) for _ in range(10)] if runner.on_cuda else []
    for key in splits[0] if splits else ():
        metrics[key] = round(quantile(sorted(split[key] for split in splits), 0.5), 4)
    return ProfilePoint(
        batch_size=size, share_pct=share_pct, latency_ms=round(timing.median_ms, 4),
        latency_spread_ms=round(timing.spread_ms, 4),
        memory_mib=None if peak_mib is None else round(peak_mib, 1), metrics=metrics,
    )


def describe_machine(device: str) -> dict[str, Any]:
    """Return `device`, `gpu_type`, `hardware`, `memory_mib` and `versions` of what is measured."""
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
        hardware = f"{name}, {properties.multi_processor_count} SMs"
        return {"device": device, "gpu_type": gpu_type_of(name), "hardware": hardware, "versions": versions,
                "memory_mib": properties.total_memory / 2**20}
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
            from tenuto.profiles.torchvision_import import import_torchvision

            import_torchvision()
        else:
            from tenuto.profiles.text_networks import prepare_transformers

            prepare_transformers(source)
    except (TenutoError, ImportError):
        pass  # building reports it


def main() -> None:
    """Measure one request; faults are reported as events, so that the parent can raise them again."""
    with os.fdopen(os.dup(1), "w", buffering=1) as reports:
        os.dup2(2, 1)  # whatever a model prints goes to stderr

        def report(event: Mapping[str, Any]) -> None:
            reports.write(json.dumps(event) + "\n")

        data = json.load(sys.stdin)
        request = MeasureRequest(**{**data, "batch_sizes": tuple(data["batch_sizes"]), "shares": tuple(data["shares"])})
        try:
            _measure(request, report)
        except TenutoError as error:
            kind = "InvalidInputError" if isinstance(error, InvalidInputError) else "EnvironmentFaultError"
            report({"event": "error", "kind": kind, "text": str(error)})
        except KeyboardInterrupt:
            sys.exit(130)


def _measure(request: MeasureRequest, report: Report) -> None:
    from tenuto.profiles.models import build

    device = pick_device(request.device)
    report({"event": "machine", **describe_machine(device)})
    if not request.batch_sizes:
        return
    run_options, build_options = split_options(request.options, f"options of {request.source}")
    _import_libraries(request.source)
    memory: MemoryMeter = CudaMemory() if device == "cuda" else ResidentMemory()
    loaded = build(request.source, weights_path=request.weights_path, seed=request.seed, options=build_options)
    measure_points(loaded, request, device=device, run_options=run_options, memory=memory, report=report)


if __name__ == "__main__":
    main()
