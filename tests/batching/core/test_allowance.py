"""Who keeps to the plan: bursts that are usual are lent, and one that never was is known within a second."""

import numpy as np

from tenuto.batching.core.deferred.allowance import Allowance

RPS = 40.0


def sent(allowance: Allowance, times_ms: np.ndarray) -> list[float]:
    """Return when the program was found to exceed its plan."""
    found = []
    for at in times_ms:
        allowance.take_token(float(at))
        if allowance.exceeds:
            found.append(float(at))
    return found


def test_a_steady_program_that_triples_is_known_within_a_second_and_one_that_fluctuates_keeps_its_bursts() -> None:
    steady = Allowance(RPS)
    rng = np.random.default_rng(4)
    planned = np.cumsum(rng.exponential(1000.0 / RPS, 1200))
    assert not sent(steady, planned)
    begins = planned[-1]
    assert sent(steady, begins + np.cumsum(rng.exponential(1000.0 / RPS / 3.0, 200)))[0] < begins + 1000.0

    # Twice the rate for a second, then nothing for one.
    on_off = Allowance(RPS)
    second = np.arange(0.0, 1000.0, 500.0 / RPS)
    assert not sent(on_off, np.concatenate([2000.0 * number + second for number in range(60)]))
    assert on_off.usual > 0.8 * RPS
