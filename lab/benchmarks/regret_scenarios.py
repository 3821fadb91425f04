"""Random serving scenarios for `bench_regret.py`, far wider than those for which any scheduler here was written.

A scenario is 1 to 20 models on 1 to 32 GPUs at 0.5 to 1.2 of what full staggered batches could carry. Models: l(1) of 2
to 50 ms, fixed over marginal cost 0.3 to 20, an SLO of 1.6 to 12 l(1). Arrivals: uniform, Poisson, gamma of shape 0.1
and 0.4, on-off bursts, or a mixture. On top, each in about a fifth of the scenarios: network delays, unequal gpu-lets,
two to four gpu-lets per GPU, load steps, applications, programs of several models.

`wide` scenarios have 2 models or more whose SLOs lie 10 to 100 times apart, so that some cannot wait for the batches of
others. In `sized` ones about half of the models vary in size: a batch costs fixed + slope * size * requests, sizes are
lognormal (sigma 0.3 to 1.2), and each of four to eight size classes is the square root of two times the next smaller
one. The rivals take each class for a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from tenuto.batching.core.system import Host, Model, NetworkDelay, ScheduledGpulet, ScheduledProgram, System
from tenuto.batching.virtual.result import SimulationResult
from tenuto.loadgen.simulated import Simulation
from tenuto.outcome import Outcome
from tenuto.placement import ModelSpec
from tenuto.placement.application import Application, Stage
from tenuto.placement.arrivals.arrival import Arrival
from tenuto.placement.generates import Lengths
from tenuto.placement.workload import size_parts

__all__ = ["FLAGS", "Ran", "Scenario", "draw", "run"]

FLAGS = ("network", "unequal", "shared", "steps", "applications", "programs")
ARRIVALS = ("uniform", "poisson", "gamma 0.1", "gamma 0.4", "on-off", "mixed")
MOST_RPS = 20_000.0  # a dispatcher in Python carries no more; faster scenarios are slowed down as a whole
REQUESTS = 40_000
MEAN_SIZE = 100.0
STEP = 2**0.5  # each size class over the next smaller one
LEAST_SLOS = 60.0  # a run lasts so many of the longest SLO


@dataclass(frozen=True)
class Scenario:
    """A system and what is offered to it. `load` is the offered rate over that of full staggered batches."""

    name: str
    system: System
    specs: tuple[ModelSpec, ...]
    applications: tuple[Application, ...]
    duration_s: float
    warmup_s: float
    seed: int
    load: float
    arrivals: str
    flags: frozenset[str]
    sized: int = 0  # models that vary in size

    def families(self) -> list[str]:
        """Return what it belongs to, for the breakdown."""
        gpulets, models = len(self.system.gpulets), len(self.specs)
        return [
            f"arrivals {self.arrivals}",
            f"load {'below 0.8' if self.load < 0.8 else '0.8 to 1' if self.load < 1.0 else 'above 1'}",
            f"gpu-lets {'1-2' if gpulets < 3 else '3-8' if gpulets < 9 else '9 and more'}",
            f"models {'1' if models == 1 else '2-5' if models < 6 else '6-20'}",
            *([f"sizes of {'all' if self.sized == models else 'some'} models"] if self.sized else []),
            *(f"with {flag}" for flag in sorted(self.flags) or ["none of these"]),
        ]


@dataclass(frozen=True)
class Ran:
    """What a scheduler made of a scenario: requests in time over all offered, and by model or application."""

    attainment: float
    by_model: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The attainment of the model or application that is served worst."""
        return min(self.by_model)


def draw(seed: int, number: int, requests: int = REQUESTS, *, wide: bool = False, sized: bool = False) -> Scenario:
    """Return scenario `number` of a series; the same numbers give the same scenario."""
    rng = np.random.default_rng([seed, number])
    flags = frozenset(flag for flag in FLAGS if rng.random() < 0.2)
    gpus = _log_int(rng, 1, 32)
    count = _log_int(rng, 1, 20)
    if wide or "programs" in flags:
        count = max(count, 2)
    first = np.exp(rng.uniform(math.log(2.0), math.log(50.0), count))
    ratio = np.exp(rng.uniform(math.log(0.3), math.log(20.0), count))
    slack = np.exp(rng.uniform(math.log(1.6), math.log(12.0), count))
    if wide:
        apart = np.log(first * slack)
        apart = (apart - apart.min()) / (apart.max() - apart.min())
        first = 4.0 * np.exp(rng.uniform(math.log(10.0), math.log(100.0))) ** apart / slack
    alpha, beta = first / (1.0 + ratio), first * ratio / (1.0 + ratio)
    network = NetworkDelay()
    if "network" in flags:
        quick = float(first.min())
        control, data, response = rng.uniform(0.01, 0.2), rng.uniform(0.0, 0.02), rng.uniform(0.0, 0.3)
        network = NetworkDelay(float(control * quick), float(data * quick), float(response * quick))
    groups = _programs(rng, count) if "programs" in flags else [[m] for m in range(count)]
    gpulets = _gpulets(rng, flags, gpus, groups, alpha, beta)
    slowest = np.array([max(g[p][1] * g[p][0][1] for _, g in gpulets if p in g) for p in range(len(groups))])
    slo = np.zeros(count)
    for program, members in enumerate(groups):
        fixed = network.ctrl_ms + network.data_ms_per_request + network.response_ms
        for member in members:
            slo[member] = slack[member] * max(first[member], slowest[program]) + fixed
    share = rng.dirichlet(np.ones(count)) if rng.random() < 0.5 else np.full(count, 1.0 / count)
    share = np.maximum(share, 0.02 / count) * rng.uniform(0.9, 1.1, count)  # no two uniform streams in step
    # At which rate would full staggered batches keep every gpu-let busy?
    scale = _staggered_rps(gpulets, groups, slo, share / share.sum(), network)
    load = float(rng.uniform(0.5, 1.2))
    rates = load * scale * share / share.sum()
    stretch = max(1.0, rates.sum() / MOST_RPS)
    name = f"{seed:x}/{number}{' wide' if wide else ''}{' sized' if sized else ''}"
    scenario = _assemble(rng, name, flags, gpulets, groups, slo, rates, network, stretch, load, requests)
    return _with_sizes(scenario, np.random.default_rng([seed, number, 1])) if sized else scenario


def _with_sizes(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Let about half of the models vary in size, of those that are programs by themselves and no stages. A batch of
    requests of the mean size costs what it cost."""
    system, specs = scenario.system, list(scenario.specs)
    stages = {app.model_name(stage) for app in scenario.applications for stage in app.stages}
    grids: dict[int, list[int]] = {}  # by model that varies
    models: list[Model] = []
    begins: list[int] = []  # by model, where it or its smallest class is among all
    for index, model in enumerate(system.models):
        begins.append(len(models))
        alone = next((p for p, program in enumerate(system.programs) if program.members == (index,)), None)
        if alone is None or model.name in stages or rng.random() < 0.5:
            models.append(model)
            continue
        sigma, classes = float(rng.uniform(0.3, 1.2)), int(rng.integers(4, 9))
        median = MEAN_SIZE * math.exp(-sigma * sigma / 2.0)
        hosts = [hosts[alone] for hosts in system.distinct_hosts() if alone in hosts]
        most = round(min(median * math.exp(2.5 * sigma), *(_largest(host, model, system.network) for host in hosts)))
        grid = grids[index] = sorted({math.ceil(most / STEP**n) for n in range(classes)})
        form = {"lognormal": {"median": median, "sigma": sigma, "most": most}}
        specs[index] = specs[index].model_copy(update={"sizes": {"size": Lengths.model_validate(form)}})
        parts = size_parts(specs[index], ["size"], [(size,) for size in grid])
        rate = model.rate_rps or 0.0
        models += [
            replace(model, rate_rps=rate * p or None, sizes=(size,)) for size, p in zip(grid, parts, strict=True)
        ]
    programs: list[ScheduledProgram] = []
    hosted: dict[int, dict[int, Host]] = {id(hosts): {} for hosts in system.distinct_hosts()}
    for number, program in enumerate(system.programs):
        grid = grids.get(program.members[0], [0])
        for n, size in enumerate(grid):
            for hosts in system.distinct_hosts():
                if number in hosts:
                    longest_ms = system.models[program.members[0]].slo_ms
                    host = hosts[number]
                    hosted[id(hosts)][len(programs)] = _sized_host(host, size, longest_ms) if size else host
            programs.append(ScheduledProgram(program.name, tuple(begins[member] + n for member in program.members)))
    gpulets = tuple(replace(gpulet, hosts=hosted[id(gpulet.hosts)]) for gpulet in system.gpulets)
    sized = System(tuple(models), gpulets, system.network, tuple(programs), system.objective)
    return replace(scenario, system=sized, specs=tuple(specs), sized=len(grids))


def _line(host: Host) -> tuple[float, float]:
    """Return the fixed time of a batch, and the time of a request of the mean size in it."""
    first, *more = host.latency_ms[1:3]
    slope = more[0] - first if more else first / 2.0
    return first - slope, slope


def _largest(host: Host, model: Model, network: NetworkDelay) -> float:
    """Return the largest size whose request alone leaves a quarter of its SLO."""
    (fixed, slope), delay_ms = _line(host), network.ctrl_ms + network.data_ms_per_request + network.response_ms
    return MEAN_SIZE * ((model.slo_ms - delay_ms) / 1.33 / host.slowdown - fixed) / slope


def _sized_host(host: Host, size: int, slo_ms: float) -> Host:
    fixed, slope = _line(host)
    steps = [fixed + slope * size / MEAN_SIZE * batch for batch in range(1, 400)]
    return Host((0.0, *(ms for ms in steps if ms * host.slowdown <= slo_ms)), host.slowdown)


def _log_int(rng: np.random.Generator, low: int, high: int) -> int:
    return int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))


def _programs(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Return models in groups of one to three."""
    order, groups = rng.permutation(count).tolist(), []
    while order:
        size = min(len(order), int(rng.integers(1, 4)))
        groups.append(sorted(order[:size]))
        order = order[size:]
    return sorted(groups)


# A gpu-let while it is drawn: its GPU and, by program, latency by batch size and slowdown.
Drawn = tuple[str, dict[int, tuple[list[float], float]]]


def _gpulets(
    rng: np.random.Generator,
    flags: frozenset[str],
    gpus: int,
    groups: list[list[int]],
    alpha: NDArray[np.float64],
    beta: NDArray[np.float64],
) -> list[Drawn]:
    """Return the gpu-lets: whole GPUs that host everything unless the flags say otherwise."""
    per_gpu = int(rng.integers(2, 5)) if "shared" in flags else 1
    gpus = max(1, gpus // per_gpu)
    slower = float(rng.uniform(1.2, 3.0)) if "unequal" in flags else 1.0
    partly = "unequal" in flags and rng.random() < 0.5
    efficiency = float(rng.uniform(0.4, 1.0))
    slowdown = float(rng.uniform(1.0, 1.4)) if per_gpu > 1 else 1.0
    kinds: dict[object, dict[int, tuple[list[float], float]]] = {}
    found: list[Drawn] = []
    total = gpus * per_gpu
    for number in range(total):
        speed = (slower if number % 2 else 1.0) * per_gpu**efficiency
        held = list(range(len(groups)))
        if partly and len(groups) > 1:
            held = [p for p in held if rng.random() < 0.6 or p % total == number]
            held = held or [number % len(groups)]
        key = (speed, tuple(held))
        if key not in kinds:
            kinds[key] = {p: (_latency(groups[p], alpha * speed, beta * speed), slowdown) for p in held}
        found.append((f"g{number // per_gpu}", kinds[key]))
    for program in range(len(groups)):  # every program has a host
        if not any(program in hosts for _, hosts in found):
            gpu, hosts = found[0]
            found[0] = (gpu, {**hosts, program: (_latency(groups[program], alpha, beta), slowdown)})
    return found


def _latency(members: Sequence[int], alpha: NDArray[np.float64], beta: NDArray[np.float64]) -> list[float]:
    """Return l(b), long enough for any SLO drawn; a program of several models shares half of their fixed costs."""
    fixed = float(max(beta[m] for m in members) + 0.5 * (sum(beta[m] for m in members) - max(beta[m] for m in members)))
    slope = float(max(alpha[m] for m in members))
    return [0.0, *(slope * size + fixed for size in range(1, 400))]


def _staggered_rps(
    gpulets: list[Drawn],
    groups: list[list[int]],
    slo: NDArray[np.float64],
    share: NDArray[np.float64],
    network: NetworkDelay,
) -> float:
    """Return the rate at which staggered batches would fill the gpu-lets: a fluid bound, by a linear program."""
    kinds = {id(hosts): hosts for _, hosts in gpulets}
    many = {key: sum(1 for _, hosts in gpulets if id(hosts) == key) for key in kinds}
    part = [sum(share[m] for m in members) for members in groups]
    columns = [(key, p) for key, hosts in kinds.items() for p in hosts]
    cost = []
    for key, p in columns:
        steps, slowdown = kinds[key][p]
        hosts_of = sum(count for kind, count in many.items() if p in kinds[kind])
        budget = min(slo[m] for m in groups[p]) - network.ctrl_ms - network.response_ms
        fits = [
            b
            for b in range(1, len(steps))
            if steps[b] * slowdown * (1.0 + 1.0 / hosts_of) + network.data_ms_per_request * b <= budget
        ]
        best = max(fits, default=1)
        cost.append(steps[best] * slowdown / best)
    size = len(columns) + 1  # the last column is the rate in requests per ms
    rows, limits = [], []
    for key, count in many.items():
        row = np.zeros(size)
        for place, (kind, _) in enumerate(columns):
            if kind == key:
                row[place] = cost[place]
        rows.append(row)
        limits.append(float(count))
    equal = []
    for p in range(len(groups)):
        row = np.zeros(size)
        row[[place for place, (_, program) in enumerate(columns) if program == p]] = 1.0
        row[-1] = -part[p]
        equal.append(row)
    goal = np.zeros(size)
    goal[-1] = -1.0
    solved = linprog(goal, np.array(rows), np.array(limits), np.array(equal), np.zeros(len(groups)))
    return 1000.0 * float(solved.x[-1])


def _assemble(
    rng: np.random.Generator,
    name: str,
    flags: frozenset[str],
    gpulets: list[Drawn],
    groups: list[list[int]],
    slo: NDArray[np.float64],
    rates: NDArray[np.float64],
    network: NetworkDelay,
    stretch: float,
    load: float,
    requests: int,
) -> Scenario:
    """Return the scenario, with every time multiplied by `stretch`."""
    stretch = float(stretch)  # the scheduler calculates with plain floats
    slo, rates = slo * stretch, rates / stretch
    network = NetworkDelay(
        network.ctrl_ms * stretch, network.data_ms_per_request * stretch, network.response_ms * stretch
    )
    count = len(slo)
    process = str(rng.choice(ARRIVALS))
    duration_s = max(requests / rates.sum(), LEAST_SLOS * slo.max() / 1000.0)
    arrivals = [_arrival(rng, process, flags, float(slo.max()), duration_s) for _ in range(count)]
    chained = _chains(rng, count) if "applications" in flags else []
    names = [f"m{m}" for m in range(count)]
    applications = []
    for number, (parent, child) in enumerate(chained):
        copies = int(rng.integers(1, 4))
        rate = float(min(rates[parent], rates[child] / copies))
        rates[parent], rates[child] = rate, copies * rate
        stages = (
            Stage(model=names[parent], part=float(slo[parent])),
            Stage(model=names[child], count=copies, after=(names[parent],), part=float(slo[child])),
        )
        applications.append(
            Application(
                name=f"app{number}",
                rate_rps=rate,
                slo_ms=float(slo[parent] + slo[child]),
                arrival=arrivals[parent],
                stages=stages,
            )
        )
        for m in (parent, child):
            names[m] = f"app{number}.{names[m]}"
    hosted: dict[int, dict[int, Host]] = {}
    for _, hosts in gpulets:
        if id(hosts) not in hosted:
            hosted[id(hosts)] = {
                p: Host(
                    tuple(ms * stretch for ms in steps if ms * slowdown * stretch <= min(slo[m] for m in groups[p])),
                    slowdown,
                )
                for p, (steps, slowdown) in hosts.items()
            }
    models = tuple(Model(names[m], float(slo[m]), float(rates[m])) for m in range(count))
    programs = tuple(ScheduledProgram("+".join(names[m] for m in members), tuple(members)) for members in groups)
    system = System(
        models,
        tuple(ScheduledGpulet(f"l{n}", gpu, hosted[id(hosts)]) for n, (gpu, hosts) in enumerate(gpulets)),
        network,
        programs,
        "total",
    )
    specs = tuple(
        ModelSpec(name=names[m], rate_rps=float(rates[m]), slo_ms=float(slo[m]), arrival=arrivals[m])
        for m in range(count)
    )
    return Scenario(
        name,
        system,
        specs,
        tuple(applications),
        duration_s,
        duration_s / 5.0,
        int(rng.integers(2**31)),
        load,
        process,
        flags,
    )


def _chains(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Return disjoint pairs of models: the second is called when the first has answered."""
    order = rng.permutation(count).tolist()
    pairs = max(1, count // 4) if count > 1 else 0
    return [(order[2 * pair], order[2 * pair + 1]) for pair in range(min(pairs, count // 2))]


def _arrival(
    rng: np.random.Generator, process: str, flags: frozenset[str], longest_slo_ms: float, duration_s: float
) -> Arrival:
    if process == "mixed":
        process = str(rng.choice(ARRIVALS[:-1]))
    if "steps" in flags:
        factors = np.exp(rng.normal(0.0, 0.5, 5))
        return Arrival(process="steps", options={"factors": [float(f) for f in factors / factors.mean()]})
    if process.startswith("gamma"):
        return Arrival(process="gamma", shape=float(process.partition(" ")[2]))
    if process == "on-off":
        period_s = longest_slo_ms / 1000.0 * math.exp(rng.uniform(math.log(2.0), math.log(20.0)))
        busy = float(rng.uniform(0.4, 0.8))
        return Arrival(process="on_off", options={"on_s": busy * period_s, "off_s": (1.0 - busy) * period_s})
    return Arrival(process=process)


def run(
    scenario: Scenario, scheduler: str, options: Mapping[str, object] | None = None
) -> tuple[Ran, SimulationResult]:
    """Run a scheduler over a scenario; requests of an application count as one, answered when all its stages are."""
    simulation = Simulation(
        scenario.specs,
        scenario.applications,
        scenario.system,
        None,
        scheduler,
        dict(options or {}),
        scenario.duration_s,
        scenario.warmup_s,
        scenario.seed,
    )
    finished = simulation.run()
    counts = finished.result.counts()
    staged = {app.model_name(stage) for app in scenario.applications for stage in app.stages}
    ended = [
        (int(counts[m, Outcome.OK]), int(counts[m].sum()))
        for m, spec in enumerate(scenario.specs)
        if spec.name not in staged
    ]
    if scenario.applications:
        rows = finished.summary()["applications"].values()
        ended += [(int(row["ok"]), int(row["offered"])) for row in rows]
    offered = sum(total for _, total in ended)
    attainment = sum(good for good, _ in ended) / max(1, offered)
    return Ran(attainment, tuple(good / total for good, total in ended if total)), finished.result
