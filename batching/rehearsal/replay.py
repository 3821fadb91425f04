"""A replay: recorded arrivals run in virtual time, with a new scheduler for each setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from tenuto.batching.core.deferred import DeferredOptions, DeferredScheduler
from tenuto.batching.core.deferred.deferring import Known
from tenuto.batching.core.scheduler import Dispatch, Scheduler
from tenuto.batching.core.system import INF, System


class Setting(NamedTuple):
    """The two knobs that rehearsals choose: number 0 is `hold`, number 1 is `defend`."""

    hold: float
    defend: float

    def changed(self, knob: int, value: float) -> Setting:
        """Return the setting with another value of one knob."""
        return self._replace(defend=value) if knob else self._replace(hold=value)


class Replayed(NamedTuple):
    """What one setting made of a replay: requests offered and met, by program, and how long gpu-lets were busy.
    `looked` counts the looks at batches, which say how long the replay took."""

    setting: Setting
    offered: tuple[int, ...]
    met: tuple[int, ...]
    busy_ms: float
    looked: int = 0


class Replay(NamedTuple):
    """The arrivals to replay, and the settings to try. It is deterministic, has no side effects and can be pickled.

    Every scheduler begins idle, with what was known when the recording began. Requests of the first and of the last SLO
    only keep gpu-lets busy; the places in between, `counted`, are counted. Where no request was given up for the size
    of a batch, smaller values of `defend` would have decided the same and are not run.
    """

    scheduler: type[DeferredScheduler]
    options: DeferredOptions
    system: System
    known: Known
    arrivals: Sequence[tuple[float, int, float]]  # (ms, model, deadline)
    counted: tuple[int, int]
    settings: tuple[Setting, ...]

    def run(self) -> list[Replayed]:
        """Return what each setting serves."""
        program_of, programs = self.system.program_of, len(self.system.programs)
        offered = [0] * programs
        for _, model, _ in self.arrivals[slice(*self.counted)]:
            offered[program_of[model]] += 1
        # With size classes, a batch has requests of several programs.
        owners = [program_of[model] for _, model, _ in self.arrivals] if self.system.joint_classes else []
        replayed: dict[Setting, Replayed] = {}
        for setting in sorted(self.settings, key=lambda setting: -setting.defend):
            if setting in replayed:
                continue
            chosen = replace(self.options, hold=setting.hold, defend=setting.defend)
            core = self.scheduler(self.system, chosen, self.known)
            met = [0] * programs
            busy_ms = self._run(core, met, owners)
            made = replayed[setting] = Replayed(setting, tuple(offered), tuple(met), busy_ms, core.looked)
            if not core.has_defended and _is_ascending(self.system):
                for other in self.settings:
                    if other.hold == setting.hold and other.defend < setting.defend:
                        replayed[other] = made._replace(setting=other)
        return [replayed[setting] for setting in self.settings]

    def _run(self, core: Scheduler, met: list[int], owners: list[int]) -> float:
        """Count in `met` the requests met, by program; returns how long gpu-lets are busy, in ms. `owners` has the
        program of each request, if batches mix them."""
        busy_ms = 0.0
        done: list[tuple[float, int]] = []
        add = core.add_request
        for number, (at, model, deadline) in enumerate(self.arrivals):
            while core.next_wake_ms < at or (done and done[0][0] <= at):
                _advance(core, done)
                if core.decisions:
                    busy_ms += _carry_out(core, done, met, owners, self.counted)
            add(at, model, number, deadline)
        while done or core.next_wake_ms < INF:
            _advance(core, done)
            if core.decisions:
                busy_ms += _carry_out(core, done, met, owners, self.counted)
        return busy_ms


def _is_ascending(system: System) -> bool:
    """Whether no larger batch is planned to take less time than a smaller one."""
    tables = {host.latency_ms for gpulet in system.gpulets for host in gpulet.hosts.values()}
    return all(short <= long for table in tables for short, long in pairwise(table))


def _advance(core: Scheduler, done: list[tuple[float, int]]) -> None:
    """Do the next event: a batch ends, or a timer fires."""
    wake = core.next_wake_ms
    if done and done[0][0] <= wake:
        at, gpulet = heappop(done)
        core.batch_done(at, gpulet)
    else:
        core.wake(wake)


def _carry_out(
    core: Scheduler, done: list[tuple[float, int]], met: list[int], owners: list[int], counted: tuple[int, int]
) -> float:
    """Send the batches that the scheduler decided on; returns how long they keep gpu-lets busy, in ms."""
    busy_ms = 0.0
    first, last = counted
    for decision in core.decisions:
        if type(decision) is Dispatch:
            gpulet, program, ids, start, finish = decision
            heappush(done, (finish, gpulet))
            busy_ms += finish - start
            if owners:
                for number in ids:
                    met[owners[number]] += first <= number < last
            else:
                met[program] += sum([first <= number < last for number in ids])
    core.decisions.clear()
    return busy_ms
