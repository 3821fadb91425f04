import json
from pathlib import Path
from typing import Any

import pytest

from tenuto.profiles import CoRun, CoRunPart, ModelProfile, Profile, ProfilePoint
from tenuto_lab.interference.from_profile import fit_coefficients
from tenuto_lab.interference.igniter_raw import fit_igniter

RAW: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "tests" / "data" / "igniter_v100_raw_profile.json").read_text(encoding="utf-8")
)
BATCHES, SHARES = RAW["grid"]["batch"], RAW["grid"]["share_pct"]


def measured_profile() -> Profile:
    """Return iGniter's published raw profile in the form in which `tenuto profile` records it."""
    models, runs = {}, []
    for name, raw in RAW["models"].items():
        points = []
        for i, batch in enumerate(BATCHES):
            for j, share in enumerate(SHARES):
                metrics = {
                    "kernels_ms": raw["gpu_latency_ms"][i][j],
                    "power_w": raw["power_w"][i][j],
                    "sm_clock_mhz": raw["frequency_mhz"][i][j],
                    "kernels": float(raw["kernels"]),
                    "kernel_gap_ms": raw["sched_delay_total_ms"],
                    "h2d_bytes": float(raw["input_bytes"] * batch),
                    "d2h_bytes": float(raw["output_bytes"] * batch),
                    "h2d_ms": raw["input_bytes"] * batch / 1e7,
                }
                if i == j:
                    metrics["l2_util_pct"] = raw["l2_util_pct_at_b1r10_b16r50_b32r100"][i]
                points.append(
                    ProfilePoint(
                        batch_size=batch, share_pct=share, latency_ms=metrics["kernels_ms"] + 1, metrics=metrics
                    )
                )
        models[name] = ModelProfile(points=tuple(points))
        alone = part(name, 16, 50, kernels_ms=raw["active_ms_alone"])
        twice = part(name, 16, 50, kernels_ms=raw["active_ms_two_copies"])
        runs.append(CoRun(parts=(alone,)))
        runs.append(
            CoRun(
                parts=(twice, twice),
                metrics={"power_w": raw["power_w_two_copies"], "sm_clock_mhz": raw["frequency_mhz_two_copies"]},
            )
        )
    hardware = RAW["hardware"]
    for count in range(5):
        delay = hardware["sched_delay_per_kernel_ms_1to5_vgg19"][count]
        one = part("vgg19", 16, 20, kernel_gap_ms=delay * 29, kernels=29.0)
        runs.append(
            CoRun(
                parts=(one,) * (count + 1),
                metrics={
                    "power_w": hardware["power_w_1to5_vgg19"][count],
                    "sm_clock_mhz": hardware["frequency_mhz_1to5_vgg19"][count],
                    "idle_power_w": hardware["idle_power_w"],
                    "max_power_w": hardware["max_power_w"],
                    "max_sm_clock_mhz": hardware["max_frequency_mhz"],
                },
            )
        )
    return Profile(name="p", gpu_type="v100", source="test", models=models, co_runs=tuple(runs))


def part(model: str, batch: int, share: float, **metrics: float) -> CoRunPart:
    return CoRunPart(model=model, batch_size=batch, share_pct=share, latency_ms=1.0, metrics=metrics)


def test_igniters_published_measurements_give_the_same_coefficients_through_a_profile() -> None:
    fitted = fit_coefficients(measured_profile())
    expected = fit_igniter(RAW)
    for name, value in expected.hardware.items():
        assert fitted.profile.coefficients[name] == pytest.approx(value, rel=1e-5, abs=1e-8), name
    for model, coefficients in expected.models.items():
        found = fitted.profile.models[model].coefficients
        for name, value in coefficients.items():
            if name not in ("alpha_cache",):  # iGniter took the co-runner's L2 use in a run of its own
                assert found[name] == pytest.approx(value, rel=1e-5), (model, name)
        assert found["alpha_cache"] == pytest.approx(coefficients["alpha_cache"], rel=0.1)
    assert sum("fitted from" in note for note in fitted.notes) == 4


def test_what_was_not_measured_is_named_and_never_assumed() -> None:
    bare = measured_profile().model_copy(update={"co_runs": ()})
    fitted = fit_coefficients(bare)
    assert fitted.profile.coefficients == {}
    assert "--kinds residents" in fitted.notes[0]
    assert "two copies side by side" in fitted.notes[0]
    assert "gpulet: not fitted" in fitted.notes[-1]


def test_gpulets_constants_come_out_of_pairs() -> None:
    true = {"l2_own": 0.1, "l2_other": 0.4, "dram_own": 0.2, "dram_other": 0.3, "constant": 1.0}
    use = {("a", 1): (10.0, 30.0), ("a", 8): (40.0, 20.0), ("b", 1): (25.0, 70.0), ("b", 8): (60.0, 65.0)}
    models = {
        name: ModelProfile(
            points=tuple(
                ProfilePoint(
                    batch_size=b, share_pct=s, latency_ms=10.0, metrics={"l2_util_pct": l2, "dram_util_pct": dram}
                )
                for (owner, b), (l2, dram) in use.items()
                if owner == name
                for s in (50.0,)
            )
        )
        for name in ("a", "b")
    }

    def slowed(own: tuple[str, int], other: tuple[str, int]) -> CoRunPart:
        (l2, dram), (l2_other, dram_other) = use[own], use[other]
        factor = (
            true["l2_own"] * l2
            + true["l2_other"] * l2_other
            + true["dram_own"] * dram
            + true["dram_other"] * dram_other
        ) / 100 + true["constant"]
        return CoRunPart(model=own[0], batch_size=own[1], share_pct=50.0, latency_ms=10 * factor)

    runs = tuple(CoRun(parts=(slowed(x, y), slowed(y, x))) for x in use for y in use)
    fitted = fit_coefficients(Profile(name="p", gpu_type="v100", source="t", models=models, co_runs=runs))
    for name, value in true.items():
        assert fitted.profile.coefficients[f"gpulet_{name}"] == pytest.approx(value, abs=1e-6)
