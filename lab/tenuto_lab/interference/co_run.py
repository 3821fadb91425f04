"""Runs several models at once on one device, each in a process with its share, and measures the latency of each.

The processes start one after another, because on a GPU under CUDA MPS concurrent starts mis-measure free memory. They
begin to run together.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.profiles.measuring.events import Failed
from tenuto.profiles.measuring.measure import Shares, check_share, row_name
from tenuto.profiles.measuring.telemetry import Telemetry
from tenuto.profiles.measuring.timing import Timing
from tenuto.profiles.measuring.worker_process import WorkerProcess
from tenuto.profiles.profile import CoRun, CoRunPart

WORKER = ["-m", "tenuto_lab.interference.co_run_worker"]
_PATIENCE_S = 10.0  # a busy CUDA MPS client leaves by itself


@dataclass(frozen=True)
class CoRunRequest:
    """One model of a co-run."""

    source: str
    batch_size: int
    share_pct: float = 100.0
    device: str = "auto"
    weights_path: str | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


CO_RUN_REQUESTS: TypeAdapter[CoRunRequest] = TypeAdapter(CoRunRequest)


@dataclass(frozen=True)
class Ready:
    """A process of a co-run has built its model and waits to be told for how long to run."""

    device: str
    sm_count: int | None = None
    event: Literal["ready"] = "ready"


@dataclass(frozen=True)
class Ran:
    """Begin and end of every batch of one process of a co-run on the monotonic clock in s, and measurements of them:
    `splits` has a value in ms for each batch, `metrics` one for all."""

    began: tuple[float, ...]
    ended: tuple[float, ...]
    splits: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    event: Literal["ran"] = "ran"


CO_RUN_EVENTS: TypeAdapter[Any] = TypeAdapter(Annotated[Ready | Ran | Failed, Field(discriminator="event")])
_Kind = TypeVar("_Kind", Ready, Ran)


def measure_co_run(
    parts: Sequence[CoRunRequest],
    *,
    seconds: float = 5.0,
    shares: Shares | None = None,
    telemetry: Telemetry | None = None,
    ready_timeout_s: float = 300.0,
) -> CoRun:
    """Run the models at once for some seconds; blocks.

    Only batches that began and ended while every model was running count.

    Args:
        parts: one process each; shares of a CPU are threads.
        seconds: how long all run.
        shares: see `tenuto.profiles.measuring.measure.measure_model`; needed on a GPU.
        telemetry: of the GPU; adds `power_w` and `sm_clock_mhz` of the whole device, and `idle_power_w` before.
        ready_timeout_s: for building one model.

    Raises:
        InvalidInputError: no parts, or a model that cannot be built.
        EnvironmentFaultError: a process ended or is not held to its share, or no batch of one fell within the common
            time.
    """
    if not parts or not seconds > 0:
        raise InvalidInputError("a co-run needs at least one model and a time above 0. Name models.")
    metrics: dict[str, float] = {}
    if telemetry is not None:
        metrics = {"idle_power_w": telemetry.read().power_w, **telemetry.limits()}
    with contextlib.ExitStack() as stack:
        residents = []
        for part in parts:
            environment = shares.environment(part.share_pct) if shares else {}
            resident = WorkerProcess(WORKER, environment, part.source, CO_RUN_EVENTS)
            stack.callback(resident.end, _PATIENCE_S)
            resident.tell(CO_RUN_REQUESTS.dump_json(part).decode())
            residents.append(resident)
            ready = _await(resident, Ready, part, ready_timeout_s)
            if ready.device == "cuda":
                _check_share(part, ready, shares, alone=len(parts) == 1)
        for resident in residents:
            resident.tell(str(seconds))
        if telemetry is not None:
            metrics |= _watch_while(telemetry, len(residents), seconds)
        reports = [
            _await(resident, Ran, part, seconds + ready_timeout_s)
            for resident, part in zip(residents, parts, strict=True)
        ]
    return CoRun(parts=tuple(_parts(parts, reports)), metrics={key: round(value, 3) for key, value in metrics.items()})


def _await(resident: WorkerProcess, kind: type[_Kind], part: CoRunRequest, timeout_s: float) -> _Kind:
    event = resident.next_event(timeout_s)
    if not isinstance(event, kind):
        found = "left" if event is None else f"reported {event.event}"
        raise EnvironmentFaultError(f"'{part.source}' {found} where {kind.__name__} was due. Start it again.")
    return event


def _check_share(part: CoRunRequest, ready: Ready, shares: Shares | None, *, alone: bool) -> None:
    """Refuse a process that takes turns with the others instead of running beside them, because that would count as
    interference.

    Such a process sees more SMs than its share. On a GPU without CUDA MPS every process is one.
    """
    if shares is not None:
        check_share(part.share_pct, ready.sm_count, shares)
    elif not alone or part.share_pct < 100:
        raise EnvironmentFaultError(
            "co-runs on a GPU need CUDA MPS, which is not running here. Start it (see `tenuto doctor`)."
        )


def _watch_while(telemetry: Telemetry, residents: int, seconds: float) -> dict[str, float]:
    """Read the GPU through the second half of the co-run: the driver's power is a moving average."""
    ended = threading.Event()
    ended.wait(seconds / 2)
    readings = []
    for _ in range(10):
        readings.append(telemetry.read())
        ended.wait(seconds / 2 / 12)
    return {
        "power_w": Timing.of([r.power_w for r in readings]).median_ms,
        "sm_clock_mhz": Timing.of([r.sm_clock_mhz for r in readings]).median_ms,
        "residents": float(residents),
    }


def _parts(parts: Sequence[CoRunRequest], reports: Sequence[Ran]) -> list[CoRunPart]:
    opened = max(report.began[0] for report in reports)
    closed = min(report.ended[-1] for report in reports)
    made = []
    for part, report in zip(parts, reports, strict=True):
        inside = [
            index
            for index, (began, ended) in enumerate(zip(report.began, report.ended, strict=True))
            if began >= opened and ended <= closed
        ]
        if not inside:
            raise EnvironmentFaultError(
                f"no batch of '{part.source}' began and ended while all ran. Run for longer than its latency."
            )
        timing = Timing.of([1000.0 * (report.ended[i] - report.began[i]) for i in inside])
        splits = {key: round(statistics.median(values[i] for i in inside), 4) for key, values in report.splits.items()}
        made.append(
            CoRunPart(
                model=row_name(part.source),
                batch_size=part.batch_size,
                share_pct=part.share_pct,
                latency_ms=round(timing.median_ms, 4),
                latency_spread_ms=round(timing.spread_ms, 4),
                runs=timing.runs,
                metrics={**splits, **report.metrics, "uncertainty_pct": round(timing.uncertainty_pct, 2)},
            )
        )
    return made
