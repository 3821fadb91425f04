"""A model's own hooks as a gateway calls them: in processes beside it.

Hooks are anybody's code. In a thread, a hook that computes in Python would hold the lock that the event loop needs, and
a hook that hangs could not be ended. Every wait has an end:

- At most `_MOST_WAITING` calls of a model wait. Further calls are turned away.
- When a call can no longer be begun in time, it is dropped, and the request expires.
- A client is answered at its deadline, whatever its call does.
- When a call takes longer than 2 s and longer than the model's SLO, it hangs. Its process is killed, with all that it
  has started, and replaced a second later.

`pebble` was tried in its place. It unpickles in the gateway what a process answers, so hooks that were taken over would
run code here; it leaves alive what a killed call had started; and 602 kB there and back take 8.0 ms, not 0.4 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from tenuto.deployments.entry.http.exchange import HttpError, expired
from tenuto.deployments.entry.service.hook_process import (
    PREFIX,
    BadBody,
    Faulty,
    HookAnswer,
    HookCall,
    Postprocess,
    Preprocess,
    SetUp,
    pack,
)
from tenuto.deployments.wire.tensors import Buffer, InputPart, OutputTensor, RequestInputs
from tenuto.errors import new_incident
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
from tenuto.profiles.networks.cpu_share import calm_openmp
from tenuto.profiles.networks.model_options import HookOptions

logger = logging.getLogger("ray.serve")

HANGS_S = 2.0  # limit: the time of a call; a longer SLO allows more
_START_S = 60.0  # limit: the time to import the hooks on a busy machine
_LAST_S = 1.0  # limit: the time between the last message of a process and its end
AGAIN_S = 1.0  # pace: the wait before a process is replaced, as a start takes a core for about as long
_MOST_WAITING = 64  # limit: waiting calls of a model, as for bodies that wait to be decoded
_MOST_SAID_BYTES = 1 << 16  # limit: the size of a message, whose text is shorter
_MOST_ANSWER_BYTES = 16 << 20  # limit: the size of the JSON of one answer
_FADES = 0.99  # derived: remembers the longest of about the last hundred calls; with less it forgets rare long calls
_MODULE = "tenuto.deployments.entry.service.hook_process"

ResultT = TypeVar("ResultT")
_ANSWERS: msgspec.msgpack.Decoder[HookAnswer] = msgspec.msgpack.Decoder(HookAnswer)


class HookFaultError(Exception):
    """Hooks failed, by a fault of their own. The text is for the log."""


class _LostError(Exception):
    """A process of hooks has ended, or has to be ended. The text says why."""


class _QueuedCall(NamedTuple):
    """One call of a hook. `latest_ms`: the latest moment at which it may begin. `number`: of two such calls, the lower
    one goes first."""

    latest_ms: float
    number: int
    asked: HookCall
    parts: Sequence[Buffer]
    read: Callable[[HookAnswer, memoryview], Any]
    done: asyncio.Future[Any]


class HookPool:
    """The hooks of one model, in processes of their own. Made, used and closed on one event loop."""

    def __init__(
        self,
        model: str,
        options: HookOptions,
        signature: ModelSignature,
        slo_ms: float,
        *,
        hangs_s: float = HANGS_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the processes.

        Args:
            model: its name, for the log.
            options: which hooks, in how many processes.
            signature: of the model.
            slo_ms: of the plan.
            hangs_s: how long a call may take where the SLO is shorter.
            clock: monotonic seconds.
        """
        assert options.hooks is not None
        self.after_ms = 0.0  # what `postprocess` takes: the longest lately, which fades
        self._model, self._options, self._signature = model, options, signature
        self._longest_s = max(hangs_s, slo_ms / 1000.0)
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: asyncio.PriorityQueue[_QueuedCall] = asyncio.PriorityQueue()
        self._count = 0
        self._sees_request = False  # whether `postprocess` takes the body, too
        self._broken = ""  # why the last process could not be started
        self._tasks = [
            asyncio.create_task(self._run(), name=f"hooks of {model}") for _ in range(options.hook_processes)
        ]

    def preprocess(self, body: Buffer, latest_ms: float) -> asyncio.Future[RequestInputs]:
        """Begin to make the input tensors of a request.

        Args:
            body: of the request.
            latest_ms: until when it may begin, on the monotonic clock.

        Raises:
            HttpError: 429 where too many wait, 503 where the hooks cannot be started.
        """
        return self._begin(Preprocess(), [body], latest_ms, self._inputs)

    def postprocess(self, outputs: Sequence[OutputTensor], request: Buffer, latest_ms: float) -> asyncio.Future[bytes]:
        """Begin to make the JSON of an answer; `request`: the body that `preprocess` got. Errors as there."""
        asked = Postprocess([(each.name, each.dtype, each.shape) for each in outputs])
        parts: list[Buffer] = [each.data for each in outputs]
        if self._sees_request:
            parts.append(request)
        return self._begin(asked, parts, latest_ms, lambda _, body: bytes(body))

    def _begin(
        self,
        asked: HookCall,
        parts: Sequence[Buffer],
        latest_ms: float,
        read: Callable[[HookAnswer, memoryview], ResultT],
    ) -> asyncio.Future[ResultT]:
        if self._broken:
            raise HttpError(503, self._broken, retry_after_s=AGAIN_S)
        if self._count >= _MOST_WAITING:
            reason = f"{_MOST_WAITING} requests wait for the hooks of '{self._model}'. Retry in a second."
            raise HttpError(429, reason, retry_after_s=1.0)
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._count += 1
        self._waiting.put_nowait(_QueuedCall(latest_ms, next(self._numbers), asked, parts, read, done))
        return done

    def _inputs(self, said: HookAnswer, body: memoryview) -> RequestInputs:
        """Cut the bytes behind an answer into tensors. Sizes and types are checked, as an attacker may have taken over
        the process, and must not harm a gpu-let."""
        signature, dtypes, shapes = self._signature, getattr(said, "dtypes", []), getattr(said, "shapes", [])
        try:
            sizes = signature.sizes_of(shapes)
        except ValueError as error:
            raise HookFaultError(f"the hooks of '{self._model}' returned other shapes: {error}") from None
        parts: list[InputPart] = []
        for tensor, dtype in zip(signature.at(sizes).inputs, dtypes, strict=False):
            if dtype != tensor.dtype and dtype not in tensor.accepts:
                raise HookFaultError(f"the hooks of '{self._model}' returned {dtype} for {tensor.name}")
            size = _bytes(tensor, dtype)
            parts.append(InputPart(body[:size], "" if dtype == tensor.dtype else dtype))
            if parts[-1].nbytes != size:
                break
            body = body[size:]
        if len(parts) != len(signature.inputs) or parts[-1].nbytes != size:
            raise HookFaultError(f"the hooks of '{self._model}' returned too few bytes")
        return RequestInputs(parts, sizes)

    # --- one process after the other ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                process = _Process(self._most_bytes())
            except OSError as error:  # no descriptors or processes are left
                logger.error("the hooks of '%s' cannot be started: %s", self._model, error)
                self._refuse_all(f"the hooks of '{self._model}' cannot be started now. Retry in a moment.")
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
                logger.error("the hooks of '%s' are started again (%s): %s", self._model, incident, lost)
                if not process.is_set_up:
                    told = (
                        f"the hooks of '{self._model}' cannot be started. The gateway's log says more under {incident}."
                    )
                    self._refuse_all(told)
            finally:
                process.kill()
            await asyncio.sleep(AGAIN_S)

    async def _set_up(self, process: _Process) -> None:
        assert self._options.hooks is not None
        said, _ = await process.ask(SetUp(self._options.hooks, self._signature), (), _START_S)
        if isinstance(said, Faulty | BadBody):
            raise _LostError(said.text)
        process.is_set_up, self._sees_request = True, said.sees_request

    async def _perform(self, process: _Process, call: _QueuedCall) -> None:
        """Answer one call; raises `_LostError` when the process cannot go on."""
        if call.done.done():
            return  # its client was answered, or has left
        began_s = self._clock()
        if began_s * 1000.0 > call.latest_ms:
            call.done.set_exception(expired())
            return
        try:
            said, body = await process.ask(call.asked, call.parts, self._longest_s)
        except _LostError as lost:
            if not call.done.done():
                call.done.set_exception(HookFaultError(str(lost)))
            raise
        if isinstance(call.asked, Postprocess):
            self.after_ms = max((self._clock() - began_s) * 1000.0, self.after_ms * _FADES)
        if call.done.done():
            return
        if isinstance(said, BadBody):
            call.done.set_exception(HttpError(400, said.text))
        elif isinstance(said, Faulty):
            call.done.set_exception(HookFaultError(f"the hooks of '{self._model}' failed: {said.text}"))
        else:
            try:
                call.done.set_result(call.read(said, body))
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

    def _most_bytes(self) -> int:
        inputs = sum(
            max(_bytes(each, dtype) for dtype in (each.dtype, *each.accepts))
            for each in self._signature.at(self._signature.most_sizes).inputs
        )
        return max(inputs, _MOST_ANSWER_BYTES)

    def close(self) -> None:
        """End the processes, and refuse the calls that wait."""
        for task in self._tasks:
            task.cancel()
        self._refuse_all(f"the hooks of '{self._model}' have changed. Retry.")


def _bytes(tensor: TensorSignature, dtype: str) -> int:
    return int(np.prod(tensor.fixed_shape, dtype=np.int64)) * np.dtype(dtype).itemsize


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
            command = [sys.executable, "-P", "-m", _MODULE]
            try:
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=variables, process_group=0)
            except OSError:
                self._line.close()
                raise
        self._line.setblocking(False)

    async def ask(self, asked: HookCall, parts: Sequence[Buffer], longest_s: float) -> tuple[HookAnswer, memoryview]:
        """Return the process's message, and the bytes behind that message.

        Raises:
            _LostError: the process has ended, or has not answered in time.
        """
        loop = asyncio.get_running_loop()
        message = pack(asked)
        sent: list[Buffer] = [
            PREFIX.pack(len(message), sum(memoryview(part).nbytes for part in parts)) + message,
            *parts,
        ]
        try:
            async with asyncio.timeout(longest_s):
                for part in sent:
                    await loop.sock_sendall(self._line, memoryview(part).cast("B"))
                message_bytes, body_bytes = PREFIX.unpack(await self._exactly(PREFIX.size))
                if message_bytes > _MOST_SAID_BYTES or body_bytes > self._most_bytes:
                    raise _LostError(f"an answer of {message_bytes + body_bytes} bytes is too large")
                said = _ANSWERS.decode(await self._exactly(message_bytes))
                return said, memoryview(await self._exactly(body_bytes))
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

    async def _exactly(self, size: int) -> bytearray:
        loop, room, at = asyncio.get_running_loop(), bytearray(size), 0
        while at < size:
            count = await loop.sock_recv_into(self._line, memoryview(room)[at:])
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
