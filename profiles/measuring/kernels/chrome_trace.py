"""Kernels from a trace of `torch.profiler` (CUPTI through Kineto), as `export_chrome_trace` writes it."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto.errors import first_line, refused
from tenuto.files import decode_text, parse_json, read_file
from tenuto.profiles.measuring.kernels.record import Device, Kernel

# Limit: bytes and entries of a trace, which has 400 bytes and 20 entries for each kernel.
_MOST_BYTES, _MOST_ENTRIES = 256 << 20, 16_000_000


@dataclass(frozen=True)
class KernelTrace:
    """The kernels of one device in order of start, with the copies' bytes and time by direction (`h2d`, `d2h`)."""

    device: Device
    kernels: tuple[Kernel, ...]
    copied_bytes: Mapping[str, int]
    copy_ms: Mapping[str, float]


def load_chrome_trace(path: str | Path) -> KernelTrace:
    """Read a trace file, gzipped or not; see `parse_chrome_trace` for the errors."""
    return parse_chrome_trace(read_chrome_trace(path), origin=str(path))


def read_chrome_trace(path: str | Path) -> Any:
    """Return the JSON of a trace file, gzipped or not; raises `InvalidInputError` where it is none."""
    file = Path(path)
    try:
        raw = read_file(file, _MOST_BYTES)
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        cure = "Give the file that export_chrome_trace wrote; an interrupted export is not complete."
        raise refused(str(file), "", f"cannot be unpacked ({error})", cure) from error
    if len(raw) > _MOST_BYTES:
        raise refused(str(file), None, f"has more than {_MOST_BYTES:,} bytes unpacked", "Record fewer batches.")
    return parse_json(decode_text(raw, str(file)), str(file), _MOST_ENTRIES)


def parse_chrome_trace(data: Any, *, origin: str = "trace") -> KernelTrace:
    """Return the kernels and copies of the recorded process's first device.

    Args:
        data: the parsed JSON.
        origin: prefix of the paths in error messages.

    Raises:
        InvalidInputError: no trace, no such device, no kernels, or a kernel without its launch configuration.
    """
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        cure = "Give a file of torch.profiler's export_chrome_trace."
        raise refused(origin, type(data).__name__, "has no list `traceEvents`", cure)
    try:
        return _trace(data, origin)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        rule = f"has an entry of another form ({first_line(error)})"
        raise refused(origin, None, rule, "Give the file as export_chrome_trace wrote it.") from error


def _trace(data: Mapping[str, Any], origin: str) -> KernelTrace:
    device = _device(data, origin)
    kernels: list[Kernel] = []
    sizes, times = {"h2d": 0, "d2h": 0}, {"h2d": 0.0, "d2h": 0.0}
    for number, event in enumerate(data["traceEvents"]):
        arguments = event.get("args") or {}
        kind = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or arguments.get("device", 0) != 0:
            continue
        if kind == "kernel":
            kernels.append(_kernel(event, arguments, f"{origin}: traceEvents[{number}]"))
        elif kind == "gpu_memcpy":
            way = {"HtoD": "h2d", "DtoH": "d2h"}.get(next(iter(str(event.get("name")).split()[1:2]), ""))
            if way is not None:
                sizes[way] += int(arguments.get("bytes", 0))
                times[way] += float(event.get("dur", 0.0)) / 1000.0
    if not kernels:
        raise refused(
            origin,
            0,
            "no kernel of this device was recorded",
            "Record with ProfilerActivity.CUDA on a machine whose CUPTI is not taken by another profiler.",
        )
    kernels.sort(key=lambda kernel: kernel.start_us)
    return KernelTrace(device, tuple(kernels), sizes, times)


def _device(data: Mapping[str, Any], origin: str) -> Device:
    for one in data.get("deviceProperties") or ():
        if one.get("id") == 0:
            try:
                capability = (int(one["computeMajor"]), int(one["computeMinor"]))
                return Device(str(one["name"]), capability, int(one["numSms"]))
            except KeyError as error:
                cure = "Record the trace with a PyTorch of 1.10 or later."
                raise refused(f"{origin}: deviceProperties", one, f"lacks {error}", cure) from error
    raise refused(
        f"{origin}: deviceProperties", 0, "does not describe this device", "Record the trace with CUDA activities."
    )


def _kernel(event: Mapping[str, Any], arguments: Mapping[str, Any], path: str) -> Kernel:
    try:
        grid, block = (_dim3(arguments[key]) for key in ("grid", "block"))
        return Kernel(
            name=str(event["name"]),
            grid=grid,
            block=block,
            start_us=float(event["ts"]),
            duration_us=float(event["dur"]),
            registers_per_thread=_whole(arguments.get("registers per thread")),
            shared_memory_bytes=_whole(arguments.get("shared memory")),
            stream=_whole(arguments.get("stream")),
            correlation=_whole(arguments.get("correlation")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise refused(
            path,
            event.get("name"),
            f"is a kernel without a readable {error}",
            "Record with torch.profiler; other tools' traces lack the launch configuration.",
        ) from error


def _dim3(value: Any) -> tuple[int, int, int]:
    x, y, z = (int(part) for part in value)
    if min(x, y, z) < 1:
        raise ValueError(f"launch configuration {value}")
    return x, y, z


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
