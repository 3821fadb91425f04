"""Random workloads of applications, and what their models cost: chains, forks and joins, some with stages whose number
of requests depends on data, some with models that applications share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linprog

from tenuto.batching.core.system import Host, Model, ScheduledGpulet, System
from tenuto.documents import parse_document
from tenuto.placement import Workload
from tenuto.placement.application import Application, Stage
from tenuto.profiles import LinearLatency

_MAP = "tenuto_lab.applications:requests"  # format: no function is called in virtual time
_LARGEST = 64


@dataclass(frozen=True)
class Case:
    """A workload, the latency of its models, and which models each GPU hosts (None: all). `load` is the offered work as
    a multiple of what the cluster carries when batches take half of the budgets that Nexus gives. `drawn` is the
    workload before rates and SLOs were chosen."""

    applications: tuple[Application, ...]
    latency: Mapping[str, LinearLatency]
    hosted: tuple[str | None, ...]
    load: float
    seed: int
    shape: str
    drawn: Workload

    @property
    def workload(self) -> Workload:
        """The workload as a planner gets it."""
        rates = self.requests_rps
        models = tuple(spec.model_copy(update={"rate_rps": rates[spec.name]}) for spec in self.drawn.models)
        return self.drawn.model_copy(update={"models": models, "applications": list(self.applications)})

    @property
    def requests_rps(self) -> dict[str, float]:
        """The requests per second that each model gets."""
        rates = dict.fromkeys(self.latency, 0.0)
        for app in self.applications:
            for stage in app.stages:
                rates[app.model_name(stage)] += app.rate_rps * stage.count
        return rates

    def largest_within(self, model: str, time_ms: float) -> int:
        """Return the largest batch of a model that takes at most so long, at least 1."""
        line = self.latency[model]
        return max([b for b in range(1, _LARGEST + 1) if line.at(b) <= time_ms], default=1)

    def cost_ms(self, model: str, time_ms: float) -> float:
        """Return the GPU time of a request in the largest batch that takes at most so long."""
        size = self.largest_within(model, time_ms)
        return self.latency[model].at(size) / size

    def system(self, budgets_ms: Mapping[str, float], longest_ms: Mapping[str, float]) -> System:
        """Return the system with these SLOs of the models, and batches of at most so long."""
        rates = self.requests_rps
        models = tuple(Model(name, budgets_ms[name], rates[name]) for name in self.latency)
        place = {name: index for index, name in enumerate(self.latency)}
        host = {
            name: Host((0.0, *(self.latency[name].at(b) for b in range(1, self.largest_within(name, ms) + 1))))
            for name, ms in longest_ms.items()
        }
        everywhere = {place[name]: host[name] for name in host}
        alone = {name: {place[name]: host[name]} for name in host}
        gpulets = tuple(
            ScheduledGpulet(f"g{n}", f"g{n}", everywhere if name is None else alone[name])
            for n, name in enumerate(self.hosted)
        )
        return System(models, gpulets)

    def bound(self) -> float:
        """Return how large a part of all calls a fluid could answer: every request runs in the largest batch that the
        rest of its graph leaves time for, and no GPU ever waits."""
        best: dict[str, float] = {}
        for app in self.applications:
            least = {stage.label: self.latency[app.model_name(stage)].at(1) for stage in app.stages}
            for stage in app.stages:
                left = app.slo_ms - _longest_path(app, least)[stage.label] + least[stage.label]
                model = app.model_name(stage)
                best[model] = min(best.get(model, np.inf), self.cost_ms(model, left))
        offered = np.array([app.rate_rps for app in self.applications])
        need = np.array(
            [
                [
                    sum(s.count for s in app.stages if app.model_name(s) == m) * best[m] / 1000
                    for app in self.applications
                ]
                for m in self.latency
            ]
        )
        if self.hosted[0] is None:
            need, room = need.sum(axis=0, keepdims=True), [len(self.hosted)]
        else:
            room = [self.hosted.count(m) for m in self.latency]
        solved = linprog(-np.ones(len(offered)), need, room, bounds=[(0, rate) for rate in offered])
        return float(-solved.fun / offered.sum())


def _longest_path(app: Application, each: Mapping[str, float]) -> dict[str, float]:
    """Return by stage the largest sum over a path through it."""
    before: dict[str, float] = {}
    behind: dict[str, float] = {}

    def up(stage: Stage) -> float:
        if stage.label not in before:
            before[stage.label] = max((up(app.stage(b)) + each[b] for b in stage.after), default=0.0)
        return before[stage.label]

    def down(stage: Stage) -> float:
        if stage.label not in behind:
            later = [other for other in app.stages if stage.label in other.after]
            behind[stage.label] = max((down(other) + each[other.label] for other in later), default=0.0)
        return behind[stage.label]

    return {stage.label: up(stage) + each[stage.label] + down(stage) for stage in app.stages}


def nexus_split(app: Application, case: Case) -> dict[str, float]:
    """Return the budgets for which batches that take half of them need the least GPU time (Nexus, section 4.2).

    Nexus' dynamic program is for trees. On graphs, the next twentieth of the SLO goes to the stage that saves most by
    it; budgets that its paths have room for are then raised in proportion.
    """
    step = app.slo_ms / 40.0
    model = {stage.label: app.model_name(stage) for stage in app.stages}
    least = {label: 2.0 * case.latency[name].at(1) for label, name in model.items()}
    longest = max(_longest_path(app, least).values())
    if longest > app.slo_ms:
        return {label: ms * app.slo_ms / longest for label, ms in least.items()}
    budgets = dict(least)
    count = {stage.label: stage.count for stage in app.stages}
    while True:
        gains: list[tuple[float, str, float]] = []
        for label, ms in budgets.items():
            paths = _longest_path(app, budgets)
            for more in range(1, 9):
                if paths[label] + more * step <= app.slo_ms + 1e-9:
                    now, then = (case.cost_ms(model[label], t / 2.0) for t in (ms, ms + more * step))
                    gains.append((count[label] * (now - then) / more, label, more * step))
        gain, label, more_ms = max(gains, default=(0.0, "", 0.0))
        if gain <= 0:
            break
        budgets[label] += more_ms
    paths = _longest_path(app, budgets)
    return {label: ms * app.slo_ms / paths[label] for label, ms in budgets.items()}


def with_budgets(app: Application, budgets_ms: Mapping[str, float]) -> Application:
    """Return an application whose deadline is split in these proportions."""
    stages = tuple(s.model_copy(update={"budget_ms": None, "part": budgets_ms[s.label]}) for s in app.stages)
    return app.model_copy(update={"stages": stages})


def draw_case(seed: int) -> Case:
    """Return a random workload on a random cluster."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 4))
    is_sharing = count > 1 and rng.random() < 0.5

    def draw_latency() -> dict[str, float]:
        beta = float(np.exp(rng.uniform(np.log(2), np.log(25))))
        return {
            "alpha_ms": round(beta * float(np.exp(rng.uniform(np.log(0.05), np.log(0.5)))), 3),
            "beta_ms": round(beta, 3),
        }

    document: dict[str, Any] = {"applications": [], "models": []}
    if is_sharing:
        for n in range(int(rng.integers(1, 3))):
            document["models"].append({"name": f"shared{n}", "latency": draw_latency()})
    shapes = []
    for number in range(count):
        size, shape = int(rng.integers(2, 7)), str(rng.choice(["chain", "fork", "join", "any"]))
        shapes.append(f"{shape}{size}")
        is_poisson = rng.random() < 0.7
        stages: list[dict[str, Any]] = []
        free = [entry["name"] for entry in document["models"]]
        for place in range(size):
            stage: dict[str, Any] = {"model": f"s{place}"}
            if free and rng.random() < 0.5:
                stage["model"] = free.pop()
            else:
                stage["latency"] = draw_latency()
            if place and shape == "chain":
                after = [place - 1]
            elif place and shape == "fork":
                after = [int(rng.integers(0, max(1, place // 2 + 1)))]
            elif place == size - 1 and shape == "join" and size > 2:
                after = list(range(1, size - 1))
            elif place and shape == "join":
                after = [0]
            elif place:
                after = sorted({int(rng.integers(0, place)) for _ in range(int(rng.integers(1, 3)))})
            else:
                after = []
            stage["after"] = [stages[other]["model"] for other in after]
            kind = rng.random()
            if place and kind < 0.3:
                stage |= {"map": _MAP, "count": round(float(rng.uniform(0.5, 5)), 2)}
            elif kind > 0.8:
                stage["count"] = int(rng.integers(2, 5))
            stages.append(stage)
        arrival = {"process": "poisson"} if is_poisson else {"process": "gamma", "cv": 2.0}
        document["applications"].append(
            {"name": f"app{number}", "rate_rps": 1.0, "slo_ms": 1e6, "arrival": arrival, "stages": stages}
        )
    models_of_stages = {stage["model"] for app in document["applications"] for stage in app["stages"]}
    document["models"] = [entry for entry in document["models"] if entry["name"] in models_of_stages]
    work = parse_document(Workload, document, origin=f"case {seed}")
    latency = {spec.name: spec.latency for spec in work.models if isinstance(spec.latency, LinearLatency)}
    gpus = int(rng.integers(1, 9))
    tight = float(np.exp(rng.uniform(np.log(3), np.log(10))))
    shares = rng.uniform(0.3, 1.0, count)
    apps = []
    for app, share in zip(work.applications, shares, strict=True):
        least = {stage.label: latency[app.model_name(stage)].at(1) for stage in app.stages}
        slo_ms = round(tight * max(_longest_path(app, least).values()) * float(rng.uniform(0.8, 1.25)), 1)
        work_ms = sum(s.count * latency[app.model_name(s)].at(4) / 4 for s in app.stages)
        apps.append(app.model_copy(update={"slo_ms": slo_ms, "rate_rps": float(share / work_ms)}))
    case = Case(tuple(apps), latency, (None,) * gpus, 1.0, seed, "+".join(shapes), work)
    # The work of a second in GPUs, with batches that take half of Nexus' budgets.
    used = dict.fromkeys(latency, 0.0)
    for app in apps:
        for label, ms in nexus_split(app, case).items():
            name = app.model_name(app.stage(label))
            used[name] += app.rate_rps * app.stage(label).count * case.cost_ms(name, ms / 2.0) / 1000.0
    hosted: tuple[str | None, ...] = (None,) * gpus
    if rng.random() < 0.5:  # each GPU hosts one model, and the most loaded model gets the next GPU
        names = [name for name in latency if used[name] > 0]
        counts = dict.fromkeys(names, 1)
        for _ in range(max(0, 2 * gpus - len(names))):
            counts[max(names, key=lambda name: used[name] / counts[name])] += 1
        hosted = tuple(name for name in names for _ in range(counts[name]))
        busiest = max(used[name] / counts[name] for name in names)
    else:
        busiest = sum(used.values()) / gpus
    load = float(np.exp(rng.uniform(np.log(0.6), np.log(3.0))))
    scaled = tuple(app.model_copy(update={"rate_rps": app.rate_rps * load / busiest}) for app in apps)
    return Case(scaled, latency, hosted, load, seed, case.shape, work)
