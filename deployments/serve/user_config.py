"""What Serve hands our processes, as strict schemas: an unknown key is refused with its path and a cure before anything
is applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import make_scheduler
from tenuto.deployments.security.keys import KeyEntry, read_keys
from tenuto.documents import Fault, StrictModel, parse_document
from tenuto.errors import refused
from tenuto.placement import Plan
from tenuto.placement.plan import PlanField
from tenuto.profiles.latency import LatencyField

C = TypeVar("C", bound="DispatcherConfig")


class UserConfig(StrictModel):
    """What changes in place."""

    def to_data(self) -> dict[str, Any]:
        """Return it as Serve passes it on."""
        return self.model_dump(mode="json", exclude_defaults=True)


# --- gpu-lets ---------------------------------------------------------------------------------------------------------


class GpuOfGpulet(StrictModel):
    """The GPU a gpu-let is on; see `PlannedGpu`."""

    id: str
    type: str
    uuid: str | None = None


class GpuletSpec(StrictModel):
    """`args` of a gpu-let's application: what only a restart can change.

    `cuda_mps`: whether the process joins the CUDA MPS daemon of its GPU.
    """

    gpulet: str
    gpu: GpuOfGpulet
    share_pct: Annotated[float, Field(gt=0, le=100)] | None = None
    memory_mib: Annotated[float, Field(gt=0)] | None = None
    executor: Literal["auto", "torch", "emulated"] = "auto"
    mps: Literal["off", "auto", "required"] = "auto"
    cuda_mps: bool = False
    streaming: bool = False


class MemberEntry(StrictModel):
    """One model of a program: where it comes from, and how it is built and run."""

    name: str
    source: str | None = None
    weights_path: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class ProgramEntry(StrictModel):
    """What a gpu-let loads: one or more models that run as one program.

    `latency` is l(b) of the program alone on this share, `slowdown` (>= 1) what the neighbours cost on top, the copies
    are ms of one request: what an emulated GPU goes by. `weights_mib` are those of its profile, if they are known.
    """

    name: str
    batch_size: Annotated[int, Field(ge=1)]
    members: Annotated[tuple[MemberEntry, ...], Field(min_length=1)]
    latency: LatencyField | None = None
    slowdown: Annotated[float, Field(ge=1)] = 1.0
    weights_mib: float | None = None
    copy_in_ms: Annotated[float, Field(ge=0)] | None = None
    copy_out_ms: Annotated[float, Field(ge=0)] | None = None


# Chosen, not measured: far above what neighbours and busy processors make of a batch, and short enough that a client
# who retries meets the new process.
HANGS_S = 10.0  # limit: unless a deployment says otherwise
HANGS_TIMES = 20.0  # limit: times the longest batch


class GpuletConfig(UserConfig):
    """`user_config` of a gpu-let: all that can change without a restart. `encrypt`: as of `DispatcherConfig`.

    A batch that has been with the device for `hangs_s`, and for `HANGS_TIMES` of what its program is planned to take,
    never comes back: the gpu-let ends and Serve starts another.
    """

    programs: tuple[ProgramEntry, ...]
    hangs_s: Annotated[float, Field(gt=0)] = HANGS_S
    encrypt: bool = False


def read_gpulet_config(raw: Mapping[str, Any], gpulet: str) -> GpuletConfig:
    """Read the `user_config` of a gpu-let; raises `InvalidInputError` with every problem found."""
    return parse_document(GpuletConfig, dict(raw), origin=f"user_config of gpu-let {gpulet}")


# --- gateways and dispatchers -----------------------------------------------------------------------------------------


class SchedulerChoice(StrictModel):
    """A batching scheduler by name, with its options."""

    name: str = "deferred"
    options: dict[str, Any] = Field(default_factory=dict)


class Listen(StrictModel):
    """The address and port of a socket of the gateways. Gateways of one node share it.

    `tls_cert`, `tls_key`: PEM files on the gateway's node; with them the socket speaks TLS.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)]
    tls_cert: str | None = None
    tls_key: str | None = None

    @model_validator(mode="after")
    def _both_files(self) -> Listen:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise Fault("has one of tls_cert and tls_key", "Give both, or neither.")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def url(self) -> str:
        """What clients call it."""
        return f"{'http' if self.tls_cert is None else 'https'}://{self.host}:{self.port}"


class TracesConfig(StrictModel):
    """Where spans go. `endpoint`: of a collector that speaks OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.

    `ratio`: share of the requests without a `traceparent` that are traced; those with one say so themselves.
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://")]
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


class Options(StrictModel):
    """How gateways and dispatchers serve. `max_queued`: requests of one program that may wait.

    `max_body_mib`: of one request; `max_unfinished_mib`: of all requests that are not answered. `response_ms`: kept of
    every deadline for what happens beyond the socket (default: 8 % of the SLO, at most 2 ms). `attainment`: the
    share of requests that should be in time, which steers the margin before deadlines.
    """

    max_queued: Annotated[int, Field(ge=1)] = 10_000
    max_body_mib: Annotated[int, Field(ge=1, le=4096)] = 64
    max_unfinished_mib: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    max_connections: Annotated[int, Field(ge=1)] = 4096
    response_ms: Annotated[float, Field(ge=0)] | None = None
    attainment: Annotated[float, Field(gt=0, lt=1)] = 0.99


class DispatcherConfig(Options, UserConfig):
    """`user_config` of a dispatcher in a process of its own.

    `standby`: gpu-lets that the plan lacks and may have next: connected, and not used. `encrypt`: what goes from node
    to node is encrypted; inside of a node nothing leaves the machine.
    """

    plan: PlanField
    standby: tuple[str, ...] = ()
    scheduler: SchedulerChoice = SchedulerChoice()
    encrypt: bool = False

    def to_data(self) -> dict[str, Any]:
        """Return it as Serve passes it on; a plan file says its scheduler and addresses also where they are usual."""
        return self.model_dump(mode="json", exclude_unset=True)

    def build_scheduler(self, plan: Plan, network: NetworkDelay) -> Scheduler:
        """Return the scheduler core of a plan."""
        return make_scheduler(self.scheduler.name, from_plan(plan, network), self.scheduler.options)


class Access(StrictModel):
    """Who may ask, and who is told of it. `insecure`: be reached from elsewhere without keys.

    `key_file`: more keys, in a file that every gateway reads on its own node, such as a Secret of Kubernetes.
    `host_names`: what clients may call this server, where it is bound to this machine and asks for no key; names of the
    machine itself are known. Whoever else's page lets its name point here (DNS rebinding) is refused.
    """

    keys: tuple[KeyEntry, ...] = ()
    key_file: str | None = None
    insecure: bool = False
    host_names: tuple[str, ...] = ()
    traces: TracesConfig | None = None


class Entrance(Access):
    """Access to a whole deployment, with the certificate of its gateways' socket; see `Listen`."""

    tls_cert: str | None = None
    tls_key: str | None = None


class GatewayConfig(Access, DispatcherConfig):
    """`user_config` of the gateways. `name`: of the deployment.

    `listen`: their own socket; without it only Serve's proxies lead here.
    `sub_clusters`: names and models of the dispatchers in other processes; empty where the gateway schedules itself.
    `dispatchers`: of each of them; all but one wait for its death.

    `operators`: a socket of their own for status, metrics and the live page. Where clients are others than whoever runs
    this (`keys`, or a `listen.host` beyond this machine) nothing of that is answered on `listen`.
    `grpc`: a socket for the Open Inference Protocol over gRPC.
    """

    name: str = ""
    listen: Listen | None = None
    operators: Listen | None = None
    grpc: Listen | None = None
    sub_clusters: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    dispatchers: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _exposed_only_with_keys(self) -> GatewayConfig:
        if self.insecure:
            return self
        for name, where in (("listen", self.listen), ("grpc", self.grpc), ("operators", self.operators)):
            if where is None or where.is_loopback:
                continue
            if name == "operators":
                raise Fault(
                    f"operators.host is {where.host}: whoever reaches that port sees every request's id and the plan",
                    "Bind it to 127.0.0.1 and let a proxy ask for a login, or set insecure: true (--insecure).",
                )
            if not self.keys and self.key_file is None:
                raise Fault(
                    f"{name}.host is {where.host}, and there are no keys: anybody who reaches it may ask",
                    "Make keys with `tenuto key NAME` and give their file with --keys, or set insecure: true "
                    "(--insecure).",
                )
        return self

    @property
    def is_shared_with_clients(self) -> bool:
        """Whether clients are others than whoever runs this: they are known by keys, or reach it from elsewhere."""
        is_open = any(each is not None and not each.is_loopback for each in (self.listen, self.grpc))
        return bool(self.keys or self.key_file) or is_open


class ControlConfig(UserConfig):
    """`user_config` of the controller. `settings`: see `tenuto.deployments.control.settings.ControlSettings`."""

    settings: dict[str, Any]


def read_dispatcher_config(raw: Mapping[str, Any]) -> DispatcherConfig:
    """Read the `user_config` of a dispatcher; raises `InvalidInputError` with every problem found."""
    return _checked(parse_document(DispatcherConfig, dict(raw), origin="user_config of the dispatcher"))


def read_gateway_config(raw: Mapping[str, Any]) -> GatewayConfig:
    """Read the `user_config` of the gateways and the keys in its `key_file`.

    Raises:
        InvalidInputError: with every problem found; also where the key file has no key, as that would let in everybody.
    """
    config = _checked(parse_document(GatewayConfig, dict(raw), origin="user_config of the gateway"))
    if config.key_file is None:
        return config
    keys = (*config.keys, *read_keys(config.key_file))
    if not keys:
        raise refused("key_file", config.key_file, "holds no keys", "Make one with `tenuto key NAME`.")
    return config.model_copy(update={"keys": keys})


def _checked(config: C) -> C:
    config.build_scheduler(config.plan, NetworkDelay())  # unknown schedulers, options, SLOs that cannot be met
    return config
