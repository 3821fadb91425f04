"""Faults of a shared GPU on a real Ray: its gpu-lets leave and start in turn, those of other GPUs notice nothing."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tenuto.deployments.serve.config import ServeConfig
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.deployments.serve.states import application_states
from tenuto.mps.folders import find_leftovers
from tenuto.placement import Plan
from tests.deployments.on_fake_gpu import GPUS, read_journal
from tests.instruments.live import PATIENCE_S, asking, bring_up, infer, pids, until
from tests.mps.control_program import fail, install

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

PORT = unused_port()
HIT, SPARED = ("n0/0/a", "n0/0/b"), ("n0/1/a", "n0/1/b")


def plan(*, changed: bool = False) -> Plan:
    """Two gpu-lets on each of two GPUs; `changed`: the first has one model more, its neighbour another share."""
    replica = {"name": "synthetic", "batch_size": 4, "latency": {"alpha_ms": 1.0, "beta_ms": 9.0}, "latency_ms": 13.0}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": f"n0/{index}", "type": "v100", "uuid": uuid} for index, uuid in enumerate(GPUS)],
            "gpulets": [
                {
                    "id": gpulet,
                    "gpu": gpulet[:4],
                    "memory_mib": 1000.0,
                    "share_pct": 40.0 if changed and gpulet == "n0/0/b" else 50.0,
                    "models": [replica, {**replica, "name": "more"}] if changed and gpulet == "n0/0/a" else [replica],
                }
                for gpulet in (*HIT, *SPARED)
            ],
            "models": [
                {"name": name, "rate_rps": 100, "slo_ms": 500, "latency": {"alpha_ms": 1.0, "beta_ms": 9.0}}
                for name in ("synthetic", "more")
            ],
            "unserved": [] if changed else ["more"],
        }
    )


def config(made: Plan) -> ServeConfig:
    """A config for real GPUs, whose gpu-lets are those on fake ones, in the environment of this test."""
    found = Deployment(plan=made, port=PORT, scheduler="eager").config()
    here = {name: os.environ[name] for name in ("PATH", "TENUTO_MPS_ROOT")}
    gpulets = []
    for each in found.gpulets:
        assert each.spec is not None
        spec = each.spec.model_copy(update={"executor": "emulated"})
        actor = replace(each.actor, environment=(*each.actor.environment, *here.items()))
        gpulets.append(replace(each, module="tests.deployments.on_fake_gpu", spec=spec, actor=actor))
    return replace(found, gpulets=tuple(gpulets))


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="m"))  # short enough for sockets
    install(folder)
    before = dict(os.environ)
    os.environ.update(PATH=f"{folder}:{before['PATH']}", TENUTO_MPS_ROOT=str(folder))
    yield folder
    for faults in folder.glob("*/faults.json"):
        faults.unlink()  # with them the reapers wait for two minutes
    until(lambda: find_leftovers(folder) == () and not list(folder.glob("*/owner.json")))  # the reapers' work
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def launcher(root: Path, launcher: Launcher) -> Launcher:
    bring_up(launcher, config(plan()))
    return launcher


def pipes(root: Path, gpu: int) -> Path:
    return root / GPUS[gpu].removeprefix("GPU-") / "pipe"


def turns(root: Path, gpulets: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(gpulet, event) for _, gpulet, _, event in read_journal(root) if gpulet in gpulets]


def in_turn(events: list[tuple[str, str]]) -> bool:
    """Whether each start ended before the next began."""
    return all(
        first[1] == "begins" and second == (first[0], "ends")
        for first, second in zip(events[::2], events[1::2], strict=True)
    )


def test_a_fault_restarts_its_gpu_in_turn_and_no_other(launcher: Launcher, root: Path) -> None:
    url = launcher.base_url
    before = pids(url)
    assert set(before) == {*HIT, *SPARED}
    described = {gpulet["id"]: gpulet for gpulet in get_json(f"{url}/status")["gpulets"]}
    assert all(gpulet["cuda_mps"]["proof"] == "pid" for gpulet in described.values())
    for gpulets in (HIT, SPARED):
        assert in_turn(turns(root, gpulets))

    with asking(url, ["synthetic"] * 4) as answers:
        until(lambda: len(answers) > 20)
        fail(pipes(root, 0))
        until(lambda: all(pids(url).get(gpulet, before[gpulet]) != before[gpulet] for gpulet in HIT))
        served = len(answers)
        until(lambda: len(answers) > served + 20)
    outcomes = [(status, str(answer.get("parameters", {}).get("gpulet"))) for status, answer in answers]

    after = pids(url)
    assert {gpulet: after[gpulet] for gpulet in SPARED} == {gpulet: before[gpulet] for gpulet in SPARED}
    assert {gpulet for status, gpulet in outcomes if status == 200} & set(SPARED)
    assert sum(status == 200 for status, _ in outcomes) > len(outcomes) / 2
    events = turns(root, HIT)
    assert in_turn(events)
    assert len(events) == 8


def test_a_running_gpulet_loads_more_only_while_no_neighbour_starts(launcher: Launcher, root: Path) -> None:
    url = launcher.base_url
    before, known = pids(url), len(turns(root, HIT))
    bring_up(launcher, config(plan(changed=True)))
    until(lambda: pids(url).get("n0/0/b", before["n0/0/b"]) != before["n0/0/b"])
    until(lambda: len(turns(root, HIT)) == known + 4)
    events = turns(root, HIT)[known:]
    assert {gpulet for gpulet, _ in events} == set(HIT)
    assert in_turn(events)
    after = pids(url)
    assert {g: pid for g, pid in after.items() if g != "n0/0/b"} == {g: p for g, p in before.items() if g != "n0/0/b"}


def test_repeated_faults_end_in_a_clear_failure_and_the_other_gpu_goes_on(launcher: Launcher, root: Path) -> None:
    url = launcher.base_url
    before = pids(url)

    def reasons() -> str:
        states = application_states()
        return " ".join(states["gpulet-" + g.replace("/", "-")].message for g in HIT)

    seen: list[dict[str, int]] = [{}]

    def ends() -> bool:
        """Cause one fault more whenever both are back from the last one, however long that took."""
        now = {gpulet: pid for gpulet, pid in pids(url).items() if gpulet in HIT}
        if set(now) == set(HIT) and all(now[gpulet] != seen[-1].get(gpulet) for gpulet in HIT):
            seen.append(now)
            fail(pipes(root, 0))
        return "has faulted 3 times within 10 min" in reasons()

    until(ends, 3 * PATIENCE_S)
    assert {g: pid for g, pid in pids(url).items() if g in SPARED} == {g: before[g] for g in SPARED}
    assert infer(url)[0] == 200
