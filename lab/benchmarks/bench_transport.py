"""Round trips of a batch between dispatcher and gpu-let by Unix socket, TCP, and Ray's object store with an actor call:
a small batch, one image, sixteen images, and 50 MB. Every answer is 64 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
from serving import heading

from tenuto.deployments.serve.launcher import start_local_ray
from tenuto.deployments.wire.frames import Address, FrameProtocol, connect, listen
from tenuto.deployments.wire.messages import BatchFailed, Hello, Message

ADDRESSES: dict[str, Address] = {"Unix socket": "\0tenuto-bench-transport", "TCP": ("127.0.0.1", 45_123)}


def serve(address: Address) -> None:
    """Answer every frame with its first 64 bytes."""

    def on_message(protocol: FrameProtocol, message: Message, body: memoryview) -> None:
        protocol.send(message, [body[:64]])

    def accept() -> FrameProtocol:
        return FrameProtocol(
            on_message,
            lambda _protocol, _error: None,
            expect_token="t",
            on_hello=lambda protocol, _hello: protocol.limit_bodies(1 << 30),
        )

    async def forever() -> None:
        server = await listen(address, accept)
        await server.serve_forever()

    run(forever())


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run on uvloop where it is installed, as Ray Serve does."""
    try:
        import uvloop

        return uvloop.run(main)
    except ModuleNotFoundError:
        return asyncio.run(main)


async def measure(address: Address, size: int, count: int) -> list[float]:
    """Return the ms of sequential round trips of 16 buffers that sum to `size` bytes."""
    answered = asyncio.Event()

    def on_message(_protocol: FrameProtocol, _message: Message, _body: memoryview) -> None:
        answered.set()

    while True:
        try:
            connection = await connect(address, Hello("t"), on_message, lambda _protocol, _error: None)
            break
        except OSError:
            await asyncio.sleep(0.1)
    connection.limit_bodies(1 << 30)
    buffers = [bytes(size // 16)] * 16
    taken = []
    for number in range(count):
        answered.clear()
        begun = time.perf_counter()
        connection.send(BatchFailed(number, "none"), buffers)
        await answered.wait()
        taken.append((time.perf_counter() - begun) * 1000.0)
    connection.close()
    return taken


def measure_object_store(actor: Any, size: int, count: int) -> list[float]:
    """Return the ms of sequential round trips of 16 arrays that sum to `size` bytes: put, call with the reference.

    The actor maps them without copying, as a gpu-let would.
    """
    import ray

    arrays = [np.zeros(size // 16, np.uint8) for _ in range(16)]
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        reference = ray.put(arrays)
        ray.get(actor.take.remote(reference))
        taken.append((time.perf_counter() - begun) * 1000.0)
        del reference  # its space is taken back, as after each batch
    return taken


def make_actor() -> Any:
    """Start a local Ray and an actor of the kind of a gpu-let."""
    import ray

    start_local_ray(num_gpus=0)

    class Taker:
        async def take(self, arrays: list[np.ndarray[Any, Any]]) -> bytes:
            return bytes(arrays[0][:64])

    actor = ray.remote(num_cpus=0)(Taker).remote()
    ray.get(actor.take.remote([np.zeros(64, np.uint8)]))
    return actor


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer round trips")
    factor = 1 if parser.parse_args().quick else 5
    heading("round trips of a batch")
    print(f"{'':12s} {'bytes':>10s} {'p50 ms':>8s} {'p99 ms':>8s}")
    cases = ((1_024, 400 * factor), (602_112, 100 * factor), (9_633_792, 20 * factor), (50_331_648, 8 * factor))

    def show(name: str, size: int, taken: list[float]) -> None:
        p50, p99 = np.percentile(taken, 50), np.percentile(taken, 99)
        print(f"{name:12s} {size:10,d} {p50:8.3f} {p99:8.3f}", flush=True)

    for name, address in ADDRESSES.items():
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(address,), daemon=True)
        server.start()
        for size, count in cases:
            run(measure(address, size, 3))
            show(name, size, run(measure(address, size, count)))
        server.terminate()
        server.join()
    actor = make_actor()
    for size, count in cases:
        measure_object_store(actor, size, 3)
        show("object store", size, measure_object_store(actor, size, count))


if __name__ == "__main__":
    main()
