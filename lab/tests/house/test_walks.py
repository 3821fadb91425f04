"""How long the walks of CONTRIBUTING are, counted in stays (`tenuto_lab.house.walk`). A walk may become shorter."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml
from click.testing import CliRunner

from tenuto.batching.planning import losses, plan_search
from tenuto.cli import load_verb
from tenuto.deployments.entry.gateway import Entry
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import History
from tenuto.deployments.serve.launcher import unused_port
from tenuto.deployments.serve.user_config import read_gateway_config
from tenuto.deployments.wire.peer import Finder
from tenuto.placement import Plan
from tenuto.profiles.generation import StepCost
from tenuto_lab.house.sources import checkout
from tenuto_lab.house.walk import Stay, summary, walked
from tests.deployments.control.carried_out import OwnController, nothing_of
from tests.deployments.control.desk import PlanningDesk
from tests.deployments.control.fake_serve import FakeServe
from tests.instruments import plans
from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan
from tests.instruments.live import PATIENCE_S
from tests.instruments.stores import DictStore

# The aim is 25. None is there: each is what a run has today, with all helpers, and a change may lower it only.
STAYS = {"request": 105, "generation": 73, "deployment": 164, "controller": 303, "plan": 481}


async def answered(plan: Plan, find: Finder, path: str, document: object) -> list[Stay]:
    """Return the shortest of three walks of a request: timers of connections may lengthen one."""
    port = unused_port()
    entry = Entry(find)
    await entry.follow(
        read_gateway_config(
            {"plan": plan.to_data(), "scheduler": {"name": "eager"}, "listen": {"host": "127.0.0.1", "port": port}}
        )
    )
    walks: list[list[Stay]] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        async with asyncio.timeout(PATIENCE_S):
            while (await client.get("/v2/health/ready")).status_code != 200:
                await asyncio.sleep(0.005)
        for _ in range(3):
            with walked() as stays:
                answer = await client.post(path, json=document)
            assert answer.status_code == 200, answer.text
            walks.append(stays)
    await entry.close()
    return min(walks, key=len)


def request(_: Path) -> list[Stay]:
    """Walk a request of a network: from the gateway's socket to a gpu-let's connection and back."""

    async def run() -> list[Stay]:
        gpulet = FakeGpulet("a", ("m",))
        await gpulet.start()
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
        plan = make_plan(("a", ("m",)), slo_ms=60_000.0)
        stays = await answered(plan, finder({"a": gpulet}), "/v2/models/m/infer", {"inputs": [tensor]})
        if gpulet.is_connected:
            gpulet.die()
        return stays

    return asyncio.run(run())


def generation(_: Path) -> list[Stay]:
    """Walk a request for a text, on an emulated gpu-let whose own thread is not walked."""
    lengths = {"prompt_tokens": 20, "output_tokens": 20, "max_sequences": 8, "max_batch_tokens": 64}
    steps = StepCost.line(1.0, 0.0, 0.0, 0.0, 0.0).model_dump(mode="json")
    model = {"name": "m", "options": {"tokenizer": "bytes"}, "rate_rps": 10, "generates": lengths}
    plan = Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "v", "type": "v100"}],
            "gpulets": [
                {"id": "a", "gpu": "v", "models": [{"name": "m", "batch_size": 8, "kv_tokens": 512, "steps": steps}]}
            ],
            "models": [{**model, "slo": {"ttft_ms": 60_000, "tpot_ms": 1000}}],
        }
    )

    async def run() -> list[Stay]:
        (config,) = Deployment(plan=plan).config().gpulets
        assert config.spec is not None
        replica = await LocalReplica.start(config.spec, config.user_config)
        document = {"text_input": "note", "parameters": {"max_tokens": 4}}
        stays = await answered(plan, lambda _: replica.endpoint, "/v2/models/m/generate", document)
        await replica.close()
        return stays

    return asyncio.run(run())


def deployment(_: Path) -> list[Stay]:
    """Walk a change of one gpu-let's share, from the wanted deployment to Serve's config and the last look."""
    first, second = (plans.make_plan({"n0/0/a": (share, ["a"])}) for share in (50.0, 40.0))
    wanted, serve = Deployment(plan=first), FakeServe(None)
    controller = OwnController(nothing_of(wanted), serve, serve.status, History(DictStore()), clock=serve.clock)
    controller.change(wanted, serve, by="", why="", sleep=serve.sleep)
    with walked() as stays:
        controller.change(wanted.with_plan(second), serve, by="", why="", sleep=serve.sleep)
    return stays


def controller(_: Path) -> list[Stay]:
    """Walk the checks of a controller from a rate that doubles to the applied plan, planning included."""
    gpus = [plans.gpu("n0/0"), plans.gpu("n0/1")]
    desk = PlanningDesk(plans.make_plan({"n0/0/a": (100.0, ["a"])}), gpus)
    desk.look(30)
    desk.rates["a"] *= 20.0
    with walked() as stays:
        desk.look(60)
    assert desk.applied
    return stays


def plan(folder: Path) -> list[Stay]:
    """Walk `tenuto plan` with the default policy."""
    models = [{"name": "resnet50", "rate_rps": 300, "slo_ms": 200}, {"name": "bert", "rate_rps": 100, "slo_ms": 300}]
    (folder / "w.yaml").write_text(yaml.safe_dump({"models": models}))
    verb = load_verb("plan")
    options = ("--gpus", "v100:2", "--option", "requests=1000")  # longer trials take time, and no further stay
    assert verb is not None
    with walked() as stays:
        ran = CliRunner().invoke(verb, [str(folder / "w.yaml"), "-o", str(folder / "p.yaml"), *options])
    assert ran.exit_code == 0, ran.output
    return stays


def test_contributing_says_how_long_the_walks_are() -> None:
    text = (checkout() / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = {
        name: int(stays)
        for name, stays in re.findall(r"(\w+) (\d+)", text.partition("Stays today:")[2].partition(".")[0])
    }
    assert told == pytest.approx(STAYS, rel=0.1)


@pytest.mark.parametrize("walk", [request, generation, deployment, controller, plan])
def test_a_walk_is_no_longer_than_today(
    walk: Callable[[Path], list[Stay]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (plan_search, losses):
        monkeypatch.setattr(module, "CONFIRMING", 1)  # longer trials take time, and no further stay
    walk(tmp_path)  # caches and imports of a first run would make the figure depend on the order of the tests
    stays = walk(tmp_path)
    assert len(stays) <= STAYS[walk.__name__], summary(stays)
