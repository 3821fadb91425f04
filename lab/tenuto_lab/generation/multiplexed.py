"""Language models that share GPUs, in virtual time: prefills and decoding steps run side by side on shares of a unit.

A unit is one or more GPUs of a node. Each of its models lies on all of them, which is its tensor parallelism. A job is
a prefill of some requests, or one decoding step of a model. A job first takes host time, in which the GPU is free for
others. Then it runs as fast as its share and the jobs beside it allow:

* When the shares of the running jobs add up to more than the GPU, each gets its part of the sum.
* Reading weights, keys and values takes the memory's bandwidth. When the running jobs want more than there is, the
  parts in which they read take longer, all by the same factor.

No other interference is modelled, neither of caches nor of links between GPUs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tenuto_lab.generation.step_times import Times


@dataclass(slots=True)
class Request:
    """A request: so many tokens of prompt and of output. Times in ms; None: not reached."""

    model: str
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    first_ms: float | None = None
    end_ms: float | None = None
    at: str | None = None  # the model of its unit that serves it, if that has another name
    made: int = 0  # tokens so far; a request that lost its memory has to read them again with its prompt

    @property
    def tokens(self) -> int:
        """The tokens that a prefill reads now."""
        return self.prompt_tokens + self.made


@dataclass(frozen=True, slots=True)
class Model:
    """A language model in a unit. Shares in percent; `host_ms` and `host_ms_per_sequence` pass before each job.

    `on` are the GPUs of the unit that it lies on; models on other GPUs do not disturb it. `kv_mib` is memory of its
    own, of all its GPUs together: such a model runs in a process of its own, one job at a time. Without it, the model
    has its part of the unit's memory, and prefills of its unit run one after the other.
    """

    name: str
    times: Times
    kv_mib_per_token: float
    prefill_share: float
    decode_share: float
    max_sequences: int = 256
    host_ms: float = 0.0
    host_ms_per_sequence: float = 0.0
    on: frozenset[int] = frozenset((0,))
    kv_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Models on the same GPUs, or on some of them, with the memory that is left for keys and values, of all its GPUs
    together. `oversubscribed_pct`: by how much shares may exceed the GPU. `alone`: one job at a time."""

    models: tuple[Model, ...]
    kv_mib: float
    gpus: int = 1
    oversubscribed_pct: float = 20.0
    alone: bool = False


PREFILL_TOKENS = 2048
"""limit: tokens of one prefill, the usual bound of serving engines; a longer prompt is read alone."""
_MEMORY_LEFT_FREE = 0.01
"""limit: the part of the memory that a prefill leaves free for the next tokens of running sequences, as in vLLM."""


@dataclass(slots=True)
class _Job:
    model: _State
    share: float
    requests: list[Request]  # of a prefill; empty: a decoding step
    batch: int  # sequences of the step
    tokens: int  # of the prefill, or of the step's contexts
    host_left_ms: float
    left: float = 1.0  # part of the work on the GPU that is left


@dataclass(slots=True)
class _State:
    spec: Model
    waiting: deque[Request] = field(default_factory=deque)
    ending: list[tuple[int, int, Request]] = field(default_factory=list)  # heap: step at which it ends, order
    steps: int = 0
    context: int = 0  # tokens of all running sequences
    decoding: bool = False

    @property
    def running(self) -> int:
        return len(self.ending)


Admit = Callable[[Request, float], bool]


def run(unit: Unit, requests: Iterable[Request], admit: Admit | None = None) -> int:
    """Serve the requests of a unit's models and write into each when its first and its last token came; return the
    decoding steps it took. `admit(request, now_ms)`, asked before each prefill, may refuse one for good."""
    return _Run(unit, requests, admit).to_the_end()


class _Run:
    def __init__(self, unit: Unit, requests: Iterable[Request], admit: Admit | None) -> None:
        self.unit = unit
        self.states = [_State(model) for model in unit.models]
        self.by_name = {state.spec.name: state for state in self.states}
        self.gpus = frozenset(gpu for model in unit.models for gpu in model.on)
        self.arrivals = deque(sorted(requests, key=lambda request: request.arrival_ms))
        self.admit = admit
        self.now_ms = 0.0
        self.jobs: list[_Job] = []
        self.kv_mib = {None: unit.kv_mib} | {m.name: m.kv_mib for m in unit.models if m.kv_mib is not None}
        self.kv_free_mib = dict(self.kv_mib)
        self.order = 0
        self.turn_prefill = self.turn_decode = 0
        self.steps = 0

    def to_the_end(self) -> int:
        while True:
            while self.arrivals and self.arrivals[0].arrival_ms <= self.now_ms:
                request = self.arrivals.popleft()
                self.by_name[request.at or request.model].waiting.append(request)
            self.start_jobs()
            if not self.jobs:
                if not self.arrivals:
                    return self.steps
                self.now_ms = self.arrivals[0].arrival_ms
                continue
            self.advance()

    # what runs next: prefills in turn, then decoding steps in turn

    def start_jobs(self) -> None:
        for state in self.states:
            if state.spec.kv_mib is not None and all(job.model is not state for job in self.jobs):
                self.start_step(state)
        pooled = [state for state in self.states if state.spec.kv_mib is None]
        blocked: set[int] = set()  # GPUs on which no decoding step starts until a prefill fits
        reading = {gpu for job in self.jobs if job.requests for gpu in job.model.spec.on}
        first = self.turn_prefill
        for i in range(len(pooled)):
            state = pooled[(first + i) % len(pooled)]
            if not reading.isdisjoint(state.spec.on) or not self.admissible(state):
                continue
            if not self.has_room(state.spec, state.spec.prefill_share):
                blocked |= state.spec.on
                reading |= state.spec.on
                continue
            batch = self.gather(state)
            if batch:
                self.turn_prefill = (first + i + 1) % len(pooled)
                self.begin(state, state.spec.prefill_share, batch)
                reading |= state.spec.on
        for i in range(len(pooled)):
            state = pooled[(self.turn_decode + i) % len(pooled)]
            if not state.ending or state.decoding or not blocked.isdisjoint(state.spec.on):
                continue
            if self.has_room(state.spec, state.spec.decode_share):
                self.turn_decode = (self.turn_decode + i + 1) % len(pooled)
                self.make_room_for_a_step(state)
                if state.ending:
                    state.decoding = True
                    self.begin(state, state.spec.decode_share, [])

    def start_step(self, state: _State) -> None:
        """Start a model that runs in a process of its own, with its own memory: prompts first, one job at a time."""
        batch = self.gather(state)
        if batch:
            self.begin(state, state.spec.prefill_share, batch)
        elif state.ending:
            self.make_room_for_a_step(state)
            state.decoding = True
            self.begin(state, state.spec.decode_share, [])

    def has_room(self, model: Model, share: float) -> bool:
        beside = [job for job in self.jobs if not model.on.isdisjoint(job.model.spec.on)]
        if not beside:
            return True
        if self.unit.alone:
            return False
        used = max(sum(job.share for job in beside if gpu in job.model.spec.on) for gpu in model.on)
        return used + share <= 100.0 + self.unit.oversubscribed_pct

    def pool(self, model: Model) -> str | None:
        """Return the memory that a model takes its keys and values from: its own, or the unit's."""
        return None if model.kv_mib is None else model.name

    def begin(self, state: _State, share: float, batch: list[Request]) -> None:
        sequences = len(batch) or state.running
        tokens = sum(request.tokens for request in batch) or state.context
        host_ms = state.spec.host_ms + state.spec.host_ms_per_sequence * sequences
        self.jobs.append(_Job(state, share, batch, sequences, tokens, host_ms))

    def admissible(self, state: _State) -> bool:
        while state.waiting and self.admit is not None and not self.admit(state.waiting[0], self.now_ms):
            state.waiting.popleft()
        if not state.waiting or state.running >= state.spec.max_sequences:
            return False
        pool = self.pool(state.spec)
        beside = [s for s in self.states if self.pool(s.spec) == pool]
        if not any(s.running for s in beside) and not any(job.requests and job.model in beside for job in self.jobs):
            return True  # with nothing else in memory the longest request has to do
        needed = state.waiting[0].tokens * state.spec.kv_mib_per_token
        return self.kv_free_mib[pool] - needed >= _MEMORY_LEFT_FREE * self.kv_mib[pool]

    def gather(self, state: _State) -> list[Request]:
        batch: list[Request] = []
        tokens = 0
        while self.admissible(state) and state.running + len(batch) < state.spec.max_sequences:
            request = state.waiting[0]
            if batch and tokens + request.tokens > PREFILL_TOKENS:
                break
            batch.append(state.waiting.popleft())
            tokens += request.tokens
            self.kv_free_mib[self.pool(state.spec)] -= request.tokens * state.spec.kv_mib_per_token
        return batch

    def make_room_for_a_step(self, state: _State) -> None:
        """Take the memory for a token of each sequence. When it is short, the youngest goes back and is read anew."""
        per_token, pool = state.spec.kv_mib_per_token, self.pool(state.spec)
        while state.running > 1 and state.running * per_token > self.kv_free_mib[pool]:
            youngest = max(range(state.running), key=lambda i: state.ending[i][1])
            ends, _, request = state.ending.pop(youngest)
            heapq.heapify(state.ending)
            self.kv_free_mib[pool] += self.held(request, ends - state.steps) * per_token
            state.context -= self.held(request, ends - state.steps)
            request.made = request.output_tokens - (ends - state.steps)
            state.waiting.appendleft(request)
        self.kv_free_mib[pool] -= state.running * per_token

    @staticmethod
    def held(request: Request, left: int) -> int:
        return request.prompt_tokens + request.output_tokens - left

    # how fast jobs run beside each other

    def gpu_ms(self) -> dict[int, float]:
        """Return how long the whole GPU work of each job that is past its host time takes beside the others."""
        on_gpu = [(i, job) for i, job in enumerate(self.jobs) if job.host_left_ms <= 0.0]
        there = {gpu: [job for _, job in on_gpu if gpu in job.model.spec.on] for gpu in self.gpus}
        part = {gpu: min(1.0, 100.0 / max(1e-9, sum(job.share for job in jobs))) for gpu, jobs in there.items()}
        alone, reads = {}, {}
        for i, job in on_gpu:
            alone[i] = _alone_ms(job, job.share * min(part[gpu] for gpu in job.model.spec.on))
            reads[i] = min(alone[i], _reading_ms(job))
        stretch = {}
        for gpu in self.gpus:
            here = [i for i, job in on_gpu if gpu in job.model.spec.on]
            stretch[gpu] = _stretch([alone[i] for i in here], [reads[i] for i in here])
        return {i: alone[i] + reads[i] * (max(stretch[gpu] for gpu in job.model.spec.on) - 1.0) for i, job in on_gpu}

    def advance(self) -> None:
        takes = self.gpu_ms()
        next_ms = min(takes[i] * job.left if i in takes else job.host_left_ms for i, job in enumerate(self.jobs))
        if self.arrivals:
            next_ms = min(next_ms, self.arrivals[0].arrival_ms - self.now_ms)
        next_ms = max(next_ms, 0.0)
        self.now_ms += next_ms
        left: list[_Job] = []
        done: list[_Job] = []
        for i, job in enumerate(self.jobs):
            if i in takes:
                job.left -= next_ms / takes[i]
                (done if job.left <= 1e-9 else left).append(job)
            else:
                job.host_left_ms -= next_ms
                if job.host_left_ms <= 1e-9:
                    job.host_left_ms = 0.0
                left.append(job)
        self.jobs = left
        for job in done:
            self.finish(job)

    def finish(self, job: _Job) -> None:
        state = job.model
        if job.requests:
            for request in job.requests:
                self.joined(state, request)
            return
        self.steps += 1
        state.steps += 1
        state.context += job.batch
        state.decoding = False
        while state.ending and state.ending[0][0] <= state.steps:
            _, _, request = heapq.heappop(state.ending)
            self.ended(state, request)

    def joined(self, state: _State, request: Request) -> None:
        """The prefill made a token; the sequence takes part in steps that begin from now on."""
        if request.first_ms is None:
            request.first_ms = self.now_ms
        request.made += 1
        self.kv_free_mib[self.pool(state.spec)] -= state.spec.kv_mib_per_token
        state.context += request.tokens
        left = request.output_tokens - request.made
        if left <= 0:
            self.ended(state, request)
            return
        # A step that is under way was begun without it.
        self.order += 1
        heapq.heappush(state.ending, (state.steps + left + (1 if state.decoding else 0), self.order, request))

    def ended(self, state: _State, request: Request) -> None:
        request.end_ms = self.now_ms
        tokens = request.prompt_tokens + request.output_tokens
        state.context -= tokens
        self.kv_free_mib[self.pool(state.spec)] += tokens * state.spec.kv_mib_per_token


def _alone_ms(job: _Job, share: float) -> float:
    times = job.model.spec.times
    return times.prefill_ms(job.tokens, share) if job.requests else times.decode_ms(job.batch, job.tokens, share)


def _reading_ms(job: _Job) -> float:
    """How long the job would only read: the weights, and for a decoding step its keys and values."""
    times = job.model.spec.times
    return times.prefill_ms(1, 100.0) if job.requests else times.decode_ms(1, job.tokens, 100.0)


def _stretch(times: Sequence[float], reads: Sequence[float]) -> float:
    """Return by which factor reading slows down so that all jobs together read no faster than the memory allows."""
    stretch = 1.0
    for _ in range(20):
        wanted = sum(r / (t + r * (stretch - 1.0)) for t, r in zip(times, reads, strict=True))
        if wanted <= 1.0 + 1e-6:
            break
        stretch *= wanted
    return stretch
