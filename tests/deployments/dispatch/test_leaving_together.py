"""Askers of several generations: one that is refused takes the others away at once, while the dispatcher goes through
them. Each generation ends once, and nothing raises."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.deployments.dispatch.generations import Generations
from tenuto.deployments.dispatch.in_flight import OpenGeneration
from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.messages import EndedSequence, Generated
from tenuto.outcome import Outcome
from tenuto.profiles.networks.generating import Sampling

COUNT = 4


class Asker:
    """Leaves every other generation as soon as one is refused, brings a token or ends."""

    def __init__(self, generations: Generations) -> None:
        self.generations = generations
        self.open: list[OpenGeneration] = []
        self.ends: Counter[int] = Counter()

    def refused(self, generation: OpenGeneration, refused: Refused) -> None:
        del refused
        self._end(generation)

    def tokens(self, generation: OpenGeneration, *args: object) -> None:
        del args
        self._leave_others(generation)

    def _end(self, generation: OpenGeneration) -> None:
        self.ends[id(generation)] += 1
        self._leave_others(generation)

    def _leave_others(self, generation: OpenGeneration) -> None:
        for other in self.open:
            if other is not generation:
                self.generations.leave(other)


class Accounts:
    """Counts how often each generation ended."""

    def __init__(self) -> None:
        self.cancelled = self.refused = 0

    def of(self, generation: OpenGeneration) -> Accounts:
        del generation
        return self

    def generation_submitted(self, *args: object) -> None: ...
    def generated(self, *args: object) -> None: ...

    def generation_refused(self, *args: object) -> None:
        del args
        self.refused += 1


@pytest.mark.parametrize("event", ["lost", "leaves", "close", "came"])
@pytest.mark.parametrize("is_left_alone", [True, False])
def test_each_generation_ends_once_when_an_asker_leaves_all_at_the_first(event: str, is_left_alone: bool) -> None:
    connection = SimpleNamespace(send=lambda *_: None)
    gpulets = [
        SimpleNamespace(
            id=name, generating=set(), offline=Counter(), connection=connection, planned_rps=lambda _: 1.0, held=None
        )
        for name in "ab"
    ]
    able: list[Any] = gpulets[:1]
    fleet: Any = SimpleNamespace(ready_for=lambda _: able)
    accounts = Accounts()
    time: Any = SimpleNamespace(clock_ms=0.0)
    leadership: Any = SimpleNamespace(once_obeyed=lambda send: send())
    generations = Generations(fleet, accounts, leadership, time)  # type: ignore[arg-type]
    asker: Any = Asker(generations)
    for _ in range(COUNT):
        asker.open.append(OpenGeneration(-1, "m", 0.0, 1e9, 1e9, [1], Sampling(4), asker))
        generations.begin(asker.open[-1], 10)
    first: Any = gpulets[0]
    # Nobody goes on when no gpu-let is left; where another one takes them, they are too late for it.
    able[:] = [] if is_left_alone else gpulets[1:]
    time.clock_ms = 2e9
    if event == "came":
        died = Refused(Outcome.FAILED, "x", 1.0)
        ended = [EndedSequence.failed(each.number, died, may_retry=True) for each in asker.open]
        generations.came(first, Generated([], ended))
    elif event == "close":
        generations.close()
    else:
        getattr(generations, event)(*((first, "x") if event == "lost" else (first,)))
    if event == "leaves" and is_left_alone:  # they go on where they are
        assert len(first.generating) == COUNT
        generations.close()
    assert not generations.is_open
    assert not first.generating
    assert sum(asker.ends.values()) == accounts.refused == 1
    assert accounts.cancelled == COUNT - 1
