"""Round trips of a batch between dispatcher and gpu-let by Unix socket and TCP: a small batch and sixteen images."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from typing import Any

import numpy as np
from serving import heading

from tenuto.deployments.transport import Address, FrameProtocol, connect, listen

ADDRESSES: dict[str, Address] = {"Unix socket": "\0tenuto-bench-transport", "TCP": ("127.0.0.1", 45_123)}


def serve(address: Address) -> None:
    """Answer every frame with its first 64 bytes."""

    def on_frame(protocol: FrameProtocol, header: dict[str, Any], body: memoryview) -> None:
        protocol.send({"id": header["id"]}, [body[:64]])

    async def run() -> None:
        server = await listen(address, "t", on_frame, lambda _protocol, _error: None)
        await server.serve_forever()

    asyncio.run(run())


async def measure(address: Address, size: int, count: int) -> tuple[float, float]:
    """Return p50 and p99 in ms of sequential round trips of 16 buffers that sum to `size` bytes."""
    answered = asyncio.Event()

    def on_frame(_protocol: FrameProtocol, _header: dict[str, Any], _body: memoryview) -> None:
        answered.set()

    while True:
        try:
            connection = await connect(address, "t", on_frame, lambda _protocol, _error: None)
            break
        except OSError:
            await asyncio.sleep(0.1)
    buffers = [bytes(size // 16)] * 16
    taken = []
    for number in range(count):
        answered.clear()
        begun = time.perf_counter()
        connection.send({"id": number}, buffers)
        await answered.wait()
        taken.append((time.perf_counter() - begun) * 1000.0)
    connection.close()
    return float(np.percentile(taken, 50)), float(np.percentile(taken, 99))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer round trips")
    factor = 1 if parser.parse_args().quick else 5
    heading("round trips of a batch")
    print(f"{'':12s} {'bytes':>10s} {'p50 ms':>8s} {'p99 ms':>8s}")
    for name, address in ADDRESSES.items():
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(address,), daemon=True)
        server.start()
        for size, count in ((1_024, 400 * factor), (9_633_792, 20 * factor)):
            p50, p99 = asyncio.run(measure(address, size, count))
            print(f"{name:12s} {size:10,d} {p50:8.3f} {p99:8.3f}", flush=True)
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
