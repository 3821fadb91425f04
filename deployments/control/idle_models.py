"""Knows which models nobody asks any more: their gpu-lets may end, down to no GPU at all, and start again when somebody
asks. A model says with `idle_after_s` that it may."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from tenuto.deployments.control.estimates import FOLLOW
from tenuto.deployments.control.interface import ModelSeen
from tenuto.placement.versions import split_name
from tenuto.placement.workload import ModelSpec


class IdleModels:
    """When models were last asked for. The versions of a model are idle together."""

    def __init__(self, idle: Sequence[ModelSpec]) -> None:
        """Begin; `idle`: the models that are idle already."""
        self._asked_s = {spec.model: -math.inf for spec in idle}
        self.waking: dict[str, float] = {}  # since when
        self.wake_s: float | None = None  # from the request that wakes a model until it serves; None: not measured

    def observe(
        self,
        now_s: float,
        models: Sequence[ModelSpec],
        seen: Mapping[str, ModelSeen],
        *,
        is_changing: bool,
        is_prepared: bool,
    ) -> list[ModelSpec]:
        """Take one look. Return the models that nobody has asked for as long as their `idle_after_s`. While a change is
        under way, a model that is not idle stays so: it may be starting. So does one that was asked again, while a
        change is prepared: the planner is at work, or a GPU is to come."""
        arrived = Counter({spec.model: 0 for spec in models})
        for spec in models:
            if spec.name in seen:
                arrived[spec.model] += seen[spec.name].arrived + seen[spec.name].offline
        idle = {spec.model for spec in models if self._is_idle(now_s, spec)}
        starting = {split_name(name)[0] for name in self.waking} if is_prepared else set()
        starting |= arrived.keys() if is_changing else set()
        self._asked_s = {
            name: now_s if count or name in starting - idle else self._asked_s.get(name, now_s)
            for name, count in arrived.items()
        }
        return [spec for spec in models if self._is_idle(now_s, spec)]

    def _is_idle(self, now_s: float, spec: ModelSpec) -> bool:
        unasked_s = now_s - self._asked_s.get(spec.model, now_s)
        return spec.idle_after_s is not None and unasked_s >= spec.idle_after_s

    def follow_start(self, now_s: float, waking: Collection[str]) -> None:
        """Take the models that are asked again and do not serve yet; those of before that are not among them do."""
        for name in self.waking.keys() - waking:
            lasted_s = now_s - self.waking[name]
            self.wake_s = lasted_s if self.wake_s is None else self.wake_s + FOLLOW * (lasted_s - self.wake_s)
        self.waking = {name: self.waking.get(name, now_s) for name in waking}

    def restart(self, now_s: float) -> None:
        """Count no model as idle yet: an operator wants them all."""
        self._asked_s = dict.fromkeys(self._asked_s, now_s)
