"""One rule says whether a gpu-let's process goes on in another plan, and it is what Serve really does."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.running import Life, RunningSystem
from tenuto.deployments.serve.config import ServeApplication
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.diff import diff
from tenuto.deployments.serve.user_config import GpuletConfig
from tenuto.placement import Plan
from tenuto.placement.planner.gpu_matching import gpus_of, match_to_running, renamed

pytestmark = pytest.mark.filterwarnings("ignore")  # of what Ray Serve imports

LATENCY = {"alpha_ms": 1.0, "beta_ms": 1.0}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of two GPUs, of which few things differ from the next one's."""

    def rarely(usual: Any, *others: Any) -> Any:
        return draw(st.sampled_from([usual] * 6 + list(others)))

    gpus = [
        {
            "id": f"n0/{index}",
            "type": rarely("v100", "cpu"),
            "uuid": rarely(f"GPU-{index}", None, "GPU-9"),
            "address": rarely("10.0.0.1", None, "10.0.0.2"),
            "label": rarely(None, "rack=a", "rack=b"),
        }
        for index in range(2)
    ]
    gpulets = [
        {
            "id": f"n0/{place}",
            "gpu": f"n0/{rarely(place[0], '0', '1')}",
            "share_pct": rarely(50.0, None, 40.0, 100.0),
            "memory_mib": rarely(None, 500.0),
            "models": [
                {"name": name, "batch_size": rarely(4, 8), "latency": LATENCY, "latency_ms": 5.0}
                for name in rarely("x", "y", "xy")
            ],
        }
        for place in rarely(("0/a", "1/a"), ("0/a",), ("0/a", "0/b", "1/a"))
    ]
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": gpus,
            "gpulets": gpulets,
            "models": [{"name": name, "rate_rps": rarely(10, 20), "slo_ms": 1000} for name in "xy"],
            "mps": rarely("auto", "off", "required"),
            "streaming": rarely(False, True),
            "overcommits": True,
        }
    )


@cache
def usual_config() -> Any:
    """Serve's configuration of a deployment, which pickles the class of its router each time that it is made."""
    from ray.serve._private.config import DeploymentConfig

    return DeploymentConfig()


def serve_restarts(before: ServeApplication[GpuletConfig], after: ServeApplication[GpuletConfig]) -> bool:
    """Whether Serve starts a process anew, by its own rule."""
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve._private.version import DeploymentVersion
    from ray.serve.schema import ServeApplicationSchema

    def version(application: ServeApplication[GpuletConfig]) -> DeploymentVersion:
        schema = ServeApplicationSchema.model_validate(application.to_data())
        (deployment,) = schema.deployments
        options = deployment.ray_actor_options.model_dump(exclude_unset=True)
        config = usual_config().model_copy(update={"user_config": deployment.user_config})
        return DeploymentVersion(get_app_code_version(schema), config, options)

    return bool(version(before).requires_actor_restart(version(after)))


def restarted_in_virtual_time(old: Plan, new: Plan) -> set[str]:
    times = np.empty(0, dtype=np.float64)
    system = RunningSystem(
        ("x", "y"),
        (1000.0, 1000.0),
        times,
        times.astype(np.int32),
        lambda made: make_scheduler("eager", made, {}),
        life=Life(start_s=(10.0, 10.0), load_s=(0.0, 0.0)),
    )
    system.apply(old)
    system.advance(20_000.0)
    system.apply(new)
    system.advance(20_001.0)
    return set(system.observe().waiting) & {gpulet.id for gpulet in old.gpulets}


@given(plans(), plans(), st.sampled_from(["auto", "emulated"]))
def test_whoever_asks_whether_a_process_starts_anew_is_told_what_serve_does(
    old: Plan, new: Plan, executor: Any
) -> None:
    before, after = (
        {each.spec.gpulet: each for each in Deployment(plan=plan, executor=executor).config().gpulets if each.spec}
        for plan in (old, new)
    )
    both = before.keys() & after.keys()
    restarts = {name for name in both if serve_restarts(before[name], after[name])}
    assert {name for name in both if not before[name].same_processes(after[name])} == restarts
    assert {change.gpulet for change in diff(old, new) if change.kind == "restart"} == restarts
    kept = {gpulet.id for gpulet in renamed(new, old).gpulets} & {gpulet.id for gpulet in old.gpulets}
    assert kept == both - restarts
    assert restarted_in_virtual_time(old, new) == restarts
    laid = match_to_running(new, old, gpus_of(new), keep_idle=False)
    laid_out = {
        each.spec.gpulet: each for each in Deployment(plan=laid, executor=executor).config().gpulets if each.spec
    }
    assert not [name for name in laid_out.keys() & before.keys() if serve_restarts(before[name], laid_out[name])]
