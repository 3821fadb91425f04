"""Where models that generate lie: gpu-lets of their own on GPUs apart from all other models, on those that are there or
on those that are bought.

Bin packing: a model has equal gpu-lets, as each is sent as much, no two of them on one GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tenuto.placement.cluster import MOST_ELASTIC_GPUS, Cluster, Gpu, node_of
from tenuto.placement.generation_capacity import (
    SHARES,
    Carries,
    GeneratingPlan,
    PlacedShare,
    Serves,
    ShareCapacity,
    carried,
    options_of,
    plan_of,
)
from tenuto.placement.placement_constraints import domain_of, may_lie
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Profiles

_CLOSE = 1.01
"""limit: how near the highest load that fits is found."""
_NO_INTERFERENCE = "no interference between gpu-lets is counted for them"
Options = Mapping[str, Sequence[ShareCapacity]]
"""What each model carries on shares of a GPU type, by its name."""


@dataclass(frozen=True)
class Means:
    """What models that generate are planned with: `carries` judges a share; for `serves` see `plan_of`; `shares` may be
    used."""

    profiles: Profiles
    carries: Carries = carried
    serves: Serves | None = None
    shares: Sequence[int] = SHARES

    def options(self, specs: Sequence[ModelSpec], gpu: Gpu, most_together: int = 1) -> dict[str, list[ShareCapacity]]:
        """Return by model what it carries on shares of such GPUs; see `options_of`."""
        return {
            spec.name: options_of(spec, gpu, self.profiles, self.carries, most_together, self.shares) for spec in specs
        }

    def plan(
        self, specs: Sequence[ModelSpec], laid: Sequence[PlacedShare], memory: Mapping[str, float] | None = None
    ) -> GeneratingPlan:
        """Return gpu-lets as they are laid on GPUs; see `plan_of`."""
        return plan_of(specs, laid, self.profiles, self.serves, memory)


def place_generating(
    specs: Sequence[ModelSpec], cluster: Cluster, means: Means, *, most_gpus: int, fewest: bool
) -> GeneratingPlan:
    """Return gpu-lets for models that generate, on at most so many GPUs of the type that carries most of their load;
    models that none of this type carries go to the next one.

    With `fewest`, they take no more GPUs than their load asks for; otherwise what is left is headroom.
    """
    left, done, by_type = tuple(specs), GeneratingPlan(), by_gpu_type(cluster)
    while left and by_type and most_gpus > 0:
        plans = [(*_on_type(left, gpus[:most_gpus], means, fewest=fewest), place) for place, gpus in enumerate(by_type)]
        _, plan, place = max(plans, key=lambda each: (each[0], -each[2]))
        done = done.and_then(plan)
        held = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
        if not held:
            return done
        left = tuple(spec for spec in left if spec.name not in held)
        most_gpus -= len(plan.gpus)
        del by_type[place]
    no_room = {spec.name: "no GPU is left for it" for spec in left}
    return replace(done, reasons={**no_room, **done.reasons})


def by_gpu_type(cluster: Cluster) -> list[list[Gpu]]:
    """Return the GPUs and MIG instances on which models that generate may lie, by type. Of a GPU that is cut, these are
    the instances that it has."""
    return [[gpu for gpu in cluster.gpus if gpu.type == kind] for kind in cluster.gpu_types]


def buy_generating(
    specs: Sequence[ModelSpec], cluster: Cluster, means: Means, take: Callable[[str], Gpu | None]
) -> GeneratingPlan:
    """Return gpu-lets for models that generate on the cheapest GPUs found of an elastic cluster that carry their load:
    all on one type, or each on the type on which it takes least. `take` hands out the next GPU of a type."""
    prices, one_of_each = cluster.prices, cluster.one_of_each
    options = {kind: means.options(specs, gpu, MOST_ELASTIC_GPUS) for kind, gpu in one_of_each.items()}

    def costs(spec: ModelSpec, kind: str) -> float:
        """Return what the model's shares cost an hour on GPUs of a type; infinite where none carries it."""
        ways = options[kind][spec.name]
        takes_pct = (math.ceil(spec.rate_rps / way.rate_rps - 1e-9) * way.takes_pct for way in ways)
        return prices[kind] * min(takes_pct, default=math.inf) / 100.0

    choices: list[tuple[tuple[int, float], list[PlacedShare]]] = []
    for preferred in (None, *one_of_each):
        on: dict[str, list[ModelSpec]] = {kind: [] for kind in one_of_each}
        for spec in specs:
            cheapest = min(one_of_each, key=lambda kind: costs(spec, kind))
            kind = preferred if preferred is not None and costs(spec, preferred) < math.inf else cheapest
            if costs(spec, kind) < math.inf:
                on[kind].append(spec)
        laid = [
            each
            for kind, of in on.items()
            for each in _packed(of, options[kind], 1.0, Room.bought(one_of_each[kind], MOST_ELASTIC_GPUS))
        ]
        served = {each.option.spec.name for each in laid}
        choices.append(((-len(served), sum(prices[gpu.type] for gpu in gpus_of(laid))), laid))
    laid = min(choices, key=lambda each: each[0])[1]
    bought = {place.id: gpu for place in gpus_of(laid) if (gpu := take(place.type)) is not None}
    laid = [PlacedShare(each.option, tuple(bought[place.id] for place in each.gpus)) for each in laid]
    held = {each.option.spec.name for each in laid}
    plan = means.plan([spec for spec in specs if spec.name in held], laid)
    reasons = {
        spec.name: f"its rate takes more than {MOST_ELASTIC_GPUS:,} GPUs"
        if any(options[kind][spec.name] for kind in options)
        else "; ".join(_why_none(gpu) for gpu in one_of_each.values())
        for spec in specs
        if spec.name not in held
    }
    counts = Counter(gpu.type for gpu in bought.values())
    taken = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no GPU"
    notes = (f"models that generate take {taken}, the cheapest found that carry them; {_NO_INTERFERENCE}",)
    return replace(plan, reasons={**reasons, **plan.reasons}, notes=notes, bought=tuple(bought.values()))


class Room:
    """The GPUs of one type that gpu-lets are packed onto. Each model lies where it may."""

    def __init__(self, gpus: Sequence[Gpu], *, is_endless: bool = False) -> None:
        """`is_endless`: there are more GPUs than any model may lose."""
        self.gpus, self._is_endless = gpus, is_endless

    @classmethod
    def bought(cls, gpu: Gpu, count: int) -> Room:
        """Return so many GPUs like this one, wherever they will be."""
        return cls(_copies(gpu, count), is_endless=True)

    def allows(self, spec: ModelSpec, gpu: Gpu) -> bool:
        """Return whether a model may lie on a GPU. Where GPUs that are bought will be is not known."""
        return self._is_endless or may_lie(spec, gpu)

    def domains(self, spec: ModelSpec) -> float:
        """Return how many GPUs, nodes or racks there are for a model, one of which may be lost."""
        kind = spec.spread or "gpu"
        return math.inf if self._is_endless else len({domain_of(g, kind) for g in self.gpus if may_lie(spec, g)})

    def laid(self, options: Sequence[ShareCapacity]) -> list[PlacedShare]:
        """Return where gpu-lets lie: each on the first GPUs of a node that have its share left and not its model; none
        where they do not all fit. A model that is spread goes to the node or rack that has fewest of it."""
        # Of GPUs that are bought, no more are looked at than gpu-lets take that lie alone.
        gpus = self.gpus[: sum(option.together for option in options)] if self._is_endless else self.gpus
        left = {gpu.id: 100.0 for gpu in gpus}
        on: dict[str, set[str]] = {}  # by model its GPUs
        by_node: dict[str, list[Gpu]] = {}
        for gpu in gpus:
            by_node.setdefault(node_of(gpu.id), []).append(gpu)
        placed: list[PlacedShare] = []
        for option in options:
            spec, held = option.spec, on.setdefault(option.spec.name, set())
            nodes = list(by_node.values())
            if spec.spread in ("node", "rack") or spec.survive is not None:
                kind = spec.spread or "gpu"
                own = (each for each in placed if each.option.spec is spec)
                crowd = Counter(domain_of(gpu, kind) for each in own for gpu in each.gpus)
                nodes.sort(key=lambda node: min(crowd[domain_of(gpu, kind)] for gpu in node))
            for node in nodes:
                able = [
                    gpu
                    for gpu in node
                    if left[gpu.id] >= option.share_pct - 1e-9 and gpu.id not in held and self.allows(spec, gpu)
                ][: option.together]
                if len(able) == option.together:
                    break
            else:
                return []
            for gpu in able:
                left[gpu.id] -= option.share_pct
                held.add(gpu.id)
            placed.append(PlacedShare(option, tuple(able)))
        return placed


@lru_cache(maxsize=16)
def _copies(gpu: Gpu, count: int) -> tuple[Gpu, ...]:
    return tuple(gpu.model_copy(update={"id": f"{gpu.type}/{place}"}) for place in range(count))


def gpus_of(laid: Sequence[PlacedShare]) -> list[Gpu]:
    """Return the GPUs that are taken, each once."""
    return list({gpu.id: gpu for each in laid for gpu in each.gpus}.values())


def left_of(gpulets: int, domains: float) -> int:
    """Return how many equal gpu-lets are left when the fullest of so many domains is lost."""
    return gpulets - max(1, math.ceil(gpulets / max(1.0, domains)))


def _on_type(
    specs: Sequence[ModelSpec], gpus: Sequence[Gpu], means: Means, *, fewest: bool
) -> tuple[float, GeneratingPlan]:
    """Return how many times the load is carried, and the plan."""
    room, most = Room(gpus), max(Counter(node_of(gpu.id) for gpu in gpus).values())
    options = means.options(specs, gpus[0], most)
    reasons = {name: _why_none(gpus[0]) for name, of in options.items() if not of}
    able = [spec for spec in specs if options[spec.name] and any(room.allows(spec, gpu) for gpu in gpus)]
    low, high = 1e-3, 1.0 if fewest else 1e3
    while able and not _packed(able, options, low, room):
        least = max(able, key=lambda spec: (-spec.priority, min(o.takes_pct for o in options[spec.name])))
        able.remove(least)
        reasons[least.name] = "the GPUs have no room for it beside the other models that generate"
    if not able:
        return 0.0, GeneratingPlan(reasons=reasons)
    laid = _packed(able, options, low, room)
    if more := _packed(able, options, high, room):
        low, laid = high, more
    while high / low > _CLOSE:
        times = math.sqrt(low * high)
        if more := _packed(able, options, times, room):
            low, laid = times, more
        else:
            high = times
    if not fewest:
        laid = _with_what_is_left(laid, options)
    plan = means.plan(able, laid)
    return low, replace(plan, reasons={**reasons, **plan.reasons}, notes=tuple(_notes(laid, options, low)))


def _with_what_is_left(laid: Sequence[PlacedShare], options: Options) -> list[PlacedShare]:
    """Return the same, where models whose gpu-lets all lie alone have the largest share."""
    on = Counter(gpu.id for each in laid for gpu in each.gpus)
    beside = {each.option.spec.name for each in laid if any(on[gpu.id] > 1 for gpu in each.gpus)}
    largest = {
        name: {each.together: each for each in sorted(of, key=lambda each: each.share_pct)}
        for name, of in options.items()
    }
    return [
        each
        if each.option.spec.name in beside
        else replace(each, option=largest[each.option.spec.name][each.option.together])
        for each in laid
    ]


def _packed(specs: Sequence[ModelSpec], options: Options, times: float, room: Room) -> list[PlacedShare]:
    """Return where gpu-lets lie, so that so many times each rate is carried, and the part of it that must survive after
    the loss of a domain; none where that does not fit.

    A model has gpu-lets of the share that takes least of the GPUs together, or of the one that takes fewest GPUs,
    whichever fits all models on fewer. Those of most GPUs and the largest shares come first.
    """

    def least_share(gpulets: int, option: ShareCapacity) -> tuple[float, ...]:
        return gpulets * option.takes_pct, gpulets

    def fewest_gpus(gpulets: int, option: ShareCapacity) -> tuple[float, ...]:
        return gpulets * option.together, option.share_pct

    best: list[PlacedShare] = []
    for rank in (least_share, fewest_gpus):
        chosen: list[ShareCapacity] = []
        for spec in specs:
            ways = []
            for option in options[spec.name]:
                gpulets = _how_many(spec, times * spec.rate_rps / option.rate_rps, room)
                if gpulets is not None and gpulets * option.together <= len(room.gpus):
                    ways.append((gpulets, option))
            if not ways:
                return []
            gpulets, option = min(ways, key=lambda way: rank(*way))
            chosen += [option] * gpulets
        placed = room.laid(sorted(chosen, key=lambda each: (-each.together, -each.share_pct, each.spec.name)))
        if placed and (not best or len(gpus_of(placed)) < len(gpus_of(best))):
            best = placed
    return best


def _how_many(spec: ModelSpec, needed: float, room: Room) -> int | None:
    """Return how many equal gpu-lets a model gets, `needed` of which carry its rate; None where no number of them keeps
    what must survive."""
    count, domains = max(1, math.ceil(needed - 1e-9)), room.domains(spec)
    if spec.survive is None or domains < 2:
        return count
    while count <= len(room.gpus) and left_of(count, domains) < spec.survive * needed - 1e-9:
        count += 1
    return count if count <= len(room.gpus) else None


def _why_none(gpu: Gpu) -> str:
    return (
        f"no share of a {gpu.type} carries it: its weights leave no memory for a request, or a step alone takes longer "
        "than its SLO, also on as many GPUs of one node as its profile has step times for"
    )


def _notes(laid: Sequence[PlacedShare], options: Options, times: float) -> list[str]:
    """Say what the models that generate take, and why some share no GPU."""
    takes = f"models that generate take {len(gpus_of(laid))} of the GPUs, which carry {times:.3g} times their load"
    notes = [f"{takes}; {_NO_INTERFERENCE}"]
    together = {each.option.spec.name: each.option.together for each in laid}
    notes += [f"{name} runs on {count} GPUs together" for name, count in together.items() if count > 1]
    beside: dict[str, set[str]] = {}
    for each in laid:
        for gpu in each.gpus:
            beside.setdefault(gpu.id, set()).add(each.option.spec.name)
    alone: dict[str, str] = {}
    for each in laid:
        name, share = each.option.spec.name, each.option.share_pct
        if any(len(beside[gpu.id]) > 1 for gpu in each.gpus):
            continue
        if share == 100:
            parts = [option for option in options[name] if option.share_pct < 100 and option.together == 1]
            count = sum(other.option.spec.name == name for other in laid)
            if any(count * option.rate_rps >= each.option.spec.rate_rps for option in parts):
                alone[name] = "no other model that generates takes a part of it"
            else:
                alone[name] = "its load fills a GPU" if parts else "only a whole GPU keeps its SLO and memory"
        else:
            alone.setdefault(name, f"no other model that generates takes the {100 - share:g} % that it leaves")
    return notes + [f"{name} shares no GPU: {why}" for name, why in sorted(alone.items())]
