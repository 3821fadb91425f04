"""What a dispatcher knows of a request and of a batch while they are its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tenuto.deployments.wire.answers import Answer

__all__ = ["Batch", "Request"]


@dataclass(slots=True)
class Request:
    """A request between arrival and answer.

    `parts` holds one buffer per input of the model, in signature order; `client_id` is what its client calls it.
    """

    id: int
    name: str
    model: int  # index in the present plan
    deadline_ms: float
    received_ms: float
    parts: Sequence[bytes | memoryview]
    future: asyncio.Future[Answer]
    client_id: str = ""
    reserve_ms: float = 0.0  # kept for the way back through another process
    dispatched_ms: float = 0.0
    retried: bool = False


@dataclass(slots=True)
class Batch:
    """A batch from its dispatch until its answer; `aborted` ones were preempted and their answer is ignored.

    `members` are the models of a merged program's batch with their rows, in the order of the requests; else empty.
    """

    sequence: int
    name: str  # of its program
    program: int
    gpulet: int
    requests: list[Request]
    dispatched_ms: float  # as the core dates it
    sent_ms: float  # on the clock, which is a little earlier where the core was woken early
    aborted: bool = False
    members: Sequence[tuple[str, int]] = ()

    @property
    def rows(self) -> Sequence[tuple[str, int]]:
        """The models in it, with the number of their requests."""
        return self.members or ((self.name, len(self.requests)),)
