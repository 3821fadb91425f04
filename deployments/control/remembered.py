"""What the controller remembers from one process to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from tenuto.deployments.control.rates import RatesMemory
from tenuto.placement import Plan, Workload
from tenuto.placement.planner import Durations
from tenuto.placement.workload import ModelSpec


@dataclass(frozen=True)
class ChangeUnderWay:
    """A change of plan. `stage` is applied now; when the change fails, `origin` is served again."""

    origin: Plan
    target: Plan
    stage: Plan
    begun_s: float
    stage_since_s: float
    why: str
    is_rollback: bool = False
    suffered: tuple[str, ...] = ()  # models that lost too much before the change


@dataclass(frozen=True)
class Memory:
    """What survives the controller. `plan` was applied last, `workload` is declared, `edits` are entries that `tenuto
    model` set or removed (None) since the last plan file."""

    plan: Plan
    workload: Workload
    rates: RatesMemory = field(default_factory=RatesMemory)
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    surplus: Mapping[str, float] = field(default_factory=dict)
    durations: Durations | None = None
    changes_s: tuple[float, ...] = ()
    quiet_until_s: float = 0.0
    failures: int = 0
    paused: bool = False
    change: ChangeUnderWay | None = None
    proving: ChangeUnderWay | None = None
    edits: Mapping[str, ModelSpec | None] = field(default_factory=dict)

    def to_data(self) -> dict[str, Any]:
        """Return the memory as plain data, for a JSON file."""
        data: dict[str, Any] = _FORM.dump_python(self, mode="json", by_alias=True, exclude_defaults=True)
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Memory:
        """Read what `to_data` returned; raises `ValueError` for anything else."""
        return _FORM.validate_python(data)


_FORM = TypeAdapter(Memory)
