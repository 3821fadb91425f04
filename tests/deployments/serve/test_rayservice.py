"""A plan as the part of a RayService that is its plan."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.rayservice import KEY_FILE, rayservice
from tenuto.documents import load_document
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.profiles import Profiles

WORKLOAD = Workload.model_validate(
    {
        "models": [
            {"name": name, "rate_rps": 10, "slo_ms": 300, "only_on": [node], "latency": {"alpha_ms": 1, "beta_ms": 10}}
            for name, node in (("m", "left"), ("n", "right"))
        ]
    }
)


def plan_on(**of_nodes: Any) -> Plan:
    nodes = [{"name": name, "gpus": [{"type": "v100"}], **of_nodes} for name in ("left", "right")]
    for node in nodes:
        node.update({key: value.format(node["name"]) for key, value in of_nodes.items()})
    return solve(load_policy("gpulet"), WORKLOAD, Cluster.model_validate({"nodes": nodes}), Profiles([]))


def config_in(text: str) -> dict[str, Any]:
    document = yaml.safe_load(text)
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayService")
    assert set(document["spec"]) == {"serveConfigV2"}
    found: dict[str, Any] = yaml.safe_load(document["spec"]["serveConfigV2"])
    return found


def test_a_gateway_is_in_every_pod_and_gpulets_are_on_their_nodes() -> None:
    config = config_in(rayservice(plan_on(label="tenuto-node={}"), "auto"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Ray Serve imports
        from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(config)
    found = {application["name"]: application["deployments"][0] for application in config["applications"]}
    assert (found["tenuto"]["num_replicas"], found["tenuto"]["max_replicas_per_node"]) == (3, 1)
    assert {name: each["ray_actor_options"].get("label_selector") for name, each in found.items()} == {
        "tenuto": None,
        "dispatcher-0": None,
        "gpulet-left-0-a": {"tenuto-node": "left"},
        "gpulet-right-0-a": {"tenuto-node": "right"},
        "tenuto-control": None,
    }


def test_the_gateways_are_reached_from_elsewhere_with_a_key_and_nothing_else_is() -> None:
    config = config_in(rayservice(plan_on(label="tenuto-node={}"), "auto"))
    gateway = config["applications"][0]["deployments"][0]["user_config"]
    assert (gateway["listen"], gateway["key_file"]) == ({"host": "0.0.0.0", "port": 8000}, KEY_FILE)
    assert (gateway["operators"]["host"], config["http_options"]["host"]) == ("127.0.0.1", "127.0.0.1")
    assert "insecure" not in gateway


def test_what_is_written_is_read_as_any_plan(tmp_path: Path) -> None:
    plan = plan_on(label="tenuto-node={}")
    (tmp_path / "plan.yaml").write_text(rayservice(plan, "emulated"))
    deployment = Deployment.from_data(load_document(tmp_path / "plan.yaml"))
    assert (deployment.plan, deployment.executor, deployment.gateways) == (plan, "emulated", 3)
    assert deployment.access.key_file == KEY_FILE
    assert Plan.load(tmp_path / "plan.yaml") == plan
    (tmp_path / "plan.yaml").write_text("kind: RayService\nspec: {}\n")
    with pytest.raises(InvalidInputError, match="serveConfigV2: is missing"):
        Plan.load(tmp_path / "plan.yaml")


@pytest.mark.parametrize("of_nodes", [{}, {"address": "10.0.0.7"}])
def test_nodes_that_a_pod_would_not_be_found_by_are_refused(of_nodes: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match="'left': has no label"):
        rayservice(plan_on(**of_nodes), "auto")
