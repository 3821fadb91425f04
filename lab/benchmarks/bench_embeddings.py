"""Short texts a second through /v1/embeddings, with an emulated model: one text a request, and 32.

Open loop at even gaps from one client, which shares the machine with the server; the scheduler is the default one.
Emulated vectors are zeros, which JSON writes faster than others: what 32 vectors of random numbers take is said beside.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import orjson
from serving import heading

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher
from tenuto.loadgen.sender import Reply
from tenuto.loadgen.senders.http_sender import HttpSender, post_bytes
from tenuto.placement import Plan

PORT = 8794
SLO_MS = 200.0
_WORDS = ("note", "score", "rest", "bar", "tone", "held", "long", "short", "high", "low", "soft", "loud", "plays")


def plan_of(folder: str) -> Plan:
    """Return a plan of one sentence encoder on two emulated GPUs, which carry 15,000 texts a second."""
    latency = {"alpha_ms": 0.1, "beta_ms": 1.0}
    replica = {"name": "encoder", "batch_size": 32, "latency": latency, "latency_ms": 4.2}
    model = {"name": "encoder", "source": folder, "rate_rps": 3000.0, "slo_ms": SLO_MS}
    return Plan.from_data(
        {
            "policy": {"name": "benchmark"},
            "gpus": [{"id": f"n0/{i}", "type": "v100"} for i in range(2)],
            "gpulets": [{"id": f"n0/{i}/a", "gpu": f"n0/{i}", "models": [replica]} for i in range(2)],
            "models": [{**model, "latency": latency}],
        }
    )


def bodies(texts: int, form: str) -> list[bytes]:
    """Return requests of so many texts of 3 to 12 words."""
    drawn = random.Random(7)
    made = []
    for _ in range(64):
        given = [" ".join(drawn.choices(_WORDS, k=drawn.randint(3, 12))) for _ in range(texts)]
        made.append(orjson.dumps({"model": "encoder", "input": given, "encoding_format": form}))
    return made


def open_loop(url: str, texts: int, form: str, rate: float, seconds: float) -> tuple[float, float, float, float]:
    """Return texts answered in time a second, their share of those sent, and p50 and p99 latency in ms."""

    async def run() -> tuple[float, float, float, float]:
        host = urlsplit(url).netloc
        headers = {"Content-Type": "application/json"}
        requests = itertools.cycle([post_bytes("/v1/embeddings", body, headers, host) for body in bodies(texts, form)])
        sender, due, latencies = HttpSender(url), list[float](), dict[int, float]()
        free, late = list(range(256)), 0
        serving: dict[int, int] = {}

        def answered(connection: int, reply: Reply) -> None:
            number = serving.pop(connection)
            free.append(connection)
            if reply.status == 200:
                latencies[number] = (time.perf_counter() - due[number]) * 1000.0

        await sender.open(len(free), answered)
        start = time.perf_counter()
        for number in range(round(rate * seconds / texts)):
            due.append(start + number * texts / rate)
            wait_s = due[number] - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif number % 16 == 0:
                await asyncio.sleep(0)
            if not free:
                late += 1
                continue
            connection = free.pop()
            serving[connection] = number
            sender.send_bytes(next(requests), connection)
        elapsed = time.perf_counter() - start
        await asyncio.sleep(2 * SLO_MS / 1000.0)
        sender.close()
        found = np.array(list(latencies.values()))
        in_time = int((found <= SLO_MS).sum())
        return in_time * texts / elapsed, in_time / len(due), *np.percentile(found, [50, 99]).tolist()

    return asyncio.run(run())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a folder of a sentence encoder, whose files and tokenizer are used")
    parser.add_argument("--rates", type=float, nargs="+", default=[3000.0], help="texts a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    heading("/v1/embeddings, emulated encoder, l(b) = 0.1 b + 1 ms, SLO 200 ms, texts of 3 to 12 words")
    plan = plan_of(str(Path(asked.folder).resolve()))
    print(f"{'':34s} {'texts/s':>8s} {'in time':>8s} {'p50 ms':>8s} {'p99 ms':>8s}")
    with Launcher() as launcher:
        launcher.connect(num_gpus=2, address="local")
        end_all()
        begin(launcher, Deployment(plan=plan, port=PORT), "a run", "the laboratory")
        open_loop(launcher.base_url, 8, "float", 800.0, 2.0)
        for rate in asked.rates:
            for texts in (1, 32):
                for form in ("float", "base64"):
                    row = open_loop(launcher.base_url, texts, form, rate, asked.seconds)
                    print(f"{rate:5.0f}/s, {texts:2d} a request, {form:8s}   {row[0]:8.0f} {row[1]:8.1%}", end="")
                    print(f" {row[2]:8.2f} {row[3]:8.2f}", flush=True)
        end_all()
    vectors = [{"embedding": each} for each in np.random.default_rng(0).standard_normal((32, 384), dtype=np.float32)]
    start = time.perf_counter()
    for _ in range(100):
        orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY)
    print(f"\nJSON of 32 random vectors of 384 numbers: {(time.perf_counter() - start) * 10.0:.2f} ms")


if __name__ == "__main__":
    main()
