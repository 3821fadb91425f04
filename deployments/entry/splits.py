"""Splits the requests of a model that name no version among its versions, and sends shadows their copies."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tenuto.deployments.dispatch.in_flight import Request
from tenuto.deployments.entry.call import InferCall
from tenuto.deployments.entry.dispatching import Dispatching, ask
from tenuto.deployments.wire.answers import Executed
from tenuto.deployments.wire.arena import Slot
from tenuto.deployments.wire.tensors import InputPart
from tenuto.placement.versions import by_model, taking_the_rest, tensors_of, why_not_interchangeable
from tenuto.placement.workload import ModelSpec

logger = logging.getLogger("ray.serve")

_MOST_COPIES = 64  # limit: that wait at once for the versions of one process; no more are made until one has ended


class Split(NamedTuple):
    """The versions of a model by their names in the plan, each with its upper bound for a random number in [0, 1).
    `rest` gets the requests whose number is below no bound."""

    rest: str
    canaries: tuple[tuple[float, str], ...]
    shadows: tuple[tuple[float, str], ...]

    def choose(self, drawn: float) -> str:
        """Return the version of one request."""
        return next((name for below, name in self.canaries if drawn < below), self.rest)


def splits_of(specs: Sequence[ModelSpec], dispatching: Dispatching) -> dict[str, Split]:
    """Return the splits of a plan's models that have versions. A version has no part in them while it cannot be asked,
    or if it takes other tensors than the version that takes the rest."""
    found = {}
    for model, versions in by_model(specs).items():
        rest = taking_the_rest(versions)
        if rest is None:
            continue
        canaries, shadows, upto = [], [], 0.0
        for spec in versions:
            if spec is rest or spec.share_pct == 0.0 or not dispatching.is_ready(spec.name):
                continue
            why = _why_other(rest.name, spec.name, dispatching)
            if why is not None:
                logger.warning("%s is sent none of the requests of '%s': it %s", spec.name, model, why)
            elif spec.shadow:
                shadows.append((1.0 if spec.share_pct is None else spec.share_pct / 100.0, spec.name))
            else:
                upto += (spec.share_pct or 0.0) / 100.0
                canaries.append((upto, spec.name))
        found[model] = Split(rest.name, tuple(canaries), tuple(shadows))
    return found


def _why_other(rest: str, name: str, dispatching: Dispatching) -> str | None:
    there, here = dispatching.signature(rest), dispatching.signature(name)
    if there is None or here is None:
        return None
    return why_not_interchangeable(tensors_of(there), tensors_of(here), rest)


class Copies:
    """Sends shadows copies of requests that have been answered, so that no answer waits for them. Gpu-lets take copies
    after everything else. Their answers are counted, and go nowhere."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        """`draw` returns random numbers in [0, 1)."""
        self.draw = draw
        self._open = 0

    def send(
        self,
        dispatching: Dispatching,
        shadows: Sequence[tuple[float, str]],
        samples: Sequence[Sequence[InputPart]],
        slot: Slot | None,
        client_id: str,
    ) -> None:
        """Copy a request of one or more samples; large ones lie in `slot`. Nothing is copied when many copies wait, or
        when memory for requests is scarce."""
        if slot is not None and slot.is_scarce:
            return
        for below, name in shadows:
            if self.draw() >= below or self._open + len(samples) > _MOST_COPIES:
                continue
            for parts in samples:
                answer = ask(dispatching, name, parts, memory=slot, client_id=client_id, yields=True)
                self._open += 1
                answer.add_done_callback(self._ended)

    def _ended(self, _answer: object) -> None:
        self._open -= 1


class CopiedCall(InferCall):
    """A call whose request goes to shadows, too, once it has been answered."""

    _copies: Copies | None = None
    _samples: Sequence[Sequence[InputPart]] = ()

    def _start(self, samples: Sequence[Sequence[InputPart]], early: Request | None) -> None:
        self._samples = samples
        super()._start(samples, early)

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        """Answer as any call does, then copy."""
        was_over, slot = self._is_over, self._exchange.slot
        if slot is not None:
            slot.hold()
        super().executed(request, executed, row)
        if self._is_over and not was_over and self._copies is not None:
            self._copies.send(self._dispatching, self._route.shadows, self._samples, slot, request.client_id)
        if slot is not None:
            slot.release()
