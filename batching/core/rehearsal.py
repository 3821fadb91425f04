"""Rehearsal: what was just offered is replayed under other settings, and the one that would have served most is taken.

The scheduler records the arrivals of a while and the state in which they found it. A `Replay` runs them in virtual
time, once for each value of one of the two knobs of the setting, by turns. It is deterministic and has no side effects:
the driver in virtual time runs it on the spot, the live one in another process.

What a value served is remembered with a memory of 0.8, and a value is taken only where it would serve 0.1 % of the
requests more than the present one. What was found under light load says nothing of heavy load, nor the reverse: each
has its own memory and its own setting.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from tenuto.batching.core.gpulets import GpuletState
from tenuto.batching.core.scheduler import Dispatch, Scheduler, SchedulerOptions
from tenuto.batching.core.system import INF, NetworkDelay, System
from tenuto.batching.core.told import SchedulerStatus

VALUES: tuple[tuple[float, ...], ...] = ((0.0, 0.4, 0.7, 1.0), (0.5, 0.75, 1.0, 1.5))  # of each knob
FIRST = 200  # requests of the first replay; the next have twice as many each, up to
MOST = 1500  # fitted: requests of a replay, as of which it is no longer doubled
AT_ONCE = 4  # fitted: so many replays follow each other; then
PAUSE = 15  # fitted: times as many requests are not recorded as are, or
SHORT_PAUSE = 5  # fitted: after a change
LEAST_SLOS = 12  # fitted: a replay lasts so many of the longest SLO, if that is not more than
LONGEST = 6000  # requests
MEMORY = 0.8  # fitted: of what was found before, with each replay
GAIN = 0.001  # fitted: share of the requests that a value must serve more to be taken
FEW = 10.0  # requests of a program, below which it says nothing of the one served worst
WORST_PART = 0.25  # of the programs, those served worst, by which `each` is judged: one alone is mostly chance
WAIT_MS = 0.2  # per recorded request, from the last of them to the adoption: what a replay takes in another process
NOISE = 0.5  # fitted: of the square root of what two values lost: the least difference that is taken for one
CORE = 0.05  # of a core that rehearsals may take, or
CORE_MS = 0.01  # of a core for each request offered, where that is more: above 5,000 requests a second
CREDIT_MS = 1000.0  # of a core that they may take at once, at the start and after a rest
SPAN_MS = 60_000.0  # in any such time they take no more than that part of it
# What replaying takes, where nobody measures it: a request, a look at a batch, and a program at the beginning.
REQUEST_MS, LOOK_MS, PROGRAM_MS = 0.005, 0.0013, 0.03
COST_EVERY = 100  # requests: how often it is looked at what a replay will take, and whether there is room for one
SPARED = 0.02  # fitted: part of the GPU time that is worth a change where nothing else is


class Setting(NamedTuple):
    """What rehearsals choose; `in_full`: held requests save others, and not only GPU time."""

    hold: float
    defend: float
    in_full: bool = False

    def changed(self, knob: int, value: float) -> Setting:
        """Return it with another value of one knob."""
        return self._replace(defend=value) if knob else self._replace(hold=value)


class State(NamedTuple):
    """A scheduler's state: by program the deadlines of what is queued, the offered rate, the share of it that is beyond
    the plan, the usual burst and the share lost lately; gpu-lets and delays."""

    now_ms: float
    deadlines: tuple[tuple[float, ...], ...]
    rates: tuple[float | None, ...]
    borrowed: tuple[float, ...]
    bursts: tuple[float, ...]
    lost: tuple[float, ...]
    gpulets: tuple[GpuletState, ...]
    network: NetworkDelay


class Replayed(NamedTuple):
    """What a setting made of a replay: requests offered and met, by program, and the time gpu-lets were busy; `looked`
    goes by what the replay took."""

    setting: Setting
    offered: tuple[int, ...]
    met: tuple[int, ...]
    busy_ms: float
    looked: int = 0


class Seen(NamedTuple):
    """What is remembered of a value: requests offered and met, by program, and the time gpu-lets were busy."""

    offered: tuple[float, ...]
    met: tuple[float, ...]
    busy_ms: float

    def then(self, replayed: Replayed) -> Seen:
        """Remember one more."""
        return Seen(
            tuple(MEMORY * before + count for before, count in zip(self.offered, replayed.offered, strict=True)),
            tuple(MEMORY * before + count for before, count in zip(self.met, replayed.met, strict=True)),
            MEMORY * self.busy_ms + replayed.busy_ms,
        )

    def lost(self) -> float:
        """Return how many requests were not met."""
        return sum(self.offered, 0.0) - sum(self.met, 0.0)

    def share(self, program: int) -> float:
        """Return the share of the requests of a program that were not met."""
        return 1.0 - self.met[program] / self.offered[program]

    def variance(self, program: int) -> float:
        """Return the variance of that share, if requests are lost by chance."""
        return self.share(program) / self.offered[program]


@mypyc_attr(allow_interpreted_subclasses=True)
class RehearsingScheduler(Scheduler):
    """A scheduler that can begin from a state. `looked` counts how often it looked at the batch of a program."""

    looked = 0

    @abstractmethod
    def resume(self, state: State, setting: Setting) -> None:
        """Begin anew from a state under a setting. Requests that are queued then get the ids -1, -2, …"""


class Replay(NamedTuple):
    """A `Rehearsal`. The requests of the last SLO keep the gpu-lets busy and are not counted."""

    scheduler: type[RehearsingScheduler]
    options: SchedulerOptions
    system: System
    state: State
    arrivals: Sequence[tuple[float, int, float]]
    counted: int
    settings: tuple[Setting, ...]

    def run(self) -> list[Replayed]:
        """Return what each setting serves."""
        core = self.scheduler(self.system, self.options)
        program_of, programs = self.system.program_of, len(self.system.programs)
        offered = [0] * programs
        for _, model, _ in self.arrivals[: self.counted]:
            offered[program_of[model]] += 1
        found = []
        for setting in self.settings:
            core.resume(self.state, setting)
            met = [0] * programs
            looked = core.looked
            busy_ms = self._run(core, met)
            found.append(Replayed(setting, tuple(offered), tuple(met), busy_ms, core.looked - looked))
        return found

    def _run(self, core: Scheduler, met: list[int]) -> float:
        """Count what is met by program; returns the time that gpu-lets are busy, in ms."""
        busy_ms = 0.0
        counted = self.counted
        done = [(end, gpulet) for gpulet, state in enumerate(self.state.gpulets) for end in state.ends]
        heapify(done)
        add = core.add_request
        for number, (at, model, deadline) in enumerate(self.arrivals):
            while core.next_wake_ms < at or (done and done[0][0] <= at):
                _advance(core, done)
                if core.decisions:
                    busy_ms += _carry_out(core, done, met, counted)
            add(at, model, number, deadline)
        while done or core.next_wake_ms < INF:
            _advance(core, done)
            if core.decisions:
                busy_ms += _carry_out(core, done, met, counted)
        return busy_ms


def _advance(core: Scheduler, done: list[tuple[float, int]]) -> None:
    """Do what comes next: a batch ends, or a timer fires."""
    wake = core.next_wake_ms
    if done and done[0][0] <= wake:
        at, gpulet = heappop(done)
        core.batch_done(at, gpulet)
    else:
        core.wake(wake)


def _carry_out(core: Scheduler, done: list[tuple[float, int]], met: list[int], counted: int) -> float:
    """Send batches on their way; returns how long they keep gpu-lets busy."""
    busy_ms = 0.0
    for decision in core.decisions:
        if type(decision) is Dispatch:
            gpulet, program, ids, start, finish = decision
            heappush(done, (finish, gpulet))
            busy_ms += finish - start
            met[program] += sum(1 for number in ids if 0 <= number < counted)
    core.decisions.clear()
    return busy_ms


class Budget:
    """What rehearsals may take of a core: a part of any minute, and at once no more than they saved up."""

    def __init__(self) -> None:
        self._core = CORE  # the part
        self.spent_ms = 0.0
        self._saved_ms = CREDIT_MS
        self._saved_at = -INF
        self._lately: deque[tuple[float, float]] = deque()  # (when, ms of a core) in the last minute
        self._last_ms = 0.0  # what the last one took
        self._expected_ms = 0.0  # of it, before it was made
        self._measured = 1.0  # the one by the other

    def allows_one(self, now: float, rps: float) -> bool:
        """Return whether one may begin that takes as much as the last."""
        self._save(now)
        self._core = max(CORE, CORE_MS / 1000.0 * rps)
        return self._saved_ms >= 0.0 and self._left_ms(now) >= min(self._last_ms, self._core * SPAN_MS)

    def is_used_by(self, expected_ms: float, now: float) -> bool:
        """Return whether nothing is left in this minute beside a replay that should take so much."""
        self._expected_ms = expected_ms
        return self._measured * expected_ms >= self._left_ms(now)

    def spend(self, cpu_ms: float, now: float) -> None:
        """Take what the replay took that was expected last."""
        self._save(now)
        self._saved_ms -= cpu_ms
        self._lately.append((now, cpu_ms))
        self._last_ms = cpu_ms
        self._measured = cpu_ms / self._expected_ms if self._expected_ms else 1.0
        self.spent_ms += cpu_ms

    def _left_ms(self, now: float) -> float:
        while self._lately and self._lately[0][0] <= now - SPAN_MS:
            self._lately.popleft()
        return self._core * SPAN_MS - sum(spent_ms for _, spent_ms in self._lately)

    def _save(self, now: float) -> None:
        if self._saved_at > -INF:
            self._saved_ms = min(CREDIT_MS, self._saved_ms + self._core * (now - self._saved_at))
        self._saved_at = now


class Rehearsals:
    """When to record and for how long, and what came of it. Settings of one knob are always compared on the same
    arrivals."""

    def __init__(self, system: System, setting: Setting) -> None:
        self._system = system
        self._is_each = system.objective == "each"
        self._longest_slo_ms = max((model.slo_ms for model in system.models), default=0.0)
        # These four under heavy load, and under light load.
        self._settings = [setting, setting]
        self._knobs = [0, 0]
        self._memories: list[list[dict[float, Seen]]] = [[{}, {}], [{}, {}]]  # by knob and value
        self._done = [0, 0]
        self._is_light = False  # was the load throughout the arrivals recorded
        self._requests = FIRST
        self._state: State | None = None
        self._arrivals: list[tuple[float, int, float]] = []
        self._step = 1
        # A request of the next higher priority counts ten times.
        self._worth = [
            (offered.weight if system.objective == "weighted" else 1.0) * 10.0**offered.priority
            for offered in system.offered
        ]
        self._budget = Budget()
        self._looked = 0  # by the scheduler that records, before it began to
        self._gain = self._spared = 0.0

    def setting(self, *, is_light: bool) -> Setting:
        """Return what is best as far as known, under light or heavy load."""
        return self._settings[is_light]

    def is_new_to(self, *, is_light: bool) -> bool:
        """Return whether little is known of such a load: then there is no pause before the next replay."""
        return self._done[is_light] < AT_ONCE

    def next_step(self) -> int:
        """Return after how many requests to go on."""
        return self._step

    def may_begin(self, now: float, rps: float) -> bool:
        """Return whether what rehearsals took until now leaves room for one more, where so many requests are offered;
        False: ask again."""
        if not self._budget.allows_one(now, rps):
            self._step = COST_EVERY
            return False
        return True

    def begin(self, state: State, looked: int, *, is_light: bool) -> list[tuple[float, int, float]]:
        """Record from here on; returns the list for the arrivals. `looked` is how often the scheduler looked yet."""
        self._state = state
        self._looked = looked
        self._is_light = is_light
        self._arrivals = []
        self._step = min(COST_EVERY, self._requests)
        return self._arrivals

    def becomes_heavy(self) -> None:
        """What is recorded was not offered under light load only."""
        self._is_light = False

    def end(
        self, scheduler: type[RehearsingScheduler], options: SchedulerOptions, looked: int, now: float
    ) -> Replay | None:
        """Return the job that replays what was recorded with schedulers of this type; None: record more."""
        arrivals, state = self._arrivals, self._state
        if state is None:
            return None
        present, knob = self._settings[self._is_light], self._knobs[self._is_light]
        values = sorted({*VALUES[knob], present[knob]})
        # A replay looks about as often as the scheduler that recorded it.
        is_dear = self._budget.is_used_by(len(values) * self._replay_ms(looked - self._looked), now)
        self._step = COST_EVERY
        is_long = now - state.now_ms >= LEAST_SLOS * self._longest_slo_ms or len(arrivals) >= LONGEST
        is_enough = is_long and not len(arrivals) % self._requests
        if not is_enough and not is_dear:
            return None
        counted = len(arrivals)
        while counted > len(arrivals) // 2 and arrivals[counted - 1][0] > now - self._longest_slo_ms:
            counted -= 1
        self._step = -1  # until the result is there
        if not knob:
            present = present._replace(in_full=True)
        settings = tuple(present.changed(knob, value) for value in values)
        return Replay(scheduler, options, self._system, state, arrivals, counted, settings)

    def _replay_ms(self, looked: int) -> float:
        """Return what it takes of a core to replay what is recorded once, where so many looks are made."""
        return REQUEST_MS * len(self._arrivals) + PROGRAM_MS * len(self._system.programs) + LOOK_MS * looked

    def due_ms(self, now: float) -> float:
        """Return when the result of the job that is given out now is to be adopted."""
        return now + WAIT_MS * len(self._arrivals)

    def learn(self, result: list[Replayed], now: float, cpu_ms: float | None) -> None:
        """Take over what a replay found and what it took of a core (None: not measured)."""
        if cpu_ms is None:
            cpu_ms = sum(self._replay_ms(replayed.looked) for replayed in result)
        self._budget.spend(cpu_ms, now)
        is_light = self._is_light
        setting, knob = self._settings[is_light], self._knobs[is_light]
        found = self._memories[is_light][knob]
        nothing = Seen((0.0,) * len(self._worth), (0.0,) * len(self._worth), 0.0)
        for replayed in result:
            value = replayed.setting[knob]
            found[value] = found.get(value, nothing).then(replayed)
        lost = {value: self._loss(seen) for value, seen in found.items()}
        present = setting[knob]
        best = min(lost, key=lambda value: (lost[value], -value))
        if not self._saves(found, present, best):
            # What GPU time is worth may not cost the models served worst.
            doubt = {v: self._chance(found[present], found[v]) if self._is_each else 0.0 for v in lost}
            as_good = [v for v in lost if lost[v] - lost[present] <= GAIN / 2 - doubt[v] or v == present]
            best = min(as_good, key=lambda value: found[value].busy_ms)
            if found[best].busy_ms > (1.0 - SPARED) * found[present].busy_ms:
                best = present
        self._done[is_light] += 1
        pause = (PAUSE if best == present else SHORT_PAUSE) * len(self._arrivals)
        self._step = 1 if self.is_new_to(is_light=is_light) else pause
        if best != present:
            setting = setting.changed(knob, best)
            self._gain = lost[present] - lost[best]
            before_ms = found[present].busy_ms  # 0: nothing was met
            self._spared = 1.0 - found[best].busy_ms / before_ms if before_ms else 0.0
        if not knob:
            setting = setting._replace(in_full=self._saves(found, 0.0, best))
        self._settings[is_light] = setting
        self._knobs[is_light] = 1 - knob
        self._requests = min(MOST, 2 * self._requests)

    def _saves(self, found: dict[float, Seen], one: float, other: float) -> bool:
        """Return whether the second of two values loses fewer requests, by more than chance."""
        saved = self._loss(found[one]) - self._loss(found[other])
        return saved > max(GAIN, self._chance(found[one], found[other]))

    def _chance(self, one: Seen, other: Seen) -> float:
        """Return what chance makes of the difference of what two values lose."""
        if one is other:
            return 0.0
        if self._is_each:
            first, second = self._worst(one), self._worst(other)
            variance = sum(map(one.variance, first), 0.0) + sum(map(other.variance, second), 0.0)
            return NOISE * math.sqrt(variance) / max(1, len(first))
        return NOISE * math.sqrt(one.lost() + other.lost()) / max(1.0, sum(one.offered))

    def _loss(self, seen: Seen) -> float:
        """Return what the objective makes of requests offered and met by program: the share of worth lost, or with
        `each` the mean share lost of the quarter of the programs that lost most."""
        if self._is_each:
            worst = self._worst(seen)
            return sum(map(seen.share, worst), 0.0) / len(worst) if worst else 0.0
        total = sum(w * o for w, o in zip(self._worth, seen.offered, strict=True))
        return 1.0 - sum(w * m for w, m in zip(self._worth, seen.met, strict=True)) / total if total else 0.0

    def _worst(self, seen: Seen) -> list[int]:
        """Return the programs by which `each` is judged."""
        programs = [program for program, offered in enumerate(seen.offered) if offered >= FEW]
        programs.sort(key=seen.share, reverse=True)
        return programs[: math.ceil(WORST_PART * len(programs))]

    def told(self, chosen: SchedulerStatus) -> SchedulerStatus:
        """Return a status with how many replays there were, and by which share of the requests (or of their worth) the
        last change was expected to cut the losses."""
        return replace(
            chosen,
            rehearsals=sum(self._done),
            expected_gain=self._gain,
            expected_spared=self._spared,
            rehearsal_cpu_s=self._budget.spent_ms / 1000.0,
        )
