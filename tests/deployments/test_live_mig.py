"""MIG instances of one emulated GPU on a real local Ray: served in, and cut anew beside what goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.deployments.control.operations import Operations
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.placement import Plan
from tests.instruments.live import asking, pids, until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

SLICES = {"3g.20gb": 4, "2g.10gb": 2, "1g.5gb": 1}


def cut(*instances: tuple[str, int, str]) -> Deployment:
    """Return a deployment of one emulated A100 with a gpu-let in each instance (profile, start, model)."""
    latency = {"alpha_ms": 1.0, "beta_ms": 9.0}
    plan: dict[str, Any] = {"policy": {"name": "test"}, "gpus": [], "gpulets": []}
    for profile, start, model in instances:
        name, place = f"n0/0.{start}", {"gpu": "n0/0", "start": start, "slices": SLICES[profile]}
        plan["gpus"].append({"id": name, "type": f"a100-{profile}", "mig": "managed", "instance": place})
        replica = {"name": model, "batch_size": 4, "latency": latency, "latency_ms": 13.0}
        plan["gpulets"].append({"id": f"{name}/a", "gpu": name, "models": [replica]})
    plan["models"] = [
        {"name": name, "rate_rps": 20, "slo_ms": 1000, "latency": latency}
        for name in dict.fromkeys(i[2] for i in instances)
    ]
    return Deployment.model_validate(
        {"plan": Plan.from_data(plan).to_data(), "executor": "emulated", "scheduler": "eager", "port": unused_port()}
    )


def test_a_gpu_is_cut_anew_while_the_instances_that_stay_serve_on(launcher: Launcher) -> None:
    before = cut(("3g.20gb", 4, "one"), ("3g.20gb", 0, "two"))
    after = cut(("3g.20gb", 4, "one"), ("2g.10gb", 0, "two"), ("1g.5gb", 2, "three"))
    with Operations(None, lambda _text: None) as operator:
        operator.delete()
        try:
            assert operator.deploy(before, "two halves")
            url = operator.base_url
            then = pids(url)
            assert set(then) == {"n0/0.4/a", "n0/0.0/a"}
            (layout,) = operator.preview(after).layouts
            assert (layout.gpu, layout.before, layout.emptied) == ("n0/0", ("3g.20gb at 0",), ("n0/0.0/a",))
            with asking(url, ["one", "one"]) as answers:
                assert operator.deploy(after.model_copy(update={"port": before.port}), "three parts")
                until(lambda: len(answers) > 50)
            assert {status for status, _ in answers} == {200}
            now = pids(url)
            assert now["n0/0.4/a"] == then["n0/0.4/a"]
            assert {gpulet.rpartition("/")[0] for gpulet in now} == {"n0/0.4", "n0/0.0", "n0/0.2"}
            until(lambda: sum(name.startswith("gpulet-n0-0.") for name in operator.states()) == 3)
        finally:
            operator.delete()
