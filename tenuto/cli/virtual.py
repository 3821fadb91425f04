"""The arguments of the verbs that run a plan or a workload in virtual time: simulate and goodput."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import scheduler_class, scheduler_names
from tenuto.cli.common import ClusterArguments, Number, cluster_arguments, gathered, json_option, tell
from tenuto.documents import load_document
from tenuto.errors import InvalidInputError, Problem, raise_if_any, refused
from tenuto.loadgen.simulated import Simulation
from tenuto.options import split_pairs
from tenuto.placement import Plan
from tenuto.placement.cluster import Placed
from tenuto.placement.placement_constraints import domain_of
from tenuto.placement.slo_rules import load_workload

if TYPE_CHECKING:
    from tenuto.loadgen.controlled import ControlledSimulation

_Named = TypeVar("_Named", str, tuple[str, str])


@dataclass(frozen=True)
class VirtualArguments:
    """The arguments of a run in virtual time."""

    source: str
    where: ClusterArguments
    scheduler_name: str
    duration_s: float
    warmup_s: float | None
    seed: int
    options: tuple[str, ...]
    network_ms: str | None
    lost: tuple[str, ...]

    def simulation(self, slo_scale: float = 1.0) -> Simulation:
        """Read the files; every SLO is multiplied by `slo_scale`. Models that a plan always serves late are named on
        stderr.

        Raises:
            InvalidInputError: lists every problem of the arguments. In a workload, an SLO that no batch can meet is
            one.
        """
        network, how = self._checked()
        how["warmup_s"] = self.warmup_s
        document = load_document(self.source)
        if _is_plan(document):
            if self.where.names_a_cluster:
                raise refused(
                    "--gpus",
                    self.where.gpus or self.where.cluster_file,
                    "a plan brings its own GPUs",
                    "Leave the cluster away, or pass a workload.",
                )
            plan = Plan.from_data(document, origin=self.source)
            how["losses"] = self._losses(plan.gpus)
            made = Simulation.of_plan(plan, network, slo_scale, **how)
            if slo_scale == 1.0:
                for late in made.always_late():
                    tell(str(late))
            return made
        cluster = self.where.cluster()
        profiles, folder = self.where.profiles(cluster.gpu_types), Path(self.source).parent
        workload = load_workload(self.source, cluster, profiles)
        if not workload.models:
            raise refused(f"{self.source}: models", [], "the workload has no models", "Add at least one.")
        if workload.merge != "off":
            tell("`merge` is for plans: here every model runs by itself. Plan first, and simulate the plan")
        how["losses"] = self._losses(cluster.gpus)
        return Simulation.of_workload(workload, cluster, profiles, network, slo_scale, folder=folder, **how)

    def controlled(self, control_file: str) -> ControlledSimulation:
        """Read the files for a run under the controller. A plan may be given more GPUs than its own, to grow on.

        Raises:
            InvalidInputError: lists the problems of the arguments.
        """
        from tenuto.deployments.control.settings import ControlSettings
        from tenuto.loadgen.controlled import ControlledSimulation

        network, how = self._checked()
        settings = ControlSettings.load(control_file)
        document = load_document(self.source)
        how |= {"network": network, "folder": Path(self.source).parent}
        if not _is_plan(document):
            cluster = self.where.cluster()
            profiles = self.where.profiles(cluster.gpu_types)
            workload = load_workload(self.source, cluster, profiles)
            how["losses"] = self._losses(cluster.gpus)
            return ControlledSimulation.of_workload(workload, cluster, profiles, settings, **how)
        plan = Plan.from_data(document, origin=self.source)
        profiles, gpus = self.where.ground(plan)
        lacking = sorted({gpu.id for gpu in plan.gpus} - {gpu.id for gpu in gpus})
        if lacking:
            rule = f"the plan uses GPU {', '.join(lacking)}, which the cluster lacks"
            raise refused("--gpus", self.where.gpus, rule, "Name a cluster that has them.")
        how["losses"] = self._losses(gpus)
        return ControlledSimulation(plan.workload, plan, gpus, profiles, settings, **how)

    def _losses(self, gpus: Sequence[Placed]) -> tuple[tuple[float, frozenset[str]], ...]:
        """Return (seconds, ids of GPUs) for every `--lose`."""
        by_id = {gpu.id: gpu for gpu in gpus}
        lost = read_losses(self.lost, by_id, lambda gpu, kind: domain_of(by_id[gpu], kind), ("gpu", "node", "rack"))
        return tuple((at_s, gone) for at_s, _, gone in lost)

    def _checked(self) -> tuple[NetworkDelay, dict[str, Any]]:
        """Return the delays, and the settings of every run with the scheduler's options."""
        problems = []
        if not (math.isfinite(self.duration_s) and self.duration_s > 0):
            rule = "must be a positive number of seconds"
            problems.append(Problem("--duration-s", self.duration_s, rule, "Give for example 60."))
        elif self.warmup_s is not None and not 0 <= self.warmup_s < self.duration_s:
            rule = "must be at least 0 and below the duration"
            problems.append(Problem("--warmup-s", self.warmup_s, rule, "Give for example 3."))
        if self.seed < 0:
            problems.append(Problem("--seed", self.seed, "must be at least 0", "Give 0 or a larger number."))
        network = NetworkDelay()
        if self.network_ms is not None:
            try:
                network = NetworkDelay(*(float(part) for part in self.network_ms.split(",")))
            except (ValueError, TypeError):
                rule = "must be up to three numbers of ms"
                problems.append(Problem("--network-ms", self.network_ms, rule, "Write 0.1,0.05,2."))
        options: dict[str, Any] = {}
        try:
            options = split_pairs(self.options)
            scheduler_class(self.scheduler_name).options_type.parse(self.scheduler_name, options)
        except InvalidInputError as error:
            problems += error.problems
        raise_if_any(problems)
        how = {"scheduler_name": self.scheduler_name, "options": options}
        return network, how | {"duration_s": self.duration_s, "seed": self.seed}


def read_losses(
    texts: Sequence[str], gpus: Iterable[_Named], domain: Callable[[_Named, str], str], kinds: Sequence[str]
) -> list[tuple[float, str, frozenset[_Named]]]:
    """Return (seconds, kind, GPUs) for every `--lose KIND:NAME@SECONDS`, ascending. `domain` returns with what a GPU is
    lost, by kind."""
    losses = []
    for text in texts:
        match = re.fullmatch(rf"({'|'.join(kinds)}):(.+)@(\d+(?:\.\d+)?)s?", text)
        if match is None:
            cure = f"Write for example --lose {kinds[-2]}:n1@60s; KIND is one of {', '.join(kinds)}."
            raise refused("--lose", text, "must be KIND:NAME@SECONDS", cure)
        kind, name, at_s = match.groups()
        known = {gpu: domain(gpu, kind) for gpu in gpus}
        if name not in known.values():
            raise refused(
                "--lose", name, f"no such {kind}", f"Name one of {', '.join(sorted(set(known.values()))[:12])}."
            )
        losses.append((float(at_s), kind, frozenset(gpu for gpu, place in known.items() if place == name)))
    return sorted(losses, key=lambda loss: loss[0])


def _is_plan(document: Any) -> bool:
    """Return whether a document is a plan, or the Serve config of a plan. (In a workload, applications have stages.)"""
    if not isinstance(document, dict):
        return False
    applications = document.get("applications")
    deployed = isinstance(applications, list) and any(isinstance(a, dict) and "import_path" in a for a in applications)
    return deployed or "gpulets" in document or "policy" in document


virtual_arguments = gathered(
    VirtualArguments,
    "arguments",
    click.argument("source", metavar="PLAN|WORKLOAD"),
    cluster_arguments,
    click.option(
        "--scheduler",
        "scheduler_name",
        default="deferred",
        metavar="NAME",
        help=f"One of {', '.join(scheduler_names())}.",
    ),
    click.option("--duration-s", type=Number(), default=60.0, help="Length of the run in virtual time."),
    click.option("--seed", type=int, default=0, help="Seed of the arrivals."),
    click.option(
        "--warmup-s", type=Number(), metavar="S", help="Requests of the first S seconds do not count. Default: 5 %."
    ),
    click.option("--option", "options", multiple=True, metavar="K=V", help="Option of the scheduler; repeatable."),
    click.option(
        "--network-ms",
        metavar="CTRL,DATA,RESPONSE",
        help="Delays in ms: to send a batch, for the data of each request, and for the answer. Default: none.",
    ),
    click.option(
        "--lose",
        "lost",
        multiple=True,
        metavar="KIND:NAME@S",
        help="Lose a gpu, node or rack after so many seconds, such as node:n1@60s; repeatable.",
    ),
    json_option,
)
