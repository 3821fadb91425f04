"""Applications under the controller are judged from end to end, across changes of plan."""

from __future__ import annotations

from typing import Any

from tenuto.deployments.control.settings import ControlSettings
from tenuto.documents import parse_document
from tenuto.loadgen.controlled import ControlledSimulation, controlled_summary
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.profiles import Profiles

LATENCY = {"alpha_ms": 4.0, "beta_ms": 8.0}
CLUSTER = Cluster.parse("v100:3")


def pictures(rate_rps: float) -> Workload:
    stages = [
        {"model": "find", "latency": LATENCY},
        {"model": "name", "after": ["find"], "latency": LATENCY, "count": 3},
    ]
    steps = {"process": "steps", "options": {"factors": [1.0, 2.5]}}
    application = {"name": "pictures", "rate_rps": rate_rps, "slo_ms": 300.0, "stages": stages, "arrival": steps}
    alone = {"name": "alone", "rate_rps": 10.0, "slo_ms": 100.0, "latency": LATENCY}
    return parse_document(Workload, {"applications": [application], "models": [alone]}, origin="w.yaml")


def summary(plan: Plan, mode: str) -> dict[str, Any]:
    work = pictures(15.0)
    settings = ControlSettings.model_validate({"mode": mode, "policy": {"name": "ffd"}, "change": {"start_s": 3.0}})
    how: dict[str, Any] = {"scheduler_name": "eager", "duration_s": 80.0, "seed": 3}
    simulation = ControlledSimulation(work, plan, CLUSTER.gpus, Profiles(()), settings, **how)
    return controlled_summary(simulation.run(), 80.0, 0.0, work.applications)


def first_plan() -> Plan:
    return solve(Symphony(), pictures(15.0), Cluster.parse("v100:1"), Profiles(()))


def test_with_one_plan_they_end_as_without_a_controller() -> None:
    plan = first_plan()
    found = summary(plan, "off")
    alone = Simulation.of_plan(plan, scheduler_name="eager", duration_s=80.0, warmup_s=0.0, seed=3).run().summary()
    for kind in ("applications", "models"):
        for name, row in found[kind].items():
            assert {key: row[key] for key in row if key in ("offered", "ok", "late", "expired", "rejected")} == {
                key: alone[kind][name][key] for key in row if key in ("offered", "ok", "late", "expired", "rejected")
            }
    row = found["applications"]["pictures"]
    assert row["offered"] == sum(row[key] for key in ("ok", "late", "expired", "rejected", "failed"))
    assert found["models"]["pictures.name"]["stage_of"] == "pictures"


def test_a_change_of_plan_loses_none_of_their_stages() -> None:
    plan = first_plan()
    kept, changed = summary(plan, "off"), summary(plan, "act")
    assert changed["control"]["changes"] >= 1
    row = changed["applications"]["pictures"]
    assert row["offered"] == kept["applications"]["pictures"]["offered"]
    assert row["attainment"] > kept["applications"]["pictures"]["attainment"]
    assert row["failed"] == 0
    stages = [changed["models"][f"pictures.{stage}"] for stage in ("find", "name")]
    assert stages[1]["offered"] == 3 * (stages[0]["ok"] + stages[0]["late"])
