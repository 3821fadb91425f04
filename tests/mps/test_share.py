"""What a gpu-let's process is started with, and the four proofs that it got it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.share import Attachment, Report, client_environment, verify_attachment

from .fakes import OTHER, UUID, Bench

GOOD = Report(pid=41, gpu_uuid=UUID, sm_count=32)


@pytest.fixture
def daemon(bench: Bench) -> PrivateDaemon:
    gpulet = bench.joined()
    bench.daemon.connect(41)
    return gpulet


def test_the_environment_asks_for_gpu_share_and_memory(tmp_path: Path) -> None:
    environment = client_environment(UUID, 37.5, 3000.2, tmp_path)

    assert environment["CUDA_VISIBLE_DEVICES"] == UUID
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "37.5"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=3001M"
    assert environment["CUDA_MPS_PIPE_DIRECTORY"].startswith(str(tmp_path))


def test_a_whole_gpu_asks_for_no_share_and_no_cap_means_none(tmp_path: Path) -> None:
    assert set(client_environment(UUID, 100.0, None, tmp_path)) == {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"}
    assert set(client_environment(UUID, None, None, tmp_path)) == {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"}


def test_all_four_proofs_hold(daemon: PrivateDaemon) -> None:
    assert verify_attachment(GOOD, daemon, 40.0, 80) == Attachment((), "pid", 41)


def test_the_wrong_gpu_is_found(daemon: PrivateDaemon) -> None:
    assert "not on" in verify_attachment(replace(GOOD, gpu_uuid=OTHER), daemon, 40.0, 80).reasons[0]


def test_a_process_that_silently_runs_without_mps_is_found(bench: Bench, daemon: PrivateDaemon) -> None:
    bench.daemon.client_pids.clear()
    reasons = verify_attachment(replace(GOOD, sm_count=80), daemon, 40.0, 80).reasons

    assert len(reasons) == 2
    assert "does not list its process 41" in reasons[0]
    assert "80 of 80 multiprocessors, 40 % are 32" in reasons[1]


@pytest.mark.parametrize("status", ["FAULT", "INITIALIZING"])
def test_a_server_that_is_not_active_is_found(bench: Bench, daemon: PrivateDaemon, status: str) -> None:
    bench.daemon.status = status

    assert verify_attachment(GOOD, daemon, 40.0, 80).reasons == (f"the CUDA MPS server is {status}",)


def test_a_daemon_that_died_is_a_reason_and_no_crash(bench: Bench, daemon: PrivateDaemon) -> None:
    bench.daemon.is_running = False

    assert "Cannot find" in verify_attachment(GOOD, daemon, 40.0, 80).reasons[0]


def test_shares_round_down_but_never_to_nothing(daemon: PrivateDaemon) -> None:
    assert verify_attachment(replace(GOOD, sm_count=2), daemon, 1.0, 80).reasons == ()  # a cluster of two at least
    assert verify_attachment(replace(GOOD, sm_count=3), daemon, 1.0, 80).reasons != ()
    assert verify_attachment(replace(GOOD, sm_count=31), daemon, 39.9, 80).reasons == ()
    assert verify_attachment(replace(GOOD, sm_count=32), daemon, 39.9, 80).reasons != ()


def test_a_share_that_cannot_be_counted_is_no_proof_and_a_whole_gpu_needs_none(daemon: PrivateDaemon) -> None:
    assert "could not be counted" in verify_attachment(GOOD, daemon, 40.0, None).reasons[0]
    assert verify_attachment(GOOD, daemon, None, None).reasons == ()


# --- the daemon is in another container ---------------------------------------------------------------------------


@pytest.fixture
def elsewhere(bench: Bench, daemon: PrivateDaemon) -> PrivateDaemon:
    """The daemon knows this process, 41 to itself, as 9041; one client, 9001, was there before."""
    bench.processes.number = 77
    bench.daemon.client_pids[:] = [9001, 9041]
    return daemon


def attach(daemon: PrivateDaemon, report: Report = GOOD, **given: Any) -> Attachment:
    return verify_attachment(report, daemon, 40.0, 80, **{"clients_before": {9001}, **given})


def test_a_pid_is_translated_through_the_hosts_proc(bench: Bench, elsewhere: PrivateDaemon) -> None:
    bench.processes.outside[41] = {9041, 7}
    assert attach(elsewhere, clients_before=None) == Attachment((), "pid translated through the host's /proc", 9041)


def test_else_the_namespace_that_the_daemon_tells_is_the_proof(bench: Bench, elsewhere: PrivateDaemon) -> None:
    bench.daemon.namespaces = {9001: 1, 9041: 77}
    assert attach(elsewhere) == Attachment((), "the only new client of its PID namespace", 9041)


def test_else_the_only_new_client_is_taken_for_it(bench: Bench, elsewhere: PrivateDaemon) -> None:
    proof = "the only client that came during its start"
    assert attach(elsewhere) == Attachment((), proof, 9041)
    assert attach(elsewhere, replace(GOOD, free_mib=2900.0), memory_mib=3000.0) == Attachment((), proof, 9041)


def test_a_cap_is_proved_by_free_memory_also_where_the_pid_proves_the_attachment(daemon: PrivateDaemon) -> None:
    def reasons(free_mib: float | None) -> tuple[str, ...]:
        return verify_attachment(replace(GOOD, free_mib=free_mib), daemon, 40.0, 80, memory_mib=3000.0).reasons

    assert reasons(2400.0) == ()
    assert "is not applied" in reasons(15_500.0)[0]
    assert "not proved" in reasons(None)[0]


def test_no_new_client_or_two_prove_nothing(bench: Bench, elsewhere: PrivateDaemon) -> None:
    assert "does not list" in attach(elsewhere, clients_before={9001, 9041}).reasons[0]
    assert "does not list" in attach(elsewhere, clients_before=set()).reasons[0]
    assert "does not list" in attach(elsewhere, clients_before=None).reasons[0]


def test_a_number_that_another_containers_process_has_too_is_no_proof(bench: Bench, elsewhere: PrivateDaemon) -> None:
    bench.daemon.client_pids[:] = [41]  # a process of the daemon's container
    assert "does not list" in attach(elsewhere, clients_before={41}).reasons[0]


def test_a_mig_device_is_told_by_its_own_uuid_and_shows_all_its_memory(bench: Bench) -> None:
    uuid = UUID.replace("GPU-", "MIG-")
    gpulet = bench.joined(uuid)
    assert bench.daemon.environments[-1]["CUDA_VISIBLE_DEVICES"] == uuid
    bench.processes.number = 77
    bench.daemon.connect(9041)
    report = Report(41, UUID, 16, 20_096.0)  # CUDA tells the bytes of the UUID, not what they name
    found = verify_attachment(report, gpulet, 40.0, 42, clients_before=set(), memory_mib=3000.0)
    assert found.client == 9041
