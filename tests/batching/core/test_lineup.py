"""The line-up by itself: against every choice there is, and what it says of slack against looking again later."""

from __future__ import annotations

from itertools import combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from tenuto.batching.core.deferred.lineup import line_up
from tenuto.batching.core.deferred.waiting import WaitingPool, WaitingQueue
from tenuto.batching.core.system import Model

NOW = 100.0
EXACT = 1e-6  # ms: beside times in whole ms


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, int, int, int]]:
    """Of each batch: length, the time for which it can wait and for which it is held, level and density."""
    numbers = st.tuples(
        st.integers(1, 20), st.integers(0, 60), st.integers(0, 60), st.integers(0, 1), st.integers(1, 50)
    )
    return [(run, wait, min(wait, held), *rest) for run, wait, held, *rest in draw(st.lists(numbers, max_size=7))]


ENDS = st.lists(st.integers(1, 30), min_size=1, max_size=3)  # of what runs; one more gpu-let is idle where told


def waiting_for(ends: list[int], drawn: list[tuple[int, int, int, int, int]], *, idle: int = 0) -> list[WaitingQueue]:
    """Return batches that wait for gpu-lets of one pool; those that run end so many ms after `NOW`."""
    run = {program: [0.0, float(batch[0])] for program, batch in enumerate(drawn)}
    count = len(ends) + idle
    busy = sorted((NOW + end, gpulet) for gpulet, end in enumerate(ends))
    pool = WaitingPool(0, {}, count, list(range(count)), run, list(range(len(ends), count)), busy)
    queues = []
    for program, (_, wait_ms, held_ms, level, density) in enumerate(drawn):
        queue = WaitingQueue(program, [pool], Model(f"m{program}", 100.0, None), 1.0)
        queue.costs.run = run[program]
        batch = queue.batch
        batch.pool, batch.size, batch.effective_priority, batch.density = pool, 1, level, float(density)
        batch.latest, batch.due = NOW + wait_ms, NOW + held_ms
        queues.append(queue)
    return queues


def in_time(free: list[float], chosen: list[WaitingQueue]) -> bool:
    """Whether all of them start in time, one after the other by their latest start, each where it ends first."""
    free = sorted(free)
    for queue in sorted(chosen, key=lambda each: each.batch.latest):
        if free[0] > queue.batch.latest + EXACT:
            return False
        free = sorted([*free[1:], free[0] + queue.costs.run[1]])
    return True


@given(ENDS, batches(), st.integers(0, 2))
def test_nothing_is_pushed_out_where_all_can_start_in_time_and_only_there(
    ends: list[int], drawn: list[tuple[int, int, int, int, int]], idle: int
) -> None:
    assume(drawn)
    queues = waiting_for(ends, drawn, idle=idle)
    line_up(queues, NOW)
    free = [NOW + end for end in ends] + [NOW] * idle
    assert any(queue.batch.is_out for queue in queues) != in_time(free, queues)
    for queue in queues:
        batch = queue.batch
        assert batch.is_out == (batch.placed is None)
        if not batch.is_out:
            assert NOW <= batch.end - batch.run_ms <= batch.latest + EXACT


@given(st.integers(1, 30), batches(), st.integers(1, 20))
def test_of_batches_of_one_length_on_one_gpulet_no_choice_is_worth_more(
    end: int, drawn: list[tuple[int, int, int, int, int]], length: int
) -> None:
    """A level is worth more than all densities below it."""
    assume(drawn)
    queues = waiting_for([end], [(length, *rest) for _, *rest in drawn])

    def worth(chosen: list[WaitingQueue]) -> float:
        return sum(1e6 * (1 + each.batch.effective_priority) + each.batch.density for each in chosen)

    line_up(queues, NOW)
    kept = [queue for queue in queues if not queue.batch.is_out]
    assert in_time([NOW + end], kept)
    best = max(
        worth(list(chosen))
        for size in range(len(queues) + 1)
        for chosen in combinations(queues, size)
        if in_time([NOW + end], list(chosen))
    )
    assert worth(kept) == best


@given(ENDS, batches(), st.integers(0, 2), st.floats(0.01, 0.99))
def test_until_the_slack_is_used_up_none_is_short_and_none_starts_too_late(
    ends: list[int], drawn: list[tuple[int, int, int, int, int]], idle: int, part: float
) -> None:
    """That is why nobody looks again before: as far as the next end of what runs, at which one looks anyway."""
    assume(drawn)
    is_tight, passing_ms = line_up(waiting_for(ends, drawn, idle=idle), NOW)
    later = NOW + part * min(passing_ms, min(ends))
    held = waiting_for(ends, drawn, idle=idle)
    assert is_tight or not line_up(held, later)[0]
