"""What a cluster lacks for a plan is said before anything is applied."""

from __future__ import annotations

import socket

from tenuto.deployments.serve.applications import missing_from, nobody_listens
from tenuto.deployments.serve.deployment import Deployment
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


def test_a_node_is_lost_where_nobody_listens_any_more_and_not_where_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port = made.getsockname()[1]
        assert not nobody_listens("127.0.0.1", port)
    assert nobody_listens("127.0.0.1", port)
    assert not nobody_listens("192.0.2.7", port)  # an address that nobody has
