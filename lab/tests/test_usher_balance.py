"""Cuti and Muti of the paper's figure 7."""

from __future__ import annotations

import pytest

from tenuto.placement import Plan
from tenuto.placement.cluster import Cluster
from tenuto.profiles import Profile, Profiles
from tenuto_lab.usher_balance import balances

CREQ, MREQ = {"M1": 50, "M2": 50, "M3": 40, "M4": 40}, {"M1": 20, "M2": 20, "M3": 60, "M4": 60}


@pytest.mark.parametrize(
    ("placed", "cuti", "muti"),
    [((("M1", "M2"), ("M3",), ("M4",)), 60, 160 / 3), ((("M1", "M3"), ("M2", "M4")), 90, 80)],
)
def test_the_means_of_figure_7(placed: tuple[tuple[str, ...], ...], cuti: float, muti: float) -> None:
    whole_mib = Cluster.parse("v100:1").gpus[0].memory_mib
    rows = {
        name: {
            "points": [
                {
                    "batch_size": 8,
                    "latency_ms": 1,
                    "memory_mib": MREQ[name] * whole_mib / 100,
                    "metrics": {"achieved_occupancy_pct": CREQ[name]},
                }
            ]
        }
        for name in CREQ
    }
    profile = Profile.model_validate({"name": "f", "gpu_type": "v100", "source": "figure 7", "models": rows})
    plan = Plan.from_data(
        {
            "policy": {"name": "hand"},
            "gpus": [{"id": f"n0/{n}", "type": "v100"} for n in range(len(placed))],
            "gpulets": [
                {"id": f"n0/{n}/{name}", "gpu": f"n0/{n}", "models": [{"name": name, "batch_size": 8}]}
                for n, names in enumerate(placed)
                for name in names
            ],
            "models": [{"name": name, "rate_rps": 1, "slo_ms": 9} for name in CREQ],
        }
    )
    found = balances(plan, Profiles([profile]))
    assert sum(each.cuti_pct for each in found) / len(found) == pytest.approx(cuti)
    assert sum(each.muti_pct for each in found) / len(found) == pytest.approx(muti)
    assert sum(each.models for each in found) == 4
