"""A profile for the policies that plan with shares: thesis-v100 with latencies on shares and iGniter's coefficients.

The profile is derived, not published. The thesis ran iGniter, but prints none of its coefficients, and table A.1 has no
shares. So the latency of a batch on a share is the one that the experiments emulate (`Emulation.share_factor`: measured
ratios of igniter-v100, else table A.1's SM utilisation). iGniter's coefficients are fitted to these latencies
(`tenuto_lab.interference.igniter_derived`). `Derivation` says for each model what was known, and the errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from tenuto.placement.interference.igniter_model import Hardware
from tenuto.profiles import ModelProfile, Profile, ProfilePoint
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.experiments.emulation import Emulation, measured_pairs
from tenuto_lab.experiments.facts import VISION, thesis_facts
from tenuto_lab.interference.igniter_derived import (
    CommonTraits,
    KnownModel,
    PairMeasurement,
    derive_igniter,
    left_out_errors,
)

THESIS = "thesis-v100"
IGNITER = "igniter-v100"
DERIVED = "thesis-v100-derived"
DERIVED_FOR = frozenset(
    {"ffd", "ffd+", "ffd++", "gpulet", "gpulets+", "gslice", "ideal", "igniter", "self-tuning", "tenuto"}
)
"""The policies that cannot plan from table A.1, or could not plan shares, for which they were made."""

# gpu-lets' own interference model needs L2 and DRAM use, which table A.1 lacks; without it no model gets a neighbour.
DERIVED_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpulet": {"interference": "contention"},
    "gpulets+": {"interference": "contention"},
}

SHARES_PCT = (10.0, 20.0, 40.0, 50.0, 60.0, 80.0)  # those of igniter-v100 below the whole GPU
# Operators that compute, one pass of the catalogue's PyTorch networks, plus one for the copy of the input. For resnet50
# and mobilenet_v2 (and resnet101, 345) that is the number of kernels measured with PyTorch on a V100 (Orion).
KERNELS = {
    "alexnet": 20,
    "bert": 155,
    "densenet121": 431,
    "efficientnet_b7": 815,
    "gpt2": 231,
    "mobilenet_v2": 152,
    "resnet50": 175,
    "vgg19": 44,
}
FEEDBACK_BYTES = 4000.0  # 1,000 numbers, as the networks of igniter-v100 answer


@dataclass(frozen=True)
class Derivation:
    """The derived profile and its errors and assumptions.

    errors_pct: by model, the mean and the largest error of iGniter's formula against the latencies it is fitted to,
        and where the largest is.
    pair_errors_pct: mean error of slowdowns on the measured pairs with published coefficients, and with those that
        would be derived if they were unknown.
    """

    profile: Profile
    errors_pct: Mapping[str, tuple[float, float, str]]
    pair_errors_pct: tuple[float, float]
    assumptions: tuple[str, ...]

    def to_data(self) -> dict[str, Any]:
        """Return errors, assumptions and coefficients as plain data for result.json and the page."""
        data = asdict(self)
        del data["profile"]
        names = self.errors_pct
        return {**data, "coefficients": {name: self.profile.models[name].coefficients for name in names}}


@cache
def derivation() -> Derivation:
    """Return the derived profile of every model the thesis' experiments use."""
    thesis, igniter = load_shipped(THESIS), load_shipped(IGNITER)
    hardware = Hardware.of(igniter.coefficients)
    common = CommonTraits.of([model.coefficients for model in igniter.models.values()])
    emulation = Emulation(thesis)
    models: dict[str, ModelProfile] = {}
    errors: dict[str, tuple[float, float, str]] = {}
    for name, kernels in KERNELS.items():
        model = thesis.models[name]
        points = {
            (point.batch_size, share): point.latency_ms * emulation.share_factor(name, point.batch_size, share)
            for point in model.points
            for share in (*SHARES_PCT, 100.0)
        }
        known = KnownModel(points, _input_bytes(name), FEEDBACK_BYTES, kernels)
        measured = igniter.models.get(name)
        traits = common if measured is None else CommonTraits.of([measured.coefficients])
        fit = derive_igniter(name, known, traits, hardware)
        errors[name] = (
            round(fit.mean_error_pct, 2),
            round(fit.max_error_pct, 2),
            f"batch {fit.worst[0]}, {fit.worst[1]:g} %",
        )
        models[name] = _with_shares(model, points, fit.coefficients)
    profile = thesis.model_copy(
        update={
            "name": DERIVED,
            "source": f"derived, not published: {THESIS} with latencies on shares and iGniter's coefficients as "
            "derived by tenuto_lab.experiments.derived",
            "coefficients": dict(igniter.coefficients),
            "models": models,
        }
    )
    plain, derived = _pair_errors(igniter, hardware)
    return Derivation(profile, errors, (round(plain, 2), round(derived, 2)), _assumptions(common))


def _input_bytes(name: str) -> float:
    if name in VISION:
        return float(thesis_facts()["models"]["inputs"]["vision_input_bytes"])
    return float(thesis_facts()["network_latency_model"]["language_request_bytes"][1])


def _with_shares(
    model: ModelProfile, latency_ms: Mapping[tuple[int, float], float], coefficients: dict[str, float]
) -> ModelProfile:
    """Return the model with points on shares; memory as on the whole GPU, metrics only where they were measured."""
    on_shares = [
        ProfilePoint(
            batch_size=point.batch_size,
            share_pct=share,
            latency_ms=round(latency_ms[point.batch_size, share], 6),
            memory_mib=point.memory_mib,
        )
        for share in SHARES_PCT
        for point in model.points
    ]
    return model.model_copy(update={"points": (*model.points, *on_shares), "coefficients": coefficients})


def _pair_errors(igniter: Profile, hardware: Hardware) -> tuple[float, float]:
    pairs = [
        PairMeasurement(
            (sample.models[0], sample.gpulet.batch_size, sample.gpulet.share_pct),
            (sample.models[1], sample.neighbours[0].batch_size, sample.neighbours[0].share_pct),
            sample.slowdown,
        )
        for sample in measured_pairs()
    ]
    known = {}
    for name, model in igniter.models.items():
        values = model.coefficients
        points = {(point.batch_size, point.share_pct): point.latency_ms for point in model.points}
        known[name] = KnownModel(points, values["d_load_bytes"], values["d_feedback_bytes"], int(values["n_k"]))
    return left_out_errors(pairs, known, {n: m.coefficients for n, m in igniter.models.items()}, hardware)


def _assumptions(common: CommonTraits) -> tuple[str, ...]:
    power, use, delay, alpha = (
        100.0 * common.spread[key] for key in ("full_power_w", "full_l2_pct", "delay_ms_per_kernel", "alpha_l2")
    )
    return (
        "hardware coefficients, and what a kernel's delay, power, L2 use and sensitivity are for alexnet, resnet50 and "
        "vgg19: measured with TensorRT on a V100 (igniter-v100), taken to hold for PyTorch",
        "densenet121, efficientnet_b7, mobilenet_v2, bert, gpt2 (no data): the mean of igniter-v100's four networks; "
        f"large batches ask for {common.full_power_w:.0f} W above idle (networks differ by up to {power:.0f} %) and "
        f"{common.full_l2_pct:.0f} % of L2 ({use:.0f} %), {1000 * common.delay_ms_per_kernel:.2f} us delay per kernel "
        f"({delay:.0f} %), {100 * common.alpha_l2:.2f} % longer per % of others' L2 use ({alpha:.0f} %)",
        "kernels: operators of the PyTorch network and one copy; equals what was measured for resnet50 and "
        "mobilenet_v2 (Orion, V100), unchecked for the others",
        "latency on a share: igniter-v100's ratio for alexnet, resnet50, vgg19 up to batch 32, else u/s + 1 - u with "
        "table A.1's SM utilisation u; below batch 4 and between the sizes of table A.1 iGniter's formula",
        "gpulet and gpulets+ expect of a neighbour what the model `contention` says, which needs latencies only",
        "copies: 602,112 bytes per image and 8 KB per text at igniter-v100's 10 GB/s, answers of 4,000 bytes",
    )
