"""What outlives the controller's process: what operators want, what the controller remembers, and its log."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import TypeAdapter

from tenuto.deployments.control.rates import RatesMemory
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.history import Store
from tenuto.deployments.wire.status import LogLine
from tenuto.documents import parse_document
from tenuto.placement import Plan, Workload
from tenuto.placement.planner import Durations
from tenuto.placement.workload import ModelSpec

logger = logging.getLogger("ray.serve")

_LOG_LINES = 500  # limit: entries of the log that are kept


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
class Surplus:
    """By which `factor` more than is offered a model is planned for, as losses that nothing explained have taught, and
    the time constant with which that is forgotten."""

    factor: float
    fades_s: float


@dataclass(frozen=True)
class Memory:
    """What survives the controller. `plan` was applied last, `workload` is declared, `edits` are entries that `tenuto
    model` set or removed (None) since the last plan file. `number`: of the desired deployment, or edits, begun last."""

    plan: Plan
    workload: Workload
    rates: RatesMemory = field(default_factory=RatesMemory)
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    surpluses: Mapping[str, Surplus] = field(default_factory=dict)
    durations: Durations | None = None
    changes_s: tuple[float, ...] = ()
    quiet_until_s: float = 0.0
    failures: int = 0
    paused: bool = False
    change: ChangeUnderWay | None = None
    proving: ChangeUnderWay | None = None
    edits: Mapping[str, ModelSpec | None] = field(default_factory=dict)
    number: int = 0

    def to_data(self) -> dict[str, Any]:
        """Return the memory as plain data, for a JSON file."""
        data: dict[str, Any] = _FORM.dump_python(self, mode="json", by_alias=True, exclude_defaults=True)
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Memory:
        """Read what `to_data` returned; raises `ValueError` for anything else."""
        return _FORM.validate_python(data)


_FORM = TypeAdapter(Memory)


@dataclass(frozen=True)
class DesiredDeployment:
    """The deployment that an operator wants. Each one has the next `number`. `by` and `why` are for the history;
    `after`: the newest version of the history when it was asked for, 0 for none; `is_first`: nothing ran then."""

    number: int
    deployment: Deployment
    by: str
    why: str
    after: int = 0
    is_first: bool = False


class ControlMemory:
    """Stores the desired deployment, the controller's memory and the newest entries of its log."""

    _DESIRED, _MEMORY, _LOG = "control/desired", "control/memory", "control/log"

    def __init__(self, store: Store) -> None:
        self._store = store
        raw = store.get(self._LOG)
        lines = msgspec.json.decode(raw, type=list[LogLine]) if raw else []
        self._log: deque[LogLine] = deque(lines, maxlen=_LOG_LINES)

    def read(self) -> Memory | None:
        """Return the memory; None when there is none, or another version of Tenuto wrote it."""
        raw = self._store.get(self._MEMORY)
        try:
            return None if raw is None else Memory.from_data(json.loads(raw))
        except ValueError as error:
            logger.warning("control: the stored memory cannot be read and is ignored: %s", error)
            return None

    def write(self, memory: Memory) -> None:
        """Store the memory."""
        self._store.put(self._MEMORY, json.dumps(memory.to_data()).encode())

    def desired(self) -> DesiredDeployment | None:
        """Return the deployment that was desired last; None before the first."""
        raw = self._store.get(self._DESIRED)
        if raw is None:
            return None
        data = json.loads(raw)
        deployment = parse_document(Deployment, data.pop("deployment"), origin="desired deployment")
        return DesiredDeployment(deployment=deployment, **data)

    def write_desired(self, desired: DesiredDeployment) -> None:
        """Store the desired deployment."""
        deployment = desired.deployment.model_dump(mode="json", exclude_defaults=True)
        self._store.put(self._DESIRED, json.dumps({**vars(desired), "deployment": deployment}).encode())

    def add(self, entry: LogLine) -> None:
        """Append to the log."""
        self._log.append(entry)
        self._store.put(self._LOG, msgspec.json.encode(list(self._log)))

    def log(self) -> list[LogLine]:
        """Return the log, oldest first."""
        return list(self._log)

    def clear(self) -> None:
        """Forget everything."""
        for key in (self._DESIRED, self._MEMORY, self._LOG):
            self._store.delete(key)
        self._log.clear()
