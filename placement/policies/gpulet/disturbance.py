"""What neighbours cost in gpulet's planning, where models take turns in the gpu-lets of a GPU.

The interference models themselves are in `tenuto.placement.interference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tenuto.errors import InvalidInputError
from tenuto.placement.interference import InterferenceModel, NoInterference, Resident
from tenuto.placement.policies.gpulet.share_costs import ShareCosts
from tenuto.profiles.share_latency import WHOLE_GPU_PCT


class Disturbance:
    """An interference model for planning, which asks the same again and again: it keeps its answers.

    Models take turns in a neighbour, so only one of its batches runs at a time. The batch that alone slows the gpu-let
    down most stands for it; these worst batches together give the factor.
    """

    def __init__(self, model: InterferenceModel) -> None:
        self._model = model
        self._known: dict[object, float] = {}
        self.none = isinstance(model, NoInterference)

    def factor(self, own: Resident, neighbours: Sequence[Sequence[Resident]]) -> float:
        """Return the factor, 1 without neighbours.

        It is inf when the model cannot judge a batch, so that such a batch never gets a neighbour.

        Args:
            neighbours: the batches of each other gpu-let on the GPU.
        """
        busy = [turns for turns in neighbours if turns]
        if self.none or not busy:
            return 1.0
        worst = [max(turns, key=lambda other: self._ask(own, (other,))) for turns in busy]
        return self._ask(own, tuple(worst))

    def _ask(self, own: Resident, others: tuple[Resident, ...]) -> float:
        key = tuple((id(one.profile), one.batch_size, one.share_pct) for one in (own, *others))
        if key not in self._known:
            try:
                self._known[key] = self._model.slowdown(own, others)
            except InvalidInputError:
                self._known[key] = math.inf
        return self._known[key]


class Reserve:
    """The rate of a share beside the worst neighbour that may still come, for gpu-lets next to a free one.

    The worst neighbour is the workload's model that slows a batch down most, with its largest batch on the rest of the
    GPU. Models that cannot be judged are left out: they never become neighbours.
    """

    def __init__(self, costs: Sequence[Mapping[str, ShareCosts]], disturbances: Mapping[str, Disturbance]) -> None:
        self._disturbances = disturbances
        self._costs: dict[str, list[ShareCosts]] = {}
        for by_kind in costs:
            for kind, own in by_kind.items():
                self._costs.setdefault(kind, []).append(own)
        self._known: dict[object, float] = {}

    def capacity_rps(self, kind: str, own: ShareCosts, share_pct: float) -> float:
        """Return the highest rate the share carries within the SLO beside that neighbour, alone on a whole GPU."""
        disturbance = self._disturbances[kind]
        if disturbance.none or share_pct >= WHOLE_GPU_PCT:
            return own.capacity_rps(share_pct)
        key = (kind, own.spec.name, share_pct)
        if key not in self._known:
            comers = self._comers(kind, own, WHOLE_GPU_PCT - share_pct)
            self._known[key] = slowed_rps(
                own,
                share_pct,
                lambda batch: max(
                    (f for other in comers if (f := disturbance.factor(batch, [[other]])) < math.inf), default=1.0
                ),
            )
        return self._known[key]

    def _comers(self, kind: str, own: ShareCosts, room_pct: float) -> list[Resident]:
        comers = []
        for other in self._costs.get(kind, ()):
            shares = [share for share in other.latency_ms if share <= room_pct + 1e-6]
            if shares and other.spec.name != own.spec.name:
                comers.append(Resident(other.model, len(other.latency_ms[max(shares)]) - 1, max(shares)))
        return comers


def slowed_rps(own: ShareCosts, share_pct: float, factor: Callable[[Resident], float]) -> float:
    """Return the highest rate the share carries within the SLO when `factor` slows batches down."""
    best = 0.0
    for size, latency in enumerate(own.latency_ms.get(share_pct, ())):
        if size:
            slowed = latency * factor(Resident(own.model, size, share_pct))
            if 2 * slowed <= own.slo_ms:
                best = max(best, 1000.0 * size / slowed)
    return best
