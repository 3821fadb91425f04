"""A fleet in virtual time: each request is in one cell, and weights follow the loss of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tenuto.loadgen.simulated_fleet import FOLLOWS_S, CellLoss, FleetRun, FleetSimulation
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, PolicyUsed, Workload
from tenuto.placement.fleet.fleet_plan import CellState, FleetTask, plan_fleet
from tenuto.profiles import Profiles

MODEL = {"slo_ms": 200, "latency": {"alpha_ms": 2, "beta_ms": 6}}
STAGES = [
    {"model": "s1", "latency": {"alpha_ms": 1, "beta_ms": 3}},
    {"model": "s2", "latency": {"alpha_ms": 1, "beta_ms": 3}, "after": ["s1"]},
]
WORKLOAD = Workload.model_validate(
    {
        "models": [
            {"name": "alone", "rate_rps": 150.0, **MODEL},
            {"name": "spread", "rate_rps": 200.0, "spread": "cell", "survive": 1.0, **MODEL},
        ],
        "applications": [{"name": "app", "rate_rps": 50.0, "slo_ms": 200, "stages": STAGES}],
    }
)


def simulated(losses: Sequence[CellLoss] = (), workload: Workload = WORKLOAD, **more: Any) -> FleetRun:
    states = [
        CellState(name, Cluster.model_validate({"nodes": [{"name": "n0", "gpus": [{"type": "v100", "count": 3}]}]}))
        for name in ("c1", "c2", "c3")
    ]
    done = plan_fleet(FleetTask(WORKLOAD, states, PolicyUsed(name="symphony"), Profiles([])))
    return FleetSimulation(workload, done.plans, done.traffic, 40.0, 7, losses, **more).run()


def test_each_request_of_models_and_applications_has_one_cell_and_is_in_time() -> None:
    run = simulated()
    summary = run.summary()
    assert summary["models"].keys() == {"alone", "spread", "app"}
    for row in summary["models"].values():
        assert sum(cell["offered"] for cell in row["cells"].values()) == row["offered"]
        assert row["attainment"] > 0.99
    assert (run.cell >= 0).all()
    again = simulated()
    assert (again.cell == run.cell).all()
    assert (again.outcome == run.outcome).all()


@pytest.mark.parametrize("is_whole", [True, False])
def test_weights_follow_the_loss_of_a_whole_cell_alone(is_whole: bool) -> None:
    before = simulated()
    spread = before.sent.names.index("spread")
    lost = before.cells[int(before.cell[before.sent.model_index == spread][0])]
    run = simulated([CellLoss(10.0, lost, frozenset({"n0/0", "n0/1", "n0/2"}), is_whole)])
    assert (run.sent.times_ms == before.sent.times_ms).all()
    there = run.cell == run.cells.index(lost)
    gone_ms = 1000.0 * (10.0 + FOLLOWS_S)
    mine = run.sent.model_index == spread
    assert (run.outcome[there & (run.sent.times_ms > 10_000.0)] != Outcome.OK).all()
    assert bool((mine & there & (run.sent.times_ms > gone_ms)).any()) is not is_whole
    assert (run.cell[run.sent.times_ms < gone_ms] == before.cell[run.sent.times_ms < gone_ms]).all()
    rest = mine & ~there & (run.sent.times_ms > gone_ms)
    assert np.mean(run.outcome[rest] == Outcome.OK) > 0.99  # the others were planned for it


def test_what_has_no_cell_fails() -> None:
    other = WORKLOAD.models[0].model_copy(update={"name": "other", "rate_rps": 20.0})
    asked = WORKLOAD.model_copy(update={"models": (*WORKLOAD.models, other)})
    row = simulated(workload=asked).summary()["models"]["other"]
    assert (row["failed"], row["cells"]) == (row["offered"], {})
