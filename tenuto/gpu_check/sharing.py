"""What CUDA MPS really does on a GPU: share against SM count, memory cap, killed clients, fault and recovery.

Experiments on a private daemon with probe processes; each result is handed over as soon as there is one. Nothing is
judged here but by what processes and daemon report.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

from tenuto.errors import EnvironmentFaultError

__all__ = ["Daemon", "Probe", "ProbeProcess", "StartProbe", "sharing_experiments"]

SHARES = (10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 100)
CAP_MIB = 2048
_QUIET_S = 20.0
_NOTICED_S = 5.0  # until the server shows a fault

Result = dict[str, Any]


class Daemon(Protocol):
    """What is asked of the CUDA MPS daemon of one GPU."""

    def status(self) -> str | None:
        """Return the server's status, None while there is no server."""

    def clients(self) -> tuple[int, ...]:
        """Return the clients' pids."""

    def terminate(self, client: int) -> None:
        """End a client's work on the GPU."""


class Probe(Protocol):
    """One probe process."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        """Return what it says next; None when it has ended or said nothing in time."""

    def tell(self) -> None:
        """Let an idle one check the device, and a busy one stop."""

    def kill(self) -> None:
        """Kill it, as the kernel does when memory runs out."""

    def end(self, timeout_s: float = 20.0) -> int | None:
        """Wait until it has ended and return its exit code; None when it did not end in time and was killed."""


StartProbe = Callable[[str, Mapping[str, str]], Probe]


class ProbeProcess:
    """A real one."""

    def __init__(self, mode: str, environment: Mapping[str, str], module: str = "tenuto.gpu_check.probe") -> None:
        """Start it; `mode` may carry an argument after a space. `module` is the program."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *mode.split()], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **environment},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._collect, name="probe", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _collect(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        """Return what it says next; None when it has ended or said nothing in time."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return None
            if line is None:
                self._lines.put(None)  # it has ended: whoever asks again is told so again
                return None
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):  # anything else is a library's own words
                    return event

    def tell(self) -> None:
        """Let an idle one check the device, and a busy one stop."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write("\n")
                self._process.stdin.flush()

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
        self._reader.join(timeout=5.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return code


def sharing_experiments(
    daemon: Daemon, environment: Callable[[float | None, float | None], Mapping[str, str]], sm_count: int,
    report: Callable[[str, Result], None], *, start: StartProbe = ProbeProcess,
    clock_s: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    timeout_s: float = 120.0, limit_s: float = math.inf, done: Collection[str] = (),
) -> None:
    """Run every experiment; one that fails is reported with its reason, and the next begins.

    Args:
        daemon: of the GPU.
        environment: of a client by share in percent and memory cap in MiB; None for either leaves it out.
        sm_count: of the whole GPU.
        report: takes the experiment's name and result as soon as there is one.
        start: starts a probe.
        clock_s: monotonic clock.
        sleep: waits.
        timeout_s: for a probe to be ready.
        limit_s: after which no experiment begins.
        done: names of experiments that need no repetition.
    """
    run = _Experiments(daemon, environment, sm_count, start, clock_s, sleep, timeout_s)
    experiments: dict[str, Callable[[], Result]] = {f"share {share} %": partial(run.share, share) for share in SHARES}
    experiments |= {
        "memory cap": run.memory_cap,
        "kill of an idle client": partial(run.killed, "idle", polite=False),
        "kill of a busy client": partial(run.killed, "busy", polite=False),
        "terminate_client, then kill": partial(run.killed, "busy", polite=True),
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
        self, daemon: Daemon, environment: Callable[[float | None, float | None], Mapping[str, str]], sm_count: int,
        start: StartProbe, clock_s: Callable[[], float], sleep: Callable[[float], None], timeout_s: float,
    ) -> None:
        self._daemon, self._environment, self._sm_count = daemon, environment, sm_count
        self._start, self._clock_s, self._sleep, self._timeout_s = start, clock_s, sleep, timeout_s
        self._running: list[Probe] = []

    def guarded(self, experiment: Callable[[], Result]) -> Result:
        """Run one experiment and leave no probe behind."""
        try:
            return experiment()
        except EnvironmentFaultError as error:
            return {"failed": str(error)}
        finally:
            for probe in self._running:
                probe.tell()
                probe.end()
            self._running.clear()

    def _ready(self, mode: str, share: float | None = None, cap_mib: float | None = None) -> tuple[Probe, Result]:
        probe = self._start(mode, self._environment(share, cap_mib))
        self._running.append(probe)
        event = probe.next_event(self._timeout_s)
        if event is None or event.get("event") != "ready":
            reason = "nothing" if event is None else event.get("text", event)
            raise EnvironmentFaultError(f"a probe ({mode}) did not start: {reason}.")
        return probe, event

    def share(self, share: float) -> Result:
        probe, seen = self._ready("idle", None if share >= 100 else share)
        listed = probe.pid in self._daemon.clients()
        probe.tell()
        allowed = self._sm_count * share / 100.0
        return {
            "sm_count": seen["sm_count"], "share_of_sms": round(allowed, 2), "at_or_below": seen["sm_count"] <= allowed,
            "listed_as_client": listed, "status": self._daemon.status(), "free_mib": seen["free_mib"],
        }  # fmt: skip

    def memory_cap(self) -> Result:
        probe, seen = self._ready(f"allocate {2 * CAP_MIB}", None, CAP_MIB)
        got, event = 0, probe.next_event(self._timeout_s)
        while event is not None and event["event"] == "allocated":
            got, event = int(event["mib"]), probe.next_event(self._timeout_s)
        return {"cap_mib": CAP_MIB, "shown_total_mib": seen["total_mib"], "allocated_mib": got,
                "ended_with": "no refusal" if event is None else event.get("kind"), "status": self._daemon.status()}

    def killed(self, mode: str, *, polite: bool) -> Result:
        """Kill one client beside a busy neighbour and see whether the neighbour and the server go on."""
        neighbour, _ = self._ready("busy", 50)
        victim, _ = self._ready(mode, 50)
        if mode == "busy":
            victim.next_event(self._timeout_s)  # its first round is through: work is in flight
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
        said = culprit.next_event(self._timeout_s)
        began = self._clock_s()
        while (status := self._daemon.status()) == "ACTIVE" and self._clock_s() - began < _NOTICED_S:
            self._sleep(0.1)
        result: Result = {
            "culprit": None if said is None else said.get("text", said["event"]),
            "status_after_fault": status, "neighbour": self._health(neighbour),
        }  # fmt: skip
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
