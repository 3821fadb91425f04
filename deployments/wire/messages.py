"""Every message that crosses from one of our processes to another, defined once.

Msgspec packs a message as MessagePack, and checks types and lengths when it reads one. A message that does not fit its
definition is refused, and no message can make the other side run code. Tensors do not travel inside messages but behind
them (`tenuto.deployments.wire.frames`) or in shared memory (`tenuto.deployments.wire.arena`).

Times are ms. A name with `_at_ms` is a moment on the monotonic clock of the sender's machine, which `Hello` and the
states name.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.status import GatewayReport, GpuletMode, GpuletStatus, MpsStatus
from tenuto.deployments.wire.tensors import RowOutput, most_batch_bytes, most_row_bytes
from tenuto.outcome import Outcome, Rule
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.generating import Sampling, TokenScores

MOST_BUNDLED_BYTES = 16 << 20  # limit: a bundle with this many bytes leaves at once


class _Message(msgspec.Struct, array_like=True):
    """Base of the messages. `array_like`: fields travel by position, so names cost no bytes."""


# --- any connection ---------------------------------------------------------------------------------------------------


class Hello(_Message, tag=1):
    """The first message of a process that connects: the token that Ray handed out, and the machine it runs on."""

    token: str
    machine: str = ""
    is_watched: bool = True  # the peer may give this process up when it is silent; False: users may block its loop
    gateway: str = ""  # the name of the gateway that connects to a dispatcher; no other gateway has it


class Beat(_Message, tag=8):
    """A sign of life of a process that has nothing else to send (`tenuto.deployments.wire.liveness`). The connection
    takes it; its owner does not see it."""


# --- dispatcher and gpu-let -------------------------------------------------------------------------------------------


class Term(NamedTuple):
    """The term of a dispatcher: its number, and the names of the gateways that reach it (none, once it is gone). The
    dispatcher with the highest number schedules for its sub-cluster. No two numbers are equal."""

    number: int = 0
    gateways: frozenset[str] = frozenset()


class GpuletState(_Message, tag=2):
    """What a gpu-let is and holds. It sends this to every dispatcher that connects, and again when it changes.

    `programs`: the largest batch of each program. `signatures`: the signature of every model. `merged`: figures of
    merging, by program. `terms`: for every sub-cluster, the term of the dispatcher that took charge last.
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
        """Return the largest body in bytes that a batch for this gpu-let can have."""
        rows = {name: most_row_bytes(signature.inputs, signature.sizes) for name, signature in self.signatures.items()}
        return most_batch_bytes(self.programs, rows)

    def most_answered_bytes(self) -> int:
        """Return the largest body in bytes that an answer of this gpu-let can have."""
        rows = {name: most_row_bytes(signature.outputs, signature.sizes) for name, signature in self.signatures.items()}
        return most_batch_bytes(self.programs, rows)

    def described(self, planned: GpuletStatus) -> GpuletStatus:
        """Return the planned status completed by what the gpu-let reports."""
        ours = ("machine", "programs", "terms")
        own = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ours}
        return msgspec.structs.replace(planned, models=self.programs, **own)


class PartPlace(NamedTuple):
    """Where one tensor of a request lies: in the arena with this index in the message, or, with index -1, next in the
    body."""

    arena: int
    offset: int
    length: int
    dtype: str


class RunBatch(_Message, tag=3):
    """Run this batch. `members`: models with their number of rows. Inputs are ordered by member, then by input, then by
    row. Without `places` all inputs lie in the body in this order, in the types of the signatures. `sizes`: of
    each row, in the order of its model's signature; empty where no member has any."""

    number: int
    program: str
    members: list[tuple[str, int]]
    arenas: list[str]
    places: list[PartPlace]
    sizes: list[tuple[int, ...]] = []  # msgspec copies defaults

    @property
    def size(self) -> int:
        """Rows of all members."""
        return sum(rows for _, rows in self.members)


class BatchRan(_Message, tag=5):
    """A batch was executed. `members`: number of rows and description of outputs, in the order of the `RunBatch`. Rows
    of one member whose outputs differ in shape are told one after another.

    `queue_ms`: the wait of the batch at the gpu-let. It is NaN when the batch came while another one ran, which happens
    only between processes of one machine.
    """

    number: int
    started_at_ms: float
    execution_ms: float
    queue_ms: float
    copy_in_ms: float
    copy_out_ms: float
    members: list[tuple[int, list[RowOutput]]]


class BatchFailed(_Message, tag=6):
    """A batch was not executed. `may_retry`: the requests are not the cause, so another gpu-let can run them."""

    number: int
    reason: str
    may_retry: bool = False


class Generate(_Message, tag=18):
    """Generate after this prompt. The sender numbers its sequences. `first_in_ms`: the time that is left for the first
    token; `tpot_ms`: the mean time allowed for each further one. Both are infinite where there is no bound. `made` are
    tokens that the sequence got elsewhere: it goes on behind them. `offline`: it may cost no other its bounds, and
    takes turns with those of other keys than `client`."""

    number: int
    model: str
    prompt: list[int]
    sampling: Sampling
    first_in_ms: float
    tpot_ms: float
    client_id: str
    made: list[int] = []  # msgspec copies defaults
    offline: bool = False
    client: str = ""


class StopGenerating(_Message, tag=19):
    """Forget these sequences: nobody waits for their tokens any more. `is_answered`: what came of them was all that
    was wanted."""

    numbers: list[int]
    is_answered: bool = False


class EndedSequence(NamedTuple):
    """A sequence that ended: why by itself (`Ending`), or, with "", how it failed as `Refused` says it. `may_retry`: it
    is not the cause, so another gpu-let can run it."""

    number: int
    finish: str
    outcome: int = int(Outcome.OK)
    reason: str = ""
    retry_after_s: float | None = None
    gpulet: str = ""
    rule: Rule = Rule.NONE
    may_retry: bool = False

    @classmethod
    def failed(cls, number: int, refused: Refused, *, may_retry: bool = False) -> EndedSequence:
        """Return the end of a sequence that failed."""
        fields = int(refused.outcome), refused.reason, refused.retry_after_s, refused.gpulet, refused.rule
        return cls(number, "", *fields, may_retry)

    def refused(self) -> Refused:
        """Return how it failed."""
        return Refused(Outcome(self.outcome), self.reason, self.retry_after_s, self.gpulet, self.rule)


class HeldBlocks(NamedTuple):
    """What the sequences of a gpu-let hold: of its `blocks` of memory all but `free_blocks` (-1: not known). `waiting`
    is how many sequences hold none, and `preempted` how often one has lost its own."""

    free_blocks: int = -1
    blocks: int = 0
    waiting: int = 0
    preempted: int = 0


class Generated(_Message, tag=20):
    """What one step brought: the next token of each sequence that got one, and the sequences that ended with it.

    `held`: what the gpu-let's sequences hold after the step; from a dispatcher it is empty. `execution_ms`: how long
    the step took; 0 where there was none, or where another dispatcher is told. `scores` are those of the tokens, for
    sequences that ask for them; before those of a first token are those of the prompt.
    """

    tokens: list[tuple[int, int]]
    ended: list[EndedSequence]
    held: HeldBlocks = HeldBlocks()
    execution_ms: float = 0.0
    scores: list[tuple[int, list[TokenScores]]] = []


class GpuletCloses(_Message, tag=7):
    """This gpu-let begins no more batches: it is shutting down, or its device is lost. It still answers the batches
    that it has begun."""

    reason: str


class TakeCharge(_Message, tag=9):
    """From now on only this dispatcher schedules for its sub-cluster: batches of dispatchers with an earlier term are
    not begun any more. It is sent again when other gateways reach the dispatcher."""

    sub_cluster: str
    term: Term


# --- gateway and dispatcher -------------------------------------------------------------------------------------------


class RequestRow(NamedTuple):
    """One request. `deadline_at_ms` is the client's deadline, on the sender's clock; `reserve_ms` of it is kept for the
    way back. When it `yields`, other requests of its model go first. `offline`: it may cost no other request its
    deadline. `places` has the lengths and types of its inputs,
    as in `RunBatch`. When a client asked for several samples at once, each has a row; these follow each other with the
    number of the `first`, and `left` of them are not answered. `sizes`: in the order of its model's signature.
    `client`: the name of the key that asks."""

    number: int
    model: str
    arrived_at_ms: float
    deadline_at_ms: float
    reserve_ms: float
    client_id: str
    places: list[PartPlace]
    yields: bool = False
    first: int = -1
    left: int = 1
    sizes: tuple[int, ...] = ()
    offline: bool = False
    client: str = ""


class Requests(_Message, tag=10):
    """The requests of one turn of the gateway's loop, and in `left` the numbers of requests whose client went away.

    `sent_at_ms` is the sender's time; a dispatcher on another machine translates the times of the rows by it.
    """

    sent_at_ms: float
    arenas: list[str]
    rows: list[RequestRow]
    left: list[int]


class ExecutedRows(NamedTuple):
    """Requests of one model in a batch that ran, by their numbers. The other fields are those of
    `tenuto.deployments.wire.answers.Executed`, with times on the dispatcher's clock."""

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


class Answers(_Message, tag=11):
    """The requests that ended in one turn of the dispatcher's loop; the body has the outputs. Those that did not run
    are in `refused`, by their numbers.

    `sent_at_ms` is the sender's time; a gateway on another machine translates the times by it.
    """

    sent_at_ms: float
    executed: list[ExecutedRows]
    refused: list[tuple[int, Refused]]


class DispatcherState(_Message, tag=12):
    """What gateways must know to answer by themselves: readiness, signatures, and the gpu-lets for the status."""

    pid: int
    machine: str
    started_at_s: float  # since 1970
    ready: bool
    ready_models: list[str]
    signatures: dict[str, ModelSignature]
    gpulets: list[GpuletStatus]
    is_eligible: bool = True  # it is in charge of the gpu-lets or may take charge

    def seniority(self) -> tuple[bool, float, int]:
        """Return a sort key; gateways ask the dispatcher with the smallest one: the oldest of those that may
        schedule."""
        return not self.is_eligible, self.started_at_s, self.pid

    def most_asked_bytes(self) -> int:
        """Return the size in bytes of the largest bundle of requests."""
        rows = [most_row_bytes(signature.inputs, signature.sizes) for signature in self.signatures.values()]
        return MOST_BUNDLED_BYTES + max(rows, default=0)

    def most_answered_bytes(self) -> int:
        """Return the size in bytes of the largest bundle of answers."""
        rows = [most_row_bytes(signature.outputs, signature.sizes) for signature in self.signatures.values()]
        return MOST_BUNDLED_BYTES + max(rows, default=0)


class AskStatus(_Message, tag=13):
    """Ask for the status (`DispatchingStatus`). It comes without the plan, as the gateway has the whole plan."""

    number: int


class AskWaiting(_Message, tag=14):
    """Ask how many requests of every model wait for a batch (`dict[str, int]`)."""

    number: int


class AskEnded(_Message, tag=15):
    """Ask for the last requests that ended, newest first (`list[EndedRequest]`), at most `limit`; with an `id`, only
    for those with this id."""

    number: int
    id: str | None
    limit: int


class TellGateway(_Message, tag=16):
    """Send the report of this gateway, and ask for the last reports of all gateways (`list[GatewayReport]`)."""

    number: int
    told: GatewayReport


class Told(_Message, tag=17):
    """The answer to one of the four messages above, packed. The process that asked knows its type."""

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
    | Generate
    | StopGenerating
    | Generated
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
        msgspec.DecodeError: the data is none of our messages.
    """
    return _DECODER.decode(data)
