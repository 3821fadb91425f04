"""Asks the lines of batches, a bounded number at a time, and keeps their answers. Clients share these evenly, and so
do the batches of each.

It has no state that matters: a process that takes over asks what has no answer yet.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import msgspec

from tenuto.deployments.offline.batch_store import BatchLine, BatchStore, LineAnswer, RequestLine, answer_text
from tenuto.errors import new_incident

logger = logging.getLogger("ray.serve")

T = TypeVar("T")
_LOOKS_S = 0.5  # pace: of looks for new batches
_FULL_S = 5.0  # pace: between two tries to write on a disk that is full
_FORGETS_S = 3600.0  # pace: of looks for what has expired
_ENDS_S = 30.0  # limit: for lines under way when their batch is cancelled or expires
_MOST_DEATHS = 10  # limit: processes that may die with a line before it is answered as failed


class LineReply(NamedTuple):
    """The response to a line. `retry_s`: when to ask again, where the line was refused for the moment; `has_failed`:
    its process died."""

    status: int
    body: bytes
    retry_s: float | None = None
    has_failed: bool = False


Ask = Callable[[str, RequestLine], Awaitable[LineReply]]  # asks a line for the key of this name


class BatchRunner:
    """Works batches off. Use it on one event loop."""

    def __init__(self, store: BatchStore, thread: Executor, ask: Ask) -> None:
        """Take the store, the one thread that uses it, and what asks a line."""
        self._store, self._thread, self._ask = store, thread, ask
        self.full_s = _FULL_S
        self._batches: dict[str, str] = {}  # that are worked off, with the names of their keys
        self._answers: asyncio.Queue[tuple[str, LineAnswer, asyncio.Future[None]]] = asyncio.Queue()
        self.problems: dict[object, str] = {}  # why nothing is asked now, by what waits

    @property
    def problem(self) -> str:
        """Why nothing is asked now; empty if nothing is wrong."""
        return next(iter(self.problems.values()), "")

    async def on_disk(self, work: Callable[..., T], *arguments: Any) -> T:
        """Use the store, on its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*arguments))

    async def _in_the_end(self, work: Callable[..., T], *arguments: Any) -> T:
        """Use the store; wait while the disk is full."""
        own = object()
        try:
            while True:
                try:
                    return await self.on_disk(work, *arguments)
                except (OSError, sqlite3.OperationalError) as error:
                    problem = f"{self._store.folder} cannot be used, and they go on when it can ({error})"
                    if not self.problems:
                        logger.error("batches wait: %s", problem)
                    self.problems[own] = problem
                await asyncio.sleep(self.full_s)
        finally:
            self.problems.pop(own, None)

    async def run(self) -> None:
        """Work all batches off, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._record(), name="record answers")
            tasks.create_task(self._forget(), name="forget what has expired")
            while True:
                await self._in_the_end(self._store.check_database)
                for batch_id, key in await self._in_the_end(self._store.open_batches):
                    if batch_id not in self._batches:
                        self._batches[batch_id] = key
                        tasks.create_task(self._work_off_alone(batch_id, key), name=batch_id)
                await asyncio.sleep(_LOOKS_S)

    async def _forget(self) -> None:
        """Delete what has expired, now and every hour."""
        while True:
            while await self._in_the_end(self._store.forget_old):
                pass
            await asyncio.sleep(_FORGETS_S)

    async def _work_off_alone(self, batch_id: str, key: str) -> None:
        """Work a batch off. A fault with it stops no other: the batch is left until the store starts again."""
        try:
            await self._work_off(batch_id, key)
        except sqlite3.Error:
            raise  # the store itself is at fault
        except Exception:
            logger.exception("%s is left as it is", batch_id)

    async def _work_off(self, batch_id: str, key: str) -> None:
        while await self._in_the_end(self._store.validate, batch_id):
            pass
        rest, deaths, after = _Rest(), Counter[int](), -1
        asking: set[asyncio.Task[None]] = set()
        while True:
            free = share_of(key, [*self._batches.values()], self._store.options.under_way) - len(asking)
            if (lines := await self._in_the_end(self._store.pending, batch_id, after, max(1, free))) is None:
                break
            if not lines and not asking:
                if after < 0:
                    break
                after = -1  # those that were refused for the moment come once more
            for line in lines[: max(0, free)] if time.monotonic() >= rest.until_s else ():
                task = asyncio.create_task(self._answer(batch_id, key, line, rest, deaths), name=line.custom_id)
                asking.add(task)
                task.add_done_callback(asking.discard)
                after = line.number
            if asking:
                await asyncio.wait(asking, timeout=_LOOKS_S, return_when=asyncio.FIRST_COMPLETED)
            elif lines:
                await asyncio.sleep(_LOOKS_S)
        if asking and (await asyncio.wait(asking, timeout=_ENDS_S))[1]:
            for task in list(asking):
                task.cancel()
            await asyncio.wait(asking)
        while await self._in_the_end(self._store.finish, batch_id):
            pass
        del self._batches[batch_id]

    async def _answer(self, batch_id: str, key: str, line: BatchLine, rest: _Rest, deaths: Counter[int]) -> None:
        """Ask a line and keep its answer, unless it is to be asked once more."""
        try:
            reply = await self._ask(key, msgspec.json.decode(line.request, type=RequestLine))
        except Exception:  # asked again, it would fail again
            incident = new_incident()
            logger.exception("%s: line %d of %s", incident, line.number, batch_id)
            reason = f"the line could not be asked. Incident {incident} in the log of the store."
            reply = LineReply(500, msgspec.json.encode({"error": reason}))
        deaths[line.number] += reply.has_failed
        if reply.retry_s is not None and deaths[line.number] < _MOST_DEATHS:
            rest.until_s = time.monotonic() + reply.retry_s
            return
        is_ok = reply.status < 400
        response = {"status_code": reply.status, "request_id": line.custom_id, "body": msgspec.Raw(reply.body)}
        text = answer_text(line.custom_id, response)
        recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers.put_nowait((batch_id, LineAnswer(line.number, is_ok, text), recorded))
        await recorded

    async def _record(self) -> None:
        """Keep answers: all that are there in one transaction for each batch."""
        while True:
            came = [await self._answers.get()]
            while not self._answers.empty():
                came.append(self._answers.get_nowait())
            by_batch = defaultdict(list)
            for batch_id, answer, _ in came:
                by_batch[batch_id].append(answer)
            for batch_id, answers in by_batch.items():
                await self._in_the_end(self._store.record, batch_id, answers)
            for _, _, recorded in came:
                if not recorded.done():  # its batch ended meanwhile
                    recorded.set_result(None)


def share_of(key: str, keys: Sequence[str], under_way: int) -> int:
    """Return how many lines of a batch of a key may be under way; `keys` are those of all open batches."""
    return max(1, under_way // (len(set(keys)) * keys.count(key)))


class _Rest:
    """Until when a batch asks nothing more, as a line was refused for the moment."""

    until_s = 0.0
