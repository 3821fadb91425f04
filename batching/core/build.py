"""Turn plans and workloads into the system a scheduler is built from.

Two ways: from a plan, gpu-let by gpu-let; or Symphony's plain setting, in which every GPU hosts every model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from tenuto.errors import Problem, raise_if_any, refused
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, profile_of
from tenuto.placement.copy_times import hidden_copies_ms, longest_copies_ms
from tenuto.placement.expectation.outlook import provided_rps
from tenuto.placement.generates import Generates
from tenuto.placement.program import program_name
from tenuto.placement.workload import generation_of
from tenuto.profiles import Latency, LatencyTable, Profiles

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
    programs = _programs(plan)
    index = {program.name: position for position, program in enumerate(programs)}
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
                    model = programs[index[program.name]].members[0]
                    how = (model, of_steps, replica.steps, replica.decided_ahead)
                    bounds = (INF, INF) if slo is None else (slo.ttft_ms, slo.tpot_ms)
                    generating.append(GeneratingGpulet(position, *how, *bounds, replica.planned_rps))
            elif program.latency is None:
                problems.append(Problem(where, None, "the replica carries no latency", _AGAIN))
            else:
                steps = latency_steps(program.latency, 0.0, program.batch_size)
                hidden_ms = hidden_copies_ms(plan, program)
                executed = tuple(latency_ms - hidden_ms * size for size, latency_ms in enumerate(steps))
                if hidden_ms < 0.0 or (hidden_ms and min(executed[1:], default=1.0) <= 0.0):
                    rule = "copies of a request (ms) must be at least 0 and leave some of a batch's time to execute"
                    problems.append(Problem(where, hidden_ms, rule, "Correct `copy_in_ms` and `copy_out_ms`."))
                hosts[index[program.name]] = Host(executed, program.slowdown)
        held = shared.setdefault(tuple(hosts.items()), hosts)
        gpulets.append(ScheduledGpulet(gpulet.id, gpulet.gpu, held, gpulet.also_on))
    raise_if_any(problems)
    if plan.streaming:
        network = NetworkDelay(ctrl_ms=network.ctrl_ms + longest_copies_ms(plan), response_ms=network.response_ms)
    models = _models(plan.models, provided_rps(plan))
    system = System(models, tuple(gpulets), network, programs, plan.objective, tuple(generating))
    raise_if_any(system.unserveable() if check_slos else ())
    return system


def _limits(generates: Generates, kv_tokens: int | None, block_tokens: int, longest_context: int | None) -> StepLimits:
    return StepLimits(
        generates.max_sequences,
        generates.max_batch_tokens,
        UNLIMITED if kv_tokens is None else kv_tokens,
        block_tokens,
        longest_context,
    )


def _models(specs: Sequence[ModelSpec], room_rps: Mapping[str, float]) -> tuple[Model, ...]:
    return tuple(
        Model(
            spec.name,
            spec.slo_ms,
            spec.rate_rps,
            spec.weight,
            spec.priority,
            spec.longest_hold_ms,
            room_rps.get(spec.name),
        )
        for spec in specs
    )


def _programs(plan: Plan) -> tuple[ScheduledProgram, ...]:
    """Return the programs of a plan, in the order of their first models. A model that no gpu-let holds is a program of
    its own."""
    position = {spec.name: place for place, spec in enumerate(plan.models)}
    joint = {program_name(models): models for gpulet in plan.gpulets for models in gpulet.joint_models}
    models_of = {name: models for name, models in joint.items() if position.keys() >= set(models)}
    taken = {name for models in models_of.values() for name in models}
    models_of |= {name: (name,) for name in position if name not in taken}
    programs = (
        ScheduledProgram(name, tuple(position[model] for model in models)) for name, models in models_of.items()
    )
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
    by_type: dict[str, dict[int, Host]] = {}
    for gpu_type in cluster.gpu_types:
        by_type[gpu_type] = {
            position: Host(latency_steps(profile_of(spec, gpu_type, profiles).latency(), spec.slo_ms))
            for position, spec in enumerate(workload.models)
        }
    gpulets = tuple(ScheduledGpulet(f"{gpu.id}/a", gpu.id, by_type[gpu.type]) for gpu in cluster.gpus)
    system = System(_models(workload.models, {}), gpulets, network, objective=workload.objective)
    raise_if_any(system.unserveable())
    return system


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
    models = _models(workload.models, {})
    gpulets = tuple(ScheduledGpulet(f"{gpu.id}/a", gpu.id, {}) for gpu in cluster.gpus)
    return System(models, gpulets, network, objective=workload.objective, generating=tuple(generating))
