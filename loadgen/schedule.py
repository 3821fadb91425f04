"""The schedule: every arrival of a run, computed before anything is sent. Two runs with the same hash saw the same
requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tenuto.batching.virtual.application_load import ApplicationLoad, make_application_load
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.errors import InvalidInputError, Problem, refused
from tenuto.placement import ModelSpec
from tenuto.placement.application import Application
from tenuto.placement.arrivals.arrival_processes import arrival_times, arrival_tokens, process_of, read_trace
from tenuto.placement.workload import client_targets, draw_sizes

MOST_REQUESTS = 100_000_000  # limit: 1.2 GB of schedule; a mistyped duration gives an error instead of using all memory


@dataclass(frozen=True)
class Schedule:
    """Arrivals of what clients send, in order of time. `model_index[i]` indexes `names`; `times_ms[i]` counts from the
    start of the run.

    The last names may be those of `applications`, of which one arrival is one request.
    """

    times_ms: NDArray[np.float64]
    model_index: NDArray[np.int32]
    names: tuple[str, ...]
    duration_s: float
    notes: tuple[str, ...] = ()  # notes about the times for the reader of the figures; not part of the hash
    applications: tuple[Application, ...] = ()
    tokens: RequestTokens | None = None  # of each request, when a model generates
    sizes: NDArray[np.int64] | None = None  # a row for each request, when those of a model vary in size
    size_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by model, in the order of the columns

    def __len__(self) -> int:
        """Return the number of requests."""
        return int(self.times_ms.size)

    @property
    def hash(self) -> str:
        """SHA-256 over names, duration, times, models, sizes, and the stages of applications."""
        digest = hashlib.sha256()
        digest.update("\0".join(self.names).encode() + np.float64(self.duration_s).tobytes())
        digest.update(np.ascontiguousarray(self.times_ms).tobytes())
        digest.update(np.ascontiguousarray(self.model_index).tobytes())
        if self.applications:
            graphs = [
                (a.name, [(s.label, s.model, s.count if s.map else int(s.count), s.after) for s in a.stages])
                for a in self.applications
            ]
            digest.update(json.dumps(graphs).encode())
        if self.tokens is not None:
            digest.update(self.tokens.prompt.tobytes() + self.tokens.output.tobytes())
        if self.sizes is not None:
            digest.update(self.sizes.tobytes())
        return digest.hexdigest()

    def part(self, rows: NDArray[np.int64]) -> Schedule:
        """Return a schedule with these requests only."""
        return replace(
            self,
            times_ms=self.times_ms[rows],
            model_index=self.model_index[rows],
            tokens=None if self.tokens is None else self.tokens.of(rows),
            sizes=None if self.sizes is None else self.sizes[rows],
        )

    def save(self, path: str | Path) -> None:
        """Write as a compressed numpy file."""
        np.savez_compressed(
            path,
            times_ms=self.times_ms,
            model_index=self.model_index,
            names=np.array(self.names),
            duration_s=self.duration_s,
            notes=np.array(self.notes, dtype=np.str_),
            tokens=np.array([]) if self.tokens is None else np.array([self.tokens.prompt, self.tokens.output]),
            sizes=np.array([]) if self.sizes is None else self.sizes,
            applications=np.array([a.model_dump_json(exclude_none=True) for a in self.applications], dtype=np.str_),
        )


def seed_for(seed: int, *purpose: str) -> np.random.Generator:
    """Return a random generator for one purpose of a run. 0 is a valid seed. Purposes never share a stream."""
    words = [int.from_bytes(hashlib.sha256(part.encode()).digest()[:8], "little") for part in purpose]
    return np.random.default_rng(np.random.SeedSequence([seed, *words]))


def make_schedule(models: Sequence[ModelSpec], duration_s: float, seed: int, rate_scale: float = 1.0) -> Schedule:
    """Return the merged arrivals of all models.

    Each model draws from a stream of its own, which has the model's name. So another model does not change the arrivals
    of the others.

    Args:
        models: entries of the workload.
        duration_s: length of the run, above 0.
        seed: 0 or larger.
        rate_scale: factor on every rate, above 0.

    Raises:
        InvalidInputError: duration, scale or seed out of range, too many requests, or an unusable arrival process.
    """
    problems = [
        Problem(name, value, "must be a positive number", "Give a larger number.")
        for name, value in (("--duration-s", duration_s), ("--rate-scale", rate_scale))
        if not (np.isfinite(value) and value > 0)
    ]
    if seed < 0:
        problems.append(Problem("--seed", seed, "must be at least 0", "Give 0 or a larger number."))
    problems += [
        Problem(
            f"models.{spec.name}.arrival",
            spec.arrival.process,
            "is replayed as recorded, so a rate scale would do nothing",
            "Set options: {rescale: true}, or leave --rate-scale at 1.",
        )
        for spec in models
        if rate_scale != 1.0 and spec.arrival.path is not None and not spec.arrival.options.get("rescale")
    ]
    if problems:
        raise InvalidInputError(problems)
    expected = sum(spec.rate_rps for spec in models) * rate_scale * duration_s
    if expected > MOST_REQUESTS:
        raise refused(
            "--duration-s",
            duration_s,
            f"gives {expected:.3g} requests, more than {MOST_REQUESTS:.0e}",
            "Shorten the run or lower --rate-scale.",
        )
    times = [
        arrival_times(
            spec.name, spec.rate_rps * rate_scale, duration_s, spec.arrival, seed_for(seed, "arrivals", spec.name)
        )
        for spec in models
    ]
    index = (
        np.repeat(np.arange(len(models), dtype=np.int32), [part.size for part in times])
        if times
        else np.empty(0, np.int32)
    )
    merged = np.concatenate(times) * 1000.0 if times else np.empty(0)
    order = np.argsort(merged, kind="stable")
    tokens = None
    if any(spec.generates is not None for spec in models):
        drawn = [
            _lengths(spec, part, (spec.rate_rps * rate_scale, duration_s), seed)
            for spec, part in zip(models, times, strict=True)
        ]
        tokens = RequestTokens(*(np.concatenate([pair[kind] for pair in drawn])[order] for kind in (0, 1)))
    names = tuple(spec.name for spec in models)
    notes = (*_notes(models), *_cut(models, duration_s))
    return Schedule(merged[order], index[order], names, duration_s, notes, tokens=tokens)


def make_client_schedule(
    targets: Sequence[ModelSpec],
    applications: Sequence[Application],
    duration_s: float,
    seed: int,
    rate_scale: float = 1.0,
) -> Schedule:
    """Return when clients send what, and how large it is.

    Args:
        targets: what `client_targets` returns.
        applications: the last of them.
        duration_s: length of the run.
        seed: 0 or larger; each model and application draws from its own stream.
        rate_scale: factor on every rate.

    Raises:
        InvalidInputError: as in `make_schedule`. A problem of an application names it under `applications`.
    """
    try:
        schedule = replace(make_schedule(targets, duration_s, seed, rate_scale), applications=tuple(applications))
        names = {spec.name: tuple(spec.sizes) for spec in targets if spec.sizes}
        if not names:
            return schedule
        sizes = draw_sizes(
            targets, schedule.model_index, lambda at, name: seed_for(seed, "sizes", targets[at].name, name)
        )
        return replace(schedule, sizes=sizes, size_names=names)
    except InvalidInputError as error:
        problems = []
        for problem in error.problems:
            owner = next((a.name for a in applications if problem.path.startswith(f"models.{a.name}.")), None)
            path = problem.path if owner is None else f"applications{problem.path.removeprefix('models')}"
            problems.append(replace(problem, path=path))
        if not problems:
            raise
        raise InvalidInputError(problems) from error


def make_load(models: Sequence[ModelSpec], schedule: Schedule, seed: int) -> ApplicationLoad:
    """Return the requests to the models of a plan or workload that a schedule of clients makes."""
    return make_application_load(
        models,
        schedule.applications,
        client_targets(models, schedule.applications),
        schedule.times_ms,
        schedule.model_index,
        partial(seed_for, seed),
        sizes=schedule.sizes,
        tokens=schedule.tokens,
    )


def _cut(models: Sequence[ModelSpec], duration_s: float) -> tuple[str, ...]:
    """Return a line for each trace that goes on behind the run."""
    traces = {spec.arrival.path: spec for spec in models if spec.arrival.process == "trace"}
    cut = []
    for path, spec in traces.items():
        last_s = float(read_trace(str(path)).times_s[-1])
        if not spec.arrival.options.get("rescale") and last_s >= duration_s:
            cut.append(f"of {path} only the first {duration_s:g} of {last_s:g} s are sent: --duration-s says how much")
    return tuple(cut)


def _lengths(
    spec: ModelSpec, times_s: NDArray[np.float64], counts: tuple[float, float], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of prompts and outputs of a model's arrivals; 0 if it does not generate."""
    generates, count = spec.generates, len(times_s)
    if generates is None:
        return np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    again, of_lengths = (seed_for(seed, purpose, spec.name) for purpose in ("arrivals", "lengths"))
    recorded = arrival_tokens(spec.name, *counts, spec.arrival, again, of_lengths)
    drawn = []
    for key, lengths, column in zip(
        ("prompt_tokens", "output_tokens"), (generates.prompt_tokens, generates.output_tokens), recorded, strict=True
    ):
        if lengths is not None:
            drawn.append(lengths.draw(count, seed_for(seed, key, spec.name)))
        elif column is not None:
            drawn.append(column[:count])
        else:
            cure = f"Add the column to the trace, or give `{key}` in `generates`."
            source = spec.arrival.path or spec.arrival.process
            raise refused(f"models.{spec.name}.arrival", source, f"has no column '{key}'", cure)
    return drawn[0], drawn[1]


def _notes(models: Sequence[ModelSpec]) -> tuple[str, ...]:
    drawn = [spec.name for spec in models if process_of(spec.arrival.process).is_drawn(spec.arrival)]
    if not drawn:
        return ()
    return (
        f"arrival times of {', '.join(drawn)} are synthetic: "
        "the trace gives counts or rates, the times within were drawn",
    )
