"""The profiler: measure what models cost on this machine and record it with hardware, versions and date.

Each model (on CUDA: each share of each model) is measured in a fresh process of its own,
`tenuto.profiles.measuring.profile_worker`, so that memory growth is its own, a share can be set before CUDA starts, and
running out of memory ends nothing else.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from tenuto.errors import EnvironmentFaultError, InvalidInputError, Problem, raise_if_any
from tenuto.profiles.gpu_types import sms_of_share
from tenuto.profiles.measuring.events import Built, ContextSize, Doubt, Event, Machine, PointMeasured, StoppedEarly
from tenuto.profiles.measuring.size_grid import Axis, count_sizes, named_sizes
from tenuto.profiles.measuring.timing import fit_points
from tenuto.profiles.measuring.worker_process import LostWorkerError, WorkerProcess
from tenuto.profiles.networks.catalogue import is_exported, is_factory, lookup
from tenuto.profiles.profile import Measured, ModelProfile, Profile, ProfilePoint

WORKER = ["-m", "tenuto.profiles.measuring.profile_worker"]

NO_SHARES = (
    "a share of a CUDA device needs CUDA MPS, which is not running here. Start it (see `tenuto doctor`), or measure "
    "the whole device with --shares 100."
)
STOPPED = "stopped before every point was measured; run it again with --resume"


@dataclass(frozen=True)
class MeasureRequest:
    """What to measure of one model. `budget_s` is the time for the repetitions of all points together, without
    building.

    `known` are points measured before. They are not measured again. After `time_limit_s`, with the time to build, no
    further point is begun. `sizes`: those of requests to measure, by name, of a network whose inputs vary in shape, or
    the range in which as many are chosen as the cost needs (`tenuto.profiles.measuring.size_grid`); of what is not
    there it is the range that the network takes.
    """

    source: str
    device: str = "auto"
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)  # default
    shares: tuple[float, ...] = (100.0,)
    budget_s: float = 20.0  # default
    weights_path: str | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    known: tuple[ProfilePoint, ...] = ()
    time_limit_s: float | None = None
    name: str = ""  # name of the profile row, if it is not that of the source
    sizes: Mapping[str, Axis] = field(default_factory=dict)

    def left(self) -> int:
        """Return how many points have not been measured yet; with ranges it is at least 1, and about so many."""
        fixed = {name: axis for name, axis in self.sizes.items() if isinstance(axis, tuple)}
        if len(fixed) < len(self.sizes):
            cells = len(self.batch_sizes) * len(self.shares) * count_sizes([*self.sizes.values()])
            return max(1, cells - len(self.known))
        known = {(p.batch_size, p.share_pct, *(p.sizes.get(name) for name in fixed)) for p in self.known}
        return sum(cell not in known for cell in itertools.product(self.batch_sizes, self.shares, *fixed.values()))

    @property
    def row(self) -> str:
        """The profile row: its own name, else that of the source."""
        return self.name or row_name(self.source)

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
        if not is_factory(self.source) and not is_exported(self.source) and not os.path.isdir(self.source):
            try:
                lookup(self.source)
            except InvalidInputError as error:
                problems += error.problems
        for size, axis in self.sizes.items():
            values = named_sizes(axis)
            if not values or min(values) < 1:
                problems.append(
                    Problem("--sizes", f"{size}={values}", "sizes are at least 1", "Write tokens=16,64,256.")
                )
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            problems.append(Problem("--time-limit-s", self.time_limit_s, "must be above 0", "Give seconds."))
        raise_if_any(problems)


REQUESTS: TypeAdapter[MeasureRequest] = TypeAdapter(MeasureRequest)


@dataclass(frozen=True)
class Measurement:
    """One measured model, by the name of its profile row, with the machine it was measured on.

    `context_mib` is the memory that its process held on the GPU outside PyTorch's allocator; None on a CPU or without
    NVML.
    """

    name: str
    profile: ModelProfile
    machine: Machine
    context_mib: float | None = None


class Shares(Protocol):
    """Gives processes shares of a GPU."""

    @property
    def sm_count(self) -> int:
        """Multiprocessors of the whole GPU."""

    def environment(self, share_pct: float) -> Mapping[str, str]:
        """Return the variables that a process needs in its environment when it starts."""


def row_name(source: str) -> str:
    """Return the profile row of a model: the catalogue's name, a factory's function, a directory's or file's own
    name."""
    if is_factory(source):
        return source.rpartition(":")[2].rpartition(".")[2]
    if is_exported(source):
        return Path(source).stem
    if os.path.isdir(source):
        return os.path.basename(os.path.abspath(source))
    return lookup(source).name


def measure_model(
    request: MeasureRequest,
    *,
    on_point: Callable[[ProfilePoint], None] = lambda _point: None,
    shares: Shares | None = None,
    before: ModelProfile | None = None,
    on_machine: Callable[[Machine], None] = lambda _machine: None,
) -> Measurement:
    """Measure one model in fresh processes; blocks.

    Args:
        request: what to measure.
        on_point: called after each point.
        shares: gives a process a share of a CUDA device (CUDA MPS). Without it only the whole device can be measured
            there. On a CPU a share is a number of threads and needs nothing.
        before: the row of a stopped run of this model on this device; its points are kept, the rest is measured.
        on_machine: called with the device before anything is measured on it; may raise to refuse it.

    Raises:
        InvalidInputError: unknown model, wrong options or ranges.
        EnvironmentFaultError: torch or the device is not there, or not even one batch fits into its memory.
    """
    request.check()
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFaultError("measuring needs the package 'torch'. Run: pip install 'tenuto[serve]'")
    points: list[ProfilePoint] = list(before.points) if before else []
    doubts: list[str] = [doubt for doubt in before.doubts if doubt != STOPPED] if before else []
    machine: Machine | None = None
    weights_mib = before.weights_mib if before else None
    context_mib: float | None = None
    run, pads, multiples = (before.run, before.pads, before.multiples) if before else (None, True, {})
    for event in _all_events(replace(request, known=tuple(points)), shares):
        match event:
            case Machine():
                machine = event
                on_machine(event)
            case Built():
                weights_mib, run, pads = event.weights_mib, dict(event.run), event.pads
                multiples = dict(event.multiples)
            case ContextSize():
                context_mib = max(event.mib, context_mib or 0.0)
            case PointMeasured():
                points.append(event.point)
                on_point(event.point)
            case Doubt() if event.text not in doubts:
                doubts.append(event.text)
            case StoppedEarly() if STOPPED not in doubts:
                doubts.append(STOPPED)
    if not points and doubts == [STOPPED]:
        raise EnvironmentFaultError(
            f"'{request.source}': no batch was measured before the time was up. Give more with --time-limit-s."
        )
    if not points or machine is None:
        raise EnvironmentFaultError(
            f"'{request.source}' could not be measured at any batch size: {'; '.join(doubts) or 'no reason given'}. "
            "Free memory, or measure smaller batches."
        )
    points.sort(key=lambda point: (-point.share_pct, tuple(point.sizes.values()), point.batch_size))
    profile = ModelProfile(
        points=tuple(points),
        fit=fit_points(points),
        doubts=tuple(doubts),
        network=request.source,
        options=dict(request.options),
        run=run or None,
        pads=pads,
        multiples=multiples,
        weights_mib=None if weights_mib is None else round(weights_mib, 2),
    )
    profile = profile.model_copy(update={"size_fit": profile.fit_sizes()})
    return Measurement(request.row, profile, machine, context_mib)


def _all_events(request: MeasureRequest, shares: Shares | None) -> Iterator[Event]:
    """Run one process after another until none is left or the time is up.

    A process stops by itself between two points. To kill a process at work on a GPU may harm other CUDA MPS clients.
    Each knows the points of those before it.
    """
    began, known = time.monotonic(), request.known
    for part in _parts(request, shares):
        if request.time_limit_s is not None:
            left_s = request.time_limit_s - (time.monotonic() - began)
            if left_s <= 0:
                yield StoppedEarly()
                return
            part = replace(part, time_limit_s=left_s)
        for event in _events(replace(part, known=known), shares):
            known = (*known, event.point) if isinstance(event, PointMeasured) else known
            if isinstance(event, Machine) and event.device == "cuda" and shares is not None:
                check_share(part.shares[0], event.sm_count, shares)
            yield event


def check_share(share_pct: float, sm_count: int | None, shares: Shares) -> None:
    """Refuse a process that sees more SMs than its share. Such a process is not attached to CUDA MPS, and CUDA itself
    reports no error then.

    Raises:
        EnvironmentFaultError: the share is not enforced.
    """
    if sm_count is None or sm_count <= sms_of_share(shares.sm_count, share_pct):
        return
    raise EnvironmentFaultError(
        f"a process with a share of {share_pct:g} % sees {sm_count} of {shares.sm_count} SMs: the share is not "
        "enforced. Check that the CUDA MPS daemon runs and that CUDA_MPS_PIPE_DIRECTORY is its own (see `tenuto "
        "doctor`)."
    )


def _parts(request: MeasureRequest, shares: Shares | None) -> Iterator[MeasureRequest]:
    """Cut a request into processes: one for all shares of a CPU, one per share of a GPU."""
    if request.device == "cpu" or all(share == 100.0 for share in request.shares):
        yield request
        return
    if _device_of(request) == "cpu":
        yield replace(request, device="cpu")
        return
    if shares is None:
        raise EnvironmentFaultError(NO_SHARES)
    for share in sorted(request.shares, reverse=True):
        if not replace(request, shares=(share,)).left():
            continue
        budget_s = request.budget_s / len(request.shares)
        yield replace(request, device="cuda", shares=(share,), budget_s=budget_s)


def _device_of(request: MeasureRequest) -> str:
    """Ask another process what `auto` means. (To initialise CUDA here would keep a context in this process.)"""
    if request.device != "auto":
        return request.device
    return next(e.device for e in _events(replace(request, batch_sizes=()), None) if isinstance(e, Machine))


def _events(request: MeasureRequest, shares: Shares | None) -> Iterator[Event]:
    """Run one worker process and yield what it reports."""
    environment = {} if shares is None or request.device == "cpu" else shares.environment(request.shares[0])
    worker = WorkerProcess(WORKER, environment, request.source)
    try:
        worker.tell(REQUESTS.dump_json(request).decode())
        while (event := worker.next_event()) is not None:
            yield event
    except LostWorkerError as lost:
        if lost.code != -9:
            raise
        yield Doubt("the process was killed, as the kernel does when memory runs out; larger batches are missing")
    finally:
        worker.end()


def assemble(measurements: Sequence[Measurement], *, name: str, command: str) -> Profile:
    """Return the profile file of one or more models, each measured once on one device."""
    machine = measurements[0].machine
    versions = {key: value for one in measurements for key, value in one.machine.versions.items()}
    return Profile(
        name=name,
        gpu_type=machine.gpu_type,
        source="measured by `tenuto profile`; latency is from numpy to numpy, copies included",
        measured=Measured(
            hardware=machine.hardware, date=datetime.now(UTC).date().isoformat(), versions=versions, command=command
        ),
        memory_mib=round(machine.memory_mib, 1),
        models={one.name: one.profile for one in measurements},
        coefficients=largest_context([one.context_mib for one in measurements]),
    )


def largest_context(sizes_mib: Iterable[float | None]) -> dict[str, float]:
    """Return the hardware coefficient `context_mib`: the largest of all processes; nothing if none is known."""
    known = [size for size in sizes_mib if size is not None]
    return {"context_mib": max(known)} if known else {}
