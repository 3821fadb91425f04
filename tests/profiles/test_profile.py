import pytest

from tenuto.profiles.shipped import load_shipped


def test_an_unreadable_cell_of_a_shipped_profile_stays_missing() -> None:
    metrics = {"achieved_occupancy_pct", "wavg_ach_occ_pct", "wavg_sm_util_pct", "mem_cap_pct"}
    points = [point for profile in load_shipped("thesis-v100").models.values() for point in profile.points]
    assert any(metrics - point.metrics.keys() for point in points)


def test_a_slower_copy_serves_fewer_requests_whatever_was_asked_before() -> None:
    profile = load_shipped("thesis-v100").models["resnet50"]
    rate_rps, memory = profile.throughput_rps(8), profile.memory_mib(8)
    assert profile.scaled(2.0).throughput_rps(8) == pytest.approx(rate_rps / 2.0)
    assert (profile.scaled(2.0).latency_ms(8), profile.scaled(2.0).memory_mib(8)) == (
        2.0 * profile.latency_ms(8),
        memory,
    )
    assert profile.model_copy(update={"points": profile.points[:1]}).shares() == (100.0,)
