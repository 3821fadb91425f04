"""Which share of each model's rate goes to which cell of a fleet.

Two levels, no joint program over models and cells: a linear program over models and kinds of GPUs says what a GPU of
each kind is worth, and which kinds serve a model (RAS has such a first level; POP shows that parts with a like mixture
of demand and room come within 1.5 % of the whole). Then models are laid on cells one by one, those with the least
choice of cells first and then the largest, each whole where it fits. What runs stays: only what a cell has no room for
moves, and only to cells that give nothing away.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tenuto.placement.cluster import Cluster
from tenuto.placement.demand import HEADROOM, SLIGHT, Fluid, Kind, ModelGroup
from tenuto.placement.placement_constraints import names_of

MOST_CELLS_OF_MODEL = 16  # format: backends that a rule of an HTTPRoute may have

Shares = Mapping[str, Mapping[str, float]]
"""By name of a group and of a cell: which part of the group's rate."""


@dataclass(frozen=True)
class CellRoom:
    """What a cell has: GPUs by kind, and the names by which models say that they may lie there. `idle` are the GPUs
    that its running plan does not use; None: nothing runs there. A plan of a cell that `is_short` serves too little, so
    that newcomers go elsewhere while there is room."""

    name: str
    gpus: Mapping[Kind, float]
    places: frozenset[str]
    idle: Mapping[Kind, float] | None = None
    is_short: bool = False

    @classmethod
    def of(
        cls, name: str, cluster: Cluster, gpus: Mapping[Kind, float], idle: Mapping[Kind, float] | None = None
    ) -> CellRoom:
        """Return the room of a cell with this name and these GPUs of a cluster."""
        return cls(name, gpus, frozenset({name, *names_of(cluster.gpus)}), idle)

    @cached_property
    def types(self) -> frozenset[str]:
        """The GPU types of the cell."""
        return frozenset(kind for kind, _ in self.gpus)

    def may_hold(self, group: ModelGroup) -> bool:
        """Return whether every model of a group has a GPU type here that can serve it, and may lie here."""
        return group.is_served_by(self.types) and all(
            self.name not in spec.keep_off and (not spec.only_on or not self.places.isdisjoint(spec.only_on))
            for spec in group.placed
        )


@dataclass(frozen=True)
class Spread:
    """`traffic` is which part of its requests a cell gets of each model, and `planned` for which part of its rate the
    cell is planned; it is more where the loss of a cell is to be survived. `used` is by cell what that takes of its
    GPUs. `lacking` is by model the part for which no cell has room; `unmet` says which models would not survive as
    they ask, and why. `moved` is the part of all GPU time that goes to other cells than before, and `givers` are the
    cells that it leaves. In one step a cell either gives or takes."""

    traffic: Shares
    planned: Shares
    used: Mapping[str, Mapping[Kind, float]]
    lacking: Mapping[str, float] = field(default_factory=dict)
    unmet: Mapping[str, str] = field(default_factory=dict)
    moved: float = 0.0
    givers: frozenset[str] = frozenset()


class _Cells:
    """The room that is left in each cell while models are laid on them."""

    def __init__(self, rooms: Sequence[CellRoom], fluid: Fluid) -> None:
        self.rooms = {room.name: room for room in rooms}
        self.free = {room.name: {kind: float(count) for kind, count in room.gpus.items()} for room in rooms}
        self._filled = {room.name: defaultdict[Kind, float](float) for room in rooms}
        self._fluid, self._margin = fluid, HEADROOM

    def leave_what_runs(self, ran: Mapping[str, Mapping[Kind, float]], cells: Container[str]) -> None:
        """Leave newcomers in these cells what running plans leave: GPUs that are idle, and what models no longer take.
        A plan takes more GPUs than the fluid `ran` of the rates that it was made for, and as many more of what
        comes."""
        for name, room in self.rooms.items():
            if room.idle is None or name not in cells:
                continue
            uses = sum(room.gpus.values()) - sum(room.idle.values())
            took = ran.get(name, {})
            part = min(1.0, math.ceil(sum(took.values())) / uses) if uses > 0.0 else 1.0
            for kind, free in self.free[name].items():
                left = max(0.0, took.get(kind, 0.0) - self._filled[name][kind])
                self.free[name][kind] = 0.0 if room.is_short else min(free, part * room.idle.get(kind, 0.0) + left)

    def spend_margin(self) -> None:
        """Let models take the room that was left for a tenth more load."""
        for name, free in self.free.items():
            for kind, count in self.rooms[name].gpus.items():
                free[kind] = count - self._filled[name][kind] / self._margin
        self._margin = 1.0

    def fit(self, group: ModelGroup, cell: str, share: float) -> tuple[float, dict[Kind, float], float]:
        """Return how much of a share of a group has room in a cell, the GPUs that it takes and what they are worth.
        Models take the GPUs that the fluid gives them, and then those that are worth the least to them."""
        taken, part = self._taken(group, cell, share)
        if part < 1.0 - SLIGHT:
            taken, again = self._taken(group, cell, share * part)
            part *= again
        return share * part, taken, sum(gpus * self._fluid.worth[kind] for kind, gpus in taken.items())

    def strays(self, group: ModelGroup, cell: str) -> bool:
        """Return whether a cell has none of the kinds of GPUs on which the fluid has a model of a group."""
        shares = (self._fluid.shares.get(name) for name in group.gpus)
        return any(each and each.keys().isdisjoint(self.free[cell]) for each in shares)

    def _taken(self, group: ModelGroup, cell: str, share: float) -> tuple[dict[Kind, float], float]:
        free, taken, part = self.free[cell], defaultdict[Kind, float](float), 1.0
        for name, needs in group.gpus.items():
            left, own = 1.0, {k: part for k, part in self._fluid.shares.get(name, {}).items() if k in free}
            cheapest = sorted((k for k in free if k[0] in needs), key=lambda k: needs[k[0]] * self._fluid.worth[k])
            as_in_fluid = ((kind, part / sum(own.values())) for kind, part in own.items())
            for kind, most in (*as_in_fluid, *((kind, 1.0) for kind in cheapest)):
                gpus = self._margin * share * needs[kind[0]]
                room = max(0.0, free[kind] - taken[kind])
                more = min(left, most) if gpus <= 0.0 else min(left, most, room / gpus)
                taken[kind] += more * gpus
                left -= more
                if left <= SLIGHT:
                    break
            part = min(part, 1.0 - left)
        return taken, 1.0 if part > 1.0 - SLIGHT else part

    def take_room(self, cell: str, gpus: Mapping[Kind, float]) -> None:
        """Take room of a cell."""
        for kind, count in gpus.items():
            self.free[cell][kind] -= count
            self._filled[cell][kind] += count

    def idle_part(self, cell: str) -> float:
        """Return which part of a cell is free, by worth."""
        worth = self._fluid.worth
        whole = sum(count * worth[kind] for kind, count in self.rooms[cell].gpus.items())
        return sum(free * worth[kind] for kind, free in self.free[cell].items()) / whole if whole > 0.0 else 0.0


def spread_traffic(
    groups: Sequence[ModelGroup],
    rooms: Sequence[CellRoom],
    fluid: Fluid,
    running: Shares | None = None,
    *,
    at_most: float = 1.0,
) -> Spread:
    """Return which share of each group goes to which cell.

    Args:
        groups: with what they need.
        rooms: the cells.
        fluid: what GPUs are worth.
        running: where the rate of each group goes now; groups that are not there are new.
        at_most: which part of all GPU time may move to other cells. What is new, or has lost its cell, does not count.
    """
    return _Spreading(groups, rooms, fluid, running or {}, at_most).done()


class _Spreading:
    def __init__(
        self, groups: Sequence[ModelGroup], rooms: Sequence[CellRoom], fluid: Fluid, running: Shares, at_most: float
    ) -> None:
        self._cells, self._running = _Cells(rooms, fluid), running
        self._size = {g.name: sum(min(n.values(), default=0.0) for n in g.gpus.values()) for g in groups}
        self._allowed = {g.name: [room.name for room in rooms if room.may_hold(g)] for g in groups}
        # What has to be in several cells comes first, then what few cells can hold, and then what is large.
        self._groups = sorted(
            groups, key=lambda g: (_survive(g) is None, len(self._allowed[g.name]), -self._size[g.name], g.name)
        )
        self._budget = at_most * sum(self._size.values())
        self._traffic: dict[str, dict[str, float]] = {group.name: {} for group in groups}
        self._used: dict[str, Counter[Kind]] = {room.name: Counter() for room in rooms}
        self._ran: dict[str, Counter[Kind]] = {room.name: Counter() for room in rooms}  # at the rates of before
        self._takers: set[str] = set()
        self._givers: set[str] = set()
        self._lacking: dict[str, float] = {}
        self._unmet: dict[str, str] = {}
        self._moved = 0.0

    def done(self) -> Spread:
        left = {group.name: self._stay(group) for group in self._groups}
        self._cells.leave_what_runs(self._ran, self._ran.keys() - self._givers)
        parted = []  # fills what the others leave, so that these are whole and it has what is left
        for group in self._groups:
            if left[group.name] > SLIGHT and not self._lay(group, left[group.name], is_whole=True):
                parted.append(group)
        for group in parted:
            self._lay(group, left[group.name], is_whole=False)
        self._cells.spend_margin()  # before a model finds no room, where that is enough for all of it
        for group in parted:
            rest = 1.0 - sum(self._traffic[group.name].values())
            if sum(self._cells.fit(group, cell, rest)[0] for cell in self._allowed[group.name]) > rest - SLIGHT:
                self._lay(group, rest, is_whole=False)
        planned = {}
        for group in self._groups:
            traffic = self._traffic[group.name]
            served = sum(traffic.values())
            if served < 1.0 - SLIGHT:
                self._lacking[group.name] = 1.0 - served
            factor = _planned_factor(group, traffic)
            planned[group.name] = {cell: factor * share for cell, share in traffic.items()}
        used = {
            cell: {kind: min(gpus, self._cells.rooms[cell].gpus[kind]) for kind, gpus in taken.items()}
            for cell, taken in self._used.items()
        }
        return Spread(self._traffic, planned, used, self._lacking, self._unmet, self._moved_part(), self._given())

    def _moved_part(self) -> float:
        return self._moved / max(SLIGHT, sum(self._size.values()))

    def _given(self) -> frozenset[str]:
        """Return the cells that have less of some group than now."""
        shares = (
            (name, cell, rate / sum(now.values())) for name, now in self._running.items() for cell, rate in now.items()
        )
        return frozenset(c for name, c, share in shares if self._traffic.get(name, {}).get(c, 0.0) < share - SLIGHT)

    def _stay(self, group: ModelGroup) -> float:
        """Leave a group where it is as far as there is room, and return the share for which there is none."""
        now = self._running.get(group.name, {})
        total, survive = sum(now.values()), _survive(group)
        allowed = self._allowed[group.name]
        shares = {cell: share / total for cell, share in now.items() if cell in allowed and total > 0.0}
        if survive is not None and len(shares) < 2 <= len(allowed):
            return 1.0  # it is laid on several cells anew; when only one may hold it, it keeps that one
        factor, left = _planned_factor(group, shares), 1.0 - sum(shares.values())
        for cell, share in shares.items():
            fits = self._cells.fit(group, cell, factor * share)[0] / factor
            gone = share - fits
            if gone > SLIGHT:
                gone = share if len(shares) == 1 and survive is None else gone  # whole, where it was whole
                if self._moved + gone * self._size[group.name] > self._budget:
                    gone = 0.0  # it stays, and the cell's plan says what it lacks
                self._givers.add(cell)
            self._moved += gone * self._size[group.name]
            left += gone
            taken = self._add_share(group, cell, share - gone, factor)
            then = total / group.models[0].rate_rps
            self._ran[cell].update({kind: then * gpus for kind, gpus in taken.items()})
        return left

    def _add_share(self, group: ModelGroup, cell: str, share: float, factor: float = 1.0) -> Mapping[Kind, float]:
        if share <= SLIGHT:
            return {}
        _, taken, _ = self._cells.fit(group, cell, factor * share)
        self._cells.take_room(cell, taken)
        self._used[cell].update(taken)
        traffic = self._traffic[group.name]
        traffic[cell] = traffic.get(cell, 0.0) + share
        return taken

    def _lay(self, group: ModelGroup, share: float, *, is_whole: bool) -> bool:
        """Lay a share of a group on cells that give nothing away: whole on the one where it takes what is worth least,
        of the kinds that the fluid uses, or on several. Return whether it is laid, or has no cell."""
        survive, held = _survive(group), self._traffic[group.name]
        allowed = self._allowed[group.name]
        cells = [cell for cell in allowed if cell not in self._givers]
        if survive is not None and not held and len(cells) > 1:
            self._lay_apart(group, cells, survive)
            return True
        if survive is not None and len({*held, *cells}) < 2:
            named = ", ".join(cells) or "no other"
            self._unmet[group.name] = f"spread: cell needs a second cell, and {named} has room and may hold it"
        if is_whole and len(held) < MOST_CELLS_OF_MODEL:
            fits = [(self._cells.fit(group, cell, share), cell) for cell in cells]
            whole = [
                (worth, cell)
                for (part, _, worth), cell in fits
                if part > share - SLIGHT and not self._cells.strays(group, cell)
            ]
            if whole:
                least = min(worth for worth, _ in whole)
                alike = [cell for worth, cell in whole if worth <= least * (1.0 + SLIGHT)]
                # Models that are there already need no start, a cell that takes others has to change anyway, and an
                # even load leaves each cell room to grow.
                best = max(alike, key=lambda cell: (cell in held, self._goes_on_taking(cell), self._idle(cell), cell))
                self._add_share(group, best, share)
                self._takers.add(best)
            return bool(whole)
        left = [cell for cell in self._running.get(group.name, {}) if cell in allowed and cell in self._givers]

        def order(cell: str) -> tuple[object, ...]:
            by_kind = self._is_sliver(group, cell, share), self._cells.strays(group, cell)
            return cell not in held, *by_kind, not self._goes_on_taking(cell), -self._idle(cell), cell

        for cell in [*sorted(cells, key=order), *left]:  # what no other cell has room for goes back to where it was
            if share > SLIGHT and (cell in held or len(held) < MOST_CELLS_OF_MODEL):
                part = self._cells.fit(group, cell, share)[0]
                self._add_share(group, cell, part)
                self._takers.update([cell] if part > SLIGHT else [])
                self._moved -= part * self._size[group.name] if cell in self._givers else 0.0
                share -= part
        return True

    def _idle(self, cell: str) -> float:
        return self._cells.idle_part(cell)

    def _goes_on_taking(self, cell: str) -> bool:
        """Return whether a cell whose plan changes anyway takes more: as long as a tenth of it is idle. Where no GPU
        is, each newcomer has to be fitted among all others, and even loads make that least."""
        if cell not in self._takers:
            return False
        idle = self._cells.rooms[cell].idle or {}
        least = 1.0 - 1.0 / HEADROOM
        has_idle = sum(idle.values()) > least * sum(self._cells.rooms[cell].gpus.values())
        return has_idle and self._idle(cell) > least

    def _is_sliver(self, group: ModelGroup, cell: str, share: float) -> bool:
        """Return whether a cell has room for a part of a group that takes no more than a GPU: full to the brim, which
        no plan promises."""
        part, taken, _ = self._cells.fit(group, cell, share)
        return part < share - SLIGHT and sum(taken.values()) <= 1.0 + SLIGHT

    def _lay_apart(self, group: ModelGroup, cells: Sequence[str], survive: float) -> None:
        """Lay a group on cells in even parts, so that the others carry what is to survive the loss of one: on as many
        as give each at least a GPU, because the more there are, the less is planned twice."""
        count = max(2, min(len(cells), MOST_CELLS_OF_MODEL, round(self._size[group.name]) + 1))
        chosen = sorted(cells, key=lambda cell: (-self._cells.idle_part(cell), cell))[:count]
        factor = max(1.0, survive * count / (count - 1))
        for cell in chosen:
            fits = self._cells.fit(group, cell, factor / count)[0]
            self._add_share(group, cell, fits / factor, factor)


def _survive(group: ModelGroup) -> float | None:
    """Return which part of the rates of a group is to survive the loss of a cell; None: it does not ask for that."""
    parts = [spec.survive or 0.0 for spec in group.models if spec.spread == "cell"]
    return max(parts) if parts else None


def _planned_factor(group: ModelGroup, traffic: Mapping[str, float]) -> float:
    """Return how many times its traffic each cell of a group is planned for, so that the others carry what is to
    survive the loss of the largest."""
    survive, total = _survive(group), sum(traffic.values())
    if survive is None or len(traffic) < 2:
        return 1.0
    return max(1.0, survive * total / (total - max(traffic.values())))


def after_loss(traffic: Shares, cell: str) -> dict[str, dict[str, float]]:
    """Return the shares of the models that lose a cell and have others: in the proportions of before."""
    left = {name: {c: share for c, share in shares.items() if c != cell} for name, shares in traffic.items()}
    return {
        name: {c: share / sum(shares.values()) for c, share in shares.items()}
        for name, shares in left.items()
        if shares and len(shares) < len(traffic[name])
    }
