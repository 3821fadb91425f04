"""What the HTTP side of a gateway needs of the scheduling side, whether it is in the same process or in others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from tenuto.deployments.entry.served import ServedModel
from tenuto.deployments.wire.answers import Answer
from tenuto.placement import Plan

__all__ = ["Front"]


class Front(Protocol):
    """`Dispatcher` in the gateway's own process, `RemoteDispatchers` where several gateways feed other processes."""

    @property
    def plan(self) -> Plan | None:
        """The plan that is being served."""

    def submit(
        self, model: str, parts: Sequence[bytes | memoryview], slo_ms: float | None = None, client_id: str = ""
    ) -> asyncio.Future[Answer]:
        """Queue one request and return the future of its answer; cancelling the future frees its place."""

    def is_ready(self, model: str | None = None) -> bool:
        """Whether every gpu-let is usable; with a model, whether at least one of its gpu-lets is."""

    def served(self, model: str) -> ServedModel | None:
        """Return a model's signature as a gpu-let reported it; None before."""

    def gpulets(self) -> list[dict[str, Any]]:
        """Return what every gpu-let reported when it connected, and whether it is up."""

    def record_answer(self, answer_ms: float) -> None:
        """Take the time from an answer's arrival to its response handed to the socket."""

    async def report(self, what: str, **arguments: Any) -> Any:
        """Return plain data for operators: `status`, `queue` or `requests` (`id`, `limit`).

        Raises:
            TimeoutError: a dispatcher in another process did not answer.
        """

    async def close(self) -> None:
        """Answer everything that waits as failed, and disconnect."""
