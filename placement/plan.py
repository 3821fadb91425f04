"""The plan: which models run on which share of which GPU, with which batch size, and with which expected goodput.

All policies make plans of one schema. Plans are immutable and comparable. A plan carries all that serving and
simulating need (sources, SLOs, latencies), so that neither reads the workload or the profiles again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from tenuto.documents import SCHEMA, SchemaVersion, StrictModel, dump_yaml, load_document, parse_document
from tenuto.errors import one_of, raise_if_any, refused
from tenuto.placement.application import Application
from tenuto.placement.cluster import Gpu, InstancePlace, Placed
from tenuto.placement.program import Gpulet, MergedGroup, Replica
from tenuto.placement.rules import layout_problems, plan_problems, room_problems
from tenuto.placement.versions import split_problems
from tenuto.placement.workload import ModelSpec, MpsUse, Objective, Workload
from tenuto.profiles.gpu_types import GPU_TYPES, memory_mib_of, price_of


class PolicyUsed(StrictModel):
    """The policy that made the plan, with its options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class PlannedGpu(Placed):
    """A GPU or MIG instance of the plan. Its gpu-lets run on the node with the IP `address` or the label `label`; when
    both are None, they run on any node. `memory_mib` is None where the GPU has the memory of its type."""

    memory_mib: Annotated[float, Field(gt=0)] | None = None

    @classmethod
    def of(cls, gpu: Gpu) -> PlannedGpu:
        """Return the plan's entry for a GPU of the cluster."""
        planned = cls(**gpu.model_dump(exclude={"memory_mib", "price_per_hour", "spot", "whole_mib"}))
        usual = gpu.memory_mib in (0.0, memory_mib_of(gpu.type))
        return planned if usual else planned.model_copy(update={"memory_mib": gpu.memory_mib})

    @property
    def known_mib(self) -> float | None:
        """The memory in MiB; None where neither the plan nor the type tells it."""
        return self.memory_mib or memory_mib_of(self.type)

    @property
    def as_gpu(self) -> Gpu:
        """This GPU with its memory, and the price of its type; raises `InvalidInputError` if its memory is unknown."""
        if self.known_mib is None:
            cure = f"Give its memory_mib there, or another type. {one_of(self.type, GPU_TYPES, 'Known types:')}"
            raise refused(f"gpus.{self.id}.type", self.type, "is no known type, and its memory is not given", cure)
        return Gpu(**self.model_dump() | {"memory_mib": self.known_mib, "price_per_hour": price_of(self.type)})


class ExpectedModel(StrictModel):
    """What the plan promises for one model: the requests per second in time, and the batch latency of its slowest
    replica."""

    goodput_rps: float
    latency_ms: float | None = None


class Believed(StrictModel):
    """What the policy that made the plan expects of it: the goodput and the latencies by the policy's own formulas."""

    goodput_rps: float = 0.0
    models: dict[str, ExpectedModel] = Field(default_factory=dict)


class ExpectedLoss(StrictModel):
    """What the plan promises while one GPU, node or rack is lost and everything else runs: the requests per second in
    time of the models that must be spread or must survive the loss."""

    domain: str  # such as `node n1`
    goodput_rps: dict[str, float]


class Expected(StrictModel):
    """What the plan promises as a whole, by the same model for every policy (`tenuto.placement.expectation`).

    `cost_per_hour` is None if a GPU type in use has no price. `assumptions` say when the effect of a share, of
    neighbours or of waiting is not measured but comes from a model, and from which. `losses` has an entry for each GPU,
    node or rack whose loss concerns a model with `spread` or `survive`.
    """

    goodput_rps: float = 0.0
    gpus_used: int = 0
    cost_per_hour: float | None = None
    models: dict[str, ExpectedModel] = Field(default_factory=dict)
    losses: tuple[ExpectedLoss, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def price(self) -> float:
        """What the GPUs cost an hour, or how many they are when a price is not known: plans are compared by it."""
        return self.gpus_used if self.cost_per_hour is None else self.cost_per_hour


@dataclass(frozen=True)
class GpuletProcess:
    """The settings of a gpu-let that cannot change while its process runs.

    When the gpu-let of a new plan has the same settings, its process goes on, and everything else changes in place.
    `node` is the address or the label of the node; None means any node. `cuda_mps` says that the process joins the
    CUDA MPS daemon of its GPU. A plan can name this daemon only if the GPU is bound to hardware. A MIG instance of a
    GPU that plans may cut gets another UUID whenever it is made. It is found by its place, and `uuid` is None.
    `also_on` names the GPUs of the node that it uses beside the first one.
    """

    gpu: str
    gpu_type: str
    uuid: str | None
    instance: InstancePlace | None
    node: str | None
    share_pct: float | None
    memory_mib: float | None
    mps: MpsUse
    cuda_mps: bool
    streaming: bool
    also_on: tuple[str, ...] = ()


class Plan(StrictModel):
    """The decision of a policy, complete and immutable."""

    schema_version: SchemaVersion = SCHEMA
    policy: PolicyUsed
    gpus: tuple[PlannedGpu, ...] = ()
    gpulets: tuple[Gpulet, ...] = ()
    drained: tuple[str, ...] = ()  # nodes, racks or GPUs that hold no gpu-lets and get none until they are undrained
    expected: Expected = Expected()
    believed: Believed | None = None  # what the policy expects by its own formulas; None: it states nothing
    unserved: tuple[str, ...] = ()
    unserved_reasons: dict[str, str] = Field(default_factory=dict)  # also for models that are served only in part
    idle: dict[str, float] = Field(default_factory=dict)  # unserved as nobody asks them: seconds of a new start
    notes: tuple[str, ...] = ()  # which constraint was reached, what was given up, whether GPUs are over-committed
    models: tuple[ModelSpec, ...] = ()  # the workload's entries, for serving and simulation
    applications: tuple[Application, ...] = ()  # applications; their stages are among the models
    mps: MpsUse = "auto"
    streaming: bool = False
    objective: Objective = "weighted"
    overcommits: bool = False  # whether the shares of a GPU may add up to more than 100 % on purpose

    @property
    def workload(self) -> Workload:
        """The workload of the plan, as far as the plan records it."""
        fields = {name: getattr(self, name) for name in ("models", "applications", "objective", "mps", "streaming")}
        return Workload.model_validate(fields)

    def model(self, name: str) -> ModelSpec:
        """Return the workload entry of a model; KeyError if the plan does not know it."""
        for spec in self.models:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def on_gpu(self, gpu_id: str) -> tuple[Gpulet, ...]:
        """Return the gpu-lets of one GPU, with those that lie on it among others."""
        return tuple(gpulet for gpulet in self.gpulets if gpu_id in gpulet.gpus)

    def by_gpu(self) -> dict[str, list[Gpulet]]:
        """Return the gpu-lets of each GPU by its id; an idle GPU has none. One that lies on several GPUs is there on
        each.

        It goes over the plan only once, as plans may have thousands of GPUs.
        """
        gpulets_of: dict[str, list[Gpulet]] = {gpu.id: [] for gpu in self.gpus}
        for gpulet in self.gpulets:
            for gpu in gpulet.gpus:
                gpulets_of.setdefault(gpu, []).append(gpulet)
        return gpulets_of

    @property
    def used_gpus(self) -> tuple[str, ...]:
        """The GPUs and instances that hold gpu-lets, each once, in the order of the gpu-lets."""
        return tuple(dict.fromkeys(gpu for gpulet in self.gpulets for gpu in gpulet.gpus))

    def processes(self) -> dict[str, GpuletProcess]:
        """Return the process of each gpu-let, by the id of the gpu-let."""
        gpus, held = {gpu.id: gpu for gpu in self.gpus}, self.by_gpu().items()
        placed = [(name, g, process) for name, gpulets in held for g, process in self.processes_on(gpus[name], gpulets)]
        joins = {g.id for _, g, process in placed if process.cuda_mps}
        return {g.id: replace(process, cuda_mps=g.id in joins) for name, g, process in placed if name == g.gpu}

    def processes_on(self, gpu: PlannedGpu, gpulets: Sequence[Gpulet]) -> list[tuple[Gpulet, GpuletProcess]]:
        """Return what the processes of gpu-lets would be if they shared a GPU, which may be outside the plan.

        When MPS is `required`, all processes use it. When it is `auto`, they use it if the GPU has shares or several
        gpu-lets. Either all gpu-lets of a GPU use it or none: a process outside would take turns with all those inside.
        """
        needs_mps = self.mps == "required" or (
            self.mps == "auto" and (len(gpulets) > 1 or any(g.effective_share_pct < 100.0 for g in gpulets))
        )
        by_place = gpu.mig == "managed" and gpu.instance is not None and gpu.instance.gpu_uuid is not None
        joins = needs_mps and (gpu.uuid is not None or by_place) and gpu.type != "cpu"
        uuid, node = None if by_place else gpu.uuid, gpu.address or gpu.label
        place, how = (gpu.id, gpu.type, uuid, gpu.instance, node), (self.mps, joins, self.streaming)
        return [(g, GpuletProcess(*place, g.share_pct, g.memory_mib, *how, g.also_on)) for g in gpulets]

    def devices(self, gpu_ids: Iterable[str]) -> tuple[str, ...]:
        """Return the physical GPUs of some GPUs and MIG instances of the plan, each once, in the order of the plan."""
        ids = {*gpu_ids}
        return tuple(dict.fromkeys(gpu.device for gpu in self.gpus if gpu.id in ids))

    def hosts_of(self, model: str) -> tuple[Gpulet, ...]:
        """Return the gpu-lets on which a model is resident."""
        return tuple(g for g in self.gpulets if any(replica.name == model for replica in g.models))

    def to_data(self) -> dict[str, Any]:
        """Return the plan as plain data, with keys in the order of the file format."""
        data = self.model_dump(mode="json", by_alias=True)
        for gpu in data["gpus"]:
            _drop(gpu, address=None, label=None, rack=None, mig=None, instance=None, memory_mib=None)
            if "instance" in gpu:
                _drop(gpu["instance"], gpu_uuid=None)
        for gpulet in data["gpulets"]:
            _drop(gpulet, also_on=[], memory_mib=None, duty_cycle_ms=None, merge=[])
            for group in gpulet.get("merge", ()):
                _drop(group, **_DEFAULTS[MergedGroup])
            for replica in gpulet["models"]:
                _drop(replica, **_DEFAULTS[Replica] | {"by_size": []})
                for each in replica.get("by_size", ()):
                    _drop(each, interpolated=False)
        _drop(data, drained=[], streaming=False, objective="weighted", overcommits=False, believed=None)
        _drop(data["expected"], assumptions=[], losses=[])
        data["models"] = [m.model_dump(mode="json", exclude_defaults=True, exclude_none=True) for m in self.models]
        return data

    def dump(self) -> str:
        """Return the plan as YAML. `Plan.load` of the text gives an equal plan."""
        return dump_yaml(self.to_data())

    @classmethod
    def from_data(cls, data: Any, *, origin: str = "plan", is_whole: bool = True) -> Plan:
        """Validate plain data: a bare plan, or a Serve config that carries one.

        Args:
            data: as read from a file.
            origin: what the paths of problems begin with.
            is_whole: it has all versions of its models and fits its GPUs, as the part of a sub-cluster or a stage of a
                change need not.

        Raises:
            InvalidInputError: with every problem found.
        """
        if isinstance(data, dict) and "applications" in data and "policy" not in data:
            data = _plan_in_serve_config(data, origin)
        if isinstance(data, dict) and "models" in data and not data.keys() & {"policy", "gpulets"}:
            rule, cure = "is a workload and no plan", "Make a plan of it with `tenuto plan`."
            raise refused(origin, None, rule, cure)
        plan = parse_document(cls, data, origin=origin)
        plan.check_references(origin)
        if is_whole:
            memory = {gpu.id: gpu.known_mib for gpu in plan.gpus}
            how: dict[str, Any] = {"overcommits": plan.overcommits, "unrestricted_pct": 0.0, "origin": origin}
            room = room_problems(plan.by_gpu(), memory, **how)
            raise_if_any([*split_problems(plan.models, f"{origin}: "), *room])
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file, bare or inside a Serve config; raises `InvalidInputError` with every problem found."""
        return cls.from_data(load_document(path), origin=str(path))

    def check_references(self, origin: str = "plan") -> None:
        """Raise `InvalidInputError` with every rule that the gpu-lets break; see `tenuto.placement.rules`."""
        types = {gpu.id: gpu.type for gpu in self.gpus}
        problems = layout_problems(self.gpus, origin)
        raise_if_any([*problems, *plan_problems(types, self.gpulets, self.models, origin)])


def _read(value: Any) -> Any:
    return value if isinstance(value, Plan) else Plan.from_data(value, is_whole=False)


# A plan as a field of another schema. The data of that schema contain it as `Plan.to_data` makes it.
PlanField = Annotated[Plan, BeforeValidator(_read), PlainSerializer(Plan.to_data)]


# What a plan file leaves out of its replicas and groups.
_DEFAULTS = {
    part: {name: field.default for name, field in part.model_fields.items() if not field.is_required()}
    for part in (Replica, MergedGroup)
}


def _drop(data: dict[str, Any], **defaults: Any) -> None:
    for key, default in defaults.items():
        if data.get(key) == default:
            del data[key]


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    yield from (each for each in value if isinstance(each, dict)) if isinstance(value, list) else ()


def _plan_in_serve_config(config: dict[str, Any], origin: str) -> Any:
    for application in _mappings(config.get("applications")):
        for deployment in _mappings(application.get("deployments")):
            user_config = deployment.get("user_config")
            if isinstance(user_config, dict) and "plan" in user_config:
                return user_config["plan"]
    cure = "Write it with `tenuto plan … -o plan.yaml`."
    raise refused(f"{origin}: applications", "(Serve config)", "carries no Tenuto plan", cure)
