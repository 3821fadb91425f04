"""One process of a system without Ray, for tests that stop, kill and cut off processes: a gpu-let, a dispatcher or a
gateway that asks. They find each other through a folder, where each writes its endpoint.

    python -m tests.instruments.fault_process KIND NAME FOLDER HOST

HOST: an address to listen on, or "" for this machine alone; of a gateway the number of its first request. Every request
that is asked, given to a gpu-let, begun there or answered is a line in a file of the folder.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.dispatcher_process import BundleServer
from tenuto.deployments.dispatch.leadership import Leadership
from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service.dispatching import ask
from tenuto.deployments.gpulet import replica as replica_module
from tenuto.deployments.gpulet.executors.emulated import EmulatedExecutor
from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.wire.messages import DispatcherState, GpuletState, Message, RunBatch
from tenuto.deployments.wire.peer import Connection, Endpoint, Finder, PeerConnection
from tenuto.deployments.wire.tensors import Buffer, InputPart
from tenuto.placement import Plan
from tenuto.profiles.networks.inputs import Arrays, Blocks

__all__ = ["DISPATCHERS", "GPULETS", "MODEL", "make_plan"]

MODEL = "m"
GPULETS = ("a", "b")
DISPATCHERS = ("x", "y")
GAP_S = 0.03  # between two requests of a gateway
SLO_MS = 20_000.0  # what a dispatcher holds that was stopped is not over when it goes on


def make_plan() -> Plan:
    """One model on two emulated gpu-lets; a batch takes so long that there is always one under way."""
    latency = {"alpha_ms": 5.0, "beta_ms": 60.0}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": name, "type": "v100"} for name in GPULETS],
            "gpulets": [
                {"id": name, "gpu": name, "models": [{"name": MODEL, "batch_size": 8, "latency": latency}]}
                for name in GPULETS
            ],
            "models": [{"name": MODEL, "rate_rps": 60, "slo_ms": SLO_MS, "latency": latency}],
        }
    )


class Lines:
    """A file that only grows, one line at a time."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, *words: Any) -> None:
        """Add these and the time, on the monotonic clock."""
        os.write(self._file, (" ".join(map(str, (*words, time.monotonic()))) + "\n").encode())


class Counting(EmulatedExecutor):
    """Notes the requests of every batch that begins, by the number that each carries as its input."""

    def __init__(self, begun: Lines, name: str) -> None:
        super().__init__("v100")
        self._begun, self._name = begun, name

    def run(
        self, program: str, inputs: Mapping[str, Blocks], rows: Mapping[str, int]
    ) -> tuple[dict[str, list[Arrays]], float]:
        for number in np.concatenate(inputs[MODEL]["INPUT0"]).ravel():
            self._begun.add(int(number), self._name)
        return super().run(program, inputs, rows)


class Giving(PeerConnection[GpuletState]):
    """A dispatcher's connection to a gpu-let, which notes the requests of every batch that is sent."""

    given: Lines

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        for buffer in buffers if isinstance(message, RunBatch) else ():
            self.given.add(int(np.frombuffer(buffer, np.float32)[0]), self.peer)
        super().send(message, buffers)


def announce(folder: Path, name: str, endpoint: Endpoint) -> None:
    """Say where a process listens."""
    written = folder / f"{name}.{os.getpid()}"
    written.write_text(json.dumps([endpoint.address, endpoint.token, endpoint.certificate]))
    written.rename(folder / f"{name}.json")


def finder(folder: Path, *names: str) -> Finder:
    """Return what finds one of these processes, another one each time, as Serve's handles do."""
    turns = itertools.cycle(names)

    async def find() -> Endpoint:
        address, token, certificate = json.loads((folder / f"{next(turns)}.json").read_text())
        return Endpoint(address if isinstance(address, str) else tuple(address), token, certificate)

    return find


async def gpulet(name: str, folder: Path, host: str) -> None:
    """Run batches until the end of the process."""
    begun = Lines(folder / "begun")
    replica_module.make_executor = lambda _spec: Counting(begun, name)  # type: ignore[assignment]
    gpulets = Deployment(plan=make_plan(), executor="emulated").config().gpulets
    (application,) = (each for each in gpulets if each.spec is not None and each.spec.gpulet == name)
    replica = await LocalReplica.start(application.spec, application.user_config)
    replica_module.own_address_for = lambda _node_id: host
    announce(folder, name, await replica.endpoint())
    await asyncio.Event().wait()


async def dispatcher(name: str, folder: Path, host: str) -> None:
    """Schedule until the end of the process."""

    def eager(plan: Plan, network: NetworkDelay) -> Scheduler:
        return make_scheduler("eager", from_plan(plan, network), {})

    Giving.given = Lines(folder / "given")
    leadership = Leadership("0", lambda: server.step_back())
    made = Dispatcher(
        eager,
        lambda gpulet_id: finder(folder, gpulet_id),
        on_change=lambda: server.announce(),
        leadership=leadership,
        make_connection=lambda gpulet_id, find, events: Giving(GpuletState, gpulet_id, find, events),
    )
    server = BundleServer(made, leadership)
    endpoint = await server.listen(host)
    made.apply(make_plan())
    announce(folder, name, endpoint)
    await asyncio.Event().wait()


DispatcherConnection = Connection[DispatcherState]


class Seeing(DispatcherClient):
    """Says who schedules."""

    def __init__(self, find_dispatcher: Callable[[str], Finder]) -> None:
        super().__init__(find_dispatcher)
        self._seen: dict[int, DispatcherConnection] = {}

    def state_changed(self, connection: DispatcherConnection) -> None:
        self._seen[id(connection)] = connection
        super().state_changed(connection)

    def scheduling_pid(self) -> int:
        """Return the process of the most senior dispatcher that is there; 0 for none."""
        there = [each.state for each in self._seen.values() if each.is_up and each.state is not None]
        return min(there, key=DispatcherState.seniority).pid if there else 0


async def gateway(name: str, folder: Path, first: str) -> None:
    """Ask on and on, whatever comes of it; when the input ends wait for the last answers."""
    lines = Lines(folder / f"asked-{name}-{os.getpid()}")
    client = Seeing(lambda _name: finder(folder, *DISPATCHERS))
    await client.apply(make_plan(), {"0": [MODEL]}, dispatchers=len(DISPATCHERS))
    numbers = itertools.count(int(first))
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    waiting: set[asyncio.Future[Any]] = set()
    while not ended.done():
        number = next(numbers)
        lines.add("asked", number)
        future = ask(client, MODEL, [InputPart(np.array([number], np.float32).tobytes())])
        waiting.add(future)

        def answered(done: asyncio.Future[Any], number: int = number) -> None:
            waiting.discard(done)
            lines.add("ended", number, done.result().outcome.word)

        future.add_done_callback(answered)
        lines.add("sees", client.connected()["0"], sum(each.up for each in client.gpulets()), client.scheduling_pid())
        await asyncio.sleep(GAP_S)
    await asyncio.gather(*waiting)
    await client.close()


KINDS = {"gpulet": gpulet, "dispatcher": dispatcher, "gateway": gateway}

if __name__ == "__main__":
    asyncio.run(KINDS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), sys.argv[4]))
