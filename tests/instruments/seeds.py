"""The seeds of tests that draw: few for every day, more for the night."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["seeds"]


def seeds(day: int, night: int) -> list[Any]:
    """Return the seeds from 0 to before `night` as parameters; those from `day` on are run at night alone."""
    return [*range(day), *(pytest.param(seed, marks=pytest.mark.night) for seed in range(day, night))]
