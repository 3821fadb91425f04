"""One measured run against a live endpoint: schedule, clients, records, verdict."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import numpy as np

from tenuto.batching.virtual.offline_backlog import offline_figures
from tenuto.batching.virtual.virtual_steps import RequestTokens
from tenuto.deployments.operator.window import between
from tenuto.deployments.serve.endpoint import client_key, generating_model, get_told, model_metadata, why_unread
from tenuto.deployments.wire.status import SystemStatus
from tenuto.errors import EnvironmentFaultError, InvalidInputError, Problem, raise_if_any, refused
from tenuto.loadgen.clients.actors import RayClients
from tenuto.loadgen.clients.client import ClientJob, ModelTarget
from tenuto.loadgen.clients.group import ClientGroup, LocalClient
from tenuto.loadgen.clients.priority import preferred
from tenuto.loadgen.records import Records, merge, unsent
from tenuto.loadgen.schedule import Schedule, make_client_schedule, seed_for
from tenuto.loadgen.senders.http_sender import HttpSender
from tenuto.loadgen.senders.payloads import Prompts, SizedBodies, make_bodies, read_bodies, unbounded_inputs
from tenuto.loadgen.verdict import Verdict, judge, summarise
from tenuto.outcome import WARM_UP
from tenuto.placement import ModelSpec, Plan
from tenuto.placement.application import Application
from tenuto.placement.generates import Lengths
from tenuto.placement.versions import by_model
from tenuto.placement.workload import client_targets, own_demands

Progress = Callable[[str], None]
_SHOWN_ERRORS = 8  # format: kinds of errors that are printed
_TRIED_BODIES = 20  # limit: of a model, each sent once before the load; what is wrong is mostly wrong with all


@dataclass(frozen=True)
class BenchOptions:
    """Settings of a run; `clients` 0 sends from this process, without Ray."""

    url: str
    duration_s: float = 30.0  # default
    seed: int = 0
    rate_scale: float = 1.0
    slo_scale: float = 1.0
    warmup_s: float | None = None
    clients: int = 1
    grace_s: float = 5.0  # default
    tensors: Literal["binary", "json"] = "binary"
    bodies: Mapping[str, str] = field(default_factory=dict)  # by model: a file or folder of raw bodies for its hooks

    def check(self) -> None:
        """Raise `InvalidInputError` with every setting out of range. Settings of the schedule are checked when the
        schedule is made.
        """
        HttpSender(self.url)
        problems = []
        if not (math.isfinite(self.slo_scale) and self.slo_scale > 0):
            problems.append(Problem("--slo-scale", self.slo_scale, "must be a positive number", "Give for example 1."))
        if self.warmup_s is not None and not 0 <= self.warmup_s < self.duration_s:
            problems.append(
                Problem("--warmup-s", self.warmup_s, "must be at least 0 and below the duration", "Give for example 3.")
            )
        if self.clients < 0:
            problems.append(Problem("--clients", self.clients, "must be at least 0", "Give 0 (this process) or more."))
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            problems.append(Problem("--grace-s", self.grace_s, "must be at least 0", "Give for example 5."))
        raise_if_any(problems)

    @property
    def measured_from_ms(self) -> float:
        """End of the warm-up: 5 % of the duration unless given."""
        return 1000.0 * (WARM_UP * self.duration_s if self.warmup_s is None else self.warmup_s)


@dataclass
class BenchResult:
    """Everything measured. `summary` has the keys of `tenuto simulate --json` plus the latency split."""

    records: Records
    schedule: Schedule
    summary: dict[str, Any]
    verdict: Verdict
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    queued: dict[int, int] = field(default_factory=dict)  # by second: requests that waited for a batch at its end
    notes: tuple[str, ...] = ()  # notes for the reader of the figures
    is_interrupted: bool = False


def run_bench(
    models: Sequence[ModelSpec],
    options: BenchOptions,
    progress: Progress = lambda _text: None,
    *,
    clients: ClientGroup | None = None,
    applications: Sequence[Application] = (),
    cluster: str = "auto",
) -> BenchResult:
    """Send a schedule to an endpoint and judge the answers. Ctrl-C and SIGTERM end the run early; then the figures of
    the part that ran are returned, as INVALID.

    Args:
        models: the models to send requests to, with rate, SLO and arrival process, and those that are stages.
        options: settings of the run.
        progress: is called with one line per second.
        clients: the clients that send; by default `options.clients` says which.
        applications: applications whose stages are among the models.
        cluster: address of the Ray that serves, for the clients; see `join_ray`.

    Raises:
        EnvironmentFaultError: the endpoint does not answer or a model is not ready.
        InvalidInputError: no models, or an unusable arrival process, rate, duration or seed.
    """
    options.check()
    if not models:
        raise InvalidInputError(
            "the plan serves no model, so there is nothing to ask. Plan with more GPUs or another policy."
        )
    specs = client_targets(models, applications)
    applications = tuple(app.with_slo_scaled(options.slo_scale) for app in applications)
    arrivals = (options.duration_s, options.seed, options.rate_scale)
    schedule = make_client_schedule(specs, applications, *arrivals)
    groups = by_model(models)
    stages = {app.name: tuple(stage.label for stage in app.stages) for app in applications}
    texts = {app.name: _most_tokens(app, models) for app in applications if app.streams}
    shown = {s.name: _metadata(options, s, groups) for s in specs if s.slo is None or s.name in stages}
    sized = [_with_sizes(spec, shown.get(spec.name, {}), options.bodies) for spec in specs]
    if sized != [*specs]:
        schedule = make_client_schedule(sized, applications, *arrivals)
    made_up = {name: metadata for name, metadata in shown.items() if name not in options.bodies}
    schedule = _with_notes(schedule, specs, sized, made_up)
    sent = _in_multiples(schedule, sized, shown)
    tokens = sent.tokens
    targets = tuple(
        _generating(options, spec, tokens, has_versions=spec.model in groups)
        if spec.slo is not None and tokens is not None and spec.name not in stages
        else replace(
            _target(options, spec, shown[spec.name], _largest(sent, index, spec)),
            stages=stages.get(spec.name, ()),
            most_tokens=texts.get(spec.name, 0),
        )
        for index, spec in enumerate(sized)
    )
    longest = max([0 if tokens is None else int(tokens.output.max(initial=1)), *texts.values()])
    answers_s = max((target.slo.answer_ms(longest) / 1000.0 for target in targets if target.slo), default=0.0)
    group = clients if clients is not None else _make_clients(options, cluster)
    interrupted = False
    queued: dict[int, int] = {}
    began_at = time.monotonic()
    try:
        group.prepare(_jobs(sent, targets, options, schedule.hash[:8]))
        offline = [spec.name for spec in specs if spec.offline]
        before = status_at(options.url) if tokens is not None or applications or offline else None
        worked_at = time.monotonic()
        # The start is late enough for every client to have received the message.
        start_at = time.time() + (0.5 if options.clients else 0.05)  # derived: a message to an actor, and to a thread
        group.start(start_at)
        _end_as_by_ctrl_c()
        # A client on a thread of this process shares Python's lock with this thread. With a lower priority, this thread
        # might hold the lock while it waits for a processor.
        try:
            with preferred() if options.clients == 0 else nullcontext():
                _watch(group, start_at, len(schedule), options, progress, queued, answers_s)
        except KeyboardInterrupt:
            interrupted = True
            progress("interrupted: waiting for the requests under way")
            group.stop()
        reports, lost = group.results()
        passed_s = time.monotonic() - worked_at
        after = status_at(options.url) if before is not None else None
    finally:
        group.close()
    errors: Counter[str] = Counter()
    for report in reports:
        errors.update(report.errors)
    records = merge([report.records for report in reports])
    result = _result(records, sent, options, targets, errors, lost, offline, interrupted=interrupted)
    result.schedule = schedule
    if before is not None and after is not None:
        generating = {str(name) for name in records.gpulet[records.output_tokens > 0]}
        # Gpu-lets of whose work not every answer tells.
        untold = _worked(before).keys() if applications or offline else generating
        result.summary["gpulets"] |= _stepped(records, untold, _worked(before), _worked(after), passed_s)
    if offline:
        result.summary["offline"] = _offline(records, sent.names, offline, options, before, after, passed_s)
    result.wall_s = time.monotonic() - began_at
    result.queued, result.is_interrupted = queued, interrupted
    result.verdict.conditions["client_priority"] = " and ".join(sorted({report.priority for report in reports}))
    return result


def status_at(url: str) -> SystemStatus | None:
    """Return the status of an endpoint; None if it shows its status on another port only."""
    try:
        return get_told(f"{url.rstrip('/')}/status", SystemStatus)
    except EnvironmentFaultError:
        return None


def _worked(status: SystemStatus) -> dict[str, tuple[float, int]]:
    """Return how long each gpu-let has executed, in s, and its batches or steps."""
    return {gpulet.id: (gpulet.busy_s, gpulet.batches) for gpulet in status.gpulets}


def _offline(
    records: Records,
    names: Sequence[str],
    offline: Sequence[str],
    options: BenchOptions,
    before: SystemStatus | None,
    after: SystemStatus | None,
    passed_s: float,
) -> dict[str, Any]:
    """Return the figures of what offline models were asked, with the GPU time over the whole run as the endpoint counts
    it."""
    has_ended = records.answered_ms <= 1000.0 * options.duration_s
    is_counted = has_ended & (records.status == HTTPStatus.OK) & (records.answered_ms >= options.measured_from_ms)
    of = {name: records.model == names.index(name) for name in offline}
    counted = records.where(is_counted & np.logical_or.reduce([*of.values()]))
    part, others = None, None
    if before is not None and after is not None:
        figures = between(before, after, passed_s)
        if figures.offline is not None:
            part = figures.offline.part
            others = sum(each.utilisation for each in figures.gpulets.values()) / max(1, len(figures.gpulets)) - part
    return offline_figures(
        {name: int((rows & is_counted).sum()) for name, rows in of.items()},
        {name: int((rows & ~has_ended).sum()) for name, rows in of.items()},
        int(counted.prompt_tokens.sum() + counted.output_tokens.sum()),
        part,
        others,
    )


def _stepped(
    records: Records,
    gpulets: Collection[str],
    before: Mapping[str, tuple[float, int]],
    after: Mapping[str, tuple[float, int]],
    passed_s: float,
) -> dict[str, Any]:
    """Return the figures of gpu-lets over the whole run: streams do not say how long a step took, and applications not
    how large batches were."""
    stepped = {}
    for gpulet in sorted({*gpulets} & before.keys() & after.keys()):
        (busy_s, steps), (busy_then_s, steps_then) = after[gpulet], before[gpulet]
        tokens = int(records.output_tokens[records.gpulet == gpulet].sum())
        stepped[gpulet] = {
            "utilisation": min(1.0, max(0.0, busy_s - busy_then_s) / passed_s),
            "batches": steps - steps_then,
            "mean_batch": tokens / (steps - steps_then) if tokens and steps > steps_then else None,
        }
    return stepped


def _end_as_by_ctrl_c() -> None:
    """Let SIGTERM end a run as Ctrl-C does. If clients joined Ray, Ray's own handler would end the process."""
    if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def asked_of(plan: Plan) -> tuple[tuple[ModelSpec, ...], tuple[Application, ...], tuple[str, ...]]:
    """Return the models and applications of a plan that a bench can use, and one line per application left out.

    Models that the plan does not serve are not asked, nor applications with such a stage, nor shadows, which get
    copies. The models of the stages of the others are returned, too.
    """
    notes = []
    sent = []
    names = {spec.name for spec in own_demands(plan.models, plan.applications)}
    for application in plan.applications:
        stages = [application.model_name(stage) for stage in application.stages]
        missing = [name for name in stages if name in plan.unserved]
        if missing:
            notes.append(f"application {application.name} is not asked: the plan does not serve {', '.join(missing)}")
        else:
            sent.append(application)
            names.update(stages)
    served = (spec for spec in plan.models if spec.name in names and spec.name not in plan.unserved)
    return tuple(spec for spec in served if not spec.shadow), tuple(sent), tuple(notes)


def _result(
    records: Records,
    schedule: Schedule,
    options: BenchOptions,
    targets: Sequence[ModelTarget],
    errors: Counter[str],
    lost: Sequence[str],
    offline: Collection[str],
    *,
    interrupted: bool,
) -> BenchResult:
    begin_ms, end_ms = options.measured_from_ms, options.duration_s * 1000.0
    if interrupted:
        # Requests scheduled after the interruption were never meant to be sent.
        records = records.where(~np.isnan(records.sent_ms))
        end_ms = max(begin_ms + 1.0, float(records.scheduled_ms.max(initial=0.0)))
    elif lost:
        known = records.request
        rest = unsent(schedule.times_ms, schedule.model_index, except_requests=known, sizes=schedule.sizes)
        records = merge([records, rest])
    judged = [target for target in targets if target.name not in offline]
    names = [target.name for target in judged]
    generating = [target.name for target in judged if target.slo is not None and not target.stages]
    window = {"warmup_ms": begin_ms, "duration_ms": end_ms}
    online = records.without_models([place for place, target in enumerate(targets) if target.name in offline])
    summary = summarise(online, names, **window, applications=schedule.applications, generating=generating)
    slos_ms = [target.slo_ms if target.slo is None else target.slo.ttft_ms for target in judged]
    verdict = judge(records, summary, slos_ms, interrupted=interrupted, lost_clients=lost)
    shown = [f"{count} × {text}" for text, count in errors.most_common(_SHOWN_ERRORS)]
    return BenchResult(online, schedule, summary, verdict, errors=shown)


def _make_clients(options: BenchOptions, cluster: str) -> ClientGroup:
    """Return the clients that send. For actors this process joins the Ray that serves, or starts a small local one."""
    if options.clients == 0:
        return LocalClient()
    import ray

    from tenuto.deployments.process.ray_address import join_ray
    from tenuto.deployments.serve.launcher import start_local_ray

    if not ray.is_initialized():
        try:
            join_ray(cluster)
        except (ConnectionError, EnvironmentFaultError):
            start_local_ray(num_gpus=0)
    return RayClients(options.clients)


def _jobs(schedule: Schedule, targets: tuple[ModelTarget, ...], options: BenchOptions, run: str) -> list[ClientJob]:
    """Deal the requests to the clients in turn."""
    count = max(1, options.clients)
    in_flight = len(schedule) / options.duration_s / count * min(2.0, max(t.slo_ms for t in targets) / 1000.0)
    connections = min(400, int(in_flight) + 16)  # limit: connections of one client
    parts = [np.arange(place, len(schedule), count) for place in range(count)]
    return [
        ClientJob(
            options.url,
            targets,
            schedule.part(rows),
            rows,
            options.grace_s,
            connections,
            send_slo=options.slo_scale != 1.0,
            run=run,
            key=client_key(),
            measured_from_ms=options.measured_from_ms,
        )
        for rows in parts
    ]


def _metadata(options: BenchOptions, spec: ModelSpec, groups: Collection[str]) -> Mapping[str, Any]:
    """Return the server's metadata of a model, with its name in requests as `name`. `groups`: models with versions."""
    versioned = f"{spec.model}:{spec.version}" if spec.model in groups else spec.name
    metadata = model_metadata(options.url, versioned)
    if "inputs" not in metadata:
        raise _cannot_be_asked(options, spec, metadata)
    return {**metadata, "name": versioned}


def _with_sizes(spec: ModelSpec, metadata: Mapping[str, Any], bodies: Collection[str]) -> ModelSpec:
    """Return a model with the sizes of its requests. If its inputs vary and the workload gives no sizes, these are
    spread evenly over what the model takes. The sizes of a user's own `bodies` are not known.

    Raises:
        InvalidInputError: the model has other sizes than the workload gives.
    """
    ranges = {} if spec.name in bodies else metadata.get("sizes", {})
    if spec.sizes and spec.name not in bodies and spec.sizes.keys() != ranges.keys():
        rule = f"are not those of the model that runs: {', '.join(ranges) or 'its inputs have one shape'}"
        raise refused(f"models.{spec.name}.sizes", ", ".join(spec.sizes), rule, "Correct `sizes`, or leave it away.")
    if spec.sizes.keys() == ranges.keys():
        return spec
    even = {name: Lengths(quantiles={0: max(1, size["least"]), 100: size["most"]}) for name, size in ranges.items()}
    return spec.model_copy(update={"sizes": even})


def _with_notes(
    schedule: Schedule, given: Sequence[ModelSpec], sized: Sequence[ModelSpec], shown: Mapping[str, Mapping[str, Any]]
) -> Schedule:
    """Return the schedule with a line for each model whose sizes the workload does not give, and for each with whole
    numbers of which the metadata (`shown`) does not say which it knows."""
    notes = [
        f"{spec.name}: its workload gives no `sizes`, so each is spread evenly over what the model takes ("
        + ", ".join(f"{name} up to {lengths.most:g}" for name, lengths in spec.sizes.items())
        + ")"
        for spec, before in zip(sized, given, strict=True)
        if spec.sizes and not before.sizes
    ]
    notes += [
        f"{name}: nothing says which numbers it knows for {' and '.join(unbounded)}, so 0 and 1 are sent; the option "
        "`example` gives another"
        for name, metadata in shown.items()
        if (unbounded := unbounded_inputs(metadata))
    ]
    return replace(schedule, notes=(*schedule.notes, *notes))


def _in_multiples(schedule: Schedule, models: Sequence[ModelSpec], shown: Mapping[str, Mapping[str, Any]]) -> Schedule:
    """Return the schedule with sizes rounded up to the multiples that models run at."""
    if schedule.sizes is None:
        return schedule
    steps = np.ones((len(models), schedule.sizes.shape[1]), dtype=np.int64)
    for place, spec in enumerate(models):
        steps[place, : len(spec.sizes)] = [shown[spec.name]["sizes"][name]["multiple"] for name in spec.sizes]
    step = steps[schedule.model_index]
    return replace(schedule, sizes=-(-schedule.sizes // step) * step)


def _largest(schedule: Schedule, index: int, spec: ModelSpec) -> dict[str, int]:
    """Return the largest size of the requests of a model, by name."""
    if schedule.sizes is None:
        return {}
    most = schedule.sizes[schedule.model_index == index].max(axis=0, initial=1)
    return dict(zip(spec.sizes, most.tolist(), strict=False))


def _target(
    options: BenchOptions, spec: ModelSpec, metadata: Mapping[str, Any], most: Mapping[str, int]
) -> ModelTarget:
    """Return a model to send requests to, the largest of which have the sizes `most`."""
    versioned = metadata["name"]
    slo = None if spec.slo is None else spec.slo.scaled(options.slo_scale)
    target = partial(ModelTarget, spec.name, spec.slo_ms * options.slo_scale, asked=versioned, slo=slo)
    generator = seed_for(options.seed, "payloads", spec.name)
    if spec.name in options.bodies and slo is not None:
        raise refused("--body", spec.name, "streams, which takes tensors", "Leave --body out for it.")
    if spec.name in options.bodies:
        bodies = read_bodies(options.bodies[spec.name])
        reasons = (why_unread(options.url, versioned, body.data) for body in bodies[:_TRIED_BODIES])
        why = next(filter(None, reasons), None)
        if why is not None:
            cure = "Give bodies that its hooks, or those for pictures and texts, read."
            raise refused(
                "--body",
                f"{spec.name}={options.bodies[spec.name]}",
                f"is refused by the model: {why.rstrip('.')}",
                cure,
            )
    elif most:
        is_binary = options.tensors == "binary"
        made = SizedBodies(metadata, most, generator, binary=is_binary, is_streamed=slo is not None)
        return target(bodies=(), made=made)
    else:
        bodies = make_bodies(metadata, generator, binary=options.tensors == "binary")
    return target(bodies=tuple(replace(body, is_streamed=slo is not None) for body in bodies))


def _most_tokens(application: Application, models: Sequence[ModelSpec]) -> int:
    """Return the most tokens of the text of an application that streams, as far as the plan says it."""
    stage = application.streamed
    assert stage is not None
    if stage.parameters is not None and stage.parameters.max_tokens is not None:
        return stage.parameters.max_tokens
    generates = next(spec.generates for spec in models if spec.name == application.model_name(stage))
    lengths = None if generates is None else generates.output_tokens
    return int(lengths.most) if lengths is not None and lengths.most < math.inf else 1


def _generating(options: BenchOptions, spec: ModelSpec, tokens: RequestTokens, *, has_versions: bool) -> ModelTarget:
    problem = "has several versions, and OpenAI's interface names none" if has_versions else None
    problem = "generates: its prompts are drawn" if spec.name in options.bodies else problem
    if problem is not None:
        raise refused(f"models.{spec.name}", None, problem, "Leave --body out, or plan with one version.")
    generating = generating_model(options.url, spec.name)
    if "vocabulary" not in generating:
        raise _cannot_be_asked(options, spec, generating)
    generator = seed_for(options.seed, "payloads", spec.name)
    prompts = Prompts(spec.name, int(tokens.prompt.max(initial=1)), generating["vocabulary"], generator)
    slo = None if spec.slo is None else spec.slo.scaled(options.slo_scale)
    return ModelTarget(spec.name, spec.slo_ms * options.slo_scale, (), made=prompts, slo=slo)


def _cannot_be_asked(options: BenchOptions, spec: ModelSpec, metadata: Mapping[str, Any]) -> EnvironmentFaultError:
    error = metadata.get("error", metadata)
    why = error.get("message", error) if isinstance(error, dict) else error  # the former is OpenAI's form
    return EnvironmentFaultError(f"{options.url}: '{spec.name}' cannot be asked: {why}")


def _watch(
    clients: ClientGroup,
    start_at: float,
    total: int,
    options: BenchOptions,
    progress: Progress,
    queued: dict[int, int],
    answers_s: float,
) -> None:
    """Until all clients have ended, print one line and ask for the queue length once a second.

    `answers_s`: the longest that a stream may take.
    """
    limit = start_at + options.duration_s + options.grace_s + answers_s + 30.0  # limit: for clients to end
    next_line = start_at + 1.0
    while not clients.is_done():
        time.sleep(0.05)
        now = time.time()
        if now >= next_line:
            counts = clients.progress()
            second = min(math.floor(now - start_at), math.ceil(options.duration_s))
            shown = "  ".join(f"{key} {counts.get(key, 0)}" for key in ("ok", "late", "expired", "rejected", "failed"))
            progress(f"{second:4d} s  sent {counts.get('sent', 0)}/{total}  {shown}")
            waiting = _queued(options.url)
            if waiting is not None:
                queued[math.floor(now - start_at) - 1] = waiting
            next_line = now - (now - start_at) % 1.0 + 1.0
        if now > limit:
            clients.stop()
            return


def _queued(url: str) -> int | None:
    """Return how many requests wait for a batch now; None if the endpoint does not say."""
    try:
        return sum(get_told(f"{url.rstrip('/')}/status/queue", dict[str, int], 0.5).values())
    except EnvironmentFaultError:
        return None
