"""Derives iGniter's coefficients for a model that was never profiled in iGniter's way.

This needs the model's latency by batch size and share, its bytes and its number of kernels. k1 to k5 are fitted to
those latencies. The other coefficients (delay of a kernel alone, power, L2 use, sensitivity to others' L2 use) are
means of the profiled models: whatever the network, these ask for nearly the same power and the same L2 use when large
batches fill the whole GPU. `left_out_errors` gives the error of that, on measured pairs of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from tenuto.errors import refused
from tenuto.placement.interference.igniter_model import Hardware, Load, ModelConstants, gpu_time_ms
from tenuto_lab.interference.igniter_raw import fit_active_time

WHOLE_GPU_PCT = 100.0
PROFILED_BATCH = 32  # the largest batch of iGniter's own small profile (section 4.1)
_PASSES = 4  # passes of fitting k1..k5 and the throttling that follows from them; in practice two are enough


@dataclass(frozen=True)
class KnownModel:
    """A model's known figures: latency alone in ms by (batch size, share in percent), copies included."""

    latency_ms: Mapping[tuple[int, float], float]
    load_bytes: float
    feedback_bytes: float
    kernels: int


@dataclass(frozen=True)
class CommonTraits:
    """The common traits of profiled models, as means over them.

    `full_power_w` (above idle) and `full_l2_pct` are with batches of `PROFILED_BATCH` on the whole GPU; `spread` is, by
    the same names, the largest distance of a model from the mean as a part of it.
    """

    delay_ms_per_kernel: float
    full_power_w: float
    beta_power_w: float
    full_l2_pct: float
    beta_l2_use_pct: float
    alpha_l2: float
    spread: Mapping[str, float]

    @classmethod
    def of(cls, coefficients: Sequence[Mapping[str, float]]) -> CommonTraits:
        """Return the traits of models with published coefficients.

        Raises:
            InvalidInputError: there is none, or one lacks a coefficient.
        """
        if not coefficients:
            raise refused("coefficients", 0, "needs a profiled model", "Give igniter-v100's.")
        models = [ModelConstants.of(values) for values in coefficients]
        full = [Load.of(model, PROFILED_BATCH, WHOLE_GPU_PCT) for model in models]
        columns = {
            "delay_ms_per_kernel": [model.delay_alone_ms / model.kernels for model in models],
            "full_power_w": [load.power_w for load in full],
            "beta_power_w": [model.beta_power_w for model in models],
            "full_l2_pct": [load.l2_pct for load in full],
            "beta_l2_use_pct": [model.beta_l2_use_pct for model in models],
            "alpha_l2": [model.alpha_l2 for model in models],
        }
        means = {name: fmean(values) for name, values in columns.items()}
        spread = {
            name: max(abs(value / means[name] - 1.0) for value in columns[name])
            for name in ("delay_ms_per_kernel", "full_power_w", "full_l2_pct", "alpha_l2")
        }
        return cls(**means, spread=spread)


@dataclass(frozen=True)
class Derived:
    """Coefficients by the names that profiles use, and their errors on the latencies alone, in percent."""

    coefficients: dict[str, float]
    mean_error_pct: float
    max_error_pct: float
    worst: tuple[int, float]  # the batch size and share of the largest error


def derive_igniter(name: str, known: KnownModel, traits: CommonTraits, hardware: Hardware) -> Derived:
    """Return iGniter's coefficients of a model.

    k1..k5 minimise the squares of the relative errors, and none is negative. A latency that was measured while the
    model throttled the clock is first scaled to the full clock, as in `igniter_raw`. Power and active time depend on
    each other, so the fit takes several passes. `alpha_power` and `alpha_cacheutil` are such that the largest known
    batch on the whole GPU asks for the common power and L2 use.

    Raises:
        InvalidInputError: too few points, none on the whole GPU, or latencies below copies and scheduling.
    """
    points = sorted(known.latency_ms)
    whole = [size for size, share in points if share == WHOLE_GPU_PCT]
    if not whole:
        raise refused(f"models.{name}", len(points), "not known on the whole GPU", "Measure it.")
    largest = max(whole)
    batches = np.array([float(size) for size, _ in points])
    shares = np.array([share for _, share in points])
    copies_ms = batches * (known.load_bytes + known.feedback_bytes) / hardware.pcie_bytes_per_ms
    gpu_ms = np.array([known.latency_ms[point] for point in points]) - copies_ms
    delay_ms = traits.delay_ms_per_kernel * known.kernels
    speed = np.ones_like(gpu_ms)
    values: dict[str, float] = {}
    for _ in range(_PASSES):
        active_ms = gpu_ms * speed - delay_ms
        if (active_ms <= 0).any():
            rule = "copies and scheduling alone take as long as a batch"
            raise refused(f"models.{name}", delay_ms, rule, "Check its bytes and kernels.")
        k = fit_active_time(name, batches, shares, active_ms, guarded=True)
        values = {
            **{f"k{number}": value for number, value in enumerate(k, start=1)},
            "n_k": float(known.kernels),
            "k_sch_times_n_k_ms": delay_ms,
            "k_sch_ms": traits.delay_ms_per_kernel,
            "d_load_bytes": known.load_bytes,
            "d_feedback_bytes": known.feedback_bytes,
            "alpha_power": 0.0,
            "beta_power_w": traits.beta_power_w,
            "alpha_cacheutil": 0.0,
            "beta_cacheutil_pct": traits.beta_l2_use_pct,
            "alpha_cache": traits.alpha_l2,
        }
        ability_rps = 1000.0 * largest / ModelConstants.of(values).active_ms(largest, WHOLE_GPU_PCT)
        values["alpha_power"] = (traits.full_power_w - traits.beta_power_w) / ability_rps
        values["alpha_cacheutil"] = (traits.full_l2_pct - traits.beta_l2_use_pct) / ability_rps
        model = ModelConstants.of(values)
        speed = np.array(
            [hardware.speed(hardware.idle_power_w + Load.of(model, size, share).power_w) for size, share in points]
        )
    errors = [
        abs(model.alone_ms(size, share, hardware) / known.latency_ms[size, share] - 1.0) for size, share in points
    ]
    worst = max(range(len(points)), key=lambda index: errors[index])
    rounded = {key: float(f"{value:.8g}") if abs(value) > 1e-9 else 0.0 for key, value in values.items()}
    return Derived(rounded, 100.0 * fmean(errors), 100.0 * errors[worst], points[worst])


@dataclass(frozen=True)
class PairMeasurement:
    """One model beside another: (model, batch size, share in percent) of both, and the factor by which it slowed."""

    own: tuple[str, int, float]
    other: tuple[str, int, float]
    slowdown: float


def left_out_errors(
    pairs: Sequence[PairMeasurement],
    known: Mapping[str, KnownModel],
    published: Mapping[str, Mapping[str, float]],
    hardware: Hardware,
) -> tuple[float, float]:
    """Return the mean error in percent of slowdowns by published and by derived coefficients, on measured pairs.

    For the second, each model in turn is treated as if only its latencies, bytes and kernels were known: its
    coefficients are derived from the traits of the others, and the pairs it is in are predicted.

    Raises:
        InvalidInputError: a model of a pair is not in `known` and `published`, or cannot be derived.
    """
    unknown = sorted({name for pair in pairs for name, _, _ in (pair.own, pair.other)} - (set(known) & set(published)))
    if unknown or not pairs:
        rule = "pairs need both models among those known and published"
        raise refused("pairs", ", ".join(unknown) or 0, rule, "Leave these pairs out.")
    models = {name: ModelConstants.of(values, name) for name, values in published.items()}
    stand_ins = {}
    for name, one in known.items():
        traits = CommonTraits.of([values for other, values in published.items() if other != name])
        stand_ins[name] = ModelConstants.of(derive_igniter(name, one, traits, hardware).coefficients, name)

    def error(pair: PairMeasurement, use: Mapping[str, ModelConstants]) -> float:
        return abs(_slowdown(pair, use, hardware) / pair.slowdown - 1.0)

    plain = fmean(error(pair, models) for pair in pairs)
    derived = [
        error(pair, {**models, name: stand_ins[name]}) for pair in pairs for name in {pair.own[0], pair.other[0]}
    ]
    return 100.0 * plain, 100.0 * fmean(derived)


def _slowdown(pair: PairMeasurement, models: Mapping[str, ModelConstants], hardware: Hardware) -> float:
    own, other = (Load.of(models[name], size, share) for name, size, share in (pair.own, pair.other))
    model = models[pair.own[0]]
    return gpu_time_ms(model, own, [own, other], hardware) / gpu_time_ms(model, own, [own], hardware)
