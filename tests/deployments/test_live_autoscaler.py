"""Ray's own autoscaler brings emulated GPUs of the type that the controller asks for, replaces a node that
has notice of its end, and takes them back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from tenuto.deployments.control.operations import Operations
from tenuto.deployments.process.ray_nodes import alive_nodes, staying_nodes
from tenuto.deployments.serve.config import application_name
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.states import application_details
from tenuto.placement.cluster import node_of
from tenuto.placement.planner.gpu_matching import gpus_of
from tenuto.profiles import ModelProfile, Profile, ProfilePoint, Profiles
from tests.instruments.autoscaling_ray import HEAD, autoscaling_ray, give_notice
from tests.instruments.live import asking, infer, pids, until
from tests.instruments.plans import make_plan

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

ANYWHERE = make_plan({"n0/0/a": (100.0, ["a"])}, slo_ms=1000.0, rate_rps=20.0)
PLAN = ANYWHERE.model_copy(update={"gpus": tuple(g.model_copy(update={"address": HEAD}) for g in ANYWHERE.gpus)})
MORE = {"name": "b", "rate_rps": 20, "slo_ms": 1000}
# A V100 has not the memory: where b lies must not follow from rates, which change with what has been measured yet.
POINTS = tuple(ProfilePoint(batch_size=size, latency_ms=4.0 + size, memory_mib=20_000.0) for size in (1, 64))
PROFILES = [
    Profile(name=kind, gpu_type=kind, source="made up", models={"b": ModelProfile(points=POINTS)})
    for kind in ("v100", "l4", "a100")
]
PRICES = {"a100": 0.1, "l4": 9.0, "v100": 0.05}


def joined() -> list[str]:
    """Return the accelerator types of the nodes that the autoscaler brought, without those that have notice."""
    nodes = [node for node in staying_nodes() if node["NodeManagerAddress"] != HEAD]
    return sorted(node["Labels"]["ray.io/accelerator-type"] for node in nodes)


def id_of(name: str) -> str:
    """Return Ray's id of a node of the plan."""
    (node_id,) = (str(node["NodeID"]) for node in alive_nodes() if name == f"ray-{str(node['NodeID'])[-12:]}")
    return node_id


def nodes_of(url: str) -> set[str]:
    """Return the nodes of the gpu-lets that are up."""
    return {node_of(gpulet.rpartition("/")[0]) for gpulet in pids(url)}


def replicas_on(name: str) -> set[str]:
    """Return the replicas that Serve has of the gpu-lets of a node, started or not."""
    applications = application_details()
    held = [app for each, app in applications.items() if each.startswith(application_name(f"{name}/"))]
    return {each["replica_id"] for app in held for made in app["deployments"].values() for each in made["replicas"]}


def test_gpus_come_by_type_serve_leave_with_notice_and_go_back(own_ray: None) -> None:
    import ray

    bounds = {kind: {"max": 2 * (kind != "v100"), "price_per_hour": price} for kind, price in PRICES.items()}
    control: dict[str, Any] = {"mode": "act", "policy": {"name": "gpulet"}, "interval_s": 2, "gpus": bounds}
    control |= {"change": {"cool_down_s": 0, "prove_s": 1, "come_s": 3600, "ready_timeout_s": 600}}
    deployment = Deployment.model_validate(
        {
            "plan": PLAN.to_data(),
            "executor": "emulated",
            "scheduler": "eager",
            "port": unused_port(),
            "control": control,
        }
    )
    with autoscaling_ray(1, {"L4": 1, "A100": 2}) as address:
        try:
            with Operations(address, lambda _text: None) as operator:
                assert operator.deploy(deployment, "a test", ground=(Profiles(PROFILES), gpus_of(PLAN)))
                url, controller = operator.base_url, operator.controller()
                until(lambda: nodes_of(url) == {"n0"})
                with asking(url, ["a"]) as answers, ExitStack() as also:
                    why = operator.edit(lambda asked: asked.set_model(MORE, add=True))
                    assert why == "b: not yet: more GPUs are on their way (a100 1)"
                    until(lambda: joined() == ["A100"])
                    until(lambda: len(nodes_of(url)) == 2 and infer(url, "b")[0] == 200)
                    (name,) = nodes_of(url) - {"n0"}
                    assert name.startswith("ray-")
                    assert not controller.state().missing_gpus
                    others = also.enter_context(asking(url, ["b"]))
                    give_notice(address, id_of(name), 600.0)
                    started = set[str]()

                    def has_moved(name: str = name) -> bool:
                        started.update(replicas_on(name))
                        return len(nodes_of(url) - {"n0", name}) == 1 and name not in nodes_of(url)

                    until(has_moved)
                    assert len(started) <= 2  # the one that serves, and one that waits for its node to stay
                    assert joined() == ["A100"]
                    count = len(others)
                    until(lambda: len(others) > count + 5)
                    also.close()
                    assert {status for status, _ in others} == {200}, [
                        (i, each) for i, each in enumerate(others) if each[0] != 200
                    ]
                    controller.remove_model("b")
                    until(lambda: joined() == [])
                    until(lambda: nodes_of(url) == {"n0"})
                    count = len(answers)
                    until(lambda: len(answers) > count + 5)
                assert {status for status, _ in answers} == {200}, [
                    (i, each) for i, each in enumerate(answers) if each[0] != 200
                ]
                assert "asked" in {line.kind for line in controller.log(500)}
                operator.delete()
        finally:
            ray.shutdown()
