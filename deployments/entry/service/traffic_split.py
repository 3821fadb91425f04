"""Splits the requests of a model that name no version among its versions, and sends shadows their copies."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tenuto.deployments.dispatch.in_flight import Request, Samples
from tenuto.deployments.entry.service.dispatching import Dispatching, ask
from tenuto.deployments.entry.service.infer_call import InferCall
from tenuto.deployments.entry.service.run_memory import RunMemory
from tenuto.deployments.wire.answers import Executed
from tenuto.deployments.wire.arena import Slot
from tenuto.deployments.wire.tensors import InputPart
from tenuto.placement.versions import by_model, taking_the_rest, tensors_of, why_not_interchangeable
from tenuto.placement.workload import ModelSpec
from tenuto.profiles.networks.catalogue import ModelSignature

logger = logging.getLogger("ray.serve")

_MOST_COPIES = 64  # limit: that wait at once for the versions of one process; no more are made until one has ended


Shadows = tuple[tuple[float, str], ...]  # versions that get copies, each with the part of the requests


class Split(NamedTuple):
    """The versions of a model by their names in the plan, each with its upper bound for a random number in [0, 1).
    `rest` gets the requests whose number is below no bound, and answers whatever else is asked of the model."""

    rest: str
    canaries: tuple[tuple[float, str], ...]
    shadows: Shadows

    def choose(self, drawn: float) -> str:
        """Return the version of one request."""
        return next((name for below, name in self.canaries if drawn < below), self.rest)


def traffic_splits(
    specs: Sequence[ModelSpec], is_ready: Callable[[str], bool], signature: Callable[[str], ModelSignature | None]
) -> dict[str, Split]:
    """Return the splits of a plan's models that have versions.

    A version has no part in them while it cannot be asked, or if it takes other tensors than the main version. What is
    not ready gives its share to what is: that of a canary goes to the main version, and that of the main version to the
    canaries, in proportion to theirs.

    Args:
        specs: the plan's models.
        is_ready: whether a version can be asked.
        signature: the tensors of a version; None while they are not known.
    """
    found = {}
    for model, versions in by_model(specs).items():
        main = taking_the_rest(versions)
        if main is None:
            continue
        shares: dict[str, float] = {}
        shadows = []
        for spec in versions:
            if spec is main or spec.share_pct == 0.0 or not is_ready(spec.name):
                continue
            why = _why_other(main.name, spec.name, signature)
            if why is not None:
                logger.warning("%s is sent none of the requests of '%s': it %s", spec.name, model, why)
            elif spec.shadow:
                shadows.append((1.0 if spec.share_pct is None else spec.share_pct / 100.0, spec.name))
            else:
                shares[spec.name] = (spec.share_pct or 0.0) / 100.0
        rest, whole = main.name, 1.0
        if shares and not is_ready(main.name):
            rest, whole = max(shares, key=lambda name: shares[name]), sum(shares.values())
            del shares[rest]
        bounds = itertools.accumulate(share / whole for share in shares.values())
        found[model] = Split(rest, tuple(zip(bounds, shares, strict=True)), tuple(shadows))
    return found


def _why_other(main: str, name: str, signature: Callable[[str], ModelSignature | None]) -> str | None:
    there, here = signature(main), signature(name)
    if there is None or here is None:
        return None
    return why_not_interchangeable(tensors_of(there), tensors_of(here), main)


class ShadowCopies:
    """Sends shadows copies of requests that have been answered, so that no answer waits for them. Gpu-lets take copies
    after everything else. Their answers are counted, and go nowhere."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        """`draw` returns random numbers in [0, 1)."""
        self.draw = draw
        self._open = 0

    def send(
        self,
        dispatching: Dispatching,
        shadows: Shadows,
        samples: Sequence[Sequence[InputPart]],
        slot: Slot | RunMemory | None,
        client_id: str,
        sizes: Sequence[tuple[int, ...]],
    ) -> None:
        """Copy a request of one or more samples, which have these sizes; large ones lie in `slot`. Nothing is copied
        when many copies wait, or when memory for requests is scarce."""
        if slot is not None and slot.is_scarce:
            return
        for below, name in shadows:
            if self.draw() >= below or self._open + len(samples) > _MOST_COPIES:
                continue
            together = Samples(len(samples)) if len(samples) > 1 else None
            for parts, size in zip(samples, sizes, strict=True):
                how = {"client_id": client_id, "yields": True, "samples": together, "sizes": size}
                try:
                    answer = ask(dispatching, name, parts, memory=slot, **how)
                except KeyError:  # the shadow has left the plan meanwhile
                    break
                self._open += 1
                answer.add_done_callback(self._ended)

    def _ended(self, _answer: object) -> None:
        self._open -= 1


class CopiedCall(InferCall):
    """A call whose request goes to shadows, too, once it has been answered."""

    _copies: ShadowCopies | None = None
    _samples: Sequence[Sequence[InputPart]] = ()

    def _start(self, samples: Sequence[Sequence[InputPart]], early: Request | None) -> None:
        self._samples = samples
        super()._start(samples, early)

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        """Answer as any call does, then copy."""
        was_over, slot = self._is_over, self._exchange.slot
        if slot is not None:
            slot.hold()
        try:
            super().executed(request, executed, row)
            if self._is_over and not was_over and self._copies is not None and not request.offline:
                copied = self._route.shadows, self._samples, slot, request.client_id, self._sizes
                self._copies.send(self._dispatching, *copied)
        finally:
            if slot is not None:
                slot.release()
