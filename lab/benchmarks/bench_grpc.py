"""Requests per second over gRPC beside HTTP, in one run: a model of no latency behind one gateway, asked by closed
loops of another process; and beside both the plainest `grpc.aio` server, which answers with a constant. With `--triton`
NVIDIA Triton over gRPC too, with the same model in its Python backend. The rounds of all of them alternate.

The processor time is that of the process that serves; the processes behind it (gpu-lets, Triton's Python backend) are
not in it. The client writes the frames of HTTP/2 by itself: with a client of gRPC's library, which takes more processor
time than any of these servers, the client would be what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grpc
import uvloop
from jh2.connection import Decoder, Encoder
from serving import closed_loop, heading, synthetic_plan
from triton_rival import WHEEL, installed, triton

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.entry.protocols.grpc_messages import InferRequest, InferResponse
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.instruments import http2_frames as http2

METHOD = "/inference.GRPCInferenceService/ModelInfer"
TICKS_PER_S = 100.0


def request() -> bytes:
    """Return the message that is sent: what the closed loop over HTTP sends as JSON."""
    asked = InferRequest(model_name="synthetic", raw_input_contents=[bytes(4)])
    asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    return asked.SerializeToString()


class Loops(asyncio.Protocol):
    """Calls on one connection, each made anew as soon as it is answered. Every answer is looked at."""

    SAID: ClassVar = [
        (b":method", b"POST", False),
        (b":scheme", b"http", False),
        (b":path", METHOD.encode(), False),
        (b":authority", b"127.0.0.1", False),
        (b"te", b"trailers", False),
        (b"content-type", b"application/grpc", False),
        (b"grpc-timeout", b"10S", False),
    ]

    def __init__(self, loops: int) -> None:
        data = request()
        self._message = b"\0" + len(data).to_bytes(4, "big") + data
        self._loops, self._next, self._came, self.done = loops, 1, b"", 0
        self._decoder, self._encoder = Decoder(), Encoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        wide = (2**31 - 1 - 65535).to_bytes(4, "big")
        transport.write(
            http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0) + http2.frame(http2.WINDOW_UPDATE, 0, 0, wide)
        )
        for _ in range(self._loops):
            self._call()

    def _call(self) -> None:
        number, self._next = self._next, self._next + 2
        block = self._encoder.encode(self.SAID)  # bytes for what is in the table, as clients do
        self._transport.write(
            http2.frame(http2.HEADERS, 4, number, block) + http2.frame(http2.DATA, 1, number, self._message)
        )

    def data_received(self, data: bytes) -> None:
        data, at = self._came + data, 0
        while len(data) - at >= 9:
            end = at + 9 + int.from_bytes(data[at : at + 3], "big")
            if end > len(data):
                break
            kind, flags, payload = data[at + 3], data[at + 4], data[at + 9 : end]
            at = end
            if kind in (http2.SETTINGS, http2.PING) and not flags & 1:
                self._transport.write(http2.frame(kind, 1, 0, payload if kind == http2.PING else b""))
            elif kind == http2.HEADERS:
                said = {name: value for name, value, *_ in self._decoder.decode(payload, True)}
                if flags & 1:
                    if said.get(b"grpc-status") != b"0":
                        raise SystemExit(f"refused: {said}")
                    self.done += 1
                    self._call()
            elif kind in (http2.RST_STREAM, http2.GOAWAY) and payload[-4:] != bytes(4):
                raise SystemExit(f"refused: {payload!r}")
        self._came = data[at:]


async def ask(port: int, loops: int, seconds: float) -> float:
    """Return requests per second of loops that ask again as soon as they are answered, over four connections."""
    made = [Loops(loops // 4) for _ in range(4)]
    for each in made:
        await asyncio.get_running_loop().create_connection(lambda each=each: each, "127.0.0.1", port)
    begun = time.perf_counter()
    await asyncio.sleep(seconds)
    return sum(each.done for each in made) / (time.perf_counter() - begun)


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


def pids(name: bytes) -> list[int]:
    """Return the processes of this name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def measured(name: str, front: int, behind: Sequence[int], asked: Callable[[], float], seconds: float) -> None:
    """Print what came of a closed loop."""
    before = [cpu_s(pid) for pid in (front, *behind)]
    rate = asked()
    spent = [1e6 * (cpu_s(pid) - s) / (rate * seconds) for pid, s in zip((front, *behind), before, strict=True)]
    print(
        f"{name:26s} {rate:8.0f} requests/s {spent[0]:6.0f} us each, a core gives {1e6 / spent[0]:6.0f}; "
        f"with what is behind {sum(spent):6.0f} us, a core gives {1e6 / sum(spent):6.0f}",
        flush=True,
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each loop")
    parser.add_argument("--rounds", type=int, default=3)
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

    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(Launcher())
        launcher.connect(num_gpus=2, address="local")
        end_all()
        plan = synthetic_plan(0.001, 0.0, 1000.0, 2000.0, 2, 8)
        port, grpc_port = unused_port(), unused_port()
        deployment = Deployment(plan=plan, port=port, grpc_port=grpc_port, gateways=1)
        begin(launcher, deployment, "a run", "the laboratory")
        (pid,), gpulets = pids(b"ServeReplica:tenuto:gateway"), pids(b"ServeReplica:gpulet")
        closed_loop(launcher.base_url, 16, 1.0)
        plain = stack.enter_context(subprocess.Popen([*this, "--plain"], stdout=subprocess.PIPE, text=True))
        stack.callback(plain.kill)
        assert plain.stdout is not None
        plain_port = int(plain.stdout.readline())
        rival = installed(given.triton) if given.triton else None
        if rival is not None:
            triton_port = unused_port()
            model = {"instances": 2, "alpha_ms": 0.001, "beta_ms": 0.0, "slo_ms": 2000.0}
            triton_pid = stack.enter_context(triton(rival, unused_port(), grpc_port=triton_port, **model))
            stubs = pids(b"triton_python_backend_stub")
            grpc_rate(triton_port)
        for _ in range(given.rounds):
            measured("Tenuto, gRPC", pid, gpulets, lambda: grpc_rate(grpc_port), given.seconds)
            measured("Tenuto, HTTP", pid, gpulets, http_rate, given.seconds)
            measured("plainest grpc.aio server", plain.pid, (), lambda: grpc_rate(plain_port), given.seconds)
            if rival is not None:
                measured("Triton, gRPC", triton_pid, stubs, lambda: grpc_rate(triton_port), given.seconds)


if __name__ == "__main__":
    main()
