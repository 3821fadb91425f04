"""Asks cells what they are and what runs there. A cell that does not answer keeps its last state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from tenuto import __version__
from tenuto.deployments.serve.endpoint import get_told
from tenuto.deployments.wire.status import SystemStatus
from tenuto.errors import EnvironmentFaultError, TenutoError, first_line
from tenuto.placement import Plan
from tenuto.placement.cluster import Gpu, whole_of
from tenuto.placement.fleet.fleet_file import Cell, nodes_of
from tenuto.placement.planner.gpu_matching import gpus_of

_AT_ONCE = 16  # limit: cells that are asked at once


@dataclass(frozen=True)
class CellReport:
    """A cell with the plan that it says runs there, and all else that it says; both are None when it does not answer.
    `cell` is None when it was never seen; `notes` are for people."""

    cell: Cell | None
    plan: Plan | None
    notes: tuple[str, ...] = ()
    status: SystemStatus | None = None


def observe(urls: Mapping[str, tuple[str, str]], before: Mapping[str, Cell]) -> dict[str, CellReport]:
    """Return what each cell says now, by name. `urls` are those for clients and for operators; `before` is what was
    known of cells, whose prices and spot terms stay."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        seen = pool.map(lambda name: _observed(name, *urls[name], before.get(name)), urls)
        return dict(zip(urls, seen, strict=True))


def _observed(name: str, url: str, operator_url: str, before: Cell | None) -> CellReport:
    try:
        status = get_told(f"{operator_url}/status", SystemStatus)
        if status.plan is None:
            raise EnvironmentFaultError(f"no plan runs at {operator_url}")
        plan = Plan.from_data(status.plan, origin=f"cell {name}", is_whole=False)
        nodes = nodes_of(_priced(gpus_of(plan), before))
    except (TenutoError, ValueError) as error:
        age = "was never seen"
        if before is not None and before.observed_at is not None:
            age = f"is as {(datetime.now(UTC) - before.observed_at).total_seconds():,.0f} s ago"
        return CellReport(before, None, (f"cell {name} {age}: {first_line(error)}",))
    notes = []
    if status.version != __version__:
        notes.append(f"cell {name} runs Tenuto {status.version}; this is {__version__}, and its plans are for this one")
    cell = Cell(
        name=name,
        url=url,
        operator_url=None if operator_url == url else operator_url,
        nodes=nodes,
        plan=f"{name}.plan.json",
        rates_rps={spec.name: spec.rate_rps for spec in plan.models if spec.name not in plan.unserved},
        observed_at=datetime.now(UTC),
        version=status.version,
        unready=_why_unready(status),
    )
    return CellReport(cell, plan, tuple(notes), status)


def _priced(gpus: Iterable[Gpu], before: Cell | None) -> Iterator[Gpu]:
    """Yield GPUs with what was known of their prices and spot terms, or of those of the last GPU of their type."""
    known: dict[str, Gpu] = {}
    for whole in map(whole_of, () if before is None else before.cluster.gpus):
        known |= {whole.type: whole, f"{whole.id} {whole.type}": whole}
    for gpu in gpus:
        was = known.get(f"{gpu.device} {gpu.whole_type}") or known.get(gpu.whole_type)
        if was is not None and was.price_per_hour is not None:
            gpu = gpu.model_copy(update={"price_per_hour": was.price_per_hour * gpu.part, "spot": was.spot})
        yield gpu


def _why_unready(status: SystemStatus) -> str:
    """Return why a cell may not be changed now; empty when it may."""
    down: Sequence[str] = [gpulet.id for gpulet in status.gpulets if not gpulet.up]
    if status.controller is not None and status.controller.awaits:
        return f"it is changing: {status.controller.awaits}"
    return f"{', '.join(down[:5])} {'is' if len(down) == 1 else 'are'} down" if down else ""
