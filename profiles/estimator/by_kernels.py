"""Estimates from timed operators: what `tenuto profile --time-operators` writes and `tenuto estimate` learns from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto.errors import InvalidInputError, Problem
from tenuto.profiles.estimator.kernel_training import KernelErrorReport, KernelEstimator, leave_one_model_out_kernels
from tenuto.profiles.estimator.operator_times import OperatorFile, time_operators
from tenuto.profiles.estimator.trace import Trace
from tenuto.profiles.measuring.measure import MeasureRequest, row_name
from tenuto.profiles.networks.device import pick_device
from tenuto.profiles.networks.model_options import ModelOptions
from tenuto.profiles.profile import Profile

__all__ = ["ByKernels", "estimate_by_kernels", "write_operator_times"]


@dataclass(frozen=True)
class ByKernels:
    """Times learnt from single kernels, in ms by batch size, and the errors on models left out.

    `creq_pct` is by batch size; empty where kernels' occupancy was not recorded, as on a CPU.
    """

    models: tuple[str, ...]
    latency_ms: dict[int, float]
    creq_pct: dict[int, float]
    estimate_ms: float
    report: KernelErrorReport | None

    def as_data(self) -> dict[str, Any]:
        """Return plain data for --json."""
        return {
            "learnt_from": list(self.models), "latency_ms": {str(b): ms for b, ms in self.latency_ms.items()},
            "creq_pct": {str(b): round(pct, 3) for b, pct in self.creq_pct.items()},
            "estimate_ms": round(self.estimate_ms, 3),
            "leave_one_model_out": vars(self.report) if self.report else None,
        }  # fmt: skip


def estimate_by_kernels(path: str, gpu_type: str, row: str, traces: Sequence[Trace], errors: bool) -> ByKernels:
    """Learn from the file's other models and estimate each trace.

    Raises:
        InvalidInputError: the file is malformed, of another GPU type, or has fewer than two other models.
    """
    data = OperatorFile.load(path)
    if data.gpu_type != gpu_type:
        raise InvalidInputError(
            Problem("--operator-times", data.gpu_type, f"is not of GPU type '{gpu_type}'", "Time operators there.")
        )
    estimator = KernelEstimator([run for run in data.runs if run.model != row])
    began = time.perf_counter()
    latency_ms = {trace.batch_size: estimator.time_ms(trace) for trace in traces}
    took_ms = (time.perf_counter() - began) * 1000.0 / len(traces)
    creq = {t.batch_size: pct for t in traces if (pct := estimator.creq_pct(t)) is not None}
    report = leave_one_model_out_kernels(data.runs) if errors else None
    return ByKernels(estimator.models, latency_ms, creq, took_ms, report)


def write_operator_times(path: Path, requests: Sequence[MeasureRequest], profile: Profile) -> None:
    """Time the operators of every model on the whole device and write the file."""
    runs = []
    for request in requests:
        options = ModelOptions.parse(request.options, f"options of {request.source}")
        runs += time_operators(
            request.source, sorted(request.batch_sizes), options.build, device=pick_device(request.device),
            name=row_name(request.source), seed=request.seed,
        )
    hardware = profile.measured.hardware if profile.measured else profile.gpu_type
    text = OperatorFile(gpu_type=profile.gpu_type, hardware=hardware, runs=tuple(runs)).dump()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(
            Problem("--time-operators", str(path), f"cannot be written ({error.strerror})", "Give a writable path.")
        ) from error
