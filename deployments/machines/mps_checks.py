"""The checks of `tenuto doctor` for GPUs and CUDA MPS. Without a driver they are notes, since nothing is broken."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tenuto.deployments.machines.finding import Finding
from tenuto.errors import EnvironmentFaultError
from tenuto.mps.control import BINARY
from tenuto.mps.folders import DEFAULT_ROOT, MOST_PATH_BYTES, find_leftovers, mps_root, pipe_directory, why_unsafe
from tenuto.mps.inventory import GpuDevice, read_inventory
from tenuto.mps.others import OtherProcess, others_on
from tenuto.mps.processes import Processes

_VOLTA = (7, 0)  # format: compute capability from which CUDA MPS limits shares
_LEAST_FREE_MIB = 1024  # limit: memory for a CUDA context and one small model


def check_gpus(
    read: Callable[[], tuple[GpuDevice, ...]] = read_inventory,
    others: Callable[[str], tuple[OtherProcess, ...] | None] = others_on,
) -> list[Finding]:
    """Check the driver, and on every GPU and MIG device what CUDA MPS needs: Volta or newer, free memory, no other
    user.

    Args:
        read: finds the GPUs.
        others: finds the processes on a GPU that are not Tenuto's; None: not known.
    """
    try:
        devices = read()
    except EnvironmentFaultError as error:
        return [Finding("nvidia driver", "fail", str(error), "nvidia-smi")]
    if not devices:
        return [Finding("nvidia driver", "fail", "it answers, but there is no GPU", "nvidia-smi -L")]
    findings = [Finding("nvidia driver", "ok", f"{devices[0].driver}, {len(devices)} GPUs")]
    for device in devices:
        findings += [_check_gpu(device), *_check_processes(device, others)]
    return [*findings, *_check_layouts(devices)]


def _check_layouts(devices: Sequence[GpuDevice]) -> list[Finding]:
    """Return a line for every GPU that MIG can cut: how it is cut, and what it waits for."""
    findings = []
    of = {device.parent_uuid or device.uuid: device for device in devices if device.has_mig}
    for uuid, device in of.items():
        parts = [each for each in devices if each.parent_uuid == uuid]
        cut = ", ".join(f"{each.type} at {'?' if each.start is None else each.start}" for each in parts)
        layout = cut or ("in MIG mode, without instances" if device.is_mig else "whole; it could be cut (MIG is off)")
        name = f"layout {uuid[4:12]}"
        if device.resets:
            cure = f"end what uses it, then nvidia-smi --gpu-reset -i {uuid}"
            findings.append(Finding(name, "fail", f"{layout}; its MIG mode changes at its next reset", cure))
        elif any(each.start is None for each in parts):
            cure = "as root, or with access to /proc/driver/nvidia/capabilities/mig/config, plans can address places"
            findings.append(Finding(name, "note", f"{layout}: this user is not told where", cure))
        else:
            findings.append(Finding(name, "ok", layout))
    return findings


def _name(device: GpuDevice) -> str:
    return f"{'gpu' if device.parent_uuid is None else 'mig'} {device.uuid[4:12]}"


def _check_processes(
    device: GpuDevice, others: Callable[[str], tuple[OtherProcess, ...] | None]
) -> tuple[Finding, ...]:
    foreign = others(device.uuid)
    if not foreign:
        return ()
    cure = "with `mps: required` gpu-lets refuse to start beside them; stop them, or plan with `mps: auto`"
    return (Finding(f"{_name(device)} others", "note", f"not Tenuto's: {', '.join(map(str, foreign))}", cure),)


def _check_gpu(device: GpuDevice) -> Finding:
    name = _name(device)
    description = (
        f"{device.type}, {device.free_memory_mib} of {device.memory_mib} MiB free, {device.sm_count} SMs, "
        f"compute mode {device.compute_mode}"
    )
    if device.is_mig:
        cure = f"nvidia-smi -i {device.uuid} -mig 0, or let plans cut it: tenuto cluster --mig managed"
        return Finding(name, "fail", f"{description}, in MIG mode without a MIG device", cure)
    if device.compute_mode == "prohibited":
        return Finding(name, "fail", description, f"nvidia-smi -i {device.uuid} -c EXCLUSIVE_PROCESS")
    if device.compute_capability < _VOLTA:
        return Finding(name, "note", f"{description}, older than Volta: no shares", "plan whole GPUs, with `mps: off`")
    if device.free_memory_mib < _LEAST_FREE_MIB:
        return Finding(name, "note", description, f"stop what holds the memory: nvidia-smi -i {device.uuid}")
    return Finding(name, "ok", description)


def check_mps(
    *,
    has_driver: bool,
    root: Path | None = None,
    processes: Processes | None = None,
    which: Callable[[str], str | None] = shutil.which,
    user: int | None = None,
    others: Callable[[], tuple[int, ...]] | None = None,
) -> list[Finding]:
    """Check the control program, the folder of pipes and its owner, our leftovers, and daemons of others.

    Args:
        has_driver: whether the node has GPUs; without GPUs a missing program is a note.
        root: folder of the daemons; default TENUTO_MPS_ROOT or the usual one.
        processes: reads facts about processes; replaced in tests.
        which: finds a program.
        user: the user who must own the folder; default this process's user.
        others: finds daemons that Tenuto did not start.
    """
    base = root if root is not None else mps_root()
    known = processes if processes is not None else Processes()
    found_others = others if others is not None else lambda: foreign_daemons(base)
    return [
        _check_program(which, has_driver),
        _check_folder(base, os.getuid() if user is None else user),
        _check_leftovers(base, known),
        _check_others(found_others(), known),
    ]


def _check_program(which: Callable[[str], str | None], has_driver: bool) -> Finding:
    path = which(BINARY)
    if path is not None:
        return Finding("CUDA MPS", "ok", path)
    return Finding(
        "CUDA MPS",
        "fail" if has_driver else "note",
        f"{BINARY} is not on PATH",
        "install the CUDA MPS control program of the driver, or plan with `mps: off`" if has_driver else "",
    )


def _check_folder(base: Path, user: int) -> Finding:
    name = "CUDA MPS folder"
    longest = pipe_directory("GPU-00000000-0000-0000-0000-000000000000", base)
    if len(os.fsencode(longest)) > MOST_PATH_BYTES:
        cure = f"export TENUTO_MPS_ROOT={DEFAULT_ROOT}"
        return Finding(name, "fail", f"{base} is too long: sockets below it need a short path", cure)
    fault = why_unsafe(base, user)
    if fault is not None:
        return Finding(name, "fail", *fault)
    return Finding(name, "ok", str(base) if base.exists() else f"{base} (made when needed)")


def _check_leftovers(base: Path, processes: Processes) -> Finding:
    leftovers = find_leftovers(base, processes)
    if not leftovers:
        return Finding("CUDA MPS leftovers", "ok", "none")
    cures = [
        f"echo quit | CUDA_MPS_PIPE_DIRECTORY={left.directory / 'pipe'} {BINARY}"
        if left.is_running
        else f"rm -r {left.directory}"
        for left in leftovers
    ]
    shown = ", ".join(
        f"{left.gpu_uuid} ({'an unused daemon, pid ' + str(left.pid) if left.is_running else 'of a dead daemon'})"
        for left in leftovers
    )
    return Finding("CUDA MPS leftovers", "note", shown, "if no plan is being served: " + "; ".join(cures))


def _check_others(pids: tuple[int, ...], processes: Processes) -> Finding:
    if not pids:
        return Finding("CUDA MPS of others", "ok", "none")
    shown = ", ".join(f"pid {pid} of user {processes.user_of(pid)}" for pid in pids)
    return Finding(
        "CUDA MPS of others",
        "note",
        f"daemons that Tenuto did not start: {shown}; it never touches them",
        "if they serve the same GPUs, let their owner stop them: echo quit | nvidia-cuda-mps-control",
    )


def foreign_daemons(base: Path, proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Return the pids of control daemons that have no pipe directory below `base`, as far as /proc tells this user."""
    processes = Processes(proc)
    pids = []
    for pid in sorted(int(entry.name) for entry in proc.glob("[0-9]*")):
        if processes.name_of(pid) == BINARY:
            environment = processes.environment_of(pid) or {}  # another user's is not shown, and certainly not ours
            pipes = environment.get("CUDA_MPS_PIPE_DIRECTORY")
            if pipes is None or not Path(pipes).is_relative_to(base):
                pids.append(pid)
    return tuple(pids)
