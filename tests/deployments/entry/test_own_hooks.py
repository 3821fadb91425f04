"""A model's own hooks behind a gateway: what they make of a body, and that whatever they do hurts nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.service import process_pool
from tenuto.deployments.entry.service.hook_pool import HookPool
from tenuto.deployments.entry.service.hook_process import Postprocess
from tenuto.deployments.entry.service.planned_model import PlannedModel
from tenuto.deployments.entry.service.process_pool import HookFaultError
from tenuto.placement import Plan
from tenuto.profiles.networks.model_options import HookOptions
from tests.deployments.entry.test_gateway import Bench
from tests.instruments.fake_gpulet import SIGNATURE, make_plan
from tests.instruments.live import PATIENCE_S
from tests.instruments.replica_processes import functions_of

NUMBERS = "tests.instruments.own_hooks:Numbers"


def plan(hooks: str = NUMBERS, *, processes: int = 1) -> Plan:
    """Model m with hooks, n without."""
    data = make_plan(("a", ("m",)), ("b", ("n",)), slo_ms=60_000.0).to_data()
    (spec,) = (each for each in data["models"] if each["name"] == "m")
    spec["options"] = {"hooks": hooks, "hook_processes": processes}
    return Plan.from_data(data, origin="test")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of hooks that ended are replaced at once."""
    monkeypatch.setattr(process_pool, "AGAIN_S", 0.01)


@pytest.fixture
async def bench(quick_workers: None) -> AsyncIterator[Bench]:
    made = Bench()
    await made.start(plan())
    yield made
    await made.close()


async def predict(bench: Bench, body: bytes, **headers: str) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return await bench.client.post("/predict/m", content=body, headers=given)


async def works_again(bench: Bench) -> None:
    """A process that was killed is replaced."""
    async with asyncio.timeout(PATIENCE_S):
        while (await predict(bench, b"[1, 2]")).status_code != 200:
            await asyncio.sleep(0.01)


async def test_a_body_becomes_tensors_and_outputs_become_an_answer(bench: Bench) -> None:
    answer = await predict(bench, b"[1, 2.5]", X_Request_Id="mine")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["prediction"] == {"sums": {"y": 7.0}}
    assert (found["model_name"], found["parameters"]["gpulet"]) == ("m", "a")
    assert answer.headers["x-tenuto-request-id"] == "mine"
    assert (await bench.infer()).json()["outputs"][0]["data"] == [2.0, 4.0]  # tensors need no hooks


async def test_large_and_compressed_bodies_reach_the_hooks(bench: Bench) -> None:
    import gzip

    body = b"[1, 2" + b" " * (1 << 20) + b"]"
    assert (await predict(bench, body)).json()["prediction"] == {"sums": {"y": 6.0}}
    packed = await predict(bench, gzip.compress(body), Content_Encoding="gzip")
    assert packed.json()["prediction"] == {"sums": {"y": 6.0}}


async def test_a_hook_with_a_second_parameter_sees_the_body_of_the_request(bench: Bench) -> None:
    import gzip

    await bench.follow(plan("tests.instruments.own_hooks:Named"))
    async with asyncio.timeout(PATIENCE_S):
        while "request" not in (answer := await predict(bench, b"[1, 2.5]")).json().get("prediction", {}):
            await asyncio.sleep(0.01)
    assert answer.json()["prediction"] == {"sums": {"y": 7.0}, "request": "[1, 2.5]"}
    packed = await predict(bench, gzip.compress(b"[3, 4]"), Content_Encoding="gzip")
    assert packed.json()["prediction"] == {"sums": {"y": 14.0}, "request": "[3, 4]"}


async def test_what_a_hook_prints_is_not_taken_for_an_answer(bench: Bench) -> None:
    assert (await predict(bench, b"print")).status_code == 200


async def test_a_process_that_cannot_be_started_for_want_of_descriptors_is_started_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as short:
        short.setattr(process_pool.subprocess, "Popen", full)
        await predict(bench, b"crash")
        while (answer := await predict(bench, b"[1, 2]")).status_code == 200:
            await asyncio.sleep(0.01)
        assert (answer.status_code, "Retry" in answer.text) == (503, True)
    await works_again(bench)


async def test_a_client_is_told_what_is_wrong_with_its_body(bench: Bench) -> None:
    answer = await predict(bench, b"no list")
    assert (answer.status_code, answer.json()) == (400, {"error": "the body is no list of 2 numbers. Send JSON."})


@pytest.mark.parametrize("body", [b"bug", b"leave", b"shape", b"crash", b"[1e7, 1e7]"])
async def test_a_fault_of_the_hooks_is_in_the_log_and_not_in_the_answer(
    bench: Bench, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "ray.serve"):
        answer = await predict(bench, body)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    incident = answer.json()["error"].split()[-1].rstrip(".")
    assert incident in caplog.text
    assert {b"bug": "a secret", b"shape": "must be float32 [2]", b"crash": "ended with 9"}.get(body, "") in caplog.text
    await works_again(bench)


@pytest.mark.parametrize("body", [b"hang", b"spin", b"[-1, -1]"])
async def test_a_hook_that_hangs_is_answered_at_the_deadline(bench: Bench, body: bytes) -> None:
    """And while it hangs, the loop answers others."""
    await works_again(bench)
    hung = asyncio.create_task(predict(bench, body, X_SLO_Ms="300"))
    assert (await bench.infer("n")).status_code == 200
    answer = await hung
    assert (answer.status_code, answer.json()["outcome"]) == (504, "expired")


LATER_MS = 1e15


@pytest.fixture
async def hooks() -> AsyncIterator[HookPool]:
    """One process."""
    made = HookPool("m", HookOptions(hooks=NUMBERS, hook_processes=1), SIGNATURE, 10.0, hangs_s=PATIENCE_S)
    yield made
    made.close()


async def test_a_process_that_hangs_is_replaced() -> None:
    hasty = HookPool("m", HookOptions(hooks=NUMBERS, hook_processes=1), SIGNATURE, 10.0, hangs_s=0.2)
    try:
        for body in (b"hang", b"spin"):
            with pytest.raises(HookFaultError, match="and its process was killed"):
                await hasty.preprocess(body, LATER_MS)
        async with asyncio.timeout(PATIENCE_S):
            ((part,), _) = await hasty.preprocess(b"[1, 2]", LATER_MS)
        assert part.nbytes == 8
    finally:
        hasty.close()


async def test_a_call_that_comes_too_late_never_reaches_its_hook(hooks: HookPool) -> None:
    with pytest.raises(HttpError, match="deadline"):
        await hooks.preprocess(b"crash", 0.0)
    first = await number_of(hooks)
    with pytest.raises(HttpError, match="deadline"):
        await hooks.preprocess(b"crash", 0.0)
    given_up = hooks.preprocess(b"crash", LATER_MS)
    given_up.cancel()
    assert await number_of(hooks) == first  # the same process goes on


async def started_by(hooks: HookPool) -> int:
    """Return a process that a hook has started, which would sleep for an hour."""
    ((part,), _) = await hooks.preprocess(b"start", LATER_MS)
    return int(np.frombuffer(part.data, np.float32)[0])


async def ends(pid: int) -> None:
    """Wait until a process is gone, or dead and not yet collected."""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(OSError):
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", ["crash", "close"])
async def test_what_hooks_have_started_ends_with_their_process(hooks: HookPool, end: str) -> None:
    started = await started_by(hooks)
    if end == "close":
        hooks.close()
    else:
        with pytest.raises(HookFaultError):
            await hooks.preprocess(b"crash", LATER_MS)
    await ends(started)


_GATEWAY = """
import asyncio, os, signal
from tenuto.deployments.entry.service.hook_pool import HookPool
from tenuto.profiles.networks.model_options import HookOptions
from tests.deployments.entry.test_own_hooks import LATER_MS, NUMBERS, SIGNATURE, started_by

async def main() -> None:
    hooks = HookPool("m", HookOptions(hooks=NUMBERS, hook_processes=1), SIGNATURE, 10.0)
    print(await started_by(hooks), flush=True)
    hung = hooks.preprocess(b"spin", LATER_MS)
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_what_hooks_have_started_ends_with_a_gateway_that_is_killed() -> None:
    killed = subprocess.run([sys.executable, "-c", _GATEWAY], stdout=subprocess.PIPE, check=False)
    assert killed.returncode == -signal.SIGKILL
    await ends(int(killed.stdout))


async def number_of(hooks: HookPool) -> float:
    """Return what tells one process of hooks from another."""
    ((part,), _) = await hooks.preprocess(b"print", LATER_MS)
    return float(np.frombuffer(part.data, np.float32)[0])


async def test_what_is_kept_for_an_answer_is_never_more_than_half_of_what_there_is() -> None:
    """Otherwise one slow answer could expire all that follow, and nothing would show that hooks are fast again."""
    model = PlannedModel("m")
    model.follow(100.0, 20.0, SIGNATURE, HookOptions(hooks=NUMBERS, hook_processes=1), is_ready=True)
    try:
        assert model.hooks is not None
        model.hooks.longest_ms[Postprocess] = 1000.0
        assert model.after_ms == 40.0
        model.hooks.longest_ms[Postprocess] = 3.0
        assert model.after_ms == 3.0
    finally:
        model.close()


async def test_more_than_may_wait_is_turned_away(bench: Bench) -> None:
    await works_again(bench)
    async with httpx.AsyncClient(
        base_url=bench.client.base_url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)
    ) as many:
        asked = [many.post("/predict/m", content=b"hang", headers={"X-SLO-Ms": "1500"}) for _ in range(100)]
        answers = await asyncio.gather(*asked)
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {429, 504}
    assert "hooks" in next(answer.text for answer in answers if answer.status_code == 429)


@pytest.mark.parametrize("hooks", ["tests.no_such:Hooks", "tests.instruments.own_hooks:broken"])
async def test_hooks_that_cannot_be_made_are_said_so_and_tensors_still_work(
    bench: Bench, hooks: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "ray.serve"):
        await bench.follow(plan(hooks))
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await predict(bench, b"[1, 2]")).status_code != 503:
                await asyncio.sleep(0.01)
    assert "cannot be started" in answer.text
    assert int(answer.headers["retry-after"]) == 1
    assert "no_such" in caplog.text or "weights" in caplog.text
    assert (await bench.infer()).status_code == 200
    await bench.follow(plan())
    await works_again(bench)


async def test_processes_of_hooks_end_with_the_plan_and_with_the_gateway(bench: Bench) -> None:
    async def settled(count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(functions_of(os.getpid())) != count:
                await asyncio.sleep(0.01)

    await bench.follow(plan(processes=3))
    await settled(3)
    await bench.follow(make_plan(("a", ("m",)), ("b", ("n",)), slo_ms=60_000.0))
    await settled(0)
    await bench.follow(plan())
    await settled(1)
    await bench.close()
    bench.is_closed = True
    await settled(0)
