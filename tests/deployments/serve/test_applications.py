"""What a cluster lacks for a plan is said before anything is applied."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.serve import applications
from tenuto.deployments.serve.applications import Applications, Deployed, missing_from, nobody_listens
from tenuto.deployments.serve.config import CONTROL_APPLICATION, ENTRY_APPLICATION, ServeConfig
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.states import ApplicationState
from tests.instruments.plans import make_plan

ONE = [(["10.0.0.1"], 2.0)]
PLAN = make_plan({"n0/0/a": (50.0, ["a"]), "n0/1/a": (50.0, ["b"])})


def at(address: str) -> dict[str, object]:
    gpus = tuple(gpu.model_copy(update={"address": address}) for gpu in PLAN.gpus)
    return Deployment(plan=PLAN.model_copy(update={"gpus": gpus})).config()


def labelled(label: str) -> dict[str, object]:
    gpus = tuple(gpu.model_copy(update={"label": label}) for gpu in PLAN.gpus)
    return Deployment(plan=PLAN.model_copy(update={"gpus": gpus})).config()


def test_nodes_and_gpus_that_are_missing_are_named() -> None:
    assert missing_from(ONE, Deployment(plan=PLAN).config()) is None
    assert missing_from(ONE, at("10.0.0.1")) is None
    assert "on node 10.0.0.9, the cluster has 10.0.0.1" in str(missing_from(ONE, at("10.0.0.9")))
    assert "the cluster has 0 of them" in str(missing_from([(["10.0.0.1"], 0.0)], Deployment(plan=PLAN).config()))
    controlled = Deployment(plan=PLAN, control={"mode": "act"})
    assert missing_from(ONE, controlled.config()) is None  # on the head, wherever that is
    two = [(["10.0.0.1", "rack=a"], 0.0), (["10.0.0.2", "rack=b"], 4.0)]
    assert "node 10.0.0.1 has 0 of them" in str(missing_from(two, at("10.0.0.1")))
    assert missing_from(two, labelled("rack=b")) is None
    assert "node rack=a has 0 of them" in str(missing_from(two, labelled("rack=a")))
    assert "on node rack=c, the cluster has 10.0.0.1, 10.0.0.2, rack=a, rack=b" in str(
        missing_from(two, labelled("rack=c"))
    )


def spread(gpus: int, per_gpu: int, nodes: int, **more: object) -> ServeConfig:
    """The config of a plan of so many GPUs on so many nodes."""
    plan = make_plan({f"n/{gpu}/{i}": (100.0 / per_gpu, ["a"]) for gpu in range(gpus) for i in range(per_gpu)})
    named = [g.model_copy(update={"address": f"10.0.0.{i % nodes}"}) for i, g in enumerate(plan.gpus)]
    return Deployment(plan=plan.model_copy(update={"gpus": tuple(named), **more})).config()


@given(st.integers(1, 6), st.integers(1, 60), st.integers(1, 3), st.integers(0, 3))
def test_a_plan_that_cannot_run_on_a_cluster_is_refused(gpus: int, per_gpu: int, nodes: int, there: int) -> None:
    cluster = [([f"10.0.0.{i}"], float(there)) for i in range(nodes)]
    most = -(-gpus // nodes)  # GPUs of the plan on one node
    can_run = most <= there and per_gpu <= 48
    assert (missing_from(cluster, spread(gpus, per_gpu, nodes)) is None) == can_run
    if per_gpu > 48:
        assert "more gpu-lets than CUDA MPS has clients" in str(missing_from(cluster, spread(gpus, per_gpu, nodes)))
    anywhere = [([f"10.0.0.{i}"], float(gpus)) for i in range(nodes)]
    assert missing_from(anywhere, spread(gpus, per_gpu, nodes, mps="off")) is None


def test_eight_gpus_are_not_four() -> None:
    eight = Deployment(plan=make_plan({f"n0/{i}/a": (100.0, ["a"]) for i in range(8)})).config()
    assert "on 8 GPUs, and the cluster has 4 of them" in str(missing_from([(["10.0.0.1"], 4.0)], eight))


def test_a_node_is_lost_where_nobody_listens_any_more_and_not_where_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port = made.getsockname()[1]
        assert not nobody_listens("127.0.0.1", port)
    assert nobody_listens("127.0.0.1", port)
    assert not nobody_listens("192.0.2.7", port)  # an address that nobody has


def test_what_serve_deploy_still_builds_is_read_from_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Deployment(plan=PLAN, executor="emulated", gateways=1, hangs_s=3.0)
    details = {
        each["name"]: {"status": "DEPLOYING", "source": "declarative", "deployed_app_config": each, "deployments": {}}
        for each in given.config().to_data()["applications"]
    }
    (gateway,) = details[ENTRY_APPLICATION]["deployed_app_config"]["deployments"]
    details[ENTRY_APPLICATION]["deployments"] = {"gateway": {"deployment_config": gateway}}
    monkeypatch.setattr("tenuto.deployments.serve.applications.application_details", lambda: details)
    assert Applications().deployed() == Deployed(given, by_serve=True)
    details[ENTRY_APPLICATION]["deployments"] = {}  # it may be one that never comes
    assert Applications().deployed() is None


def test_what_a_starting_controller_brings_while_it_is_removed_goes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when `tenuto serve` on a running cluster is interrupted while it starts."""
    running, brought = {CONTROL_APPLICATION, "foreign"}, [{ENTRY_APPLICATION, "gpulet-n0-0-a"}]

    def delete(names: list[str]) -> None:
        if CONTROL_APPLICATION in names:
            running.update(brought.pop())
        running.difference_update(names)

    monkeypatch.setattr(applications, "retire_controller", lambda _limit_s: None)
    monkeypatch.setattr(applications, "application_states", lambda: dict.fromkeys(running, ApplicationState("RUNNING")))
    monkeypatch.setattr(applications, "delete_applications", delete)
    Applications().delete_ours()
    assert running == {"foreign"}
