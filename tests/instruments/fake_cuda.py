"""The part of torch.cuda that the runners use, over tensors in plain memory, as late as it may be.

Whatever is put on a stream runs only when somebody waits for it: a buffer that is overwritten or read too early gives
wrong numbers here, every time. Each stream has a clock (a copy takes `COPY_MS`, kernels `KERNELS_MS`), so that what
overlaps can be read off event times.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature

COPY_MS = 1.0
KERNELS_MS = 4.0


class FakeEvent:
    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        del enable_timing, blocking
        self.stream: FakeStream | None = None
        self.at_ms: float | None = None

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        stream.put("record", 0.0, lambda: setattr(self, "at_ms", stream.clock_ms), silent=True)

    def synchronize(self) -> None:
        assert self.stream is not None, "waited for an event that nobody recorded"
        while self.at_ms is None:
            self.stream.step()

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.at_ms is not None
        assert later.at_ms is not None, "asked for the time of an event that has not happened"
        return later.at_ms - self.at_ms


class FakeStream:
    def __init__(self, cuda: FakeCuda, device: object = None) -> None:
        self.cuda = cuda
        self.device = device
        self.name = f"stream {len(cuda.streams)}"
        self.clock_ms = 0.0
        self.queue: deque[tuple[str, float, Callable[[], object], bool]] = deque()
        cuda.streams.append(self)

    def put(self, what: str, takes_ms: float, action: Callable[[], object], *, silent: bool = False) -> None:
        self.cuda.call()
        if self.cuda.capturing is not None and not silent:
            self.cuda.capturing.steps.append((what, takes_ms, action))
            return
        if not silent:
            self.cuda.enqueued.append((self.name, what))
        self.queue.append((what, takes_ms, action, silent))

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None, "a stream waits for an event that nobody recorded"

        def wait() -> None:
            event.synchronize()
            assert event.at_ms is not None
            self.clock_ms = max(self.clock_ms, event.at_ms)

        self.put("wait", 0.0, wait, silent=True)

    def step(self) -> None:
        what, takes_ms, action, silent = self.queue.popleft()
        with torch.inference_mode():  # what it writes to was made there
            action()
        self.clock_ms += takes_ms
        if not silent:
            self.cuda.executed.append((self.name, what))

    def synchronize(self) -> None:
        self.cuda.call()
        while self.queue:
            self.step()


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.steps: list[tuple[str, float, Callable[[], object]]] = []
        self.replays = 0
        cuda.graphs.append(self)

    def replay(self) -> None:
        self.replays += 1
        assert self.cuda.current is not None
        for what, takes_ms, action in self.steps:
            self.cuda.current.put(what, takes_ms, action)


class FakeCuda:
    """`enqueued` and `executed` hold (stream, what) in order, without events; `graphs` every capture."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.enqueued: list[tuple[str, str]] = []
        self.executed: list[tuple[str, str]] = []
        self.graphs: list[FakeGraph] = []
        self.pinned_rows: list[int] = []
        self.device_bytes_left: int | None = None
        self.capturing: FakeGraph | None = None
        self.current: FakeStream | None = None
        self.capability = (7, 0)  # from 8.0 on what is fast is chosen where options leave it open
        self.lost: str | None = None  # why every call fails from now on, as after a sticky error

    def call(self) -> None:
        """What every call of CUDA does first."""
        if self.lost is not None:
            raise torch.AcceleratorError(f"CUDA error: {self.lost}\nmore lines")

    def kernels(self, action: Callable[[], object]) -> None:
        assert self.current is not None, "kernels on the default stream"
        self.current.put("kernels", KERNELS_MS, action)

    def host_sync(self) -> None:
        """What `.item()` and the like do."""
        self.call()
        if self.capturing is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        for stream in self.streams:
            stream.synchronize()

    @contextlib.contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _capture(self, graph: FakeGraph, **options: Any) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        self.host_sync()
        self.capturing = graph
        try:
            with self._on(options["stream"]):
                yield
        finally:
            self.capturing = None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put this in the place of torch.cuda for one test."""
        real_empty, real_copy, real_clone, real_to = (
            torch.empty,
            torch.Tensor.copy_,
            torch.Tensor.clone,
            torch.Tensor.to,
        )

        def empty(*shape: Any, pin_memory: bool = False, device: object = None, **rest: Any) -> torch.Tensor:
            if device is not None:
                self.call()
            made = real_empty(*shape, **rest)
            if device is not None and self.device_bytes_left is not None:
                self.device_bytes_left -= made.numel() * made.element_size()
                if self.device_bytes_left < 0:
                    raise torch.OutOfMemoryError("CUDA out of memory")
            if pin_memory and made.dim():
                self.pinned_rows.append(made.shape[0])
            return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-1)

        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if self.current is None or not non_blocking:
                return real_copy(target, source)
            self.current.put("copy", COPY_MS, lambda: real_copy(target, source))
            return target

        def clone(source: torch.Tensor, **rest: Any) -> torch.Tensor:
            if self.current is None:
                return real_clone(source, **rest)
            made = empty(source.shape, dtype=source.dtype)
            self.current.put("clone", 0.0, lambda: real_copy(made, source))
            return made

        def to(source: torch.Tensor, *where: Any, **rest: Any) -> torch.Tensor:
            if where and isinstance(where[0], torch.device) and where[0].type == "cuda":
                assert self.current is not None
                made = empty(source.shape, dtype=source.dtype)
                self.current.put("copy", COPY_MS, lambda: real_copy(made, source))
                return made
            return real_to(source, *where, **rest)

        real_addcmul = torch.addcmul

        def addcmul(shift: torch.Tensor, scale: torch.Tensor, pixels: torch.Tensor, *, out: torch.Tensor) -> None:
            self.kernels(lambda: real_addcmul(shift, scale, pixels, out=out))

        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "addcmul", addcmul)
        for name, function in (("copy_", copy_), ("clone", clone), ("to", to)):
            patch.setattr(torch.Tensor, name, function, raising=False)
        for name, value in {
            "Stream": lambda device=None: FakeStream(self, device),
            "Event": FakeEvent,
            "CUDAGraph": lambda: FakeGraph(self),
            "graph": self._capture,
            "graph_pool_handle": lambda: (0, 1),
            "stream": self._on,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "get_device_capability": lambda _index: self.capability,
            "get_device_name": lambda _index: "NVIDIA Fake",
            "get_device_properties": lambda _index: SimpleNamespace(total_memory=2**34, multi_processor_count=66),
            "set_per_process_memory_fraction": lambda _fraction, _index: None,
            "memory_reserved": lambda _index: 2**30,
            "empty_cache": lambda: None,
            "synchronize": self.host_sync,
        }.items():
            patch.setattr(torch.cuda, name, value)


class LateNet(torch.nn.Module):
    """y = 2x + 1 by kernels on the current stream; with `syncs`, it waits for the device as `.item()` does."""

    def __init__(self, cuda: FakeCuda, *, syncs: bool = False) -> None:
        super().__init__()
        self.fake = cuda
        self.syncs = syncs
        self.forwards = 0

    def to(self, *_where: Any, **_how: Any) -> LateNet:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        answer = torch.empty(x.shape, dtype=x.dtype)
        real_copy = torch._C.TensorBase.copy_
        self.fake.kernels(lambda: real_copy(answer, x * 2 + 1))
        if self.syncs:
            self.fake.host_sync()
        return answer


SIGNATURE = ModelSignature(
    kind="tensor", inputs=(TensorSignature("x", "float32", (2,)),), outputs=(TensorSignature("y", "float32", (2,)),)
)


def late_model(cuda: FakeCuda, *, syncs: bool = False) -> LoadedModel:
    """Return a model that computes on the fake."""
    return LoadedModel(LateNet(cuda, syncs=syncs), SIGNATURE)
