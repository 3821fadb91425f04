"""A fleet in virtual time: the requests of a workload, divided over cells as proxies do it, and each cell by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.deployments.fleet.proxy_config import FOLLOWS_S
from tenuto.loadgen.figures import counted, outcome_figures
from tenuto.loadgen.schedule import Schedule, make_client_schedule, seed_for
from tenuto.loadgen.simulated import Simulation, beside
from tenuto.outcome import WARM_UP, Outcome
from tenuto.placement import Plan, Workload
from tenuto.placement.fleet.traffic_spread import Shares, after_loss
from tenuto.placement.workload import client_targets, offline_names

AFTER_S = 60.0  # default: how long after a loss requests are counted apart
_NOWHERE = -1  # format: the place of the cell of a request that no cell has


@dataclass(frozen=True)
class CellLoss:
    """GPUs of a cell that are lost for good at a time in seconds. When the cell `is_whole`, the weights of the traffic
    follow `FOLLOWS_S` later; until then its part is lost."""

    at_s: float
    cell: str
    gpus: frozenset[str]
    is_whole: bool


@dataclass(frozen=True)
class FleetSimulation:
    """Plans of cells, which part of the requests to a model or application each cell gets, and what clients send."""

    workload: Workload
    plans: Mapping[str, Plan]
    traffic: Shares
    duration_s: float = 60.0
    seed: int = 0
    losses: Sequence[CellLoss] = ()
    folder: Path = Path()
    """The folder of the workload's file, for traces beside it."""

    def run(self, progress: Callable[[str], None] = lambda _cell: None) -> FleetRun:
        """Run all requests, one cell after the other; `progress` is told which.

        Raises:
            InvalidInputError: a plan that cannot be simulated, or arrivals that cannot be made.
        """
        models = beside(self.workload.models, self.folder)
        applications = beside(self.workload.applications, self.folder)
        targets = client_targets(models, applications)
        sent = make_client_schedule(targets, applications, self.duration_s, self.seed)
        offline = {*offline_names(models, applications)}
        is_online = np.isin(sent.model_index, [n for n, name in enumerate(sent.names) if name not in offline])
        cells = [*self.plans]
        cell = self._divided(sent, {spec.name: spec.model for spec in targets}, cells)
        outcome = np.full(len(sent), Outcome.FAILED, dtype=np.int8)
        for place, name in enumerate(cells):
            progress(name)
            rows = np.flatnonzero(cell == place)
            part, rows = self._part(sent, rows, self.plans[name])
            losses = tuple((loss.at_s, loss.gpus) for loss in self.losses if loss.cell == name)
            simulation = Simulation.of_plan(
                self.plans[name], duration_s=self.duration_s, warmup_s=0.0, seed=self.seed, losses=losses
            )
            records = simulation.serve(part).records()
            outcome[rows[is_online[rows]][records.request]] = records.outcome
        return FleetRun(sent.part(np.flatnonzero(is_online)), cell[is_online], outcome[is_online], cells, self.losses)

    def _divided(self, sent: Schedule, model: Mapping[str, str], cells: Sequence[str]) -> NDArray[np.int64]:
        """Return the place of the cell of each request: by the weights of its time, by chance. HAProxy goes by turns,
        but models with the same weights share them."""
        result = np.full(len(sent), _NOWHERE, dtype=np.int64)
        weights = [(0.0, self.traffic)]  # each from a time on
        for loss in sorted((loss for loss in self.losses if loss.is_whole), key=lambda loss: loss.at_s):
            traffic = weights[-1][1]
            weights.append((1000.0 * (loss.at_s + FOLLOWS_S), {**traffic, **after_loss(traffic, loss.cell)}))
        for place, name in enumerate(sent.names):
            mine = np.flatnonzero(sent.model_index == place)
            draws = seed_for(self.seed, "cells", name).random(len(mine))
            for since_ms, traffic in weights:
                now = sent.times_ms[mine] >= since_ms
                if shares := traffic.get(model[name], {}):
                    edges = np.cumsum([*shares.values()]) / sum(shares.values())
                    chosen = np.searchsorted(edges[:-1], draws[now], side="right")
                    result[mine[now]] = np.array([cells.index(each) for each in shares])[chosen]
        return result

    def _part(self, sent: Schedule, rows: NDArray[np.int64], plan: Plan) -> tuple[Schedule, NDArray[np.int64]]:
        """Return the part of a schedule that a cell can be asked, by the names of its plan, and its rows."""
        names = tuple(spec.name for spec in client_targets(plan.models, plan.applications))
        place = np.array([names.index(name) if name in names else _NOWHERE for name in sent.names], dtype=np.int32)
        rows = rows[place[sent.model_index[rows]] != _NOWHERE]
        part = sent.part(rows)
        part = replace(part, model_index=place[part.model_index], names=names, applications=plan.applications)
        return part, rows


@dataclass(frozen=True)
class FleetRun:
    """Requests of clients with the place of their cell and their outcome. What no cell has is `failed`."""

    sent: Schedule
    cell: NDArray[np.int64]
    outcome: NDArray[np.int8]
    cells: Sequence[str]
    losses: Sequence[CellLoss]

    def summary(self) -> dict[str, Any]:
        """Return by model and application what became of its requests after the warm-up: of all, of those by cell, and
        of those in the minute after each loss."""
        at_ms = self.sent.times_ms
        counts = at_ms >= 1000.0 * WARM_UP * self.sent.duration_s
        after = np.zeros(len(self.sent), dtype=bool)
        for loss in self.losses:
            after |= (at_ms >= 1000.0 * loss.at_s) & (at_ms < 1000.0 * (loss.at_s + AFTER_S))
        figures = {}
        for place, name in enumerate(self.sent.names):
            mine = counts & (self.sent.model_index == place)
            if not mine.any():
                continue
            by_cell = {
                cell: self._figures(mine & (self.cell == n))
                for n, cell in enumerate(self.cells)
                if (mine & (self.cell == n)).any()
            }
            figures[name] = self._figures(mine) | {
                "cells": by_cell,
                "after_losses": self._figures(mine & after),
                "otherwise": self._figures(mine & ~after),
            }
        return {
            "duration_s": self.sent.duration_s,
            "weights_follow_s": FOLLOWS_S,
            **self._figures(counts),
            "models": figures,
        }

    def _figures(self, rows: NDArray[np.bool_]) -> dict[str, Any]:
        return outcome_figures(counted(self.outcome[rows]))
