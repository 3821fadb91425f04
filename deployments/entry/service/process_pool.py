"""Processes beside a gateway that run anybody's code: a model's own hooks, or the functions of an application.

In a thread, code that computes in Python would hold the lock that the event loop needs, and code that hangs could not
be ended. Every wait has an end:

- At most `MOST_WAITING` calls of a pool wait. Further calls are turned away.
- When a call can no longer be begun in time, it is dropped, and the request expires.
- A client is answered at its deadline, whatever its call does.
- When a call takes longer than 2 s and longer than the SLO, it hangs. Its process is killed, with all that it has
  started, and replaced a second later.

`pebble` was tried in its place. It unpickles in the gateway what a process answers, so code that was taken over would
run here; it leaves alive what a killed call had started; and 602 kB there and back take 8.0 ms, not 0.4 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from tenuto.deployments.entry.http.exchange import HttpError, expired
from tenuto.deployments.entry.service.application_functions import MadeTensor
from tenuto.deployments.entry.service.hook_process import PREFIX, BadBody, Done, Faulty, HookAnswer, HookCall, pack
from tenuto.deployments.wire.arena import Held, Slot
from tenuto.deployments.wire.tensors import Buffer, InputPart, RequestInputs, element_ends
from tenuto.errors import new_incident
from tenuto.profiles.networks.catalogue import BYTES, DTYPES, ModelSignature
from tenuto.profiles.networks.cpu_share import calm_openmp

logger = logging.getLogger("ray.serve")

HANGS_S = 2.0  # limit: the time of a call; a longer SLO allows more
_START_S = 60.0  # limit: the time to import the code on a busy machine
_LAST_S = 1.0  # limit: the time between the last message of a process and its end
AGAIN_S = 1.0  # pace: the wait before a process is replaced, as a start takes a core for about as long
MOST_WAITING = 64  # limit: waiting calls of a pool, as for bodies that wait to be decoded
_DROPPED_BYTES = 1 << 20  # limit: bytes of an answer that are read at once where there is no memory for it
_MOST_SAID_BYTES = 1 << 18  # limit: the size of a message, whose text is shorter; of a thousand tensors it has 40 KB
_FADES = 0.99  # derived: remembers the longest of about the last hundred calls; with less it forgets rare long calls
WORKER = ["-m", "tenuto.deployments.entry.service.hook_process"]

_ITEM_BYTES = {name: 1 if name == "bool" else int(name.lstrip("uintfloa")) // 8 for name in DTYPES}

ResultT = TypeVar("ResultT")
_ANSWERS: msgspec.msgpack.Decoder[HookAnswer] = msgspec.msgpack.Decoder(HookAnswer)


class HookFaultError(Exception):
    """The code failed, by a fault of its own. The text is for the log; `reason` is for the client."""

    def __init__(self, text: str, reason: str = "") -> None:
        """Take both texts."""
        super().__init__(text, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class _LostError(Exception):
    """A process has ended, or has to be ended. The text says why."""


def cut_requests(
    answer: HookAnswer, body: memoryview, model: ModelSignature, name: str, counts: range, slot: Slot | None = None
) -> list[RequestInputs]:
    """Cut the bytes behind an answer into requests of a model, which lie in `slot` if it is given. Types and sizes are
    checked, as an attacker may have taken over the process, and must not harm a gpu-let.

    Raises:
        HookFaultError: they are no requests, or not as many as there may be (`counts`); `name` is what made them.
    """
    requests, at = list[RequestInputs](), 0
    try:
        if not isinstance(answer, Done) or len(answer.requests) not in counts:
            raise ValueError(f"none, or not {counts.start} to {counts.stop - 1} of them")
        for made in answer.requests:
            parts, sizes = list[InputPart](), model.sizes_of([shape for _, _, shape, _ in made])
            for tensor, each in zip(model.inputs, made, strict=True):
                dtype, where = each[1], ("", 0) if slot is None else (slot.arena, slot.offset + at)
                if dtype != tensor.dtype and dtype not in tensor.accepts:
                    raise ValueError(f"{dtype} for {tensor.name}")
                stated = "" if dtype == tensor.dtype != BYTES else dtype
                parts.append(InputPart(check_length(each, body[at : at + each[3]]), stated, *where))
                at += each[3]
            requests.append(RequestInputs(parts, sizes))
    except ValueError as error:
        raise HookFaultError(f"{name} returned what fits no request: {error}") from None
    return requests


def check_length(made: MadeTensor, data: memoryview) -> memoryview:
    """Return the bytes of a tensor; raises `ValueError` if they are not as many as its type and shape need."""
    name, dtype, shape, _ = made
    count = math.prod(shape)
    if dtype == BYTES:
        element_ends(data, count)
    elif dtype not in _ITEM_BYTES or min(shape, default=0) < 0 or len(data) != count * _ITEM_BYTES[dtype]:
        raise ValueError(f"{name}: {len(data)} bytes of {dtype} for {list(shape)}")
    return data


def new_memory(size: int) -> memoryview:
    """Return memory for an answer that goes to no other process."""
    return memoryview(bytearray(size))


class _QueuedCall(NamedTuple):
    """One call. `latest_ms`: the latest moment at which it may begin. `number`: of two such calls, the lower one goes
    first. `memory`: holds what the call reads and writes. `room` returns the memory for the bytes of the answer."""

    latest_ms: float
    number: int
    message: HookCall
    parts: Sequence[Buffer]
    read: Callable[[HookAnswer, memoryview], Any]
    done: asyncio.Future[Any]
    memory: Held | None
    room: Callable[[int], memoryview]


class ProcessPool:
    """Made, used and closed on one event loop. `code`: what the processes run. `longest_ms`: what each kind of call
    takes: the longest lately, which fades."""

    def __init__(self, code: str, first: HookCall, processes: int, *, longest_s: float, most_bytes: int) -> None:
        """Start the processes.

        Args:
            code: what they run, for the log and for clients: `the hooks of 'm'`.
            first: the message to each of them.
            processes: how many there are.
            longest_s: how long a call may take.
            most_bytes: of an answer.
        """
        self.longest_ms: defaultdict[type[HookCall], float] = defaultdict(float)
        self.code, self._first, self._longest_s, self._most_bytes = code, first, longest_s, most_bytes
        self._numbers = itertools.count()
        self._waiting: asyncio.PriorityQueue[_QueuedCall] = asyncio.PriorityQueue()
        self._count = 0
        self.set_up: Done | None = None  # what the last process answered to the first message
        self._broken = ""  # why the last process could not be started
        self._tasks = [asyncio.create_task(self._run(), name=code) for _ in range(processes)]

    def begin(
        self,
        message: HookCall,
        parts: Sequence[Buffer],
        latest_ms: float,
        read: Callable[[HookAnswer, memoryview], ResultT],
        *,
        memory: Held | None = None,
        room: Callable[[int], memoryview] = new_memory,
    ) -> asyncio.Future[ResultT]:
        """Begin a call; the result is what `read` makes of its answer.

        Args:
            message: what is asked.
            parts: the bytes behind it.
            latest_ms: until when it may begin, on the monotonic clock.
            read: makes the result of the answer and the bytes behind that; it may raise `HookFaultError`.
            memory: is held while a process may read the bytes of the call or write those of its answer.
            room: returns memory for the bytes of the answer; raises `HttpError`, which is then the result.

        Raises:
            HttpError: 429 where too many wait, 503 where the code cannot be started.
        """
        if self._broken:
            raise HttpError(503, self._broken, retry_after_s=AGAIN_S)
        if self._count >= MOST_WAITING:
            raise HttpError(429, f"{MOST_WAITING} requests wait for {self.code}. Retry in a second.", retry_after_s=1.0)
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._count += 1
        call = _QueuedCall(latest_ms, next(self._numbers), message, parts, read, done, memory, room)
        self._waiting.put_nowait(call)
        return done

    # --- one process after the other ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                process = _Process(self._most_bytes)
            except OSError as error:  # no descriptors or processes are left
                logger.error("%s cannot be started: %s", self.code, error)
                self._refuse_all(f"{self.code} cannot be started now. Retry in a moment.")
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                await self._set_up(process)
                self._broken = ""
                while True:
                    call = await self._waiting.get()
                    self._count -= 1
                    await self._perform(process, call)
            except _LostError as lost:
                incident = new_incident()
                logger.error("%s are started again (%s): %s", self.code, incident, lost)
                if not process.is_set_up:
                    self._refuse_all(f"{self.code} cannot be started. The gateway's log says more under {incident}.")
            finally:
                process.kill()
            await asyncio.sleep(AGAIN_S)

    async def _set_up(self, process: _Process) -> None:
        answer, _ = await process.ask(self._first, (), _START_S)
        if not isinstance(answer, Done):
            raise _LostError(answer.text)
        process.is_set_up, self.set_up = True, answer

    async def _perform(self, process: _Process, call: _QueuedCall) -> None:
        """Answer one call; raises `_LostError` when the process cannot go on."""
        if call.done.done():
            return  # its client was answered, or has left
        began_s = time.monotonic()
        if began_s * 1000.0 > call.latest_ms:
            call.done.set_exception(expired())
            return
        if call.memory is not None:
            call.memory.hold()
        try:
            answer, body = await process.ask(call.message, call.parts, self._longest_s, call.room)
        except _LostError as lost:
            if not call.done.done():
                call.done.set_exception(HookFaultError(str(lost)))
            raise
        except HttpError as error:
            if not call.done.done():
                call.done.set_exception(error)
            return
        except asyncio.CancelledError:  # closed
            if not call.done.done():
                call.done.set_exception(HttpError(503, self._broken, retry_after_s=AGAIN_S))
            raise
        finally:
            if call.memory is not None:
                call.memory.release()
        kind, took_ms = type(call.message), (time.monotonic() - began_s) * 1000.0
        self.longest_ms[kind] = max(took_ms, self.longest_ms[kind] * _FADES)
        if call.done.done():
            return
        if isinstance(answer, BadBody):
            call.done.set_exception(HttpError(400, answer.text))
        elif isinstance(answer, Faulty):
            call.done.set_exception(HookFaultError(f"{self.code} failed: {answer.text}", answer.reason))
        else:
            try:
                call.done.set_result(call.read(answer, body))
            except HookFaultError as error:
                call.done.set_exception(error)

    def _refuse_all(self, reason: str) -> None:
        """Refuse the calls that wait, and all that come until a process has been started."""
        self._broken = reason
        while not self._waiting.empty():
            call = self._waiting.get_nowait()
            self._count -= 1
            if not call.done.done():
                call.done.set_exception(HttpError(503, reason, retry_after_s=AGAIN_S))

    def close(self) -> None:
        """End the processes, and refuse the calls that wait."""
        for task in self._tasks:
            task.cancel()
        self._refuse_all(f"{self.code} have changed. Retry.")


class _Process:
    """One process of hooks and the way to it."""

    def __init__(self, most_bytes: int) -> None:
        """Start it; it can import what this process can. Raises OSError when it cannot be started.

        `most_bytes`: of one of its answers.
        """
        self._most_bytes = most_bytes
        self.is_set_up = False
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        calm_openmp(variables)
        self._line, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", *WORKER]
            try:
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=variables, process_group=0)
            except OSError:
                self._line.close()
                raise
        self._line.setblocking(False)

    async def ask(
        self, call: HookCall, parts: Sequence[Buffer], longest_s: float, room: Callable[[int], memoryview] = new_memory
    ) -> tuple[HookAnswer, memoryview]:
        """Return the process's message, and the bytes behind that message, which are in the memory that `room` gave.

        Raises:
            HttpError: `room` gives none; the bytes are read, and dropped.
            _LostError: the process has ended, or has not answered in time.
        """
        loop = asyncio.get_running_loop()
        message = pack(call)
        sent: list[Buffer] = [
            PREFIX.pack(len(message), sum(memoryview(part).nbytes for part in parts)) + message,
            *parts,
        ]
        try:
            async with asyncio.timeout(longest_s):
                for part in sent:
                    await loop.sock_sendall(self._line, memoryview(part).cast("B"))
                message_bytes, body_bytes = PREFIX.unpack(await self._exactly(new_memory(PREFIX.size)))
                if message_bytes > _MOST_SAID_BYTES or body_bytes > self._most_bytes:
                    raise _LostError(f"an answer of {message_bytes + body_bytes} bytes is too large")
                answer = _ANSWERS.decode(await self._exactly(new_memory(message_bytes)))
                try:
                    memory = room(body_bytes)
                except HttpError:
                    for left in range(body_bytes, 0, -_DROPPED_BYTES):
                        await self._exactly(new_memory(min(left, _DROPPED_BYTES)))
                    raise
                return answer, await self._exactly(memory)
        except TimeoutError:
            raise _LostError(f"a call took more than {longest_s:g} s, and its process was killed") from None
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise _LostError(f"{await self._end()} ({type(error).__name__})") from None

    async def _end(self) -> str:
        """Return in words how the process ended, after it has closed its socket."""
        try:
            code = await asyncio.get_running_loop().run_in_executor(None, self._process.wait, _LAST_S)
        except subprocess.TimeoutExpired:
            return "its process stopped talking"
        return f"its process ended with {code}"

    async def _exactly(self, room: memoryview) -> memoryview:
        """Receive as many bytes as there is room for."""
        loop, at = asyncio.get_running_loop(), 0
        while at < len(room):
            count = await loop.sock_recv_into(self._line, room[at:])
            if not count:
                raise EOFError
            at += count
        return room

    def kill(self) -> None:
        """Kill the process and all that it has started, whatever they do."""
        self._line.close()
        with contextlib.suppress(ProcessLookupError):  # nothing is left of the group
            os.killpg(self._process.pid, signal.SIGKILL)
        # A large process takes a while to end. A thread waits for it, so that the loop need not.
        threading.Thread(target=self._process.wait, name="hooks end", daemon=True).start()
