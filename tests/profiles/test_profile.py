"""What a profile answers when it is asked for a metric, and what it refuses to answer."""

from __future__ import annotations

import pytest

from tenuto.errors import MissingProfileError
from tenuto.profiles import ModelProfile
from tenuto.profiles.shipped import load_shipped

METRICS = {"l2_util_pct": (10.0, 30.0), "power_w": (100.0, 140.0), "achieved_occupancy_pct": (40.0, 60.0)}
MODEL = ModelProfile.model_validate({"points": [
    {"batch_size": size, "latency_ms": 1.0, "metrics": {name: values[index] for name, values in METRICS.items()}}
    for index, size in enumerate((4, 8))
]})


def test_measured_points_are_answered_as_measured() -> None:
    assert MODEL.metric("achieved_occupancy_pct", 8) == 60.0
    assert MODEL.metric("power_w", 4) == 100.0


def test_loads_of_the_device_are_interpolated_between_batch_sizes() -> None:
    assert MODEL.metric("l2_util_pct", 5) == pytest.approx(15.0)
    assert MODEL.metric("power_w", 6) == pytest.approx(120.0)


@pytest.mark.parametrize(
    ("name", "batch_size", "share_pct"),
    [
        ("achieved_occupancy_pct", 6, 100.0),  # other kernels may be chosen
        ("l2_util_pct", 9, 100.0),
        ("l2_util_pct", 3, 100.0),
        ("l2_util_pct", 4, 50.0),
        ("dram_util_pct", 4, 100.0),
    ],
)
def test_everything_else_is_refused_with_the_measured_sizes(name: str, batch_size: int, share_pct: float) -> None:
    with pytest.raises(MissingProfileError, match=f"metric '{name}' is missing at batch size {batch_size}.*Measured"):
        MODEL.metric(name, batch_size, share_pct)


def test_an_unreadable_cell_of_a_shipped_profile_stays_missing() -> None:
    metrics = ("achieved_occupancy_pct", "wavg_ach_occ_pct", "wavg_sm_util_pct", "mem_cap_pct")
    missing = [
        (model, point.batch_size, name)
        for name in metrics
        for model, profile in load_shipped("thesis-v100").models.items()
        for point in profile.points
        if name not in point.metrics
    ]
    assert missing
    for model, batch_size, name in missing:
        with pytest.raises(MissingProfileError):
            load_shipped("thesis-v100").models[model].metric(name, batch_size)
