"""The settings that Serve hands to our processes, as strict schemas. An unknown key is refused with its path and a
cure, before anything is applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_serializer, model_validator

from tenuto.batching.core.build import from_plan
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.registry import check_offline, make_scheduler
from tenuto.deployments.process.limits import GENERATIONS_END_S, REQUESTS_END_S
from tenuto.deployments.security.keys import KeyEntry, read_keys
from tenuto.deployments.serve.executor_choice import ExecutorChoice
from tenuto.documents import Fault, StrictModel, parse_document
from tenuto.errors import refused
from tenuto.outcome import ATTAINED
from tenuto.placement import Plan
from tenuto.placement.cluster import Placed
from tenuto.placement.plan import PlanField
from tenuto.placement.program import SizedLatency
from tenuto.profiles.generation import BLOCK_TOKENS, StepCost, pairs_of
from tenuto.profiles.latency import LatencyField
from tenuto.profiles.networks.catalogue import GenerationLimits

C = TypeVar("C", bound="DispatcherConfig")


_LAST_S = 2.0  # limit: for what a process does after its last answer


class UserConfig(StrictModel):
    """Base of settings that change in place, without a restart."""

    @property
    def generates(self) -> bool:
        """Whether generations may be under way when the process is told to end."""
        return False

    @property
    def ends_s(self) -> float:
        """How long Serve waits for the process to end before it kills it."""
        return (GENERATIONS_END_S if self.generates else 0.0) + REQUESTS_END_S + _LAST_S

    def to_data(self) -> dict[str, Any]:
        """Return the settings as plain data, in the form that Serve passes on."""
        return self.model_dump(mode="json", exclude_defaults=True)


# --- gpu-lets ---------------------------------------------------------------------------------------------------------


class GpuletSpec(StrictModel):
    """`args` of a gpu-let's application: settings that only a restart can change.

    `gpu` is where it runs; without a `uuid` and with a place on a real GPU, the MIG instance that is there when the
    process starts. `cuda_mps`: whether the process joins the CUDA MPS daemon of its GPU. `also_on`: the
    GPUs beside `gpu` on which it has the same share.
    """

    gpulet: str
    gpu: Placed
    share_pct: Annotated[float, Field(gt=0, le=100)] | None = None
    memory_mib: Annotated[float, Field(gt=0)] | None = None
    executor: ExecutorChoice = "auto"
    mps: Literal["off", "auto", "required"] = "auto"
    cuda_mps: bool = False
    streaming: bool = False
    also_on: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _of_one_gpu(self, handler: Any) -> Any:
        """Leave `also_on` out where it is empty, as for most gpu-lets."""
        data = handler(self)
        if not self.also_on:
            data.pop("also_on", None)
        return data


class MemberEntry(StrictModel):
    """One model of a program: where it comes from, and how it is built and run."""

    name: str
    source: str | None = None
    weights_path: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class GeneratesEntry(StrictModel):
    """How a generative model runs. Its sequences have memory for `kv_tokens` tokens, in blocks of `block_tokens`; at
    most `max_sequences` make tokens at a time, and a step runs at most `max_batch_tokens`. A prompt with its answer has
    at most `longest_context` tokens (None: as many as the model's positions reach). `steps`: what they cost on
    this share without neighbours; an emulated GPU takes its times from this."""

    kv_tokens: Annotated[int, Field(ge=1)]
    block_tokens: Annotated[int, Field(ge=4)] = BLOCK_TOKENS
    max_sequences: Annotated[int, Field(ge=1)] = 256
    max_batch_tokens: Annotated[int, Field(ge=1)] = 2048
    longest_context: Annotated[int, Field(ge=1)] | None = None
    steps: StepCost | None = None

    @property
    def blocks(self) -> int:
        """The whole blocks of the memory."""
        return self.kv_tokens // self.block_tokens

    @property
    def longest_step_ms(self) -> float:
        """What a full step costs whose sequences fill the memory; 0 where nobody knows what steps cost."""
        if self.steps is None:
            return 0.0
        decoding = min(self.max_sequences, self.max_batch_tokens - 1)
        pairs = pairs_of(self.max_batch_tokens - decoding, self.kv_tokens)
        return self.steps.ms(self.max_batch_tokens - decoding, decoding, self.kv_tokens, pairs)

    def limits(self, longest: int | None, vocabulary: int, refuses: Mapping[str, str]) -> GenerationLimits:
        """Return what a sequence may be, of a model with so many positions (None: without end) and tokens, whose
        generator `refuses` these fields."""
        room = self.blocks * self.block_tokens
        longest = min((most for most in (longest, self.longest_context) if most is not None), default=room)
        if longest < room:
            return GenerationLimits(longest, vocabulary, "the model's positions", refuses)
        return GenerationLimits(room, vocabulary, "the memory for its keys and values", refuses)


class ProgramEntry(StrictModel):
    """A program that a gpu-let loads: one or more models that run as one. One that `generates` is alone in its gpu-let.

    `latency` is l(b) of the program on this share without neighbours; `slowdown` (>= 1) is the factor by neighbours.
    `copy_in_ms` and `copy_out_ms` are ms per request. An emulated GPU takes its times from these. `weights_mib` is the
    size of the profiled weights, if it is known. `by_size` and `pads`: as in `Replica`.
    """

    name: str
    batch_size: Annotated[int, Field(ge=1)]
    members: Annotated[tuple[MemberEntry, ...], Field(min_length=1)]
    latency: LatencyField | None = None
    by_size: tuple[SizedLatency, ...] = ()
    pads: bool = True
    slowdown: Annotated[float, Field(ge=1)] = 1.0
    weights_mib: float | None = None
    copy_in_ms: Annotated[float, Field(ge=0)] | None = None
    copy_out_ms: Annotated[float, Field(ge=0)] | None = None
    generates: GeneratesEntry | None = None

    def loads_as(self, other: ProgramEntry) -> bool:
        """Whether a program that generates is loaded the same, whatever is expected of it."""

        def loaded(entry: ProgramEntry) -> ProgramEntry:
            generates = None if entry.generates is None else entry.generates.model_copy(update={"steps": None})
            return entry.model_copy(update={"slowdown": 1.0, "weights_mib": None, "generates": generates})

        return loaded(self) == loaded(other)


# Chosen, not measured: neighbours and busy processors never delay a batch that much, and a client who retries still
# meets the new process.
HANGS_S = 10.0  # limit: after which a batch counts as hanging, unless a deployment says otherwise
HANGS_TIMES = 20.0  # limit: and it must have taken this many times its program's longest planned batch


class GpuletConfig(UserConfig):
    """`user_config` of a gpu-let: settings that can change without a restart. `encrypt`: as in `DispatcherConfig`.

    When a batch has been on the device for `hangs_s` and for `HANGS_TIMES` its program's planned latency, it hangs: the
    gpu-let ends, and Serve starts it again.
    """

    programs: tuple[ProgramEntry, ...]
    hangs_s: Annotated[float, Field(gt=0)] = HANGS_S
    encrypt: bool = False

    @property
    def generates(self) -> bool:
        """Whether one of its programs does."""
        return any(program.generates is not None for program in self.programs)


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
        """Whether only this machine reaches the socket."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"{'http' if self.tls_cert is None else 'https'}://{self.host}:{self.port}"


class TracesConfig(StrictModel):
    """Where spans go. `endpoint`: the URL of a collector that speaks OTLP over HTTP, such as
    http://127.0.0.1:4318/v1/traces.

    `ratio`: share of the requests without a `traceparent` that are traced. A `traceparent` says itself whether its
    request is traced.
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://")]
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


class Options(StrictModel):
    """Limits of gateways and dispatchers. `max_queued`: requests of one program that may wait.

    `max_body_mib`: largest body of one request; `max_unfinished_mib`: all bodies of requests that are not answered.
    `response_ms`: time kept of every deadline for the way beyond the socket (default: 8 % of the SLO, at most 2 ms).
    `attainment`: the share of requests that should be in time; it steers the margin before deadlines.
    """

    max_queued: Annotated[int, Field(ge=1)] = 10_000
    max_body_mib: Annotated[int, Field(ge=1, le=4096)] = 64
    max_unfinished_mib: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    max_connections: Annotated[int, Field(ge=1)] = 4096
    response_ms: Annotated[float, Field(ge=0)] | None = None
    attainment: Annotated[float, Field(gt=0, lt=1)] = ATTAINED


class DispatcherConfig(Options, UserConfig):
    """`user_config` of a dispatcher in a process of its own.

    `standby`: gpu-lets that are not in the plan but may be in the next one; they are connected but not used. `encrypt`:
    traffic between nodes is encrypted. (Traffic inside a node never leaves the machine.)
    """

    plan: PlanField
    standby: tuple[str, ...] = ()
    scheduler: SchedulerChoice = SchedulerChoice()
    encrypt: bool = False

    def to_data(self) -> dict[str, Any]:
        """Return the settings as plain data. Settings that were given are written even if they are the defaults, so
        that a plan file shows its scheduler and addresses."""
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def generates(self) -> bool:
        """Whether one of the plan's models does."""
        return any(spec.generates is not None for spec in self.plan.models)

    def build_scheduler(self, plan: Plan, network: NetworkDelay) -> Scheduler:
        """Return the scheduler core of a plan."""
        return make_scheduler(self.scheduler.name, from_plan(plan, network), self.scheduler.options)


class Access(StrictModel):
    """Who may send requests, and where traces of them go. `insecure`: other machines may connect without keys.

    `key_file`: more keys, in a file that every gateway reads on its own node, such as a Secret of Kubernetes.
    `host_names`: further names of this server, when it is bound to this machine and asks for no key. The machine's own
    names are known. A web page that lets another name point here (DNS rebinding) is refused.
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


class OfflineOptions(StrictModel):
    """The store of batches. `path`: its folder on the node of Ray's head.

    `max_file_mib`: largest file; `max_held_mib` and `max_files`: all files of a key, and their number; `max_lines`:
    lines of a key's batches that are not over. `under_way`: lines that are asked at a time, of all batches.
    `keep_days`: how long files stay, and batches that are over.
    """

    path: Annotated[str, Field(min_length=1)]
    max_file_mib: Annotated[int, Field(ge=1)] = 2048
    max_held_mib: Annotated[int, Field(ge=1)] = 16_384
    max_files: Annotated[int, Field(ge=1)] = 10_000
    max_lines: Annotated[int, Field(ge=1)] = 1_000_000
    under_way: Annotated[int, Field(ge=1, le=4096)] = 64
    keep_days: Annotated[int, Field(ge=1, le=36_500)] = 30


class GatewayConfig(Access, DispatcherConfig):
    """`user_config` of the gateways. `name`: the name of the deployment.

    `listen`: the gateways' own socket; without it there is no HTTP for clients.
    `sub_clusters`: names and models of sub-clusters whose dispatchers are other processes; empty if the gateway
    schedules by itself.
    `dispatchers`: processes of each sub-cluster; all but one wait to take over.

    `operators`: a socket for status, metrics and the live page. When clients are other people than the operators (there
    are `keys`, or `listen.host` is open to other machines), `listen` answers none of these.
    `grpc`: a socket for the Open Inference Protocol over gRPC.
    `offline`: the store of batches, to which the gateways let clients through; its process has this document, too.
    """

    name: str = ""
    listen: Listen | None = None
    operators: Listen | None = None
    grpc: Listen | None = None
    sub_clusters: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    dispatchers: Annotated[int, Field(ge=1)] = 1
    offline: OfflineOptions | None = None

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
        """Whether clients are other people than the operators: they have keys, or come from other machines."""
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
        InvalidInputError: lists every problem. A key file without keys is one, as it would let in everybody.
    """
    config = _checked(parse_document(GatewayConfig, dict(raw), origin="user_config of the gateway"))
    keys = config.keys if config.key_file is None else (*config.keys, *read_keys(config.key_file))
    if not keys and config.key_file is not None:
        raise refused("key_file", config.key_file, "holds no keys", "Make one with `tenuto key NAME`.")
    check_offline(config.scheduler.name, [f"the key {entry.name}" for entry in keys if entry.offline])
    return config if config.key_file is None else config.model_copy(update={"keys": keys})


def _checked(config: C) -> C:
    config.build_scheduler(config.plan, NetworkDelay())  # refuses unknown schedulers and options, and impossible SLOs
    check_offline(config.scheduler.name, [spec.name for spec in config.plan.models if spec.offline])
    return config
