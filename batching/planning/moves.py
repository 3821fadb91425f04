"""Small changes of a layout, the most promising first, aimed at the models that lose most requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tenuto.batching.planning.judging import Judged
from tenuto.batching.planning.layout import Builder, Layout, Slot
from tenuto.placement.cluster import Gpu

WORST = 3  # models helped
CANDIDATES = 4  # gpu-lets tried for each
STEPS_PCT = (10.0, 20.0)  # shares handed from one gpu-let to its neighbour
SPLITS_PCT = (50.0, 30.0, 70.0)
LEAST_PCT = 10.0

Slots = tuple[Slot, ...]


def moves(layout: Layout, judged: Judged, gpus: Sequence[Gpu], builder: Builder) -> Iterator[Layout]:
    """Yield layouts that differ from this one on one GPU, feasible or not, perhaps repeatedly; deterministic."""
    at = [(gpu, slot) for gpu, slots in enumerate(layout) for slot in range(len(slots))]
    names = [spec.name for spec in judged.plan.models]
    lost = judged.lost_rps * np.array([spec.weight for spec in judged.plan.models])
    for position in np.argsort(-lost, kind="stable")[:WORST].tolist():
        if lost[position] <= 0:
            return
        model = names[position]
        for gpu, slots in _changes(layout, model, judged, at, gpus, builder):
            yield (*layout[:gpu], slots, *layout[gpu + 1 :])


def _changes(
    layout: Layout,
    model: str,
    judged: Judged,
    at: list[tuple[int, int]],
    gpus: Sequence[Gpu],
    builder: Builder,
) -> Iterator[tuple[int, Slots]]:
    """Yield (GPU, its new slots) that may help one model, or all others at its cost."""
    names = [spec.name for spec in judged.plan.models]
    calm = sorted(range(len(at)), key=lambda index: (judged.busy[index], index))
    hosting = [index for index in calm if model in _slot(layout, at[index]).models]
    # Idle GPUs first: nothing is lost there.
    for gpu in _different([gpu for gpu, slots in enumerate(layout) if not slots], layout, gpus):
        everything = builder.ordered([name for name in names if builder.can_run(name, gpus[gpu], 100.0)])
        yield gpu, (Slot(100.0, everything),)
        yield gpu, (Slot(100.0, (model,)),)
    outside = [index for index in calm if index not in hosting]
    for index in _different_slots(outside, at, layout, gpus)[:CANDIDATES]:
        gpu, place = at[index]
        slot = layout[gpu][place]
        yield gpu, _with(layout[gpu], place, Slot(slot.share_pct, builder.ordered([*slot.models, model])))
    busiest = list(reversed(hosting))
    for index in _different_slots(busiest, at, layout, gpus)[:CANDIDATES]:
        gpu, place = at[index]
        yield from ((gpu, slots) for slots in _reshaped(layout[gpu], place, model, builder))
        slot = layout[gpu][place]
        guests = [name for name in slot.models if name != model]
        carried = {name: judged.carried_rps[index, names.index(name)] for name in guests}
        for name in sorted(guests, key=lambda guest: (carried[guest], guest)):
            if sum(name in other.models for slots in layout for other in slots) > 1:
                yield gpu, _with(layout[gpu], place, Slot(slot.share_pct, _without(slot.models, name)))
        if guests:  # give the model up here, for the others' sake
            yield gpu, _with(layout[gpu], place, Slot(slot.share_pct, _without(slot.models, model)))
    # A GPU that does little takes the layout of another that holds the model.
    idle_gpus = sorted(range(len(gpus)), key=lambda gpu: sum(judged.busy[i] for i, a in enumerate(at) if a[0] == gpu))
    sources = list(dict.fromkeys(layout[at[index][0]] for index in busiest))[:CANDIDATES]
    for gpu in _different(idle_gpus, layout, gpus)[:CANDIDATES]:
        for slots in sources:
            if slots != layout[gpu]:
                yield gpu, slots


def _reshaped(slots: Slots, place: int, model: str, builder: Builder) -> Iterator[Slots]:
    """Yield other shares of one GPU: more for a slot, all in one, or one split in two."""
    slot = slots[place]
    for step in STEPS_PCT:
        for other, neighbour in enumerate(slots):
            if other != place and neighbour.share_pct - step >= LEAST_PCT:
                changed = _with(slots, other, Slot(neighbour.share_pct - step, neighbour.models))
                yield _with(changed, place, Slot(slot.share_pct + step, slot.models))
    free = 100.0 - sum(each.share_pct for each in slots)
    if free > 1.0:
        yield _with(slots, place, Slot(slot.share_pct + free, slot.models))
    if len(slots) > 1:
        yield (Slot(100.0, builder.ordered([name for each in slots for name in each.models])),)
    others = _without(slot.models, model)
    for part in SPLITS_PCT:
        first, second = slot.share_pct * part / 100.0, slot.share_pct * (100.0 - part) / 100.0
        if min(first, second) < LEAST_PCT:
            continue
        rest = (*slots[:place], *slots[place + 1 :])
        if others:
            yield (*rest, Slot(first, (model,)), Slot(second, others))
        yield (*rest, Slot(first, slot.models), Slot(second, slot.models))


def common_layouts(gpus: Sequence[Gpu], names: Sequence[str], builder: Builder) -> Iterator[Layout]:
    """Yield layouts in which all GPUs are alike: every model on each, whole or in equal gpu-lets."""
    for parts in (1, 2, 3, 4):
        layout = []
        for gpu in gpus:
            share = round(100.0 / parts, 6) if parts > 1 else 100.0
            here = builder.ordered([name for name in names if builder.can_run(name, gpu, share)])
            slots = tuple(Slot(share, here) for _ in range(parts)) if here else ()
            layout.append(slots if slots and builder.fits(slots, gpu) else ())
        if any(layout):
            yield tuple(layout)


def _slot(layout: Layout, at: tuple[int, int]) -> Slot:
    return layout[at[0]][at[1]]


def _with(slots: Slots, place: int, slot: Slot) -> Slots:
    return (*slots[:place], slot, *slots[place + 1 :])


def _without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(other for other in names if other != name)


def _different(chosen: Sequence[int], layout: Layout, gpus: Sequence[Gpu]) -> list[int]:
    """Return one GPU of each type and layout, the first."""
    return list({(gpus[gpu].type, layout[gpu]): gpu for gpu in reversed(chosen)}.values())[::-1]


def _different_slots(
    chosen: Sequence[int], at: Sequence[tuple[int, int]], layout: Layout, gpus: Sequence[Gpu]
) -> list[int]:
    """Return one gpu-let of each kind of GPU and place in it, the first."""
    kinds = {(gpus[at[i][0]].type, layout[at[i][0]], at[i][1]): i for i in reversed(chosen)}
    return list(kinds.values())[::-1]
