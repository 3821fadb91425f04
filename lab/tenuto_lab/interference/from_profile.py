"""Finds the coefficients of iGniter's and gpulet's interference models from the raw measurements of a profile file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.errors import InvalidInputError
from tenuto.profiles.profile import CoRun, CoRunPart, ModelProfile, Profile, ProfilePoint
from tenuto_lab.interference.gpulet_fit import fit_gpulet_linear
from tenuto_lab.interference.igniter_raw import fit_igniter
from tenuto_lab.interference.measurements import COLUMNS, pair_samples

_SHARE_UNIT_PCT = 2.5  # the step of shares that iGniter plans in


@dataclass(frozen=True)
class Fitted:
    """The profile with every coefficient that could be fitted, and a line for each that was fitted or could not be."""

    profile: Profile
    notes: tuple[str, ...]


def fit_coefficients(profile: Profile) -> Fitted:
    """Fit the coefficients for which the profile has enough measurements; no value is assumed for a missing one."""
    notes: list[str] = []
    hardware: dict[str, float] = dict(profile.coefficients)
    models = dict(profile.models)
    for name, model in profile.models.items():
        raw, missing = _igniter_raw(name, model, profile)
        if missing:
            notes.append(f"igniter, {name}: not fitted; not measured: {', '.join(missing)}")
            continue
        try:
            fit = fit_igniter(raw)
        except InvalidInputError as error:
            notes.append(f"igniter, {name}: not fitted: {error}")
            continue
        hardware |= fit.hardware
        models[name] = model.model_copy(update={"coefficients": {**model.coefficients, **fit.models[name]}})
        notes.append(f"igniter, {name}: fitted from {len(model.points)} points and its co-runs")
    notes.append(_gpulet(profile, hardware))
    rounded = {key: round(value, 9) for key, value in hardware.items()}
    return Fitted(profile.model_copy(update={"coefficients": rounded, "models": models}), tuple(notes))


def _gpulet(profile: Profile, hardware: dict[str, float]) -> str:
    pairs = [run.parts for run in profile.co_runs if _is_pair(run)]
    if not pairs:
        return "gpulet: not fitted; no pair of models was measured on the two parts of the GPU"
    rows = [[a.model, b.model, a.batch_size, b.batch_size, a.share_pct, a.latency_ms, b.latency_ms] for a, b in pairs]
    try:
        samples = pair_samples({"columns": list(COLUMNS), "rows": rows}, profile.models, origin="co_runs")
        fit = fit_gpulet_linear(samples)
    except InvalidInputError as error:
        return f"gpulet: not fitted: {error}"
    for key in ("l2_own", "l2_other", "dram_own", "dram_other", "constant"):
        hardware[f"gpulet_{key}"] = getattr(fit, key)
    return f"gpulet: fitted from {len(pairs)} pairs"


def _is_pair(run: CoRun) -> bool:
    return len(run.parts) == 2 and abs(sum(part.share_pct for part in run.parts) - 100.0) < 1e-6


def _igniter_raw(name: str, model: ModelProfile, profile: Profile) -> tuple[dict[str, Any], list[str]]:
    """Return iGniter's raw profile of one model, and names of the parts that were not measured."""
    missing: list[str] = []
    batches, shares = _grid(model)
    if len(batches) < 3 or len(shares) < 3:
        return {}, ["a grid of three batch sizes and three shares"]
    hardware = _hardware(profile, missing)
    points = [[model.point(batch, share) for share in shares] for batch in batches]

    def matrix(metric: str) -> list[list[float]]:
        return [[_metric(point, metric, missing) for point in row] for row in points]

    diagonal = [points[i][i] for i in range(min(len(batches), len(shares)))]
    alone, beside = (_run_of_copies(profile.co_runs, name, count) for count in (1, 2))
    if alone is None:
        missing.append("the model alone on its share (--kinds igniter)")
    if beside is None:
        missing.append("two copies side by side (--kinds igniter)")
    if alone is None or beside is None:
        return {}, missing
    part = alone.parts[0]
    here = next((p for p in model.points if (p.batch_size, p.share_pct) == (part.batch_size, part.share_pct)), None)
    if here is None:
        missing.append(f"batch {part.batch_size} at {part.share_pct:g} %")
        return {}, missing
    largest = points[-1][-1]
    made: dict[str, Any] = {
        "input_bytes": _metric(largest, "h2d_bytes", missing) / largest.batch_size,
        "output_bytes": _metric(largest, "d2h_bytes", missing) / largest.batch_size,
        "kernels": round(_metric(largest, "kernels", missing)) or 1,
        "sched_delay_total_ms": _metric(points[0][-1], "kernel_gap_ms", missing),
        "gpu_latency_ms": matrix("kernels_ms"),
        "power_w": matrix("power_w"),
        "frequency_mhz": matrix("sm_clock_mhz"),
        "l2_util_pct_on_diagonal": [_metric(point, "l2_util_pct", missing) for point in diagonal],
        "l2_util_pct_of_corunner": _metric(here, "l2_util_pct", missing),
        "active_ms_alone": _metric(alone.parts[0], "kernels_ms", missing),
        "active_ms_two_copies": _metric(beside.parts[0], "kernels_ms", missing),
        "power_w_two_copies": _metric(beside, "power_w", missing),
        "frequency_mhz_two_copies": _metric(beside, "sm_clock_mhz", missing),
    }
    grid = {"batch": batches, "share_pct": shares}
    return {"grid": grid, "hardware": hardware, "models": {name: made}}, list(dict.fromkeys(missing))


def _grid(model: ModelProfile) -> tuple[list[int], list[float]]:
    """Return the batch sizes measured at every share, and the shares, ascending."""
    shares = [share for share in model.shares() if len(model.batch_sizes(share)) >= 3]
    common = set.intersection(*(set(model.batch_sizes(share)) for share in shares)) if shares else set()
    return sorted(common), shares


def _hardware(profile: Profile, missing: list[str]) -> dict[str, Any]:
    series = _resident_series(profile.co_runs)
    if len(series) < 3:
        missing.append("one to five equal residents (--kinds residents)")
        return {}
    speeds = [
        point.metrics["h2d_bytes"] / point.metrics["h2d_ms"]
        for model in profile.models.values()
        for point in model.points
        if point.metrics.get("h2d_ms") and point.metrics.get("h2d_bytes")
    ]
    if not speeds:
        missing.append("bytes and time of a copy to the device")
    delays = [
        _metric(run.parts[0], "kernel_gap_ms", missing) / (_metric(run.parts[0], "kernels", missing) or 1.0)
        for run in series
    ]
    first = series[0]
    return {
        "idle_power_w": _metric(first, "idle_power_w", missing),
        "max_power_w": _metric(first, "max_power_w", missing),
        "max_frequency_mhz": _metric(first, "max_sm_clock_mhz", missing),
        "share_unit_pct": _SHARE_UNIT_PCT,
        "pcie_bytes_per_ms": max(speeds, default=0.0),
        "sched_delay_per_kernel_ms_by_residents": delays,
        "power_w_by_residents": [_metric(run, "power_w", missing) for run in series],
        "frequency_mhz_by_residents": [_metric(run, "sm_clock_mhz", missing) for run in series],
    }


def _resident_series(runs: Sequence[CoRun]) -> list[CoRun]:
    """Return co-runs of 1, 2, … equal residents on a fifth of the GPU, as far as there is no gap."""
    series: list[CoRun] = []
    first: tuple[str, int, float] | None = None
    for run in sorted(runs, key=lambda run: len(run.parts)):
        kinds = {(part.model, part.batch_size, part.share_pct) for part in run.parts}
        if len(kinds) == 1 and run.parts[0].share_pct == 20.0 and len(run.parts) == len(series) + 1:
            (kind,) = kinds
            first = first or kind
            if kind == first:
                series.append(run)
    return series


def _run_of_copies(runs: Sequence[CoRun], name: str, count: int) -> CoRun | None:
    for run in runs:
        same = len({(part.model, part.batch_size, part.share_pct) for part in run.parts}) == 1
        if same and len(run.parts) == count and run.parts[0].model == name and run.parts[0].share_pct == 50.0:
            return run
    return None


def _metric(owner: ProfilePoint | CoRunPart | CoRun, name: str, missing: list[str]) -> float:
    value = owner.metrics.get(name)
    if value is None:
        missing.append(_WORDS.get(name, name))
        return 0.0
    return float(value)


_WORDS = {
    "l2_util_pct": "L2 use (`tenuto kernels import`)",
    "power_w": "power (NVML)",
    "sm_clock_mhz": "clocks (NVML)",
    "kernels_ms": "GPU time of a batch (CUDA events)",
    "kernel_gap_ms": "time between kernels (CUPTI)",
    "kernels": "number of kernels (CUPTI)",
    "h2d_bytes": "bytes copied to the device (CUPTI)",
    "d2h_bytes": "bytes copied from the device (CUPTI)",
}
