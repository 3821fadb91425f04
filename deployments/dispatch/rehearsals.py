"""Replays of rehearsals run in another process, because a thread would hold up the dispatcher by Python's lock. The
process stays, because starting one costs more than most replays."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tenuto.batching.rehearsal.replay import Replay, Replayed

logger = logging.getLogger("ray.serve")

_LONGEST_S = 60.0  # limit: after this time a replay is given up
_ENDS_S = 60.0  # limit: the wait for a process to end after a kill
# The process runs only when no other process wants the core. The lowest niceness is not enough: such a process still
# keeps the core until the end of its time slice, some 3 ms. These lines come before any import, because imports take
# 0.8 s just when the first requests come.
LAST_IN_LINE = """
import os
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
except OSError:
    os.nice(19)
"""
_PROGRAM = f"from {__name__} import serve; serve()"


class Computed(NamedTuple):
    """The result of a replay, and the CPU time it took; None if that was not measured."""

    result: list[Replayed]
    cpu_ms: float | None


# Runs a replay.
Compute = Callable[[Replay], Awaitable[Computed]]


class RehearsalProcess:
    """A process of the lowest priority that runs one replay after the other. The first replay starts it."""

    def __init__(self, longest_s: float = _LONGEST_S, first: str = LAST_IN_LINE) -> None:
        """`longest_s`: a replay that takes longer is given up; `first`: code that the process runs before all else."""
        self._longest_s = longest_s
        self._program = first + _PROGRAM
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self, job: Replay) -> Computed:
        """Return the result of a replay, and the CPU time it took.

        Raises:
            EOFError: the process ended.
            OSError: the process could not be started, or ended.
            TimeoutError: the replay took too long; the process was ended.
        """
        try:
            async with asyncio.timeout(self._longest_s):
                return await asyncio.get_running_loop().run_in_executor(None, self._run, job)
        except BaseException:
            self.close()  # otherwise half an answer might still come and be read as the next one
            raise

    def _run(self, job: Replay) -> Computed:
        process = self._process
        if process is None:
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", self._program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        return Computed(*pickle.load(process.stdout))  # our own child wrote these bytes, so they are safe to unpickle

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_ENDS_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # bytes that could no longer be written
                        pipe.close()


class RehearsalRunner:
    """Runs one replay at a time; a result that comes after `close` is dropped."""

    def __init__(self, compute: Compute | None = None) -> None:
        """`compute`: runs a replay; by default another process does."""
        self._process = RehearsalProcess()
        self._compute = compute or self._process.run
        self._task: asyncio.Task[None] | None = None

    def begin(
        self, replay: Replay, due_in_ms: float, learn: Callable[[Computed], None], fail: Callable[[], None]
    ) -> None:
        """Start a replay and return at once. `learn` is called on the event loop when the result is due, or later;
        `fail` when there will be none."""
        self._task = asyncio.create_task(self._run(replay, due_in_ms, learn, fail), name="rehearsal")

    def close(self) -> None:
        """Drop the replay that runs, and end the process."""
        if self._task is not None:
            self._task.cancel()
        self._process.close()

    async def _run(
        self, replay: Replay, due_in_ms: float, learn: Callable[[Computed], None], fail: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + due_in_ms / 1000.0
        try:
            computed = await self._compute(replay)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            logger.warning("a rehearsal of the scheduler failed: %s: %s", type(error).__name__, error)
            fail()
            return
        await asyncio.sleep(due - loop.time())
        learn(computed)


def serve() -> None:
    """Run replays from stdin until it ends: the main function of the process."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while True:
        began = time.process_time()
        try:
            result = pickle.load(source).run()
        except EOFError:
            return
        pickle.dump((result, 1000.0 * (time.process_time() - began)), sink)
        sink.flush()
