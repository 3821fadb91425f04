"""Two gateways, two dispatchers and two gpu-lets, killed, stopped and cut off one after another, with the test in
Serve's place. Whatever happens, every request ends once, and no process begins what was given to another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.instruments.fault_process import DISPATCHERS, GPULETS
from tests.instruments.live import until
from tests.instruments.namespaces import Machine, machines, why_not

GATEWAYS = ("g", "h")
KIND = {
    **dict.fromkeys(GPULETS, "gpulet"),
    **dict.fromkeys(DISPATCHERS, "dispatcher"),
    **dict.fromkeys(GATEWAYS, "gateway"),
}
SOME = 15  # answers that show that requests are served
FIRST = 100_000  # numbers of requests of one gateway: a float32 has whole numbers up to 16 million


class Seen(NamedTuple):
    """What a gateway sees: dispatchers that are connected, gpu-lets that are up, the process that schedules."""

    dispatchers: int
    gpulets: int
    scheduling: int


class System:
    """The six processes, on one machine, by Unix sockets or by addresses, or each on a machine of its own."""

    def __init__(
        self, folder: Path, made: Mapping[str, Machine] | None = None, addresses: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self.machines = made or {}
        self._addresses = addresses or {name: machine.address for name, machine in self.machines.items()}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._gateways = 0

    def start(self, name: str) -> None:
        """Start a process, the first time or in place of one that has ended."""
        if name in self.processes:
            self.processes[name].communicate()
        kind, machine = KIND[name], self.machines.get(name)
        where = self._addresses.get(name, "")
        if kind == "gateway":
            self._gateways += 1
            where = str(FIRST * self._gateways)
        words = [sys.executable, "-m", "tests.instruments.fault_process", kind, name, str(self._folder), where]
        command = words if machine is None else machine.command(*words)
        with (self._folder / "log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def start_all(self) -> None:
        """Start them, each once those are there that it looks for."""
        for names in (GPULETS, DISPATCHERS, GATEWAYS):
            for name in names:
                self.start(name)
                if names != GATEWAYS:
                    until(lambda name=name: (self._folder / f"{name}.json").exists())  # type: ignore[misc]

    def end(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.kill()
            process.communicate()

    # --- what became of requests --------------------------------------------------------------------------------

    def _lines(self, file: Path) -> list[list[str]]:
        written = file.read_text() if file.exists() else ""
        return [line.split() for line in written.splitlines(keepends=True) if line.endswith("\n")]

    def said(self, name: str) -> list[list[str]]:
        """What a gateway's present process has written."""
        return self._lines(self._folder / f"asked-{name}-{self.processes[name].pid}")

    def ok(self, name: str) -> int:
        """Requests of a gateway's present process that were answered."""
        return sum(line[0] == "ended" and line[2] == "ok" for line in self.said(name))

    def sees(self, name: str) -> Seen:
        """What a gateway saw last."""
        last = next((line for line in reversed(self.said(name)) if line[0] == "sees"), None)
        return Seen(0, 0, 0) if last is None else Seen(int(last[1]), int(last[2]), int(last[3]))

    def scheduling(self) -> str:
        """The dispatcher that schedules for all gateways; "" where they do not agree."""
        found = {self.sees(name).scheduling for name in GATEWAYS}
        names = [name for name in DISPATCHERS if self.processes[name].pid in found]
        return names[0] if len(found) == 1 and names else ""

    def is_whole(self) -> bool:
        """Whether everybody is connected to everybody."""
        seen = [self.sees(name) for name in GATEWAYS]
        return all(each[:2] == (2, 2) for each in seen) and bool(self.scheduling())

    def serves(self, *names: str) -> None:
        """Wait until each of these gateways has got some more answers."""
        before = {name: self.ok(name) for name in names}
        until(lambda: all(self.ok(name) >= before[name] + SOME for name in names))

    def judge(self) -> None:
        """Hold all requests so far to what was promised; those of a gateway only if it still lives."""
        now_s = time.monotonic()
        answered: dict[int, float] = {}
        for file in self._folder.glob("asked-*"):
            name, pid = file.name.split("-")[1:]
            asked = {int(line[1]) for line in self._lines(file) if line[0] == "asked" and float(line[-1]) < now_s}

            def ended(file: Path = file) -> list[list[str]]:
                return [line for line in self._lines(file) if line[0] == "ended"]

            if self.processes[name].pid == int(pid):
                until(lambda: asked <= {int(line[1]) for line in ended()})  # noqa: B023
            ends = [line for line in ended() if int(line[1]) in asked]
            assert max(Counter(line[1] for line in ends).values(), default=0) <= 1
            answered |= {int(line[1]): float(line[-1]) for line in ends if line[2] == "ok"}
        begun = self._by_request("begun")
        given = self._by_request("given")  # read later: what has begun by then was given before
        for number_, at_s in answered.items():
            assert max(begun[number_])[0] < at_s, f"{number_} began after it was answered"
        for number_, times in begun.items():
            assert len(times) <= 2
            # When what began was given, of what was given to the same one the last before: in the order of the begins.
            gifts = [max(gift for gift in given[number_] if gift[1] == by and gift[0] < at) for at, by in times]
            assert gifts == sorted(gifts), f"{times[-1][1]} began {number_}, which {times[0][1]} had been given since"

    def recovers(self) -> None:
        """Wait until all have joined again, serve through every gateway, and judge all that was done."""
        until(self.is_whole)
        self.serves(*GATEWAYS)
        self.judge()

    def _by_request(self, file: str) -> dict[int, list[tuple[float, str]]]:
        """Return when requests were given to gpu-lets, or begun there, and to which, in order."""
        found: dict[int, list[tuple[float, str]]] = {}
        for number, name, at in self._lines(self._folder / file):
            found.setdefault(int(number), []).append((float(at), name))
        return {number: sorted(times) for number, times in found.items()}


@pytest.fixture(scope="module")
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The system that a test asks for. As it is one fixture, one system ends before the next begins."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("system")
        if request.param == "apart":
            reason = why_not()
            if reason:
                pytest.skip(reason)
            made = System(folder, stack.enter_context(machines(*KIND)))
        else:
            made = System(folder, addresses=dict.fromkeys(KIND, "127.0.0.1") if request.param == "by address" else None)
        stack.callback(made.end)
        made.start_all()
        yield made


NIGHT = pytest.mark.night
HERE = pytest.mark.parametrize("system", ["here"], indirect=True)
# Nobody knows whose process is behind an address, so that nobody kills a stopped one.
BY_ADDRESS = pytest.mark.parametrize("system", ["by address" if why_not() else "apart"], indirect=True)
APART = pytest.mark.parametrize("system", ["apart"], indirect=True)


def _victim(system: System, kind: str) -> str:
    """The process of this kind that matters most: of dispatchers the one that schedules."""
    until(system.is_whole)
    return system.scheduling() if kind == "dispatcher" else next(name for name in KIND if KIND[name] == kind)


def _victim_and_others(system: System, kind: str) -> tuple[str, list[str]]:
    """Serve, and return the victim and the gateways that it is not."""
    victim = _victim(system, kind)
    system.serves(*GATEWAYS)
    return victim, [name for name in GATEWAYS if name != victim]


def _has_noticed(system: System, victim: str, others: Sequence[str]) -> Callable[[], bool]:
    pid = system.processes[victim].pid

    def noticed() -> bool:
        seen = [system.sees(name) for name in others]
        if KIND[victim] == "gpulet":
            return all(each.gpulets == 1 for each in seen)
        return all(each.scheduling not in (0, pid) for each in seen)

    return noticed


@HERE
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(("gpulet", "kill"), ("dispatcher", "stop"), ("gateway", "stop")),
        # A dispatcher and a gateway are killed by day in `test_live_gateways.py` too.
        *(
            pytest.param(*each, marks=NIGHT)
            for each in (("gpulet", "stop"), ("gateway", "kill"), ("dispatcher", "kill"))
        ),
    ],
)
def test_a_process_that_is_killed_or_stopped_costs_no_other_and_runs_nothing_twice(
    system: System, kind: str, fault: str
) -> None:
    victim, others = _victim_and_others(system, kind)
    process = system.processes[victim]
    process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    process.wait(300.0)  # of a stopped one its peers make an end
    assert process.returncode == -signal.SIGKILL
    system.serves(*others)
    system.start(victim)
    system.recovers()


@BY_ADDRESS
@pytest.mark.parametrize("kind", ["gpulet", "dispatcher", pytest.param("gateway", marks=NIGHT)])
def test_a_process_that_was_given_up_and_goes_on_runs_nothing_that_others_were_given(system: System, kind: str) -> None:
    victim, others = _victim_and_others(system, kind)
    process = system.processes[victim]
    process.send_signal(signal.SIGSTOP)
    if kind != "gateway":
        until(_has_noticed(system, victim, others))
    else:
        time.sleep(1.5)  # the dispatchers let it go meanwhile, or do not: nothing is judged by that
    process.send_signal(signal.SIGCONT)
    system.serves(*others)
    system.recovers()
    assert process.poll() is None


# --- lines between machines -------------------------------------------------------------------------------------------


@APART
@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        *(("gpulet", "mended"), ("dispatcher", "killed behind it"), ("gateway", "mended")),
        pytest.param("gpulet", "killed behind it", marks=NIGHT),
        pytest.param("dispatcher", "mended", marks=NIGHT),
        pytest.param("gateway", "killed behind it", marks=NIGHT),
    ],
)
def test_a_machine_that_is_cut_off_is_replaced_and_joins_again_by_itself(system: System, kind: str, ends: str) -> None:
    victim, others = _victim_and_others(system, kind)
    system.machines[victim].cut()
    if kind != "gateway":
        until(_has_noticed(system, victim, others))
    else:
        until(lambda: system.sees(victim).dispatchers == 0)
    system.serves(*others)
    if ends != "mended":
        _kill(system.machines[victim])
        system.processes[victim].wait()
        system.machines[victim].mend()
        system.start(victim)
    else:
        system.machines[victim].mend()
    system.recovers()


@APART
def test_a_gateway_cut_off_from_the_dispatcher_that_schedules_takes_all_to_the_other_one(system: System) -> None:
    """The dispatcher lives, and hears everybody else: no gpu-let may be used by two."""
    victim = _victim(system, "dispatcher")
    far, near = system.machines["g"], system.machines[victim]
    far.cut_from([near])
    near.cut_from([far])
    pid = system.processes[victim].pid
    until(lambda: all(system.sees(name).scheduling not in (0, pid) for name in GATEWAYS))
    system.serves(*GATEWAYS)
    assert {system.sees(name).scheduling for name in GATEWAYS} == {
        system.processes[name].pid for name in DISPATCHERS if name != victim
    }
    far.mend()
    near.mend()
    system.recovers()


@APART
@pytest.mark.parametrize(
    ("kind", "delay_ms", "loss_pct"),
    [
        ("every", 25, 2.5),
        *(pytest.param(*each, marks=NIGHT) for each in (("dispatcher", 0, 5), ("gpulet", 50, 0), ("gateway", 50, 5))),
    ],
)
def test_a_far_line_that_loses_packets_repeats_no_request_and_all_join_again(
    system: System, kind: str, delay_ms: float, loss_pct: float
) -> None:
    victim = GATEWAYS[0] if kind == "every" else _victim(system, kind)
    lines = list(system.machines.values()) if kind == "every" else [system.machines[victim]]
    until(system.is_whole)
    for seed, machine in enumerate(lines):
        machine.disturb(delay_ms, loss_pct, seed)
    for _ in range(3):
        system.serves(*GATEWAYS)
    for machine in lines:
        machine.mend()
    system.recovers()


@APART
def test_a_gpulet_that_hears_its_dispatcher_late_runs_nothing_that_others_were_given(system: System) -> None:
    """What comes was said a second ago: whoever said it has given the gpu-let up meanwhile."""
    victim = _victim(system, "gpulet")
    system.serves(*GATEWAYS)
    system.machines[victim].disturb(1000, 0)
    until(_has_noticed(system, victim, GATEWAYS))
    system.serves(*GATEWAYS)
    system.machines[victim].mend()
    system.recovers()


def _kill(machine: Machine) -> None:
    found: Any = subprocess.run(
        ["ip", "netns", "pids", machine.namespace], capture_output=True, text=True, check=True
    ).stdout
    for pid in found.split():
        os.kill(int(pid), signal.SIGKILL)
