"""The profiler: measure what models cost on this machine and record it with hardware, versions and date.

Each model (on CUDA: each share of each model) is measured in a fresh process of its own,
`tenuto.profiles.measuring.worker`, so that memory growth is its own, a share can be set before CUDA starts, and
running out of memory ends nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import IO, Any

from tenuto.errors import EnvironmentFaultError, InvalidInputError, MissingProfileError, Problem
from tenuto.profiles.gpu_types import GPU_TYPES
from tenuto.profiles.measuring.timing import fit_line
from tenuto.profiles.networks.catalogue import is_factory, lookup
from tenuto.profiles.networks.cpu_share import calm_openmp
from tenuto.profiles.profile import Fit, Measured, ModelProfile, Profile, ProfilePoint

__all__ = ["STOPPED", "MeasureRequest", "Measurement", "assemble", "gpu_type_of", "measure_model", "row_name"]

ShareEnvironment = Callable[[float], Mapping[str, str]]

_WORKER = ["-m", "tenuto.profiles.measuring.worker"]

STOPPED = "stopped before every point was measured; run it again with --resume"


@dataclass(frozen=True)
class MeasureRequest:
    """What to measure of one model. `budget_s` is for the repetitions of all points together, building excluded.

    `known` are points measured before, as (batch size, share in percent, latency in ms): they are not measured again.
    With `tolerance_pct` above 0, batch sizes that the measured ones predict that well are left out (see
    `tenuto.profiles.measuring.sampling`). After `time_limit_s`, building included, no further point is begun.
    """

    source: str
    device: str = "auto"
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    shares: tuple[float, ...] = (100.0,)
    budget_s: float = 20.0
    weights_path: str | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    known: tuple[tuple[int, float, float], ...] = ()
    tolerance_pct: float = 0.0
    time_limit_s: float | None = None

    def left(self) -> int:
        """Return how many points are still to be measured."""
        have = {(batch, share) for batch, share, _ in self.known}
        return sum((batch, share) not in have for batch in self.batch_sizes for share in self.shares)

    def check(self) -> None:
        """Raise `InvalidInputError` with every value that is out of range."""
        problems = []
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            sizes = list(self.batch_sizes)
            problems.append(Problem("--batch-sizes", sizes, "batch sizes are at least 1", "Write for example 1,2,4."))
        if not self.shares or min(self.shares) <= 0 or max(self.shares) > 100:
            shares = list(self.shares)
            problems.append(Problem("--shares", shares, "shares are above 0, up to 100 (percent)", "Write 25,50,100."))
        if not self.budget_s > 0:
            problems.append(Problem("--budget-s", self.budget_s, "must be above 0", "Give seconds per model."))
        if not 0 <= self.tolerance_pct < 100:
            rule = "must be at least 0 and below 100 (percent)"
            problems.append(Problem("--adaptive", self.tolerance_pct, rule, "Write for example 3."))
        if not is_factory(self.source) and not os.path.isdir(self.source):
            try:
                lookup(self.source)
            except InvalidInputError as error:
                problems += error.problems
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            problems.append(Problem("--time-limit-s", self.time_limit_s, "must be above 0", "Give seconds."))
        if problems:
            raise InvalidInputError(problems)


@dataclass(frozen=True)
class Measurement:
    """One measured model with the machine it was measured on."""

    name: str
    profile: ModelProfile
    gpu_type: str
    hardware: str
    memory_mib: float
    versions: Mapping[str, str]


def row_name(source: str) -> str:
    """Return the profile row of a model: the catalogue's name, a factory's function, a directory's own name."""
    if is_factory(source):
        return source.rpartition(":")[2].rpartition(".")[2]
    if os.path.isdir(source):
        return os.path.basename(os.path.abspath(source))
    return lookup(source).name


def gpu_type_of(device_name: str) -> str:
    """Return Tenuto's name of a GPU by the driver's: `a100` of `NVIDIA A100-SXM4-40GB`, `a100-3g.20gb` of its MIG
    device `… MIG 3g.20gb`; others in small letters."""
    device_name, _, mig = device_name.partition(" MIG ")
    if mig:
        return f"{gpu_type_of(device_name)}-{mig.strip().lower()}"
    words = re.sub(r"nvidia|geforce|tesla|rtx|gtx|-", " ", device_name.lower())
    parts = words.split()
    joined = "".join(parts)
    for known in sorted(GPU_TYPES, key=len, reverse=True):
        if known != "cpu" and (known in parts or joined == known):
            return known
    return joined or "gpu"


def measure_model(
    request: MeasureRequest, *, on_point: Callable[[ProfilePoint], None] = lambda _point: None,
    share_environment: ShareEnvironment | None = None, before: ModelProfile | None = None,
    on_machine: Callable[[Mapping[str, Any]], None] = lambda _machine: None,
    clock_s: Callable[[], float] = time.monotonic,
) -> Measurement:
    """Measure one model in fresh processes; blocks.

    Args:
        request: what to measure.
        on_point: called after each point.
        share_environment: the environment that gives a process a share of a CUDA device (CUDA MPS); without it only
            the whole device can be measured there. On a CPU a share is a number of threads and needs none.
        before: what a stopped run measured of this model on this device: its points are kept, the rest is measured.
        on_machine: called with the device before anything is measured on it; may raise to refuse it.
        clock_s: monotonic clock for the request's time limit.

    Raises:
        InvalidInputError: unknown model, wrong options or ranges.
        EnvironmentFaultError: the device is not there, or not even one batch fits into its memory.
    """
    request.check()
    points: list[ProfilePoint] = list(before.points) if before else []
    doubts: list[str] = [doubt for doubt in before.doubts if doubt != STOPPED] if before else []
    known = tuple((p.batch_size, p.share_pct, p.latency_ms) for p in points)
    request = replace(request, known=known)
    machine: dict[str, Any] = {}
    weights_mib = before.weights_mib if before else None
    for event in _all_events(request, share_environment, clock_s):
        if event["event"] == "machine":
            machine = event
            on_machine(event)
        elif event["event"] == "built":
            weights_mib = event["weights_mib"]
        elif event["event"] == "point":
            point = ProfilePoint.model_validate(event["point"])
            points.append(point)
            on_point(point)
        elif event["event"] == "doubt" and event["text"] not in doubts:
            doubts.append(event["text"])
        elif event["event"] == "stopped" and STOPPED not in doubts:
            doubts.append(STOPPED)
    if not points:
        raise EnvironmentFaultError(
            f"'{request.source}' could not be measured at any batch size: {'; '.join(doubts) or 'no reason given'}. "
            "Free memory, or measure smaller batches."
        )
    points.sort(key=lambda point: (-point.share_pct, point.batch_size))
    whole = [(p.batch_size, p.latency_ms) for p in points if p.share_pct == 100.0]
    line = fit_line(whole)
    fit = None
    if line is not None:
        alpha, beta, r_squared, error = line
        fit = Fit(
            alpha_ms=round(alpha, 5), beta_ms=round(beta, 5), max_error_pct=round(error, 2),
            r_squared=None if r_squared is None else round(r_squared, 5),
        )
    profile = ModelProfile(
        points=tuple(points), fit=fit, doubts=tuple(doubts), network=request.source, options=dict(request.options),
        weights_mib=None if weights_mib is None else round(weights_mib, 2),
    )
    return Measurement(
        row_name(request.source), profile, machine["gpu_type"], machine["hardware"], machine["memory_mib"],
        machine["versions"],
    )


def _all_events(
    request: MeasureRequest, share_environment: ShareEnvironment | None, clock_s: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """Run one process after the other until none is left or the time is up.

    A process stops by itself between two points: killing one with work on a GPU may harm other CUDA MPS clients.
    """
    began = clock_s()
    for part, environment in _parts(request, share_environment):
        if request.time_limit_s is not None:
            left_s = request.time_limit_s - (clock_s() - began)
            if left_s <= 0:
                yield {"event": "stopped"}
                return
            part = replace(part, time_limit_s=left_s)
        for event in _events(part, environment):
            if event["event"] == "machine" and event["device"] == "cuda" and environment:
                _check_share(part.shares[0], event)
            yield event


def _check_share(share_pct: float, machine: Mapping[str, Any]) -> None:
    """Refuse a process that sees more SMs than its share: it is not attached to CUDA MPS, which is no error in CUDA."""
    kind, seen = GPU_TYPES.get(str(machine["gpu_type"])), machine.get("sm_count")
    if kind is None or kind.sm_count is None or seen is None:
        return
    if seen > max(2, kind.sm_count * share_pct / 100.0):
        raise EnvironmentFaultError(
            f"a process with a share of {share_pct:g} % sees {seen} of {kind.sm_count} SMs: the share is not enforced. "
            "Check that the CUDA MPS daemon runs and that CUDA_MPS_PIPE_DIRECTORY is its own (see `tenuto doctor`)."
        )


def _parts(
    request: MeasureRequest, share_environment: ShareEnvironment | None
) -> Iterator[tuple[MeasureRequest, Mapping[str, str]]]:
    """Cut a request into processes: one for all shares of a CPU, one per share of a GPU."""
    if request.device == "cpu" or all(share == 100.0 for share in request.shares):
        yield request, {}
        return
    if _device_of(request) == "cpu":
        yield replace(request, device="cpu"), {}
        return
    if share_environment is None:
        raise EnvironmentFaultError(
            "a share of a CUDA device needs CUDA MPS, which is not running here. Start it (see `tenuto doctor`), or "
            "measure the whole device with --shares 100."
        )
    have = {(batch, share) for batch, share, _ in request.known}
    for share in sorted(request.shares, reverse=True):
        if all((batch, share) in have for batch in request.batch_sizes):
            continue
        budget_s = request.budget_s / len(request.shares)
        yield replace(request, device="cuda", shares=(share,), budget_s=budget_s), share_environment(share)


def _device_of(request: MeasureRequest) -> str:
    """Ask a process what `auto` means: initialising CUDA here would pin a context in the parent."""
    if request.device != "auto":
        return request.device
    return next(str(e["device"]) for e in _events(replace(request, batch_sizes=()), {}) if e["event"] == "machine")


def _events(request: MeasureRequest, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Run one worker process and yield what it reports, line by line."""
    variables = {**os.environ, **environment}
    calm_openmp(variables)
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, *_WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=stderr, text=True, env=variables,
        )
        try:
            yield from _read(process, request)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        if code == -9:
            text = "the process was killed, as the kernel does when memory runs out; larger batches are missing"
            yield {"event": "doubt", "text": text}
        elif code != 0:
            raise EnvironmentFaultError(
                f"measuring '{request.source}' ended with code {code}: {_last_line(stderr)}. "
                "Set TENUTO_DEBUG=1 for all it printed."
            )


def _read(process: subprocess.Popen[str], request: MeasureRequest) -> Iterator[dict[str, Any]]:
    if process.stdin is None or process.stdout is None:
        raise EnvironmentFaultError("the profiler's process has no pipes. Start it again.")
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(asdict(request)))
        process.stdin.close()
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "error":
            raise _KINDS[event["kind"]](event["text"])
        yield event


_KINDS: dict[str, type[Exception]] = {
    "InvalidInputError": InvalidInputError,
    "MissingProfileError": MissingProfileError,
    "EnvironmentFaultError": EnvironmentFaultError,
}


def _last_line(stderr: IO[str]) -> str:
    stderr.seek(0)
    text = stderr.read()
    if os.environ.get("TENUTO_DEBUG"):
        sys.stderr.write(text)
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"


def assemble(measurements: Sequence[Measurement], *, name: str, command: str | None = None) -> Profile:
    """Return the profile file of models measured on one device.

    Raises:
        InvalidInputError: two models of the same row, or of different devices.
    """
    if not measurements:
        raise InvalidInputError("nothing was measured. Give at least one model.")
    first = measurements[0]
    models: dict[str, ModelProfile] = {}
    for one in measurements:
        if one.gpu_type != first.gpu_type or one.name in models:
            raise InvalidInputError(
                Problem("models", one.name, "measured twice, or on another device than the others",
                        "Write one profile file per device, each model once.")
            )
        models[one.name] = one.profile
    versions = {key: value for one in measurements for key, value in one.versions.items()}
    return Profile(
        name=name, gpu_type=first.gpu_type,
        source="measured by `tenuto profile`; latency is from numpy to numpy, copies included",
        measured=Measured(hardware=first.hardware, date=datetime.now(UTC).date().isoformat(), versions=versions,
                          command=command),
        memory_mib=round(first.memory_mib, 1), models=models,
    )  # fmt: skip
