"""Rehearsal: what was just offered is replayed under other settings, and the one that would have served most is taken.

An observer stands beside a scheduler. Its driver shows it every arrival; it records them for a while and gives out a
`Replay`, which the driver in virtual time runs on the spot and the live one in another process. Of the result it sets
`hold` and `defend` of the scheduler, one of them at a time. Serving goes on meanwhile, and goes on if the result never
comes.

What a value served is remembered with a memory of 0.8, and a value is taken only where it would serve 0.1 % of the
requests more than the present one. What was found under light load says nothing of heavy load, nor the reverse: each
has its own memory and its own setting.
"""

from __future__ import annotations

from dataclasses import replace

from tenuto.batching.core.deferred import DeferredScheduler
from tenuto.batching.core.deferred.deferring import Known
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.told import SchedulerStatus
from tenuto.batching.rehearsal.budget import Budget
from tenuto.batching.rehearsal.memory import Judge, Seen
from tenuto.batching.rehearsal.replay import Replay, Replayed, Setting

VALUES: tuple[tuple[float, ...], ...] = (
    (0.0, 0.4, 0.7, 1.0),
    (0.5, 0.75, 1.0, 1.5),
)  # limit: what each knob is tried at
FIRST = 200  # limit: requests of the first replay; the next have twice as many each, up to
MOST = 1500  # fitted: requests of a replay, as of which it is no longer doubled
AT_ONCE = 4  # fitted: so many replays follow each other; then
PAUSE = 15  # fitted: times as many requests are not recorded as are, or
SHORT_PAUSE = 5  # fitted: after a change
LEAST_SLOS = 12  # fitted: a replay lasts so many of the longest SLO, if that is not more than
LONGEST = 6000  # limit: requests
GAIN = 0.001  # fitted: share of the requests that a value must serve more to be taken
SPARED = 0.02  # fitted: part of the GPU time that is worth a change where nothing else is
WAIT_MS = 0.2  # limit: per recorded request, from the last of them to the adoption: what a replay takes elsewhere
# Derived: what replaying takes, where nobody measures it: a request, a look at a batch, and a program at the beginning.
REQUEST_MS, LOOK_MS, PROGRAM_MS = 0.005, 0.0013, 0.03
COST_EVERY = (
    100  # limit: requests: how often it is looked at what a replay will take, and whether there is room for one
)


def rehearsals_of(scheduler: Scheduler) -> Rehearsals | None:
    """Return a new observer of a scheduler that can be tuned and is asked to be; None for any other."""
    if isinstance(scheduler, DeferredScheduler) and scheduler.options.rehearse:
        return Rehearsals(scheduler)
    return None


class Rehearsals:
    """When to record and for how long, and what came of it. Settings of one knob are always compared on the same
    arrivals; at most one replay is out at a time."""

    def __init__(self, scheduler: DeferredScheduler) -> None:
        self._scheduler = scheduler
        self._judge = Judge(scheduler.system)
        self._longest_slo_ms = max([model.slo_ms for model in scheduler.system.models], default=0.0)
        setting = Setting(scheduler.hold, scheduler.defend)
        # These four under heavy load, and under light load.
        self._settings = [setting, setting]
        self._knobs = [0, 0]
        self._memories: list[list[dict[float, Seen]]] = [[{}, {}], [{}, {}]]  # by knob and value
        self._done = [0, 0]
        self._is_light = scheduler.is_light
        self._requests = FIRST
        self._arrivals: list[tuple[float, int, float]] = []
        self._known: Known | None = None  # what was known when the recording began; None: nothing is recorded
        self._was_light = False  # throughout the arrivals recorded
        self._looked = 0  # by the scheduler, before
        self._until = 1  # requests until it goes on
        self._budget = Budget()
        self._gain = self._spared = 0.0

    # What the driver says ---------------------------------------------------------------------------------------------

    def arrived(self, now: float, model: int, deadline_ms: float) -> Replay | None:
        """Take note of a request that the scheduler is about to get; returns a replay to run, for `learn`."""
        scheduler = self._scheduler
        if scheduler.is_light != self._is_light:
            self._follow_load(now)
        if self._known is not None:
            self._arrivals.append((now, model, deadline_ms))
        self._until -= 1
        return None if self._until else self._go_on(now)

    def due_ms(self, now: float, replay: Replay) -> float:
        """Return when the result of a replay that is given out now is to be adopted."""
        return now + WAIT_MS * len(replay.arrivals)

    def learn(self, result: list[Replayed], now: float, cpu_ms: float | None = None) -> None:
        """Take over what a replay found and what it took of a core (None: not measured), at `due_ms` or later."""
        if cpu_ms is None:
            cpu_ms = sum([self._replay_ms(replayed.looked) for replayed in result])
        self._budget.spend(cpu_ms, now)
        is_light, judge = self._was_light, self._judge
        setting, knob = self._settings[is_light], self._knobs[is_light]
        found = self._memories[is_light][knob]
        for replayed in result:
            value = replayed.setting[knob]
            found[value] = found.get(value, judge.nothing).then(replayed)
        lost = {value: judge.loss(seen) for value, seen in found.items()}
        present = setting[knob]
        best = min(lost, key=lambda value: (lost[value], -value))
        if lost[present] - lost[best] <= max(GAIN, judge.chance(found[present], found[best])):
            doubt = {value: judge.doubt(found[present], seen) for value, seen in found.items()}
            as_good = [v for v in lost if lost[v] - lost[present] <= GAIN / 2 - doubt[v] or v == present]
            best = min(as_good, key=lambda value: found[value].busy_ms)
            if found[best].busy_ms > (1.0 - SPARED) * found[present].busy_ms:
                best = present
        self._done[is_light] += 1
        pause = (PAUSE if best == present else SHORT_PAUSE) * len(self._arrivals)
        self._until = 1 if self._done[is_light] < AT_ONCE else pause
        if best != present:
            self._settings[is_light] = setting.changed(knob, best)
            self._gain = lost[present] - lost[best]
            before_ms = found[present].busy_ms  # 0: nothing was met
            self._spared = 1.0 - found[best].busy_ms / before_ms if before_ms else 0.0
        self._knobs[is_light] = 1 - knob
        self._requests = min(MOST, 2 * self._requests)
        self._scheduler.tune(now, *self._settings[self._is_light])

    def told(self) -> SchedulerStatus:
        """Return the scheduler's status with how many replays there were, and by which share of the requests (or of
        their worth) the last change was expected to cut the losses."""
        return replace(
            self._scheduler.status(),
            rehearsals=sum(self._done),
            expected_gain=self._gain,
            expected_spared=self._spared,
            rehearsal_cpu_s=self._budget.spent_ms / 1000.0,
        )

    # What it does of itself -------------------------------------------------------------------------------------------

    def _follow_load(self, now: float) -> None:
        """The load has become light, or heavy again."""
        is_light = self._is_light = self._scheduler.is_light
        self._was_light &= is_light
        if self._known is None and self._until > 0 and self._done[is_light] < AT_ONCE:
            self._until = 1
        self._scheduler.tune(now, *self._settings[is_light])

    def _go_on(self, now: float) -> Replay | None:
        """Begin to record, or have what was recorded replayed."""
        scheduler = self._scheduler
        self._until = COST_EVERY
        if self._known is None:
            if self._budget.allows_one(now, scheduler.offered_rps()):
                self._known = scheduler.known()
                self._looked = scheduler.looked
                self._was_light = self._is_light
                self._arrivals = []
                self._until = min(COST_EVERY, self._requests)
            return None
        arrivals, known = self._arrivals, self._known
        present, knob = self._settings[self._was_light], self._knobs[self._was_light]
        values = sorted({*VALUES[knob], present[knob]})
        # A replay looks about as often as the scheduler that was watched.
        is_dear = self._budget.is_used_by(len(values) * self._replay_ms(scheduler.looked - self._looked), now)
        began = arrivals[0][0]
        is_long = now - began >= LEAST_SLOS * self._longest_slo_ms or len(arrivals) >= LONGEST
        if not (is_long and not len(arrivals) % self._requests) and not is_dear:
            return None
        self._known = None
        self._until = -1  # until the result is there
        first, last = 0, len(arrivals)
        while first < last // 4 and arrivals[first][0] < began + self._longest_slo_ms:
            first += 1
        while last > 3 * len(arrivals) // 4 and arrivals[last - 1][0] > now - self._longest_slo_ms:
            last -= 1
        options = replace(scheduler.options, rehearse=False)
        settings = tuple([present.changed(knob, value) for value in values])
        return Replay(type(scheduler), options, scheduler.system, known, arrivals, (first, last), settings)

    def _replay_ms(self, looked: int) -> float:
        """Return what it takes of a core to replay what is recorded once, where so many looks are made."""
        programs = len(self._scheduler.system.programs)
        return REQUEST_MS * len(self._arrivals) + PROGRAM_MS * programs + LOOK_MS * looked
