"""The status of what runs, for operators and the controller: every key of `GET /status` and of the reports between our
processes. Each is defined once and read by attribute.

Reports go from dispatchers to gateways as MessagePack, from gateways and the controller over Ray's handles, and to
operators as JSON. Every receiver reads them as these types. Keys may be added but not renamed; tests compare the JSON
with its earlier shape. Times are Unix time in seconds (`_at_s`); the names of durations and delays have their unit. A
count only grows as long as the process lives that counts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tenuto.batching.core.scheduler_status import SchedulerStatus
from tenuto.mps.others import OtherProcess
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.profiles.networks.catalogue import ModelSignature


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the types: all fields by name."""


# --- models -----------------------------------------------------------------------------------------------------------


class Buckets(msgspec.Struct, frozen=True):
    """A histogram: upper bounds, the count of values up to each bound, one more count for values above the last bound,
    and the sum of all values."""

    le: list[float] = []
    counts: list[int] = []
    sum: float = 0.0


class OutcomeCounts(msgspec.Struct, kw_only=True):
    """Requests that ended, by outcome."""

    ok: int = 0
    late: int = 0
    expired: int = 0
    rejected: int = 0
    failed: int = 0

    @property
    def by_outcome(self) -> dict[str, int]:
        """The requests that ended, by outcome."""
        ends = (self.ok, self.late, self.expired, self.rejected, self.failed)
        return dict(zip(OUTCOMES, ends, strict=True))

    @property
    def ended(self) -> int:
        """The requests that ended."""
        return self.ok + self.bad

    @property
    def bad(self) -> int:
        """The requests that ended but not in time."""
        return self.late + self.expired + self.rejected + self.failed

    def count(self, outcome: Outcome) -> None:
        """Count a request that ended so."""
        setattr(self, outcome.word, getattr(self, outcome.word) + 1)


class SizeCounts(OutcomeCounts, kw_only=True):
    """The requests of one size class of a model, by outcome. `sizes`: the largest of the class, by name; None: of
    requests that no class covers, or of a model that is planned for one size.

    Elements are tokens, pixels or samples: the product of a request's sizes. `input_elements` were in requests that
    were sent to gpu-lets, and `computed_elements` are those with what their batches were padded with.
    """

    sizes: dict[str, int] | None = None
    input_elements: int = 0
    computed_elements: int = 0

    @property
    def padding(self) -> float | None:
        """The part of the computed elements that was padding; None if nothing was sent."""
        return 1.0 - self.input_elements / self.computed_elements if self.computed_elements else None

    def __str__(self) -> str:
        return "other" if self.sizes is None else ",".join(f"{name}={size}" for name, size in self.sizes.items())


class RequestCounts(OutcomeCounts, kw_only=True):
    """The requests of one model or application by outcome since its dispatcher or its gateways started.

    `submitted` requests were asked for; they ended `ok`, `late`, `expired`, `rejected` or `failed`, or their client
    went away (`cancelled`). A request may ask for several samples: `samples` were asked for, and `inferences` ran.
    `failed_ms` is the time from arrival to refusal, summed over refused requests, `last_ms` when the last answer left
    (Unix time in ms).
    """

    submitted: int = 0
    cancelled: int = 0
    samples: int = 0
    inferences: int = 0
    failed_ms: float = 0.0
    last_ms: int = 0
    slo_ms: float = 0.0
    rate_rps: float = 0.0

    @property
    def under_way(self) -> int:
        """The requests that have not ended."""
        return self.submitted - self.ended - self.cancelled


class ModelCounts(RequestCounts, kw_only=True):
    """The requests of one model, and what the plan expects of the model.

    `batches` and `batched` samples were sent to gpu-lets, and `queued` wait for a batch now. Planned figures are None
    where the plan expects nothing. Its dispatcher counts in it. `share_pct` and `shadow`: what a version is sent of its
    model's requests. `prompt_tokens` and `generated_tokens`: those of generations that were answered;
    `written_tokens`: all that came, whatever becomes of their generation. `by_size`: of a model whose requests vary in
    size, its size classes, smallest first.
    """

    counted_at_s: float = 0.0
    batches: int = 0
    batched: int = 0
    mean_batch: float | None = None
    execution_p50_ms: float | None = None
    planned_goodput_rps: float | None = None
    planned_latency_ms: float | None = None
    queued: int = 0
    share_pct: float | None = None
    shadow: bool = False
    prompt_tokens: int = 0
    generated_tokens: int = 0
    written_tokens: int = 0
    by_size: list[SizeCounts] = []  # msgspec copies defaults


class OfflineCounts(RequestCounts, kw_only=True):
    """The offline requests of one model, which count in no other figure of it. `queued` wait, and `generated_tokens`
    are those of generations that ended. `gpu_s`: their part of the time of batches and steps."""

    queued: int = 0
    generated_tokens: int = 0
    gpu_s: float = 0.0


class ModelStatus(ModelCounts, kw_only=True):
    """Counts with distributions of executed requests, in seconds: from arrival to answer, the wait for a batch, the
    wait at the gpu-let, and the execution. Of generations `ttft_s` is arrival to first token, and `tpot_s` the mean
    time of each further one. `proxy_s` is the time before a proxy in front, if it says when requests began. `offline`:
    None while the model was asked for nothing offline."""

    latency_s: Buckets = Buckets()
    batching_s: Buckets = Buckets()
    gpulet_queue_s: Buckets = Buckets()
    execution_s: Buckets = Buckets()
    batch_sizes: Buckets = Buckets()
    ttft_s: Buckets = Buckets()
    tpot_s: Buckets = Buckets()
    proxy_s: Buckets | None = None
    offline: OfflineCounts | None = None

    def counts(self) -> ModelCounts:
        """Return the counts without the distributions."""
        return ModelCounts(**{name: getattr(self, name) for name in ModelCounts.__struct_fields__})


class ApplicationStatus(RequestCounts, kw_only=True):
    """Counts with distributions of answered requests, in seconds: from arrival to answer, and of each stage from when
    it was due to its last answer. `lost_at`: requests that ended without an answer at each stage."""

    latency_s: Buckets = Buckets()
    stage_s: dict[str, Buckets] = {}  # msgspec copies defaults
    lost_at: dict[str, int] = {}

    def counts(self) -> RequestCounts:
        """Return the counts without the distributions."""
        return RequestCounts(**{name: getattr(self, name) for name in RequestCounts.__struct_fields__})

    def as_model(self) -> ModelStatus:
        """Return the same counts as those of a model that runs no batches."""
        counts = {name: getattr(self, name) for name in RequestCounts.__struct_fields__}
        return ModelStatus(**counts, latency_s=self.latency_s)


# --- gpu-lets ---------------------------------------------------------------------------------------------------------


class GpuletMode(msgspec.Struct, frozen=True):
    """How a gpu-let runs: whether CUDA MPS holds it to its share, whether copies overlap with execution, and how each
    program runs (`plain`, `compile`, `cuda_graphs`, `merged`, `single graphs`, … or `emulated`).

    Share and streaming, each on or off, are the four modes of the thesis' dispatcher."""

    share: bool
    streaming: bool
    programs: dict[str, str]

    def __str__(self) -> str:
        words = [word for word, is_on in (("share", self.share), ("streaming", self.streaming)) if is_on]
        words += sorted(set(self.programs.values()) - {"plain", "emulated"})
        return ", ".join(words) or "plain"


class MpsStatus(_Told, frozen=True, kw_only=True):
    """What CUDA MPS gave a gpu-let: the GPU's UUID, the SMs of the share and of the GPU, CUDA's memory cap, and how the
    attachment was proved. `others`: processes outside CUDA MPS that were on the GPU at the start. `xids`: Xid errors
    since then. None: not known."""

    uuid: str
    sm_count: int | None = None
    gpu_sm_count: int | None = None
    memory_limit: str | None = None
    proof: str | None = None
    others: list[OtherProcess] | None = None
    xids: list[int] | None = None


class RunningBatch(msgspec.Struct, frozen=True):
    """A batch that a gpu-let has not answered yet."""

    program: str
    batch_size: int


class GpuletStatus(_Told, frozen=True, kw_only=True):
    """One gpu-let: what is planned, what it reported when it connected, and what its dispatcher counts of it.

    `models`: the largest batch of every program it holds. `merged`: figures of merging, by program. `busy_s`: measured
    time of its batches; `predicted_s`: planned time of its batches. `lost`: how often its connection ended.
    `slowdown`: measured over planned latency of recent batches, by program. `generating`: its open generations.
    `free_blocks` of `blocks` is the memory that none of them held after the last step, `waiting` how many of them held
    none, and `preempted` how often one has lost its own. `also_on` are the GPUs beside `gpu` that it lies on. Fields
    that only the gpu-let knows are None or empty before it connects.
    """

    id: str
    up: bool = False
    gpu: str = ""
    share_pct: float | None = None
    gpulet: str = ""
    pid: int | None = None
    device: str | None = None
    emulated: bool = False
    memory_mib: float | None = None
    memory_cap_mib: float | None = None
    sm_count: int | None = None
    mode: GpuletMode | None = None
    cuda_mps: MpsStatus | None = None
    models: dict[str, int] = {}
    merged: dict[str, dict[str, float]] = {}
    signatures: dict[str, ModelSignature] = {}
    node_id: str = ""
    busy_s: float = 0.0
    predicted_s: float = 0.0
    batches: int = 0
    lost: int = 0
    running: list[RunningBatch] = []
    slowdown: dict[str, float] = {}
    generating: int = 0
    free_blocks: int | None = None
    blocks: int = 0
    waiting: int = 0
    preempted: int = 0
    also_on: tuple[str, ...] = ()


# --- dispatchers ------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True):
    """An event, for people: when, what and why."""

    at_s: float
    what: str
    why: str


class NetworkStatus(msgspec.Struct, frozen=True):
    """Delays that the scheduler budgets: to a gpu-let, for each request's data, and for the way back."""

    ctrl_ms: float
    data_ms_per_request: float
    response_ms: float


class Tokens(msgspec.Struct, frozen=True):
    """What became of a generation: tokens of its prompt and of its answer, when the first one came after its arrival,
    and the mean time of each further one."""

    prompt: int
    generated: int
    ttft_ms: float
    tpot_ms: float


class StageRecord(msgspec.Struct, frozen=True):
    """What became of a stage of an application's request: when it was due and complete, in ms after the request came,
    and how many requests it made."""

    begin_ms: float
    end_ms: float
    requests: int


class EndedRequest(_Told, frozen=True, kw_only=True):
    """A request that ended. Times are ms after `received_at_s`; a time that no clock of this node tells is None. When
    the request was refused or late, `rule` says what refused it, and `loop` which loop could have saved it, if one
    could. `sizes`: of a model whose requests vary, in the order of its signature. `stages`: those of an application's
    request that are complete."""

    id: str
    model: str
    sizes: tuple[int, ...] | None = None
    outcome: str
    gpulet: str | None = None
    batch_size: int = 0
    received_at_s: float
    dispatched_ms: float | None = None
    start_ms: float | None = None
    end_ms: float | None = None
    answered_ms: float
    reason: str | None = None
    rule: str | None = None
    loop: str | None = None
    tokens: Tokens | None = None
    stages: dict[str, StageRecord] | None = None


class _Dispatched(_Told, frozen=True, kw_only=True):
    """The fields of dispatchers in every status. `scheduler` is only set when there is just one scheduler."""

    policy: str | None = None
    gpulets: list[GpuletStatus] = []
    network: NetworkStatus | None = None
    scheduler: SchedulerStatus | None = None
    schedulers: list[SchedulerStatus] = []
    events: list[Event] = []


class DispatchingStatus(_Dispatched, frozen=True, kw_only=True):
    """The report of one dispatcher, or of all of them as one. `plan` is plain data; None before the first plan."""

    plan: dict[str, Any] | None = None
    models: dict[str, ModelStatus] = {}


# --- gateways and their nodes -----------------------------------------------------------------------------------------


class MarginStatus(msgspec.Struct, frozen=True):
    """The margin: the time that a gateway keeps of deadlines for late timers and busy processors, and its cost."""

    margin_ms: float
    late_share: float
    refused_for_margin: int


class FrontDoorStatus(msgspec.Struct, frozen=True):
    """A gateway's sockets: connections, bytes of unanswered requests, requests turned away by reason, and how often an
    unknown key was shown."""

    connections: int
    unfinished_bytes: int
    turned_away: dict[str, int]
    wrong_keys: int = 0


class GatewayStatus(_Told, frozen=True, kw_only=True):
    """One gateway; it gets a new `id` with every start. `dispatchers`: connected dispatchers by sub-cluster."""

    id: str
    started_at_s: float
    margin: MarginStatus
    front_door: FrontDoorStatus
    dispatchers: dict[str, int] = {}


class Served(_Told, frozen=True, kw_only=True):
    """What a Python handle must know to send requests as a gateway does: the plan as plain data, the models of every
    sub-cluster (empty when gateways schedule by themselves), and how many dispatchers each sub-cluster has."""

    plan: dict[str, Any]
    sub_clusters: dict[str, tuple[str, ...]]
    dispatchers: int


class DeviceStatus(_Told, frozen=True, kw_only=True):
    """A GPU of a gateway's node, in base units. A figure that its driver does not tell is None."""

    uuid: str
    name: str
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    utilization_ratio: float | None = None
    power_watts: float | None = None
    sm_clock_hertz: float | None = None
    temperature_celsius: float | None = None
    xid_errors: int = 0


class GatewayReport(_Told, frozen=True, kw_only=True):
    """What a gateway tells the other gateways of itself. `proxied`: the wait before a proxy, by model. `asked_rps`:
    requests per second by key. `devices`: the GPUs of its node. `applications`: its counts of their requests. `ended`:
    those that ended since its last report; the dispatcher takes them into its log."""

    gateway: GatewayStatus
    applications: dict[str, ApplicationStatus] = {}
    ended: list[EndedRequest] = []
    proxied: dict[str, Buckets] = {}
    asked_rps: dict[str, float] = {}
    devices: list[DeviceStatus] = []


# --- the controller ---------------------------------------------------------------------------------------------------


class LogLine(msgspec.Struct, frozen=True):
    """An entry of the controller's log: its kind, a text for people, and the figures behind it. `reached`: for the
    entry that ends a change, whether the plan was reached; None for all others. `version`: when a new version runs
    since this entry, the reason for the history; else None. `number`: of the desired deployment that it speaks of."""

    at_s: float
    kind: str
    text: str
    data: dict[str, Any] = {}
    reached: bool | None = None
    version: str | None = None
    number: int = 0


class ChangeStatus(msgspec.Struct, frozen=True):
    """A change that is under way."""

    why: str
    begun_at_s: float


class ControllerState(_Told, frozen=True, kw_only=True):
    """The state of the controller. `rates_rps`: measured rates by model; `planned_for_rps`: the rates of the present
    plan; `slowdowns`: measured over profiled latency by program; `cutting`: MIG instances of the plan, and whole GPUs,
    that have to be cut yet; `sought`: why a plan for a changed workload is sought, empty when none is; `obstacle`: what
    forbids any change now, empty when nothing does; `is_settled`: the gateways follow the plan, and nothing runs beyond
    it; `number`: of the desired deployment that this state speaks of; `missing_gpus`: asked of Ray's autoscaler and not
    there yet, by type; `late_gpus`: types given up for a while, as they did not come; `unused_nodes`: why the GPUs of
    nodes that joined are not used."""

    mode: str = ""
    paused: bool = False
    change: ChangeStatus | None = None
    policy: str = ""
    rates_rps: dict[str, float] = {}
    planned_for_rps: dict[str, float] = {}
    slowdowns: dict[str, float] = {}
    cutting: list[str] = []
    sought: str = ""
    obstacle: str = ""
    is_settled: bool = True
    number: int = 0
    missing_gpus: dict[str, int] = {}
    late_gpus: list[str] = []
    unused_nodes: dict[str, str] = {}

    @property
    def awaits(self) -> str:
        """What is under way for a changed workload or plan, in words. Empty when nothing comes by itself, and Serve has
        the plan, not a stage on the way to it."""
        if self.change is not None:
            return self.change.why
        if not self.is_settled and not self.cutting:  # a GPU that cannot be cut stays so
            return "the gateways follow the plan, and what it lacks ends"
        return "" if self.obstacle else self.sought

    @property
    def gpu_notes(self) -> list[str]:
        """What is wrong with GPUs that come and go, in words."""
        missing = ", ".join(f"{kind} {count}" for kind, count in self.missing_gpus.items())
        notes = [f"GPUs asked for and not there yet: {missing}"] if missing else []
        if self.late_gpus:
            notes.append(
                f"GPUs that did not come in time, so plans do without more of them: {', '.join(self.late_gpus)}"
            )
        return [*notes, *(f"{node} joined and is not used: {why}" for node, why in self.unused_nodes.items())]


class ControllerStatus(ControllerState, frozen=True, kw_only=True):
    """The state with the number of decisions of each kind since the controller started, and its log, newest first."""

    decisions: dict[str, int] = {}
    log: list[Event] = []


class OfflineStatus(msgspec.Struct, frozen=True):
    """The store of batches: the bytes of its files, the batches that are not over and their lines without an answer,
    and the answers of all lines. `problem`: why nothing is asked now."""

    bytes: int = 0
    open_batches: int = 0
    waiting: int = 0
    completed: int = 0
    failed: int = 0
    problem: str = ""


class Beside(msgspec.Struct, frozen=True):
    """What Serve runs beside the gateways: the controller's status, or, without a controller, the applications of
    gpu-lets; and the status of the store of batches, where there is one."""

    controller: ControllerStatus | None = None
    gpulets: frozenset[str] = frozenset()
    offline: OfflineStatus | None = None


# --- all of it --------------------------------------------------------------------------------------------------------


class WatchedStatus(_Dispatched, frozen=True, kw_only=True):
    """The status of a whole system for operators: the sum of the gateways' counts and the largest of their margins.
    `strays`: applications that hold GPUs but are in no plan; a controller ends them itself."""

    gateways: list[GatewayStatus] = []
    margin: MarginStatus | None = None
    front_door: FrontDoorStatus | None = None
    started_at_s: float = 0.0
    devices: list[DeviceStatus] = []
    version: str = ""
    uptime_s: float = 0.0
    controller: ControllerStatus | None = None
    strays: list[str] = []
    offline: OfflineStatus | None = None


class SystemStatus(WatchedStatus, frozen=True, kw_only=True):
    """The document at `GET /status`. Its key `models` tells it from any other document. `cluster`: the address of its
    Ray cluster; empty without one."""

    plan: dict[str, Any] | None = None
    models: dict[str, ModelStatus]
    applications: dict[str, ApplicationStatus] = {}
    cluster: str = ""

    @property
    def drained(self) -> list[str]:
        """The drained nodes, racks and GPUs, which must hold nothing."""
        return msgspec.convert(self.plan or {}, _PlanKeys).drained

    @property
    def idle(self) -> dict[str, float]:
        """The idle models, and the seconds that a start of each takes."""
        return msgspec.convert(self.plan or {}, _PlanKeys).idle


class _PlanKeys(msgspec.Struct):
    """The keys of a plan that are read here."""

    drained: list[str] = []
    idle: dict[str, float] = {}
