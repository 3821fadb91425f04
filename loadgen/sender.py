"""The protocol of senders, which carry a client's requests to the service under test; with the request body and the
reply. Transports are in `senders/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Body:
    """One request in a form of the Open Inference Protocol: JSON of `json_length` bytes with raw tensors behind it, or
    JSON alone (None). With `is_raw` it is what the model's hooks read. With `is_prompt` it is JSON for OpenAI's
    /v1/completions, which asks for a stream. With `is_streamed` its answer is a stream, too.
    """

    data: bytes
    json_length: int | None = None
    is_raw: bool = False
    is_prompt: bool = False
    is_streamed: bool = False


@dataclass(slots=True)
class Reply:
    """The answer to a request: status 200, 429, 504 … as in `Outcome.http_status`; 0: no answer came, and `error` says
    why.

    Durations are ms, as the server measured them on its own clocks; NaN if it did not say.
    """

    status: int
    batching_ms: float = float("nan")
    gpulet_queue_ms: float = float("nan")
    execution_ms: float = float("nan")
    batch_size: int = 0
    gpulet: str = ""
    error: str = ""
    writing_ms: float = float("nan")  # of a stream: from the first token to the end, on the client's clock
    tokens: int = 0  # of a stream
    stage_ms: Mapping[str, float] = field(default_factory=dict)  # of an application: from due to its last answer


# Called exactly once per request, with the token of `send`.
OnReply = Callable[[int, Reply], None]


class Sender(Protocol):
    """How a client reaches the service under test."""

    async def open(self, connections: int, on_reply: OnReply) -> None:
        """Get ready; `on_reply` will be called once per request, on the event loop."""

    def prepare(self, model: str, body: Body, slo_ms: float | None = None) -> Any:
        """Return a request in the form `send` takes; comes after `open`. `model`: its name, or NAME:VERSION. `slo_ms`:
        time it has, if not the plan's."""

    def send(self, prepared: Any, request_id: str, token: int) -> None:
        """Send now and return. It never waits, and never limits how many requests are open."""

    def close(self) -> None:
        """Close all connections; open requests get no answer any more."""
