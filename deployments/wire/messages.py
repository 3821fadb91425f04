"""Every message that crosses from one of our processes to another, defined once.

A message is packed as MessagePack by msgspec, which checks types and lengths while it reads: what does not fit its
definition is refused, and nothing in it can make the other side run code. Tensors do not travel inside messages but
behind them (`tenuto.deployments.wire.frames`) or in shared memory (`tenuto.deployments.wire.arena`).

Times are ms; those called `_at_ms` are moments on the monotonic clock of the sender's machine, which `Hello` and the
states name.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tenuto.deployments.wire.status import GatewayReport, GpuletMode, GpuletStatus, MpsStatus
from tenuto.deployments.wire.tensors import RowOutput, most_batch_bytes, most_row_bytes
from tenuto.profiles.networks.catalogue import ModelSignature

MOST_BUNDLED_BYTES = 16 << 20  # limit: a bundle that has so many leaves at once


class _Message(msgspec.Struct, array_like=True):
    """Base of the messages; `array_like`: fields travel by position, names cost nothing."""


# --- any connection ---------------------------------------------------------------------------------------------------


class Hello(_Message, tag=1):
    """The first message of whoever connects: the secret that Ray handed out, and on which machine it runs."""

    token: str
    machine: str = ""
    is_watched: bool = True  # given up when it falls silent; others have loops that users keep busy
    gateway: str = ""  # of whoever asks dispatchers: a name that no other one has


class Beat(_Message, tag=8):
    """This process lives, and has nothing else to say (`tenuto.deployments.wire.liveness`). No owner sees it."""


# --- dispatcher and gpu-let -------------------------------------------------------------------------------------------


class Term(NamedTuple):
    """Who schedules for a sub-cluster: the dispatcher with the highest number, no two of which are equal; and the names
    of the gateways that reach it, none once it is gone."""

    number: int = 0
    gateways: frozenset[str] = frozenset()


class GpuletState(_Message, tag=2):
    """What a gpu-let is and holds; it says so to everyone who connects, and again when it changes.

    `programs`: the largest batch of each. `signatures`: of every model. `merged`: what merging did, by program.
    `terms`: for every sub-cluster, that of the dispatcher that took charge last.
    """

    gpulet: str
    gpu: str
    pid: int
    machine: str
    device: str
    emulated: bool
    share_pct: float | None
    memory_mib: float | None
    memory_cap_mib: float | None
    sm_count: int | None
    mode: GpuletMode
    cuda_mps: MpsStatus | None
    programs: dict[str, int]
    merged: dict[str, dict[str, float]]
    signatures: dict[str, ModelSignature]
    node_id: str = ""  # Ray's name of the node
    terms: dict[str, Term] = {}  # msgspec copies defaults

    def most_asked_bytes(self) -> int:
        """Return the size of the largest batch that can be asked for."""
        rows = {name: most_row_bytes(signature.inputs) for name, signature in self.signatures.items()}
        return most_batch_bytes(self.programs, rows)

    def most_answered_bytes(self) -> int:
        """Return the size of the largest body that it can answer with."""
        rows = {name: most_row_bytes(signature.outputs) for name, signature in self.signatures.items()}
        return most_batch_bytes(self.programs, rows)

    def described(self, planned: GpuletStatus) -> GpuletStatus:
        """Return a gpu-let's status with what it says of itself."""
        ours = ("machine", "programs", "terms")
        own = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ours}
        return msgspec.structs.replace(planned, models=self.programs, **own)


class PartPlace(NamedTuple):
    """Where one request's tensor lies: in the `arena` of that index in its message, or, with index -1, next in the
    body."""

    arena: int
    offset: int
    length: int
    dtype: str


class RunBatch(_Message, tag=3):
    """Run this batch. `members`: models with their rows. Inputs come member by member, input by input, row by row; with
    no `places` all of them lie in the body in that order, in the types of the signatures."""

    number: int
    program: str
    members: list[tuple[str, int]]
    arenas: list[str]
    places: list[PartPlace]
    request_ids: list[str]

    @property
    def size(self) -> int:
        """Rows of all members."""
        return sum(rows for _, rows in self.members)


class BatchRan(_Message, tag=5):
    """A batch was executed; `members`: rows and described outputs, in the order of the `RunBatch`.

    `queue_ms`: its wait at the gpu-let; NaN where it came while the one before ran, which only happens on one machine.
    """

    number: int
    started_at_ms: float
    execution_ms: float
    queue_ms: float
    copy_in_ms: float
    copy_out_ms: float
    members: list[tuple[int, list[RowOutput]]]


class BatchFailed(_Message, tag=6):
    """A batch was not executed. `may_retry`: its requests are not to blame, another gpu-let can run them."""

    number: int
    reason: str
    may_retry: bool = False


class GpuletCloses(_Message, tag=7):
    """This gpu-let runs no more batches: it is shutting down, or its device is lost. What it began it still answers."""

    reason: str


class TakeCharge(_Message, tag=9):
    """From now on this dispatcher schedules for its sub-cluster, and no other one: batches of those with an earlier
    term are not begun any more. Said again when other gateways reach it."""

    sub_cluster: str
    term: Term


# --- gateway and dispatcher -------------------------------------------------------------------------------------------


class RequestRow(NamedTuple):
    """One request. `deadline_at_ms` is the client's, on the sender's clock; `reserve_ms` is kept of it for the way
    back. Where it `yields`, others of its model go first. `lengths` and dtypes of its inputs stand in `places`, as in
    `RunBatch`."""

    number: int
    model: str
    arrived_at_ms: float
    deadline_at_ms: float
    reserve_ms: float
    client_id: str
    places: list[PartPlace]
    yields: bool = False


class Requests(_Message, tag=10):
    """Requests that came in one turn of the gateway's loop, and the numbers of those whose client went away.

    `sent_at_ms` is the sender's time: a dispatcher on another machine translates the rows' moments by it.
    """

    sent_at_ms: float
    arenas: list[str]
    rows: list[RequestRow]
    left: list[int]


class ExecutedRows(NamedTuple):
    """Requests of one model in a batch that ran, by their numbers; the rest is that of
    `tenuto.deployments.wire.answers.Executed`, with moments on the dispatcher's clock."""

    numbers: list[int]
    batch_size: int
    gpulet: str
    emulated: bool
    sent_at_ms: float
    started_at_ms: float
    gpulet_queue_ms: float
    execution_ms: float
    planned_ms: float
    outputs: list[RowOutput]


class RefusedRow(NamedTuple):
    """A request that did not run; see `tenuto.deployments.wire.answers.Refused`."""

    number: int
    outcome: int
    reason: str
    retry_after_s: float | None
    gpulet: str
    rule: str
    loop: str


class Answers(_Message, tag=11):
    """What became of requests in one turn of the dispatcher's loop; the outputs are the body.

    `sent_at_ms` is the sender's time: a gateway on another machine translates the moments by it.
    """

    sent_at_ms: float
    executed: list[ExecutedRows]
    refused: list[RefusedRow]


class DispatcherState(_Message, tag=12):
    """What gateways answer for without asking: readiness, signatures, and the gpu-lets for the status."""

    pid: int
    machine: str
    started_at_s: float  # since 1970
    ready: bool
    ready_models: list[str]
    signatures: dict[str, ModelSignature]
    gpulets: list[GpuletStatus]
    is_eligible: bool = True  # it schedules, or no dispatcher does that gateways reach which do not reach this one

    def seniority(self) -> tuple[bool, float, int]:
        """Return what is smallest of the one that is to be asked: it may schedule, and of several it is the oldest."""
        return not self.is_eligible, self.started_at_s, self.pid

    def most_asked_bytes(self) -> int:
        """Return the size of the largest bundle of requests."""
        rows = [most_row_bytes(signature.inputs) for signature in self.signatures.values()]
        return MOST_BUNDLED_BYTES + max(rows, default=0)

    def most_answered_bytes(self) -> int:
        """Return the size of the largest bundle of answers."""
        rows = [most_row_bytes(signature.outputs) for signature in self.signatures.values()]
        return MOST_BUNDLED_BYTES + max(rows, default=0)


class AskStatus(_Message, tag=13):
    """Ask for the status (`DispatchingStatus`), which comes without the plan: a gateway has the whole one."""

    number: int


class AskWaiting(_Message, tag=14):
    """Ask how many requests of every model wait for a batch (`dict[str, int]`)."""

    number: int


class AskEnded(_Message, tag=15):
    """Ask for the last requests that ended, newest first (`list[EndedRequest]`), at most `limit`; with an `id`, for
    those of it."""

    number: int
    id: str | None
    limit: int


class TellGateway(_Message, tag=16):
    """Tell what this gateway is and counts, and ask for what all of them told last (`list[GatewayReport]`)."""

    number: int
    told: GatewayReport


class Told(_Message, tag=17):
    """The answer to one of the four above, packed: whoever asked knows what it is."""

    number: int
    found: msgspec.Raw


Message = (
    Hello
    | Beat
    | TakeCharge
    | GpuletState
    | RunBatch
    | BatchRan
    | BatchFailed
    | GpuletCloses
    | Requests
    | Answers
    | DispatcherState
    | AskStatus
    | AskWaiting
    | AskEnded
    | TellGateway
    | Told
)

_ENCODER: msgspec.msgpack.Encoder = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
encode = _ENCODER.encode


def decode(data: bytes | memoryview) -> Message:
    """Return the message in `data`.

    Raises:
        msgspec.DecodeError: it is none of ours.
    """
    return _DECODER.decode(data)
