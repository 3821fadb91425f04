"""Finds out what CUDA MPS really does on a GPU: attachment, share against SM count, memory cap, killed clients, fault,
recovery.

The experiments run probe processes on a private daemon. Results are what the processes and the daemon report, each as
soon as it is there. Experiments that may break something are a part of their own. Steps of `scripts/gpu_check`: `--part
first` finds out whether a server takes a client at all; `shares` and `faults` run the other experiments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

from tenuto.errors import EnvironmentFaultError
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.share import client_environment
from tenuto.profiles.gpu_types import sms_of_share
from tenuto.profiles.measuring.worker_process import LineProcess
from tenuto_lab.gpu_check.results import Results, in_words

SHARES = (1, 10, 20, 25, 40, 50, 60, 75, 80, 100)
CAP_MIB = 2048
_READY_S = 90.0  # until a probe is ready
_QUIET_S = 20.0
_NOTICED_S = 5.0  # until the server shows a fault

Result = dict[str, Any]
Part = Literal["shares", "faults"]
Environment = Callable[[float | None, str | None], Mapping[str, str]]


class Daemon(Protocol):
    """The questions and orders to the CUDA MPS daemon of one GPU."""

    def status(self) -> str | None:
        """Return the server's status; None while there is no server."""

    def clients(self) -> tuple[int, ...]:
        """Return the clients' pids."""

    def look(self) -> tuple[str | None, tuple[int, ...]]:
        """Return both, from one run of the control program if possible."""

    def terminate(self, client: int) -> None:
        """End a client's work on the GPU."""

    @property
    def takes_two_commands(self) -> bool | None:
        """Whether the control program took two commands in one run; None: not tried."""


class Probe(Protocol):
    """One probe process."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        """Return its next event; None if it has ended, or has said nothing in time."""

    def tell(self) -> None:
        """Let an idle probe check the device, and a busy probe stop."""

    def kill(self) -> None:
        """Kill it, as the kernel does when memory runs out."""

    def end(self, timeout_s: float = 20.0) -> int | None:
        """Wait until it has ended and return its exit code; None when it did not end in time and was killed."""


StartProbe = Callable[[str, Mapping[str, str]], Probe]


class ProbeProcess(LineProcess):
    """A real probe process."""

    def __init__(self, mode: str, environment: Mapping[str, str], module: str = "tenuto_lab.gpu_check.probe") -> None:
        """Start it; `mode` may have an argument after a space. `module` is the program."""
        given = {**os.environ, **environment}
        super().__init__(["-m", module, *mode.split()], given, "probe", subprocess.DEVNULL)

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        """Return its next event; None if it has ended, or has said nothing in time."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                line = self._next_line(max(0.0, until - time.monotonic()))
            except queue.Empty:
                return None
            if line is None:
                return None
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):  # anything else is a library's own words
                    return event

    def kill(self) -> None:
        """Kill it, as the kernel does when memory runs out."""
        self._process.send_signal(signal.SIGKILL)

    def end(self, timeout_s: float = 20.0) -> int | None:
        """Wait until it has ended and return its exit code; None when it did not end in time and was killed."""
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        self._close()
        return code


def first_client(daemon: Daemon, environment: Environment, start: StartProbe) -> str | None:
    """Let one process connect, and return why CUDA MPS cannot be used here; None if it can.

    A daemon that answers is not enough: its server may fail to start, or CUDA may run without it and say nothing.
    """
    run = _Experiments(daemon, environment, 0, start, time.monotonic, time.sleep)
    found = run.guarded(run.attached)
    return found.get("failed")


def sharing_experiments(
    daemon: Daemon,
    environment: Environment,
    sm_count: int,
    report: Callable[[str, Result], None],
    *,
    part: Part,
    gpu_uuid: str = "",
    start: StartProbe | None = None,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    limit_s: float = math.inf,
    done: Collection[str] = (),
) -> None:
    """Run every experiment; one that fails is reported with its reason, and the next begins.

    Args:
        daemon: of the GPU.
        environment: of a client by share in percent and memory cap as CUDA reads it; None for either leaves it out.
        sm_count: of the whole GPU.
        report: takes the experiment's name and result as soon as there is one.
        part: the experiments that harm nobody, or those after which the server may be lost.
        gpu_uuid: of the GPU, for the cap that names it.
        start: starts a probe.
        clock_s: monotonic clock.
        sleep: waits.
        limit_s: no experiment begins after this time.
        done: names of experiments that are not repeated.
    """
    run = _Experiments(daemon, environment, sm_count, start or ProbeProcess, clock_s, sleep)
    experiments: dict[str, Callable[[], Result]]
    if part == "shares":
        experiments = {
            "memory cap by device 0": partial(run.memory_cap, f"0={CAP_MIB}M"),
            "memory cap by UUID": partial(run.memory_cap, f"{gpu_uuid}={CAP_MIB}M"),
            "context": run.context,
            "two commands in one run": run.two_commands,
            **{f"share {share} %": partial(run.share, share) for share in SHARES},
        }
    else:
        experiments = {
            "kill of an idle client": partial(run.killed, "idle", polite=False),
            "terminate_client, then kill": partial(run.killed, "busy", polite=True),
            "kill of a busy client": partial(run.killed, "busy", polite=False),
            "fault and recovery": run.fault,
        }
    began = clock_s()
    for name, experiment in experiments.items():
        if name in done:
            continue
        is_late = clock_s() - began > limit_s
        report(name, {"failed": "left out: the step's time was over"} if is_late else run.guarded(experiment))


class _Experiments:
    def __init__(
        self,
        daemon: Daemon,
        environment: Environment,
        sm_count: int,
        start: StartProbe,
        clock_s: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._daemon, self._environment, self._sm_count = daemon, environment, sm_count
        self._start, self._clock_s, self._sleep = start, clock_s, sleep
        self._running: list[Probe] = []

    def guarded(self, experiment: Callable[[], Result]) -> Result:
        """Run one experiment and leave no probe behind."""
        try:
            return experiment()
        except Exception as error:  # after any error the next experiment may still tell something
            return {"failed": in_words(error)}
        finally:
            for probe in self._running:
                probe.tell()
                probe.end()
            self._running.clear()

    def _ready(self, mode: str, share: float | None = None, cap: str | None = None) -> tuple[Probe, Result]:
        probe = self._start(mode, self._environment(share, cap))
        self._running.append(probe)
        event = probe.next_event(_READY_S)
        if event is None or event.get("event") != "ready":
            reason = "nothing" if event is None else event.get("text", event)
            raise EnvironmentFaultError(f"a probe ({mode}) did not start: {reason}.")
        return probe, event

    def attached(self) -> Result:
        probe, _ = self._ready("idle")
        status, clients = self._daemon.look()
        if probe.pid not in clients:
            raise EnvironmentFaultError(
                f"a process that should be its client runs without it (server {status or 'not there'}, clients "
                f"{', '.join(map(str, clients)) or 'none'})."
            )
        return {"status": status}

    def share(self, share: float) -> Result:
        probe, seen = self._ready("idle", None if share >= 100 else share)
        listed = probe.pid in self._daemon.clients()
        probe.tell()
        return {
            "sm_count": seen["sm_count"],
            "share_of_sms": round(self._sm_count * share / 100.0, 2),
            "at_or_below": seen["sm_count"] <= sms_of_share(self._sm_count, share),
            "listed_as_client": listed,
            "status": self._daemon.status(),
            "free_mib": seen["free_mib"],
        }

    def memory_cap(self, cap: str) -> Result:
        probe, seen = self._ready(f"allocate {2 * CAP_MIB}", None, cap)
        got, event = 0, probe.next_event(_READY_S)
        while event is not None and event["event"] == "allocated":
            got, event = int(event["mib"]), probe.next_event(_READY_S)
        is_applied = event is not None and event.get("event") == "refused" and got < CAP_MIB
        result: Result = {
            "cap": cap,
            "is_applied": is_applied,
            "shown_free_mib": seen["free_mib"],
            "shown_total_mib": seen["total_mib"],
            "allocated_mib": got,
            "ended_with": "no refusal" if event is None else event.get("kind"),
            "status": self._daemon.status(),
        }
        return result | ({"context_mib": CAP_MIB - got} if is_applied else {})

    def context(self) -> Result:
        """Measure the memory that a process takes before its own tensors, and the memory that libraries add."""
        watcher, before = self._ready("idle")
        probe, _ = self._ready("libraries")
        loaded = probe.next_event(_READY_S)
        if loaded is None or loaded.get("event") != "loaded":
            raise EnvironmentFaultError(f"the libraries could not be loaded: {loaded}.")
        watcher.tell()
        taken = before["free_mib"] - loaded["free_mib"] - loaded["reserved_mib"]
        return {"context_mib": taken, "reserved_mib": loaded["reserved_mib"]}

    def two_commands(self) -> Result:
        """See whether the control program takes several commands at once, which gpu-lets then do every two seconds."""
        probe, _ = self._ready("idle")
        self._daemon.look()  # finds the server
        status, clients = self._daemon.look()
        taken = self._daemon.takes_two_commands
        return {"taken": taken, "status": status, "listed_as_client": probe.pid in clients}

    def killed(self, mode: str, *, polite: bool) -> Result:
        """Kill one client beside a busy neighbour and see whether the neighbour and the server go on."""
        neighbour, _ = self._ready("busy", 50)
        victim, _ = self._ready(mode, 50)
        if mode == "busy":
            victim.next_event(_READY_S)  # its first round is through: work is in flight
        result: Result = {"clients_before": len(self._daemon.clients())}
        if polite:
            self._daemon.terminate(victim.pid)
        victim.kill()
        victim.end()
        self._running.remove(victim)
        began = self._clock_s()
        while victim.pid in self._daemon.clients() and self._clock_s() - began < _QUIET_S:
            self._sleep(0.1)
        result |= {"gone_after_s": round(self._clock_s() - began, 2), "neighbour": self._health(neighbour)}
        result["status"] = self._daemon.status()
        result["new_client"] = self._newcomer()
        return result

    def fault(self) -> Result:
        """Fault one client beside a busy one; see what the neighbour and the server do, and when clients may return."""
        neighbour, _ = self._ready("busy", 50)
        culprit, _ = self._ready("fault", 50)
        said = culprit.next_event(_READY_S)
        began = self._clock_s()
        while (status := self._daemon.status()) == "ACTIVE" and self._clock_s() - began < _NOTICED_S:
            self._sleep(0.1)
        result: Result = {
            "culprit": None if said is None else said.get("text", said["event"]),
            "status_after_fault": status,
            "neighbour": self._health(neighbour),
        }
        for probe in (culprit, neighbour):
            probe.tell()
            probe.end()
            self._running.remove(probe)
        began = self._clock_s()
        while (status := self._daemon.status()) not in (None, "ACTIVE") and self._clock_s() - began < _QUIET_S:
            self._sleep(0.1)
        result |= {"recovered_after_s": round(self._clock_s() - began, 2), "status": status}
        result["new_client"] = self._newcomer()
        return result

    def _health(self, probe: Probe) -> str:
        """Say whether a busy probe goes on: after what it said before now, two more rounds."""
        while (event := probe.next_event(0.0)) is not None:
            if event["event"] != "alive":
                return str(event.get("text", event["event"]))
        for _ in range(2):
            event = probe.next_event(_QUIET_S)
            if event is None:
                return "ended or hangs"
            if event["event"] != "alive":
                return str(event.get("text", event["event"]))
        return "goes on"

    def _newcomer(self) -> str:
        try:
            _, seen = self._ready("look", 50)
        except EnvironmentFaultError as error:
            return str(error)
        return f"starts and sees {seen['sm_count']} SMs"


def main(arguments: Sequence[str] | None = None, *, start: StartProbe | None = None) -> int:
    """Run one part without the experiments that have a result; return 1 if an experiment came to no result."""
    parser = argparse.ArgumentParser(prog="python -m tenuto_lab.gpu_check.sharing", description=__doc__)
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--part", choices=("first", "shares", "faults"), required=True)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="after which no experiment begins")
    given = parser.parse_args(arguments)
    results = Results(given.output)
    gpu = results.read("inventory.json")

    def usable(reason: str | None) -> None:
        results.write("mps.json", {"is_usable": reason is None, "reason": reason})
        print("CUDA MPS can be used" if reason is None else f"without CUDA MPS: {reason}", file=sys.stderr)

    if given.part == "first":
        results.write("mps.json", {"is_usable": False, "reason": "the first client came to no end"})  # unless it does
    try:
        if gpu["is_mig"] or tuple(map(int, str(gpu["compute_capability"]).split("."))) < (7, 0):
            raise EnvironmentFaultError("shares need a GPU of compute capability 7.0 or later, not in MIG mode")
        daemon = PrivateDaemon(str(gpu["uuid"]))
        daemon.join()
    except Exception as error:  # not permitted, not installed, no folder for it: CUDA MPS cannot be used
        usable(in_words(error))
        return 0 if given.part == "first" else 1
    try:
        if given.part == "first":
            usable(first_client(daemon, partial(_environment, str(gpu["uuid"])), start or ProbeProcess))
            return 0
        failed = _run_part(given.part, daemon, gpu, results, start, given.limit_s)
        if given.part == "faults" and (lost := _renew(daemon)) is not None:
            usable(f"after the kills and the fault: {lost}")
        return 1 if failed else 0
    finally:
        daemon.leave()


def _environment(uuid: str, share: float | None, cap: str | None) -> Mapping[str, str]:
    own = client_environment(uuid, share, None)
    return own if cap is None else own | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": cap}


def _run_part(
    part: Part,
    daemon: PrivateDaemon,
    gpu: Mapping[str, Any],
    results: Results,
    start: StartProbe | None,
    limit_s: float,
) -> bool:
    """Run a part's experiments, write each result as it comes, and return whether any came to none."""
    found = {name: result for name, result in results.read("sharing.json").items() if "failed" not in result}
    failed = False

    def report(name: str, result: Result) -> None:
        nonlocal failed
        found[name] = result
        failed |= "failed" in result
        results.write("sharing.json", found)
        print(f"{name}: {json.dumps(result)}", file=sys.stderr, flush=True)

    uuid = str(gpu["uuid"])
    sharing_experiments(
        daemon,
        partial(_environment, uuid),
        int(gpu["sm_count"]),
        report,
        part=part,
        gpu_uuid=uuid,
        start=start,
        limit_s=limit_s,
        done=tuple(found),
    )
    return failed


def _renew(daemon: PrivateDaemon) -> str | None:
    """Start the daemon again if killed clients and a fault have left it unable to serve; return why that fails."""
    try:
        if daemon.status() in (None, "ACTIVE"):
            return None
    except EnvironmentFaultError:
        pass
    try:
        daemon.leave()
        daemon.stop_if_unused()
        daemon.join()
        return None if (status := daemon.status()) in (None, "ACTIVE") else f"the server stays {status}"
    except EnvironmentFaultError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
