"""Which models of a cell are in danger, and why, from what the cell says."""

from __future__ import annotations

from collections.abc import Iterator

from tenuto.deployments.fleet.observation import CellReport
from tenuto.deployments.operator.window import between
from tenuto.deployments.wire.status import SystemStatus
from tenuto.outcome import ATTAINED
from tenuto.placement.expectation.outlook import MORE

_NOTHING = SystemStatus(models={})


def models_in_danger(report: CellReport, before: SystemStatus | None = None) -> Iterator[tuple[str, str]]:
    """Yield models with what endangers each.

    A model is in danger when its cell does not answer or planned it below its rate, a gpu-let of it is down, less than
    99 % of its requests were in time, or it is asked for more than a full promise stands. Requests count from the
    status `before` on; without one, from the start of the cell.
    """
    status, plan = report.status, report.plan
    if status is None or plan is None:
        if report.cell is not None and report.cell.url is not None:
            yield from ((name, "its cell does not answer") for name in report.cell.rates_rps)
        return
    yield from plan.unserved_reasons.items()
    down = {gpulet.id for gpulet in status.gpulets if not gpulet.up}
    for spec in plan.models if down else ():
        hosts = [gpulet.id for gpulet in plan.hosts_of(spec.name)]
        if lost := [name for name in hosts if name in down]:
            yield spec.name, f"{len(lost)} of its {len(hosts)} gpu-lets down: {', '.join(lost)}"
    since = "since the start" if before is None else "since the last look"
    for name, figures in between(before or _NOTHING, status, 1.0).models.items():
        if figures.attainment is not None and figures.attainment < ATTAINED and not status.models[name].shadow:
            yield name, f"{100.0 * figures.attainment:.2f} % of {figures.ended_rps:,.0f} requests in time {since}"
    planned = {spec.name: spec.rate_rps for spec in plan.models}
    for name, rate in (status.controller.rates_rps if status.controller is not None else {}).items():
        if rate > (1.0 + MORE) * planned.get(name, rate):
            yield name, f"asked for {rate:,.1f} r/s, planned for {planned[name]:,.1f}"
