"""What a batch takes on its replica's share beside its neighbours: the same rules for every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tenuto.errors import MissingProfileError
from tenuto.placement.copy_times import copy_ms_per_request
from tenuto.placement.costs import ModelOnGpu
from tenuto.placement.interference import InterferenceModel, Resident
from tenuto.placement.interference.named import interference_models, stand_ins
from tenuto.placement.plan import Plan
from tenuto.placement.program import Gpulet, Replica
from tenuto.placement.workload import ModelSpec, size_parts
from tenuto.profiles import Latency, Profiles
from tenuto.profiles.share_latency import WHOLE_GPU_PCT, with_share
from tenuto.profiles.size_classes import in_order

INTERFERENCE = "contention"  # needs only latencies, so it can judge every plan

_RULES = {
    "continued": "the line through the two nearest measured shares continued",
    "utilisation": "u/s + 1 - u from the SM utilisation u on the whole GPU",
    "proportional": "the whole GPU's over the share",
}


@dataclass
class Sharing:
    """Completes the replicas of a plan. `costs` are by model and GPU type."""

    costs: Mapping[str, Mapping[str, ModelOnGpu]]
    profiles: Profiles
    with_copies: bool = False
    _interference: dict[str, InterferenceModel] = field(default_factory=dict)
    _residents: dict[tuple[str, str, int, float], Resident] = field(default_factory=dict)

    def completed(self, plan: Plan) -> Plan:
        """Return the plan with every replica's latency alone on its share, its slowdown while all neighbours run, and
        its memory.

        When the profiles lack a model, the policy's own figures stay.
        """
        types = {gpu.id: gpu.type for gpu in plan.gpus}
        alike: dict[object, tuple[Gpulet, ...]] = {}
        same: dict[object, list[tuple[Replica, ...]]] = {}  # by identity of what GPUs hold
        completed: dict[str, Gpulet] = {}
        for gpu_id, gpulets in plan.by_gpu().items():
            kind = types.get(gpu_id)
            if kind is None:
                completed |= {gpulet.id: gpulet for gpulet in gpulets}
                continue
            # Plans have thousands of GPUs of a few kinds; alike gpu-lets share replicas, and where these have the same
            # rates, the tuple of them.
            held = (kind, *((g.share_pct, id(g.models)) for g in gpulets))
            if held not in same:
                key = (kind, *((g.share_pct, tuple(_told(r) for r in g.models)) for g in gpulets))
                if key not in alike:
                    alike[key] = self._on_one_gpu(kind, gpulets)
                same[held] = [_with_rates(like, g) for g, like in zip(gpulets, alike[key], strict=True)]
            for gpulet, models in zip(gpulets, same[held], strict=True):
                completed[gpulet.id] = gpulet.model_copy(update={"models": models})
        return plan.model_copy(update={"gpulets": tuple(completed[gpulet.id] for gpulet in plan.gpulets)})

    def _on_one_gpu(self, kind: str, gpulets: Sequence[Gpulet]) -> tuple[Gpulet, ...]:
        alone = [
            gpulet.model_copy(update={"models": tuple(self._alone(r, kind, gpulet) for r in gpulet.models)})
            for gpulet in gpulets
        ]
        if len(gpulets) == 1:
            return tuple(alone)
        done = []
        for index, gpulet in enumerate(alone):
            others = [other for place, other in enumerate(alone) if place != index]
            models = []
            for replica in gpulet.models:
                if replica.steps is not None:
                    models.append(replica)
                    continue
                slowdown = round(self._slowdown(replica, gpulet, others, kind), 6)
                update: dict[str, object] = {"slowdown": slowdown}
                if replica.latency is not None:
                    update["latency_ms"] = round(replica.latency.at(replica.batch_size) * slowdown, 6)
                models.append(replica.model_copy(update=update))
            done.append(gpulet.model_copy(update={"models": tuple(models)}))
        return tuple(done)

    def _alone(self, replica: Replica, kind: str, gpulet: Gpulet) -> Replica:
        """Return a replica with its latency and memory alone on its share."""
        if replica.steps is not None:
            return replica  # what its steps cost and its memory were planned with it
        on = self.costs.get(replica.name, {}).get(kind)
        update: dict[str, object] = {"slowdown": 1.0}
        if on is not None:
            share_pct = gpulet.effective_share_pct
            latency: Latency | None = replica.latency
            try:
                latency = on.cut(share_pct, replica.batch_size)
                update["latency_rule"] = on.rule(share_pct)
                update |= {"by_size": on.by_size(share_pct, replica.batch_size), "pads": on.profile.pads}
            except MissingProfileError:
                pass  # only the policy's figures exist
            update["latency"] = latency
            if latency is not None:
                update["latency_ms"] = round(latency.at(replica.batch_size), 6)
            if replica.memory_mib is None:
                memory = on.memory_mib(replica.batch_size)
                update["memory_mib"] = memory
                update["weights_mib"] = None if memory is None else on.profile.weights_mib
            if self.with_copies:
                into_ms, out_ms = copy_ms_per_request(on.profile, replica.batch_size, share_pct)
                update |= {"copy_in_ms": into_ms, "copy_out_ms": out_ms}
        elif replica.latency is not None:
            update["latency_ms"] = round(replica.latency.at(replica.batch_size), 6)
        return replica.model_copy(update=update)

    def _slowdown(self, replica: Replica, gpulet: Gpulet, others: Sequence[Gpulet], kind: str) -> float:
        """Return the factor while all neighbours run.

        Neighbours without shares are as slow as measured among equal processes, see `_among_equals`. When that was not
        measured, they run in time slices: beside n of them a batch takes n + 1 times as long (as in the thesis, which
        ran them without CUDA MPS; with it they are no slower). Shares that sum to more than the GPU shrink in
        proportion.
        """
        if gpulet.share_pct is None or any(other.share_pct is None for other in others):
            together = self._among_equals(replica, [gpulet, *others], kind)
            return 1.0 + len(others) if together is None else together
        total_pct = gpulet.share_pct + sum(other.effective_share_pct for other in others)
        factor = max(1.0, total_pct / WHOLE_GPU_PCT)
        own = self._resident(replica, gpulet, kind)
        beside = [self._worst(own, other, kind) for other in others]
        known = [resident for resident in beside if resident is not None]
        if own is None or not known:
            return factor
        return factor * self._model(kind).slowdown(own, known)

    def _among_equals(self, replica: Replica, gpulets: Sequence[Gpulet], kind: str) -> float | None:
        """Return how much longer a batch of the first gpu-let takes beside the others, all without shares; None when
        this was not measured of every model.

        Measurements give the slowness of as many equal processes. Unequal ones are assumed as slow as the mean over the
        models, as each uses the device as much as among its equals.
        """
        factors = [self._among_itself(replica, kind, len(gpulets))]
        for other in gpulets[1:]:
            known = [self._among_itself(each, kind, len(gpulets)) for each in other.models]
            factors.append(None if None in known else max((f for f in known if f is not None), default=1.0))
        measured = [factor for factor in factors if factor is not None]
        unrestricted = all(gpulet.share_pct is None for gpulet in gpulets)
        return sum(measured) / len(measured) if unrestricted and len(measured) == len(factors) else None

    def _among_itself(self, replica: Replica, kind: str, processes: int) -> float | None:
        on = self.costs.get(replica.name, {}).get(kind)
        return None if on is None else on.profile.beside_itself(replica.batch_size, processes)

    def _worst(self, own: Resident | None, other: Gpulet, kind: str) -> Resident | None:
        """Return the neighbour's batch that disturbs most; its models take turns."""
        residents = [r for replica in other.models if (r := self._resident(replica, other, kind)) is not None]
        if own is None or not residents:
            return None
        if len(residents) == 1:
            return residents[0]
        return max(residents, key=lambda resident: self._model(kind).slowdown(own, (resident,)))

    def _resident(self, replica: Replica, gpulet: Gpulet, kind: str) -> Resident | None:
        """Return a replica as interference models see it; None when its latency is unknown."""
        share_pct = gpulet.effective_share_pct
        key = (replica.name, kind, replica.batch_size, share_pct)
        if key not in self._residents:
            on = self.costs.get(replica.name, {}).get(kind)
            if on is None or replica.latency is None:
                return None
            profile = with_share(on.profile, share_pct, on.latency(share_pct))
            if replica.batch_size > max(profile.batch_sizes(share_pct), default=0):
                profile = with_share(on.profile.model_copy(update={"points": ()}), share_pct, replica.latency)
            self._residents[key] = Resident(profile, replica.batch_size, share_pct)
        return self._residents[key]

    def _model(self, kind: str) -> InterferenceModel:
        if kind not in self._interference:
            self._interference |= interference_models(INTERFERENCE, [kind], self.profiles)
        return self._interference[kind]

    def assumptions(self, plan: Plan) -> list[str]:
        """Return which latencies had to be modelled, and how."""
        by_rule: dict[str, set[str]] = {}
        by_size: dict[str, Replica] = {}
        types = {gpu.id: gpu.type for gpu in plan.gpus}
        crowded = set()
        sliced = unequal = False
        for gpu_id, gpulets in plan.by_gpu().items():
            for gpulet in gpulets:
                for replica in gpulet.models:
                    if replica.latency_rule != "measured":
                        by_rule.setdefault(replica.latency_rule, set()).add(replica.name)
                    if replica.by_size:
                        by_size[replica.name] = replica
            if len(gpulets) > 1:
                kind, is_free = types.get(gpu_id, ""), any(gpulet.share_pct is None for gpulet in gpulets)
                if is_free and self._among_equals(gpulets[0].models[0], gpulets, kind) is not None:
                    unequal = unequal or len({replica.name for gpulet in gpulets for replica in gpulet.models}) > 1
                else:
                    crowded.add(kind)
                    sliced = sliced or is_free
        names = [spec.name for spec in plan.models]
        lines = [
            f"latency on a share: {_RULES[rule]}: {listed([n for n in names if n in by_rule[rule]])}"
            for rule in _RULES
            if rule in by_rule
        ]
        lines += [describe_sizes(spec, by_size[spec.name]) for spec in plan.models if spec.name in by_size]
        if sliced:
            lines.append("gpu-lets without a share beside others: time slices, n + 1 times as long beside n")
        if unequal:
            lines.append("unequal gpu-lets without a share beside others: the mean of what was measured of equal ones")
        if crowded:
            lines.append(f"slowdown beside neighbours on a share: interference model '{INTERFERENCE}'")
            lines += stand_ins(INTERFERENCE, sorted(crowded))
        return lines


def describe_sizes(spec: ModelSpec, replica: Replica) -> str:
    """Return what a plan says of a model whose requests vary in size, and of a replica that knows its latency by
    size."""
    names = tuple(spec.sizes)
    classes = in_order(tuple(each.sizes[name] for name in names) for each in replica.by_size)
    larger_pct = round(100.0 * (1.0 - sum(size_parts(spec, names, classes))), 2)  # format: of the requests
    most = ", ".join(f"{name} {size}" for name, size in zip(names, classes[-1], strict=True))
    refused = f"; {larger_pct:g} % of the requests are larger, and are refused" if larger_pct else ""
    between = sum(each.interpolated for each in replica.by_size)
    of_which = f" ({between} of them interpolated between measured ones)" if between else ""
    return f"{spec.name}: the mean latency over {len(classes)} sizes{of_which}, up to {most}{refused}"


def _with_rates(like: Gpulet, gpulet: Gpulet) -> tuple[Replica, ...]:
    """Return the replicas of a gpu-let that is alike up to the rates, with the rates of another."""
    pairs = [*zip(gpulet.models, like.models, strict=True)]
    if all(done.rate_rps == before.rate_rps for before, done in pairs):
        return like.models
    return tuple(
        done if done.rate_rps == before.rate_rps else done.model_copy(update={"rate_rps": before.rate_rps})
        for before, done in pairs
    )


def _told(replica: Replica) -> tuple[object, ...]:
    """Return all that decides the costs of a replica."""
    return replica.name, replica.batch_size, replica.memory_mib, id(replica.latency) if replica.latency else None


def listed(names: Sequence[str], most: int = 6) -> str:  # format: names that a sentence lists
    """Return names in one line; of many, the first few."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
