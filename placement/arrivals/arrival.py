"""How requests arrive, as workloads state it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from tenuto.documents import StrictModel


class Arrival(StrictModel):
    """How requests of a model arrive. Which other keys a process takes is checked where schedules are made."""

    process: str = "poisson"
    # limit: steadier gaps are equal, and of more varied ones a day may have none
    shape: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None  # gamma: k; the coefficient of variation is k**-0.5
    cv: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None  # gamma: alternative to shape
    path: str | None = None  # trace: CSV with time_ms and optionally model
    options: dict[str, Any] = Field(default_factory=dict)
