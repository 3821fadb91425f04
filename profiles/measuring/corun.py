"""Run several models at once on one device, each in a process with its share, and measure each one's latency meanwhile.

Also which co-runs the interference models of iGniter and gpulet are fitted on. The processes start one after another
(on a GPU under CUDA MPS concurrent starts mis-measure free memory) and begin to run together.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations_with_replacement
from typing import IO, Any

from tenuto.errors import EnvironmentFaultError, InvalidInputError, Problem
from tenuto.profiles.measuring.measure import ShareEnvironment, row_name
from tenuto.profiles.measuring.telemetry import Telemetry
from tenuto.profiles.measuring.timing import Timing, quantile
from tenuto.profiles.networks.cpu_share import calm_openmp
from tenuto.profiles.profile import CoRun, CoRunPart

__all__ = ["CoRunRequest", "igniter_co_runs", "measure_co_run", "pair_co_runs", "resident_co_runs"]

_WORKER = ["-m", "tenuto.profiles.measuring.corun_worker"]


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


def igniter_co_runs(one: CoRunRequest) -> list[list[CoRunRequest]]:
    """Return the two of iGniter's eleven configurations that are no points of a grid: alone, and beside a copy.

    The other nine are the grid of three batch sizes and three shares (iGniter, section 4.1). `one` says the batch size
    and the share, which both copies get: at most half of the device.
    """
    if one.share_pct > 50:
        raise InvalidInputError(
            Problem("share_pct", one.share_pct, "two copies need half of the device each", "Give at most 50.")
        )
    return [[one], [one, one]]


def pair_co_runs(
    models: Sequence[CoRunRequest], batch_sizes: Sequence[int], shares: Sequence[float]
) -> list[list[CoRunRequest]]:
    """Return every pair of models at equal batch sizes, on every split of the device that `shares` holds both parts of.

    Latencies alone have to be measured at the same batch sizes and shares for gpulet's coefficients to be fitted.
    """
    splits = sorted({share for share in shares if share < 100 and (100.0 - share) in set(shares)})
    made = []
    for first, second in combinations_with_replacement(models, 2):
        for size in sorted(set(batch_sizes)):
            for share in splits:
                if first is second and share > 50:
                    continue  # the mirror image of one that is there
                made.append([_at(first, size, share), _at(second, size, 100.0 - share)])
    return made


def resident_co_runs(one: CoRunRequest, most: int = 5) -> list[list[CoRunRequest]]:
    """Return 1, 2, … equal residents on 1/most of the device each: iGniter's series for power, clock and delay."""
    return [[_at(one, one.batch_size, 100.0 / most)] * count for count in range(1, most + 1)]


def _at(one: CoRunRequest, batch_size: int, share_pct: float) -> CoRunRequest:
    return CoRunRequest(one.source, batch_size, share_pct, one.device, one.weights_path, one.seed, one.options)


class _Resident:
    """One process of a co-run. Its lines are read by a thread, so that waiting for them has an end."""

    def __init__(self, request: CoRunRequest, environment: Mapping[str, str], errors: IO[str]) -> None:
        self.request = request
        self._errors = errors
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, *_WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=dict(environment),
        )
        self._reader = threading.Thread(target=self._collect, name="co-run", daemon=True)
        self._reader.start()
        self.tell(json.dumps(asdict(request)))

    def _collect(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def tell(self, line: str) -> None:
        """Send a line; a process that is gone is found out when its answer is awaited."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def await_event(self, kind: str, timeout_s: float) -> dict[str, Any]:
        """Return the next event; raises what the process reported, or `EnvironmentFaultError` for a lost one."""
        name = self.request.source
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise EnvironmentFaultError(f"'{name}' said nothing for {timeout_s:g} s. Measure it alone first.") from None
        if line is None:
            self._process.wait(5.0)
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["no message"])[-1]
            raise EnvironmentFaultError(f"the process of '{name}' ended with {self._process.returncode}: {last}")
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "error":
            raise (InvalidInputError if event["kind"] == "InvalidInputError" else EnvironmentFaultError)(event["text"])
        if event["event"] != kind:
            raise EnvironmentFaultError(f"'{name}' reported {event['event']} where {kind} was due. Start it again.")
        return event

    def end(self) -> None:
        """Let the process leave by itself (a busy CUDA MPS client must not be killed); after ten seconds stop it."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5.0)
        if self._process.stdout is not None:
            self._process.stdout.close()


def measure_co_run(
    parts: Sequence[CoRunRequest], *, seconds: float = 5.0, share_environment: ShareEnvironment | None = None,
    telemetry: Telemetry | None = None, ready_timeout_s: float = 300.0,
) -> CoRun:
    """Run the models at once for some seconds; blocks.

    Only batches that began and ended while every model was running count.

    Args:
        parts: one process each; shares of a CPU are threads.
        seconds: how long all run.
        share_environment: see `tenuto.profiles.measuring.measure.measure_model`; needed on a GPU.
        telemetry: of the GPU; adds `power_w` and `sm_clock_mhz` of the whole device, and `idle_power_w` before.
        ready_timeout_s: for building one model.

    Raises:
        InvalidInputError: no parts, or a model that cannot be built.
        EnvironmentFaultError: a process ended, or no batch of one fell within the common time.
    """
    if not parts or not seconds > 0:
        raise InvalidInputError("a co-run needs at least one model and a time above 0. Name models.")
    metrics: dict[str, float] = {}
    if telemetry is not None:
        metrics = {"idle_power_w": telemetry.read().power_w, **telemetry.limits()}
    with contextlib.ExitStack() as stack:
        residents = []
        for part in parts:
            environment = {**os.environ, **(share_environment(part.share_pct) if share_environment else {})}
            calm_openmp(environment)
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            resident = _Resident(part, environment, errors)
            stack.callback(resident.end)
            residents.append(resident)
            device = resident.await_event("ready", ready_timeout_s)["device"]
            if device == "cuda" and share_environment is None and (len(parts) > 1 or part.share_pct < 100):
                raise EnvironmentFaultError(
                    "co-runs on a GPU need CUDA MPS, which is not running here. Start it (see `tenuto doctor`)."
                )
        for resident in residents:
            resident.tell(str(seconds))
        if telemetry is not None:
            metrics |= _watch_while(telemetry, residents, seconds)
        reports = [resident.await_event("runs", seconds + ready_timeout_s) for resident in residents]
    return CoRun(parts=tuple(_parts(parts, reports)), metrics={key: round(value, 3) for key, value in metrics.items()})


def _watch_while(telemetry: Telemetry, residents: Sequence[_Resident], seconds: float) -> dict[str, float]:
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
        "residents": float(len(residents)),
    }


def _parts(parts: Sequence[CoRunRequest], reports: Sequence[Mapping[str, Any]]) -> list[CoRunPart]:
    opened = max(report["began"][0] for report in reports)
    closed = min(report["ended"][-1] for report in reports)
    made = []
    for part, report in zip(parts, reports, strict=True):
        inside = [
            index for index, (began, ended) in enumerate(zip(report["began"], report["ended"], strict=True))
            if began >= opened and ended <= closed
        ]
        if not inside:
            raise EnvironmentFaultError(
                f"no batch of '{part.source}' began and ended while all ran. Run for longer than its latency."
            )
        timing = Timing.of([1000.0 * (report["ended"][i] - report["began"][i]) for i in inside])
        splits = {
            key: round(quantile(sorted(values[i] for i in inside), 0.5), 4) for key, values in report["splits"].items()
        }
        made.append(CoRunPart(
            model=row_name(part.source), batch_size=part.batch_size, share_pct=part.share_pct,
            latency_ms=round(timing.median_ms, 4), latency_spread_ms=round(timing.spread_ms, 4), runs=timing.runs,
            metrics={**splits, **report.get("metrics", {}), "uncertainty_pct": round(timing.uncertainty_pct, 2)},
        ))  # fmt: skip
    return made
