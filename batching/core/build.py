"""Turn plans and workloads into the system a scheduler is built from.

Two ways: from a plan, gpu-let by gpu-let; or Symphony's plain setting, in which every GPU hosts every model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tenuto.batching.core.gathering import usual_batch
from tenuto.batching.core.step_scheduler import UNLIMITED, StepLimits
from tenuto.batching.core.system import (
    INF,
    GeneratingGpulet,
    Host,
    Model,
    NetworkDelay,
    ScheduledGpulet,
    ScheduledProgram,
    System,
)
from tenuto.errors import MissingProfileError, Problem, raise_if_any, refused
from tenuto.placement import Cluster, ModelSpec, Plan, Workload
from tenuto.placement.application import Application, online
from tenuto.placement.application import in_order as stages_in_order
from tenuto.placement.copy_times import hidden_copies_ms, longest_copies_ms
from tenuto.placement.costs import MOST_BATCH
from tenuto.placement.expectation.outlook import provided_rps
from tenuto.placement.generates import Generates
from tenuto.placement.program import Program, program_name
from tenuto.placement.workload import equal_shapes, generation_of, profile_by_size, size_parts
from tenuto.profiles import Latency, LatencyTable, Profiles
from tenuto.profiles.size_classes import Sizes, class_of, in_order, shapes_in, united

NO_DELAY = NetworkDelay()
_AGAIN = "Make the plan again with `tenuto plan`."


def from_plan(plan: Plan, network: NetworkDelay = NO_DELAY, *, check_slos: bool = True) -> System:
    """Return the system of a plan: its gpu-lets in file order, each with its programs up to their planned batch size.

    When the plan streams, copying is not part of a batch's latency but of its way to the gpu-let. Then every batch is
    budgeted the copies of the longest batch. Models that the plan leaves unserved are programs without a host. With
    `check_slos` off, replicas that can never answer in time are kept: a router without deadlines would use them.

    Raises:
        InvalidInputError: a replica without latency, one of a model the plan does not list, or an SLO no batch can
        meet.
    """
    classes = size_classes_of(plan)
    firm = {replica.name for gpulet in plan.gpulets for replica in gpulet.models if not replica.pads}
    apart = {name: equal_shapes(plan.model(name), mine) for name, mine in classes.items() if name in firm}
    models = _models(plan.models, provided_rps(plan), classes, apart)
    programs = _programs(plan, models)
    index: dict[str, list[int]] = {}  # of a model with size classes several
    for position, scheduled in enumerate(programs):
        index.setdefault(scheduled.name, []).append(position)
    names = {spec.name: tuple(spec.sizes) for spec in plan.models}
    known = {spec.name for spec in plan.models}
    writing = {spec.name: (spec.generates, spec.slo) for spec in plan.models if spec.generates is not None}
    problems = network.problems()
    gpulets, generating = [], list[GeneratingGpulet]()
    shared: dict[tuple[tuple[int, Host], ...], dict[int, Host]] = {}
    for position, gpulet in enumerate(plan.gpulets):
        hosts: dict[int, Host] = {}
        for program in gpulet.programs:
            where = f"gpulets.{position}.models.{program.name}"
            if not known.issuperset(program.models):
                rule = "the plan has no entry for this model under `models`"
                problems.append(Problem(where, program.name, rule, _AGAIN))
            elif program.name in writing:  # its gpu-let decides its steps itself; no batches are formed for it
                replica, (limits, slo) = program.members[0], writing[program.name]
                if replica.steps is not None:
                    of_steps = _limits(limits, replica.kv_tokens, replica.block_tokens, replica.longest_context)
                    model = programs[index[program.name][0]].members[0]
                    how = (model, of_steps, replica.steps, replica.decided_ahead)
                    bounds = (INF, INF) if slo is None else (slo.ttft_ms, slo.tpot_ms)
                    generating.append(GeneratingGpulet(position, *how, *bounds, replica.planned_rps))
            elif program.latency is None:
                problems.append(Problem(where, None, "the replica carries no latency", _AGAIN))
            else:
                hidden_ms = hidden_copies_ms(plan, program)
                for number, place in enumerate(index[program.name]):
                    sizes = models[programs[place].members[0]].sizes
                    steps = _steps_of(program, names[program.models[0]], sizes)
                    if steps and program.name in apart:
                        steps = _in_equal_shapes(steps, apart[program.name][number])
                    executed = tuple(latency_ms - hidden_ms * size for size, latency_ms in enumerate(steps))
                    if hidden_ms < 0.0 or (hidden_ms and min(executed[1:], default=1.0) <= 0.0):
                        rule = "copies of a request (ms) must be at least 0 and leave some of a batch's time to execute"
                        problems.append(Problem(where, hidden_ms, rule, "Correct `copy_in_ms` and `copy_out_ms`."))
                    if steps:
                        hosts[place] = Host(executed, program.slowdown)
        held = shared.setdefault(tuple(hosts.items()), hosts)
        gpulets.append(ScheduledGpulet(gpulet.id, gpulet.gpu, held, gpulet.also_on))
    raise_if_any(problems)
    if plan.streaming:
        network = NetworkDelay(ctrl_ms=network.ctrl_ms + longest_copies_ms(plan), response_ms=network.response_ms)
    system = System(models, tuple(gpulets), network, programs, plan.objective, tuple(generating))
    raise_if_any(system.unserveable() if check_slos else ())
    return with_stages(system, plan.applications) if plan.applications else system


def _limits(generates: Generates, kv_tokens: int | None, block_tokens: int, longest_context: int | None) -> StepLimits:
    return StepLimits(
        generates.max_sequences,
        generates.max_batch_tokens,
        UNLIMITED if kv_tokens is None else kv_tokens,
        block_tokens,
        longest_context,
    )


def size_classes_of(plan: Plan) -> dict[str, tuple[Sizes, ...]]:
    """Return the size classes of models whose requests vary, in the order of the workload's names: all sizes at which
    the latency of some replica is known."""
    names = {spec.name: tuple(spec.sizes) for spec in plan.models if spec.sizes}
    known: dict[str, list[tuple[Sizes, ...]]] = {}
    for gpulet in plan.gpulets if names else ():
        joint = {name for models in gpulet.joint_models for name in models}
        for replica in gpulet.models:
            if replica.name in names and replica.name not in joint:
                sizes = (tuple(each.sizes[name] for name in names[replica.name]) for each in replica.by_size)
                known.setdefault(replica.name, []).append(tuple(sizes))
    return {name: united(grids) for name, grids in known.items()}


def _steps_of(program: Program, names: Sequence[str], sizes: Sizes) -> tuple[float, ...]:
    """Return l(0..b) of a program on a gpu-let for requests of these sizes, () where it is not known for them."""
    latency, by_size = program.latency, program.members[0].by_size
    if latency is None or not sizes or not by_size:
        return () if latency is None else latency_steps(latency, 0.0, program.batch_size)
    known = {tuple(each.sizes[name] for name in names): each.latency for each in by_size}
    classes = in_order(known)
    place = class_of(classes, sizes)
    if place is None:
        return ()
    latency = known[classes[place]]
    return latency_steps(latency, 0.0, latency.largest if isinstance(latency, LatencyTable) else program.batch_size)


def _in_equal_shapes(steps: Sequence[float], chance: float) -> tuple[float, ...]:
    """Return l(0..b) of batches that cannot be padded, so that the requests of each shape run by themselves. Two
    requests have one shape with this chance."""
    sizes = np.arange(1, len(steps))
    shapes = np.array([shapes_in(size, chance) for size in range(1, len(steps))])
    times_ms = shapes * np.interp(sizes / shapes, range(len(steps)), steps)
    return (*steps[:1], *np.maximum.accumulate(times_ms).tolist())


def _models(
    specs: Sequence[ModelSpec],
    room_rps: Mapping[str, float],
    classes: Mapping[str, Sequence[Sizes]],
    apart: Container[str] = (),
) -> tuple[Model, ...]:
    """Return the models, each size class of one by itself with its part of the rate. Classes of those `apart` do not
    join each other."""
    models = []
    for spec in specs:
        mine, room = classes.get(spec.name, ()), room_rps.get(spec.name)
        parts = size_parts(spec, tuple(spec.sizes), mine) if mine else (1.0,)
        for sizes, part in zip(mine or ((),), parts, strict=True):
            model = Model(
                spec.name,
                spec.slo_ms,
                spec.rate_rps * part or None,
                spec.weight,
                spec.priority,
                spec.longest_hold_ms,
                None if room is None else room * part,
                sizes,
                spec.name not in apart,
            )
            models.append(model)
    return tuple(models)


def _programs(plan: Plan, models: Sequence[Model]) -> tuple[ScheduledProgram, ...]:
    """Return the programs of a plan, in the order of their first models. A model that no gpu-let holds is a program of
    its own, and so is each size class."""
    position = {model.name: place for place, model in enumerate(models)}
    joint = {program_name(models): models for gpulet in plan.gpulets for models in gpulet.joint_models}
    models_of = {name: models for name, models in joint.items() if position.keys() >= set(models)}
    taken = {name for models in models_of.values() for name in models}
    programs = [ScheduledProgram(name, tuple(position[model] for model in group)) for name, group in models_of.items()]
    programs += [
        ScheduledProgram(model.name, (place,)) for place, model in enumerate(models) if model.name not in taken
    ]
    return tuple(sorted(programs, key=lambda program: min(program.members)))


def latency_steps(latency: Latency, slo_ms: float, max_batch: int | None = None) -> tuple[float, ...]:
    """Return l(0..b) in ms, where b is the largest batch that can run within the SLO, or `max_batch`; at least 1.

    When a table begins above batch 1, its first latency is the upper bound for smaller batches. Latencies never fall as
    b grows.
    """
    largest = latency.largest_batch(slo_ms) if max_batch is None else max_batch
    if isinstance(latency, LatencyTable):
        largest = min(largest, latency.largest)
    steps = [0.0]
    for size in range(1, max(1, largest) + 1):
        steps.append(max(steps[-1], latency.at(size)))
    return tuple(steps)


def everywhere(workload: Workload, cluster: Cluster, profiles: Profiles, network: NetworkDelay = NO_DELAY) -> System:
    """Return Symphony's plain setting: each GPU of the cluster is one gpu-let hosting every model of the workload.

    A model that generates takes the memory of a whole GPU, and has the cluster to itself. Its engine knows no SLO and
    refuses nothing, so that a run can be compared with a log.

    Raises:
        InvalidInputError: a model without profile, an SLO that no batch can meet, or models beside one that generates.
    """
    raise_if_any(network.problems())
    names = [spec.name for spec in workload.models if spec.generates is not None]
    if names:
        return _generating_everywhere(workload, cluster, profiles, network, names[0])
    specs = {spec.name: spec for spec in workload.models}
    classes = {
        spec.name: united(
            tuple(tuple(sizes[profile.size_names.index(name)] for name in spec.sizes) for sizes in profile.size_classes)
            for profile in (profile_by_size(spec, gpu_type, profiles) for gpu_type in cluster.gpu_types)
        )
        for spec in workload.models
        if spec.sizes
    }
    kinds = [(spec, gpu_type) for spec in workload.models for gpu_type in cluster.gpu_types]
    firm = {spec.name for spec, gpu_type in kinds if not profile_by_size(spec, gpu_type, profiles).pads}
    apart = {name: equal_shapes(specs[name], mine) for name, mine in classes.items() if name in firm}
    models = _models(workload.models, {}, classes, apart)
    by_type: dict[str, dict[int, Host]] = {gpu_type: {} for gpu_type in cluster.gpu_types}
    for gpu_type, hosts in by_type.items():
        for position, model in enumerate(models):
            profile = profile_by_size(specs[model.name], gpu_type, profiles)
            if model.sizes:
                try:
                    profile = profile.padded_to(dict(zip(specs[model.name].sizes, model.sizes, strict=True)))
                except MissingProfileError:
                    continue  # measured on another GPU type
            latency = profile.latency()
            most = latency.largest_batch(model.slo_ms)
            steps = latency_steps(latency, model.slo_ms, min(most, MOST_BATCH) if specs[model.name].offline else most)
            if model.name in apart:
                steps = _in_equal_shapes(steps, apart[model.name][classes[model.name].index(model.sizes)])
            hosts[position] = Host(steps)
    gpulets = tuple(ScheduledGpulet(f"{gpu.id}/a", gpu.id, by_type[gpu.type]) for gpu in cluster.gpus)
    system = System(models, gpulets, network, objective=workload.objective)
    raise_if_any(system.unserveable())
    return with_stages(system, workload.applications) if workload.applications else system


def with_stages(system: System, applications: Sequence[Application]) -> System:
    """Return the system with weights of models by what their requests are worth to the applications that ask them, and
    with bounds on how long those are held for larger batches.

    A request of an application is worth 1 when it is answered. When one of its stages is complete, it is worth the part
    of its GPU time that it has had by then: so much is lost with it. Of stages that run beside this one, it has had
    half of their time in the mean. The requests of the stage share that. The worth of a shared model's request is the
    mean over all that ask it; what clients ask by themselves is worth 1.

    The time for which a request is held is lost to the stages behind it, and to bursts. So it is held for at most as
    long as it takes alone.
    """
    applications = online(applications)
    alone_ms: dict[str, float] = {}
    cost_ms: dict[str, float] = {}  # GPU time of a request in a batch that takes half of the SLO; of a text as planned
    for hosts in system.distinct_hosts():
        for program, host in hosts.items():
            for model in [system.models[member] for member in system.programs[program].members]:
                size = usual_batch(host.planned_ms(), model.slo_ms)
                alone_ms[model.name] = min(host.planned_batch_ms(1), alone_ms.get(model.name, INF))
                cost_ms[model.name] = min(host.planned_batch_ms(size) / size, cost_ms.get(model.name, INF))
    for planned in (each for each in system.generating if each.rate_rps):
        name = system.models[planned.model].name
        cost_ms[name] = min(1000.0 / planned.rate_rps, cost_ms.get(name, INF))
    rates: dict[str, float] = {}
    worth_rps: dict[str, float] = {}
    for app in applications:
        spent_ms = {s.label: s.count * cost_ms.get(app.model_name(s), 0.0) for s in app.stages}
        whole_ms = sum(spent_ms.values())
        done: dict[str, set[str]] = {}  # by stage: itself and all that were complete before
        for stage in stages_in_order(app.stages):
            done[stage.label] = {stage.label}.union(*(done[before] for before in stage.after))
        for stage in app.stages:
            name, had_ms = app.model_name(stage), 0.0
            for label, ms in spent_ms.items():
                is_later = stage.label in done[label] and label != stage.label
                had_ms += ms if label in done[stage.label] else 0.0 if is_later else ms / 2.0
            rates[name] = rates.get(name, 0.0) + app.rate_rps * stage.count
            worth_rps[name] = worth_rps.get(name, 0.0) + app.rate_rps * (had_ms / whole_ms if whole_ms else 1.0)
    models = list[Model]()
    for model in system.models:
        stage_rps = rates.get(model.name, 0.0)
        if stage_rps:
            alone_rps = max(0.0, (model.rate_rps or stage_rps) - stage_rps)
            worth = (alone_rps + worth_rps[model.name]) / (alone_rps + stage_rps)
            model = replace(model, weight=model.weight * worth)
        if model.name in rates and model.name in alone_ms:
            hold_ms = min(alone_ms[model.name], INF if model.longest_hold_ms is None else model.longest_hold_ms)
            model = replace(model, longest_hold_ms=hold_ms)
        models.append(model)
    return replace(system, models=tuple(models))


def _generating_everywhere(
    workload: Workload, cluster: Cluster, profiles: Profiles, network: NetworkDelay, name: str
) -> System:
    spec = workload.models[0]
    if len(workload.models) > 1 or spec.generates is None:
        rule = "generates, and not every GPU can hold it beside other models"
        raise refused("models", name, rule, "Make a plan of the workload with `tenuto plan`, and simulate that.")
    generating = []
    for place, gpu in enumerate(cluster.gpus):
        generation = generation_of(spec, gpu.type, profiles)
        limits = _limits(spec.generates, generation.kv_tokens, generation.block_tokens, generation.longest_context)
        generating.append(GeneratingGpulet(place, 0, limits, generation.cost(), generation.decided_ahead))
    models = _models(workload.models, {}, {})
    gpulets = tuple(ScheduledGpulet(f"{gpu.id}/a", gpu.id, {}) for gpu in cluster.gpus)
    return System(models, gpulets, network, objective=workload.objective, generating=tuple(generating))
