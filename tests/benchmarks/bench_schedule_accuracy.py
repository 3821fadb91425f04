"""How faithfully the load generator sends its schedule, and what a request costs it.

A no-op HTTP server in a second process answers every request at once; the generator sends Poisson schedules of rising
rate from one local client. Published to compare with: the clients of Elvinger's thesis (ETH 2024, table 4.1) fell 8
to 19 % short of the rate they were asked for. Issue 5 asks for 0.5 % and a 99th percentile of lateness under 2 ms at
500 r/s.

Run: python tests/benchmarks/bench_schedule_accuracy.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
from multiprocessing.connection import Connection
from typing import cast

import numpy as np

from tenuto.loadgen.bench import BenchOptions, run_bench
from tenuto.loadgen.output import hardware, versions
from tenuto.placement import ModelSpec

_HEADERS = (
    b"HTTP/1.1 200 OK\r\nX-Tenuto-Queue-Ms: 1.0\r\nX-Tenuto-Batching-Ms: 1.0\r\nX-Tenuto-Execution-Ms: 1.0\r\n"
    b"X-Tenuto-Batch-Size: 1\r\nX-Tenuto-Gpulet: n0/0/a\r\nContent-Length: 14\r\n\r\n"
    b'{"outputs":[]}'
)


class _NoOp(asyncio.Protocol):
    """Answers each POST as soon as it is whole; GET with the metadata of a model of four floats."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            if self._buffer.startswith(b"GET"):
                metadata = {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}], "outputs": []}
                body = json.dumps(metadata).encode()
                self._transport.write(
                    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
                self._transport.close()
                return
            at = self._buffer.find(b"Content-Length: ") + 16
            length = int(self._buffer[at : self._buffer.find(b"\r\n", at)])
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._transport.write(_HEADERS)


def _serve(port: Connection) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(_NoOp, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Print one line per rate, then the highest rate that keeps both bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rates of 3 s each")
    quick = parser.parse_args().quick
    rates, duration_s = ((200, 500, 1000), 3.0) if quick else ((200, 500, 600, 1000, 2000, 3000, 4000, 6000), 10.0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    print(
        f"{hardware()}\n{versions()}\n"
        f"one local client, no-op server on the same machine, Poisson, {duration_s:g} s per rate"
    )
    print("asked r/s  sent r/s     off   late p50   late p99  processor per request   in time")
    best = 0
    try:
        for rate in rates:
            before = _processor_s()
            model = ModelSpec(name="m", rate_rps=rate, slo_ms=100)
            result = run_bench([model], BenchOptions(url, duration_s=duration_s, clients=0, grace_s=1.0))
            spent = _processor_s() - before
            records = result.records
            sent = records.sent_ms[~np.isnan(records.sent_ms)]
            scheduled_s = (
                duration_s  # the schedule's own count varies with the seed; what was asked for is the schedule
            )
            in_time = int((sent < 1000.0 * scheduled_s).sum())
            off = in_time / len(records) - 1.0
            late = records.lateness_ms[~np.isnan(records.lateness_ms)]
            p50, p99 = (float(np.percentile(late, q)) for q in (50, 99))
            if abs(off) <= 0.005 and p99 < 2.0:
                best = rate
            print(
                f"{len(records) / scheduled_s:9.1f} {in_time / scheduled_s:9.1f} {100 * off:6.2f} %"
                f" {p50:7.2f} ms {p99:7.2f} ms"
                f" {1e6 * spent / max(1, len(records)):15.0f} µs   {100 * (result.summary['attainment'] or 0):9.2f} %",
                flush=True,
            )
    finally:
        server.terminate()
        server.join()
    print(f"highest rate within 0.5 % and with a p99 of lateness under 2 ms: {best} r/s (asked for: 500)")
    print("thesis, table 4.1: 8 to 19 % below the rate asked for")
    return 0 if best >= 500 else 1


if __name__ == "__main__":
    sys.exit(main())
