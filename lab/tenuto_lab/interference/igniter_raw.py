"""Finds iGniter's coefficients from raw measurements: of a GPU type, and k1..k5, power, L2 and delay of each model.

Source: Xu et al., "iGniter", arXiv 2211.01713, section 4.1 (what is profiled), equations 5 to 11 (what is fitted). The
paper does not say how measurements under a throttled clock are used. We tried which readings give the published
coefficients. With these they come out: the active time for k1..k5 and for power is scaled to full clock; power uses
only points at full clock; L2 use goes with the active time as measured, throttled or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import AliasChoices, Field, model_validator

from tenuto.documents import Fault, StrictModel, parse_document
from tenuto.errors import refused
from tenuto_lab.interference.fitting import demand_from_power, fit_line, frequency_slope, scheduling_line

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Matrix = tuple[tuple[Positive, ...], ...]
Samples = np.ndarray[Any, np.dtype[Any]]

FULL_SPEED = 1.0 - 1e-6  # of the top frequency; below, the clock was throttled


class RawGrid(StrictModel):
    """The batch sizes and shares in percent of the matrices; `layout` is always matrix[batch][share]."""

    batch: Annotated[tuple[int, ...], Field(min_length=2)]
    share_pct: Annotated[tuple[Positive, ...], Field(min_length=2)]
    layout: str = "matrix[batch][share]"


class RawHardware(StrictModel):
    """The measurements of a GPU type; tuples have a value for 1, 2, 3, … equal residents."""

    idle_power_w: NotNegative
    max_power_w: Positive
    max_frequency_mhz: Positive
    share_unit_pct: Positive
    pcie_bytes_per_ms: Positive
    power_w: Annotated[
        tuple[Positive, ...], Field(validation_alias=AliasChoices("power_w_by_residents", "power_w_1to5_vgg19"))
    ]
    frequency_mhz: Annotated[
        tuple[Positive, ...],
        Field(validation_alias=AliasChoices("frequency_mhz_by_residents", "frequency_mhz_1to5_vgg19")),
    ]
    sched_delay_ms: Annotated[
        tuple[NotNegative, ...],
        Field(
            validation_alias=AliasChoices(
                "sched_delay_per_kernel_ms_by_residents", "sched_delay_per_kernel_ms_1to5_vgg19"
            )
        ),
    ]

    @model_validator(mode="after")
    def _same_lengths(self) -> RawHardware:
        if len({len(self.power_w), len(self.frequency_mhz), len(self.sched_delay_ms)}) > 1:
            raise Fault("power, frequency and delays need one value per number of residents", "complete them")
        return self


class RawModel(StrictModel):
    """The measurements of one model: alone on the grid, and once beside a copy of itself."""

    input_bytes: NotNegative
    output_bytes: NotNegative
    kernels: Annotated[int, Field(ge=1)]
    sched_delay_total_ms: NotNegative  # of a batch alone, all kernels together
    gpu_latency_ms: Matrix  # without copies
    power_w: Matrix
    frequency_mhz: Matrix
    l2_util_pct: Annotated[
        tuple[NotNegative, ...],
        Field(validation_alias=AliasChoices("l2_util_pct_on_diagonal", "l2_util_pct_at_b1r10_b16r50_b32r100")),
    ]  # at the smallest batch and share, the second smallest of both, …
    l2_util_pct_of_corunner: Positive
    active_ms_alone: Positive
    active_ms_two_copies: Positive
    power_w_two_copies: Positive
    frequency_mhz_two_copies: Positive


class RawProfile(StrictModel):
    """The raw profile of a GPU type as iGniter takes it: a small grid per model and three series for the hardware."""

    source: str = ""
    device: str = ""
    units: dict[str, str] = Field(default_factory=dict)
    grid: RawGrid
    hardware: RawHardware
    models: Annotated[dict[str, RawModel], Field(min_length=1)]
    doubts: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _shapes(self) -> RawProfile:
        rows, columns = len(self.grid.batch), len(self.grid.share_pct)
        for name, model in self.models.items():
            for key in ("gpu_latency_ms", "power_w", "frequency_mhz"):
                matrix = getattr(model, key)
                if len(matrix) != rows or any(len(row) != columns for row in matrix):
                    raise Fault(f"models.{name}.{key} is not {rows} x {columns}", "one row per batch size")
            if len(model.l2_util_pct) != min(rows, columns):
                raise Fault(f"models.{name}: L2 needs {min(rows, columns)} values", "measure the diagonal")
        return self


@dataclass(frozen=True)
class IgniterFit:
    """Coefficients by the names that profiles use: `Profile.coefficients` and `ModelProfile.coefficients`."""

    hardware: dict[str, float]
    models: dict[str, dict[str, float]]


def fit_igniter(raw: RawProfile | Mapping[str, Any]) -> IgniterFit:
    """Fit iGniter's coefficients by least squares.

    Returns:
        Coefficients ready for a profile. Units: ms, W, MHz, bytes, percent; shares in percent; `alpha_power` and
        `alpha_cacheutil` per request/s of solo processing ability (1000 b / active time).

    Raises:
        InvalidInputError: the raw profile is malformed (every fault is named), or has too few or too equal points.
    """
    profile = raw if isinstance(raw, RawProfile) else parse_document(RawProfile, raw, origin="raw profile")
    hardware = _hardware(profile.hardware)
    return IgniterFit(hardware, {name: _model(name, model, profile) for name, model in profile.models.items()})


def _hardware(raw: RawHardware) -> dict[str, float]:
    demand_w = [demand_from_power(raw.power_w, raw.max_power_w, count + 1) for count in range(len(raw.power_w))]
    speeds = [frequency / raw.max_frequency_mhz for frequency in raw.frequency_mhz]
    alpha_sch, beta_sch = scheduling_line(raw.sched_delay_ms, speeds)
    return {
        "P_w": raw.max_power_w,
        "F_mhz": raw.max_frequency_mhz,
        "p_idle_w": raw.idle_power_w,
        "B_pcie_bytes_per_ms": raw.pcie_bytes_per_ms,
        "r_unit_pct": raw.share_unit_pct,
        "r_max_pct": 100.0,
        "alpha_f_mhz_per_w": frequency_slope(demand_w, raw.frequency_mhz, raw.max_power_w, raw.max_frequency_mhz),
        "alpha_sch_ms_per_kernel": alpha_sch,
        "beta_sch_ms_per_kernel": beta_sch,
    }


def _model(name: str, raw: RawModel, profile: RawProfile) -> dict[str, float]:
    top_mhz, idle_w = profile.hardware.max_frequency_mhz, profile.hardware.idle_power_w
    shares, batches = np.meshgrid(np.array(profile.grid.share_pct), np.array(profile.grid.batch, dtype=float))
    speed = np.array(raw.frequency_mhz) / top_mhz
    latency_ms = np.array(raw.gpu_latency_ms)
    active_ms, as_measured_ms = latency_ms * speed - raw.sched_delay_total_ms, latency_ms - raw.sched_delay_total_ms
    if (active_ms <= 0).any():
        rule = "the delay of a batch alone is above its GPU latency"
        cure = "Measure both again; the delay is a part of the latency."
        raise refused(f"models.{name}", raw.sched_delay_total_ms, rule, cure)
    k = fit_active_time(name, batches.ravel(), shares.ravel(), active_ms.ravel())
    ability_rps = 1000.0 * batches / active_ms
    free = speed >= FULL_SPEED
    alpha_power, beta_power = fit_line(ability_rps[free].tolist(), (np.array(raw.power_w)[free] - idle_w).tolist())
    alpha_use, beta_use = fit_line(np.diagonal(1000.0 * batches / as_measured_ms).tolist(), raw.l2_util_pct)
    beside_ms = raw.active_ms_two_copies * raw.frequency_mhz_two_copies / top_mhz
    return {
        "k1": k[0],
        "k2": k[1],
        "k3": k[2],
        "k4": k[3],
        "k5": k[4],
        "n_k": float(raw.kernels),
        "k_sch_times_n_k_ms": raw.sched_delay_total_ms,
        "k_sch_ms": raw.sched_delay_total_ms / raw.kernels,
        "d_load_bytes": raw.input_bytes,
        "d_feedback_bytes": raw.output_bytes,
        "alpha_power": alpha_power,
        "beta_power_w": beta_power,
        "alpha_cacheutil": alpha_use,
        "beta_cacheutil_pct": beta_use,
        "alpha_cache": (beside_ms / raw.active_ms_alone - 1.0) / raw.l2_util_pct_of_corunner,
    }


def fit_active_time(
    name: str, batches: Samples, shares: Samples, active_ms: Samples, *, guarded: bool = False
) -> list[float]:
    """Return k1..k5 of k_act = (k1 b^2 + k2 b + k3)/(r + k4) + k5, shares in percent (eq. 11).

    For a given k4 the rest is linear, so only k4 is searched: on a grid over (-r_min, 10 r_max), then by golden section
    around the best point.

    Args:
        name: of the model, for the message.
        guarded: for use beyond the points: minimise relative errors, so that small batches count as much as large
            ones, and let no constant be negative, so that more work never takes less time. Otherwise errors in ms.

    Raises:
        InvalidInputError: fewer than three batch sizes or shares.
    """
    if len(active_ms) < 5 or len(set(batches.tolist())) < 3 or len(set(shares.tolist())) < 3:
        rule = "k1 to k5 need at least three batch sizes and three shares"
        raise refused(f"models.{name}", len(active_ms), rule, "Measure a grid such as 1, 16, 32.")

    from scipy.optimize import nnls  # whose import takes longer than all others of planning without shares

    weights = 1.0 / active_ms if guarded else np.ones_like(active_ms)
    wanted = active_ms * weights

    def solve(k4: float) -> tuple[float, Samples]:
        scale = weights / (shares + k4)
        matrix = np.column_stack([batches**2 * scale, batches * scale, scale, weights])
        constants = nnls(matrix, wanted)[0] if guarded else np.linalg.lstsq(matrix, wanted, rcond=None)[0]
        return float(((matrix @ constants - wanted) ** 2).sum()), constants

    least, most = float(shares.min()), float(shares.max())
    offsets = np.geomspace(0.01 * least, 10.0 * most + least, 400) - least
    if guarded:
        offsets = np.concatenate([[0.0], offsets[offsets > 0]])
    best = min(range(len(offsets)), key=lambda index: solve(float(offsets[index]))[0])
    low, high = float(offsets[max(0, best - 1)]), float(offsets[min(len(offsets) - 1, best + 1)])
    golden = (5**0.5 - 1) / 2
    for _ in range(80):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if solve(left)[0] <= solve(right)[0]:
            high = right
        else:
            low = left
    k4 = (low + high) / 2
    k1, k2, k3, k5 = solve(k4)[1].tolist()
    return [k1, k2, k3, k4, k5]
