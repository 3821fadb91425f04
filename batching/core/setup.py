"""Turn plans and workloads into what a scheduler is built from.

Two ways: from a plan, gpu-let by gpu-let; or Symphony's plain setting, in which every GPU holds every model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tenuto.batching.core.interface import GpuletSpec, Host, NetworkDelay, SchedulerModel, Setup
from tenuto.batching.core.merged_queues import latency_steps, merged_hosts, merged_queues
from tenuto.errors import InvalidInputError, Problem
from tenuto.placement import Cluster, Plan, Workload, profile_of
from tenuto.placement.copy_times import hidden_copies_ms, longest_copies_ms
from tenuto.profiles import Profiles

NO_DELAY = NetworkDelay()

__all__ = ["everywhere", "everywhere_linear", "from_plan", "latency_steps"]


def from_plan(plan: Plan, network: NetworkDelay = NO_DELAY, *, check_slos: bool = True) -> Setup:
    """Return the set-up of a plan: its gpu-lets in file order, each with its replicas up to their planned batch size.

    With streaming, the copies that the plan knows are not part of a batch's latency but of its way: those of the
    longest copied batch are budgeted for every batch. Models that run as one merged program share a queue, with the
    shortest SLO of them and the rates of all together. Models the plan leaves unserved keep their index but have no
    host. With `check_slos` off, replicas that can never answer in time are kept, as a router without deadlines would.

    Raises:
        InvalidInputError: a replica without latency, one of a model the plan does not list, or an SLO no batch can
        meet.
    """
    index = {spec.name: position for position, spec in enumerate(plan.models)}
    models = tuple(SchedulerModel(spec.name, spec.slo_ms, spec.rate_rps, spec.weight) for spec in plan.models)
    problems: list[Problem] = []
    gpulets = []
    shared: dict[tuple[tuple[int, Host], ...], dict[int, Host]] = {}
    queues = merged_queues(plan)
    for position, gpulet in enumerate(plan.gpulets):
        hosts: dict[int, Host] = {}
        merged = {name for group in gpulet.merge for name in group.models}
        for replica in gpulet.models:
            where = f"gpulets.{position}.models.{replica.name}"
            if replica.name not in index:
                problems.append(
                    Problem(
                        where,
                        replica.name,
                        "the plan has no entry for this model under `models`",
                        "Make the plan again with `tenuto plan`.",
                    )
                )
            elif replica.latency is None:
                problems.append(
                    Problem(where, None, "the replica carries no latency", "Make the plan again with `tenuto plan`.")
                )
            elif replica.name not in merged:
                spec = plan.models[index[replica.name]]
                steps = latency_steps(replica.latency, spec.slo_ms, replica.batch_size)
                hidden_ms = hidden_copies_ms(plan, replica)
                executed = tuple(latency_ms - hidden_ms * size for size, latency_ms in enumerate(steps))
                if hidden_ms < 0.0 or (hidden_ms and min(executed[1:], default=1.0) <= 0.0):
                    rule = "copies of a request (ms) must be at least 0 and leave some of every batch's time to execute"
                    problems.append(Problem(where, hidden_ms, rule, "Correct `copy_in_ms` and `copy_out_ms`."))
                    continue
                hosts[index[replica.name]] = Host(executed, replica.slowdown)
        hosts |= merged_hosts(gpulet, queues)
        key = tuple(hosts.items())
        gpulets.append(GpuletSpec(gpulet.id, gpulet.gpu, shared.setdefault(key, hosts)))
    if problems:
        raise InvalidInputError(problems)
    if plan.streaming:
        network = NetworkDelay(ctrl_ms=network.ctrl_ms + longest_copies_ms(plan), response_ms=network.response_ms)
    setup = Setup((*models, *queues.models), tuple(gpulets), network, queues.groups)
    return _checked(setup) if check_slos or setup.problems() else setup


def everywhere(workload: Workload, cluster: Cluster, profiles: Profiles, network: NetworkDelay = NO_DELAY) -> Setup:
    """Return Symphony's plain setting: each GPU of the cluster is one gpu-let holding every model of the workload.

    Raises:
        InvalidInputError: a model without profile, or an SLO that no batch can meet.
    """
    models = tuple(SchedulerModel(spec.name, spec.slo_ms, spec.rate_rps, spec.weight) for spec in workload.models)
    by_type: dict[str, dict[int, Host]] = {}
    for gpu_type in cluster.gpu_types:
        by_type[gpu_type] = {
            position: Host(latency_steps(profile_of(spec, gpu_type, profiles).latency(), spec.slo_ms))
            for position, spec in enumerate(workload.models)
        }
    gpulets = tuple(GpuletSpec(f"{gpu.id}/a", gpu.id, by_type[gpu.type]) for gpu in cluster.gpus)
    return _checked(Setup(models, gpulets, network))


def everywhere_linear(
    models: Sequence[tuple[str, float, float, float, float | None]], n_gpus: int, network: NetworkDelay = NO_DELAY
) -> Setup:
    """Return the plain setting for models given as (name, alpha_ms, beta_ms, slo_ms, rate_rps or None).

    Raises:
        InvalidInputError: coefficients or SLOs that are not finite and positive, or an SLO that no batch can meet.
    """
    problems = []
    for name, alpha_ms, beta_ms, slo_ms, _ in models:
        for key, value, least in (("alpha_ms", alpha_ms, 1e-9), ("beta_ms", beta_ms, 0.0), ("slo_ms", slo_ms, 1e-9)):
            if not (math.isfinite(value) and value >= least):
                problems.append(Problem(f"{name}.{key}", value, "must be a positive number", "Correct the value."))
    if n_gpus < 1:
        problems.append(Problem("n_gpus", n_gpus, "must be at least 1", "Give at least one GPU."))
    if problems:
        raise InvalidInputError(problems)
    hosts: dict[int, Host] = {}
    for position, (_, alpha_ms, beta_ms, slo_ms, _) in enumerate(models):
        largest = max(1, math.floor((slo_ms - beta_ms) / alpha_ms + 1e-9))
        hosts[position] = Host((0.0, *(alpha_ms * size + beta_ms for size in range(1, largest + 1))))
    gpulets = tuple(GpuletSpec(f"g{number}/a", f"g{number}", hosts) for number in range(n_gpus))
    specs = tuple(SchedulerModel(name, slo_ms, rate_rps) for name, _, _, slo_ms, rate_rps in models)
    return _checked(Setup(specs, gpulets, network))


def _checked(setup: Setup) -> Setup:
    problems = setup.problems() or setup.unserveable()
    if problems:
        raise InvalidInputError(problems)
    return setup
