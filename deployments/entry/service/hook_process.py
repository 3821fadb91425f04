"""The process that runs a model's own hooks (`tenuto.profiles.networks.hooks`), or the functions of an application, one
call at a time.

`process_pool` starts the process beside the gateway. Both speak over a socket, which is the process's standard input. A
frame is two lengths, a message and raw bytes. What the code prints goes to the gateway's log.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import struct
import traceback
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec
import numpy as np

from tenuto.deployments.entry.service.application_functions import (
    ApplicationFunctions,
    CallFunction,
    MadeTensor,
    MadeTensors,
    SetUpFunctions,
    pack_requests,
)
from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.grammars import SCHEMA_HOOKS, SchemaHooks
from tenuto.profiles.networks.hooks import Hooks, answer_json, answer_of, load_hooks, made_inputs, sees_request

PREFIX = struct.Struct("<IQ")  # format: bytes of the message, bytes behind it
_PR_SET_PDEATHSIG = 1  # format: of prctl(2)
_MOST_TOLD = 512  # limit: characters of a fault that a client is told
_MOST_SAID = 8192  # limit: characters of a traceback, or of what a client is told

Output = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


class SetUp(msgspec.Struct, frozen=True, tag=1):
    """The first message: which hooks, for which model."""

    hooks: str
    signature: ModelSignature


class Preprocess(msgspec.Struct, frozen=True, tag=2):
    """Make tensors of the request body behind it."""


class Postprocess(msgspec.Struct, frozen=True, tag=3):
    """Make an answer of the output tensors behind it; then comes the body of the request, where hooks see it."""

    outputs: list[Output]


class Done(msgspec.Struct, frozen=True, tag=4):
    """Set up, or what was made: the tensors of each request or of an answer, whose bytes follow one after the other. An
    answer in JSON follows alone."""

    requests: list[list[MadeTensor]] = []
    sees_request: bool = False  # of the hooks that were set up


class BadBody(msgspec.Struct, frozen=True, tag=5):
    """The client must send another body: what it is told."""

    text: str


class Faulty(msgspec.Struct, frozen=True, tag=6):
    """The code failed: what the log is told, and of that what the client may be told."""

    text: str
    reason: str = ""


HookCall = SetUp | Preprocess | Postprocess | SetUpFunctions | CallFunction
HookAnswer = Done | BadBody | Faulty
pack = msgspec.msgpack.Encoder().encode
_CALLS: msgspec.msgpack.Decoder[HookCall] = msgspec.msgpack.Decoder(HookCall)


class ModelHooks:
    """The hooks of one model."""

    def __init__(self, hooks: Hooks, signature: ModelSignature) -> None:
        self._hooks, self._signature = hooks, signature

    def call(self, call: Any, body: bytes) -> Any:
        """Return what a hook returns; raises whatever it raises."""
        if not isinstance(call, Postprocess):
            return self._hooks.preprocess(body)
        outputs, at = {}, 0
        for name, dtype, shape in call.outputs:
            outputs[name] = np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape)
            at += outputs[name].nbytes
        return answer_of(self._hooks, outputs, body[at:])

    def packed(self, call: Any, made: Any) -> MadeTensors:
        """Return what a hook returned as it travels; raises `InvalidInputError` if it fits nothing."""
        if isinstance(call, Postprocess):
            return [], [memoryview(answer_json(made))]
        return pack_requests(self._signature, [made_inputs(self._signature, made)])


Code = ModelHooks | ApplicationFunctions


def answer(code: Code, call: Any, body: bytes) -> tuple[HookAnswer, Sequence[memoryview]]:
    """Return what the code says to one call; whatever it raises is an answer too."""
    try:
        try:
            made = code.call(call, body)
        except InvalidInputError as error:
            if isinstance(call, Postprocess):  # whatever the client sent, the hooks have taken it
                raise
            return BadBody(str(error)[:_MOST_SAID]), ()
        requests, parts = code.packed(call, made)
        return Done(requests), parts
    except InvalidInputError as error:
        return Faulty(str(error)[:_MOST_SAID], "; ".join(problem.rule for problem in error.problems)[:_MOST_TOLD]), ()
    except BaseException:  # anybody's code: also what would end the process
        return Faulty(traceback.format_exc()[-_MOST_SAID:]), ()


def main() -> None:
    """Be that process: answer until nobody asks any more, and end with the gateway."""
    _go_on_in_child()
    line = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    came = line.makefile("rb")
    first = _received(came)
    if first is None:
        return
    try:
        done, code = _set_up(first[0])
    except BaseException as error:
        is_told = isinstance(error, InvalidInputError)
        _send(line, Faulty(str(error) if is_told else traceback.format_exc()[-_MOST_SAID:]), ())
        return
    _send(line, done, ())
    while (call := _received(came)) is not None:
        _send(line, *answer(code, *call))


def _set_up(first: HookCall) -> tuple[Done, Code]:
    """Return what answers the calls that follow the first message; raises `InvalidInputError` if it cannot be made."""
    if isinstance(first, SetUpFunctions):
        return Done(), ApplicationFunctions(first)
    assert isinstance(first, SetUp)
    signature, source = first.signature, first.hooks
    # Ours is allowed, whatever factories an operator allows.
    hooks = SchemaHooks(signature) if source == SCHEMA_HOOKS else load_hooks(source, signature)
    return Done(sees_request=sees_request(hooks)), ModelHooks(hooks, signature)


def _go_on_in_child() -> None:
    """Return in a child process. This one, which leads the process group, waits for the child and ends with its code.

    When the gateway has gone without a word, this one kills the group. The child could not: whatever hooks do may keep
    it from hearing of that.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    os.close(0)  # the gateway sees the end of whoever holds the socket
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)  # as shells tell of a signal


def _received(came: BinaryIO) -> tuple[HookCall, bytes] | None:
    """Return the next call and the bytes behind it; None where the gateway has gone."""
    prefix = came.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    message_bytes, body_bytes = PREFIX.unpack(prefix)
    message, body = came.read(message_bytes), came.read(body_bytes)
    return None if len(message) < message_bytes or len(body) < body_bytes else (_CALLS.decode(message), body)


def _send(line: socket.socket, said: HookAnswer, parts: Sequence[memoryview]) -> None:
    message = pack(said)
    line.sendall(PREFIX.pack(len(message), sum(part.nbytes for part in parts)) + message)
    for part in parts:
        line.sendall(part)


if __name__ == "__main__":
    main()
