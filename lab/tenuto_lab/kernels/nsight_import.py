"""Merges the kernels that profilers recorded of one batch into a point of a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenuto.errors import InvalidInputError, refused
from tenuto.profiles.gpu_types import GPU_TYPES, sms_of_share
from tenuto.profiles.measuring.kernels.chrome_trace import load_chrome_trace
from tenuto.profiles.measuring.kernels.metrics import kernel_metrics
from tenuto.profiles.measuring.kernels.record import Device, Kernel
from tenuto.profiles.profile import ModelProfile, Profile
from tenuto_lab.kernels.kernel_matching import match_kernels
from tenuto_lab.kernels.nsight_compute import load_ncu
from tenuto_lab.kernels.nsight_systems import load_nsys


@dataclass(frozen=True)
class ImportRequest:
    """Which files to merge into which point. `batches` is how many batches each file recorded, all of one size."""

    row: str
    batch_size: int
    share_pct: float = 100.0
    ncu: str | None = None
    nsys: str | None = None
    trace: str | None = None
    batches: int = 1


def import_kernels(profile: Profile, request: ImportRequest) -> Profile:
    """Return the profile with the point's kernel metrics set, and what was merged recorded among the row's doubts.

    Times come from the trace or Nsight Systems if given, otherwise from Nsight Compute. Occupancy, L2 and DRAM use come
    from Nsight Compute; without it occupancy is an estimate, and the row says so.

    Raises:
        InvalidInputError: no such point, unreadable or unsuitable files, files that do not match each other.
    """
    _check(profile, request)
    kernels, capability, notes = _kernels(request)
    if len(kernels) % request.batches:
        raise refused(
            "--batches",
            request.batches,
            f"does not divide the {len(kernels)} recorded kernels",
            "Give the number of batches that ran while the profiler recorded, warm-up included.",
        )
    device = _device(profile, capability, request.share_pct)
    metrics = {**kernel_metrics(kernels, device), **_memory_use(kernels)}
    if request.batches > 1 or not (request.nsys or request.trace):
        del metrics["kernel_gap_ms"]  # holds the pauses between batches, or nothing of the real gaps
    metrics["kernels"] /= request.batches
    metrics["kernel_ms"] = round(metrics["kernel_ms"] / request.batches, 4)
    if metrics["occupancy_estimated"]:
        notes.append("occupancy estimated from launch configurations")
    row = profile.models[request.row]
    points = tuple(
        point.model_copy(update={"metrics": {**point.metrics, **metrics}})
        if (point.batch_size, point.share_pct) == (request.batch_size, request.share_pct)
        else point
        for point in row.points
    )
    note = f"batch {request.batch_size} at {request.share_pct:g} %: kernel metrics {', '.join(notes)}"
    others = tuple(doubt for doubt in row.doubts if not doubt.startswith(note.partition(": ")[0] + ": kernel metrics"))
    changed: ModelProfile = row.model_copy(update={"points": points, "doubts": (*others, note)})
    return profile.model_copy(update={"models": {**profile.models, request.row: changed}})


def _memory_use(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return the means of the use of L2 and DRAM, if every kernel has them."""
    means = {
        "l2_util_pct": time_weighted_mean(kernels, lambda k: k.l2_util_pct),
        "dram_util_pct": time_weighted_mean(kernels, lambda k: k.dram_util_pct),
    }
    return {name: round(mean, 4) for name, mean in means.items() if mean is not None}


def time_weighted_mean(kernels: Sequence[Kernel], value: Callable[[Kernel], float | None]) -> float | None:
    """Return the mean of a value, weighted by each kernel's duration; None if a kernel lacks it or there is no
    kernel."""
    total = weighted = 0.0
    for kernel in kernels:
        one = value(kernel)
        if one is None:
            return None
        total += kernel.duration_us
        weighted += kernel.duration_us * one
    return weighted / total if total > 0 else None


def _check(profile: Profile, request: ImportRequest) -> None:
    if request.batches < 1:
        raise refused("--batches", request.batches, "must be at least 1", "Give the number of batches recorded.")
    if not (request.ncu or request.nsys or request.trace):
        raise InvalidInputError("nothing to import. Give --ncu, --nsys or --trace.")
    if request.nsys and request.trace:
        raise refused("--trace", request.trace, "gives the same as --nsys", "Give only one of the two.")
    row = profile.models.get(request.row)
    if row is None:
        known = ", ".join(sorted(profile.models))
        raise refused("MODEL", request.row, "is not in the profile file", f"It has: {known}.")
    if not any((p.batch_size, p.share_pct) == (request.batch_size, request.share_pct) for p in row.points):
        known = ", ".join(f"{p.batch_size} at {p.share_pct:g} %" for p in row.points) or "none"
        raise refused(
            f"models.{request.row}",
            f"{request.batch_size} at {request.share_pct:g} %",
            "this batch size and share were not measured",
            f"Measured: {known}.",
        )


def _kernels(request: ImportRequest) -> tuple[Sequence[Kernel], tuple[int, int] | None, list[str]]:
    capability: tuple[int, int] | None = None
    kernels: Sequence[Kernel] = ()
    notes = []
    if request.trace:
        recorded = load_chrome_trace(request.trace)
        kernels, capability = recorded.kernels, recorded.device.compute_capability
        notes.append("from a torch.profiler trace")
    elif request.nsys:
        kernels = load_nsys(request.nsys)
        notes.append("from Nsight Systems")
    if request.ncu:
        report = load_ncu(request.ncu)
        if capability is not None and report.compute_capability not in (None, capability):
            raise refused(
                request.ncu,
                report.compute_capability,
                f"is of another GPU than the trace's {capability}",
                "Record both on one GPU.",
            )
        capability = capability or report.compute_capability
        if kernels:
            matched = match_kernels(kernels, report.kernels, origin=request.ncu)
            kernels = matched.kernels
            notes.append(f"matched with Nsight Compute ({len(kernels) - matched.unmatched} of {len(kernels)} kernels)")
        else:
            kernels = report.kernels
            notes.append("from Nsight Compute, which runs kernels one after the other")
    return kernels, capability, notes


def _device(profile: Profile, capability: tuple[int, int] | None, share_pct: float) -> Device:
    """Return the device of a point: at a share only its part of the SMs, rounded down as CUDA MPS does."""
    known = GPU_TYPES.get(profile.gpu_type)
    cc = capability or (None if known is None else known.capability)
    if known is None or known.sm_count is None or cc is None:
        there = ", ".join(sorted(name for name, kind in GPU_TYPES.items() if kind.capability))
        rule = "SM count and compute capability are not known"
        raise refused("gpu_type", profile.gpu_type, rule, f"Types that have them: {there}.")
    if cc != known.capability:
        raise refused(
            "compute capability",
            cc,
            f"is not that of a {profile.gpu_type}, {known.capability}",
            "Import into the profile of the GPU type the files were recorded on.",
        )
    return Device(profile.gpu_type, cc, sms_of_share(known.sm_count, share_pct))
