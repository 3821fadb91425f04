"""A deployment: a plan and how it is served. All its applications on Serve are made from this one document."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from tenuto.deployments.serve.config import (
    CONTROL_APPLICATION,
    ENTRY_APPLICATION,
    GPULET_PREFIX,
    HEAD_NODE,
    OFFLINE_APPLICATION,
    ActorOptions,
    ServeApplication,
    ServeConfig,
    application_name,
    dispatcher_name,
)
from tenuto.deployments.serve.executor_choice import ExecutorChoice
from tenuto.deployments.serve.sub_clusters import cut_plan, fits_plan, parted
from tenuto.deployments.serve.user_config import (
    HANGS_S,
    Access,
    ControlConfig,
    DispatcherConfig,
    Entrance,
    GatewayConfig,
    GeneratesEntry,
    GpuletConfig,
    GpuletSpec,
    Listen,
    MemberEntry,
    OfflineOptions,
    Options,
    ProgramEntry,
)
from tenuto.documents import StrictModel, parse_document
from tenuto.errors import refused
from tenuto.mps.share import client_environment
from tenuto.placement import Gpulet, Plan, Workload
from tenuto.placement.cluster import Placed
from tenuto.placement.plan import GpuletProcess, PlanField
from tenuto.placement.program import Program, Replica
from tenuto.placement.workload import ModelSpec

MOST_CLIENTS = 48  # format: clients that CUDA MPS allows on one GPU (driver r550; 60 later)
_LEDGER_SLOT = 0.02  # unit: a gpu-let's part of Ray's count of a GPU: 50 fit, more than `MOST_CLIENTS`
# Under full load two gateways, the dispatcher that schedules, and Ray with all that waits keep one core busy each.
_CORES_OF_TWO = 4  # derived: cores that two gateways need


# Settings that only a new start can change (--replace).
UNCHANGEABLE = ("executor", "host", "port", "proxy_port", "operator_port", "gateways")
_OFF = {"mode": "off"}  # settings of a controller that changes nothing by itself
# What stands for a setting that nobody has chosen, beside the fields that were not given.
_OPEN = (
    ("gateways", 0),
    ("name", ""),
    *((name, None) for name in ("proxy_port", "operator_port", "partition", "control")),
)


class _FoundProcesses(BaseModel):
    num_replicas: int = 1
    max_replicas_per_node: int | None = None
    logging_config: dict[str, Any] | None = None
    user_config: dict[str, Any] = Field(default_factory=dict)


class _FoundApplication(BaseModel):
    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    deployments: list[_FoundProcesses] = Field(default_factory=list, min_length=1)


class _FoundConfig(BaseModel):
    applications: list[_FoundApplication]
    http_options: dict[str, Any] | None = None
    logging_config: dict[str, Any] | None = None


class Deployment(StrictModel):
    """A plan and how it is served.

    Attributes:
        plan: a completed plan.
        name: the name for operators.
        executor: `torch`, `emulated`, or `auto`: torch on `cpu` GPUs, on GPUs bound by UUID and wherever the node has
            NVIDIA devices; emulated for logical GPUs on a node without any.
        host: address that the gateways bind to.
        port: the port of the gateways' own socket, for clients.
        proxy_port: the port of Serve's proxies, which answer no request of a client; default: the port after `port`.
        operator_port: port on this machine for status, metrics and the live page; 0: none; default: `port` + 2.
        grpc_port: port at `host` for the Open Inference Protocol over gRPC; 0: none.
        access: who may send requests, and the certificate of the gateways' socket.
        log_json: processes log JSON lines with fields instead of text.
        encrypt: traffic between our processes on different nodes is encrypted.
        hangs_s: when a batch has been on the device for longer than this, and for longer than `HANGS_TIMES` its planned
            latency, its gpu-let is replaced.
        scheduler: batching scheduler of the dispatcher.
        scheduler_options: options of the scheduler.
        gateway_options: see `Options`.
        gateways: processes that take HTTP on the same port. One gateway without a partition schedules by itself.
            Otherwise gateways send requests in bundles to the dispatcher of each sub-cluster, which is a process of its
            own. 0: see `fitting_gateways`.
        dispatchers: dispatcher processes of each sub-cluster: one schedules, the others wait to take over.
        nodes: the number of nodes over which gateways and dispatchers are spread, so that the loss of one node ends no
            sub-cluster. It is found when the deployment begins.
        partition: sub-cluster of every model; by default one sub-cluster holds all.
        control: the controller's settings; None: it changes nothing by itself (mode off).
        offline: where batches of requests that can wait are kept, and how many; None: there are none.
        workload: the declared workload; None: the models of the plan, at the rates of the plan.
    """

    plan: PlanField
    name: Annotated[str, Field(pattern=r"^[\w.-]{0,63}$")] = ""  # no address
    executor: ExecutorChoice = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    proxy_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    operator_port: int | None = None
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 0
    access: Entrance = Entrance()
    log_json: bool = False
    encrypt: bool = False
    hangs_s: Annotated[float, Field(gt=0)] = HANGS_S
    scheduler: str = "deferred"
    scheduler_options: dict[str, Any] = Field(default_factory=dict)
    gateway_options: Options = Options()
    gateways: Annotated[int, Field(ge=0)] = 0
    dispatchers: Annotated[int, Field(ge=1)] = 2
    nodes: Annotated[int, Field(ge=1)] = 1
    partition: dict[str, int] | None = None
    control: dict[str, Any] | None = None
    offline: OfflineOptions | None = None
    workload: Workload | None = None

    @classmethod
    def from_data(cls, data: Any, *, origin: str = "Serve config") -> Deployment:
        """Read the deployment behind a Serve config; the reverse of `config`. It also reads what Serve tells about
        running applications; when Tenuto deployed these, the arguments of gpu-lets are missing there. Keys that are not
        ours are ignored.

        Raises:
            InvalidInputError: the config is not one of ours, or breaks a rule.
        """
        whole = parse_document(_FoundConfig, data, origin=origin)
        applications = {each.name: each for each in whole.applications if each.deployments}
        entry = applications.get(ENTRY_APPLICATION)
        if entry is None:
            cure = "Write it with `tenuto plan … -o plan.yaml`."
            raise refused(f"{origin}: applications", "(Serve config)", "carries no Tenuto plan", cure)
        gateway = entry.deployments[0]
        config = parse_document(GatewayConfig, gateway.user_config, origin=f"{origin}: user_config of the gateway")
        specs = [each.args["spec"] for each in applications.values() if "spec" in each.args]
        held = [
            each.deployments[0].user_config for name, each in applications.items() if name.startswith(GPULET_PREFIX)
        ]
        executor = parse_document(GpuletSpec, specs[0], origin=f"{origin}: args.spec").executor if specs else "auto"
        listen, operators = config.listen or Listen(port=cls.model_fields["port"].default), config.operators
        proxy_port = (whole.http_options or {}).get("port")
        cut = {model: int(name) for name, models in config.sub_clusters.items() for model in models}
        control = applications.get(CONTROL_APPLICATION)
        settings = _OFF if control is None else control.deployments[0].user_config.get("settings", {})
        hangs_s = parse_document(GpuletConfig, held[0], origin=f"{origin}: user_config").hangs_s if held else HANGS_S
        fields = {
            "plan": config.plan,
            "name": config.name,
            "executor": executor,
            "host": listen.host,
            "port": listen.port,
            "proxy_port": None if proxy_port == _beside(listen.port, 1) else proxy_port,
            "operator_port": _usual(operators, _beside(listen.port, 2)),
            "grpc_port": 0 if config.grpc is None else config.grpc.port,
            "access": Entrance(
                **{name: getattr(config, name) for name in Access.model_fields},
                tls_cert=listen.tls_cert,
                tls_key=listen.tls_key,
            ),
            "log_json": (gateway.logging_config or whole.logging_config or {}).get("encoding") == "JSON",
            "encrypt": config.encrypt,
            "hangs_s": hangs_s,
            "scheduler": config.scheduler.name,
            "scheduler_options": config.scheduler.options,
            "gateway_options": Options(**{name: getattr(config, name) for name in Options.model_fields}),
            "gateways": gateway.num_replicas,
            "dispatchers": config.dispatchers if cut else cls.model_fields["dispatchers"].default,
            "nodes": -(-gateway.num_replicas // gateway.max_replicas_per_node) if gateway.max_replicas_per_node else 1,
            "partition": cut if cut and (gateway.num_replicas == 1 or set(cut.values()) != {0}) else None,
            "control": None if settings == _OFF else settings,
            "offline": config.offline,
        }
        return parse_document(cls, fields, origin=origin)

    @property
    def feeds_dispatchers(self) -> bool:
        """Whether dispatchers are processes of their own, to which gateways send requests."""
        return self.gateways > 1 or self.partition is not None

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"{'http' if self.access.tls_cert is None else 'https'}://{self.host}:{self.port}"

    @property
    def operator_url(self) -> str:
        """The URL for operators: it has a port of its own, or it is the clients' URL."""
        return self.url if self.operators_at == 0 else f"http://127.0.0.1:{self.operators_at}"

    @property
    def proxies_at(self) -> int:
        """The port of Serve's proxies."""
        return self.proxy_port or _beside(self.port, 1)

    @property
    def operators_at(self) -> int:
        """The port for operators; 0: none."""
        return _beside(self.port, 2) if self.operator_port is None else self.operator_port

    def setting(self, name: str) -> Any:
        """Return a setting as it is in effect: ports that are left open follow the first one, and the controller is
        off."""
        control = _OFF if self.control is None else self.control
        effects = {"proxy_port": self.proxies_at, "operator_port": self.operators_at, "control": control}
        return effects[name] if name in effects else getattr(self, name)

    def leaves_open(self, name: str) -> bool:
        """Whether nobody has said what a setting is to be."""
        return name not in self.model_fields_set or (name, getattr(self, name)) in _OPEN

    def left_open_as(self, running: Deployment, kept: Collection[str] = ()) -> Deployment:
        """Return this deployment in place of the one that runs: with `kept` as it runs, and what is left open too, if
        only a new start can change it. `kept` may name a part of `access`, such as `access.keys`. Another number of
        nodes would restart all processes."""
        parts = {name.removeprefix("access.") for name in kept if name.startswith("access.")}
        open_to_it = (*UNCHANGEABLE, "partition", "control", "name")
        names = {*kept, "nodes", *(name for name in open_to_it if self.leaves_open(name))}
        as_now = running.with_plan(self.plan)
        update = {name: getattr(as_now, name) for name in names if "." not in name}
        if parts:
            update["access"] = self.access.model_copy(update={name: getattr(running.access, name) for name in parts})
        return self.model_copy(update=update)

    def with_plan(self, plan: Plan) -> Deployment:
        """Return the same deployment of another plan. When the partition does not fit the plan, a new one is made."""
        partition = self.partition
        if partition is not None and plan.models and not fits_plan(plan, partition):
            partition = parted(plan, partition)
        return self.model_copy(update={"plan": plan, "partition": partition})

    def near(self, plan: Plan) -> Deployment:
        """Return the same deployment of another plan for the same workload: the declared workload stays."""
        return self.with_plan(plan).model_copy(update={"workload": self.workload or self.plan.workload})

    def config(
        self, plan: Plan | None = None, *, also: Mapping[str, int] | None = None, standby: Sequence[Gpulet] = ()
    ) -> ServeConfig:
        """Return the applications of this deployment on Serve.

        Args:
            plan: the plan to route by, if not the deployment's own.
            also: a second partition, while models move from one to the other: dispatchers then hold the models that
                they have in either.
            standby: idle gpu-lets beside the plan's; schedulers keep connected to them.

        Raises:
            InvalidInputError: the partition leaves out a model of the plan or cuts a gpu-let in two, the gateways would
                be open to others without keys, or a gpu-let on several GPUs would run on torch.
        """
        plan = plan or self.plan
        gateways = max(1, self.gateways)
        cut = cut_plan(plan, self.partition, also=also) if self.feeds_dispatchers else {}
        options = {
            "scheduler": {"name": self.scheduler, "options": self.scheduler_options},
            **self.gateway_options.model_dump(exclude_defaults=True),
            **({"encrypt": True} if self.encrypt else {}),
        }
        gateway = {"plan": plan, **({"name": self.name} if self.name else {}), **options, **self._sockets()}
        if cut:
            gateway["sub_clusters"] = {name: self._names_in(name, part) for name, part in cut.items()}
            gateway["dispatchers"] = self.dispatchers
        elif standby:
            gateway["standby"] = [gpulet.id for gpulet in standby]
        if self.offline is not None:
            gateway["offline"] = self.offline
        processes = plan.processes()
        entry = parse_document(GatewayConfig, gateway, origin="user_config of the gateway")
        return ServeConfig(
            entry=ServeApplication(
                ENTRY_APPLICATION,
                "gateway",
                "tenuto.deployments.entry.gateway",
                entry,
                processes=gateways,
                most_per_node=self._most_per_node(gateways),
                most_ongoing=100_000,
            ),
            dispatchers=tuple(
                ServeApplication(
                    dispatcher_name(name),
                    "dispatcher",
                    "tenuto.deployments.dispatch.dispatcher_process",
                    DispatcherConfig.model_validate({"plan": part, **options, **_standby_of(part, standby)}),
                    processes=self.dispatchers,
                    most_per_node=self._most_per_node(self.dispatchers),
                    health_period_s=0.5,
                )
                for name, part in cut.items()
            ),
            gpulets=tuple(self._gpulet(plan, gpulet, processes[gpulet.id]) for gpulet in plan.gpulets),
            control=self._control(),
            proxy_port=self.proxies_at,
            log_json=self.log_json,
            offline=None if self.offline is None else self._store(entry),
        )

    def _store(self, entry: GatewayConfig) -> ServeApplication[GatewayConfig]:
        # On Serve's own head node, as the controller: the folder is there.
        config = entry.model_copy(update={"listen": None, "operators": None, "grpc": None, "traces": None})
        module, actor = "tenuto.deployments.offline.store_process", ActorOptions(HEAD_NODE)
        return ServeApplication(OFFLINE_APPLICATION, "offline", module, config, actor=actor)

    def _sockets(self) -> dict[str, Any]:
        """Return the settings of the gateways' sockets, and of access to them."""
        access = self.access.model_dump(exclude_defaults=True)
        tls = {key: access.pop(key) for key in ("tls_cert", "tls_key") if key in access}
        sockets: dict[str, Any] = {**access, "listen": {"host": self.host, "port": self.port, **tls}}
        if self.grpc_port:
            sockets["grpc"] = {"host": self.host, "port": self.grpc_port, **tls}
        if self.operators_at != 0:
            sockets["operators"] = {"host": "127.0.0.1", "port": self.operators_at}
        return sockets

    def _names_in(self, sub_cluster: str, part: Plan) -> list[str]:
        """Return the models for which gateways send requests to a sub-cluster."""
        partition = self.partition
        return [s.name for s in part.models if partition is None or str(partition[s.name]) == sub_cluster]

    def _most_per_node(self, processes: int) -> int | None:
        return -(-processes // self.nodes) if self.nodes > 1 and processes > 1 else None

    def _gpulet(self, plan: Plan, gpulet: Gpulet, process: GpuletProcess) -> ServeApplication[GpuletConfig]:
        on_torch = self.executor == "torch" or (self.executor == "auto" and process.uuid is not None)
        if process.also_on and on_torch:
            rule = "the torch executor runs a model on one GPU"
            cure = (
                "Plan with a profile without step times for several GPUs (tensor_parallel), on GPUs that hold the "
                "model, or emulate."
            )
            raise refused(f"gpulets.{gpulet.id}.also_on", ", ".join(process.also_on), rule, cure)
        return ServeApplication(
            application_name(gpulet.id),
            "gpulet",
            "tenuto.deployments.gpulet.replica",
            GpuletConfig(
                programs=tuple(_entry(plan, p) for p in gpulet.programs), hangs_s=self.hangs_s, encrypt=self.encrypt
            ),
            spec=GpuletSpec(
                gpulet=gpulet.id,
                gpu=Placed(id=process.gpu, type=process.gpu_type, uuid=process.uuid, instance=process.instance),
                share_pct=process.share_pct,
                memory_mib=process.memory_mib,
                executor=self.executor,
                mps=process.mps,
                cuda_mps=process.cuda_mps,
                streaming=process.streaming,
                also_on=process.also_on,
            ),
            actor=_actor_options(process),
        )

    def _control(self) -> ServeApplication[ControlConfig]:
        # On Serve's own head node: so the controller survives the loss of any other node and acts at once.
        config, actor = ControlConfig(settings=self.setting("control")), ActorOptions(HEAD_NODE)
        return ServeApplication(
            CONTROL_APPLICATION, "control", "tenuto.deployments.control.controller_process", config, actor=actor
        )


def fitting_gateways(cores: int, gpulets: int) -> int:
    """Return the default number of gateways.

    When there is a core for each of their processes and for each gpu-let, it is two: the death of one gateway then only
    costs the requests that it had. Otherwise it is one, with the dispatcher in its process, because on fewer cores two
    gateways serve less than one.
    """
    return 2 if cores >= _CORES_OF_TWO + gpulets else 1


def _usual(socket: Listen | None, usual: int) -> int | None:
    """Return the port of a socket if it is not the usual one; None: it is the usual one; 0: there is no socket."""
    if socket is None:
        return 0
    return None if socket.port == usual else socket.port


def _beside(port: int, steps: int) -> int:
    return port + steps if port + steps <= 65535 else port - steps  # format: ports of TCP


def _standby_of(part: Plan, standby: Sequence[Gpulet]) -> dict[str, list[str]]:
    """Return the setting `standby` of a sub-cluster's dispatcher, with the idle gpu-lets of its models; else
    nothing."""
    models = {spec.name for spec in part.models}
    ids = [gpulet.id for gpulet in standby if models & {replica.name for replica in gpulet.models}]
    return {"standby": ids} if ids else {}


def _actor_options(process: GpuletProcess) -> ActorOptions:
    """Return where Ray starts a gpu-let. The real share is in the environment; Ray's ledger gets one small slot.

    Ray packs fractions GPU by GPU, so uneven shares that fit the GPUs might not fit Ray's ledger. If slots depended on
    the number of gpu-lets, every gpu-let that comes or goes would restart its neighbours. Equal constant slots avoid
    both.
    """
    if process.gpu_type == "cpu":
        return ActorOptions(process.node)
    environment: dict[str, str] = {}
    if process.uuid is not None:
        environment["CUDA_VISIBLE_DEVICES"] = process.uuid
        if process.cuda_mps:
            # CUDA reads these variables only once, when the process first uses CUDA.
            environment |= client_environment(process.uuid, process.share_pct, process.memory_mib)
    return ActorOptions(process.node, _LEDGER_SLOT, tuple(environment.items()))


def _source(spec: ModelSpec) -> str | None:
    """Return where a network comes from; None where a model without versions has its name in the catalogue."""
    return spec.source if spec.name == spec.model else spec.network


def _entry(plan: Plan, program: Program) -> ProgramEntry:
    specs = [plan.model(name) for name in program.models]
    members = tuple(
        MemberEntry(name=spec.name, source=_source(spec), weights_path=spec.weights_path, options=spec.options)
        for spec in specs
    )
    first = None if program.is_joint else program.members[0]
    return ProgramEntry(
        name=program.name,
        batch_size=program.batch_size if first is None else first.largest_batch,
        members=members,
        latency=program.latency,
        by_size=() if first is None else first.by_size,
        pads=first is None or first.pads,
        slowdown=program.slowdown,
        weights_mib=program.weights_mib,
        copy_in_ms=None if first is None else first.copy_in_ms,
        copy_out_ms=None if first is None else first.copy_out_ms,
        generates=None if first is None else _generates(specs[0], first),
    )


def _generates(spec: ModelSpec, replica: Replica) -> GeneratesEntry | None:
    """Return how a model of its own gpu-let generates; None for one that does not.

    Raises:
        InvalidInputError: the plan does not say how much memory its sequences have.
    """
    if spec.generates is None:
        return None
    if replica.kv_tokens is None:
        cure = "Plan it again, or give the tokens whose keys and values it has memory for."
        raise refused(f"{spec.name}.kv_tokens", None, "is not in the plan of a model that generates", cure)
    return GeneratesEntry(
        kv_tokens=replica.kv_tokens,
        block_tokens=replica.block_tokens,
        longest_context=replica.longest_context,
        max_sequences=spec.generates.max_sequences,
        max_batch_tokens=spec.generates.max_batch_tokens,
        steps=replica.steps,
    )
