"""A request, a batch and a generation as the dispatcher knows them. Here a batch is packed for the wire from its
requests, and the gpu-let's answer is split by model."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

import msgspec

from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.arena import Held
from tenuto.deployments.wire.bundles import Places
from tenuto.deployments.wire.messages import BatchRan, EndedSequence, Generate, RunBatch
from tenuto.deployments.wire.tensors import Buffer, InputPart, cut_rows
from tenuto.outcome import Rule
from tenuto.profiles.networks.generating import Ending, Sampling, TokenScores


class Asker(Protocol):
    """The sender of a request. Exactly one of its methods is called, once, unless the request is cancelled before."""

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        """Take the answer: the request ran as row `row` of its model's part of a batch."""

    def refused(self, request: Request, refused: Refused) -> None:
        """Take the refusal: the request did not run, or failed."""


class Samples(msgspec.Struct, eq=False):
    """The samples that one request of a client asks for together; figures count them as one request.

    `left` of them have not ended; 0 or less: the request is counted. `is_counted`: it is counted as submitted. `first`
    is the number of its first sample at the gateway; negative before that has one.
    """

    left: int
    first: int = -1
    is_counted: bool = False

    def end_one(self) -> bool:
        """Note that a sample ran. Return whether the request ends with it."""
        self.left -= 1
        return self.left == 0

    def end_all(self) -> bool:
        """Note that the request ends without the samples that are left. Return False when it had ended before."""
        left, self.left = self.left, 0
        return left > 0


class RequestTerms(TypedDict, total=False):
    """What a gateway says of a request beside its times; see `Request`."""

    reserve_ms: float
    client_id: str
    yields: bool
    samples: Samples | None
    sizes: tuple[int, ...]
    offline: bool
    client: str


class GenerationTerms(TypedDict, total=False):
    """What a gateway says of a generation beside its times to tokens; see `OpenGeneration`."""

    client_id: str
    offline: bool
    client: str


class Request(msgspec.Struct, eq=False):
    """A request of one sample between its admission and its end. Times are ms on the dispatcher's clock.

    `model` is its model's index in the present plan. `parts` holds one tensor per input of the model, in signature
    order, from `Dispatcher.start` on. `memory` is the shared memory in which the tensors lie, if any. `client_id` is
    the client's id of the request. `reserve_ms` is kept of the deadline for the way back. `is_waiting`: the request is
    in no batch. `yields`: other requests of its model go first. `samples`: those of the same request of a client, when
    that has several. `sizes`: in the order of the model's signature. `offline`: it may cost no other its deadline.
    `client`: the name of the key that asks.

    A request does not refer to its batch, and its asker forgets it at its end. Otherwise there would be cycles of
    references, which only Python's collector frees; with 50,000 objects that stops the process for 85 ms.
    """

    id: int
    name: str
    model: int
    arrived_ms: float
    deadline_ms: float
    asker: Asker
    reserve_ms: float = 0.0
    client_id: str = ""
    parts: Sequence[InputPart] = ()
    memory: Held | None = None
    is_waiting: bool = True
    was_retried: bool = False
    yields: bool = False
    samples: Samples | None = None
    sizes: tuple[int, ...] = ()
    offline: bool = False
    client: str = ""


@dataclass(slots=True, eq=False)
class Rerun:
    """A batch that raised an error, while it is run again in halves. `parts` are the halves that did not run yet, the
    next one last; at most `runs_left` of them run. `reason` says to clients what happened."""

    runs_left: int
    reason: str
    parts: list[list[Request]] = field(default_factory=list)

    @classmethod
    def of_batch(cls, size: int, reason: str) -> Rerun:
        """Return the rerun of a batch with so many requests. Halving isolates any two of them that fail in less than
        four runs for each doubling of the size. A batch with more of them costs no more than that."""
        return cls(4 * (size - 1).bit_length(), reason)  # derived: see above


@dataclass(slots=True, eq=False)
class Batch:
    """A batch from its dispatch until its answer. Times are ms: `sent_ms` on the clock, the others in the core's time.

    `members` are its models with their number of rows, in the order of the requests, which is by model. `start_ms` and
    `finish_ms` are the core's estimates. `plan_number` counts the plans: it tells under which plan the batch was made.
    `rerun` is what this batch is a part of, if it is run again. `online_part` of its requests are not offline.
    """

    number: int
    program: int
    name: str
    requests: list[Request]
    plan_number: int
    sent_ms: float
    start_ms: float
    finish_ms: float
    rerun: Rerun | None = None
    members: list[tuple[str, int]] = field(init=False)
    online_part: float = field(init=False)
    _held: list[Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.online_part = 1.0 - sum([request.offline for request in self.requests]) / (len(self.requests) or 1)
        if self.requests and self.requests[0].name != self.name:
            self.members = list(Counter(request.name for request in self.requests).items())
        else:
            self.members = [(self.name, len(self.requests))]

    @property
    def size(self) -> int:
        """The number of rows of all members."""
        return len(self.requests)

    @property
    def unanswered(self) -> list[Request]:
        """Its requests, and those of the parts that are run again after it."""
        return self.requests if self.rerun is None else list(itertools.chain(self.requests, *self.rerun.parts))

    def mark_sent(self) -> None:
        """Mark the requests as dispatched in this batch, and keep their memory for as long as a gpu-let may read it."""
        for request in self.requests:
            request.is_waiting = False
            if request.memory is not None:
                request.memory.hold()
                self._held.append(request.memory)

    def release_memory(self) -> None:
        """Release the requests' memory, as no gpu-let reads it any more."""
        for memory in self._held:
            memory.release()
        self._held.clear()


def pack_batch(batch: Batch, *, shares_memory: bool) -> tuple[RunBatch, list[Buffer]]:
    """Return the message and the body of a batch with requests. `shares_memory`: the gpu-let can map our memory."""
    requests = batch.requests
    if len(batch.members) == 1 and len(requests[0].parts) == 1:
        ordered = [request.parts[0] for request in requests]
    else:
        ordered = []
        first = 0
        for _, rows in batch.members:
            mine = requests[first : first + rows]
            first += rows
            ordered += [request.parts[position] for position in range(len(mine[0].parts)) for request in mine]
    sizes = [request.sizes for request in requests] if requests[0].sizes else []
    if not sizes and not any(part.arena or part.dtype for part in ordered):
        return RunBatch(batch.number, batch.name, batch.members, [], []), [part.data for part in ordered]
    places = Places(shares_memory=shares_memory)
    described = [places.put(part) for part in ordered]
    return RunBatch(batch.number, batch.name, batch.members, places.arenas, described, sizes), places.buffers


def split_reply(
    batch: Batch, ran: BatchRan, body: memoryview, *, gpulet: str, emulated: bool, shares_clock: bool, way_ms: float
) -> Iterator[tuple[list[Request], Executed]]:
    """Return the requests of each model in a batch with their results; nothing is copied.

    Args:
        batch: the batch as it was sent.
        ran: the gpu-let's answer.
        body: the outputs in the answer.
        gpulet: the id of the gpu-let.
        emulated: whether the gpu-let only emulates a GPU.
        shares_clock: whether the gpu-let has this machine's clock; otherwise the start of the batch is not known here.
        way_ms: the usual delay to the gpu-let, for a batch whose arrival the gpu-let did not see.
    """
    started_ms = ran.started_at_ms if shares_clock else math.nan
    queue_ms = max(0.0, ran.started_at_ms - batch.sent_ms - way_ms) if math.isnan(ran.queue_ms) else ran.queue_ms
    first = 0
    for rows, outputs in ran.members:
        data, body = cut_rows(rows, outputs, body)
        executed = Executed(
            batch.size,
            gpulet,
            emulated,
            batch.sent_ms,
            started_ms,
            queue_ms,
            ran.execution_ms,
            rows,
            outputs,
            data,
            batch.finish_ms - batch.start_ms,
        )
        yield batch.requests[first : first + rows], executed
        first += rows


class TokenAsker(Protocol):
    """Who waits for the tokens of a generation. Exactly one of the last two methods is called, once and last, unless
    the generation is left before."""

    def scored(self, scores: list[TokenScores]) -> None:
        """Take the scores of tokens that come next, if they are asked for: first those of the prompt, from its second
        token on, then one for each token."""

    def wrote(self, token: int) -> None:
        """Take the next token."""

    def ended(self, finish: Ending) -> None:
        """Learn why no token comes any more."""

    def refused(self, generation: OpenGeneration, refused: Refused) -> None:
        """Learn that it was refused, or that it failed after the tokens that came."""


class OpenGeneration(msgspec.Struct, eq=False):
    """A generation from its admission to its end. Times are ms on this process' clock; those of tokens are NaN before
    there are any. `gpulet` is where it runs, and `number` is its number there. `made` are its tokens, also those that
    it `had` when it came here. `was_retried`: it lost a process, and has made no token since. `offline`: it may cost no
    other its bounds; `client` is the key that asks."""

    number: int
    name: str
    arrived_ms: float
    first_by_ms: float
    tpot_ms: float
    prompt: list[int]
    sampling: Sampling
    asker: TokenAsker
    made: list[int] = []  # msgspec copies defaults
    had: int = 0
    client_id: str = ""
    gpulet: str = ""
    first_ms: float = math.nan
    last_ms: float = math.nan
    was_retried: bool = False
    offline: bool = False
    client: str = ""

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.made)

    @property
    def measured_tpot_ms(self) -> float:
        """The mean time of its tokens after the first that came here; 0 where there are none."""
        further = self.tokens - self.had - 1
        return (self.last_ms - self.first_ms) / further if further > 0 else 0.0

    @property
    def missed(self) -> Rule:
        """The bound that it missed: its first token came after its deadline, or a further one took longer in the mean
        than is allowed; `NONE` where it is in time."""
        if not self.first_ms <= self.first_by_ms:
            return Rule.FIRST_TOKEN
        return Rule.NONE if self.measured_tpot_ms <= self.tpot_ms else Rule.FURTHER_TOKENS

    def add_token(self, token: int, now_ms: float) -> None:
        """Take its next token, and pass it on."""
        self.note_time(now_ms)
        self.made.append(token)
        self.was_retried = False
        self.asker.wrote(token)

    def note_time(self, now_ms: float) -> None:
        """Take note of the time of a token. The end of an answer without tokens counts as its first one."""
        self.last_ms = now_ms
        if math.isnan(self.first_ms):
            self.first_ms = now_ms

    def tell_end(self, ended: EndedSequence) -> None:
        """Tell its asker of its end."""
        if ended.finish:
            self.asker.ended(Ending(ended.finish))
        else:
            self.asker.refused(self, ended.refused())

    def message(self, now_ms: float) -> Generate:
        """Return it as it is asked of another process."""
        first_in_ms = math.inf if self.made else self.first_by_ms - now_ms
        question = self.number, self.name, self.prompt, self.sampling, first_in_ms, self.tpot_ms, self.client_id
        return Generate(*question, self.made, self.offline, self.client)
