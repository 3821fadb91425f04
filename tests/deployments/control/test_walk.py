"""The walk of a deployment, as CONTRIBUTING tells it, is the one that a change goes."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tests.deployments.control.carried_out import change_deployment, nothing_of
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments.forking import ROOT
from tests.instruments.plans import make_plan
from tests.instruments.stores import DictStore

MOST_STAYS = 25
# What a controller knows by itself stands beside the way of a command.
KNOWN = {
    "attainment",
    "canaries",
    "estimates",
    "gpu_requests",
    "idle_models",
    "lengths",
    "change_rate_limit",
    "planner",
    "planner_requests",
    "rates",
    "settings",
    "standby",
}


def named() -> set[str]:
    """Return the files that the walk names, below the root."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (walk,) = re.findall(r"^\*\*A deployment\*\*.*?(?=\n\n|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    found = set()
    for name in re.findall(r"`((?:\w+/)+\w+)`", walk):
        (file,) = (p for p in (ROOT / f"{name}.py", ROOT / f"deployments/{name}.py") if p.exists())
        found.add(str(file.relative_to(ROOT)))
    return found


def visited() -> set[str]:
    """Return the files of control and serve that bringing a deployment up and changing it calls."""
    first, second = (make_plan({"n0/0/a": (share, ["a"])}) for share in (50.0, 40.0))
    deployment, seen = Deployment(plan=first), set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    serve = FakeServe(None)
    sys.setprofile(note)
    try:
        for running, wanted in ((nothing_of(deployment), deployment), (deployment, deployment.with_plan(second))):
            history = History(DictStore())
            change_deployment(
                running, wanted, serve, serve.status, history, by="", why="", clock=serve.clock, sleep=serve.sleep
            )
            assert history.latest() is not None
    finally:
        sys.setprofile(None)
    parts = [re.search(r"deployments/(?:control|serve)/\w+\.py$", file) for file in seen]
    return {part.group() for part in parts if part is not None and not part.string.startswith(str(ROOT / "tests"))}


def test_a_change_stays_on_the_walk_of_a_deployment() -> None:
    walk, seen = named(), visited()
    assert {"deployments/control/change_progress.py", "deployments/serve/config.py"} <= seen
    assert {file for file in seen if file.rpartition("/")[2].removesuffix(".py") not in KNOWN} <= walk
    assert len(walk) <= MOST_STAYS
