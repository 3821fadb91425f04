"""A version of a model is tried, promoted and taken back while requests come: on a real Ray with emulated GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tenuto.deployments.control.operations import Operations
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.errors import InvalidInputError
from tenuto.placement.cluster import Gpu
from tenuto.profiles import Profiles
from tests.instruments.live import asking, infer, until
from tests.instruments.local_ray import LocalRay
from tests.instruments.plans import make_plan

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

PLAN = make_plan({"n0/0/a": (100.0, ["one"])}, slo_ms=1000.0, rate_rps=20.0)
GPUS = tuple(Gpu(id=f"n0/{index}", type="v100", memory_mib=16_000.0) for index in range(3))


@pytest.fixture(scope="module")
def operator(launcher: Launcher) -> Iterator[Operations]:
    assert launcher is not None
    with Operations(None, lambda _text: None) as running:
        running.delete()
        control = {"mode": "act", "change": {"prove_s": 1.0, "cool_down_s": 1.0}, "rates": {"settle_s": 1.0}}
        wanted = Deployment.model_validate(
            {
                "plan": PLAN.to_data(),
                "executor": "emulated",
                "scheduler": "eager",
                "port": unused_port(),
                "control": control,
            }
        )
        assert running.deploy(wanted, "the first", ground=(Profiles([]), GPUS))
        yield running
        running.delete()


def versions(operator: Operations) -> list[str]:
    found: list[str] = get_json(f"{operator.base_url}/v2/models/one").get("versions", [])
    return found


def answered_by(operator: Operations, count: int = 30) -> set[Any]:
    """Ask so often without naming a version, and return which answered."""
    answers = [infer(operator.base_url, "one") for _ in range(count)]
    assert {status for status, _ in answers} == {200}
    return {answer["model_version"] for _, answer in answers}


def bring(operator: Operations, version: str, **own: Any) -> None:
    own["weights_path"] = f"/models/{version}.safetensors"
    assert operator.edit(lambda controller: controller.set_version("one", version, {"share_pct": 50.0}, own)) == ""
    assert version in versions(operator)
    assert version in answered_by(operator)


def test_a_version_is_tried_and_promoted_without_losing_a_request(operator: Operations) -> None:
    with asking(operator.base_url, ["one", "one"]) as answers:
        bring(operator, "2")
        assert versions(operator) == ["1", "2"]
        assert answered_by(operator) == {"1", "2"}
        with pytest.raises(InvalidInputError, match="takes the rest"):
            operator.controller().take_back("one", "1")
        assert operator.edit(lambda controller: controller.promote("one", "2")) == ""
        assert versions(operator) == ["2"]
    assert {"ok" if status == 200 else f"{status}: {answer.get('error')}" for status, answer in answers} == {"ok"}
    assert [spec.name for spec in operator.history.all()[-1].deployment.plan.models] == ["one:2"]


def test_what_is_rolled_back_is_what_was_asked_last_even_if_that_is_under_way(operator: Operations) -> None:
    own = {"weights_path": "/4", "rate_rps": 5.0}
    operator.edit(lambda controller: controller.set_version("one", "4", {"share_pct": 0.0}, own))
    operator.edit(lambda controller: controller.promote("one", "4"), waits=False)
    _, is_reached = operator.rollback(None)
    assert (is_reached, sorted(versions(operator))) == (True, ["2", "4"])
    assert operator.edit(lambda controller: controller.take_back("one", "4")) == ""
    assert versions(operator) == ["2"]


def test_a_version_that_is_slower_is_taken_back_by_itself(operator: Operations, local_ray: LocalRay) -> None:
    """As `test_version_edits` has operators take one back, so does the controller, but for the reason."""
    before = answered_by(operator)
    bring(operator, "3", only_on=["n0/1"])
    local_ray.slower.write_text(json.dumps({"one:3": 90.0}))
    with asking(operator.base_url, ["one", "one"], X_SLO_Ms="300") as answers:
        until(lambda: "3" not in versions(operator))
    assert {status: answer for status, answer in answers if status not in (200, 504)} == {}
    lines = [line for line in operator.controller().log(50) if line.kind == "canary"]
    assert "one:3 lost" in lines[-1].text
    assert lines[-1].data["lost"] > 0
    assert answered_by(operator) == before
