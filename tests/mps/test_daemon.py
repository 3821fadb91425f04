"""The life of a private daemon: started once, joined, watched, stopped after the last, and never a foreign one."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from tenuto.mps.control import ControlError
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.folders import find_leftovers, pipe_directory
from tenuto.mps.reaper import reap

from .fakes import UUID, Bench


def test_the_first_gpulet_starts_the_daemon_scoped_to_its_gpu_and_without_any_share(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")  # of the gpu-let: the server must not inherit it
    bench.gpulet().join()

    environment = bench.daemon.environments[0]
    assert environment["CUDA_VISIBLE_DEVICES"] == UUID
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(pipe_directory(UUID, bench.root))
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environment
    assert bench.reapers == [UUID]


def test_later_gpulets_use_the_same_daemon(bench: Bench) -> None:
    gpulets = [bench.gpulet() for _ in range(3)]
    for gpulet in gpulets:
        gpulet.join()

    assert bench.daemon.starts == 1
    assert bench.reapers == [UUID]


def test_a_slow_start_is_waited_for(bench: Bench) -> None:
    bench.daemon.refusals_before_ready = 20
    bench.gpulet().join()

    assert 1.9 < bench.clock.now < 3.0


def test_a_daemon_that_never_gets_ready_is_an_error_with_its_last_words(bench: Bench) -> None:
    bench.daemon.refusals_before_ready = 10**6

    with pytest.raises(ControlError, match=r"not ready after 60 s: not ready"):
        bench.gpulet().join()


def test_a_foreign_daemon_is_named_and_left_alone(bench: Bench) -> None:
    pipes = pipe_directory(UUID, bench.root)
    pipes.mkdir(parents=True)
    (pipes / "nvidia-cuda-mps-control.pid").write_text("4242\n", encoding="utf-8")
    bench.processes.alive[4242] = 1

    with pytest.raises(ControlError, match=r"process 4242 runs a CUDA MPS daemon .* did not start"):
        bench.gpulet().join()
    assert bench.daemon.commands == []
    assert bench.daemon.starts == 0


def test_an_orphan_of_our_own_is_taken_over(bench: Bench) -> None:
    """Who started it was killed before it could write down that it had."""
    first = bench.joined()
    (pipe_directory(UUID, bench.root).parent / "owner.json").unlink()
    first.leave()
    for wrong in ({"CUDA_VISIBLE_DEVICES": "GPU-other"}, None):
        bench.processes.environments[bench.daemon.pid] = wrong
        with pytest.raises(ControlError, match="did not start"):
            bench.gpulet().join()
    bench.processes.environments[bench.daemon.pid] = bench.daemon.environments[0]
    later = bench.joined()
    assert later.is_ours()
    assert bench.daemon.starts == 1
    assert bench.reapers == [UUID, UUID]


def test_the_remains_of_a_dead_daemon_are_cleared(bench: Bench) -> None:
    pipes = pipe_directory(UUID, bench.root)
    pipes.mkdir(parents=True)
    (pipes / "nvidia-cuda-mps-control.pid").write_text("4242\n", encoding="utf-8")
    (pipes / "control").write_text("", encoding="utf-8")

    bench.gpulet().join()

    assert bench.daemon.starts == 1
    assert not (pipes / "control").exists()


def test_a_pid_that_was_used_again_is_not_taken_for_our_daemon(bench: Bench) -> None:
    bench.gpulet().join()
    bench.processes.alive[bench.daemon.pid] = 5  # the same pid, another process
    (pipe_directory(UUID, bench.root) / "nvidia-cuda-mps-control.pid").unlink()

    later = bench.gpulet()
    assert not later.is_ours()
    later.join()
    assert bench.daemon.starts == 2


def test_a_folder_of_another_user_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)

    with pytest.raises(ControlError, match=r"belongs to user .*, this is user 12345"):
        bench.gpulet().join()


@pytest.mark.parametrize("kind", ["open", "link", "theirs"])
def test_a_root_into_which_others_may_write_is_refused(
    bench: Bench, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could put pipes of their own in the place of a daemon's folder, which is ours."""
    bench.root /= "root"
    folder = pipe_directory(UUID, bench.root).parent
    folder.mkdir(parents=True)
    if kind == "open":
        bench.root.chmod(0o777)
    elif kind == "link":
        bench.root.rename(tmp_path / "elsewhere")
        bench.root.symlink_to(tmp_path / "elsewhere")
    else:
        real = Path.lstat

        def lstat(path: Path) -> os.stat_result:
            found = list(real(path))
            return os.stat_result([*found[:4], os.getuid() + (path == bench.root), *found[5:]])

        monkeypatch.setattr(Path, "lstat", lstat)
    (folder / "owner.json").write_text(json.dumps({"gpu_uuid": UUID, "pid": 1, "started_at": 1}))
    with pytest.raises(ControlError, match=f"{bench.root}.* Cure:"):
        bench.gpulet().join()
    assert bench.daemon.starts == 0
    assert find_leftovers(bench.root) == ()


def test_a_daemon_without_a_pid_file_is_refused(bench: Bench) -> None:
    bench.daemon.writes_pid = False

    with pytest.raises(ControlError, match="left no pid"):
        bench.gpulet().join()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="TENUTO_MPS_ROOT"):
        PrivateDaemon(UUID, root=tmp_path / ("x" * 90))


def test_gpulets_are_admitted_one_after_another(bench: Bench) -> None:
    first, second = bench.joined(), bench.joined()

    with (
        first.admitted(),
        pytest.raises(ControlError, match="another gpu-let holds admission"),
        second.admitted(timeout_s=3.0),
    ):
        pass
    with second.admitted(timeout_s=3.0):
        pass


def test_after_a_fault_nobody_is_admitted_until_the_server_is_active_again(bench: Bench) -> None:
    gpulet = bench.joined()
    bench.daemon.connect(41)
    bench.daemon.status = "FAULT"
    assert gpulet.status() == "FAULT"

    with pytest.raises(ControlError, match=r"stays FAULT for 5 s.*41"), gpulet.admitted(timeout_s=5.0):
        pass
    bench.daemon.status = "ACTIVE"
    with gpulet.admitted(timeout_s=5.0):
        pass


def test_a_client_is_terminated_through_its_server(bench: Bench) -> None:
    gpulet = bench.joined()
    bench.daemon.connect(41)
    gpulet.terminate(41)

    assert gpulet.clients() == ()
    with pytest.raises(ControlError, match="42 is no client"):
        gpulet.terminate(42)


def test_the_daemon_stops_only_after_the_last_gpulet_and_its_clients_have_gone(bench: Bench) -> None:
    first, second = bench.joined(), bench.joined()
    bench.daemon.connect(41)
    reaper = bench.gpulet()

    first.leave()
    assert reaper.is_used()
    assert not reaper.stop_if_unused()
    second.leave()
    assert not reaper.is_used()
    assert not reaper.stop_if_unused()  # process 41 has not ended yet
    assert reaper.is_ours()
    bench.daemon.client_pids.clear()
    assert reaper.stop_if_unused()
    assert not bench.daemon.is_running
    assert find_leftovers(bench.root, bench.processes) == ()


def test_a_daemon_has_time_to_end_on_a_machine_that_takes_seconds_for_each_command(bench: Bench) -> None:
    gpulet = bench.joined()
    gpulet.leave()
    bench.daemon.on_command = lambda: bench.clock.sleep(6.0)
    bench.daemon.seen_after_quit = 3
    assert gpulet.stop_if_unused(timeout_s=10.0)


def test_a_daemon_that_ignores_quit_is_an_error(bench: Bench) -> None:
    gpulet = bench.joined()
    gpulet.leave()
    bench.daemon.ignores_quit = True

    with pytest.raises(ControlError, match="does not end after `quit`"):
        bench.gpulet().stop_if_unused()


def test_the_reaper_waits_for_a_gpulet_that_is_being_replaced(bench: Bench) -> None:
    gpulet = bench.joined()
    gpulet.leave()
    polls = 0

    def sleep(_seconds: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            gpulet.join()
        if polls == 10:
            gpulet.leave()

    reap(bench.gpulet(), sleep)

    assert polls > 13
    assert not bench.daemon.is_running


def test_the_reaper_keeps_a_count_of_faults_until_gpulets_had_time_to_start_again(bench: Bench) -> None:
    gpulet = bench.joined()
    fault_and_recover(bench)
    gpulet.leave()
    polls = 0

    def sleep(_seconds: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 40:  # 80 s: torch is imported, after Serve's longest wait between two tries
            assert gpulet.recent_faults() == 1
            gpulet.join()
        if polls == 41:
            gpulet.leave()

    reap(bench.gpulet(), sleep)
    assert polls == 40 + 60
    assert gpulet.recent_faults() == 0


def test_the_reaper_ends_when_the_daemon_has_died(bench: Bench) -> None:
    bench.gpulet().join()
    bench.processes.alive.clear()

    reap(bench.gpulet(), lambda _seconds: pytest.fail("nothing to wait for"))


def test_leftovers_are_dead_daemons_and_daemons_without_gpulets(bench: Bench) -> None:
    gpulet = bench.joined()
    assert find_leftovers(bench.root, bench.processes) == ()

    gpulet.leave()
    (running,) = find_leftovers(bench.root, bench.processes)
    assert running.is_running
    assert running.gpu_uuid == UUID

    bench.processes.alive.clear()
    (dead,) = find_leftovers(bench.root, bench.processes)
    assert not dead.is_running


def test_a_damaged_record_is_no_daemon_of_ours(bench: Bench) -> None:
    folder = pipe_directory(UUID, bench.root).parent
    folder.mkdir(parents=True)
    for text in ("", "[]", json.dumps({"pid": "x"})):
        (folder / "owner.json").write_text(text, encoding="utf-8")
        assert not bench.gpulet().is_ours()
        assert find_leftovers(bench.root, bench.processes) == ()


def fault_and_recover(bench: Bench) -> None:
    """A fault that two gpu-lets see, after which both have left."""
    bench.daemon.status = "FAULT"
    for gpulet in (bench.gpulet(), bench.gpulet()):
        gpulet.note_fault()
    bench.daemon.status = "ACTIVE"


def test_restarts_after_faults_come_to_an_end_and_begin_again_later(bench: Bench) -> None:
    gpulet = bench.joined()
    bench.daemon.connect(41)
    for _ in range(2):
        fault_and_recover(bench)
        with gpulet.admitted():
            pass
    bench.clock.sleep(100.0)
    fault_and_recover(bench)
    with (
        pytest.raises(ControlError, match=r"faulted 3 times within 10 min.*not started again for 500 s"),
        gpulet.admitted(),
    ):
        pass
    bench.clock.sleep(501.0)
    with gpulet.admitted():
        pass


def test_faults_are_forgotten_with_the_daemon(bench: Bench) -> None:
    gpulet = bench.joined()
    for _ in range(3):
        fault_and_recover(bench)
        with contextlib.suppress(ControlError), gpulet.admitted():
            pass
    gpulet.leave()
    assert bench.gpulet().stop_if_unused()
    gpulet.join()
    with gpulet.admitted():
        pass


def test_a_running_gpulet_waits_for_its_turn_to_load_more_unless_it_has_to_leave(bench: Bench) -> None:
    first, second = bench.joined(), bench.joined()
    bench.daemon.connect(41)
    with first.admitted():
        with pytest.raises(ControlError, match="gave up after 3 s"), second.turn(lambda: False, 3.0):
            pass
        with pytest.raises(ControlError, match="has to leave"), second.turn(lambda: bench.clock.now > 5.0):
            pass
        assert bench.clock.now < 10.0
    with second.turn(lambda: False):
        pass
    bench.daemon.status = "FAULT"
    with pytest.raises(ControlError, match="is in FAULT"), second.turn(lambda: False):
        pass


def test_a_daemon_of_another_container_is_used_while_it_answers(bench: Bench) -> None:
    bench.gpulet().join()
    bench.processes.number = 77  # this process is in another container, which does not see the daemon's pid
    bench.processes.alive.clear()
    gpulet = bench.joined()
    assert bench.daemon.starts == 1
    assert gpulet.is_ours()
    assert not gpulet.speaks_our_pids()
    assert find_leftovers(bench.root, bench.processes) == ()

    bench.daemon.is_running = False
    assert not gpulet.is_ours()
    bench.gpulet().join()
    assert bench.daemon.starts == 2


def test_the_pid_of_our_dead_daemon_is_not_taken_for_a_foreign_one(bench: Bench) -> None:
    bench.gpulet().join()
    bench.processes.alive[bench.daemon.pid] = 5  # the pid is another process's by now; the pid file is still there
    bench.gpulet().join()
    assert bench.daemon.starts == 2
