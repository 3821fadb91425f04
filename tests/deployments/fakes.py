"""A gpu-let without Ray: speaks the frame protocol from inside the test, answers when told to, and can die."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from tenuto.deployments.wire.transport import FrameProtocol, listen
from tenuto.placement import Plan

_names = itertools.count()

SIGNATURE = {
    "inputs": [{"name": "x", "dtype": "float32", "shape": [2]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": [2]}],
}


class FakeGpulet:
    """Answers y = 2x. With `hold` set, batches wait until `release` is called."""

    def __init__(self, gpulet_id: str, models: tuple[str, ...], *, hold: bool = False) -> None:
        self.id = gpulet_id
        self.models = models
        self.hold = hold
        self.batches: list[int] = []
        self.headers: list[dict[str, Any]] = []
        self.error: str | None = None
        self.clock_ahead_s = 0.0
        self.incarnation = 0
        self._held: list[tuple[FrameProtocol, dict[str, Any], memoryview]] = []
        self._protocols: set[FrameProtocol] = set()
        self._server: asyncio.Server | None = None
        self._alive = asyncio.Event()
        self.arrived = asyncio.Event()

    async def start(self) -> None:
        self.incarnation += 1
        self._address = f"\0tenuto-fake-{id(self)}-{next(_names)}"
        self._server = await listen(self._address, "t", self._on_frame, lambda *_: None, self._protocols.add)
        self._alive.set()

    def die(self) -> None:
        self._alive.clear()
        assert self._server is not None
        self._server.close()
        for protocol in self._protocols:
            protocol.close()
        self._protocols.clear()
        self._held.clear()

    def load(self, *models: str) -> None:
        """Hold these models from now on, and say so to every gateway, as a reconfigured gpu-let does."""
        self.models = models
        for protocol in self._protocols:
            protocol.send({"description": self._description()})

    async def describe(self) -> dict[str, Any]:
        await self._alive.wait()
        return {"address": self._address, "token": "t", **self._description()}

    def _description(self) -> dict[str, Any]:
        return {
            "gpulet": self.id, "pid": self.incarnation, "device": "fake",
            "emulated": False, "models": dict.fromkeys(self.models, 4),
            "signatures": dict.fromkeys(self.models, SIGNATURE),
        }  # fmt: skip

    def _on_frame(self, protocol: FrameProtocol, header: dict[str, Any], body: memoryview) -> None:
        if "abort" in header:
            return
        self.batches.append(header["n"])
        self.headers.append(header)
        self.arrived.set()
        if self.hold:
            self._held.append((protocol, header, body))
        else:
            self._answer(protocol, header, body)

    def release(self) -> None:
        held, self._held = self._held, []
        for item in held:
            self._answer(*item)

    def _answer(self, protocol: FrameProtocol, header: dict[str, Any], body: memoryview) -> None:
        if self.error is not None:
            protocol.send({"id": header["id"], "gpulet": self.id, "error": self.error})
            return
        doubled = (np.frombuffer(body, np.float32) * 2).tobytes()
        protocol.send(
            {"id": header["id"], "gpulet": self.id, "execution_ms": 1.0,
             "members": [(header["n"], [("y", "float32", [2], 8)])],
             "started_ms": (time.monotonic() + self.clock_ahead_s - 0.001) * 1000.0,
             "queue_ms": 0.0, "emulated": False},
            [doubled],
        )  # fmt: skip


def make_plan(
    *gpulets: tuple[str, tuple[str, ...]], slo_ms: float = 2000.0, batch_size: int = 1, models: tuple[str, ...] = ()
) -> Plan:
    """A plan over fake gpu-lets, each (id, models); l(b) = b + 1 ms."""
    names = models or tuple(dict.fromkeys(name for _, hosted in gpulets for name in hosted))
    replica = {"batch_size": batch_size, "latency": {"alpha_ms": 1.0, "beta_ms": 1.0}, "latency_ms": batch_size + 1.0}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "g", "type": "v100"}],
            "gpulets": [
                {"id": i, "gpu": "g", "models": [{"name": n, **replica} for n in hosted]} for i, hosted in gpulets
            ],
            "models": [
                {"name": n, "rate_rps": 10, "slo_ms": slo_ms, "latency": {"alpha_ms": 1.0, "beta_ms": 1.0}}
                for n in names
            ],
        }
    )


def finder(gpulets: dict[str, FakeGpulet]) -> Callable[[str], Callable[[], Awaitable[dict[str, Any]]]]:
    return lambda gpulet_id: gpulets[gpulet_id].describe
