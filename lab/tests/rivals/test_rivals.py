"""Every rival against the contract of the scheduler core."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.batching.core.system import System
from tenuto.batching.registry import make_scheduler
from tenuto.errors import InvalidInputError
from tests.batching.core import contract
from tests.batching.core.contract import Chosen, Drawn
from tests.batching.core.test_properties import scenarios

CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("timeout", {}),
    ("timeout", {"batch_size": 3, "wait_ms": 2.0}),
    ("clockwork", {}),
    ("clockwork", {"order": "latest"}),
    ("clockwork", {"sizes": "all"}),
    ("nexus", {}),
    ("nexus", {"plan": "epochs", "epoch_s": 1.0, "early_epoch_s": 1.0, "rate_window_s": 1.0}),
    ("shepherd", {}),
    ("shepherd", {"preempt_ratio": 0.0}),
    ("shepherd", {"preempt_ratio": 1.5}),
]
drawn = st.sampled_from(CHOICES)
# Nexus binds a request to one gpu-let, and timeouts wait by the clock and not by deadlines.
BY_DEADLINE = [chosen for chosen in CHOICES if chosen[0] not in ("nexus", "timeout")]


@given(scenarios(), drawn)
def test_every_request_has_one_outcome_and_no_promise_is_broken(scenario: Drawn, chosen: Chosen) -> None:
    contract.every_request_has_one_outcome_and_no_promise_is_broken(scenario, chosen)


@given(scenarios(faults=False), drawn)
def test_the_same_events_give_the_same_batches(scenario: Drawn, chosen: Chosen) -> None:
    contract.the_same_events_give_the_same_batches(scenario, chosen)


@given(scenarios(faults=False), st.sampled_from(BY_DEADLINE))
def test_a_lone_request_that_can_be_met_is_served(scenario: Drawn, chosen: Chosen) -> None:
    contract.a_lone_request_that_can_be_met_is_served(scenario, chosen)


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_overload_leaves_nothing_late(chosen: Chosen) -> None:
    contract.overload_leaves_nothing_late(chosen)


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_corrected_latencies_and_delays_are_planned_with(chosen: Chosen) -> None:
    contract.corrected_latencies_and_delays_are_planned_with(chosen)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("timeout", {"batch_size": -1}),
        ("timeout", {"drop": "never"}),
        ("clockwork", {"size": 1}),
        ("nexus", {"epoch_s": "nan"}),
        ("shepherd", {"preempt_ratio": -1}),
    ],
)
def test_wrong_options_name_the_cure(one_gpu: System, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        make_scheduler(name, one_gpu, options)
