"""Applications under the controller are judged from end to end, across changes of plan."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tenuto.batching.registry import make_scheduler
from tenuto.deployments.control.journal import Kind
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.control.virtual import ControlledCluster, ControlledLoad, ControlledRun, Incident
from tenuto.documents import parse_document
from tenuto.loadgen.controlled import ControlledSimulation, controlled_summary
from tenuto.loadgen.schedule import make_schedule
from tenuto.loadgen.simulated import Simulation
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.policies.symphony.symphony_policy import Symphony
from tenuto.placement.policy import load_policy
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

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


def controlled(plan: Plan, mode: str) -> ControlledRun:
    settings = ControlSettings.model_validate({"mode": mode, "policy": {"name": "ffd"}, "change": {"start_s": 3.0}})
    how: dict[str, Any] = {"scheduler_name": "eager", "duration_s": 80.0, "seed": 3}
    return ControlledSimulation(pictures(15.0), plan, CLUSTER.gpus, Profiles(()), settings, **how).run()


def summary(run: ControlledRun) -> dict[str, Any]:
    return controlled_summary(run, 80.0, 0.0, pictures(15.0).applications)


def first_plan() -> Plan:
    return solve(Symphony(), pictures(15.0), Cluster.parse("v100:1"), Profiles(()))


def test_with_one_plan_they_end_as_without_a_controller() -> None:
    plan = first_plan()
    found = summary(controlled(plan, "off"))
    alone = Simulation.of_plan(plan, scheduler_name="eager", duration_s=80.0, warmup_s=0.0, seed=3).run().summary()
    for kind in ("applications", "models"):
        for name, row in found[kind].items():
            assert {key: row[key] for key in row if key in ("offered", "ok", "late", "expired", "rejected")} == {
                key: alone[kind][name][key] for key in row if key in ("offered", "ok", "late", "expired", "rejected")
            }
    row = found["applications"]["pictures"]
    assert row["offered"] == sum(row[key] for key in ("ok", "late", "expired", "rejected", "failed"))
    assert [*found["models"]] == ["alone"]


def test_a_change_of_plan_loses_none_of_their_stages() -> None:
    plan = first_plan()
    run = controlled(plan, "act")
    kept, changed = summary(controlled(plan, "off")), summary(run)
    assert changed["control"]["changes"] >= 1
    row = changed["applications"]["pictures"]
    assert row["offered"] == kept["applications"]["pictures"]["offered"]
    assert row["attainment"] > kept["applications"]["pictures"]["attainment"]
    assert row["failed"] == 0
    stages = dict(zip(run.names, run.ended().tolist(), strict=True))
    assert sum(stages["pictures.name"]) == 3 * sum(stages["pictures.find"][: Outcome.LATE + 1])


def test_a_model_that_nobody_asks_frees_its_gpu_until_somebody_asks_again() -> None:
    quiet = {"process": "steps", "options": {"factors": [1.0, 1e-9, 1.0]}}
    idle = {
        "name": "idle",
        "rate_rps": 100.0,
        "slo_ms": 100.0,
        "latency": LATENCY,
        "arrival": quiet,
        "idle_after_s": 60.0,
    }
    busy = {"name": "busy", "rate_rps": 100.0, "slo_ms": 100.0, "latency": LATENCY}
    workload = parse_document(Workload, {"models": [idle, busy]}, origin="w.yaml")
    plan = solve(Symphony(), workload, Cluster.parse("v100:2"), Profiles(()))
    settings = ControlSettings.model_validate({"mode": "act", "policy": {"name": "ffd"}, "change": {"start_s": 3.0}})
    how: dict[str, Any] = {"scheduler_name": "eager", "duration_s": 600.0, "seed": 3}
    run = ControlledSimulation(workload, plan, CLUSTER.gpus, Profiles(()), settings, **how).run()
    held = [{replica.name for gpulet in each.gpulets for replica in gpulet.models} for _, each, _ in run.plans]
    assert {"busy"} in held
    assert held[-1] == {"busy", "idle"}
    rows = controlled_summary(run, 600.0, 0.0, ())["models"]
    assert rows["busy"]["attainment"] > 0.99
    assert 0.9 < rows["idle"]["attainment"] < 1.0  # what came while it started is lost


def test_offline_requests_wake_an_idle_model_that_stays_until_all_are_answered() -> None:
    pause = {"process": "steps", "options": {"factors": [1e-9, 1.0, 1e-9]}}
    common = {"latency": LATENCY, "offline": True, "idle_after_s": 60.0}
    night = {"name": "night", "rate_rps": 0.5, "arrival": pause, **common}
    busy = {"name": "busy", "rate_rps": 100.0, "slo_ms": 100.0, "latency": LATENCY}
    workload = parse_document(Workload, {"models": [night, busy]}, origin="w.yaml")
    plan = solve(Symphony(), workload, Cluster.parse("v100:2"), Profiles(()))
    settings = ControlSettings.model_validate({"mode": "act", "policy": {"name": "ffd"}, "change": {"start_s": 3.0}})
    how: dict[str, Any] = {"scheduler_name": "deferred", "duration_s": 900.0, "seed": 3}
    run = ControlledSimulation(workload, plan, CLUSTER.gpus, Profiles(()), settings, **how).run()
    held = [(at_s, "night" in [r.name for g in each.gpulets for r in g.models]) for at_s, each, _ in run.plans]
    (left_s, woken_s, left_again_s) = [at_s for (_, was), (at_s, here) in pairwise(held) if was != here]
    assert 60.0 <= left_s < 100.0
    assert 300.0 < woken_s < 330.0
    assert 660.0 <= left_again_s < 700.0
    assert run.offline["waiting"] == {"night": 0}
    assert run.offline["requests"]["night"] > 100


def test_a_node_with_notice_loses_no_request() -> None:
    spec = {"name": "busy", "rate_rps": 100.0, "slo_ms": 100.0, "latency": LATENCY}
    workload = parse_document(Workload, {"models": [spec]}, origin="w.yaml")
    plan = solve(Symphony(), workload, Cluster.parse("v100:1"), Profiles(()))
    gpu = Cluster.parse("v100:1").gpus[0]
    settings = ControlSettings.model_validate(
        {"mode": "act", "policy": {"name": "ffd"}, "gpus": {"v100": {"max": 2, "per_node": 1}}}
    )
    schedule = make_schedule(workload.models, 300.0, 4)
    load = ControlledLoad(schedule.names, schedule.times_ms, schedule.model_index, 300.0)
    good = {}
    for notice_s in (0.0, 150.0):
        incident = Incident(200.0, lose=(plan.used_gpus[0],), notice_s=notice_s)
        how: dict[str, Any] = {"incidents": [incident], "growth": {"v100": gpu}, "provision_s": (30.0, 90.0)}
        run = ControlledCluster(
            load, workload, plan, (gpu,), Profiles(()), settings, lambda system: make_scheduler("eager", system), **how
        ).run()
        good[notice_s] = run.ended()[0, Outcome.OK] / run.ended().sum()
    assert good[150.0] > 0.999
    assert good[0.0] < 0.9


@pytest.mark.parametrize("first", ["a100-80gb:1:mig", "a100-80gb-1g.10gb:1"])
def test_gpus_are_cut_while_they_serve_and_count_once(first: str) -> None:
    """In the first cluster a GPU is cut anew; in the second one comes that plans may cut."""
    profiles, cluster = Profiles([load_shipped("parvagpu-a100")]), Cluster.parse(first)
    steps = {"process": "steps", "options": {"factors": [0.3, 1.0]}}
    spec = {"name": "a", "profile": "bert", "rate_rps": 200.0, "slo_ms": 150.0, "arrival": steps}
    workload = parse_document(Workload, {"models": [spec]}, origin="w.yaml")
    calm = parse_document(Workload, {"models": [spec | {"rate_rps": 60.0}]}, origin="w.yaml")
    plan = solve(load_policy("parvagpu" if "mig" in first else "symphony"), calm, cluster, profiles)
    settings = ControlSettings.model_validate(
        {"mode": "act", "policy": {"name": "parvagpu"}, "gpus": {"a100-80gb": {"max": 2, "mig": "managed"}}}
    )
    schedule = make_schedule(workload.models, 300.0, 4)
    load = ControlledLoad(schedule.names, schedule.times_ms, schedule.model_index, 300.0)
    gpus, growth = cluster.cut_as(plan.gpus).gpus, {"a100-80gb": Cluster.parse("a100-80gb:1").gpus[0]}
    run = ControlledCluster(
        load, workload, plan, gpus, profiles, settings, lambda system: make_scheduler("eager", system), growth=growth
    ).run()
    _, last, _ = run.plans[-1]
    assert not run.count(Kind.ROLLED_BACK)
    assert run.windows[-1].ended[0, Outcome.OK] > 0.99 * run.windows[-1].ended.sum()
    if "mig" in first:
        assert len(last.used_gpus) > len(plan.used_gpus)
        assert run.gpu_s == 300.0
        assert run.present_s["a100-80gb"] >= 300.0
        assert run.share_s < 150.0
    else:
        assert "managed" in {gpu.mig for gpu in last.gpus}


def test_spot_nodes_live_as_long_as_is_drawn_and_lose_no_request() -> None:
    spec = {"name": "busy", "rate_rps": 100.0, "slo_ms": 100.0, "latency": LATENCY}
    workload = parse_document(Workload, {"models": [spec]}, origin="w.yaml")
    plan = solve(Symphony(), workload, Cluster.parse("v100:1"), Profiles(()))
    gpu = Cluster.parse("v100:1").gpus[0]
    spot = {"max": 4, "price_per_hour": 1.0, "spot": {"life_hours": 0.05, "notice_s": 60.0}}
    settings = ControlSettings.model_validate(
        {"mode": "act", "policy": {"name": "ffd"}, "gpus": {"t4": spot}, "change": {"start_s": 3.0}}
    )
    schedule = make_schedule(workload.models, 700.0, 4)
    load = ControlledLoad(schedule.names, schedule.times_ms, schedule.model_index, 700.0)
    how: dict[str, Any] = {"growth": {"t4": gpu.model_copy(update={"type": "t4"})}, "provision_s": (5.0, 10.0)}
    run = ControlledCluster(
        load, workload, plan, (gpu,), Profiles(()), settings, lambda system: make_scheduler("eager", system), **how
    ).run()
    begins_s: dict[str, float] = {}
    for at_s, each, _ in run.plans:
        for name in each.used_gpus:
            begins_s.setdefault(name, at_s)
    served_s = np.diff([at_s for name, at_s in begins_s.items() if name.startswith("grown")])
    assert len(served_s) >= 3
    assert served_s.max() > 2.0 * served_s.min()
    assert run.present_s["v100"] == 700.0
    assert 0.0 < run.gpu_s <= sum(run.present_s.values())
    assert run.count(Kind.LATE) == 0  # a GPU that came, and has notice since, is not late
    assert run.ended().sum() == run.ended()[0, Outcome.OK] == len(load.times_ms)
