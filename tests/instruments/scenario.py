"""Scenario files: models, gpu-lets and arrivals at stated times, to be run by both drivers of the scheduler core.

`run_virtual` runs one through the virtual-time driver; `tests.instruments.replay` runs the same file through the
dispatcher. Both return the batches in order of dispatch, so that what is simulated can be held against what is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.batching.virtual.simulator import simulate
from tenuto.documents import StrictModel, load_document, parse_document
from tenuto.errors import InvalidInputError, Problem
from tenuto.placement import Plan
from tenuto.profiles.latency import LatencyField

__all__ = ["RanBatch", "Scenario", "run_virtual"]

_MOST_ARRIVALS = 1_000_000


class ScenarioModel(StrictModel):
    """A model and what its batches cost on every gpu-let that holds it. `rate_rps` is the scheduler's first guess."""

    name: str
    slo_ms: Annotated[float, Field(gt=0)]
    latency: LatencyField
    rate_rps: Annotated[float, Field(gt=0)] = 100.0


class ScenarioGpulet(StrictModel):
    """A gpu-let by itself on its GPU; `models` maps each model it holds to the largest batch that may run.

    `merge`: groups of them that run as one program, as in a plan; joint batches cost the sum of their members'.
    """

    id: str
    models: Annotated[dict[str, Annotated[int, Field(ge=1)]], Field(min_length=1)]
    merge: tuple[tuple[str, ...], ...] = ()


class ScenarioArrivals(StrictModel):
    """`count` requests of a model, the first at `at_ms`, the others `every_ms` apart (0: all at once)."""

    model: str
    at_ms: Annotated[float, Field(ge=0)]
    count: Annotated[int, Field(ge=1)] = 1
    every_ms: Annotated[float, Field(ge=0)] = 0.0


class ScenarioNetwork(StrictModel):
    """Delays both drivers budget, in ms: from dispatch to the start of execution, and from its end to the client."""

    ctrl_ms: Annotated[float, Field(ge=0)] = 1.0
    response_ms: Annotated[float, Field(ge=0)] = 3.0


class ScenarioScheduler(StrictModel):
    """The scheduler and its options."""

    name: str = "deferred"
    options: dict[str, Any] = Field(default_factory=dict)


class Scenario(StrictModel):
    """A scenario file. Events of one moment come in different orders in the two drivers: keep their times apart."""

    scheduler: ScenarioScheduler = ScenarioScheduler()
    network: ScenarioNetwork = ScenarioNetwork()
    models: Annotated[tuple[ScenarioModel, ...], Field(min_length=1)]
    gpulets: Annotated[tuple[ScenarioGpulet, ...], Field(min_length=1)]
    arrivals: Annotated[tuple[ScenarioArrivals, ...], Field(min_length=1)]

    @classmethod
    def load(cls, path: str | Path) -> Scenario:
        """Read a YAML or JSON file; raises `InvalidInputError` with every problem found."""
        return cls.from_data(load_document(path), origin=str(path))

    @classmethod
    def from_data(cls, data: Any, *, origin: str = "scenario") -> Scenario:
        """Validate plain data; raises `InvalidInputError` with every problem found."""
        scenario = parse_document(cls, data, origin=origin)
        problems = list(scenario._problems(origin))
        if problems:
            raise InvalidInputError(problems)
        return scenario

    def _problems(self, origin: str) -> Iterator[Problem]:
        names = [model.name for model in self.models]
        known = f"Use one of {', '.join(names)}."
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Problem(f"{origin}: models", name, "name is used twice", "Give each model its own name.")
        for position, gpulet in enumerate(self.gpulets):
            for name in gpulet.models:
                if name not in names:
                    yield Problem(f"{origin}: gpulets.{position}.models", name, "no such model in the scenario", known)
        held = {name for gpulet in self.gpulets for name in gpulet.models}
        for position, arrivals in enumerate(self.arrivals):
            where = f"{origin}: arrivals.{position}.model"
            if arrivals.model not in names:
                yield Problem(where, arrivals.model, "no such model in the scenario", known)
            elif arrivals.model not in held:
                yield Problem(where, arrivals.model, "no gpu-let holds this model", "Add it to a gpu-let.")
        total = sum(arrivals.count for arrivals in self.arrivals)
        if total > _MOST_ARRIVALS:
            yield Problem(f"{origin}: arrivals", total, f"at most {_MOST_ARRIVALS:,} requests", "Lower the counts.")

    def delay(self) -> NetworkDelay:
        """Return the delays as a scheduler takes them."""
        return NetworkDelay(ctrl_ms=self.network.ctrl_ms, response_ms=self.network.response_ms)

    def plan(self) -> Plan:
        """Return a plan of the scenario's gpu-lets, each on a GPU of its own, in the order of the file.

        Raises:
            InvalidInputError: two gpu-lets of one id.
        """
        latency = {model.name: model.latency.model_dump(mode="json") for model in self.models}
        return Plan.from_data(
            {
                "policy": {"name": "scenario"},
                "gpus": [{"id": gpulet.id, "type": "emulated"} for gpulet in self.gpulets],
                "gpulets": [
                    {
                        "id": gpulet.id,
                        "gpu": gpulet.id,
                        "models": [
                            {"name": name, "batch_size": size, "latency": latency[name]}
                            for name, size in gpulet.models.items()
                        ],
                        "merge": gpulet.merge,
                    }
                    for gpulet in self.gpulets
                ],
                "models": [
                    {
                        "name": model.name,
                        "source": "scenario:model",  # which nobody builds
                        "slo_ms": model.slo_ms,
                        "rate_rps": model.rate_rps,
                        "latency": latency[model.name],
                    }
                    for model in self.models
                ],
            }
        )

    def schedule(self) -> list[tuple[float, str]]:
        """Return (arrival in ms, model) of every request, ascending; requests of one moment in the file's order."""
        expanded = (
            (arrivals.at_ms + number * arrivals.every_ms, arrivals.model)
            for arrivals in self.arrivals
            for number in range(arrivals.count)
        )
        return sorted(expanded, key=lambda arrival: arrival[0])


class RanBatch(NamedTuple):
    """A batch that was dispatched: its requests by position in `Scenario.schedule`, and when it left the dispatcher.

    The requests of a joint batch of merged models come in ascending order, those of others in the core's.
    """

    dispatched_ms: float
    gpulet: str
    model: str
    requests: tuple[int, ...]


def run_virtual(scenario: Scenario) -> list[RanBatch]:
    """Run a scenario in virtual time and return its batches in order of dispatch, then gpu-let.

    Raises:
        InvalidInputError: unknown scheduler or option, or an SLO that no batch can meet.
    """
    plan = scenario.plan()
    scheduler = make_scheduler(scenario.scheduler.name, from_plan(plan, scenario.delay()), scenario.scheduler.options)
    schedule = scenario.schedule()
    index = {model.name: position for position, model in enumerate(scenario.models)}
    programs = scheduler.system.programs
    result = simulate(
        scheduler,
        np.array([at_ms for at_ms, _ in schedule], dtype=np.float64),
        np.array([index[name] for _, name in schedule], dtype=np.int32),
        warmup_s=0.0,
    )
    log = result.batches
    return sorted(
        RanBatch(
            dispatched_ms,
            plan.gpulets[gpulet].id,
            programs[program].name,
            tuple(requests if len(programs[program].members) == 1 else sorted(requests)),
        )
        for dispatched_ms, gpulet, program, requests in zip(
            log.dispatched_ms, log.gpulet, log.program, log.requests, strict=True
        )
    )
