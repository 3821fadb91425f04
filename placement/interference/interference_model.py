"""The one interface of all interference models, and the model that expects no interference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tenuto.profiles import ModelProfile


@dataclass(frozen=True)
class Resident:
    """A model running batches of one size on one share of a GPU."""

    profile: ModelProfile
    batch_size: int
    share_pct: float


class InterferenceModel(Protocol):
    """Predicts the cost of sharing a GPU from the residents alone."""

    def slowdown(self, gpulet: Resident, neighbours: Sequence[Resident]) -> float:
        """Return latency beside the neighbours over latency alone; at least 1.0, and 1.0 without neighbours.

        Raises:
            InvalidInputError: the profile of a resident lacks what the model needs.
        """
        ...


class NoInterference:
    """Neighbours cost nothing."""

    def slowdown(self, gpulet: Resident, neighbours: Sequence[Resident]) -> float:  # noqa: ARG002
        """Return 1.0."""
        return 1.0
