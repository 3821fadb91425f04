"""A GPU of virtual time under PyTorch's CPU build: as much of torch.cuda, torch.profiler and NVML as profiling uses.

Results are real (computed on the CPU), places and times are not. Every operator on a tensor that was moved to `cuda:0`
is a kernel on the current stream and takes virtual time, longer on fewer SMs; the host's clock moves by the cost of
launching and jumps when it waits. What the documented interfaces refuse is refused here too: tensors on two devices, a
device tensor read as an array, the time between events that were not recorded or are not over, NVML before its start.

`VirtualGpu().installed()` puts it in place; processes get it by the name `worker_main`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UUID = "7b4a1f0c-0000-4000-8000-000000000001"
NAME, SMS, CAPABILITY = "Tesla V100-SXM2-16GB", 80, (7, 0)
KINDS = {"v100": (NAME, SMS, CAPABILITY, 16_384), "h200": ("NVIDIA H200", 132, (9, 0), 143_771)}
LAUNCH_S, SHORTEST_KERNEL_S = 4e-6, 1e-4  # a slow GPU, so that a second of its time is few batches
COPY_BYTES_PER_S, ELEMENTS_PER_S = 1e9, 2e8
MIB = 2**20
OTHERS_MIB, CONTEXT_MIB = 300, 420  # of other processes, and of this one's context
_BLOCK_BYTES = 2 * MIB  # the caching allocator asks the driver for whole blocks


class Stream:
    """Work in order; `free_at_s` is when the last of it ends."""

    count = 0

    def __init__(self, gpu: VirtualGpu, device: Any = None) -> None:
        Stream.count += 1
        self.gpu, self.device, self.number, self.free_at_s = gpu, device, 6 + Stream.count, 0.0

    def synchronize(self) -> None:
        self.gpu.host_s = max(self.gpu.host_s, self.free_at_s)

    def wait_event(self, event: Event) -> None:
        self.free_at_s = max(self.free_at_s, event.at_s or 0.0)

    def put(self, seconds: float) -> float:
        """Launch something; return when it starts."""
        self.gpu.host_s += LAUNCH_S
        starts = max(self.gpu.host_s, self.free_at_s)
        self.free_at_s = starts + seconds
        return starts


class Event:
    """As torch.cuda.Event: only timed events that were recorded and are over have a time between them."""

    def __init__(self, gpu: VirtualGpu, enable_timing: bool = False) -> None:
        self.gpu, self.timed, self.at_s = gpu, enable_timing, None

    at_s: float | None

    def record(self, stream: Stream | None = None) -> None:
        self.at_s = max(self.gpu.host_s, (stream or self.gpu.current).free_at_s)

    def query(self) -> bool:
        return self.at_s is None or self.at_s <= self.gpu.host_s

    def synchronize(self) -> None:
        self.gpu.host_s = max(self.gpu.host_s, self.at_s or 0.0)

    def elapsed_time(self, later: Event) -> float:
        if not (self.timed and later.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at_s is None or later.at_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and later.query()):
            raise RuntimeError("device not ready")
        return (later.at_s - self.at_s) * 1000.0


class Graph:
    """As torch.cuda.CUDAGraph: what was captured, computed again on the same memory for the price of one launch."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu = gpu
        self.steps: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self.kernels: list[tuple[str, str, float, dict[str, Any]]] = []

    def replay(self) -> None:
        with _paused():
            for func, args, kwargs, made in self.steps:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
        host_s = self.gpu.host_s
        for kernel in self.kernels:
            self.gpu._note(*kernel)
        self.gpu.host_s = host_s + LAUNCH_S


class VirtualGpu(TorchDispatchMode):
    """The device and its driver. What tests vary comes from the environment, as workers are processes:

    `FAKE_GPU` (of `KINDS`), `FAKE_GPU_MEMORY_MIB`, `FAKE_GPU_DETACHED` (the daemon is not reached, silently),
    `FAKE_GPU_NO_CUPTI`.
    """

    def __init__(self, *, sm_count: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        percent = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
        attached = "CUDA_MPS_PIPE_DIRECTORY" in os.environ and "FAKE_GPU_DETACHED" not in os.environ
        self.name, self.whole_sms, self.capability, memory_mib = KINDS[os.environ.get("FAKE_GPU", "v100")]
        self.sms = sm_count or (max(2, int(self.whole_sms * percent / 100)) if attached else self.whole_sms)
        self.memory_bytes = int(float(os.environ.get("FAKE_GPU_MEMORY_MIB", memory_mib)) * MIB)
        self.capturing: Graph | None = None
        self.host_s = 0.0
        self.current = self.default = Stream(self)
        self.streams = [self.default]
        self.recorded: list[dict[str, Any]] | None = None
        self.ranges: list[dict[str, Any]] = []
        self.launches = 0
        self._stored: dict[int, tuple[Any, int]] = {}
        self._pinned: dict[int, Any] = {}
        self._reserved = self._peak = 0

    def clock_s(self) -> float:
        """The host's clock; looking at it takes a moment, so that nothing waits for ever."""
        self.host_s += 1e-7
        return self.host_s

    # Tensors and where they are.

    def holds(self, tensor: torch.Tensor) -> bool:
        known = self._stored.get(tensor.untyped_storage()._cdata)
        return known is not None and not bool(known[0].expired())

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        known = self._pinned.get(tensor.untyped_storage()._cdata)
        return known is not None and not bool(known.expired())

    def _store(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if self.holds(tensor):
            return
        self._stored = {key: kept for key, kept in self._stored.items() if not kept[0].expired()}
        used = sum(size for _, size in self._stored.values()) + storage.nbytes()
        if used > self.memory_bytes:
            wanted = storage.nbytes() / MIB
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {wanted:.2f} MiB. GPU 0 is full.")
        self._stored[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self._reserved = max(self._reserved, math.ceil(used / _BLOCK_BYTES) * _BLOCK_BYTES)
        self._peak = max(self._peak, self._reserved)

    def empty_cache(self) -> None:
        used = sum(size for kept, size in self._stored.values() if not kept.expired())
        self._reserved = math.ceil(used / _BLOCK_BYTES) * _BLOCK_BYTES

    def used_bytes(self) -> int:
        """What NVML counts: others' memory, and this process's with its context."""
        return OTHERS_MIB * MIB + (CONTEXT_MIB * MIB + self._reserved if self._peak else 0)

    def reset_peak_memory_stats(self, _device: Any = None) -> None:
        self._peak = self._reserved

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
            made = func(*args, **kwargs)
            self._pinned[made.untyped_storage()._cdata] = StorageWeakRef(made.untyped_storage())  # type: ignore[no-untyped-call]
            return made
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not tensors and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            made = func(*args, **{**kwargs, "device": torch.device("cpu")})
            self._store(made)
            return made
        mine = [self.holds(t) for t in tensors]
        if name == "copy_" and any(mine):
            return self._copied(func, args, kwargs)
        if any(mine) and not all(here or t.dim() == 0 for t, here in zip(tensors, mine, strict=True)):
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two, cuda:0 and cpu!")
        result = func(*args, **kwargs)
        if self.capturing is not None and (any(mine) or name not in ("detach", "alias")):
            self.capturing.steps.append((func, args, kwargs, result))
        if any(mine):
            if name == "_local_scalar_dense":
                if self.capturing is not None:
                    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
                self.synchronize()
            self._launched(name, tensors, result)
        return result

    def _launched(self, name: str, tensors: list[torch.Tensor], result: Any) -> None:
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        before = {t.untyped_storage()._cdata for t in tensors}
        made = [t for t in outputs if t.untyped_storage()._cdata not in before]
        for tensor in made:
            self._store(tensor)
        if made or name.endswith("_"):
            elements = sum(t.numel() for t in (made or outputs))
            seconds = SHORTEST_KERNEL_S + elements / ELEMENTS_PER_S * self.whole_sms / self.sms
            self._note(
                "kernel",
                f"void fake_{name}_kernel<float>",
                seconds,
                {
                    "registers per thread": 32,
                    "shared memory": 0,
                    "grid": [max(1, -(-elements // 256)), 1, 1],
                    "block": [256, 1, 1],
                    "est. achieved occupancy %": 50,
                    "blocks per SM": 1.0,
                    "warps per SM": 8.0,
                },
            )

    def _moved(self, source: torch.Tensor, asked: dict[str, Any]) -> torch.Tensor:
        to_gpu, here = torch.device(asked["device"]).type == "cuda", self.holds(source)
        if to_gpu == here and asked.get("dtype") in (None, source.dtype):
            return source
        with _paused():
            result = source.detach().clone().type(asked.get("dtype") or source.dtype)
        if to_gpu:
            self._store(result)
        if to_gpu and here:
            self._launched("copy_", [source, result], result)
        elif to_gpu or here:
            wait = here or not (asked.get("non_blocking") and self._is_pinned(source))
            self._transfer("HtoD" if to_gpu else "DtoH", source if to_gpu else result, source, wait=wait)
        return result

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        target, source = args[:2]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        into, out_of = self.holds(target), self.holds(source)
        result = func(target, source)
        if into and out_of:
            self._launched("copy_", [target, source], result)
        else:
            host = source if into else target
            way = "HtoD" if into else "DtoH"
            self._transfer(way, host, source, wait=blocking or not self._is_pinned(host))
        return result

    def _transfer(self, way: str, host: torch.Tensor, source: torch.Tensor, *, wait: bool) -> None:
        size = source.numel() * source.element_size()
        memory = "Pinned" if self._is_pinned(host) else "Pageable"
        ends = f"({memory} -> Device)" if way == "HtoD" else f"(Device -> {memory})"
        self._note("gpu_memcpy", f"Memcpy {way} {ends}", 5e-6 + size / COPY_BYTES_PER_S, {"bytes": size})
        if wait:
            self.current.synchronize()

    @contextlib.contextmanager
    def record_function(self, name: str) -> Iterator[None]:
        """Mark a range on the host, as torch.profiler.record_function does."""
        began, self.host_s = self.host_s, self.host_s + 1e-6
        try:
            yield
        finally:
            self.host_s += 1e-6
            self.ranges.append(
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": name,
                    "pid": 1,
                    "tid": 1,
                    "ts": began * 1e6,
                    "dur": (self.host_s - began) * 1e6,
                    "args": {},
                }
            )

    def _note(self, category: str, name: str, seconds: float, arguments: dict[str, Any]) -> None:
        if self.capturing is not None:
            self.capturing.kernels.append((category, name, seconds, arguments))
            return
        launched_us = self.host_s * 1e6
        starts = self.current.put(seconds)
        self.launches += 1
        if self.recorded is not None:
            self.ranges.append(
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "pid": 1,
                    "tid": 1,
                    "ts": launched_us,
                    "dur": 3.0,
                    "args": {"correlation": self.launches},
                }
            )
            place = {"device": 0, "context": 1, "stream": self.current.number, "correlation": self.launches}
            self.recorded.append(
                {
                    "ph": "X",
                    "cat": category,
                    "name": name,
                    "pid": 0,
                    "tid": self.current.number,
                    "ts": starts * 1e6,
                    "dur": seconds * 1e6,
                    "args": {"External id": self.launches, **place, **arguments},
                }
            )

    # torch.cuda.

    def synchronize(self, _device: Any = None) -> None:
        for stream in self.streams:
            stream.synchronize()

    def _new_stream(self, device: Any = None) -> Stream:
        self.streams.append(Stream(self, device))
        return self.streams[-1]

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _capture(self, graph: Graph, **_options: Any) -> Iterator[None]:
        self.synchronize()
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None

    def properties(self, _device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=self.name,
            total_memory=self.memory_bytes,
            multi_processor_count=self.sms,
            uuid=UUID,
            major=self.capability[0],
            minor=self.capability[1],
        )

    @contextlib.contextmanager
    def installed(self) -> Iterator[VirtualGpu]:
        """Put this in the place of torch.cuda, torch.profiler.profile and pynvml, and run operators through it."""
        numpy, to = torch.Tensor.numpy, torch.Tensor.to

        def moved(tensor: torch.Tensor, *where: Any, **how: Any) -> Any:
            # Outside inference mode a CPU build refuses the device before any operator is asked for.
            names = ("device", "dtype", "non_blocking")
            if where and isinstance(where[0], (torch.device, str)):
                how.update(zip(names, where, strict=False))
            if how.get("device") is None:
                return to(tensor, *where, **how)
            return self._moved(tensor, how)

        def as_array(tensor: torch.Tensor, **how: Any) -> Any:
            if self.holds(tensor):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            return numpy(tensor, **how)

        parts: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "_lazy_init": lambda: None,
            "get_device_capability": lambda _device=None: self.capability,
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": lambda: Graph(self),
            "graph": self._capture,
            "get_device_name": lambda _device=None: self.name,
            "get_device_properties": self.properties,
            "Stream": self._new_stream,
            "Event": lambda enable_timing=False, blocking=False: Event(self, enable_timing),
            "stream": self._on,
            "current_stream": lambda _device=None: self.current,
            "synchronize": self.synchronize,
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            "max_memory_reserved": lambda _device=None: self._peak,
            "memory_reserved": lambda _device=None: self._reserved,
            "set_per_process_memory_fraction": lambda _fraction, _device=None: None,
            "mem_get_info": lambda _device=None: (self.memory_bytes - self._reserved, self.memory_bytes),
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(torch.cuda, **parts))
            stack.enter_context(mock.patch.object(torch.Tensor, "numpy", as_array))
            stack.enter_context(mock.patch.object(torch.Tensor, "to", moved))
            stack.enter_context(mock.patch.object(torch.Tensor, "cpu", lambda t: self._moved(t, {"device": "cpu"})))
            stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
            stack.enter_context(mock.patch("torch.profiler.profile", lambda activities: Recording(self, activities)))
            stack.enter_context(mock.patch("torch.profiler.record_function", self.record_function))
            before = sys.modules.get("pynvml")  # not mock.patch.dict: it would forget what is imported meanwhile
            stack.callback(_put_module, "pynvml", before)
            _put_module("pynvml", fake_nvml(lambda: self.launches, self.used_bytes))
            stack.enter_context(self)
            yield self


class Recording:
    """As torch.profiler.profile with CUPTI: what ran on the device between start and end, in Kineto's JSON."""

    def __init__(self, gpu: VirtualGpu, activities: Any) -> None:
        self.gpu = gpu
        self.cupti = torch.profiler.ProfilerActivity.CUDA in activities and "FAKE_GPU_NO_CUPTI" not in os.environ
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Recording:
        self.gpu.recorded, self.gpu.ranges = [], []
        return self

    def __exit__(self, *_: object) -> None:
        self.gpu.synchronize()
        self.events, self.gpu.recorded = self.gpu.recorded or [], None

    def export_chrome_trace(self, path: str) -> None:
        major, minor = self.gpu.capability
        device = {
            "id": 0,
            "name": self.gpu.name,
            "computeMajor": major,
            "computeMinor": minor,
            "numSms": self.gpu.sms,
            "totalGlobalMem": self.gpu.memory_bytes,
        }
        metadata = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}
        data = {
            "schemaVersion": 1,
            "deviceProperties": [device] if self.cupti else [],
            "traceEvents": [metadata, *self.gpu.ranges, *self.events] if self.cupti else [metadata],
        }
        Path(path).write_text(json.dumps(data))


def _put_module(name: str, module: ModuleType | None) -> None:
    if module is None:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = module


def _paused() -> Any:
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def fake_nvml(work_done: Any, used_bytes: Any = lambda: 0) -> ModuleType:
    """nvidia-ml-py for one GPU: milliwatts, MHz and degrees; more power where `work_done` grew since the last look."""
    module: Any = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    state = {"started": False, "seen": 0}

    def needs_start(answer: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if not state["started"]:
                raise NVMLError("Uninitialized")
            return answer(*arguments)

        return call

    def by_uuid(uuid: str) -> str:
        if uuid != f"GPU-{UUID}":
            raise NVMLError("Not Found")
        return "handle"

    def power_mw(_handle: str) -> int:
        busy, state["seen"] = work_done() > state["seen"], work_done()
        return 250_000 if busy else 55_000

    module.NVMLError, module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU = NVMLError, 1, 0
    module.nvmlInit = lambda: state.update(started=True)
    for name, answer in {
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetHandleByIndex": lambda index: "handle",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{UUID}",
        "nvmlDeviceGetPowerUsage": power_mw,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1380,
        "nvmlDeviceGetTemperature": lambda handle, kind: 51,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 300_000,
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1530,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=used_bytes()),
    }.items():
        setattr(module, name, needs_start(answer))
    return module  # type: ignore[no-any-return]


def worker_main() -> None:
    """Be the profiler's worker on the fake, in virtual time."""
    from tenuto.profiles.measuring import profile_worker

    torch.set_num_threads(1)
    with VirtualGpu().installed() as gpu:
        profile_worker.main(clock_s=gpu.clock_s)
