"""Requests per second over gRPC beside HTTP, in one run: a model of no latency behind one gateway, asked by closed
loops of another process; and beside both the plainest `grpc.aio` server, which answers with a constant. With `--triton`
NVIDIA Triton over gRPC too, with the same model in its Python backend.

The processor time is that of the process that serves. Python's gRPC takes most of it, with or without what is behind.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import uvloop
from serving import closed_loop, heading, synthetic_plan
from triton_rival import WHEEL, installed, triton

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.entry.grpc_messages import InferRequest, InferResponse
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port

METHOD = "/inference.GRPCInferenceService/ModelInfer"
TICKS_PER_S = 100.0


def request() -> bytes:
    """Return the message that is sent: what the closed loop over HTTP sends as JSON."""
    asked = InferRequest(model_name="synthetic", raw_input_contents=[bytes(4)])
    asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    return asked.SerializeToString()


async def ask(port: int, loops: int, seconds: float) -> float:
    """Return requests per second of loops that ask again as soon as they are answered, over four connections."""
    data, done = request(), 0
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(4)]
    calls = [channel.unary_unary(METHOD) for channel in channels]
    end = time.perf_counter() + seconds

    async def loop(index: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await calls[index % len(calls)](data, timeout=10.0)
            done += 1

    await asyncio.gather(*map(loop, range(loops)))
    for channel in channels:
        await channel.close()
    return done / seconds


async def serve_plainly() -> None:
    """Serve a constant, and print the port."""
    answer = InferResponse(model_name="synthetic").SerializeToString()

    async def infer(_data: bytes, _context: object) -> bytes:
        return answer

    server = grpc.aio.server()
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(METHOD.split("/")[1], handlers)])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def gateway_pid() -> int:
    """Return the process of the one gateway."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"ServeReplica:tenuto:gateway" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    raise SystemExit("no gateway runs")


def measured(name: str, pid: int, asked: Callable[[], float], seconds: float) -> None:
    """Print what came of a closed loop."""
    before = cpu_s(pid)
    rate = asked()
    print(
        f"{name:42s} {rate:8.0f} requests/s {1e6 * (cpu_s(pid) - before) / (rate * seconds):8.0f} us each", flush=True
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each loop")
    parser.add_argument("--loops", type=int, default=64)
    parser.add_argument("--ask", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--triton", nargs="?", const=WHEEL, metavar="WHEEL", help="what pip installs it from")
    given = parser.parse_args()
    if given.ask:
        print(uvloop.run(ask(given.ask, given.loops, given.seconds)))
        return
    if given.plain:
        uvloop.run(serve_plainly())
        return
    heading(f"gRPC beside HTTP, emulated model of zero latency, {given.loops} loops of {given.seconds:g} s")
    this = [sys.executable, __file__, "--loops", str(given.loops), "--seconds", str(given.seconds)]

    def http_rate() -> float:
        return closed_loop(launcher.base_url, given.loops, given.seconds)[0]

    def grpc_rate(port: int) -> float:
        return float(subprocess.run([*this, "--ask", str(port)], stdout=subprocess.PIPE, text=True, check=True).stdout)

    with Launcher() as launcher:
        launcher.connect(num_gpus=2, address="local")
        end_all()
        plan = synthetic_plan(0.001, 0.0, 1000.0, 2000.0, 2, 8)
        port, grpc_port = unused_port(), unused_port()
        deployment = Deployment(plan=plan, port=port, grpc_port=grpc_port, gateways=1)
        begin(launcher, deployment, "a run", "the laboratory")
        pid = gateway_pid()
        closed_loop(launcher.base_url, 16, 1.0)
        for _ in range(2):
            measured("Tenuto, gRPC", pid, lambda: grpc_rate(grpc_port), given.seconds)
            measured(
                "Tenuto, HTTP",
                pid,
                lambda: closed_loop(launcher.base_url, given.loops, given.seconds)[0],
                given.seconds,
            )
        plain = subprocess.Popen([*this, "--plain"], stdout=subprocess.PIPE, text=True)
        try:
            assert plain.stdout is not None
            plain_port = int(plain.stdout.readline())
            for _ in range(2):
                measured("plainest grpc.aio server", plain.pid, lambda: grpc_rate(plain_port), given.seconds)
        finally:
            plain.kill()
    rival = installed(given.triton) if given.triton else None
    if rival is not None:
        port, grpc_port = unused_port(), unused_port()
        model = {"instances": 2, "alpha_ms": 0.001, "beta_ms": 0.0, "slo_ms": 2000.0}
        with triton(rival, port, grpc_port=grpc_port, **model) as pid:
            grpc_rate(grpc_port)
            for _ in range(2):
                measured("Triton, gRPC", pid, lambda: grpc_rate(grpc_port), given.seconds)


if __name__ == "__main__":
    main()
