"""GSLICE+, which tunes while it serves, beside iGniter's plan, which stays: figures 15 and 16 of iGniter's paper, in
virtual time.

Source: Xu et al., iGniter (arXiv 2211.01713), section 5.3. The text names two groups of its twelve workloads: W9 and
W10 share GPU 4; W1, W5 and W11 share GPU 5. We read it so that figure 15 shows the first group and figure 16 the
second. The numbers of both figures are not printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.running import Life, Look, RunningSystem
from tenuto.loadgen.report.charts import Figure, Plot
from tenuto.loadgen.report.palette import styles_for
from tenuto.loadgen.schedule import make_schedule
from tenuto.outcome import Outcome
from tenuto.pages import templates
from tenuto.placement import Cluster, Plan, Workload, solve
from tenuto.placement.interference.igniter_model import Hardware, ModelConstants
from tenuto.placement.planner import PlanTask
from tenuto.placement.planner.completion import complete
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.baselines.gslice import Gslice, Observed, Setting
from tenuto_lab.baselines.igniter.igniter import Igniter

# paper: iGniter, table 3: name, network, SLO in ms, requests per second
_W1, _W5, _W9, _W10, _W11 = (
    ("W1", "alexnet", 10.0, 1200.0),
    ("W5", "resnet50", 30.0, 600.0),
    ("W9", "vgg19", 40.0, 200.0),
    ("W10", "ssd", 25.0, 150.0),
    ("W11", "ssd", 40.0, 50.0),
)
FIGURES = {"igniter-15": (_W9, _W10), "igniter-16": (_W1, _W5, _W11)}
TITLES = {
    "igniter-15": "GSLICE+ tuning W9 and W10 on one GPU, beside iGniter's plan",
    "igniter-16": "GSLICE+ tuning W1, W5 and W11 on one GPU, beside iGniter's plan",
}
SECTION = "iGniter 5.3"
_STARTS_S = 10.0  # paper: iGniter, section 5.3: how long a process with another share takes until it serves
_OBSERVED_S = 10  # paper: the authors' script observes each setting for 10 s
_WAIT_MS = 100.0  # paper: the authors' configuration of Triton: how long a request waits for a full batch


@dataclass(frozen=True)
class Moment:
    """One model in one second: its setting and its figures. `latency_ms` is the mean of its batches, None without any;
    `answered` are requests with an answer, `ended` those that ended in any way, `good` those that ended in time."""

    until_s: int
    share_pct: float
    batch_size: int
    latency_ms: float | None
    answered: int
    good: int
    ended: int


@dataclass(frozen=True)
class Phase:
    """The seconds in which a model keeps one setting."""

    moments: Sequence[Moment]

    @property
    def latency_ms(self) -> float | None:
        """The mean of the seconds with a batch."""
        known = [moment.latency_ms for moment in self.moments if moment.latency_ms is not None]
        return sum(known) / len(known) if known else None

    @property
    def answered_rps(self) -> float:
        """Requests with an answer, in time or late."""
        return sum(moment.answered for moment in self.moments) / len(self.moments)

    @property
    def attainment(self) -> float | None:
        """The part of the requests that ended in time; None where none ended."""
        ended = sum(moment.ended for moment in self.moments)
        return sum(moment.good for moment in self.moments) / ended if ended else None


@dataclass(frozen=True)
class Tuned:
    """A GPU under one policy: the series of every model, and how often the plan was changed."""

    policy: str
    series: Mapping[str, Sequence[Moment]]
    changes: int

    def phases(self) -> Iterator[tuple[str, Phase]]:
        """Yield the phases of every model in order of time."""
        for name, moments in self.series.items():
            for _, together in groupby(moments, key=lambda moment: (moment.share_pct, moment.batch_size)):
                yield name, Phase(list(together))


def workload_of(figure: str, profiles: Profiles) -> Workload:
    """Return the workload of a figure. Copies overlap with the batch before, as in equation 2."""
    hardware = Hardware.of(profiles.hardware("v100"), "v100")
    models = []
    for name, network, slo_ms, rate in FIGURES[figure]:
        model = ModelConstants.of(profiles.get(network, "v100").coefficients, network)
        into_ms = model.load_bytes / hardware.pcie_bytes_per_ms
        models.append(
            {
                "name": name,
                "profile": network,
                "slo_ms": slo_ms,
                "rate_rps": rate,
                "arrival": {"process": "uniform"},
                "options": {"copy_in_ms": into_ms},
            }
        )
    return Workload.model_validate({"models": models, "streaming": True})


def run_figure(figure: str, *, duration_s: float, seed: int) -> Iterator[Tuned]:
    """Yield the GPU of a figure under iGniter's plan, and under GSLICE+ from its start on: once with shares that may
    add up to more than the GPU, and once without."""
    profiles, cluster = Profiles([load_shipped("igniter-v100")]), Cluster.parse("v100:1")
    workload = workload_of(figure, profiles)
    plan = solve(Igniter(), workload, cluster, profiles)
    yield _Serving("igniter", workload, duration_s, seed).by(iter([plan]))
    for name, gslice in (("gslice", Gslice()), ("gslice, within the GPU", Gslice(overcommit=False))):
        serving = _Serving(name, workload, duration_s, seed)
        yield serving.by(_plans(gslice, serving.observed, workload, cluster, profiles))


def _plans(
    gslice: Gslice, observed: Mapping[str, Observed], workload: Workload, cluster: Cluster, profiles: Profiles
) -> Iterator[Plan]:
    """Yield the next plan whenever the last one was observed for long enough; the plan at the loops' end stays."""
    packed = gslice.untuned(workload, cluster, profiles)
    (tuning,) = gslice.tunings(packed, workload, profiles)

    def plan_of(settings: Sequence[Setting]) -> Plan:
        plan = gslice.tuned(packed, [settings], workload, cluster, profiles)
        return complete(plan, PlanTask(gslice, workload, cluster, profiles))

    loop = tuning.loop()
    settings = next(loop)
    while True:
        yield plan_of(settings)
        try:
            settings = loop.send([observed[demand.spec.name] for demand in tuning.demands])
        except StopIteration as end:
            yield plan_of(end.value)
            return


class _Serving:
    """One GPU in virtual time under one plan after the other. Each is observed for a while once its processes run."""

    def __init__(self, policy: str, workload: Workload, duration_s: float, seed: int) -> None:
        """Prepare; `observed` will have the figures of every model under the last plan."""
        self.observed: dict[str, Observed] = {}
        self._policy, self._workload, self._duration_s = policy, workload, duration_s
        schedule = make_schedule(workload.models, duration_s, seed)
        self._names = schedule.names
        self._system = RunningSystem(
            schedule.names,
            [workload[name].slo_ms for name in schedule.names],
            schedule.times_ms,
            schedule.model_index,
            lambda system: make_scheduler("thesis-router", system, {"wait_ms": _WAIT_MS}),
            life=Life((0.0, 0.0), (0.0, 0.0)),
            seed=seed,
        )

    def by(self, plans: Iterator[Plan]) -> Tuned:
        """Serve the whole load; the first plan is ready at the beginning."""
        series: dict[str, list[Moment]] = {name: [] for name in self._names}
        plan = next(plans)
        self._system.apply(plan)
        self._system.advance(0.0)
        self._system.life = Life((_STARTS_S, _STARTS_S), (0.0, 0.0))
        changes, looks = 0, list[Look]()
        for second in range(1, math.ceil(self._duration_s) + 1):
            self._system.advance(1000.0 * second)
            look = self._system.observe()
            for index, name in enumerate(self._names):
                series[name].append(self._moment(second, plan, look, index))
            looks = [] if look.waiting else [*looks, look]
            seen = {name: self._what_it_did(plan, looks, index) for index, name in enumerate(self._names)}
            if len(looks) < _OBSERVED_S or any(math.isnan(one.latency_ms) for one in seen.values()):
                continue
            self.observed |= seen
            looks, following = [], next(plans, plan)
            if following != plan:
                plan, changes = following, changes + 1
                self._system.apply(plan)
        return Tuned(self._policy, series, changes)

    def _moment(self, second: int, plan: Plan, look: Look, index: int) -> Moment:
        (gpulet,) = plan.hosts_of(self._names[index])
        good, answered, ended = _counts(look, index)
        latency_ms = self._what_it_did(plan, [look], index).latency_ms
        return Moment(
            second,
            gpulet.effective_share_pct,
            gpulet.models[0].batch_size,
            None if math.isnan(latency_ms) else latency_ms,
            answered,
            good,
            ended,
        )

    def _what_it_did(self, plan: Plan, looks: Sequence[Look], index: int) -> Observed:
        """Return the mean time of a model's batches, copies included, and their throughput; NaN if none ran."""
        name = self._names[index]
        (gpulet,) = plan.hosts_of(name)
        uses = [look.gpulets[gpulet.id] for look in looks if gpulet.id in look.gpulets]
        busy_s, batches = sum(use.busy_s for use in uses), sum(use.batches for use in uses)
        if not batches:
            return Observed(math.nan, math.nan)
        answered = sum(_counts(look, index)[1] for look in looks)
        copies_ms = self._workload[name].options["copy_in_ms"] * answered / batches
        return Observed(1000.0 * busy_s / batches + copies_ms, answered / busy_s)


def _counts(look: Look, index: int) -> tuple[int, int, int]:
    """Return how many requests of a model ended in time, with an answer, and in any way."""
    ended = look.ended[index]
    good = int(ended[Outcome.OK])
    return good, good + int(ended[Outcome.LATE]), int(ended.sum())


# --- the page -----------------------------------------------------------------------------------------------------


def render(figure: str, tuned: Sequence[Tuned], document: Mapping[str, Any]) -> str:
    """Return the page with the series of every model; `document` is the content of result.json."""
    page = templates(__package__, "tenuto.loadgen.report").get_template("tuner.html")
    charts = {name: list(_charts(name, slo_ms, tuned)) for name, _, slo_ms, _ in FIGURES[figure]}
    return page.render(document=document, title=TITLES[figure], charts=charts, tuned=tuned)


def _charts(name: str, slo_ms: float, tuned: Sequence[Tuned]) -> Iterator[Figure]:
    styles = styles_for([one.policy for one in tuned])
    for what, label, value_of in _DRAWN:
        lines = {one.policy: [value_of(moment) for moment in one.series[name]] for one in tuned}
        known = [value for values in lines.values() for value in values if value is not None]
        top = 1.1 * max([*known, slo_ms / 2.0 if label == "ms" else 0.0])
        plot = Plot((0.0, max(len(v) for v in lines.values())), (0.0, top), x_label="s", y_label=label)
        for policy, values in lines.items():
            heights = np.array([math.nan if value is None else value for value in values])
            plot.line(np.arange(1.0, len(heights) + 1.0), heights, styles[policy], policy)
        yield Figure(what, plot, f"{what} of {name} over time")


_DRAWN: tuple[tuple[str, str, Callable[[Moment], float | None]], ...] = (
    ("Share", "%", lambda moment: moment.share_pct),
    ("Batch size", "requests", lambda moment: moment.batch_size),
    ("Time of a batch", "ms", lambda moment: moment.latency_ms),
    ("In time", "%", lambda moment: 100.0 * moment.good / moment.ended if moment.ended else None),
)
