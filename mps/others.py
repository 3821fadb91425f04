"""Processes on a GPU that are neither gpu-lets nor the server of the GPU's own CUDA MPS daemon."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from tenuto.errors import EnvironmentFaultError
from tenuto.mps.control import ControlError
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.inventory import Nvml, processes_on
from tenuto.mps.processes import Processes

_GPULET = "ray::ServeReplica:gpulet-"


@dataclass(frozen=True)
class OtherProcess:
    """A process with a CUDA context that is not Tenuto's. `name` and `user` are None if /proc does not show it, because
    it runs in another container."""

    pid: int
    name: str | None
    user: int | None

    def __str__(self) -> str:
        if self.name is None:
            return f"process {self.pid} of another container"
        return f"process {self.pid} ({self.name}, user {self.user})"


def find_others(pids: tuple[int, ...], ours: Set[int], processes: Processes | None = None) -> tuple[OtherProcess, ...]:
    """Return the processes on a GPU that are not ours, by all pids that a process has in any namespace.

    Args:
        pids: pids of all processes on the GPU, from NVML.
        ours: pids of gpu-lets and the server, from the daemon.
        processes: reads facts about processes.
    """
    known = processes if processes is not None else Processes()
    names = set(ours).union(*(known.numbers_elsewhere(pid) for pid in ours if known.started_at(pid) is not None))
    return tuple(OtherProcess(pid, known.name_of(pid), known.user_of(pid)) for pid in sorted({*pids} - names))


def processes_of(daemon: PrivateDaemon) -> frozenset[int]:
    """Return the pids of a daemon's servers and clients; none while it does not answer."""
    try:
        return frozenset({*daemon.control.servers(), *daemon.clients()})
    except ControlError:
        return frozenset()


def read_others(daemon: PrivateDaemon, nvml: Nvml | None = None) -> tuple[OtherProcess, ...] | None:
    """Return the other processes on a daemon's GPU; None if NVML does not tell."""
    try:
        return find_others(processes_on(daemon.gpu_uuid, nvml), processes_of(daemon), daemon.processes)
    except EnvironmentFaultError:
        return None


def others_on(gpu_uuid: str) -> tuple[OtherProcess, ...] | None:
    """Return the processes on a GPU that are neither clients of our daemon nor gpu-lets without CUDA MPS; None if NVML
    does not tell."""
    try:
        daemon = PrivateDaemon(gpu_uuid)
        processes = read_others(daemon) if daemon.is_ours() else find_others(processes_on(gpu_uuid), set())
    except EnvironmentFaultError:
        return None
    # Ray names the process of a replica after its application.
    return None if processes is None else tuple(o for o in processes if not (o.name or "").startswith(_GPULET))
