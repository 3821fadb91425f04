"""The co-runs on which the interference models of iGniter and gpulet are fitted; measures those that a file lacks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

from tenuto.errors import TenutoError, refused
from tenuto.profiles.measuring.measure import MeasureRequest, Shares, row_name
from tenuto.profiles.measuring.profile_writer import ProfileWriter
from tenuto.profiles.measuring.telemetry import Telemetry
from tenuto_lab.interference.co_run import CoRunRequest, measure_co_run

KINDS = ("igniter", "pairs", "residents")

_Key = frozenset[tuple[Hashable, int]]


def igniter_co_runs(one: CoRunRequest) -> list[list[CoRunRequest]]:
    """Return the two of iGniter's eleven configurations that are not on a grid: alone, and beside a copy.

    The other nine are the grid of three batch sizes and three shares (iGniter, section 4.1). `one` says the batch size
    and the share, which both copies get: at most half of the device.
    """
    if one.share_pct > 50:
        raise refused("share_pct", one.share_pct, "two copies need half of the device each", "Give at most 50.")
    return [[one], [one, one]]


def pair_co_runs(
    models: Sequence[CoRunRequest], batch_sizes: Sequence[int], shares: Sequence[float]
) -> list[list[CoRunRequest]]:
    """Return every pair of models at equal batch sizes, on every split of the device of which `shares` has both parts.

    To fit gpulet's coefficients, latencies of each model alone have to be measured at the same batch sizes and shares.
    """
    splits = sorted({share for share in shares if share < 100 and (100.0 - share) in set(shares)})
    made = []
    for first, second in combinations_with_replacement(models, 2):
        for size in sorted(set(batch_sizes)):
            for share in splits:
                if first is second and share > 50:
                    continue  # the mirror image of one that is there
                other = replace(second, batch_size=size, share_pct=100.0 - share)
                made.append([replace(first, batch_size=size, share_pct=share), other])
    return made


def resident_co_runs(one: CoRunRequest) -> list[list[CoRunRequest]]:
    """Return 1, 2, … equal residents on a fifth of the device each: iGniter's series for power, clock and delay."""
    return [[replace(one, share_pct=20.0)] * count for count in range(1, 6)]


def planned_co_runs(requests: Sequence[MeasureRequest], kinds: Iterable[str]) -> list[list[CoRunRequest]]:
    """Return the co-runs of the kinds asked for.

    iGniter's are at the middle batch size on half of the device. Pairs are at the smallest and the largest batch size,
    on every split of which the shares have both parts. Residents are copies of the first model on a fifth each.
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
    requests: Sequence[MeasureRequest],
    writer: ProfileWriter,
    kinds: Iterable[str],
    *,
    seconds: float,
    until: float | None,
    shares: Shares | None,
    telemetry: Telemetry | None,
    say: Callable[[str], None],
) -> BaseException | None:
    """Measure the co-runs that the file lacks, and write each at once; return what ended this early, if anything did.

    Args:
        requests: the models, with the batch sizes and shares of their grid.
        writer: the file.
        kinds: of `KINDS`.
        seconds: of each co-run.
        until: time on the monotonic clock after which none begins.
        shares: see `measure_co_run`.
        telemetry: see `measure_co_run`.
        say: takes a line for each co-run.
    """
    have = (
        Counter()
        if writer.profile is None
        else Counter(_key((p.model, p.batch_size, p.share_pct) for p in run.parts) for run in writer.profile.co_runs)
    )
    plan = planned_co_runs(requests, kinds)
    try:
        for number, parts in enumerate(plan, start=1):
            key = _key((row_name(p.source), p.batch_size, p.share_pct) for p in parts)
            if have[key] > 0:
                continue
            have[key] += 1
            if until is not None and time.monotonic() + seconds > until:
                say("time limit reached before the co-runs ended; run it again to continue")
                return None
            made = measure_co_run(parts, seconds=seconds, shares=shares, telemetry=telemetry)
            if writer.profile is not None:
                writer.replace(writer.profile.model_copy(update={"co_runs": (*writer.profile.co_runs, made)}))
            text = " + ".join(f"{p.model} b{p.batch_size} {p.share_pct:g} %: {p.latency_ms:.1f} ms" for p in made.parts)
            say(f"co-run {number} of {len(plan)}: {text}")
    except (KeyboardInterrupt, TenutoError) as fault:
        return fault
    return None


def _key(parts: Iterable[Hashable]) -> _Key:
    return frozenset(Counter(parts).items())
