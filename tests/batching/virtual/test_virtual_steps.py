"""Steps that are counted and jumped over are those of a simulation that walks through every sequence and block."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.core.deferred_steps import DeferredSteps
from tenuto.batching.core.step_scheduler import StepLimits, StepScheduler
from tenuto.batching.virtual.virtual_steps import VirtualSteps, run_log
from tenuto.profiles import StepCost
from tenuto.profiles.generation import pairs_of

COST = StepCost(
    prefill_ms=((0, 3.0), (16, 3.5), (64, 9.0)),
    decode_ms=((1, 2.0), (3, 2.25)),
    context_token_ms=2**-7,
    attention_pair_ms=2**-10,
)


class Walked:
    """A sequence of the plain simulation."""

    def __init__(self, name: int, prompt: int, output: int) -> None:
        self.name, self.prompt, self.output = name, prompt, output
        self.stored = self.written = self.blocks = 0  # tokens in memory, tokens written
        self.decodes = False

    @property
    def to_read(self) -> int:
        return self.prompt + self.written


class Plain:
    """vLLM's order, one sequence and one block at a time."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits, self.free = limits, limits.kv_tokens // limits.block_tokens
        self.waiting: list[Walked] = []
        self.running: list[Walked] = []
        self.ending: list[Walked] = []

    def grow(self, one: Walked, tokens: int) -> bool:
        need = math.ceil((one.stored + tokens) / self.limits.block_tokens) - one.blocks
        if need > self.free:
            return False
        self.free -= need
        one.blocks += need
        return True

    def preempt(self) -> Walked:
        one = self.running.pop()
        self.free += one.blocks
        one.stored = one.blocks = 0
        one.decodes = False
        self.waiting.insert(0, one)
        return one

    def decide(self) -> tuple[float, list[tuple[int, float]], list[Walked]] | None:
        """Return the step's cost, the numbers of the sequences that make a token in it, and those that end."""
        budget, lost = self.limits.max_batch_tokens, False
        prompt_tokens = pairs = sequences = context = 0
        makes: list[Walked] = []
        chunks: list[tuple[Walked, int]] = []
        kept = [one for one in self.running if one.decodes]
        # Memory of those that decode is settled first, so that none of them does and then loses what it has.
        while sum(math.ceil((o.stored + 1) / self.limits.block_tokens) - o.blocks for o in kept) > self.free:
            gone, lost = self.preempt(), True
            kept = [one for one in kept if one is not gone]
        for one in kept:
            assert self.grow(one, 1)
            one.stored += 1
            sequences, context, budget = sequences + 1, context + one.stored, budget - 1
            makes.append(one)
        for one in [one for one in self.running if one not in kept]:
            tokens = min(budget, one.to_read - one.stored)
            if not self.grow(one, tokens):
                assert self.preempt() is one
                lost = True
            elif tokens:
                chunks.append((one, tokens))
                budget -= tokens
        while self.waiting and not lost and budget and len(self.running) + len(self.ending) < self.limits.max_sequences:
            one = self.waiting[0]
            if any(not o.decodes and o not in [c for c, _ in chunks] for o in self.running):
                break
            if math.ceil(one.to_read / self.limits.block_tokens) > self.free:
                break
            tokens = min(budget, one.to_read)
            assert self.grow(self.waiting.pop(0), tokens)
            self.running.append(one)
            chunks.append((one, tokens))
            budget -= tokens
            if tokens < one.to_read:
                break
        for one, tokens in chunks:
            prompt_tokens, pairs = prompt_tokens + tokens, pairs + pairs_of(tokens, one.stored)
            one.stored += tokens
            if one.stored == one.to_read:
                one.decodes = True
                makes.append(one)
        if not sequences and not chunks:
            return None
        for one in makes:
            one.written += 1
        ends = [one for one in makes if one.written == one.output]
        self.running = [one for one in self.running if one not in ends]
        self.ending += ends
        return COST.ms(prompt_tokens, sequences, context, pairs), [(o.name, o.written) for o in makes], ends


def plainly(limits: StepLimits, arrivals: list[tuple[float, int, int]], ahead: bool) -> tuple[list[float], list[float]]:
    engine, now, place = Plain(limits), 0.0, 0
    first, last = [math.nan] * len(arrivals), [math.nan] * len(arrivals)
    current = following = None

    def arrive(until: float) -> None:
        nonlocal place
        while place < len(arrivals) and arrivals[place][0] <= until:
            engine.waiting.append(Walked(place, *arrivals[place][1:]))
            place += 1

    while True:
        if current is None:
            current = engine.decide()
            if current is None:
                if place == len(arrivals):
                    return first, last
                now = arrivals[place][0]
                engine.waiting.append(Walked(place, *arrivals[place][1:]))
                place += 1
                continue
        if ahead:
            following = engine.decide()
        cost, makes, ends = current
        end = now + cost
        while place < len(arrivals) and arrivals[place][0] < end:
            arrive(arrivals[place][0])
        now = end
        for name, written in makes:
            if written == 1:
                first[name] = now
        for one in ends:
            last[one.name] = now
            engine.ending.remove(one)
            engine.free += one.blocks
        current, following = following, None


LOADS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 70), st.integers(1, 90)), min_size=1, max_size=14)


@given(
    load=LOADS,
    kv=st.integers(10, 40),
    sequences=st.integers(1, 6),
    tokens=st.integers(6, 64),
    size=st.sampled_from((1, 4, 16)),
    ahead=st.booleans(),
    is_ours=st.booleans(),
)
def test_what_is_counted_is_what_is_walked_through(
    load: list[tuple[int, int, int]], kv: int, sequences: int, tokens: int, size: int, ahead: bool, is_ours: bool
) -> None:
    # Gaps of no round number: no arrival is at the end of a step but for the first, which begins one.
    at = np.cumsum([gap * 1.61803 for gap, _, _ in load]).tolist()
    limits = StepLimits(sequences, tokens, kv * 16, size)
    arrivals = [(time, prompt, output) for time, (_, prompt, output) in zip(at, load, strict=True)]
    order = DeferredSteps(COST, tokens) if is_ours else None  # without an SLO it is vLLM's
    replica = VirtualSteps(limits, COST, decided_ahead=ahead, order=order)
    first, last = run_log(at, [p for _, p, _ in arrivals], [o for _, _, o in arrivals], replica)
    expected_first, expected_last = plainly(limits, arrivals, ahead)
    np.testing.assert_allclose(first, expected_first, rtol=1e-9)
    np.testing.assert_allclose(last, expected_last, rtol=1e-9)
    assert replica.scheduler.free_blocks == replica.scheduler.blocks
    assert replica.scheduler.running == replica.scheduler.waiting == 0


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 60)),
        st.tuples(st.just("step"), st.booleans(), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("repeat"), st.integers(0, 30), st.just(0)),
    ),
    max_size=120,
)


@given(events=EVENTS, size=st.sampled_from((1, 4, 16)))
def test_memory_is_never_exceeded_and_all_of_it_comes_back(events: list[tuple[str, int, int]], size: int) -> None:
    steps = StepScheduler(StepLimits(4, 24, 160, size))
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    names = 0

    def run_one(stop_one: bool) -> None:
        step = steps.decide()
        assert 0 <= steps.free_blocks <= steps.blocks
        if step is None:
            assert not steps.running
            assert not steps.waiting
            return
        assert step.prompt_tokens + step.sequences <= 24
        decoding = steps.decoding(step)
        assert len(decoding) == len(set(decoding)) == step.sequences
        for name, tokens, before in step.chunks:
            assert reads.get(name, 0) * (name not in step.preempted) == before or before == 0
            reads[name] = before + tokens
        for name in (*decoding, *step.first):
            writes[name] = writes.get(name, 0) + 1
        steps.done(step, tuple(decoding[:1]) if stop_one else ())

    for kind, number, output in events:
        if kind == "add":
            if steps.add(names, number, output) is None:
                names += 1
        elif kind == "cancel":
            steps.cancel(number)
        elif kind == "repeat":
            steps.repeat(min(number, steps.quiet_steps()))
            assert 0 <= steps.free_blocks <= steps.blocks
        else:
            run_one(bool(number))
    for _ in range(3000):
        if not steps.running and not steps.waiting:
            break
        run_one(False)
    assert not steps.running
    assert not steps.waiting
    assert steps.free_blocks == steps.blocks


@pytest.mark.parametrize(
    ("prompt", "output", "said"),
    [(0, 1, "at least one"), (1, 0, "at least one"), (60, 50, "longest context"), (90, 10, "memory holds")],
)
def test_what_can_never_run_is_refused_at_once(prompt: int, output: int, said: str) -> None:
    steps = StepScheduler(StepLimits(4, 24, 80, 16, longest_context=100))
    assert said in str(steps.add(0, prompt, output))
    assert steps.decide() is None
    assert not steps.cancel(0)


def test_a_sequence_that_leaves_frees_its_memory_at_once() -> None:
    steps = StepScheduler(StepLimits(4, 64, 160, 16))
    assert steps.add(0, 40, 50) is None
    step = steps.decide()
    assert step is not None
    assert steps.kv_tokens == 48
    assert steps.cancel(0)
    assert steps.kv_tokens == 0
    steps.done(step)
    assert steps.decide() is None


def test_other_numbers_of_tokens_come_out_as_they_went_in() -> None:
    generator = np.random.default_rng(5)
    count = 400
    at = np.cumsum(generator.exponential(20.0, count)).tolist()
    prompts, outputs = (generator.integers(1, most, count).tolist() for most in (900, 400))
    replica = VirtualSteps(StepLimits(64, 512, 20_000), COST, decided_ahead=True)
    first, last = run_log(at, prompts, outputs, replica)
    assert (first > at).all()
    assert ((last > first) == (np.array(outputs) > 1)).all()
    assert replica.preempted > 0
