"""Serve for long at a steady rate while processes die and hang and one client in ten is odd; count what is lost.

    python lab/benchmarks/soak.py [--minutes 60] [--rps 200] [--every-s 60] [--seed 0] [-o FILE.json]

A Ray of its own serves two models on four emulated gpu-lets behind two gateways and two dispatchers. In each interval
one process (gpu-let, gateway or dispatcher, drawn from the seed) gets SIGKILL and another SIGSTOP; a stopped one whose
peers do not make an end of it within a while is killed here, which is a fault. Requests leave on schedule (Poisson),
each on a connection of its own; one in ten is a case of fuzz_door.py instead.

A request that was answered after its SLO, or with 504 because it could not be executed by then, is late: the machine
was too busy. One that was not answered with 200 otherwise is lost. A loss is `held` by an incident when the request was
sent before that process had ended and was not answered when it was struck, else it is `otherwise`; `after` counts with
an incident what was sent before another process had taken its place. Only what was held may be lost. The last line is
the verdict. The exit code is 0 where it holds, 1 where it does not, 2 where the run had to be ended by force.

It ends by itself ten minutes after its time at the latest; SIGINT and SIGTERM end it early, with the verdict so far.
The result is written anew after each interval.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_operating import pids_of, until
from fuzz_door import KINDS, Case, send

from tenuto.deployments.control.operations import begin
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.deployments.serve.user_config import Entrance
from tenuto.documents import write_whole
from tenuto.placement import Plan

KINDS_OF_PROCESS = {
    "gpu-let": "ServeReplica:gpulet-",
    "gateway": "ServeReplica:tenuto:gateway",
    "dispatcher": "ServeReplica:dispatcher-",
}
_BACK_S = 45.0  # a stopped process that is still there then was not replaced
_PATIENCE_S = 15.0
_SLO_S = 3.0
_OVERTIME_S = 600.0  # to start, to strike last and to end
_SHOWN = 500
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
    ended_s: float  # when the process was gone
    back_s: float = float("inf")  # when another had taken its place
    was_replaced: bool = True
    held: int = 0
    after: int = 0

    def told(self, began_s: float) -> dict[str, Any]:
        """Return it with its times since the beginning, those of what followed since the strike."""
        return {
            **asdict(self),
            "at_s": round(self.at_s - began_s, 1),
            "ended_s": round(self.ended_s - self.at_s, 2),
            "back_s": round(self.back_s - self.at_s, 1),
        }


@dataclass(slots=True, eq=False)
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
                {"name": model, "rate_rps": 100, "slo_ms": 1000.0 * _SLO_S, "latency": latency, "options": tensors}
                for model in ("m", "n")
            ],
        }
    )


class Clients:
    """Sends until it is stopped, from a thread of its own."""

    def __init__(self, port: int, rps: float, seed: int) -> None:
        self.sent = 0
        self.under_way: set[Sent] = set()
        self.late: list[Sent] = []
        self.lost: list[Sent] = []
        self.odd: Counter[str] = Counter()
        self.odd_wrong: list[tuple[float, str]] = []
        self._port, self._rps, self._seed = port, rps, seed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join(4 * _PATIENCE_S)

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
            await asyncio.wait(tasks, timeout=2 * _PATIENCE_S)

    async def _ask(self, number: int) -> None:
        mine = Sent(time.monotonic())
        self.sent += 1
        self.under_way.add(mine)
        mine.word = "broken"
        try:
            async with asyncio.timeout(_PATIENCE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                head = f"POST /v2/models/{'mn'[number % 2]}/infer HTTP/1.1\r\nHost: localhost\r\n"
                writer.write(f"{head}Content-Length: {len(_BODY)}\r\nConnection: close\r\n\r\n".encode() + _BODY)
                answer = (await reader.read()).decode()
                writer.close()
            if answer:
                status, said = answer.split()[1], answer.rpartition("\r\n")[2]
                mine.word = status if status == "200" else f"{status} {said[:200]}"
        except ConnectionRefusedError:
            mine.word = "refused"
        except TimeoutError:
            mine.word = "no answer"
        except OSError:
            pass
        mine.ended_s = time.monotonic()
        self.under_way.discard(mine)
        if mine.word.startswith("504") or (mine.word == "200" and mine.ended_s - mine.sent_s > _SLO_S):
            self.late.append(mine)
        elif mine.word != "200":
            self.lost.append(mine)

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
    if not before:
        raise RuntimeError(f"no {kind} runs any more")
    pid = chance.choice(before)
    process, gone = os.pidfd_open(pid), select.poll()
    gone.register(process, select.POLLIN)
    incident = Incident(what, kind, pid, time.monotonic(), len(clients.under_way), float("inf"))
    signal.pidfd_send_signal(process, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    if not gone.poll(1000.0 * _BACK_S):
        incident.was_replaced = False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        gone.poll(1000.0 * _BACK_S)
    incident.ended_s = time.monotonic()
    os.close(process)
    if until(lambda: len(pids_of(KINDS_OF_PROCESS[kind])) >= len(before), _BACK_S) < _BACK_S:
        incident.back_s = time.monotonic()
    else:
        incident.was_replaced = False
    return incident


def lay_to_incidents(incidents: list[Incident], lost: list[Sent]) -> list[Sent]:
    """Count every lost request with its incident, and return those that were lost otherwise."""
    otherwise = []
    for incident in incidents:
        incident.held = incident.after = 0
    for each in lost:
        for incident in incidents:
            if each.sent_s <= incident.ended_s and each.ended_s >= incident.at_s:
                incident.held += 1
                break
        else:
            otherwise.append(each)
            for incident in incidents:
                incident.after += incident.at_s < each.sent_s <= incident.back_s
    return otherwise


def result_of(args: argparse.Namespace, clients: Clients, incidents: list[Incident], began_s: float) -> dict[str, Any]:
    """Return what was counted so far, with every request that was lost otherwise and why the run is not good."""
    lost = list(clients.lost)
    otherwise = lay_to_incidents(incidents, lost)
    windows = [(i.at_s - _PATIENCE_S, i.back_s + _PATIENCE_S) for i in incidents]
    odd_wrong = Counter(w for at, w in clients.odd_wrong if not any(begin <= at <= end for begin, end in windows))
    told = [incident.told(began_s) for incident in incidents]
    faults = [f"{len(otherwise)} requests were lost that no process held that was struck"] * bool(otherwise)
    faults += [
        f"after the {each['what']} of a {each['kind']} at {each['at_s']} s another was not there within {_BACK_S:.0f} s"
        for each in told
        if not each["was_replaced"]
    ]
    faults += [f"odd clients: {dict(odd_wrong)}"] * bool(odd_wrong)
    return {
        "arguments": vars(args),
        "seconds": round(time.monotonic() - began_s, 1),
        "sent": clients.sent,
        "late": len(clients.late),
        "lost": len(lost),
        "held_by_what_was_struck": len(lost) - len(otherwise),
        "otherwise": len(otherwise),
        "lost_requests": [
            {
                "sent_s": round(each.sent_s - began_s, 3),
                "after_s": round(each.ended_s - each.sent_s, 3),
                "word": each.word,
            }
            for each in [*otherwise, *(each for each in lost if each not in otherwise)][:_SHOWN]
        ],
        "late_words": dict(Counter(each.word for each in list(clients.late)).most_common(5)),
        "odd": dict(clients.odd),
        "incidents": told,
        "faults": faults,
    }


def soak(args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Serve, strike, count; `write` is given the result so far after each interval."""
    chance = random.Random(args.seed)
    port = unused_port()
    incidents: list[Incident] = []
    with Launcher(progress=lambda text: print(text, file=sys.stderr)) as launcher:
        launcher.connect(num_gpus=4, address="local")
        deployment = Deployment(
            plan=make_plan(),
            port=port,
            executor="emulated",
            gateways=2,
            dispatchers=2,
            access=Entrance(host_names=("x",)),  # what the cases of fuzz_door.py call it
        )
        begin(launcher, deployment, "a run", "the laboratory")
        with Clients(port, args.rps, args.seed) as clients:
            time.sleep(5.0)
            began_s = time.monotonic()
            with contextlib.suppress(KeyboardInterrupt):
                for interval in itertools.count():
                    if time.monotonic() - began_s >= 60.0 * args.minutes:
                        break
                    for part, what in enumerate(("kill", "hang")):
                        due_s = began_s + args.every_s * (interval + (part + chance.uniform(0.1, 0.4)) / 2.0)
                        time.sleep(max(0.0, due_s - time.monotonic()))
                        incidents.append(strike(what, chance.choice(list(KINDS_OF_PROCESS)), chance, clients))
                    made = result_of(args, clients, incidents, began_s)
                    write(made)
                    print(*made["incidents"][-2:], sep="\n", file=sys.stderr, flush=True)
                    time.sleep(max(0.0, began_s + args.every_s * (interval + 1) - time.monotonic()))
        made = result_of(args, clients, incidents, began_s)
        write(made)
        return made


def main() -> None:
    """Soak, print the result and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rps", type=float, default=200.0)
    parser.add_argument("--every-s", type=float, default=60.0, help="one kill and one hang in each such interval")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result there as well")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    overtime = threading.Timer(60.0 * args.minutes + _OVERTIME_S, _end_by_force)
    overtime.daemon = True
    overtime.start()

    def write(result: dict[str, Any]) -> None:
        if args.output:
            write_whole(Path(args.output), json.dumps(result, indent=1))

    result = soak(args, write)
    print(json.dumps(result, indent=1))
    print("\n".join(result["faults"]))
    print(
        f"{'NOT GOOD' if result['faults'] else 'GOOD'}: of {result['sent']} requests {result['lost']} were lost, "
        f"{result['held_by_what_was_struck']} of them held by a process that was struck and {result['otherwise']} "
        f"otherwise; {result['late']} were late; {len(result['incidents'])} processes were struck in "
        f"{result['seconds']:.0f} s"
    )
    raise SystemExit(bool(result["faults"]))


def _end_by_force() -> None:
    print("NOT GOOD: the run did not end by itself", flush=True)
    os._exit(2)  # Ray's processes end with the one that started them


if __name__ == "__main__":
    main()
