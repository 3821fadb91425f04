"""Rehearsal: recent requests are replayed with other settings, and the setting that would have served most is taken.

An observer stands beside a scheduler. The scheduler's driver shows it every arrival. It records arrivals for a while
and then gives out a `Replay`. The driver in virtual time runs the replay at once; the live driver runs it in another
process. From the result the observer sets `hold` or `defend` of the scheduler, one at a time. Serving goes on
meanwhile, even if the result never comes.

The results for each value are remembered; earlier ones keep 0.8 of their weight with each replay. A value is taken only
when it would serve 0.1 % more of the requests than the present one. Results under one load say nothing about another:
to give up few requests is best under a small load, and may lose a fifth of what could be served when the load is beyond
capacity. So each band of the load has its own memory and its own setting. In a new band, the first setting holds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from tenuto.batching.core.deferred import DeferredScheduler
from tenuto.batching.core.deferred.deferring import Known
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.scheduler_status import SchedulerStatus
from tenuto.batching.rehearsal.budget import Budget
from tenuto.batching.rehearsal.memory import Judge, Seen
from tenuto.batching.rehearsal.replay import Replay, Replayed, Setting

VALUES: tuple[tuple[float, ...], ...] = (
    (0.0, 0.4, 0.7, 1.0),
    (0.5, 0.75, 1.0, 1.5),
)  # fitted: the values that are tried for `hold` and for `defend`
FIRST = 200  # derived: requests of the first replay, whose loss is known to 1 %; each next one has twice as many, up to
# Limit: of the time of one replay, in requests; with four times as many nothing changed in 26 random scenarios.
MOST = 1500
AT_ONCE = 4  # fitted: so many replays follow each other at the start; from then on there is a pause between two, of
PAUSE = 15  # fitted: of the time in which replays run: times as many requests as were recorded
LEAST_SLOS = 12  # fitted: a recording lasts at least so many times the longest SLO, but has at most
LONGEST = 6000  # limit: requests
GAIN = 0.001  # fitted: a value is taken when it serves this share of the requests in addition
SPARED = 0.02  # fitted: a value that serves no more is taken when it saves this part of the GPU time
WAIT_MS = 0.2  # derived: ms per recorded request until the result is adopted: the time for a replay in another process
# Derived: what a replay takes when nobody measures it: per request, per look at a batch, and per program at the start.
REQUEST_MS, LOOK_MS, PROGRAM_MS = 0.005, 0.0013, 0.03
BAND = (
    2.0  # derived: bounds between bands are at capacity, as what is best differs there, and at its halves and doubles
)
COST_EVERY = (
    100  # pace: requests between two estimates of what a replay will take, and whether the budget has room for it
)


def rehearsals_of(scheduler: Scheduler) -> Rehearsals | None:
    """Return a new observer of a scheduler that can be tuned and has the option `rehearse`; None for any other."""
    if isinstance(scheduler, DeferredScheduler) and scheduler.options.rehearse:
        return Rehearsals(scheduler)
    return None


@dataclass(slots=True)
class ByLoad:
    """What replays have seen under loads of one band."""

    setting: Setting
    knob: int = 0  # the one that the next replay tries
    seen: tuple[dict[float, Seen], dict[float, Seen]] = field(default_factory=lambda: ({}, {}))  # by knob and value
    done: int = 0  # replays


class Rehearsals:
    """Decides when to record arrivals and for how long, and adopts what replays find. Values of one knob are always
    compared on the same arrivals. At most one replay is under way at a time."""

    def __init__(self, scheduler: DeferredScheduler) -> None:
        self._scheduler = scheduler
        self._judge = Judge(scheduler.system)
        self._longest_slo_ms = max([model.slo_ms for model in scheduler.system.models], default=0.0)
        first = Setting(scheduler.hold, scheduler.defend)
        self._learned = defaultdict[int, ByLoad](lambda: ByLoad(first))  # by band of the load
        self._load = -1.0
        self._present = self._recorded = ByLoad(first)  # under the present load; under that of the last recording
        self._requests = FIRST
        self._arrivals: list[tuple[float, int, float]] = []
        self._known: Known | None = None  # what the scheduler knew when the recording began; None: nothing is recorded
        self._looked = 0  # the scheduler's count of looks when the recording began
        self._until = 1  # requests until the next step
        self._budget = Budget()
        self._gain = self._spared = 0.0

    # What the driver calls --------------------------------------------------------------------------------------------

    def arrived(self, now: float, model: int, deadline_ms: float) -> Replay | None:
        """Note a request that the scheduler is about to get; may return a replay: `learn` or `failed` follows."""
        scheduler = self._scheduler
        if scheduler.load != self._load:
            self._follow_load(now)
        if self._known is not None:
            self._arrivals.append((now, model, deadline_ms))
        self._until -= 1
        return None if self._until else self._take_step(now)

    def due_ms(self, now: float, replay: Replay) -> float:
        """Return when to adopt the result of a replay that is given out now."""
        return now + WAIT_MS * len(replay.arrivals)

    def learn(self, result: list[Replayed], now: float, cpu_ms: float | None = None) -> None:
        """Take over what a replay found, at `due_ms` or later. `cpu_ms`: time of a core it took (None: not
        measured)."""
        if cpu_ms is None:
            cpu_ms = sum([self._replay_ms(replayed.looked) for replayed in result], 0.0)
        self._budget.spend(cpu_ms, now)
        recorded, judge = self._recorded, self._judge
        setting, knob = recorded.setting, recorded.knob
        seen_by_value = recorded.seen[knob]
        for replayed in result:
            value = replayed.setting[knob]
            seen_by_value[value] = seen_by_value.get(value, judge.nothing).then(replayed)
        lost = {value: judge.loss(seen) for value, seen in seen_by_value.items()}
        present = setting[knob]
        best = min(lost, key=lambda value: (lost[value], -value))
        if lost[present] - lost[best] <= max(GAIN, judge.chance(seen_by_value[present], seen_by_value[best])):
            doubt = {value: judge.doubt(seen_by_value[present], seen) for value, seen in seen_by_value.items()}
            as_good = [v for v in lost if lost[v] - lost[present] <= GAIN / 2 - doubt[v] or v == present]
            harmless = judge.harmless({value: seen_by_value[value] for value in as_good}, GAIN / 2)
            best = min(harmless, key=lambda value: seen_by_value[value].busy_ms)
            if present in harmless and seen_by_value[best].busy_ms > (1.0 - SPARED) * seen_by_value[present].busy_ms:
                best = present
        recorded.done += 1
        self._until = 1 if self._present.done < AT_ONCE else PAUSE * len(self._arrivals)
        if best != present:
            recorded.setting = setting.changed(knob, best)
            self._gain = lost[present] - lost[best]
            before_ms = seen_by_value[present].busy_ms  # 0: nothing was met
            self._spared = 1.0 - seen_by_value[best].busy_ms / before_ms if before_ms else 0.0
        recorded.knob = 1 - knob
        self._requests = min(MOST, 2 * self._requests)
        self._scheduler.tune(now, *self._present.setting)

    def failed(self) -> None:
        """Go on after the usual pause without the result of a replay, which could not be computed."""
        self._until = PAUSE * len(self._arrivals)

    def status(self) -> SchedulerStatus:
        """Return the scheduler's status with the number of replays, and the share of the requests (or of their worth)
        that the last change should save."""
        return replace(
            self._scheduler.status(),
            rehearsals=sum([learned.done for learned in self._learned.values()]),
            expected_gain=self._gain,
            expected_spared=self._spared,
            rehearsal_cpu_s=self._budget.spent_ms / 1000.0,
        )

    # Inside -----------------------------------------------------------------------------------------------------------

    def _follow_load(self, now: float) -> None:
        """Use the setting of the present load, which has changed."""
        load = self._load = self._scheduler.load
        present = self._learned[math.floor(math.log(load, BAND)) if load else -LONGEST]
        if present is not self._present:
            self._present = present
            if self._known is None and self._until > 0 and present.done < AT_ONCE:
                self._until = 1
            self._scheduler.tune(now, *present.setting)

    def _take_step(self, now: float) -> Replay | None:
        """Take the next step: begin to record, go on recording, or give out a replay of the recording."""
        scheduler = self._scheduler
        self._until = COST_EVERY
        if self._known is None:
            if self._budget.save_up(now, scheduler.offered_rps()):
                self._known = scheduler.known()
                self._looked = scheduler.looked
                self._arrivals = []
                self._until = min(COST_EVERY, self._requests)
            return None
        arrivals, known = self._arrivals, self._known
        self._recorded = self._present
        present, knob = self._recorded.setting, self._recorded.knob
        values = sorted({*VALUES[knob], present[knob]})
        # A replay looks at batches about as often as the scheduler did.
        is_dear = self._budget.expect_replay(len(values) * self._replay_ms(scheduler.looked - self._looked), now)
        began = arrivals[0][0]
        is_long = now - began >= LEAST_SLOS * self._longest_slo_ms or len(arrivals) >= LONGEST
        if not (is_long and not len(arrivals) % self._requests) and not is_dear:
            return None
        self._known = None
        self._until = -1  # no further step until the result comes
        first, last = 0, len(arrivals)
        while first < last // 4 and arrivals[first][0] < began + self._longest_slo_ms:  # limit: a quarter at each end
            first += 1
        while last > 3 * len(arrivals) // 4 and arrivals[last - 1][0] > now - self._longest_slo_ms:  # limit: likewise
            last -= 1
        options = replace(scheduler.options, rehearse=False)
        settings = tuple([present.changed(knob, value) for value in values])
        return Replay(type(scheduler), options, scheduler.system, known, arrivals, (first, last), settings)

    def _replay_ms(self, looked: int) -> float:
        """Return how many ms of a core one replay of the recording takes, when it makes `looked` looks."""
        programs = len(self._scheduler.system.programs)
        return REQUEST_MS * len(self._arrivals) + PROGRAM_MS * programs + LOOK_MS * looked
