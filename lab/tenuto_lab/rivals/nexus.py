"""Nexus: squishy bin packing gives every GPU its models and batch sizes. Each GPU then takes its models in turn."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tenuto.batching.core.scheduler import Dispatch, Drop, SchedulerOptions
from tenuto.batching.core.system import INF, System
from tenuto_lab.rivals.base import IdlePool, RivalQueue, RivalScheduler
from tenuto_lab.rivals.squishy_filling import fill
from tenuto_lab.squishy import Bin, Demand


@dataclass(frozen=True)
class NexusOptions(SchedulerOptions):
    """The options of the published program, with its constants as defaults.

    plan: `static` makes one plan at the start, which fills all gpu-lets, with the models in the proportion of their
    stated rates (all equal when no rate is stated); the published goodputs were measured so. `epochs` plans again and
    again, for the measured rates.
    epoch_s: time between plans. When a rate leaves 80 to 110 % of its planned value, the next plan is made after
    early_epoch_s.
    rate_window_s: time constant of the exponentially weighted mean of the requests per second.
    head_room_pct: how far the planned rate is above the measured one. The original has no head room, and under Poisson
    arrivals never gets below 1 % late.
    slack_ms: time that is subtracted from the SLO when full batches are sized.
    """

    plan: str = field(default="static", metadata={"choices": ("static", "epochs")})
    epoch_s: float = field(default=30.0, metadata={"minimum": 1.0})
    early_epoch_s: float = field(default=10.0, metadata={"minimum": 1.0})
    rate_window_s: float = field(default=10.0, metadata={"minimum": 1.0})
    head_room_pct: float = field(default=0.0, metadata={"minimum": 0.0})
    slack_ms: float = field(default=2.0, metadata={"minimum": 0.0})


class _Slot:
    """A model on a gpu-let, with its planned batch and a queue of its own in order of deadlines."""

    __slots__ = ("batch", "deadlines", "gpulet", "ids", "program", "sent", "stride", "tag")

    def __init__(self, gpulet: int, program: int, batch: int, rate_rps: float, sent: list[float]) -> None:
        self.gpulet = gpulet
        self.program = program
        self.batch = batch
        self.stride = 1.0 / rate_rps
        self.tag = 0.0
        self.sent = sent
        self.deadlines: list[float] = []
        self.ids: list[int] = []


class NexusScheduler(RivalScheduler):
    """The global scheduler and the backends of Nexus (Shen et al., SOSP 2019).

    Requests are routed on arrival, in proportion to the planned rates, by smooth weighted round robin; of two equal
    gpu-lets the one with the smaller index is taken. (The published program's deficit round robin can lock into half of
    the GPUs; we do not repeat that.) A gpu-let takes its models in turn. Each model runs min(queue, planned batch) at
    once and does not wait for its duty cycle. Early drop: when the head would be late in a batch of the planned size,
    or of the whole queue if that is shorter, the head is given up.

    Our readings: Drops are reported at once, not at the end of the batch. When gpu-lets differ, each group of equal
    ones is packed by itself, and a model's rate is split by what the groups can carry. When the plan changes, queued
    requests are routed again. When a plan has no room for a model, the emptiest gpu-lets serve it beyond their duty
    cycles. A gpu-let never takes requests from the queue of another.
    """

    name = "nexus"
    summary = "squishy bin packing per epoch, round robin within a gpu-let, early drop"
    options_type = NexusOptions

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        self._chosen = options if isinstance(options, NexusOptions) else NexusOptions()
        super().__init__(system, options)
        count = len(system.programs)
        known = [spec.rate_rps for spec in system.offered if spec.rate_rps]
        typical = sum(known) / len(known) if known else 1.0
        self._rates = [spec.rate_rps or typical for spec in system.offered]
        self._planned_rates = list(self._rates)
        self._counts = [0] * count
        self._steps = 0
        self._slots: list[list[_Slot]] = [[] for _ in system.gpulets]  # by gpu-let, in turn
        self._turn = [0] * len(system.gpulets)
        self._routes: list[list[tuple[float, int, _Slot]]] = [[] for _ in range(count)]
        self._waiting = [0] * len(system.gpulets)
        self._plan(fill_all=True)
        self._measure_at = INF  # the end of the second being counted
        self._set_epoch(0.0)

    # Planning --------------------------------------------------------------------------------------------------------

    def _plan(self, *, fill_all: bool) -> None:
        """Assign models to the gpu-lets that are not lost. `fill_all`: scale the rates until the gpu-lets are full."""
        self._slots = [[] for _ in self.system.gpulets]
        self._turn = [0] * len(self._slots)
        routes: list[list[_Slot]] = [[] for _ in self.system.programs]
        capacity = [[self._capacity(pool, index) for pool in self._pools] for index in range(len(self.system.programs))]
        members: dict[int, list[int]] = {id(pool): [] for pool in self._pools}
        for gpulet, pool in enumerate(self._pool_of):
            if not self._lost[gpulet]:
                members[id(pool)].append(gpulet)
        carried = [
            [rps * len(members[id(pool)]) for rps, pool in zip(row, self._pools, strict=True)] for row in capacity
        ]
        room = 1.0 + self._chosen.head_room_pct / 100.0
        for position, pool in enumerate(self._pools):
            gpulets = members[id(pool)]
            if not gpulets:
                continue
            tables = self._tables[gpulets[0]]
            demands = [
                Demand(
                    index,
                    room * self._rates[index] * carried[index][position] / sum(carried[index]),
                    self._queues[index].budget_ms,
                    tables[index],
                )
                for index in sorted(pool.hosts)
            ]
            _, bins = fill(
                demands, len(gpulets), largest_scale=INF if fill_all else 1.0, slack_ms=self._chosen.slack_ms
            )
            for gpulet, planned in zip(gpulets, _in_order(bins), strict=False):
                for part in planned.parts:
                    slot = _Slot(gpulet, part.model, part.batch, part.rate_rps, self._tables[gpulet][part.model])
                    self._slots[gpulet].append(slot)
                    routes[part.model].append(slot)
        self._routes = []
        for slots in routes:
            # Start each within its first stride, so that equal slots take turns from the beginning.
            heap = [(slot.stride * (number + 1) / len(slots), slot.gpulet, slot) for number, slot in enumerate(slots)]
            self._routes.append(sorted(heap, key=lambda entry: entry[:2]))
        self._planned_rates = list(self._rates)

    def _capacity(self, pool: IdlePool, index: int) -> float:
        """Return the requests per second of a model that one gpu-let of the pool carries."""
        if index not in pool.hosts:
            return 0.0
        sent = self._tables[self._pool_of.index(pool)][index]
        return max(1000.0 * size / sent[size] for size in range(1, len(sent)))

    def _replan(self, now: float, *, fill_all: bool) -> None:
        queued = [
            (slot.program, due, request)
            for slots in self._slots
            for slot in slots
            for due, request in zip(slot.deadlines, slot.ids, strict=True)
        ]
        for queue in self._queues:
            queued += [(queue.program, due, request) for due, request in zip(queue.deadlines, queue.ids, strict=True)]
            queue.remove(0, len(queue.ids))
        self._waiting = [0] * len(self._slots)
        self._plan(fill_all=fill_all)
        for program, due, request in sorted(queued, key=lambda entry: entry[1]):
            if now + self._queues[program].quickest > due:
                self.decisions.append(Drop(program, [request]))
            else:
                self._route(now, program, due, request)

    def _tables_changed(self) -> None:
        for slots in self._slots:
            for slot in slots:
                slot.sent = self._tables[slot.gpulet][slot.program]

    def _measure(self, now: float) -> None:
        """Count the seconds that are over, and make a plan if the epoch is over.

        Arrivals call this. While there are none, no rate matters.
        """
        longest_ms = 20_000.0 * self._chosen.rate_window_s  # after that long without arrivals nothing is left of a rate
        self._measure_at = max(self._measure_at, now - longest_ms)
        while self._measure_at <= now:
            self._measure_at += 1000.0
            self._steps += 1
            weight = 1.0 / min(self._steps, self._chosen.rate_window_s)
            for index, count in enumerate(self._counts):
                self._rates[index] += weight * (max(count, 1e-3) - self._rates[index])
            self._counts = [0] * len(self._counts)
        has_history = self._steps >= self._chosen.epoch_s
        planned = zip(self._rates, self._planned_rates, strict=True)
        is_off = any(not 0.8 * plan <= rate <= 1.1 * plan for rate, plan in planned)
        if has_history and now >= (self._early_at if is_off else self._replan_at):
            self._set_epoch(now)
            self._replan(now, fill_all=False)

    def _set_epoch(self, now: float) -> None:
        self._replan_at = now + 1000.0 * self._chosen.epoch_s
        self._early_at = now + 1000.0 * self._chosen.early_epoch_s

    # Requests --------------------------------------------------------------------------------------------------------

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        queue = self._queue_of[model]
        due = deadline_ms - self._response_ms + 1e-6
        if now_ms >= self._measure_at:
            self._measure(now_ms)
        elif self._measure_at == INF and self._chosen.plan == "epochs":
            self._measure_at = now_ms + 1000.0
            self._set_epoch(now_ms)
        self._counts[queue.program] += 1
        if now_ms + queue.quickest > due:
            self.decisions.append(Drop(queue.program, [request_id]))
        else:
            self._route(now_ms, queue.program, due, request_id)

    def _route(self, now: float, program: int, due: float, request: int) -> None:
        heap = self._routes[program]
        if not heap:  # every gpu-let that holds it is lost
            self._insert(self._queues[program], due, request, now)
            return
        tag, gpulet, slot = heappop(heap)
        heappush(heap, (tag + slot.stride, gpulet, slot))
        if not slot.deadlines or due >= slot.deadlines[-1]:
            slot.deadlines.append(due)
            slot.ids.append(request)
        else:
            place = bisect_left(slot.deadlines, due)
            insort(slot.deadlines, due)
            slot.ids.insert(place, request)
        self._waiting[gpulet] += 1
        if self._idle[gpulet]:
            self._idle[gpulet] = False
            self._freed(now, gpulet)
        self._guard(slot)

    def _guard(self, slot: _Slot) -> None:
        """Set a timer that gives up the head of a slot in time, even if the gpu-let stays busy."""
        queue = self._queues[slot.program]
        if slot.deadlines:
            at = slot.deadlines[0] - queue.quickest + 1e-3
            if at < queue.timer_at:
                queue.timer_at = queue.expire_at = at
                self._push_timer(at, queue.program)

    def _expire(self, now: float, queue: RivalQueue) -> None:
        queue.timer_at = INF
        limit = now + queue.quickest
        for _, gpulet, slot in self._routes[queue.program]:
            gone = bisect_left(slot.deadlines, limit)
            if gone:
                self._give_up(slot, gone)
                self._waiting[gpulet] -= gone
            self._guard(slot)
        if not self._routes[queue.program]:
            super()._expire(now, queue)

    def _give_up(self, slot: _Slot, count: int) -> None:
        self.decisions.append(Drop(slot.program, slot.ids[:count]))
        del slot.ids[:count], slot.deadlines[:count]

    def _arrived(self, now: float, queue: RivalQueue) -> None:
        """Do nothing: requests go to the slots of gpu-lets, not to the queues of programs."""

    def _freed(self, now: float, gpulet: int) -> None:
        slots = self._slots[gpulet]
        count = len(slots)
        for step in range(count if self._waiting[gpulet] else 0):
            place = (self._turn[gpulet] + step) % count
            slot = slots[place]
            if slot.deadlines and self._run(now, slot):
                self._turn[gpulet] = (place + 1) % count
                return
        self._idle[gpulet] = True

    def _run(self, now: float, slot: _Slot) -> bool:
        """Send the next batch of a slot; False if early drop leaves nothing."""
        deadlines, sent = slot.deadlines, slot.sent
        limit = min(slot.batch, len(sent) - 1)
        count, skip = len(deadlines), 0
        size = min(limit, count)
        while size and deadlines[skip] < now + sent[size]:
            skip += 1
            size = min(limit, count - skip)
        if skip:
            self._give_up(slot, skip)
        self._waiting[slot.gpulet] -= skip + size
        if not size:
            return False
        batch = slot.ids[:size]
        del slot.ids[:size], deadlines[:size]
        self._busy[slot.gpulet] = True
        start = now + self._ctrl_ms + self._data_ms * size
        self.decisions.append(Dispatch(slot.gpulet, slot.program, batch, start, now + sent[size]))
        return True

    def cancel(self, now_ms: float, model: int, request_id: int) -> bool:
        for _, gpulet, slot in self._routes[self.system.program_of[model]]:
            if request_id in slot.ids:
                place = slot.ids.index(request_id)
                del slot.ids[place], slot.deadlines[place]
                self._waiting[gpulet] -= 1
                return True
        return super().cancel(now_ms, model, request_id)

    def queued(self, program: int) -> int:
        return super().queued(program) + sum(len(slot.ids) for _, _, slot in self._routes[program])

    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:
        super().gpulet_lost(now_ms, gpulet)
        self._replan(now_ms, fill_all=self._chosen.plan == "static")

    def gpulet_back(self, now_ms: float, gpulet: int) -> None:
        if self._lost[gpulet]:
            self._lost[gpulet] = False
            self._idle[gpulet] = True
            self._replan(now_ms, fill_all=self._chosen.plan == "static")


def _in_order(bins: list[Bin]) -> list[Bin]:
    """Return the bins ordered by their first model, so that few models move when rates change a little."""
    return sorted(bins, key=lambda planned: (planned.parts[0].model, -planned.occupancy))
