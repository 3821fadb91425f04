"""Which gpu-lets get a standby process, and what it is expected to do better."""

from __future__ import annotations

from tenuto.placement import Cluster, Gpulet, Plan, Workload, solve
from tenuto.placement.planner.standby import standbys
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.igniter.igniter import Igniter

PROFILES = Profiles([load_shipped("igniter-v100")])


def test_as_much_more_as_is_asked_and_free_and_fits_the_memory() -> None:
    cluster = Cluster.parse("v100:1")
    workload = Workload.model_validate(
        {
            "models": [
                {"name": "resnet50", "rate_rps": 300, "slo_ms": 60},
                {"name": "vgg19", "rate_rps": 90, "slo_ms": 80},
            ]
        }
    )
    plan = solve(Igniter(), workload, cluster, PROFILES)

    def larger(more_pct: float, plan: Plan = plan) -> dict[str, Gpulet]:
        return {standby.of: standby.gpulet for standby in standbys(plan, more_pct, PROFILES, cluster.gpus, plan)}

    found = larger(10.0)
    assert set(found) == {gpulet.id for gpulet in plan.gpulets}
    assert not {other.id for other in found.values()} & {gpulet.id for gpulet in plan.gpulets}
    for gpulet in plan.gpulets:
        other = found[gpulet.id]
        assert other.effective_share_pct == gpulet.effective_share_pct + 10.0
        before, after = gpulet.models[0], other.models[0]
        assert before.latency is not None
        assert after.latency is not None
        assert after.latency.at(after.batch_size) < before.latency.at(before.batch_size)
    free_pct = 100.0 - sum(gpulet.effective_share_pct for gpulet in plan.gpulets)
    most = larger(100.0)
    assert all(
        other.effective_share_pct <= gpulet.effective_share_pct + free_pct
        for gpulet in plan.gpulets
        for other in [most[gpulet.id]]
    )
    heavy = tuple(
        gpulet.model_copy(update={"models": tuple(r.model_copy(update={"memory_mib": 6000.0}) for r in gpulet.models)})
        for gpulet in plan.gpulets
    )
    assert larger(10.0, plan.model_copy(update={"gpulets": heavy})) == {}
