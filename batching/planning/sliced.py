"""A start of policy `tenuto`: GPUs that it may cut into MIG instances, see `tenuto.batching.planning.cutting`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tenuto.batching.planning.cutting import SPARER, CutGpus, CutModel, Cutting, FilledInstance, Layout
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Policy, Replica, Workload
from tenuto.placement.cluster import Gpu
from tenuto.placement.costs import context_mib_of, costs_of
from tenuto.placement.policies.shared.gpu_pool import GpuPool
from tenuto.placement.policies.shared.hosting import Hosted, hosting_plan
from tenuto.profiles import Profiles
from tenuto.profiles.mig_instances import instance_profiles

AT_MOST = 2.0  # limit: times as many GPUs as a flow needs; where even these do not serve all, more would not
STEP = 50  # limit: GPUs are added by a fiftieth of them, so that thousands take no longer than some


@dataclass(kw_only=True, eq=False)
class Sliced(Policy):
    """So many GPUs cut into MIG instances, with processes in which models take turns."""

    name = "GPUs cut into MIG instances"
    summary = source = "a start of policy tenuto"
    gpus: int = 1
    spare: float = 1.0
    keeps: bool = False  # what is cut now, as far as it goes

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan; models that no instance serves in time go unserved.

        Raises:
            InvalidInputError: nothing that was measured in an instance fits.
        """
        slicing = Slicing(workload, cluster, profiles)
        cut = slicing.on(self.gpus, self.spare, keeps=self.keeps)
        if cut is None:
            raise InvalidInputError("no model fits into a MIG instance. Profile in instances, or raise the SLOs.")
        return slicing.plan(cut)


def ways_to_slice(workload: Workload, cluster: Cluster, profiles: Profiles) -> Iterator[Sliced]:
    """Yield what may be tried, on an elastic cluster the fewest GPUs first; nothing where no GPU may be cut, or no
    model was measured in an instance. One that carries less than all rates comes on a fixed cluster only."""
    try:
        slicing = Slicing(workload, cluster, profiles)
    except InvalidInputError:
        return
    each_carries = slicing.cutting.flow(1.0)
    if each_carries <= 0.0:
        return
    cut_now = (True, False) if slicing.now else (False,)
    if not cluster.elastic:
        for keeps in cut_now:
            yield from (Sliced(gpus=slicing.available, spare=spare, keeps=keeps) for spare in SPARER)
        return
    fewest = max(1, math.ceil(1.0 / each_carries - 1e-6))
    for gpus in range(fewest, math.ceil(AT_MOST * fewest) + 1, max(1, fewest // STEP)):
        for keeps in cut_now:
            for spare in SPARER:
                cut = slicing.on(gpus, spare, keeps=keeps)
                if cut is not None and cut.part >= 1.0:
                    yield Sliced(gpus=gpus, spare=spare, keeps=keeps)


class Slicing:
    """A workload on those GPUs of a cluster that plans may cut, of the first type with profiles in instances."""

    def __init__(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> None:
        """Look up what models cost in instances.

        Raises:
            InvalidInputError: no GPU may be cut, or no model was measured in an instance of one.
        """
        self._workload, self._present, self._cluster = workload, cluster, cluster.uncut
        by_type = {gpu.type: gpu for gpu in reversed(self._cluster.gpus) if gpu.mig == "managed"}
        for self._kind, example in reversed(by_type.items()):
            sizes = {name: example.cut(name, size.starts[0]) for name, size in instance_profiles(self._kind).items()}
            names = {gpu.type: name for name, gpu in sizes.items()}
            costs = costs_of(workload, Cluster.of(sizes.values()), profiles)
            context_mib = context_mib_of(example.type, profiles)
            models = [
                CutModel(
                    spec.name,
                    spec.rate_rps,
                    spec.slo_ms,
                    {names[kind]: on for kind, on in costs[spec.name].items()},
                    context_mib,
                )
                for spec in workload.models
            ]
            able = [model for model in models if any(model.best(size, model.slo_ms) for size in sizes)]
            if able:
                room = {name: gpu.memory_mib for name, gpu in sizes.items()}
                self.cutting = Cutting(able, instance_profiles(self._kind), room, context_mib)
                self._placed = self._cut_now()
                layouts = (self.cutting.like(size for size, _ in placed) for placed in self._placed.values())
                self.now = Counter(layout for layout in layouts if layout is not None)
                return
        raise InvalidInputError("no GPU may be cut, or no model was measured in a MIG instance of one.")

    @property
    def available(self) -> int:
        """How many GPUs of a fixed cluster may be cut."""
        return sum(gpu.type == self._kind and gpu.mig == "managed" for gpu in self._cluster.gpus)

    def on(self, gpus: int, spare: float, *, keeps: bool) -> CutGpus | None:
        """Return so many GPUs cut and filled, see `Cutting.on`; with `keeps` what is cut now stays so."""
        evens_out = self._workload.objective == "each"
        return self.cutting.on(gpus, spare, self.now if keeps else None, evens_out=evens_out)

    def _cut_now(self) -> dict[str, Layout]:
        """Return the instances of every GPU that is cut and may be cut anew."""
        found: dict[str, list[tuple[str, int]]] = {}
        for gpu in self._present.gpus:
            mig = gpu.cut_as
            if gpu.instance is not None and mig is not None and gpu.mig == "managed" and mig.base == self._kind:
                found.setdefault(gpu.device, []).append((mig.profile, gpu.instance.start))
        return {device: tuple(sorted(placed, key=lambda each: each[1])) for device, placed in found.items()}

    def plan(self, cut: CutGpus) -> Plan:
        """Return the plan of GPUs that are cut and filled. What is cut already as it should be stays so."""
        waiting: dict[str, list[FilledInstance]] = {}
        for instance in reversed(cut.instances):
            waiting.setdefault(instance.size, []).append(instance)
        hosted: list[Hosted] = []
        for gpu, layout in self._laid(cut.layouts):
            for size, start in layout:
                if waiting.get(size):
                    hosted += _hosted(gpu.cut(size, start), waiting[size].pop())
        served = {name for instance in cut.instances for name in instance.rates_rps}
        late = "in no MIG instance that has memory for it is a request within its SLO"
        reasons = {spec.name: late for spec in self._workload.models if spec.name not in served}
        several = any(instance.processes > 1 for instance in cut.instances)
        return hosting_plan(Sliced.name, self._workload, self._cluster, hosted, reasons, overcommits=several)

    def _laid(self, layouts: Mapping[Layout, int]) -> Iterable[tuple[Gpu, Layout]]:
        """Yield the GPUs with their layouts: those first that are cut in this way now, with their own starts."""
        pool, left = GpuPool(self._cluster), Counter(layouts)
        for device, placed in self._placed.items():
            layout = self.cutting.like(size for size, _ in placed)
            taken = pool.take_named(device, self._kind) if layout is not None and left[layout] else None
            if layout is not None and taken is not None:
                left[layout] -= 1
                yield taken, placed
        for layout in left.elements():
            another = pool.take(self._kind)
            if another is not None:
                yield another, layout


def _hosted(place: Gpu, instance: FilledInstance) -> Iterator[Hosted]:
    """Yield the processes of an instance, each with an equal part of every model's rate there."""
    count, ways = instance.processes, instance.ways
    replicas = [
        Replica.believed(name, ways[name].batch_size, rate / count, ways[name].latency_ms)
        for name, rate in instance.rates_rps.items()
    ]
    for _ in range(count):
        yield Hosted(place, None, replicas)
