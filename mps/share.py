"""A gpu-let's share: the environment that asks for it, and the proof that it was given."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from tenuto.mps.control import ControlError
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.folders import pipe_directory

__all__ = ["CONTEXT_MIB", "Attachment", "Report", "client_environment", "verify_attachment"]

CONTEXT_MIB = 600  # of a CUDA context with the libraries' workspaces, on top of a plan's memory of models


def client_environment(
    gpu_uuid: str, share_pct: float | None, memory_mib: float | None, root: Path | None = None
) -> dict[str, str]:
    """Return what a gpu-let's process must find in its environment when it starts; later is too late for CUDA.

    The share is written with the decimals it has: CUDA rounds it down to what the hardware supports. The memory cap is
    the plan's with `CONTEXT_MIB` added, since CUDA counts its own allocations too.
    """
    environment = {
        "CUDA_VISIBLE_DEVICES": gpu_uuid,
        "CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory(gpu_uuid, root)),
    }
    if share_pct is not None and share_pct < 100.0:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{share_pct:g}"
    if memory_mib is not None:
        environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"{gpu_uuid}={cap_mib(memory_mib)}M"
    return environment


def cap_mib(memory_mib: float) -> int:
    """Return CUDA's cap in MiB for a planned memory of models."""
    return math.ceil(memory_mib + CONTEXT_MIB)


@dataclass(frozen=True)
class Report:
    """What a gpu-let's process says of itself after its warm-up.

    `sm_count` and `memory_mib` are what CUDA shows it; `memory_mib` is None where CUDA does not tell.
    """

    pid: int
    gpu_uuid: str
    sm_count: int
    memory_mib: float | None = None


@dataclass(frozen=True)
class Attachment:
    """Whether a gpu-let is what its plan asks for: `reasons` why not, and else how its process was recognised.

    `client` is its pid in the daemon's words, which differ from its own where they are in different containers.
    """

    reasons: tuple[str, ...]
    proof: str | None
    client: int | None


def verify_attachment(
    report: Report,
    daemon: PrivateDaemon,
    share_pct: float | None,
    gpu_sm_count: int | None,
    *,
    clients_before: Set[int] | None = None,
    memory_mib: float | None = None,
) -> Attachment:
    """Prove that a gpu-let is what its plan asks for.

    All of four must hold: it runs on the planned GPU; the daemon lists it as a client; the server is active; and it
    sees no more multiprocessors than its share. CUDA runs silently without CUDA MPS when it does not find the daemon,
    so none is enough.

    Where daemon and process are in different PID namespaces, the pid is translated through the host's /proc, else taken
    from the namespace that the control program prints, else the one client that came while no other could is taken
    for it, if it also sees no more memory than its cap.

    Args:
        report: of the process.
        daemon: of the planned GPU.
        share_pct: the planned share; None: the whole GPU.
        gpu_sm_count: multiprocessors of the whole GPU; None: unknown, which is a reason where a share is planned.
        clients_before: the daemon's clients before this process started CUDA and after its turn to start had come.
        memory_mib: the planned memory of models; None: no cap.
    """
    reasons, proof, client = [], None, None
    if _bare(report.gpu_uuid) != _bare(daemon.gpu_uuid):
        reasons.append(f"it runs on {report.gpu_uuid}, not on {daemon.gpu_uuid}")
    try:
        found = _recognise(report, daemon, clients_before, memory_mib)
        if found is None:
            reasons.append(f"the CUDA MPS daemon does not list its process {report.pid} as a client")
        else:
            proof, client = found
        status = daemon.status()
        if status != "ACTIVE":
            reasons.append(f"the CUDA MPS server is {status or 'not running'}")
    except ControlError as error:
        reasons.append(str(error))
    if share_pct is not None and share_pct < 100.0:
        if gpu_sm_count is None:
            reasons.append("the multiprocessors of the whole GPU could not be counted")
        else:
            # Rounded down by the hardware, but never to nothing.
            allowed = max(1, math.floor(gpu_sm_count * share_pct / 100.0 + 1e-9))
            if report.sm_count > allowed:
                reasons.append(
                    f"it sees {report.sm_count} of {gpu_sm_count} multiprocessors, {share_pct:g} % are {allowed}"
                )
    return Attachment(tuple(reasons), None, None) if reasons else Attachment((), proof, client)


def _recognise(
    report: Report, daemon: PrivateDaemon, before: Set[int] | None, memory_mib: float | None
) -> tuple[str, int] | None:
    """Return how the process was recognised among the daemon's clients, and as which."""
    clients = daemon.clients()
    if daemon.speaks_our_pids():
        return ("pid", report.pid) if report.pid in clients else None
    translated = {*daemon.processes.numbers_elsewhere(report.pid)} & {*clients}
    if len(translated) == 1:
        return "pid translated through the host's /proc", translated.pop()
    newcomers = set(clients) - (before if before is not None else set(clients))
    ours = {client.pid for client in daemon.described_clients() if client.namespace == daemon.processes.namespace()}
    if len(newcomers) == 1 and newcomers <= ours:
        return "the only new client of its PID namespace", newcomers.pop()
    is_capped = memory_mib is not None and not daemon.gpu_uuid.startswith("MIG-")  # a MIG device shows all its memory
    fits = not is_capped or (report.memory_mib is not None and report.memory_mib <= cap_mib(memory_mib or 0.0))
    if len(newcomers) == 1 and fits:
        return "the only client that came during its start", newcomers.pop()
    return None


def _bare(uuid: str) -> str:
    """CUDA tells 16 bytes; whether they name a GPU or a MIG device is our knowledge."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
