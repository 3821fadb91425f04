"""A gpu-let's share: the environment that asks for it, and the proof that it was given."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from tenuto.mps.control import ControlError
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.folders import pipe_directory
from tenuto.profiles.gpu_types import sms_of_share


def client_environment(
    gpu_uuid: str, share_pct: float | None, memory_mib: float | None, root: Path | None = None
) -> dict[str, str]:
    """Return the variables that a gpu-let's process needs in its environment when it starts. (CUDA reads them only
    then.)

    The share keeps its decimals; CUDA rounds it down to what the hardware supports. `memory_mib` is the cap of the
    whole process, with CUDA's own allocations. The cap is given for device 0, the only device that daemon and client
    see: NVIDIA's device plugin found that a cap which names the GPU by UUID is not applied.
    """
    environment = {"CUDA_VISIBLE_DEVICES": gpu_uuid, "CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory(gpu_uuid, root))}
    if share_pct is not None and share_pct < 100.0:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{share_pct:g}"
    if memory_mib is not None:
        environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={math.ceil(memory_mib)}M"
    return environment


def most_clients(driver: str) -> int:
    """Return how many CUDA contexts a GPU's server takes, with the default of two connections each: 60 since the driver
    of CUDA 13.1 (590), 48 before."""
    major = driver.partition(".")[0]
    return 60 if major.isdecimal() and int(major) >= 590 else 48  # format: of NVIDIA's driver


@dataclass(frozen=True)
class Report:
    """What a gpu-let's process reports after its warm-up.

    CUDA shows `sm_count` and `free_mib` to the process; `free_mib` is None if CUDA does not tell.
    """

    pid: int
    gpu_uuid: str
    sm_count: int
    free_mib: float | None = None


@dataclass(frozen=True)
class Attachment:
    """Whether a gpu-let got what its plan asks for: the `reasons` why not, or else how its process was recognised.

    `client` is the pid that the daemon uses for the process; it is another one if they are in different containers.
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
    """Prove that a gpu-let got what its plan asks for.

    All of these must hold: it runs on the planned GPU; the daemon lists it as a client; the server is active; it sees
    no more multiprocessors than its share, and no more free memory than its cap. CUDA runs silently without CUDA MPS
    when it does not find the daemon, and without the cap when it does not understand it, so none is enough.

    When daemon and process are in different PID namespaces, the pid is translated through the host's /proc. If that
    fails, the only new client in the namespace that the control program prints is taken; if that fails, the only client
    that came while no other process could start. A MIG device shows all its memory whatever the cap is, so free memory
    proves nothing there.

    Args:
        report: the report of the process.
        daemon: the daemon of the planned GPU.
        share_pct: the planned share; None: the whole GPU.
        gpu_sm_count: multiprocessors of the whole GPU; None: unknown, which is a reason where a share is planned.
        clients_before: the daemon's clients before this process started CUDA and after its turn to start had come.
        memory_mib: the planned cap of the process; None: no cap.
    """
    reasons, proof, client = [], None, None
    if _bare(report.gpu_uuid) != _bare(daemon.gpu_uuid):
        reasons.append(f"it runs on {report.gpu_uuid}, not on {daemon.gpu_uuid}")
    try:
        recognised = _recognise(report, daemon, clients_before)
        if recognised is None:
            reasons.append(f"the CUDA MPS daemon does not list its process {report.pid} as a client")
        else:
            proof, client = recognised
        status = daemon.status()
        if status != "ACTIVE":
            reasons.append(f"the CUDA MPS server is {status or 'not running'}")
    except ControlError as error:
        reasons.append(str(error))
    if share_pct is not None and share_pct < 100.0:
        if gpu_sm_count is None:
            reasons.append("the multiprocessors of the whole GPU could not be counted")
        else:
            allowed = sms_of_share(gpu_sm_count, share_pct)
            if report.sm_count > allowed:
                reasons.append(
                    f"it sees {report.sm_count} of {gpu_sm_count} multiprocessors, {share_pct:g} % are {allowed}"
                )
    if memory_mib is not None and not daemon.gpu_uuid.startswith("MIG-"):
        if report.free_mib is None:
            reasons.append(f"CUDA does not tell its free memory, so that the cap of {memory_mib:.0f} MiB is not proved")
        elif report.free_mib > math.ceil(memory_mib):
            reasons.append(
                f"CUDA shows it {report.free_mib:.0f} MiB of free memory, so that its cap of {memory_mib:.0f} MiB is "
                "not applied"
            )
    return Attachment(tuple(reasons), None, None) if reasons else Attachment((), proof, client)


def _recognise(report: Report, daemon: PrivateDaemon, before: Set[int] | None) -> tuple[str, int] | None:
    """Return how the process was recognised among the daemon's clients, and its pid there."""
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
    if len(newcomers) == 1:
        return "the only client that came during its start", newcomers.pop()
    return None


def _bare(uuid: str) -> str:
    """Return a UUID without its prefix: CUDA tells 16 bytes, but not whether they name a GPU or a MIG device."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
