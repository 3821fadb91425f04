"""Estimates from timed operators, which `tenuto kernels time` writes and `tenuto kernels estimate` reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.errors import refused
from tenuto.profiles.measuring.measure import MeasureRequest, row_name
from tenuto.profiles.networks.device import pick_device
from tenuto.profiles.networks.model_options import ModelOptions
from tenuto.profiles.profile import Profile
from tenuto_lab.estimator.estimated_profile import estimated_profile
from tenuto_lab.estimator.estimator import Estimate
from tenuto_lab.estimator.trace import Trace
from tenuto_lab.estimator.training import is_same_network
from tenuto_lab.kernels.kernel_training import KernelErrorReport, KernelEstimator, leave_one_model_out_kernels
from tenuto_lab.kernels.operator_times import OperatorFile, time_operators
from tenuto_lab.kernels.usher import NetworkNeed, UsherErrors, UsherEstimator, usher_errors


@dataclass(frozen=True)
class ByUsher:
    """The estimates of USHER's published estimator from the same kernels, by batch size, over all timed GPU types."""

    types: tuple[str, ...]
    models: tuple[str, ...]
    needs: dict[int, NetworkNeed]
    errors: UsherErrors | None

    def as_profile(self, row: str, gpu_type: str) -> Profile:
        """Return the estimates as the profile of a GPU type."""
        estimates = [
            Estimate(batch, need.time_ms, need.time_ms, need.memory_bytes / 2**20, need.creq_pct)
            for batch, need in sorted(self.needs.items())
        ]
        source = f"estimated by `tenuto kernels estimate` (USHER's estimator) from {len(self.models)} other models"
        return estimated_profile(row, gpu_type, estimates, source, self.errors.time_pct if self.errors else None)

    def as_data(self) -> dict[str, Any]:
        """Return plain data for --json."""
        return {
            "types": list(self.types),
            "leave_one_model_out": vars(self.errors) if self.errors else None,
            "estimates": {
                str(batch): {
                    "time_ms": need.time_ms,
                    "memory_mib": need.memory_bytes / 2**20,
                    "creq_pct": need.creq_pct,
                }
                for batch, need in self.needs.items()
            },
        }


@dataclass(frozen=True)
class ByKernels:
    """Times learnt from single kernels, in ms by batch size, and the errors on models left out.

    `creq_pct` is by batch size; empty if the occupancy of kernels was not recorded, as on a CPU.
    """

    models: tuple[str, ...]
    latency_ms: dict[int, float]
    creq_pct: dict[int, float]
    estimate_ms: float
    report: KernelErrorReport | None
    usher: ByUsher

    def as_data(self) -> dict[str, Any]:
        """Return plain data for --json."""
        return {
            "learnt_from": list(self.models),
            "latency_ms": {str(b): ms for b, ms in self.latency_ms.items()},
            "creq_pct": {str(b): round(pct, 3) for b, pct in self.creq_pct.items()},
            "estimate_ms": round(self.estimate_ms, 3),
            "leave_one_model_out": vars(self.report) if self.report else None,
            "usher": self.usher.as_data(),
        }


def load_operator_files(paths: Sequence[str], gpu_type: str) -> list[OperatorFile]:
    """Return the files of timed operators.

    Raises:
        InvalidInputError: a file is malformed, or none is of the GPU type.
    """
    files = [OperatorFile.load(path) for path in paths]
    if files and not any(file.gpu_type == gpu_type and file.runs for file in files):
        types = ", ".join(sorted({file.gpu_type for file in files}))
        raise refused("--operator-times", types, f"is not of GPU type '{gpu_type}'", "Time operators there.")
    return files


def estimate_by_kernels(
    files: Sequence[OperatorFile], gpu_type: str, row: str, traces: Sequence[Trace], errors: bool
) -> ByKernels:
    """Learn from the files' other models and estimate each trace. Our method learns from the files of the type alone,
    USHER's from all.

    Raises:
        InvalidInputError: there are fewer than two other models.
    """
    runs = [run for file in files if file.gpu_type == gpu_type for run in file.runs]
    others = [kept for file in files if (kept := file.without(lambda model: is_same_network(model, row))) is not None]
    published = UsherEstimator(others)
    usher = ByUsher(
        published.types,
        published.models,
        {trace.batch_size: published.need(trace, gpu_type) for trace in traces},
        usher_errors(files) if errors else None,
    )
    estimator = KernelEstimator([run for run in runs if not is_same_network(run.model, row)])
    began = time.perf_counter()
    latency_ms = {trace.batch_size: estimator.time_ms(trace) for trace in traces}
    took_ms = (time.perf_counter() - began) * 1000.0 / len(traces)
    creq = {t.batch_size: pct for t in traces if (pct := estimator.creq_pct(t)) is not None}
    report = leave_one_model_out_kernels(runs) if errors else None
    return ByKernels(estimator.models, latency_ms, creq, took_ms, report, usher)


def operator_times(requests: Sequence[MeasureRequest], profile: Profile) -> OperatorFile:
    """Time the operators of every model on the whole device."""
    runs = []
    for request in requests:
        options = ModelOptions.parse(request.options, f"options of {request.source}")
        runs += time_operators(
            request.source,
            sorted(request.batch_sizes),
            options.build,
            device=pick_device(request.device),
            name=row_name(request.source),
            seed=request.seed,
        )
    hardware = profile.measured.hardware if profile.measured else profile.gpu_type
    return OperatorFile(gpu_type=profile.gpu_type, hardware=hardware, runs=tuple(runs))
