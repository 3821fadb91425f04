"""Plan in, Ray Serve config out: one application per gpu-let and one for the entry, so that a change touches only
what changed.

What only a restart can change (GPU, share, memory cap, executor) is in `args` and `ray_actor_options`; what can
change in place (models, batch sizes, the plan the dispatcher follows) is in `user_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.deployments.serve.sub_clusters import cut_plan
from tenuto.deployments.serve.user_config import MemberEntry, ProgramEntry
from tenuto.mps.share import client_environment
from tenuto.placement import Gpulet, Plan, PlannedGpu
from tenuto.placement.program import Program

ENTRY_APPLICATION = "tenuto"
GPULET_PREFIX = "gpulet-"
# CUDA MPS admits at most 48 clients per GPU (driver r550; 60 later), so 50 slots are never too few.
LEDGER_SLOT = 0.02  # unit: a place of a GPU
NODE_SLOT = 0.001  # unit: of a node's own resource, of which there is 1: 1,000 gpu-lets per node
# Serve replaces a process that did not answer three times in a row: after 15 s. One that is merely starved answers one
# of three; a stopped one is killed by its peers of the same machine long before.
HEALTH_TIMEOUT_S = 5.0  # limit: for one answer
HEAD_NODE = "__internal_head__"  # what Ray calls the head in its resources, besides its address
_EXECUTORS = ("auto", "torch", "emulated")


def application_name(gpulet_id: str) -> str:
    """Return the name of a gpu-let's Serve application."""
    return GPULET_PREFIX + gpulet_id.replace("/", "-")


def dispatcher_name(sub_cluster: str) -> str:
    """Return the name of the Serve application of a sub-cluster's dispatcher."""
    return f"dispatcher-{sub_cluster}"


def serve_config(
    plan: Plan,
    *,
    executor: str = "auto",
    host: str = "127.0.0.1",
    port: int = 8000,
    scheduler: str = "deferred",
    scheduler_options: Mapping[str, Any] | None = None,
    gateway_options: Mapping[str, Any] | None = None,
    gateways: int = 1,
    dispatchers: int = 2,
    nodes: int = 1,
    proxy_port: int | None = None,
    operator_host: str = "127.0.0.1",
    operator_port: int | None = None,
    access: Mapping[str, Any] | None = None,
    log_json: bool = False,
    encrypt: bool = False,
    partition: Mapping[str, int] | None = None,
    also: Mapping[str, int] | None = None,
    standby: Sequence[Gpulet] = (),
) -> dict[str, Any]:
    """Return the Serve config of a plan as plain data, ready for `serve deploy`.

    Args:
        plan: a completed plan.
        executor: `torch`, `emulated`, or `auto`: torch on `cpu` GPUs, on GPUs bound by UUID and wherever the node has
            NVIDIA devices; emulated for logical GPUs on a node without any.
        host: address that the gateways and Serve's proxy bind to.
        port: of the gateways' own socket, where clients belong.
        proxy_port: of Serve's proxies, another and slower way in; default: the port after `port`.
        operator_host: address of the operators' port.
        operator_port: status, metrics and the live page; 0: none of its own; default: two after `port`.
        log_json: processes write JSON lines, with fields, instead of text.
        encrypt: what goes between our processes from node to node is encrypted.
        access: who may ask: `keys`, `insecure` of the gateways' settings, `tls_cert` and `tls_key` of their socket.
        scheduler: batching scheduler of the dispatcher.
        scheduler_options: its options.
        gateways: processes that take HTTP on the same port. One schedules by itself; several, or one with a partition,
            feed the dispatcher of each sub-cluster, a process of its own, in bundles.
        dispatchers: processes of each sub-cluster that has one of its own: one schedules, the others wait to take over.
        nodes: over which gateways and dispatchers are spread, so that one that is lost takes no sub-cluster with it.
        partition: sub-cluster of every model; one holds everything by default.
        also: another partition, which models are going over to or came from: dispatchers hold what they have in either.
        standby: gpu-lets beside the plan's that run idle; whoever schedules keeps connected to them.
        gateway_options: `max_queued`, `max_body_mib`, …; see `tenuto.deployments.serve.user_config.GatewayConfig`.

    Raises:
        ValueError: unknown executor, or no gateway.
        InvalidInputError: the partition leaves out a model of the plan or cuts a gpu-let in two.
    """
    if executor not in _EXECUTORS:
        raise ValueError(f"executor must be one of {', '.join(_EXECUTORS)}, not {executor!r}")
    for what, number in (("gateways", gateways), ("dispatchers", dispatchers), ("nodes", nodes)):
        if number < 1:
            raise ValueError(f"{what} must be at least 1, not {number}")
    gpus = {gpu.id: gpu for gpu in plan.gpus}
    encrypts = {"encrypt": True} if encrypt else {}
    chosen = {"name": scheduler, "options": dict(scheduler_options or {})}
    options = {"scheduler": chosen, **(gateway_options or {}), **encrypts}
    gateway = {"plan": plan.to_data(), **options, **_access(host, port, operator_host, operator_port, access or {})}
    cut = cut_plan(plan, partition, also=also) if gateways > 1 or partition is not None else {}
    if standby and not cut:
        gateway["standby"] = [gpulet.id for gpulet in standby]
    if cut:
        gateway["sub_clusters"] = {
            name: [s.name for s in part.models if partition is None or str(partition[s.name]) == name]
            for name, part in cut.items()
        }
        gateway["dispatchers"] = dispatchers
    return {
        "proxy_location": "HeadOnly",
        # Serve's proxies speak no TLS and are not needed from elsewhere.
        "http_options": {"host": "127.0.0.1", "port": proxy_port or _beside(port), "request_timeout_s": None},
        "logging_config": {"enable_access_log": False, **({"encoding": "JSON"} if log_json else {})},
        "applications": [
            {
                "name": ENTRY_APPLICATION,
                "route_prefix": "/",
                "import_path": "tenuto.deployments.entry.gateway:build",
                "args": {},
                "deployments": [
                    {
                        "name": "gateway",
                        **_replicas(gateways, nodes),
                        "max_ongoing_requests": 100_000,
                        "health_check_period_s": 2.0,
                        "health_check_timeout_s": HEALTH_TIMEOUT_S,
                        "graceful_shutdown_wait_loop_s": 0.2,
                        "graceful_shutdown_timeout_s": 10.0,
                        "ray_actor_options": {"num_cpus": 0},
                        "user_config": gateway,
                    }
                ],
            },
            *(
                _dispatcher_application(
                    name,
                    {"plan": part.to_data(), **_standby_of(part, standby), **options},
                    _replicas(dispatchers, nodes),
                )
                for name, part in cut.items()
            ),
            *(_gpulet_application(plan, gpulet, gpus[gpulet.gpu], executor, encrypts) for gpulet in plan.gpulets),
        ],
    }


def _standby_of(part: Plan, standby: Sequence[Gpulet]) -> dict[str, list[str]]:
    """Return the idle gpu-lets of a sub-cluster's models as settings of its dispatcher; none where there are none."""
    models = {spec.name for spec in part.models}
    found = [gpulet.id for gpulet in standby if models & {replica.name for replica in gpulet.models}]
    return {"standby": found} if found else {}


def _access(
    host: str, port: int, operator_host: str, operator_port: int | None, access: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the gateways' sockets and who may use them."""
    rest = dict(access)
    tls = {key: rest.pop(key) for key in ("tls_cert", "tls_key") if rest.get(key) is not None}
    listen: dict[str, Any] = {"host": host, "port": port, **tls}
    found = {"listen": listen, **{key: value for key, value in rest.items() if value}}
    if operator_port != 0:
        found["operators"] = {"host": operator_host, "port": operator_port or _beside(port, 2)}
    return found


def _beside(port: int, steps: int = 1) -> int:
    return port + steps if port + steps <= 65535 else port - steps


def _replicas(count: int, nodes: int) -> dict[str, int]:
    """Return Serve's options for so many processes, spread over so many nodes."""
    return {"num_replicas": count, **({"max_replicas_per_node": -(-count // nodes)} if nodes > 1 < count else {})}


def _dispatcher_application(
    sub_cluster: str, user_config: dict[str, Any], replicas: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "name": dispatcher_name(sub_cluster),
        "route_prefix": None,
        "import_path": "tenuto.deployments.dispatch.dispatcher_process:build",
        "args": {},
        "deployments": [
            {
                "name": "dispatcher",
                **replicas,
                "max_ongoing_requests": 100,
                "health_check_period_s": 0.5,
                "health_check_timeout_s": HEALTH_TIMEOUT_S,
                "graceful_shutdown_wait_loop_s": 0.2,
                "graceful_shutdown_timeout_s": 10.0,
                "ray_actor_options": {"num_cpus": 0},
                "user_config": user_config,
            }
        ],
    }


def _gpulet_application(
    plan: Plan, gpulet: Gpulet, gpu: PlannedGpu, executor: str, encrypts: Mapping[str, bool]
) -> dict[str, Any]:
    spec = {
        "gpulet": gpulet.id,
        "gpu": {"id": gpu.id, "type": gpu.type, "uuid": gpu.uuid},
        "share_pct": gpulet.share_pct,
        "memory_mib": gpulet.memory_mib,
        "executor": executor,
        "mps": plan.mps,
        "cuda_mps": _uses_mps(plan, gpulet, gpu, executor),
        "streaming": plan.streaming,
    }
    return {
        "name": application_name(gpulet.id),
        "route_prefix": None,
        "import_path": "tenuto.deployments.gpulet.replica:build",
        "args": {"spec": spec},
        "deployments": [
            {
                "name": "gpulet",
                "num_replicas": 1,
                "max_ongoing_requests": 100,
                "health_check_period_s": 2.0,
                "health_check_timeout_s": HEALTH_TIMEOUT_S,
                "graceful_shutdown_wait_loop_s": 0.2,
                "graceful_shutdown_timeout_s": 10.0,
                "ray_actor_options": _actor_options(gpulet, gpu, uses_mps=bool(spec["cuda_mps"])),
                "user_config": {"programs": _entries(plan, gpulet), **encrypts},
            }
        ],
    }


def _uses_mps(plan: Plan, gpulet: Gpulet, gpu: PlannedGpu, executor: str) -> bool:
    """Return whether the process runs under CUDA MPS; only a GPU bound by UUID has a daemon that can be named here."""
    return executor != "emulated" and gpu.type != "cpu" and gpu.uuid is not None and plan.uses_mps(gpulet)


def _actor_options(gpulet: Gpulet, gpu: PlannedGpu, *, uses_mps: bool) -> dict[str, Any]:
    """Return Ray's options. The real share is in the environment; Ray's ledger gets one small slot per gpu-let.

    Ray packs fractions GPU by GPU, so that uneven shares which fit the GPUs may not fit its ledger, and slots that
    depend on the number of gpu-lets would restart the neighbours of every gpu-let that comes or goes. Equal constant
    slots do neither.
    """
    options: dict[str, Any] = {"num_cpus": 0}
    environment: dict[str, str] = {}
    if gpu.label is not None:
        key, _, value = gpu.label.partition("=")
        options["label_selector"] = {key: value}
    elif gpu.address is not None:
        options["resources"] = {f"node:{gpu.address}": NODE_SLOT}  # Ray gives every node one unit of its own resource
    if gpu.type != "cpu":
        options["num_gpus"] = LEDGER_SLOT
        if gpu.uuid is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu.uuid
        if gpu.uuid is not None and uses_mps:
            # CUDA reads these once, when the process first uses it: later would be too late.
            environment |= client_environment(gpu.uuid, gpulet.share_pct, gpulet.memory_mib)
    if environment:
        options["runtime_env"] = {"env_vars": environment}
    return options


def _entries(plan: Plan, gpulet: Gpulet) -> list[dict[str, Any]]:
    """Return the programs that the process loads."""
    return [_entry(plan, program).model_dump(mode="json", exclude_defaults=True) for program in gpulet.programs]


def _entry(plan: Plan, program: Program) -> ProgramEntry:
    specs = [plan.model(name) for name in program.models]
    members = tuple(
        MemberEntry(name=spec.name, source=spec.source, weights_path=spec.weights_path, options=spec.options)
        for spec in specs
    )
    first = program.members[0]
    copies = {} if program.is_merged else {"copy_in_ms": first.copy_in_ms, "copy_out_ms": first.copy_out_ms}
    return ProgramEntry(
        name=program.name,
        batch_size=program.batch_size,
        members=members,
        latency=program.latency,
        slowdown=program.slowdown,
        **copies,
    )
