"""A group of models that run as one merged program on a gpu-let (USHER §3.4), and what its joint batches cost.

Whether models can be merged is found when the gpu-let loads them (`tenuto.profiles.networks.merging`); here is only
the decision that they shall be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from tenuto.documents import StrictModel
from tenuto.profiles import Latency, LatencyTable
from tenuto.profiles.latency import LatencyField

__all__ = ["MergedGroup", "as_groups", "group_name", "worst_split_ms"]


class MergedGroup(StrictModel):
    """Models of one gpu-let, run as one program on the joint batch of all; in a file also written as a plain list.

    `batch_size` is the largest joint batch, the members' rows together; `latency` is l(b) of the merged program by
    joint batch and its worst split over the members. Both are filled in from the members where they are not given:
    `basis` says whether the latency was `measured` or is the `sum` of the members'. `memory_mib` is what the merged
    program needs, equal weights counted once; None: not known, so that the members' sum is counted.
    """

    models: Annotated[tuple[str, ...], Field(min_length=2, max_length=4)]
    batch_size: Annotated[int, Field(ge=1)] | None = None
    latency: LatencyField | None = None
    memory_mib: Annotated[float, Field(ge=0)] | None = None
    basis: Literal["measured", "sum"] | None = None

    @field_validator("models", mode="after")
    @classmethod
    def _sorted(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        """Sort them, so that one group has one name; a name twice is an error."""
        if len(set(models)) < len(models):
            raise ValueError("names a model twice; cure: name every member once")
        return tuple(sorted(models))

    @property
    def name(self) -> str:
        """The name of the group's queue, of its program and of its profile row."""
        return group_name(self.models)

    def completed(self, members: Sequence[tuple[int, Latency | None, float]]) -> MergedGroup:
        """Return the group with batch size and latency, taken from its members where it does not say.

        Args:
            members: planned batch size, latency and slowdown of each; without a latency the group gets none.
        """
        largest = self.batch_size or sum(size for size, _, _ in members)
        if self.latency is not None:
            if isinstance(self.latency, LatencyTable):
                largest = min(largest, self.latency.largest)
            return self.model_copy(update={"batch_size": largest, "basis": self.basis or "measured"})
        known = [(size, latency) for size, latency, _ in members if latency is not None]
        if len(known) < len(members):
            return self.model_copy(update={"batch_size": largest})
        table = LatencyTable(points=_corners(worst_split_ms(known, largest)))
        return self.model_copy(update={"batch_size": largest, "latency": table, "basis": "sum"})

    def within(self, budget_ms: float) -> MergedGroup:
        """Return the group with no larger joint batches than a budget allows, at least one request."""
        if self.latency is None or self.batch_size is None:
            return self
        fitting = max(1, min(self.batch_size, self.latency.largest_batch(budget_ms)))
        latency: Latency = self.latency
        if isinstance(latency, LatencyTable):
            points = {size: ms for size, ms in latency.points.items() if size < fitting}
            latency = LatencyTable(points=points | {fitting: round(latency.at(fitting), 9)})
        return self.model_copy(update={"batch_size": fitting, "latency": latency})


def group_name(models: Sequence[str]) -> str:
    """Return `a+b`; no model is called so, as `+` is not allowed in their names."""
    return "+".join(sorted(models))


def worst_split_ms(members: Sequence[tuple[int, Latency]], largest: int) -> list[float]:
    """Return, by joint batch size from 0 to `largest`, the most that members take one after the other for any split.

    More rows of a member than it was planned for count as several batches: an upper bound wherever a batch costs less
    than its parts.

    Args:
        members: planned batch size and l(b) of each.
        largest: joint batch.
    """
    worst = np.zeros(largest + 1)
    for planned, latency in members:
        alone = [0.0]
        for rows in range(1, largest + 1):
            whole, rest = divmod(rows, planned)
            alone.append(whole * latency.at(planned) + (latency.at(rest) if rest else 0.0))
        own = np.array(alone)
        worst = np.array([(worst[rows::-1] + own[: rows + 1]).max() for rows in range(largest + 1)])
    return [float(ms) for ms in np.maximum.accumulate(worst)]


def _corners(steps: Sequence[float]) -> dict[int, float]:
    """Return the points of a table of which the others are the lines between."""
    last = len(steps) - 1
    return {
        size: round(steps[size], 9)
        for size in range(1, last + 1)
        if size in (1, last) or abs(steps[size + 1] - 2 * steps[size] + steps[size - 1]) > 1e-9
    }


def as_groups(value: Any) -> Any:
    """Return groups given as plain lists of names as what `MergedGroup` validates."""
    if not isinstance(value, list | tuple):
        return value
    return [{"models": group} if isinstance(group, list | tuple) else group for group in value]
