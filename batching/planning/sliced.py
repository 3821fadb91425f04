"""A start of policy `tenuto`: GPUs that it may cut into MIG instances, see `tenuto.batching.planning.cutting`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from tenuto.batching.planning.cutting import SPARER, CutGpus, CutModel, Cutting, Layout
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Plan, Policy, Workload
from tenuto.placement.cluster import Gpu
from tenuto.placement.policies.shared.mig_cutting import CuttableGpus, FilledInstance, cuttable_kinds
from tenuto.profiles import Profiles

AT_MOST = 2.0  # limit: times as many GPUs as a flow needs; where even these do not serve all, more would not
STEP = 50  # fitted: GPUs are added by a fiftieth of them, so that thousands take no longer than some


class Sliced(Policy):
    """So many GPUs cut into MIG instances, with processes in which models take turns."""

    name = "GPUs cut into MIG instances"
    summary = source = "a start of policy tenuto"

    def __init__(self, slicing: Slicing, gpus: int, spare: float, now: Mapping[Layout, int] | None) -> None:
        """Take the workload on the GPUs that may be cut, how many of these to cut, and the rest of `Cutting.on`."""
        self.gpus, self._slicing, self._spare, self._now = gpus, slicing, spare, now

    @cached_property
    def cut(self) -> CutGpus | None:
        """The GPUs, cut and filled; None where nothing that was measured in an instance fits."""
        return self._slicing.cutting.on(self.gpus, self._spare, self._now, evens_out=self._slicing.evens_out)

    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan for the workload and the cluster of `slicing`; models that no instance serves in time go
        unserved.

        Raises:
            InvalidInputError: nothing that was measured in an instance fits.
        """
        del workload, cluster, profiles
        if self.cut is None:
            raise InvalidInputError("no model fits into a MIG instance. Profile in instances, or raise the SLOs.")
        return self._slicing.plan(self.cut)


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
    cut_now = (slicing.now, None) if slicing.now else (None,)
    if not cluster.elastic:
        yield from (Sliced(slicing, slicing.available, spare, now) for now in cut_now for spare in SPARER)
        return
    fewest = max(1, math.ceil(1.0 / each_carries - 1e-6))
    for gpus in range(fewest, math.ceil(AT_MOST * fewest) + 1, max(1, fewest // STEP)):
        for way in (Sliced(slicing, gpus, spare, now) for now in cut_now for spare in SPARER):
            if way.cut is not None and way.cut.part >= 1.0:
                yield way


class Slicing:
    """A workload on those GPUs of a cluster that plans may cut, of the first type with profiles in instances."""

    def __init__(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> None:
        """Look up what models cost in instances.

        Raises:
            InvalidInputError: no GPU may be cut, or no model was measured in an instance of one.
        """
        for kind in cuttable_kinds(cluster):
            self._gpus = CuttableGpus(kind, workload, cluster, profiles)
            models = [CutModel(model) for model in self._gpus.models]
            able = [model for model in models if any(model.best(size, model.slo_ms) for size in self._gpus.sizes)]
            if able:
                self.cutting = Cutting(self._gpus, able)
                self._placed = _cut_now(cluster, kind)
                layouts = (self.cutting.like(size for size, _ in placed) for placed in self._placed.values())
                self.now = Counter(layout for layout in layouts if layout is not None)
                self.evens_out = workload.objective == "each"
                return
        raise InvalidInputError("no GPU may be cut, or no model was measured in a MIG instance of one.")

    @property
    def available(self) -> int:
        """How many GPUs of a fixed cluster may be cut."""
        return int(self._gpus.pool.left(self._gpus.kind))

    def plan(self, cut: CutGpus) -> Plan:
        """Return the plan of GPUs that are cut and filled. A GPU that is already cut as it should be stays so."""
        waiting: dict[str, list[FilledInstance]] = {}
        for instance in reversed(cut.instances):
            waiting.setdefault(instance.size, []).append(instance)
        filled = (
            (gpu, [(start, waiting[size].pop()) for size, start in layout if waiting.get(size)])
            for gpu, layout in self._laid(cut.layouts)
        )
        served = {name for instance in cut.instances for name in instance.rates_rps}
        late = "in no MIG instance that has memory for it is a request within its SLO"
        reasons = {model.spec.name: late for model in self._gpus.models if model.spec.name not in served}
        return self._gpus.plan(Sliced.name, filled, reasons)

    def _laid(self, layouts: Mapping[Layout, int]) -> Iterable[tuple[Gpu, Layout]]:
        """Yield the GPUs with their layouts: those first that are cut in this way now, with their own starts."""
        pool, kind, left = self._gpus.pool, self._gpus.kind, Counter(layouts)
        for device, placed in self._placed.items():
            layout = self.cutting.like(size for size, _ in placed)
            cut_gpu = pool.named_gpu(device, kind) if layout is not None and left[layout] else None
            if layout is not None and cut_gpu is not None:
                left[layout] -= 1
                yield cut_gpu, placed
        for layout in left.elements():
            gpu = pool.next_gpu(kind)
            if gpu is not None:
                yield gpu, layout


def _cut_now(cluster: Cluster, kind: str) -> dict[str, Layout]:
    """Return the instances of every GPU of a type that is cut and may be cut anew."""
    instances: dict[str, list[tuple[str, int]]] = {}
    for gpu in cluster.gpus:
        mig = gpu.cut_as
        if gpu.instance is not None and mig is not None and gpu.mig == "managed" and mig.base == kind:
            instances.setdefault(gpu.device, []).append((mig.profile, gpu.instance.start))
    return {device: tuple(sorted(placed, key=lambda each: each[1])) for device, placed in instances.items()}
