"""What the scheduler tests share: small set-ups ."""

from __future__ import annotations

import pytest

from tenuto.batching.core.system import NetworkDelay, System
from tests.instruments.systems import everywhere_linear


@pytest.fixture
def trace_system() -> System:
    """Return the setting of Symphony §3.3: l(b) = b + 5, SLO 12, three GPUs."""
    return everywhere_linear([("r", 1.0, 5.0, 12.0, None)], 3)


@pytest.fixture
def one_gpu() -> System:
    return everywhere_linear([("a", 1.0, 5.0, 20.0, None)], 1)


@pytest.fixture
def two_models() -> System:
    return everywhere_linear([("a", 1.0, 5.0, 20.0, None), ("b", 2.0, 10.0, 60.0, None)], 2)


@pytest.fixture
def slow_network() -> NetworkDelay:
    return NetworkDelay(ctrl_ms=0.5, data_ms_per_request=0.1, response_ms=1.0)
