"""gRPC's HTTP/2 on the gateway's own socket: bytes of clients to calls, and answers to bytes.

The library `h2` keeps the protocol's state: frames, headers, streams and windows, and what is malformed. This module
gives it a client's frames one by one, so that others have their turns. It also bounds everything that a client could
make grow: calls, header blocks, settings, messages, answers that the client does not take, and time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from struct import Struct

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import ContinuationFrame, GoAwayFrame, HeadersFrame, SettingsFrame

from tenuto.deployments.entry.http.exchange import unexpected
from tenuto.deployments.entry.http.loop_budget import MOST_WORK
from tenuto.deployments.entry.http.server import IDLE_S, ClientConnection, HttpServer

MOST_STREAMS = 128  # limit: calls of a connection
_MOST_HEADER_BYTES = 1 << 14  # limit: of the headers of a call
_MOST_BLOCK_BYTES = 1 << 16  # limit: of a header block, which takes 15 ms; h2 bounds likewise what it unpacks to
_MOST_FRAMES = 32  # limit: that one connection has read before others have their turn, some 20 us each
_FRAMES_OF_WORK = 8  # derived: reading so many takes as long as a request
_MOST_SETTINGS = 64  # limit: of a frame, and that are remembered
MOST_CALLS = 4  # limit: likewise, new calls, and messages of one call
_STREAM_WINDOW = 1 << 20  # limit: of a call's bytes that its handler has not taken
_WINDOW = MOST_STREAMS * _STREAM_WINDOW  # derived: of a connection's bytes: no call keeps another from sending
UNSENT_BYTES = 1 << 16  # limit: of a call's answers, from which on it takes no further message
_MOST_SENT_BYTES = 1 << 18  # limit: of answers that one connection is sent before others have their turn
_MOST_AHEAD_BYTES = 1 << 16  # limit: of what is received and not read
_STALLED_S = 60.0  # limit: for a client to take answers, or to complete a header block or a preface

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME = Struct(">HBBB")  # format: of a frame's head: its length, kind and flags; its stream's number follows
_FRAME_HEAD_BYTES = 9  # format: likewise
_MOST_FRAME_BYTES = 1 << 14  # format: the least that a peer may set, for frames of either side
_END_HEADERS = 4  # format: a flag
_INITIAL_WINDOW = 65_535  # format: of a connection
_MOST_TABLE_BYTES = 1 << 12  # format: the first size of the table of headers, and the largest that is used here

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(slots=True, eq=False)
class CallStream:
    """One call. A subclass answers it by `write`; `head` are the headers with which its answer begins. When the call is
    answered, or its client has left, the connection forgets it."""

    connection: Http2Connection
    id: int
    has_ended: bool  # the client sends nothing more
    head: Headers
    has_begun: bool = False  # `head` has left
    is_slowed: bool = False  # the answer to a wrong key waits
    unsent: bytearray = field(default_factory=bytearray)
    trailers: Headers | None = None  # the headers behind `unsent`, once that is all
    moved_s: float = 0.0  # when the client has taken something of `unsent`, or it began to wait
    unacknowledged: int = 0  # bytes that the client has sent and may not send again yet
    taken: int = 0  # of these, bytes that `received` has taken

    def __post_init__(self) -> None:
        self.connection.streams[self.id] = self

    def write(self, data: bytes = b"", trailers: Headers | None = None) -> None:
        """Send a part of the answer, as fast as the client takes it. `trailers` end the answer."""
        self.unsent += data
        self.connection.unsent_bytes += len(data)
        self.trailers = trailers
        self.connection.flush(self)

    @property
    def is_behind(self) -> bool:
        """Whether too much of the answer waits for the client. `resume_sending` is called when it no longer does."""
        return len(self.unsent) > UNSENT_BYTES

    def acknowledge(self, size: int) -> None:
        """Let the client send so many bytes more, as soon as these are many. The end of the call lets it send all."""
        self.taken += size
        if self.taken > _STREAM_WINDOW // 4 and not self.has_ended:  # pace: so much is worth a frame
            self.connection.acknowledge(self.id, min(self.taken, self.unacknowledged))
            self.unacknowledged -= min(self.taken, self.unacknowledged)
            self.taken = 0

    # --- what a subclass does -----------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Take bytes of the request. `acknowledge` then lets the client send as many more."""

    def ended(self) -> None:
        """Note that the request is complete."""

    def resume_sending(self) -> None:
        """Go on, because the client has taken answers and `is_behind` is no longer true."""

    def is_idle(self) -> bool:
        """Return whether everything that the client has asked for is answered."""
        return True

    def left(self) -> None:
        """Note that the client has left. No other method is called after this one."""

    def check_time(self, now_s: float) -> None:
        """Give up a client that takes too long. It is called once a second."""


# Begins a call: its connection, number and headers, and whether the client sends nothing more. It raises
# `ProtocolError` when the headers are malformed.
OpenCall = Callable[["Http2Connection", int, Headers, bool], object]


class _Http2State(H2Connection):
    """h2's state of a connection, which remembers fewer of the calls that are over."""

    MAX_CLOSED_STREAMS = 32  # limit: of which the client may still send trailers; anything else of any is dropped


def _announced(most_streams: int) -> Settings:
    return Settings(
        client=False,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: most_streams,
            SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
            SettingCodes.MAX_HEADER_LIST_SIZE: _MOST_HEADER_BYTES,
        },
    )


class Http2Connection(ClientConnection):
    """One client. Invariant: at most `MOST_STREAMS` calls are under way. A call is forgotten when its answer has left,
    or when its client has given it up."""

    def __init__(self, server: HttpServer, open_call: OpenCall) -> None:
        """Take the server of the connection, and the function that begins each call."""
        super().__init__(server)
        self.arrived_ms = 0.0
        self.streams: dict[int, CallStream] = {}
        self.unsent_bytes = 0  # of all calls
        self._open_call = open_call
        self._h2 = _Http2State(
            H2Configuration(
                client_side=False,
                validate_inbound_headers=False,  # once for each metadata, by what takes calls
                normalize_inbound_headers=False,
                normalize_outbound_headers=False,
                validate_outbound_headers=False,
            )
        )
        self._received = b""  # and not read
        self._has_preface = self._has_settings = False  # of the client
        self._block_bytes = 0  # of the header block that came last
        self._is_amid_block = False  # that block goes on
        self._stuck: dict[int, CallStream] = {}  # whose client takes no more for now
        self._unwritten: int | None = None  # bytes of answers that are sent at the end of the turn, with one write
        self._begun = 0  # calls, in what is read at once
        self._is_ahead = False  # the client has sent more than it may in a turn
        self._waits = self._says_goodbye = False

    # --- asyncio's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self.server.places.admit(self):
            self.give_up()
            return
        self._h2.local_settings = _announced(MOST_STREAMS)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_WINDOW - _INITIAL_WINDOW)
        # A client may begin more calls before it has read this. h2 would end its connection; here each is refused.
        self._h2.local_settings = _announced(1 << 30)
        self._write_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._received = b""
        self._stuck.clear()
        streams, self.streams = self.streams, {}
        self.server.budget.spend(len(streams))
        for stream in streams.values():
            stream.left()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self.server.room

    def buffer_updated(self, nbytes: int) -> None:
        if self._closes:
            return  # thrown away
        self.arrived_ms = self.server.budget.arrived_ms()
        self._received += self.server.room[:nbytes]
        if self.server.budget.left > 0 and not self._waits:
            self._read_frames()
        else:
            self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck:
            self._wait()

    def _update_reading(self) -> None:
        """Stop reading from a client that does not take its answers, or whose bytes wait for their turn and are
        many."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            stops = self._is_paused or (self._waits and len(self._received) > _MOST_AHEAD_BYTES)
            (transport.pause_reading if stops else transport.resume_reading)()

    # --- receiving ----------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for a later turn. A client that has sent more than it may in one turn waits behind all others."""
        if not self._waits:
            self._waits = True
            budget = self.server.budget
            (budget.wait_behind if self._is_ahead else budget.wait)(self)
        self._update_reading()

    def resume(self) -> None:
        """Send on, and read bytes that were received earlier, now that others have had their turn."""
        self._waits = False
        self._send_on()
        self._read_frames()
        self._update_reading()

    def _read_frames(self) -> None:
        """Give frames that have come to h2, as many as one connection may in a turn."""
        received, at, frames, budget = self._received, 0, 0, self.server.budget
        self._begun, left = 0, budget.left
        try:
            if not self._has_preface:
                if not _PREFACE.startswith(received[: len(_PREFACE)]):
                    self._refuse(ErrorCodes.PROTOCOL_ERROR, b"this port speaks gRPC, which is HTTP/2")
                elif len(received) >= len(_PREFACE):
                    self._has_preface, at = True, len(_PREFACE)
                    self._h2.receive_data(_PREFACE)
            while self._has_preface and not self._closes and len(received) - at >= _FRAME_HEAD_BYTES:
                is_enough = frames >= _MOST_FRAMES or self._begun >= MOST_CALLS
                if is_enough or budget.left <= (-MOST_WORK if self._is_ahead else 0):
                    self._is_ahead = self._is_ahead or is_enough or left - budget.left >= MOST_CALLS
                    self._wait()
                    break
                high, low, kind, flags = _FRAME.unpack_from(received, at)
                size = high << 8 | low
                if size > _MOST_FRAME_BYTES:  # h2 would wait for all of it
                    self._refuse(ErrorCodes.FRAME_SIZE_ERROR, b"a frame is too long")
                    break
                end = at + _FRAME_HEAD_BYTES + size
                if end > len(received):
                    self._is_ahead = False
                    break
                frames += 1
                self._take_frame(kind, flags, received[at:end])
                at = end
            else:
                self._is_ahead = False
        except ProtocolError:  # h2 has said why
            self._fail()
        except Exception as error:
            unexpected("a connection of gRPC", error)
            self._refuse(ErrorCodes.INTERNAL_ERROR, b"")
        self._received = received[at:]
        budget.spend(1 + frames // _FRAMES_OF_WORK)  # and each message by who takes it

    def _take_frame(self, kind: int, flags: int, frame: bytes) -> None:
        """Give a whole frame to h2, unless it goes beyond a limit. Raises `ProtocolError`."""
        if kind == GoAwayFrame.type and not self._is_amid_block:
            self.end()  # h2 would send nothing more, and the calls under way are still answered
            return
        if kind == HeadersFrame.type:
            self.changed_s = time.monotonic()
            self._block_bytes = 0
        if kind in (HeadersFrame.type, ContinuationFrame.type):
            self._block_bytes += len(frame)
            self.server.budget.spend(0, len(frame))
            self._is_amid_block = not flags & _END_HEADERS
            if self._block_bytes > _MOST_BLOCK_BYTES:
                self._refuse(ErrorCodes.ENHANCE_YOUR_CALM, b"the metadata is too long")
                return
        if kind == SettingsFrame.type and (
            # Format: bytes of a setting.
            len(frame) > _FRAME_HEAD_BYTES + 6 * _MOST_SETTINGS or len(self._h2.remote_settings) > _MOST_SETTINGS
        ):
            self._refuse(ErrorCodes.ENHANCE_YOUR_CALM, b"there are not so many settings")
            return
        for event in self._h2.receive_data(frame):
            self._take_event(event)
        self._write_soon()

    def _take_event(self, event: Event) -> None:
        """Do what h2 has read in a frame."""
        match event:
            case RequestReceived():
                self._begin(event.stream_id, event.headers, is_whole=event.stream_ended is not None)
            case DataReceived():
                self._take_data(event)
            case StreamEnded():
                if (stream := self.streams.get(event.stream_id)) is not None:  # else it is answered
                    stream.has_ended = True
                    stream.ended()
            case StreamReset():
                if (stream := self.streams.get(event.stream_id)) is not None:
                    self._forget(stream)
                    stream.left()
            case RemoteSettingsChanged():
                self._has_settings = True
                self._begun += 1  # as much work as a call
                encoder = self._h2.encoder
                encoder.header_table_size = min(encoder.header_table_size, _MOST_TABLE_BYTES)
                self._let_go_on()
            case WindowUpdated():
                self._let_go_on()

    def _begin(self, number: int, headers: Iterable[tuple[bytes, bytes]], *, is_whole: bool) -> None:
        self._begun += 1
        fields = tuple(headers)
        is_long = sum([len(name) + len(value) + 32 for name, value in fields]) > _MOST_HEADER_BYTES  # as HTTP/2 counts
        code = ErrorCodes.ENHANCE_YOUR_CALM if is_long else ErrorCodes.REFUSED_STREAM
        if not (is_long or len(self.streams) >= MOST_STREAMS or self._says_goodbye):
            try:
                self._open_call(self, number, fields, is_whole)
                self.server.places.note_use(self)
                return
            except ProtocolError:
                self.server.turned_away["malformed"] += 1
                code = ErrorCodes.PROTOCOL_ERROR
        self._h2.reset_stream(number, code)

    def _take_data(self, event: DataReceived) -> None:
        number, size, data = event.stream_id, event.flow_controlled_length, event.data
        stream = self.streams.get(number)
        if stream is None:
            self.acknowledge(number, size)
            return
        stream.has_ended = event.stream_ended is not None
        stream.unacknowledged += size
        stream.acknowledge(size - len(data))  # padding
        if data:
            stream.received(data)

    def acknowledge(self, number: int, size: int) -> None:
        """Let the client send so many bytes more, of this call and of all."""
        if not self._closes:
            self._h2.acknowledge_received_data(size, number)
            self._write_soon()

    def _refuse(self, code: ErrorCodes, reason: bytes) -> None:
        """End a connection that goes beyond a limit."""
        self._h2.close_connection(code, reason)
        self._fail()

    def _fail(self) -> None:
        self.server.turned_away["malformed"] += 1
        self._closes = True
        self._close()

    # --- answering ----------------------------------------------------------------------------------------------

    def flush(self, stream: CallStream) -> int:
        """Send what a call has to send, as far as the client takes it, and return how many bytes this was. One
        connection is sent a bounded number of bytes in a turn."""
        if self._closes or self.streams.get(stream.id) is not stream:
            return 0  # the client has left
        was_behind = stream.is_behind
        sent = 0 if self._is_paused else self._send_some(stream)
        is_new = self._stuck.pop(stream.id, None) is None
        if stream.unsent or (self._is_paused and (stream.trailers is not None or not stream.has_begun)):
            if sent or is_new:
                stream.moved_s = time.monotonic()
            self._stuck[stream.id] = stream
            self._let_go_on()  # in a later turn, as the others have theirs
        elif stream.trailers is not None:
            self._forget(stream)
            if not stream.has_ended:  # nobody wants the rest
                self._h2.reset_stream(stream.id, ErrorCodes.NO_ERROR)
        self._count_untaken()
        if self.server.is_draining:
            self.end()
        if was_behind and not stream.is_behind:
            stream.resume_sending()
        self._close_if_over()
        return sent

    def _send_some(self, stream: CallStream) -> int:
        """Give to h2 what may be sent of a call now, and return how many bytes of messages this is."""
        h2, number, unsent, sent = self._h2, stream.id, stream.unsent, 0
        if not stream.has_begun:
            stream.has_begun = True
            h2.send_headers(number, stream.head)
        if unsent:
            most = min(h2.local_flow_control_window(number), _MOST_SENT_BYTES, len(unsent))
            while sent < most:
                part = bytes(unsent[sent : min(sent + _MOST_FRAME_BYTES, most)])
                h2.send_data(number, part)
                sent += len(part)
            del unsent[:sent]
            self.unsent_bytes -= sent
        if stream.trailers is not None and not unsent:
            h2.send_headers(number, stream.trailers, end_stream=True)
        self._write_soon(sent)
        return sent

    def _let_go_on(self) -> None:
        """Send on in a later turn, when a call has something to send and the client takes it."""
        if self._stuck and not self._waits and not self._is_paused:
            window = self._h2.local_flow_control_window
            if any(not stream.unsent or window(stream.id) > 0 for stream in self._stuck.values()):
                self._wait()

    def _send_on(self) -> None:
        """Send a part of what waits. The call that was sent longest ago goes first."""
        if not self._stuck or self._closes:
            return
        self.server.budget.spend(1)
        sent = 0
        for stream in list(self._stuck.values()):
            if sent >= _MOST_SENT_BYTES or self._is_paused or self._closes:
                break
            sent += self.flush(stream)
        if not self._closes:
            self._let_go_on()

    def reset(self, stream: CallStream) -> None:
        """End a call whose client does not take the answer. The others go on."""
        if not self._closes and self.streams.get(stream.id) is stream:
            self.server.turned_away["slow"] += 1
            self._h2.reset_stream(stream.id, ErrorCodes.ENHANCE_YOUR_CALM)
            self._forget(stream)
            stream.left()
            self._close_if_over()

    def _forget(self, stream: CallStream) -> None:
        """Forget a call that is over."""
        del self.streams[stream.id]
        self.unsent_bytes -= len(stream.unsent)
        self.acknowledge(stream.id, stream.unacknowledged)
        stream.unacknowledged = 0  # what the call still reads is not acknowledged again
        self._stuck.pop(stream.id, None)
        self._count_untaken()

    def _waiting_bytes(self) -> int:
        return self.unsent_bytes if self._stuck else 0

    def _close_if_over(self) -> None:
        if self._says_goodbye and not self.streams:
            self._close()

    def _write_soon(self, size: int = 0) -> None:
        """Write what h2 has to send at the end of the loop's turn, with one write; at once when it is much."""
        if self._unwritten is None:
            self._unwritten = 0
            asyncio.get_running_loop().call_soon(self.write_out)
        self._unwritten += size
        if self._unwritten >= UNSENT_BYTES:  # the transport says how much of it the client takes
            self.write_out()

    def write_out(self) -> None:
        """Write at once what waits for the end of the turn."""
        self._unwritten = None
        data = self._h2.data_to_send()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    @property
    def is_idle(self) -> bool:
        return not self.streams

    @property
    def gives_way(self) -> bool:
        return all(each.is_slowed or (each.is_idle() and not each.unsent) for each in self.streams.values())

    def end(self) -> None:
        """Take no more calls, and close when those that are under way are answered."""
        if not self._says_goodbye and self._transport is not None and not self._transport.is_closing():
            self._says_goodbye = True
            self.write_out()
            goodbye = GoAwayFrame(0, self._h2.highest_inbound_stream_id)  # of h2's own it would send nothing more
            self._transport.write(goodbye.serialize())
        self._close_if_over()

    def _close(self) -> None:
        self.write_out()
        super()._close()

    def check_time(self, now_s: float) -> None:
        passed_s = now_s - self.changed_s
        for stream in list(self.streams.values()):
            stream.check_time(now_s)
        for stream in list(self._stuck.values()):
            if now_s - stream.moved_s > _STALLED_S:
                self.reset(stream)
        is_stalled = self._is_paused or self._is_amid_block or not self._has_settings
        if is_stalled and passed_s > _STALLED_S:
            self.give_up()
        elif self.is_idle and passed_s > IDLE_S:
            self.end()
