"""A plan as a part of a RayService (KubeRay): what Serve runs. `examples/kubernetes` has the other parts."""

from __future__ import annotations

from tenuto.deployments.serve.deployment import Deployment
from tenuto.documents import dump_yaml
from tenuto.errors import refused
from tenuto.placement import Plan
from tenuto.placement.cluster import node_of

NAME = "tenuto"
KEY_FILE = "/etc/tenuto/keys/keys.yaml"
"""Path at which the pods mount the Secret with the clients' keys."""


def rayservice(plan: Plan, executor: str) -> str:
    """Return a YAML document for `kubectl patch --patch-file`, `kubectl apply --server-side` or Kustomize.

    A gateway runs in the pod of every node and in the head's pod, so that every ready pod can take requests. Gateways
    listen on all addresses and let in clients with a key of `KEY_FILE`.

    Raises:
        InvalidInputError: a node of the plan is known by its address, or one of several nodes has no label.
    """
    nodes = {node_of(gpu.id) for gpu in plan.gpus}
    for gpu in plan.gpus:
        if gpu.label is None and (len(nodes) > 1 or gpu.address is not None):
            rule = "has no label, and a pod that starts again has another address"
            cure = "Give it a `label` in the cluster file, such as tenuto-node=a100, and its worker group the same."
            raise refused("--format rayservice", node_of(gpu.id), rule, cure)
    deployment = Deployment.model_validate(
        {
            "plan": plan,
            "name": NAME,
            "executor": executor,
            "host": "0.0.0.0",
            "access": {"key_file": KEY_FILE},
            "gateways": len(nodes) + 1,
            "nodes": len(nodes) + 1,
        }
    )
    config = dump_yaml(deployment.config().to_data(), is_part=True)
    service = {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": NAME}}
    return dump_yaml({**service, "spec": {"serveConfigV2": config}})
