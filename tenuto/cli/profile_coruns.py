"""The co-runs that `tenuto profile --co-runs` measures, and those that a resumed file holds already."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterable

from rich.markup import escape

from tenuto.cli.common import progress_console
from tenuto.cli.profile_book import ProfileBook
from tenuto.errors import TenutoError
from tenuto.profiles.measuring.corun import (
    CoRunRequest,
    igniter_co_runs,
    measure_co_run,
    pair_co_runs,
    resident_co_runs,
)
from tenuto.profiles.measuring.measure import MeasureRequest, ShareEnvironment, row_name
from tenuto.profiles.measuring.telemetry import NvmlTelemetry, Telemetry

__all__ = ["KINDS", "measure_co_runs", "planned_co_runs"]

KINDS = ("igniter", "pairs", "residents")

Key = frozenset[tuple[Hashable, int]]


def planned_co_runs(requests: list[MeasureRequest], kinds: Iterable[str]) -> list[list[CoRunRequest]]:
    """Return the co-runs of the kinds asked for.

    iGniter's are at the middle batch size on half of the device; pairs at the smallest and the largest batch size on
    every split that --shares holds both parts of; residents are copies of the first model on a fifth each.
    """
    made: list[list[CoRunRequest]] = []
    models = [
        CoRunRequest(r.source, _middle(r.batch_sizes), 50.0, r.device, r.weights_path, r.seed, dict(r.options))
        for r in requests
    ]
    for kind in kinds:
        if kind == "igniter":
            for one in models:
                made += igniter_co_runs(one)
        elif kind == "pairs":
            sizes = requests[0].batch_sizes
            made += pair_co_runs(models, (min(sizes), max(sizes)), requests[0].shares)
        else:
            made += resident_co_runs(models[0])
    return made


def _middle(batch_sizes: tuple[int, ...]) -> int:
    ordered = sorted(batch_sizes)
    return ordered[len(ordered) // 2]


def measure_co_runs(
    requests: list[MeasureRequest], book: ProfileBook, kinds: Iterable[str], seconds: float, until: float | None,
    environment: ShareEnvironment | None,
) -> BaseException | None:
    """Measure the co-runs that the file does not hold yet, each written at once; return what ended it early, if so."""
    profile = book.profile
    have = Counter() if profile is None else Counter(
        _key((p.model, p.batch_size, p.share_pct) for p in run.parts) for run in profile.co_runs
    )  # fmt: skip
    console = progress_console()
    plan = planned_co_runs(requests, kinds)
    try:
        telemetry = None if profile is None or profile.gpu_type == "cpu" else _telemetry()
        for number, parts in enumerate(plan, start=1):
            key = _key((row_name(p.source), p.batch_size, p.share_pct) for p in parts)
            if have[key] > 0:
                continue
            have[key] += 1
            if until is not None and time.monotonic() + seconds > until:
                console.print("time limit reached before the co-runs ended; continue with --resume")
                return None
            made = measure_co_run(parts, seconds=seconds, share_environment=environment, telemetry=telemetry)
            book.co_run(made)
            text = " + ".join(f"{p.model} b{p.batch_size} {p.share_pct:g} %: {p.latency_ms:.1f} ms" for p in made.parts)
            console.print(escape(f"co-run {number} of {len(plan)}: {text}"))
    except (KeyboardInterrupt, TenutoError) as fault:
        return fault
    return None


def _key(parts: Iterable[Hashable]) -> Key:
    return frozenset(Counter(parts).items())


def _telemetry() -> Telemetry | None:
    """Return NVML of the first GPU this process may use; its absence only leaves power and clocks out."""
    from tenuto.profiles.measuring.telemetry import first_visible_uuid

    try:
        return NvmlTelemetry(first_visible_uuid())
    except TenutoError as error:
        progress_console().print(f"no power and clocks: {escape(str(error))}")
        return None
