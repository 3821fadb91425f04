"""Gpu-lets on several GPUs in changes of a deployment: their GPUs stay together, and all of them must have room."""

from __future__ import annotations

import pytest

from tenuto.deployments.control.change_preview import preview_plan
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.diff import diff
from tenuto.deployments.serve.sub_clusters import cut_plan
from tenuto.errors import InvalidInputError
from tenuto.placement import Plan, Workload, solve
from tenuto.placement.planner.change_cost import Rent
from tenuto.placement.planner.gpu_matching import gpus_of, match_to_running
from tests.instruments.generating import ByForm, cluster, fixed, only_together, writes


def planned(nodes: int = 1, each: int = 3) -> Plan:
    """Return a plan with one model on two GPUs and one of fixed cost on the rest."""
    models = (writes("big", 2.0, profile="large"), fixed())
    return solve(ByForm(), Workload(models=models), cluster(nodes, each), only_together())


def with_big(plan: Plan, **changes: object) -> Plan:
    """Return a plan with another gpu-let of the large model."""
    gpulets = tuple(g.model_copy(update=changes) if g.models[0].name == "big" else g for g in plan.gpulets)
    return plan.model_copy(update={"gpulets": gpulets})


def test_other_gpus_need_another_process() -> None:
    plan = planned()
    (big,) = plan.hosts_of("big")
    others = [gpu.id for gpu in plan.gpus if gpu.id != big.gpu and gpu.id not in big.also_on]
    found = diff(plan, with_big(plan, also_on=(others[0],)))
    (change,) = (change for change in found if change.gpulet == big.id)
    assert change.kind == "restart"
    assert any("also on" in reason for reason in change.reasons)
    assert {change.kind for change in diff(plan, plan)} == {"unchanged"}


def test_a_plan_is_laid_on_the_same_gpus_together_and_keeps_its_processes() -> None:
    plan = planned(2, 2)
    gpus = cluster(2, 2).gpus
    first = match_to_running(plan, None, gpus, keep_idle=True)
    again = match_to_running(plan, first, gpus, keep_idle=True)
    for found in (first, again):
        (big,) = found.hosts_of("big")
        assert big.gpus == plan.hosts_of("big")[0].gpus
        assert len(found.gpulets) == len(plan.gpulets)
        found.check_references()
    assert again.processes() == first.processes()


def test_it_starts_only_when_all_of_its_gpus_have_room() -> None:
    plan = planned()
    (big,) = plan.hosts_of("big")
    (other, *_) = plan.hosts_of("fixed")
    full = other.model_copy(update={"gpu": big.also_on[0], "id": "full", "share_pct": None})
    before = plan.model_copy(update={"gpulets": (full,)})
    after = plan.model_copy(update={"gpulets": (big, other)})
    found = preview_plan(before, after)
    for step in found.steps:
        assert not {"full", big.id} <= {*step.gpulets}
    assert big.id in found.steps[-1].gpulets


def test_what_it_occupies_and_what_a_sub_cluster_holds_are_all_of_its_gpus() -> None:
    plan = planned()
    (big,) = plan.hosts_of("big")
    alone = plan.model_copy(update={"gpulets": (big,)})
    assert Rent(by_gpu=True, price={}).of(alone) == 2.0
    assert Rent(by_gpu=False, price={}).of(alone) == 2.0 * big.effective_share_pct / 100.0
    cut = cut_plan(plan, {"big": 0, "fixed": 1})
    assert {gpu.id for gpu in cut["0"].gpus} == {*big.gpus}
    assert {gpu.id for gpu in gpus_of(plan)} == {gpu.id for gpu in plan.gpus}


def test_torch_is_refused_before_anything_starts() -> None:
    plan = planned()
    with pytest.raises(InvalidInputError, match=r"also_on.*torch executor runs a model on one GPU"):
        Deployment(plan=plan, executor="torch").config()
    real = plan.model_copy(
        update={"gpus": tuple(gpu.model_copy(update={"uuid": f"GPU-{gpu.id}"}) for gpu in plan.gpus)}
    )
    with pytest.raises(InvalidInputError, match="torch executor runs a model on one GPU"):
        Deployment(plan=real).config()
    assert Deployment(plan=real, executor="emulated").config().gpulets


def test_its_process_knows_all_of_its_gpus() -> None:
    plan = planned()
    (big,) = plan.hosts_of("big")
    specs = {each.spec.gpulet: each.spec for each in Deployment(plan=plan).config().gpulets if each.spec is not None}
    assert specs[big.id].also_on == big.also_on
    assert [name for name, spec in specs.items() if "also_on" in spec.model_dump(mode="json")] == [big.id]
