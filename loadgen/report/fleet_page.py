"""The page of `tenuto fleet observe`: fleet, cells, nodes and gpu-lets, and the models in danger with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tenuto.deployments.fleet.endangered_models import models_in_danger
from tenuto.deployments.fleet.observation import CellReport
from tenuto.deployments.wire.status import SystemStatus
from tenuto.pages import templates
from tenuto.placement import Plan
from tenuto.placement.cluster import node_of
from tenuto.placement.fleet.fleet_file import Cell
from tenuto.placement.program import Gpulet

_FEW = 2  # format: cells that are open although nothing in them is in danger


@dataclass(frozen=True)
class _ShownCell:
    """A cell with what is to be known of it, the GPUs of each node with the gpu-lets of its last plan, and its models
    in danger by reason. `up` is None when it does not answer."""

    cell: Cell
    notes: Sequence[str]
    nodes: Mapping[str, Mapping[str, Sequence[Gpulet]]]
    dangers: Mapping[str, Sequence[str]]
    up: Mapping[str, bool] | None

    @property
    def state(self) -> str:
        """What it does now, in words."""
        silent = "has no URL" if self.cell.url is None else "does not answer"
        return silent if self.up is None else self.cell.unready or "all gpu-lets are up"

    @property
    def gpulets(self) -> int:
        """How many gpu-lets it has."""
        return len({gpulet.id for gpus in self.nodes.values() for held in gpus.values() for gpulet in held})


def render_fleet(
    reports: Mapping[str, CellReport],
    plans: Mapping[str, Plan | None],
    before: Mapping[str, SystemStatus],
    now: datetime,
    every_s: float | None = None,
) -> str:
    """Return the page as text.

    Args:
        reports: what each cell says; those that were never seen are only named.
        plans: what runs in each cell, or ran when it answered last.
        before: the statuses of the last look, if there was one.
        now: when the cells were asked.
        every_s: the time to the next look; None if none comes.
    """
    shown = [_shown(r.cell, r, plans.get(n), before.get(n)) for n, r in reports.items() if r.cell is not None]
    return (
        templates(__package__)
        .get_template("fleet.html")
        .render(
            cells=shown,
            few=len(shown) <= _FEW,
            unseen=[note for report in reports.values() if report.cell is None for note in report.notes],
            gpus=sum(len(each.cell.cluster.gpus) for each in shown),
            models=len({name for each in shown for name in each.cell.rates_rps}),
            endangered=len({name for each in shown for names in each.dangers.values() for name in names}),
            now=now,
            every_s=every_s,
        )
    )


def _shown(cell: Cell, report: CellReport, plan: Plan | None, before: SystemStatus | None) -> _ShownCell:
    nodes: dict[str, dict[str, Sequence[Gpulet]]] = {}
    held = {} if plan is None else plan.by_gpu()
    for gpu in cell.cluster.gpus if plan is None else plan.gpus:
        nodes.setdefault(node_of(gpu.id), {})[gpu.id] = held.get(gpu.id, ())
    dangers: dict[str, list[str]] = {}
    for model, why in models_in_danger(report, before):
        dangers.setdefault(why, []).append(model)
    status = report.status
    up = None if status is None else {gpulet.id: gpulet.up for gpulet in status.gpulets}
    return _ShownCell(cell, report.notes, nodes, dangers, up)
