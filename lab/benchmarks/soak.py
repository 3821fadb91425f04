"""Serve for long at a steady rate while processes die and hang and one client in ten is odd; count what is lost.

    python lab/benchmarks/soak.py [--minutes 60] [--rps 200] [--every-s 60] [--seed 0] [-o FILE.json]

A Ray of its own serves two models on four emulated gpu-lets, and one that generates on two, behind two gateways and
two dispatchers. Of 20 requests one is a stream of 20 tokens, two are calls of gRPC, and the others are HTTP. In each
interval one process (gpu-let, gateway or dispatcher, drawn from the seed) gets SIGKILL and another SIGSTOP. When the
peers of a stopped process do not kill it within a while, it is killed here, and that counts as a fault. Nothing more is
struck before another process serves in its place. Requests leave on schedule (Poisson), each on a connection of its
own; one in ten is a case of fuzz_door.py instead.

A request is late when it was answered after its SLO, or with 504 because it could not be executed by then: the machine
was too busy. A request that got neither that nor a 200 is lost, and so is a stream that is not whole. A loss is `held`
by an incident when the request was sent before that process had ended and was not answered when the process was struck;
otherwise it is `otherwise`. `after` counts, for an incident, requests that were sent before another process had taken
the place. Only held requests may be lost. The last line is the verdict. The exit code is 0 when only these were lost, 1
when others were, and 2 when the run had to be ended by force.

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
import struct
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
from jh2.hpack import Decoder

from tenuto.deployments.control.operations import begin
from tenuto.deployments.entry.protocols.grpc_messages import SERVICE, InferRequest
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.deployments.serve.states import serve_client
from tenuto.deployments.serve.user_config import Entrance
from tenuto.documents import write_whole
from tenuto.placement import Plan
from tenuto.profiles.generation import StepCost

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.instruments import http2_frames as http2

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
_ODD = ("framing", "noise", "body", "tensor", "binary", "left stream")  # "generation" may ask for all memory
_BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}).encode()
_STREAM = json.dumps({"model": "w", "prompt": [1, 2, 3], "max_tokens": 20, "stream": True}).encode()


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
    """Return two models and one that generates, each on two emulated gpu-lets, so that no death takes a model with
    it."""
    latency = {"alpha_ms": 2.0, "beta_ms": 8.0}
    hosted = {"n0/0/a": "m", "n0/1/a": "n", "n0/2/a": "m", "n0/3/a": "n"}  # what fuzz_door.py asks for
    tensors = {
        "inputs": [{"name": "x", "dtype": "float32", "shape": [2]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [2]}],
    }
    steps = StepCost.line(5.0, 0.0, 0.0, 0.0, 0.0).model_dump(mode="json")
    lengths = {"prompt_tokens": 20, "output_tokens": 20, "max_sequences": 32, "max_batch_tokens": 512}
    writer = {"name": "w", "batch_size": 32, "kv_tokens": 1 << 16, "steps": steps}
    slo = {"ttft_ms": 1000.0 * _SLO_S, "tpot_ms": 1000.0}
    return Plan.from_data(
        {
            "policy": {"name": "soak"},
            "gpus": [{"id": f"n0/{index}", "type": "v100"} for index in range(6)],
            "gpulets": [
                {"id": name, "gpu": name[:4], "models": [{"name": model, "batch_size": 8, "latency": latency}]}
                for name, model in hosted.items()
            ]
            + [{"id": f"n0/{index}/a", "gpu": f"n0/{index}", "models": [writer]} for index in (4, 5)],
            "models": [
                {"name": model, "rate_rps": 100, "slo_ms": 1000.0 * _SLO_S, "latency": latency, "options": tensors}
                for model in ("m", "n")
            ]
            + [{"name": "w", "rate_rps": 10, "slo": slo, "generates": lengths, "options": {"tokenizer": "bytes"}}],
        }
    )


class Clients:
    """Sends until it is stopped, from a thread of its own."""

    def __init__(self, port: int, grpc_port: int, rps: float, seed: int) -> None:
        self.sent = 0
        self.under_way: set[Sent] = set()
        self.late: list[Sent] = []
        self.lost: list[Sent] = []
        self.odd: Counter[str] = Counter()
        self.odd_wrong: list[tuple[float, str]] = []
        self._port, self._grpc_port, self._rps, self._seed = port, grpc_port, rps, seed
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
        kind = "gRPC" if number % 10 == 9 else "stream" if number % 20 == 4 else "HTTP"
        mine.word = "broken"
        try:
            async with asyncio.timeout(_PATIENCE_S):
                if kind == "gRPC":
                    mine.word = await self._call(number)
                elif kind == "stream":
                    answer = await self._post("/v1/completions", _STREAM)
                    mine.word = _word(answer)
                    if mine.word == "200" and (b"data: [DONE]" not in answer or b'"error"' in answer):
                        mine.word = f"cut stream {answer[-200:]!r}"
                else:
                    mine.word = _word(await self._post(f"/v2/models/{'mn'[number % 2]}/infer", _BODY))
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
            mine.word = f"{kind}: {mine.word}"
            self.lost.append(mine)

    async def _post(self, path: str, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        try:
            return await reader.read()
        finally:
            writer.close()

    async def _call(self, number: int) -> str:
        asked = InferRequest(model_name="mn"[number // 10 % 2], raw_input_contents=[struct.pack("<2f", 1.0, 2.0)])
        asked.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        data = asked.SerializeToString()
        said = {":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/ModelInfer", ":authority": "localhost"}
        said |= {"te": "trailers", "content-type": "application/grpc"}
        block = b"".join(http2.literal(name.encode(), value.encode()) for name, value in said.items())
        reader, writer = await asyncio.open_connection("127.0.0.1", self._grpc_port)
        writer.write(
            http2.PREFACE
            + http2.frame(http2.SETTINGS, 0, 0)
            + http2.frame(http2.HEADERS, 4, 1, block)
            + http2.frame(http2.DATA, 1, 1, b"\0" + len(data).to_bytes(4, "big") + data)
        )
        try:
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] in (http2.RST_STREAM, http2.GOAWAY):
                    return f"ended by a frame of type {head[3]} {payload!r}"
                if head[3] == http2.HEADERS and head[4] & 1:
                    end = {name: value for name, value, *_ in Decoder().decode(payload, True)}
                    status = end.get(b"grpc-status", b"").decode()
                    return {"0": "200", "4": "504 by gRPC"}.get(status, f"{end}")
        except asyncio.IncompleteReadError:
            return "broken"
        finally:
            writer.close()

    async def _ask_oddly(self, drawn: float, number: int) -> None:
        chance = random.Random(f"{self._seed} {number} {drawn}")
        kind = chance.choice(_ODD)
        sent_s = time.monotonic()
        try:
            case = Case(kind, KINDS[kind][1](chance), False, chance.randrange(1, 3000) if kind == "left stream" else 0)
            word, _ = await send(self._port, case, number)
        except OSError as error:
            word = f"!no connection ({error.strerror})"
        self.odd[word] += 1
        if word.startswith("!"):
            self.odd_wrong.append((sent_s, word))


def _word(answer: bytes) -> str:
    if not answer:
        return "broken"
    status, said = answer.decode().split(maxsplit=2)[1], answer.decode().rpartition("\r\n")[2]
    return status if status == "200" else f"{status} {said[:200]}"


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
    if until(lambda: len(_serving() - {pid} & {*pids_of(KINDS_OF_PROCESS[kind])}) >= len(before), _BACK_S) < _BACK_S:
        incident.back_s = time.monotonic()
    else:
        incident.was_replaced = False
    return incident


def _serving() -> set[int]:
    """Return the processes of replicas that Serve says have started."""
    applications = serve_client().get_serve_details()["applications"].values()
    deployments = [each for application in applications for each in application["deployments"].values()]
    return {replica["pid"] for each in deployments for replica in each["replicas"] if replica["state"] == "RUNNING"}


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
    port, grpc_port = unused_port(), unused_port()
    incidents: list[Incident] = []
    with Launcher(progress=lambda text: print(text, file=sys.stderr)) as launcher:
        launcher.connect(num_gpus=6, address="local")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has set its own
        deployment = Deployment(
            plan=make_plan(),
            port=port,
            grpc_port=grpc_port,
            executor="emulated",
            gateways=2,
            dispatchers=2,
            access=Entrance(host_names=("x",)),  # what the cases of fuzz_door.py call it
        )
        begin(launcher, deployment, "a run", "the laboratory")
        with Clients(port, grpc_port, args.rps, args.seed) as clients:
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
