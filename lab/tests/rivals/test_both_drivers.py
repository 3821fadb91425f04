"""Rivals live: the driver of the dispatcher, on a clock of virtual time, runs the batches that the simulator runs."""

import pytest

from tests.deployments.dispatch.test_scenario import VIRTUAL_BOUND_MS, drawn, furthest_ms
from tests.instruments.replay import run_virtual_clock
from tests.instruments.scenario import run_virtual


@pytest.mark.parametrize("scheduler", ["timeout", "clockwork"])
@pytest.mark.parametrize("seed", range(4))
def test_drawn_scenarios_run_the_same_batches_on_both_drivers(seed: int, scheduler: str) -> None:
    scenario = drawn(seed, scheduler)
    assert furthest_ms(run_virtual(scenario), run_virtual_clock(scenario)[0]) <= VIRTUAL_BOUND_MS
