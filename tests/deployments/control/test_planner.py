"""The planner's process: it answers, and whatever a policy does there, the controller gets an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tenuto.deployments.control.planner import PlannerProcess
from tenuto.mps.processes import Processes
from tenuto.placement.plan import PolicyUsed
from tenuto.placement.planner import PlanRequest, Proposal
from tenuto.profiles import Profiles
from tests.instruments.plans import gpu, make_plan, request

PLAN = make_plan({"n0/0/a": (100.0, ["a"])})
POLICIES = """
import os, time
from tenuto.placement import Policy as Base

class Policy(Base):
    name = summary = source = "own"

    def place(self, workload, cluster, profiles):
        print("what a policy prints is not the answer")
        {}
"""


def question(policy: str) -> PlanRequest:
    return replace(request(PLAN, (gpu("n0/0"), gpu("n0/1")), {"a": 900.0}), policy=PolicyUsed(name=policy))


def answer(planner: PlannerProcess, number: int) -> Proposal | str:
    until_s = time.monotonic() + 300.0
    while time.monotonic() < until_s:
        for found, result in planner.answers():
            if found == number:
                return result
        time.sleep(0.02)
    raise AssertionError("no answer came")


@pytest.fixture(scope="module")
def planner() -> Iterator[PlannerProcess]:
    made = PlannerProcess(Profiles([]), 200.0)
    yield made
    made.close()


def test_questions_are_answered_one_after_another_by_one_process(planner: PlannerProcess) -> None:
    pid = planner.pid
    planner.ask(0, question("ffd"))  # it is starting yet, and takes the newest question once it is up
    for number in (1, 2):
        planner.ask(number, question("ffd"))
        found = answer(planner, number)
        assert isinstance(found, Proposal)
        assert found.plan is not None
        assert {gpulet.gpu for gpulet in found.plan.gpulets} == {"n0/0", "n0/1"}
    assert planner.pid == pid


def test_a_policy_that_ends_the_process_or_is_none_gives_the_reason(planner: PlannerProcess, tmp_path: Path) -> None:
    file = tmp_path / "policies.py"
    file.write_text(POLICIES.format("os._exit(7)"))
    planner.ask(1, question(f"{file}:Policy"))
    assert answer(planner, 1) == "the planner's process ended with code 7"
    planner.ask(2, question("ffd"))  # by another process
    assert isinstance(answer(planner, 2), Proposal)


def test_a_policy_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "policies.py"
    file.write_text(POLICIES.format("time.sleep(3600)"))
    planner = PlannerProcess(Profiles([]), 0.2)
    try:
        planner.ask(1, question(f"{file}:Policy"))
        assert "took more than 0.2 s" in str(answer(planner, 1))
        assert Processes().started_at(planner.pid) is None
    finally:
        planner.close()
