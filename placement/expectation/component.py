"""What gpu-lets serve that share programs, directly or through others: a *component* of a plan.

It serves what fits into the time of its gpu-lets, less what waiting costs (`queueing`). A batch is gathered for as long
as its deadline allows. A program waits for the gpu-lets that host it, which may be few of the component's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from tenuto.placement.expectation.queueing import MeanBatch, Stream, blocked_part, lost_parts, used_part
from tenuto.placement.program import Program
from tenuto.placement.solver import Rows, linear_program

NOTHING = 1e-4  # derived: formulas and measurements cannot tell a smaller lost part from none
_SPREADS = 10  # limit: rounds in which requests are spread over gpu-lets


@dataclass
class AlikeGpulets:
    """Gpu-lets that are alike: same programs, same latencies, same neighbours."""

    programs: tuple[Program, ...]
    gpulets: list[int] = field(default_factory=list)
    beside: list[AlikeGpulets] = field(default_factory=list)
    busy: float = 1.0

    def slowdown_of(self, program: Program) -> float:
        """Return the slowdown of one of its programs beside neighbours that run part of the time."""
        if not self.beside:
            return 1.0
        return 1.0 + (program.slowdown - 1.0) * sum(kind.busy for kind in self.beside) / len(self.beside)


@dataclass(frozen=True)
class Demand:
    """The demand for a model, or for a program: the rate of all its models and their strictest SLO."""

    rate_rps: float
    slo_ms: float
    weight: float
    dispersion: float


Flows = Mapping[tuple[str, int], float]
"""How much of each program every kind of gpu-let serves, in requests per second."""


@dataclass(frozen=True)
class ServedInTime:
    """What a component serves of every program in time, the time it would need for everything, and by kind: how busy
    its gpu-lets are, what they take of each program and in which batches."""

    load: float
    done: Mapping[str, float]
    busy: Sequence[float]
    flows: Flows
    batches: Sequence[Mapping[str, MeanBatch]]


class Component:
    """Kinds of gpu-lets and what is asked of their programs, by the workload's objective. Batches are those that can be
    in time, by kind."""

    def __init__(
        self, kinds: Sequence[AlikeGpulets], demands: Mapping[str, Demand], objective: str, *, is_cautious: bool
    ) -> None:
        self._kinds, self._asked, self._objective = kinds, demands, objective
        self._names = list(dict.fromkeys(p.name for kind in kinds for p in kind.programs if p.name in demands))
        self._batches: list[dict[str, MeanBatch]] = []
        known: dict[object, MeanBatch | None] = {}  # most kinds of gpu-lets differ in one of many programs
        for kind in kinds:
            gathered, is_alone = dict[str, MeanBatch](), len(kind.programs) == 1
            for p in (p for p in kind.programs if p.name in demands):
                slowdown = kind.slowdown_of(p)
                key = p.name, p.batch_size, id(p.latency), p.slowdown, slowdown, is_alone
                if key not in known:
                    known[key] = _gathered(p, demands[p.name], slowdown, is_alone=is_alone, is_cautious=is_cautious)
                if (batch := known[key]) is not None:
                    gathered[p.name] = batch
            self._batches.append(gathered)
        self._times_s = [{name: batch.time_s for name, batch in own.items()} for own in self._batches]

    def served_in_time(self) -> ServedInTime:
        """Return what it serves."""
        demands, gpulets = self._asked, sum(len(kind.gpulets) for kind in self._kinds)
        flows: Flows = self._flows(demands, 1.0)
        hosted = {name: [own[name] for own in self._batches if name in own] for name in self._names}
        best = {name: min(batches, key=lambda batch: batch.time_s) for name, batches in hosted.items() if batches}
        load = sum(flow * self._times_s[k][name] for (name, k), flow in flows.items()) / gpulets
        for name, batch in best.items():
            load += max(0.0, demands[name].rate_rps - self._served_rps(name, flows)) * batch.time_s / gpulets
        streams = [self._stream(name, demands[name].rate_rps, batch) for name, batch in best.items()]
        used = used_part(load, streams, gpulets)
        lost = dict(zip(best, lost_parts(streams, (load - used) * gpulets), strict=True))
        if self._objective == "each" and load > 0.0:  # the model that lost most is served first
            lost = dict.fromkeys(best, 1.0 - used / load)
        if load > 1.0:
            flows, lost = self._overloaded(used, lost), {}
        busy = []
        for k, kind in enumerate(self._kinds):
            time = sum(flows.get((name, k), 0.0) * time_s for name, time_s in self._times_s[k].items())
            busy.append(min(1.0, time / len(kind.gpulets)))
        even = flows
        if load <= 1.0 and len(self._kinds) > 1 and len(self._names) > 1:
            even = self._spread()
            lost |= {name: max(lost.get(name, 0.0), part) for name, part in self._lost_among_hosts(even).items()}
        done, running = {}, self._running(even)
        for name in self._names:
            in_time = 1.0
            for part in (lost.get(name, 0.0), self._blocked(name, running)):
                in_time *= 1.0 - part if part > NOTHING else 1.0
            done[name] = in_time * min(demands[name].rate_rps, self._served_rps(name, flows))
        return ServedInTime(load, done, busy, flows, self._batches)

    def _spread(self) -> Flows:
        """Return all requests, spread over the gpu-lets of their program as others leave them free."""
        hosts = {name: [k for k, own in enumerate(self._times_s) if name in own] for name in self._names}
        times_s = {name: [self._times_s[k][name] for k in on] for name, on in hosts.items()}
        flows = {name: [self._asked[name].rate_rps / len(on) for _ in on] for name, on in hosts.items()}
        free = [float(len(kind.gpulets)) for kind in self._kinds]
        for name, on in hosts.items():
            for k, rps, time_s in zip(on, flows[name], times_s[name], strict=True):
                free[k] -= rps * time_s
        for name in _SPREADS * self._names:
            on, takes_s, rate_rps = hosts[name], times_s[name], self._asked[name].rate_rps
            for k, rps, time_s in zip(on, flows[name], takes_s, strict=True):
                free[k] += rps * time_s
            able_rps = [max(NOTHING, free[k]) / time_s for k, time_s in zip(on, takes_s, strict=True)]
            per_able = rate_rps / sum(able_rps) if able_rps else 0.0
            flows[name] = [able * per_able for able in able_rps]
            for k, rps, time_s in zip(on, flows[name], takes_s, strict=True):
                free[k] -= rps * time_s
        return {(name, k): rps for name, on in hosts.items() for k, rps in zip(on, flows[name], strict=True)}

    def _lost_among_hosts(self, flows: Flows) -> dict[str, float]:
        """Return the part of their requests that programs lose because these find too much work on all gpu-lets of
        their program, where these are not all gpu-lets."""
        among: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in self._names:
            among[tuple(k for k, own in enumerate(self._times_s) if name in own)].append(name)
        streams = {
            (name, k): self._stream(name, flows[name, k], batch)
            for k, own in enumerate(self._batches)
            for name, batch in own.items()
        }
        parts: dict[str, float] = {}
        for own, names in among.items():
            if len(own) in (0, len(self._kinds)):
                continue
            gpulets = sum(len(self._kinds[k].gpulets) for k in own)
            theirs = {(name, k): streams[name, k] for k in own for name in self._batches[k]}
            load = sum(stream.work for stream in theirs.values()) / gpulets
            lost = lost_parts([*theirs.values()], (load - used_part(load, [*theirs.values()], gpulets)) * gpulets)
            worst = dict(zip(theirs, lost, strict=True))
            parts |= {name: max(worst[name, k] for k in own) for name in names}
        return parts

    def _stream(self, name: str, rate_rps: float, batch: MeanBatch) -> Stream:
        demand, by_weight = self._asked[name], self._objective == "weighted"
        return Stream(rate_rps, batch, demand.slo_ms, demand.weight if by_weight else 1.0, demand.dispersion)

    def _served_rps(self, name: str, flows: Flows) -> float:
        return sum(flows.get((name, k), 0.0) for k in range(len(self._kinds)))

    def _overloaded(self, used: float, lost: Mapping[str, float]) -> Flows:
        """Return the flows under overload: midway between the best flow by the objective and equal losses of all
        programs. A scheduler sees deadlines before costs, so the truth lies between; the middle has the least
        worst-case error."""
        best = self._flows(self._asked, used)
        if self._objective == "each":
            return best
        fewer = {
            name: replace(self._asked[name], rate_rps=self._asked[name].rate_rps * (1.0 - lost.get(name, 0.0)))
            for name in self._names
        }
        all_lose = self._flows(fewer, used)
        return {pair: (best.get(pair, 0.0) + all_lose.get(pair, 0.0)) / 2.0 for pair in (*best, *all_lose)}

    def _running(self, flows: Flows) -> list[dict[str, tuple[float, float]]]:
        """Return by kind and program the part of its gpu-lets' time, and its batch time in ms."""
        return [
            {
                name: (flows.get((name, k), 0.0) * time_s / len(kind.gpulets), self._batches[k][name].latency_ms)
                for name, time_s in self._times_s[k].items()
            }
            for k, kind in enumerate(self._kinds)
        ]

    def _blocked(self, name: str, running: Sequence[Mapping[str, tuple[float, float]]]) -> float:
        """Return the part of a program's requests that come behind another program's batch that runs too long."""
        unblocked, hosts = 1.0, False
        for kind, parts in zip(self._kinds, running, strict=True):
            if name not in parts:
                continue
            own = next(p for p in kind.programs if p.name == name)
            if own.latency is None:
                continue
            hosts = True
            may_wait_ms = self._asked[name].slo_ms - own.latency.at(1) * own.slowdown
            others = [part for other, part in parts.items() if other != name and part[1] > may_wait_ms]
            unblocked *= blocked_part(may_wait_ms, others, len(kind.gpulets))
            if unblocked <= NOTHING:
                break
        return unblocked if hosts else 0.0

    # --- what the time is used for --------------------------------------------------------------------------------

    def _flows(self, demands: Mapping[str, Demand], used: float) -> Flows:
        """Return the best flow by the objective, where gpu-lets can use such a part of their time."""
        gpulets = [used * len(kind.gpulets) for kind in self._kinds]
        if len(gpulets) == 1:
            return {(name, 0): rate for name, rate in self._in_one(demands, gpulets[0]).items()}
        if len(self._names) == 1:
            return self._evenly(self._names[0], gpulets, demands)
        return self._best_flows(gpulets, demands)

    def _worth(self, demand: Demand) -> float:
        return demand.weight if self._objective == "weighted" else 1.0

    def _in_one(self, demands: Mapping[str, Demand], gpulets: float) -> dict[str, float]:
        """Return what gpu-lets of one kind serve: everything, or the cheapest first, or all in proportion."""
        times_s = self._times_s[0]
        able = [name for name in self._names if name in times_s]
        load = sum(demands[name].rate_rps * times_s[name] for name in able)
        if load <= gpulets:
            return {name: demands[name].rate_rps for name in able}
        if self._objective == "each":
            return {name: demands[name].rate_rps * gpulets / load for name in able}
        left, done = gpulets, {}
        for name in sorted(able, key=lambda name: times_s[name] / self._worth(demands[name])):
            done[name] = min(demands[name].rate_rps, left / times_s[name])
            left -= done[name] * times_s[name]
        return done

    def _evenly(self, name: str, gpulets: Sequence[float], demands: Mapping[str, Demand]) -> Flows:
        """Return what gpu-lets of one program serve: its queue keeps all of them equally busy."""
        able_rps = {k: gpulets[k] / own[name] for k, own in enumerate(self._times_s) if name in own}
        part = min(1.0, demands[name].rate_rps / sum(able_rps.values())) if any(able_rps.values()) else 0.0
        return {(name, k): part * able for k, able in able_rps.items()}

    def _best_flows(self, gpulets: Sequence[float], demands: Mapping[str, Demand]) -> Flows:
        """Return the same for gpu-lets that differ, by a linear program."""
        pairs = [(name, k) for k, own in enumerate(self._times_s) for name in own]
        if not pairs:
            return {}
        rows, columns = Rows(), defaultdict[str, list[int]](list)
        for column, (name, _) in enumerate(pairs):
            columns[name].append(column)
        for name in self._names:
            rows.add(columns[name], [1.0] * len(columns[name]), demands[name].rate_rps)
        first = 0
        for own, most in zip(self._times_s, gpulets, strict=True):
            rows.add(range(first, first + len(own)), own.values(), most)
            first += len(own)
        total = sum(demands[name].rate_rps for name in self._names)
        cost = [-self._worth(demands[name]) / total for name, _ in pairs]
        limits = [math.inf] * len(pairs)
        if self._objective == "each":  # first the least part of any rate, then the sum
            for name in self._names:
                if columns[name]:
                    values = [-1.0] * len(columns[name])
                    rows.add([*columns[name], len(pairs)], [*values, demands[name].rate_rps], 0.0)
            # Derived: small beside the rate, so that it decides between equals.
            cost, limits = [*(1e-4 * each for each in cost), -1.0], [*limits, 1.0]
        solved = linear_program(cost, rows, limits).x
        return {} if solved is None else dict(zip(pairs, solved.tolist(), strict=False))


def _gathered(
    program: Program, demand: Demand, slowdown: float, *, is_alone: bool, is_cautious: bool
) -> MeanBatch | None:
    """Return the mean batch that is gathered in time; None when not even one request is.

    A scheduler gathers as long as the deadline allows, even when a smaller batch takes less time per request. A batch
    that shares its gpu-let with no other has a fractional mean, as the deadline allows one more request in some batches
    only. A batch limited by its planned size has the mean of what comes until it must begin.
    """
    latency, largest = program.latency, program.batch_size
    assert latency is not None
    gap_ms = 1000.0 / demand.rate_rps
    if latency.at(1) * program.slowdown > demand.slo_ms:  # nothing is in time beside busy neighbours
        return None
    stated = program.slowdown if is_cautious else slowdown

    def over_ms(size: int) -> float:
        """Return by how much a batch of so many is late; it grows with the size."""
        return latency.at(size) * stated + (size - 0.5) * gap_ms - demand.slo_ms

    size = 1 + bisect_right(range(2, largest + 1), 0.0, key=over_ms)
    mean = float(size)
    if size == largest:
        mean = mean_of_capped(largest, max(0.0, demand.slo_ms - latency.at(largest) * stated) / gap_ms)
    elif is_alone and latency.at(size + 1) * stated <= demand.slo_ms:
        grows_ms = (latency.at(size + 1) - latency.at(size)) * stated
        mean += max(0.0, 1.0 - over_ms(size + 1) / (grows_ms + gap_ms))
    below = int(mean)
    ms = latency.at(below)
    if mean > below:
        ms += (mean - below) * (latency.at(below + 1) - ms)
    return MeanBatch(mean, ms * slowdown, ms * stated)


@cache
def mean_of_capped(largest: int, come: float) -> float:
    """Return the mean of min(largest, 1 + N) with N from a Poisson distribution of mean `come`: the requests gathered
    until a batch must begin."""
    if come > 2.0 * largest + 50.0:  # derived: beyond it a sum of rare terms is nothing
        return float(largest)
    mean, exactly, at_most = 1.0, math.exp(-come), 0.0
    for size in range(1, largest):
        at_most += exactly
        mean += max(0.0, 1.0 - at_most)
        exactly *= come / size
    return mean
