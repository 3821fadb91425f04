"""What a token's way to the client costs: many streams of an emulated model with steps of equal length, over HTTP from
another process. A stream's TPOT less the mean step of the gpu-let is the share of dispatcher, gateway and client."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from urllib.parse import urlparse

import numpy as np
import uvloop
from serving import heading

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.placement import Plan
from tenuto.profiles import StepCost

Stream = tuple[float, list[float]]
"""When a stream was asked for, and when each of its tokens came, in s."""


def plan(step_ms: float, streams: int) -> Plan:
    """Return a model whose steps take so long, with memory for all."""
    cost = StepCost.line(step_ms, 0.0, 0.0, 0.0, 0.0).model_dump(mode="json")
    limits = {"prompt_tokens": 32, "output_tokens": 100, "max_sequences": streams}
    slo = {"ttft_ms": 60_000, "tpot_ms": 10_000}
    return Plan.from_data(
        {
            "policy": {"name": "none"},
            "gpus": [{"id": "n0/0", "type": "a100"}],
            "gpulets": [
                {
                    "id": "n0/0/a",
                    "gpu": "n0/0",
                    "models": [{"name": "m", "batch_size": streams, "kv_tokens": 4096 * streams, "steps": cost}],
                }
            ],
            "models": [
                {"name": "m", "rate_rps": 10, "slo": slo, "generates": limits, "options": {"tokenizer": "bytes"}}
            ],
        }
    )


async def stream(port: int, number: int, tokens: int) -> Stream:
    """Ask for one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = {"model": "m", "prompt": f"stream {number:5d}", "max_tokens": tokens, "stream": True}
    body, came = json.dumps(asked).encode(), list[float]()
    begun = time.monotonic()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    if b" 200 " not in await reader.readline():
        raise SystemExit((await reader.read(2000)).decode())
    while not (line := await reader.readline()).startswith(b"data: [DONE]"):
        if b'"finish_reason":null' in line:  # the last event has no token
            came.append(time.monotonic())
    writer.close()
    return begun, came


async def ask(port: int, streams: int, tokens: int) -> list[Stream]:
    """Ask for all streams, one each 10 ms."""
    tasks = []
    for number in range(streams):
        tasks.append(asyncio.create_task(stream(port, number, tokens)))
        await asyncio.sleep(0.01)
    return await asyncio.gather(*tasks)


def steps(url: str) -> tuple[float, int]:
    """Return the time of all steps in ms, and how many there were."""
    (gpulet,) = get_json(f"{url}/status")["gpulets"]
    return 1000.0 * gpulet["busy_s"], gpulet["batches"]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=49.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--ask", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        print(json.dumps(uvloop.run(ask(given.ask, given.streams, given.tokens))))
        return
    heading(f"{given.streams} streams of {given.tokens} tokens, steps of {given.step_ms:g} ms, emulated")
    this = [sys.executable, __file__, "--streams", str(given.streams), "--tokens", str(given.tokens), "--ask"]
    with Launcher() as launcher:
        launcher.connect(num_gpus=1, address="local")
        end_all()
        made = plan(given.step_ms, given.streams)
        deployment = Deployment(plan=made, port=unused_port(), executor="emulated", gateways=given.gateways)
        begin(launcher, deployment, "a run", "the laboratory")
        port = urlparse(launcher.base_url).port
        for _ in range(given.runs):
            before = steps(launcher.operator_url)
            done = subprocess.run([*this, str(port)], stdout=subprocess.PIPE, text=True, check=True)
            after = steps(launcher.operator_url)
            found: list[Stream] = json.loads(done.stdout)
            step_ms = (after[0] - before[0]) / (after[1] - before[1])
            tpot_ms = np.array([1000.0 * (came[-1] - came[0]) / (len(came) - 1) for _, came in found])
            ttft_ms = np.array([1000.0 * (came[0] - begun) for begun, came in found])
            gaps_ms = 1000.0 * np.concatenate([np.diff(came) for _, came in found])
            all_there = max(came[0] for _, came in found), min(came[-1] for _, came in found)
            steady = sum(all_there[0] <= at <= all_there[1] for _, came in found for at in came)
            rate = steady / (all_there[1] - all_there[0])
            share_ms = np.percentile(tpot_ms - step_ms, [50, 99])
            print(
                f"step {step_ms:.2f} ms, TPOT beyond it p50 {share_ms[0]:.2f} p99 {share_ms[1]:.2f} ms, TTFT p50 "
                f"{np.median(ttft_ms):.0f} ms, gaps p50 {np.median(gaps_ms):.1f} p99 {np.percentile(gaps_ms, 99):.1f} "
                f"ms, {rate:.0f} tokens/s while all were there",
                flush=True,
            )


if __name__ == "__main__":
    main()
