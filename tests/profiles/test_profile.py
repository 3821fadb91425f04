from tenuto.profiles.shipped import load_shipped


def test_an_unreadable_cell_of_a_shipped_profile_stays_missing() -> None:
    metrics = {"achieved_occupancy_pct", "wavg_ach_occ_pct", "wavg_sm_util_pct", "mem_cap_pct"}
    points = [point for profile in load_shipped("thesis-v100").models.values() for point in profile.points]
    assert any(metrics - point.metrics.keys() for point in points)
