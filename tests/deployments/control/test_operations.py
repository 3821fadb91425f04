"""What an operator's commands know of what runs, without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ray.exceptions import ActorDiedError

from tenuto.deployments.control import operations
from tenuto.deployments.control.operations import is_orphaned, refuse_running, refuse_second_start, sign_launcher
from tenuto.deployments.control.remembered import ControlMemory, DesiredDeployment
from tenuto.deployments.control.settings import check_policy
from tenuto.deployments.serve.config import CONTROL_APPLICATION, ENTRY_APPLICATION, application_name
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.states import ApplicationState
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.placement.plan import PolicyUsed
from tests.instruments.plans import make_plan
from tests.instruments.stores import DictStore


def test_what_a_process_leaves_is_its_own_until_it_is_gone() -> None:
    store = DictStore()
    assert not is_orphaned(store)  # by `tenuto deploy`: it ends with nobody
    sign_launcher(store)
    assert not is_orphaned(store)
    (key,) = store.values
    signed = json.loads(store.values[key])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store.put(key, json.dumps({**signed, "pid": ended.pid}).encode())
    assert is_orphaned(store)
    store.put(key, json.dumps({**signed, "started": "1"}).encode())  # the number is another process's by now
    assert is_orphaned(store)
    store.put(key, json.dumps({**signed, "pid": ended.pid, "machine": "another"}).encode())
    assert not is_orphaned(store)


@pytest.mark.parametrize("name", ["./mine.py:Mine", "of-my-package"])
@pytest.mark.parametrize("in_settings", [True, False])
def test_a_policy_that_the_controller_could_not_load_is_refused_with_the_cure(name: str, in_settings: bool) -> None:
    known, unknown = PolicyUsed(name="gpulet"), PolicyUsed(name=name)
    plan = make_plan({"n0/0/a": (50.0, ["a"])}).model_copy(update={"policy": known if in_settings else unknown})
    settings = {"policy": unknown.model_dump()} if in_settings else {}
    with pytest.raises(InvalidInputError, match="Install its package on every node"):
        check_policy(settings, plan)
    check_policy({"policy": known.model_dump()}, plan)
    check_policy(None, plan)


def test_a_second_start_is_refused_while_the_controller_of_the_first_has_begun_and_its_gateways_have_not() -> None:
    store, alone = DictStore(), {CONTROL_APPLICATION: ApplicationState("DEPLOYING")}
    refuse_second_start(alone, store)  # nobody wants anything: it is left over
    deployment = Deployment(plan=make_plan({"n0/0/a": (50.0, ["a"])}))
    ControlMemory(store).write_desired(DesiredDeployment(1, deployment, "serve", "a test", is_first=True))
    with pytest.raises(EnvironmentFaultError, match="another command brings a deployment up here"):
        refuse_second_start(alone, store)
    refuse_second_start({**alone, ENTRY_APPLICATION: ApplicationState("DEPLOYING")}, store)
    refuse_second_start({CONTROL_APPLICATION: ApplicationState("DEPLOY_FAILED")}, store)
    refuse_second_start({}, store)


def test_what_ends_together_with_its_ray_was_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `tenuto serve` may end its own Ray before the command that removes its deployment has seen that it is gone."""

    class Ending:
        def __init__(self) -> None:
            self.deleted: list[str] = []

        def states(self) -> dict[str, object]:
            if self.deleted:
                raise ActorDiedError
            return {application_name("n0/0/a"): None}

        def delete_ours(self) -> None:
            self.deleted = list(self.states())
            self.states()

    serve = Ending()
    monkeypatch.setattr(operations, "is_serving", lambda: True)
    monkeypatch.setattr(operations, "Applications", lambda: serve)
    monkeypatch.setattr(operations, "ClusterStore", DictStore)
    refuse_running()
    assert serve.deleted == [application_name("n0/0/a")]
