"""HTTP/2 on the gateway's own socket, as far as gRPC uses it: it reads frames, hands calls on, and sends answers.

Every frame says its length first, so there is one way to find its end. `header_blocks` reads headers. A frame that is
not well-formed ends the connection. Everything that a client could make grow has a bound: streams, header blocks,
messages, answers that it does not take, frames in one turn of the loop, and time. Section numbers are those of RFC
9113.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Protocol

from jh2.connection import Decoder

from tenuto.deployments.entry.header_blocks import Headers, flaw, read_block
from tenuto.deployments.entry.http_server import IDLE_S, ClientConnection, HttpServer
from tenuto.deployments.entry.turns import MOST_WORK
from tenuto.deployments.wire.tensors import Buffer

MOST_STREAMS = 128  # limit: calls of a connection
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MOST_FRAME_BYTES = 1 << 14  # format: the least that a peer may set, for frames of either side (6.5.2)
_MOST_HEADER_BYTES = 1 << 14  # limit: of the headers of a call
_MOST_BLOCK_BYTES = 1 << 16  # limit: of a header block that is still decoded, for the sake of the calls beside it
_MOST_FRAMES = 32  # limit: that one connection has read before others have their turn, 2 us each
_MOST_SETTINGS = 64  # limit: of a frame
MOST_CALLS = 4  # limit: likewise, new calls, and messages of one call
_STREAM_WINDOW = 1 << 20  # limit: of a call's bytes that its handler has not taken
UNSENT_BYTES = 1 << 16  # limit: of a call's answers, from which on it takes no further message
_MOST_SENT_BYTES = 1 << 18  # limit: of answers that one connection is sent before others have their turn
_MOST_AHEAD_BYTES = 1 << 16  # limit: of what is received and not looked at
_MOST_CUT = 4 * MOST_STREAMS  # limit: calls that are over here, and of which the client may still send something
_WINDOW = 1 << 24  # limit: of a connection's bytes that are under way
_INITIAL_WINDOW = 65_535  # format: (6.9.2)
_MOST_WINDOW = (1 << 31) - 1  # format: (6.9.1)
_STALLED_S = 60.0  # limit: for a client to take answers, or to complete a header block or a preface

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
_END_STREAM = _ACK = 1  # format: flags of frames (6)
_END_HEADERS, _PADDED, _PRIORITY = 4, 8, 32  # format: likewise
NO_ERROR, PROTOCOL_ERROR, _FLOW_CONTROL_ERROR, _STREAM_CLOSED, _FRAME_SIZE_ERROR = (
    0,
    1,
    3,
    5,
    6,
)  # format: codes of errors (7)
REFUSED_STREAM, _COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 9, 11  # format: likewise
_OF_CALLS, _OF_ALL = (DATA, HEADERS, PRIORITY, RST_STREAM), (SETTINGS, PING, GOAWAY)
_OF_BEGUN = (DATA, RST_STREAM, WINDOW_UPDATE)
_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}  # format: of frames that have one size
# format: names of settings (6.5.2; RFC 8441, 3)
_PUSH, _MAX_STREAMS, _INITIAL, _MAX_FRAME, _MAX_HEADERS, _CONNECT = 2, 3, 4, 5, 6, 8
_SETTING = Struct(">HL")
_FRAME = Struct(">HBBBL")
_NUMBER = Struct(">L")


class Http2Error(Exception):
    """The connection cannot go on. The arguments are the error code and what was wrong."""


class CallError(Exception):
    """The call to which a frame belongs cannot go on, and the others can. The argument is the error code."""


def frame(kind: int, flags: int, stream: int, payload: Buffer = b"") -> bytes:
    """Return a frame."""
    size = len(payload)
    return b"".join((_FRAME.pack(size >> 8, size & 255, kind, flags, stream), payload))


class Handler(Protocol):
    """What answers one call. It sends the answer by `CallStream.send`."""

    def received(self, data: bytes) -> None:
        """Take bytes of the request. `CallStream.taken` then lets the client send as many more."""

    def ended(self) -> None:
        """Note that the request is complete."""

    def goes_on(self) -> None:
        """Go on, because the client has taken answers and `CallStream.is_behind` is no longer true."""

    @property
    def is_idle(self) -> bool:
        """Whether everything that the client has asked for is answered."""

    def left(self) -> None:
        """Note that the client has left. No other method is called after this one."""

    def check_time(self, now_s: float) -> None:
        """Give up a client that takes too long. It is called once a second."""


@dataclass(slots=True, eq=False)
class CallStream:
    """One call. `head` is the header block with which its answer begins. `length`: that of the request, when the client
    has announced it."""

    connection: Http2Connection
    id: int
    _window: int  # of what may be sent
    head: bytes = b""
    has_begun: bool = False  # `head` has left
    has_ended: bool = False  # the client sends nothing more
    is_slowed: bool = False  # the answer to a wrong key waits
    unsent: bytearray = field(default_factory=bytearray)
    trailers: bytes | None = None  # the block behind `unsent`, once that is all
    handler: Handler | None = None
    length: int | None = None
    moved_s: float = 0.0  # when the client has taken something of `unsent`, or it began to wait
    _room: int = _STREAM_WINDOW  # of what the client may send
    _came: int = 0
    _untaken: int = 0

    def send(self, data: bytes = b"", trailers: bytes | None = None) -> None:
        """Send a part of the answer, as fast as the client takes it. `trailers` end the answer."""
        self.unsent += data
        self.connection.unsent_bytes += len(data)
        self.trailers = trailers
        self.connection.flush(self)

    @property
    def is_behind(self) -> bool:
        """Whether too much of the answer waits for the client. When it no longer does, `Handler.goes_on` is called."""
        return len(self.unsent) > UNSENT_BYTES

    @property
    def may_send(self) -> bool:
        """Whether the call's own window has room for what the call has to send."""
        return self._window > 0 or not self.unsent

    def count(self, size: int, padding: int, *, is_last: bool) -> None:
        """Count the bytes of a frame. Raises `CallError` when the client sends more than it may (6.9), or not as much
        as it has announced (8.1.1)."""
        self._room -= size
        if self._room < 0:
            raise CallError(_FLOW_CONTROL_ERROR)
        self._came += size - padding
        if self.length is not None and (self._came > self.length or (is_last and self._came < self.length)):
            raise CallError(PROTOCOL_ERROR)
        if padding:
            self.taken(padding)

    def taken(self, size: int) -> None:
        """Let the client send so many bytes more."""
        self._untaken += size
        if self._untaken > _STREAM_WINDOW // 2 and not self.has_ended:
            self.connection.write([frame(WINDOW_UPDATE, 0, self.id, _NUMBER.pack(self._untaken))])
            self._room += self._untaken
            self._untaken = 0

    def frames(self, most: int) -> tuple[list[bytes], int]:
        """Return the frames that may be sent now, and how many of the `most` bytes of the connection's window they
        take."""
        parts, left = [], min(most, self._window)
        if not self.has_begun:
            self.has_begun = True
            parts.append(frame(HEADERS, _END_HEADERS, self.id, self.head))
        used, unsent = 0, self.unsent
        while used < left and used < len(unsent):
            part = unsent[used : min(used + _MOST_FRAME_BYTES, left)]
            parts.append(frame(DATA, 0, self.id, part))
            used += len(part)
        del unsent[:used]
        self._window -= used
        if self.trailers is not None and not unsent:
            parts.append(frame(HEADERS, _END_HEADERS | _END_STREAM, self.id, self.trailers))
        return parts, used

    def widen(self, by: int) -> None:
        """Note that the client takes so many bytes more; a negative number: fewer. Raises `Http2Error`."""
        self._window += by
        if self._window > _MOST_WINDOW:
            raise Http2Error(_FLOW_CONTROL_ERROR, "a window is too large")


Opened = Callable[[CallStream, Headers], Handler]


class Http2Connection(ClientConnection):
    """One client. Invariant: at most `MOST_STREAMS` calls are under way. A call is forgotten when its answer has left,
    or when its client has given it up."""

    def __init__(self, server: HttpServer, opened: Opened) -> None:
        """Take the server of the connection, and the function that begins each call."""
        super().__init__(server)
        self.arrived_ms = 0.0
        self._opened = opened
        self._came = b""  # received, and not looked at
        self._is_begun = self._is_set = False  # the preface has come; the client's settings have
        self._decoder = Decoder(max_header_list_size=1 << 20)  # limit: of what is decoded at once, which has half of it
        self._block: tuple[int, int, bytearray] | None = None  # of a header block that goes on: stream and flags
        self._streams: dict[int, CallStream] = {}
        self._stuck: dict[int, CallStream] = {}  # whose client takes no more for now
        self.unsent_bytes = 0  # of all calls
        self._frames: list[bytes] = []  # that are sent at the end of the loop's turn, with one write
        self._frames_bytes = 0
        self._last = 0  # the last stream that the client has begun
        self._cut: dict[int, None] = {}  # that ended here before their clients' end: more of them may be on its way
        self._window = self._initial = _INITIAL_WINDOW  # of what may be sent: on all streams, and on a new one
        self._received = 0  # bytes that the client has not been let send again
        self._begun = 0  # calls, in what is read at once
        self._is_stopped = False  # nothing is read
        self._is_ahead = False  # it has sent more than it may in a turn
        self._waits = self._says_goodbye = False

    # --- asyncio's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self.server.places.admit(self):
            self.give_up()
            return
        settings = ((_MAX_STREAMS, MOST_STREAMS), (_INITIAL, _STREAM_WINDOW), (_MAX_HEADERS, _MOST_HEADER_BYTES))
        said = frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*each) for each in settings]))
        self.write([said, frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(_WINDOW - _INITIAL_WINDOW))])

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._came = b""
        self._stuck.clear()
        streams, self._streams = self._streams, {}
        self.server.turns.spend(len(streams))
        for stream in streams.values():
            self._leave(stream)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self.server.room

    def buffer_updated(self, nbytes: int) -> None:
        if self._closes:
            return  # thrown away
        self.arrived_ms = self.server.turns.arrived_ms()
        came = bytes(self.server.room[:nbytes])
        self._came = self._came + came if self._came else came
        if self.server.turns.left > 0 and not self._waits:
            self._look()
        else:
            self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck:
            self._wait()

    def _update_reading(self) -> None:
        """Stop reading from a client that does not take its answers, or whose bytes wait for their turn and are
        many."""
        stops = self._is_paused or (self._waits and len(self._came) > _MOST_AHEAD_BYTES)
        if stops != self._is_stopped and self._transport is not None and not self._transport.is_closing():
            self._is_stopped = stops
            if stops:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # --- receiving ----------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for a later turn. A client that has sent more than it may in one turn waits behind all others."""
        if not self._waits:
            self._waits = True
            turns = self.server.turns
            (turns.wait_behind if self._is_ahead else turns.wait)(self)
        self._update_reading()

    def go_on(self) -> None:
        """Send on, and look at bytes that were received earlier, now that others have had their turn."""
        self._waits = False
        self._send_on()
        self._look()
        self._update_reading()

    def _look(self) -> None:
        """Take frames that have come, as many as one connection may in a turn."""
        came, at, self._begun, turns = self._came, 0, 0, self.server.turns
        try:
            if not self._is_begun:
                if came[: len(PREFACE)] != PREFACE[: len(came)]:
                    raise Http2Error(PROTOCOL_ERROR, "this port speaks gRPC, which is HTTP/2")
                at = len(PREFACE) if len(came) >= len(PREFACE) else 0
                self._is_begun = at > 0
            frames, left = 0, turns.left
            while self._is_begun and not self._closes and len(came) - at >= 9:
                is_enough = frames >= _MOST_FRAMES or self._begun >= MOST_CALLS
                if is_enough or turns.left <= (-MOST_WORK if self._is_ahead else 0):
                    self._is_ahead = self._is_ahead or is_enough or left - turns.left >= MOST_CALLS
                    self._wait()
                    break
                high, low, kind, flags, number = _FRAME.unpack_from(came, at)
                size = high << 8 | low
                if size > _MOST_FRAME_BYTES:
                    raise Http2Error(_FRAME_SIZE_ERROR, "a frame is too long")
                end = at + 9 + size
                if end > len(came):
                    self._is_ahead = False
                    break
                frames += 1
                number &= _MOST_WINDOW
                try:
                    self._take(kind, flags, number, came[at + 9 : end])
                except CallError as error:
                    self.server.turned_away["malformed"] += 1
                    self._break(number, error.args[0])
                at = end
            else:
                self._is_ahead = False
            self._came = came[at:]
        except Http2Error as error:
            self._fail(error)
        turns.spend(1)  # and each message by who takes it

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Take one frame. Raises `Http2Error` or `CallError`."""
        if self._block is not None or kind == CONTINUATION:
            self._take_block_on(kind, flags, number, payload)
            return
        if kind in _SIZES and len(payload) != _SIZES[kind]:
            raise Http2Error(_FRAME_SIZE_ERROR, "a frame has not the size of its kind")
        if (
            (kind in _OF_CALLS and not number)
            or (kind in _OF_ALL and number)
            or (kind in _OF_BEGUN and number and (number > self._last or not number & 1))
        ):
            raise Http2Error(PROTOCOL_ERROR, "a frame belongs to no call, or to one")
        if not self._is_set and (kind != SETTINGS or flags & _ACK):
            raise Http2Error(PROTOCOL_ERROR, "the first frame has the client's settings")
        if kind == DATA:
            self._take_data(flags, number, payload)
        elif kind == HEADERS:
            self.changed_s = time.monotonic()
            self._block = number, flags, bytearray()
            block = _unpadded(flags, payload)
            if flags & _PRIORITY:
                _check_priority(number, block[:5])
                block = block[5:]
            self._take_block_on(CONTINUATION, flags, number, block)
        elif kind == WINDOW_UPDATE:
            self._widen(number, _NUMBER.unpack(payload)[0] & _MOST_WINDOW)
        elif kind == RST_STREAM:
            stream = self._streams.get(number)
            if stream is not None:
                self._forget(stream)
                self._leave(stream)
        elif kind == SETTINGS:
            self._is_set = True
            self._follow(flags, payload)
        elif kind == PING and not flags & _ACK:
            self.write([frame(PING, _ACK, 0, payload)])
        elif kind == PRIORITY:
            _check_priority(number, payload)
        elif kind == GOAWAY:
            if len(payload) < 8:
                raise Http2Error(_FRAME_SIZE_ERROR, "a frame has not the size of its kind")
            self.end()
        elif kind == PUSH_PROMISE:
            raise Http2Error(PROTOCOL_ERROR, "a client promises nothing")

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        self._received += len(payload)
        if self._received > _WINDOW // 2:
            self.write([frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(self._received))])
            self._received = 0
        stream = self._streams.get(number)
        if stream is None:
            self._take_late(number, is_last=bool(flags & _END_STREAM))
            return
        if stream.has_ended:
            raise CallError(_STREAM_CLOSED)
        stream.has_ended = bool(flags & _END_STREAM)
        data = _unpadded(flags, payload)
        stream.count(len(payload), len(payload) - len(data), is_last=stream.has_ended)
        if data and stream.handler is not None:
            stream.handler.received(data)
        if stream.has_ended and stream.handler is not None:  # else it is answered
            stream.handler.ended()

    def _take_block_on(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Take a part of a header block. The last part begins a call; the last part of trailers ends its request."""
        if self._block is None or kind != CONTINUATION or number != self._block[0]:
            raise Http2Error(PROTOCOL_ERROR, "a header block is not continued")
        _, first, block = self._block
        block += payload
        if len(block) > _MOST_BLOCK_BYTES or (not payload and not flags & _END_HEADERS):
            raise Http2Error(ENHANCE_YOUR_CALM, "the metadata is too long")
        if not flags & _END_HEADERS:
            return
        self._block = None
        whole = bytes(block)
        try:
            headers = read_block(self._decoder, whole, _MOST_HEADER_BYTES)
        except BaseException:  # Rust's panics are no `Exception`; nothing else can happen in this line
            raise Http2Error(_COMPRESSION_ERROR, "a header block cannot be read") from None
        if not number & 1:
            raise Http2Error(PROTOCOL_ERROR, "a client's calls have odd numbers")
        if number > self._last:
            self._last = number
            self._begin(number, headers, is_whole=bool(first & _END_STREAM))
            return
        stream = self._streams.get(number)
        if stream is None:
            self._take_late(number, is_last=bool(first & _END_STREAM))
            return
        if stream.has_ended:
            raise CallError(_STREAM_CLOSED)
        stream.has_ended = bool(first & _END_STREAM)
        if headers is None:
            raise CallError(ENHANCE_YOUR_CALM)
        if not stream.has_ended or flaw(headers, behind=True):
            raise CallError(PROTOCOL_ERROR)
        stream.count(0, 0, is_last=True)
        if stream.handler is not None:
            stream.handler.ended()

    def _take_late(self, number: int, *, is_last: bool) -> None:
        """Drop what still comes for a call that is over here. Raises `Http2Error` when the client had ended it, too
        (5.1)."""
        if number not in self._cut:
            raise Http2Error(_STREAM_CLOSED, "a call goes on behind its end")
        if is_last:
            del self._cut[number]

    def _cut_off(self, number: int, code: int, *, is_whole: bool = False) -> None:
        """Tell the client that a call is over. Unless the request is whole, more of it may be on its way."""
        self.write([frame(RST_STREAM, 0, number, _NUMBER.pack(code))])
        if not is_whole:
            self._cut[number] = None
            if len(self._cut) > _MOST_CUT:
                del self._cut[next(iter(self._cut))]

    def _begin(self, number: int, headers: Headers | None, *, is_whole: bool) -> None:
        self._begun += 1
        if headers is None or len(self._streams) >= MOST_STREAMS or self._says_goodbye:
            self._cut_off(number, ENHANCE_YOUR_CALM if headers is None else REFUSED_STREAM, is_whole=is_whole)
            return
        stream = self._streams[number] = CallStream(self, number, self._initial)
        stream.has_ended = is_whole
        handler = self._opened(stream, headers)
        self.server.places.has_asked(self)
        if self._streams.get(number) is stream:  # else it is answered
            stream.handler = handler
            if is_whole:
                handler.ended()

    def _widen(self, number: int, by: int) -> None:
        """Note that the client takes more bytes of a call; of all calls when `number` is 0."""
        stream = self._streams.get(number)
        if not by and stream is None:
            raise Http2Error(PROTOCOL_ERROR, "a window grows by nothing")
        if not by:
            raise CallError(PROTOCOL_ERROR)
        if stream is not None:
            try:
                stream.widen(by)
            except Http2Error as error:
                raise CallError(_FLOW_CONTROL_ERROR) from error
        elif number:
            return
        else:
            self._window += by
            if self._window > _MOST_WINDOW:
                raise Http2Error(_FLOW_CONTROL_ERROR, "the window is too large")
        self._let_go_on()

    def _follow(self, flags: int, payload: bytes) -> None:
        """Follow the client's settings. Only the window matters, because every client takes frames as small as ours."""
        if len(payload) % 6 or (flags & _ACK and payload):
            raise Http2Error(_FRAME_SIZE_ERROR, "settings are cut")
        if flags & _ACK:
            return
        if len(payload) > 6 * _MOST_SETTINGS:
            raise Http2Error(ENHANCE_YOUR_CALM, "there are not so many settings")
        self.write([frame(SETTINGS, _ACK, 0)])
        said = list(_SETTING.iter_unpack(payload))
        if any(value > 1 for name, value in said if name in (_PUSH, _CONNECT)):
            raise Http2Error(PROTOCOL_ERROR, "a setting is neither on nor off")
        if any(not _MOST_FRAME_BYTES <= value < 1 << 24 for name, value in said if name == _MAX_FRAME):
            raise Http2Error(PROTOCOL_ERROR, "frames cannot be of that size")
        initials = [value for name, value in said if name == _INITIAL]
        if any(value > _MOST_WINDOW for value in initials):
            raise Http2Error(_FLOW_CONTROL_ERROR, "a window is too large")
        self._begun += 1  # as much work as a call
        if initials:
            by, self._initial = initials[-1] - self._initial, initials[-1]
            for stream in self._streams.values():
                stream.widen(by)
            self._let_go_on()

    def _leave(self, stream: CallStream) -> None:
        handler, stream.handler = stream.handler, None
        if handler is not None:
            handler.left()

    def _fail(self, error: Http2Error) -> None:
        code, reason = error.args
        self.server.turned_away["malformed"] += 1
        self.write([frame(GOAWAY, 0, 0, _NUMBER.pack(self._last) + _NUMBER.pack(code) + reason.encode())])
        self._closes = True
        self._close()

    # --- answering ----------------------------------------------------------------------------------------------

    def flush(self, stream: CallStream) -> None:
        """Send what a call has to send, as far as the client takes it. One connection is sent a bounded number of bytes
        in a turn."""
        if self._streams.get(stream.id) is not stream:
            return  # the client has left
        was_behind, used = stream.is_behind, 0
        if not self._is_paused:
            parts, used = stream.frames(max(0, min(self._window, _MOST_SENT_BYTES)))
            self._window -= used
            self.unsent_bytes -= used
            self.write(parts)
        if stream.unsent or (self._is_paused and (stream.trailers is not None or not stream.has_begun)):
            is_new = self._stuck.pop(stream.id, None) is None
            if used or is_new:
                stream.moved_s = time.monotonic()
            self._stuck[stream.id] = stream
            if self._window > 0 and stream.may_send and not self._is_paused:
                self._wait()  # the others have their turn
            self._count_untaken()
        else:
            if self._stuck.pop(stream.id, None) is not None:
                self._count_untaken()
            if stream.trailers is not None:
                self._forget(stream)
                stream.handler = None
                if not stream.has_ended:  # nobody wants the rest (8.1)
                    self._cut_off(stream.id, NO_ERROR)
        if self.server.is_draining:
            self.end()
        if was_behind and not stream.is_behind and stream.handler is not None:
            stream.handler.goes_on()
        self._close_if_over()

    def _let_go_on(self) -> None:
        """Send on in a later turn, when a call has something to send and the client takes it."""
        if self._window > 0 and not self._is_paused and any(stream.may_send for stream in self._stuck.values()):
            self._wait()

    def _send_on(self) -> None:
        """Send a part of what waits. The call that was sent longest ago goes first."""
        if not self._stuck:
            return
        self.server.turns.spend(1)
        most = self._window - _MOST_SENT_BYTES
        for stream in list(self._stuck.values()):
            if self._window <= max(0, most) or self._is_paused:
                break
            if stream.may_send:
                self.flush(stream)
        self._let_go_on()

    def reset(self, stream: CallStream) -> None:
        """End a call whose client does not take the answer."""
        if self._streams.get(stream.id) is stream:
            self.server.turned_away["slow"] += 1
            self._break(stream.id, ENHANCE_YOUR_CALM)

    def _break(self, number: int, code: int) -> None:
        """End a call that cannot go on. The others go on."""
        stream = self._streams.get(number)
        if stream is not None:
            self._forget(stream)
            self._cut_off(number, code, is_whole=stream.has_ended)
            self._leave(stream)
            self._close_if_over()

    def _forget(self, stream: CallStream) -> None:
        """Forget a call that is over."""
        del self._streams[stream.id]
        self.unsent_bytes -= len(stream.unsent)
        if self._stuck.pop(stream.id, None) is not None:
            self._count_untaken()

    def _waiting_bytes(self) -> int:
        return self.unsent_bytes if self._stuck else 0

    def _close_if_over(self) -> None:
        if self._says_goodbye and not self._streams:
            self._close()

    def write(self, frames: Sequence[bytes]) -> None:
        """Send frames, those of one turn of the loop together."""
        if frames and not self._frames:
            asyncio.get_running_loop().call_soon(self.write_out)
        self._frames += frames
        self._frames_bytes += sum(map(len, frames))
        if self._frames_bytes >= UNSENT_BYTES:  # the transport says how much of it the client takes
            self.write_out()

    def write_out(self) -> None:
        """Send at once what waits for the end of the turn."""
        frames, self._frames, self._frames_bytes = self._frames, [], 0
        if frames and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    @property
    def is_idle(self) -> bool:
        return not self._streams

    @property
    def gives_way(self) -> bool:
        return all(
            each.is_slowed or (each.handler is not None and each.handler.is_idle and not each.unsent)
            for each in self._streams.values()
        )

    def end(self) -> None:
        """Take no more calls, and close when those that are under way are answered."""
        if not self._says_goodbye:
            self._says_goodbye = True
            self.write([frame(GOAWAY, 0, 0, _NUMBER.pack(self._last) + _NUMBER.pack(NO_ERROR))])
        self._close_if_over()

    def _close(self) -> None:
        self.write_out()
        super()._close()

    def check_time(self, now_s: float) -> None:
        passed_s = now_s - self.changed_s
        for stream in list(self._streams.values()):
            if stream.handler is not None:
                stream.handler.check_time(now_s)
        for stream in list(self._stuck.values()):
            if now_s - stream.moved_s > _STALLED_S:
                self.reset(stream)
        is_stalled = self._is_paused or self._block is not None or not self._is_set
        if is_stalled and passed_s > _STALLED_S:
            self.give_up()
        elif self.is_idle and passed_s > IDLE_S:
            self.end()


def _check_priority(number: int, payload: bytes) -> None:
    """Raise `Http2Error` when a priority is cut, or when it says that a call waits for itself (RFC 7540, 5.3.1)."""
    if len(payload) < 5 or _NUMBER.unpack_from(payload)[0] & _MOST_WINDOW == number:
        raise Http2Error(PROTOCOL_ERROR, "a priority is none")


def _unpadded(flags: int, payload: bytes) -> bytes:
    """Return a frame's payload without padding; raises `Http2Error`."""
    if not flags & _PADDED:
        return payload
    size = len(payload) - 1 - (payload[0] if payload else 0)
    if size < 0:
        raise Http2Error(PROTOCOL_ERROR, "a frame is all padding")
    return payload[1 : 1 + size]
