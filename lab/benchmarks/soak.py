"""Serve for long at a steady rate while processes die and hang and one client in ten is odd; count what is lost.

    python lab/benchmarks/soak.py [--minutes 60] [--rps 200] [--every-s 60] [--seed 0] [-o FILE.json]

A Ray of its own serves two models on four emulated gpu-lets behind two gateways and two dispatchers. In each interval
one process (gpu-let, gateway or dispatcher, drawn from the seed) gets SIGKILL and another SIGSTOP; a stopped one that
was not replaced within a while is killed here and counted. Requests leave on schedule (Poisson), each on a connection
of its own; one in ten is a case of fuzz_door.py instead.

A request is lost when its answer is not 200. Each loss is laid to an incident: `in_flight` when it had been sent and
was not answered at that moment, `noticing` when it was sent in the 1.5 s after, `after` when it was sent later, before
the process was back; `outside` belongs to none. The exit code is 1 where anything is lost but what was in flight, and,
of a hang, what came while it was noticed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_operating import pids_of, until
from fuzz_door import KINDS, Case, send

from tenuto.deployments.serve.config import serve_config
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.placement import Plan

KINDS_OF_PROCESS = {
    "gpu-let": "ServeReplica:gpulet-",
    "gateway": "ServeReplica:tenuto:gateway",
    "dispatcher": "ServeReplica:dispatcher-",
}
_NOTICED_S = 1.5
_BACK_S = 45.0  # a stopped process that is still there then was not replaced
_PATIENCE_S = 15.0
_ODD = ("framing", "noise", "body", "tensor", "binary")
_BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}).encode()


@dataclass
class Incident:
    """What was done to one process, when, and what it cost."""

    what: str
    kind: str
    pid: int
    at_s: float
    under_way: int  # good requests that were sent and not answered
    back_s: float | None = None  # until another process had taken its place
    was_replaced: bool = True
    in_flight: int = 0
    noticing: int = 0
    after: int = 0
    words: dict[str, int] = field(default_factory=dict)


@dataclass
class Sent:
    """One good request."""

    sent_s: float
    ended_s: float = float("inf")
    word: str = ""


def make_plan() -> Plan:
    """Return two models, each on two of four emulated gpu-lets, so that no death takes a model with it."""
    latency = {"alpha_ms": 2.0, "beta_ms": 8.0}
    hosted = {"n0/0/a": "m", "n0/1/a": "n", "n0/2/a": "m", "n0/3/a": "n"}  # what fuzz_door.py asks for
    tensors = {
        "inputs": [{"name": "x", "dtype": "float32", "shape": [2]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [2]}],
    }
    return Plan.from_data(
        {
            "policy": {"name": "soak"},
            "gpus": [{"id": f"n0/{index}", "type": "v100"} for index in range(4)],
            "gpulets": [
                {"id": name, "gpu": name[:4], "models": [{"name": model, "batch_size": 8, "latency": latency}]}
                for name, model in hosted.items()
            ],
            "models": [
                {"name": model, "rate_rps": 100, "slo_ms": 3000, "latency": latency, "options": tensors}
                for model in ("m", "n")
            ],
        }
    )


class Clients:
    """Sends until it is stopped, from a thread of its own."""

    def __init__(self, port: int, rps: float, seed: int) -> None:
        self.good: list[Sent] = []
        self.odd: Counter[str] = Counter()
        self.odd_wrong: list[tuple[float, str]] = []
        self._port, self._rps, self._seed = port, rps, seed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        chance, tasks = random.Random(self._seed), set[asyncio.Task[None]]()
        at_s, number = time.monotonic(), 0
        while not self._stop.is_set():
            at_s += chance.expovariate(self._rps)
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            asked = self._ask_oddly(chance.random(), number) if chance.random() < 0.1 else self._ask(number)
            task = asyncio.create_task(asked)
            number += 1
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=60.0)

    async def _ask(self, number: int) -> None:
        mine = Sent(time.monotonic())
        self.good.append(mine)
        word = "broken"
        try:
            async with asyncio.timeout(_PATIENCE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                head = f"POST /v2/models/{'mn'[number % 2]}/infer HTTP/1.1\r\nHost: x\r\n"
                writer.write(f"{head}Content-Length: {len(_BODY)}\r\nConnection: close\r\n\r\n".encode() + _BODY)
                status = (await reader.readline()).split()
                word = status[1].decode() if len(status) > 1 else "broken"
                writer.close()
        except ConnectionRefusedError:
            word = "refused"
        except TimeoutError:
            word = "no answer"
        except OSError:
            pass
        mine.ended_s, mine.word = time.monotonic(), word

    async def _ask_oddly(self, drawn: float, number: int) -> None:
        chance = random.Random(f"{self._seed} {number} {drawn}")
        kind = chance.choice(_ODD)
        sent_s = time.monotonic()
        try:
            word, _ = await send(self._port, Case(kind, KINDS[kind][1](chance), is_whole=False), number)
        except OSError as error:
            word = f"!no connection ({error.strerror})"
        self.odd[word] += 1
        if word.startswith("!"):
            self.odd_wrong.append((sent_s, word))


def strike(what: str, kind: str, chance: random.Random, clients: Clients) -> Incident:
    """Kill or stop one process of a kind, and wait until another has taken its place."""
    before = pids_of(KINDS_OF_PROCESS[kind])
    pid = chance.choice(before)
    now = time.monotonic()
    under_way = sum(1 for each in clients.good[-2000:] if each.ended_s == float("inf"))
    incident = Incident(what, kind, pid, now, under_way)
    os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def is_back() -> bool:
        alive = pids_of(KINDS_OF_PROCESS[kind])
        return pid not in alive and len(alive) >= len(before)

    took_s = until(is_back, _BACK_S)
    if took_s < _BACK_S:
        incident.back_s = round(took_s, 1)
    else:
        incident.was_replaced = False
        if pid in pids_of(KINDS_OF_PROCESS[kind]):
            os.kill(pid, signal.SIGKILL)
        until(is_back, _BACK_S)
    return incident


def lay_to_incidents(incidents: list[Incident], lost: list[Sent]) -> list[Sent]:
    """Count every lost request with its incident, and return those that belong to none."""
    outside = []
    for each in lost:
        for incident in incidents:
            lasted_s = (incident.back_s or 2 * _BACK_S) + _NOTICED_S
            if each.sent_s <= incident.at_s < each.ended_s:
                incident.in_flight += 1
            elif 0.0 < each.sent_s - incident.at_s <= _NOTICED_S:
                incident.noticing += 1
            elif _NOTICED_S < each.sent_s - incident.at_s <= lasted_s:
                incident.after += 1
            else:
                continue
            incident.words[each.word] = incident.words.get(each.word, 0) + 1
            break
        else:
            outside.append(each)
    return outside


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Serve, strike, count."""
    chance = random.Random(args.seed)
    port = unused_port()
    incidents: list[Incident] = []
    with Launcher(progress=lambda text: print(text, file=sys.stderr)) as launcher:
        launcher.connect(num_gpus=4, address="local")
        launcher.apply(serve_config(make_plan(), port=port, executor="emulated", gateways=2, dispatchers=2))
        with Clients(port, args.rps, args.seed) as clients:
            time.sleep(5.0)
            began_s = time.monotonic()
            interval = 0
            while time.monotonic() - began_s < 60.0 * args.minutes:
                for part, what in enumerate(("kill", "hang")):
                    due_s = began_s + args.every_s * (interval + (part + chance.uniform(0.1, 0.4)) / 2.0)
                    time.sleep(max(0.0, due_s - time.monotonic()))
                    incidents.append(strike(what, chance.choice(list(KINDS_OF_PROCESS)), chance, clients))
                    print(incidents[-1], file=sys.stderr, flush=True)
                interval += 1
            time.sleep(max(5.0, args.every_s / 4))
        lost = [each for each in clients.good if each.word != "200"]
        outside = lay_to_incidents(incidents, lost)
        seconds = time.monotonic() - began_s
    windows = [(i.at_s - _PATIENCE_S, i.at_s + (i.back_s or 2 * _BACK_S) + _NOTICED_S) for i in incidents]
    odd_wrong = Counter(w for at, w in clients.odd_wrong if not any(begin <= at <= end for begin, end in windows))
    return {
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "sent": len(clients.good),
        "lost": len(lost),
        "lost_words": dict(Counter(each.word for each in lost)),
        "lost_outside": [(round(each.sent_s - began_s, 1), each.word) for each in outside][:50],
        "lost_outside_count": len(outside),
        "odd": dict(clients.odd),
        "odd_wrong_outside": dict(odd_wrong),
        "incidents": [{**asdict(each), "at_s": round(each.at_s - began_s, 1)} for each in incidents],
    }


def main() -> None:
    """Soak, print the result, and end with 1 where more is lost than may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rps", type=float, default=200.0)
    parser.add_argument("--every-s", type=float, default=60.0, help="one kill and one hang in each such interval")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result there as well")
    args = parser.parse_args()
    result = soak(args)
    faults = [f"{result['lost_outside_count']} requests were lost without an incident"] * bool(result["lost_outside"])
    for each in result["incidents"]:
        beyond = each["after"] + (each["noticing"] if each["what"] == "kill" else 0)
        shown = f"the {each['what']} of a {each['kind']} at {each['at_s']} s"
        faults += [f"{shown} cost {beyond} requests that were not in flight"] * bool(beyond)
        faults += [f"{shown}: it was not replaced within {_BACK_S:.0f} s"] * (not each["was_replaced"])
    faults += [f"odd clients: {result['odd_wrong_outside']}"] * bool(result["odd_wrong_outside"])
    result["faults"] = faults
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
