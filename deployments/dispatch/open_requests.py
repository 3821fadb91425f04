"""The requests of a dispatcher between arrival and answer, whatever happens to them meanwhile."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from tenuto.deployments.dispatch.accounts import Accounts
from tenuto.deployments.dispatch.in_flight import Request
from tenuto.deployments.wire.answers import Answer

__all__ = ["OpenRequests"]


class OpenRequests:
    """Invariant: a request is open until it is finished or its client goes away, whichever comes first; it is counted
    once, as that."""

    def __init__(self, accounts: Accounts, on_left: Callable[[Request], None]) -> None:
        """Start with none.

        Args:
            accounts: what ends are counted in.
            on_left: told of a request that is open no more because its client went away.
        """
        self._accounts = accounts
        self._on_left = on_left
        self._ids = itertools.count()
        self._open: dict[int, Request] = {}

    def __contains__(self, request: Request) -> bool:
        return request.id in self._open

    def __iter__(self) -> Iterator[Request]:
        """Return those that are open now; requests may come and go meanwhile."""
        return iter(list(self._open.values()))

    def open(
        self,
        model: str,
        index: int,
        parts: Sequence[bytes | memoryview],
        *,
        now_ms: float,
        allowed_ms: float,
        client_id: str,
        reserve_ms: float,
    ) -> Request:
        """Take a request that has come now; see `Request` for the arguments."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        deadline_ms = now_ms + allowed_ms
        request = Request(next(self._ids), model, index, deadline_ms, now_ms, parts, future, client_id, reserve_ms)
        self._accounts.request_submitted(model)
        self._open[request.id] = request
        future.add_done_callback(functools.partial(self._on_settled, request))
        return request

    def _on_settled(self, request: Request, future: asyncio.Future[Answer]) -> None:
        """Forget a request whose client went away."""
        if future.cancelled() and self._open.pop(request.id, None) is not None:
            self._accounts.request_cancelled(request.name)
            self._on_left(request)

    def finish(self, request: Request, answer: Answer, now_ms: float) -> None:
        """Answer an open request."""
        self._open.pop(request.id, None)
        self._accounts.request_ended(request, answer, now_ms)
        if not request.future.done():
            request.future.set_result(answer)

    def of(self, ids: Iterable[int]) -> list[Request]:
        """Return those of these ids that are still open."""
        return [request for request_id in ids if (request := self._open.get(request_id)) is not None]

    def waiting(self) -> Counter[str]:
        """Return how many wait for a batch, by model."""
        return Counter(request.name for request in self._open.values() if request.dispatched_ms == 0.0)
