"""One load client: it sends its part of the schedule open-loop, at absolute times, and records the answers.

An application is asked as a model is. The client runs on any event loop; `tenuto.loadgen.clients.actors` wraps it in a
Ray actor. All its times come from its own clock, so no difference between two machines' clocks enters any figure."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.loadgen.clients.precise_timer import PreciseTimer, Timer
from tenuto.loadgen.clients.priority import Priority, preferred
from tenuto.loadgen.records import NAN, Records, request_id
from tenuto.loadgen.schedule import Schedule
from tenuto.loadgen.sender import Body, OnReply, Reply, Sender
from tenuto.loadgen.senders.payloads import Prompts, SizedBodies
from tenuto.outcome import OUTCOMES, Outcome
from tenuto.placement.generates import TokenSlo

_LONGEST_ERROR = 160  # limit: characters of an error that are kept
_KINDS_OF_ERROR = 50  # limit: kinds of errors that are counted apart


@dataclass(frozen=True)
class ModelTarget:
    """A model or an application to send requests to, with `bodies` in turn; or with bodies that are made for each
    request, as large as it is. One that generates or streams has an `slo`; `most_tokens` are those of a stream of which
    the schedule does not say how long each is."""

    name: str
    slo_ms: float
    bodies: tuple[Body, ...]
    asked: str = ""  # NAME:VERSION, where a version has to be named
    made: Prompts | SizedBodies | None = None
    slo: TokenSlo | None = None
    stages: tuple[str, ...] = ()  # of an application
    most_tokens: int = 0

    def outcome(self, reply: Reply, latency_ms: float) -> Outcome:
        """Return the outcome of an answer with its latency from the scheduled time. Of a stream both bounds count."""
        if self.slo is None or reply.status != 200:
            return outcome_of(reply.status, latency_ms, self.slo_ms)
        in_time = self.slo.is_met_by(latency_ms - reply.writing_ms, reply.writing_ms, reply.tokens)
        return Outcome.OK if in_time else Outcome.LATE


@dataclass(frozen=True)
class ClientJob:
    """The requests that one client must send. Their times count from the common start. `number[i]` is the number of
    request i of this part of the `schedule` in the whole."""

    url: str
    targets: tuple[ModelTarget, ...]
    schedule: Schedule
    number: NDArray[np.int64]
    grace_s: float
    connections: int
    send_slo: bool = False
    run: str = ""  # the beginning of the requests' ids; see `request_id`
    key: str = field(default="", repr=False)  # the API key for the server
    measured_from_ms: float = 0.0  # errors of requests that were scheduled earlier are not counted

    def answer_s(self, row: int) -> float:
        """Return how long a stream may take by its SLO; 0 for other requests."""
        target, tokens = self.targets[self.schedule.model_index[row]], self.schedule.tokens
        count = target.most_tokens if target.stages or tokens is None else int(tokens.output[row])
        return 0.0 if target.slo is None else target.slo.answer_ms(float(count)) / 1000.0


@dataclass
class ClientReport:
    """The result of a client: one row per request of its job, the count of each error text, and its priority."""

    records: Records
    errors: Counter[str] = field(default_factory=Counter)
    priority: Priority = "normal"


def outcome_of(status: int, latency_ms: float, slo_ms: float) -> Outcome:
    """Return a request's outcome from its HTTP status (0: no answer) and its latency from the scheduled time."""
    if status == 200:
        return Outcome.OK if latency_ms <= slo_ms else Outcome.LATE
    return Outcome.of_http_status(status)


class _Columns:
    """The rows of a job while it runs, as flat arrays: 1e6 requests take 60 MB instead of 1 GB of objects."""

    def __init__(self, job: ClientJob) -> None:
        schedule, total = job.schedule, len(job.number)
        self.request, self.model = job.number, schedule.model_index
        self.scheduled_ms = array("d", schedule.times_ms.tobytes())
        self.sent_ms = array("d", [NAN]) * total
        self.answered_ms = array("d", [NAN]) * total
        self.batching_ms = array("d", [NAN]) * total
        self.gpulet_queue_ms = array("d", [NAN]) * total
        self.execution_ms = array("d", [NAN]) * total
        self.status = array("i", [0]) * total
        self.batch_size = array("i", [0]) * total
        self.outcome = array("b", [int(Outcome.FAILED)]) * total
        self.gpulet = [""] * total
        self.first_token_ms = array("d", [NAN]) * total
        self.prompt_tokens = np.zeros(total, np.int64) if schedule.tokens is None else schedule.tokens.prompt
        self.output_tokens = array("q", [0]) * total
        self.sizes = np.zeros((total, 0), np.int64) if schedule.sizes is None else schedule.sizes
        self.stage_ms = np.full((total, max((len(target.stages) for target in job.targets), default=0)), NAN)

    def add(self, row: int, answered_ms: float, outcome: Outcome, reply: Reply, stages: Sequence[str]) -> None:
        """Record an answer. A broken connection without an answer has no time of answer."""
        self.outcome[row] = outcome
        if reply.status:
            self.status[row] = reply.status
            self.answered_ms[row] = answered_ms
            self.batching_ms[row] = reply.batching_ms
            self.gpulet_queue_ms[row] = reply.gpulet_queue_ms
            self.execution_ms[row] = reply.execution_ms
            self.batch_size[row] = reply.batch_size
            self.gpulet[row] = reply.gpulet
            self.first_token_ms[row] = answered_ms - reply.writing_ms
            self.output_tokens[row] = reply.tokens
            for column, stage in enumerate(stages):
                self.stage_ms[row, column] = reply.stage_ms.get(stage, NAN)

    def records(self) -> Records:
        """Return all rows."""
        columns: dict[str, Any] = {
            name: np.array(getattr(self, name), dtype=kind) for name, kind in Records.columns().items()
        }
        return Records(**columns)


class Client:
    """Runs one job: `prepare`, then `run`. Meanwhile `progress` may be read. `stop` ends the job early and keeps its
    records.
    """

    def __init__(self, job: ClientJob, sender: Sender, *, make_timer: Callable[[], Timer] = PreciseTimer) -> None:
        """`make_timer` is called on the event loop."""
        self._job = job
        self._sender = sender
        self._make_timer = make_timer
        self._counts: Counter[str] = Counter()
        self._stopped = False
        self._requests: list[list[Any]] = []  # per model, as the sender prepared them
        self._handle_reply: OnReply = lambda _row, _reply: None

    def progress(self) -> dict[str, int]:
        """Return counts so far: sent, answered, and every outcome."""
        return dict(self._counts)

    def stop(self) -> None:
        """Send no more of the schedule. `run` returns when all open requests are answered, or when the grace period has
        passed.
        """
        self._stopped = True

    async def prepare(self) -> None:
        """Build the requests and open the connections, so that this costs no time in the run."""
        job, sender = self._job, self._sender
        await sender.open(job.connections, lambda row, reply: self._handle_reply(row, reply))
        self._requests = [[self._prepared(target, body) for body in target.bodies] for target in job.targets]

    async def run(self, start_at: float) -> ClientReport:
        """Send every request at its time, wait for late answers up to the grace period, and return one row per request.

        Args:
            start_at: `time.time()` of the start that all clients share; the schedule counts from it.
        """
        with preferred() as got:
            report = await self._run(start_at)
        report.priority = got
        return report

    async def _run(self, start_at: float) -> ClientReport:
        job, send = self._job, self._sender.send
        columns = _Columns(job)
        errors: Counter[str] = Counter()
        counts = self._counts
        times, models, numbers = columns.scheduled_ms, job.schedule.model_index.tolist(), job.number.tolist()
        targets = job.targets
        timer = self._make_timer()
        now = timer.now
        # The wall clock is read once, so that its adjustment during the run cannot bend the schedule.
        origin = now() + (start_at - timer.wall())
        pending: set[int] = set()  # rows
        idle = asyncio.Event()

        def on_reply(row: int, reply: Reply) -> None:
            answered_ms = (now() - origin) * 1000.0
            target = targets[models[row]]
            outcome = target.outcome(reply, answered_ms - times[row])
            columns.add(row, answered_ms, outcome, reply, target.stages)
            counts["answered"] += 1
            counts[OUTCOMES[outcome]] += 1
            if reply.error and times[row] >= job.measured_from_ms:
                _count_error(errors, reply.error[:_LONGEST_ERROR])
            pending.discard(row)
            if not pending:
                idle.set()

        self._handle_reply = on_reply
        for row in range(len(numbers)):
            at = origin + times[row] / 1000.0
            if at > now():
                while at > (now_s := now()) and not self._stopped:
                    await timer.wait_until(min(at, now_s + 0.25))  # pace: so that `stop` works within a long gap too
            elif row % 16 == 0:  # pace
                await asyncio.sleep(0)  # the client is behind schedule; let answers be read between sends
            if self._stopped:
                break
            target, pool = targets[models[row]], self._requests[models[row]]
            prepared = pool[row % len(pool)] if target.made is None else self._made(row)
            pending.add(row)
            columns.sent_ms[row] = (now() - origin) * 1000.0
            counts["sent"] += 1
            send(prepared, request_id(job.run, numbers[row]), row)
        timer.close()
        wait_s = await self._await_stragglers(idle, pending)
        if self._stopped:
            now_ms = (now() - origin) * 1000.0
            for row in [row for row in pending if now_ms < times[row] + 1000.0 * job.answer_s(row)]:
                columns.sent_ms[row] = NAN  # nobody knows how it would have ended
                pending.discard(row)
        self._handle_reply = lambda _row, _reply: None
        if silent := sum(times[row] >= job.measured_from_ms for row in pending):
            errors[f"no answer within {wait_s:g} s after the last request"] += silent
        self._sender.close()
        return ClientReport(columns.records(), errors)

    def _made(self, row: int) -> Any:
        """Return a request whose body is made for it, as the sender prepared it."""
        schedule, tokens = self._job.schedule, self._job.schedule.tokens
        target = self._job.targets[schedule.model_index[row]]
        assert target.made is not None
        if target.slo is not None and tokens is not None and not target.stages:
            lengths = [int(tokens.prompt[row]), int(tokens.output[row])]
        else:
            assert schedule.sizes is not None
            lengths = schedule.sizes[row].tolist()
        return self._prepared(target, target.made.body(int(self._job.number[row]), *lengths))

    def _prepared(self, target: ModelTarget, body: Body) -> Any:
        slo_ms = target.slo_ms if target.slo is None else target.slo.ttft_ms
        return self._sender.prepare(target.asked or target.name, body, slo_ms if self._job.send_slo else None)

    async def _await_stragglers(self, idle: asyncio.Event, pending: set[int]) -> float:
        """Wait for the answers to open requests: for the grace period, and as long as their SLO lets streams take,
        unless the run is ended early. Return that time in s; a request without an answer by then stays failed."""
        job = self._job
        streams_s = max((job.answer_s(row) for row in pending), default=0.0)
        begun_at = asyncio.get_running_loop().time()
        while True:
            wait_s = job.grace_s + (0.0 if self._stopped else streams_s)
            left_s = wait_s - (asyncio.get_running_loop().time() - begun_at)
            if not pending or left_s <= 0.0:
                return wait_s
            idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(idle.wait(), min(left_s, 0.25))  # pace: so that `stop` works here too


def _count_error(errors: Counter[str], text: str) -> None:
    if text not in errors and len(errors) >= _KINDS_OF_ERROR:
        text = "other errors"
    errors[text] += 1
