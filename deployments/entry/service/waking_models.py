"""Wakes idle models: the controller hears of a request, and brings their gpu-lets back. The request waits if it has the
time, and is told when to come again if not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.service.dispatching import Dispatching, ask
from tenuto.deployments.entry.service.planned_model import PlannedModel
from tenuto.placement import Plan

_MOST_WAITING = 1024  # limit: requests that wait for gpu-lets to start; others are told when to come again


class IdleModelError(HttpError):
    """`model` is asked for, or the application whose stages ask for `names`, and some of these are idle or starting."""

    def __init__(self, model: PlannedModel, names: Sequence[str], start_s: float) -> None:
        message = (
            f"nobody had asked {', '.join(names)} for a while: gpu-lets for it start now. "
            f"Ask again in {start_s:.0f} s, or give the request so much time (X-SLO-Ms)."
        )
        super().__init__(503, message, retry_after_s=start_s)
        self.model, self.names, self.start_s = model, names, start_s


def wake(dispatching: Dispatching, name: str) -> None:
    """Let the controller hear that a model is asked for: a request expires at the dispatcher, and is counted there."""
    ask(dispatching, name, (), slo_ms=0.0)


class WakingModels:
    """The models that are idle, or start because somebody asked. What waits for them is here, too."""

    def __init__(self) -> None:
        self._start_s: dict[str, float] = {}
        self._waiting: list[tuple[Sequence[str], asyncio.Future[None]]] = []

    def follow(self, plan: Plan | None, models: Mapping[str, PlannedModel]) -> None:
        """Take the present plan and its models; what waits for those that are ready goes on."""
        known = self._start_s if plan is None else self._start_s | plan.idle
        self._start_s = {name: s for name, s in known.items() if name in models and not models[name].is_ready}
        waiting, self._waiting = self._waiting, []
        for names, awake in waiting:
            if not self._start_s.keys().isdisjoint(names):
                self._waiting.append((names, awake))
            elif not awake.done():
                awake.set_result(None)

    def check(self, model: PlannedModel, names: Sequence[str]) -> None:
        """Raise `IdleModelError` if some of the models that a request needs are idle or starting."""
        asleep = [name for name in names if name in self._start_s]
        if asleep:
            raise IdleModelError(model, asleep, max(self._start_s[name] for name in asleep))

    def wake(self, error: IdleModelError, dispatching: Dispatching, left_s: float) -> asyncio.Future[None] | None:
        """Let the controller hear that models are asked for. Return what is done when they can be asked; None if the
        request has not the time to wait, or too many do.

        Args:
            error: says which models.
            dispatching: the scheduling side.
            left_s: time that the request has.
        """
        for name in error.names:
            wake(dispatching, name)
        self._waiting = [each for each in self._waiting if not each[1].done()]
        if left_s < error.start_s or len(self._waiting) >= _MOST_WAITING:
            return None
        awake = asyncio.get_running_loop().create_future()
        self._waiting.append((error.names, awake))
        return awake
