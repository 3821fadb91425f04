"""What merging may be told, with USHER's published values as defaults. No torch."""

from __future__ import annotations

from pydantic import Field

from tenuto.documents import StrictModel


class MergeOptions(StrictModel):
    """Thresholds of merging; the defaults are those of USHER (OSDI 2024, §3.4 and §4).

    `omega`: least part of an operator's weights that two operators must have in common. `distance`: DBSCAN's radius in
    graph edits; the published value joins models of equal graphs only. `equal_abs_diff`: weights that differ by no
    more count as equal. `tolerance`: largest error of an output, relative to its largest magnitude; models whose
    merged outputs err by more stay as they are.
    """

    omega: float = Field(default=0.4, gt=0, le=1)
    distance: float = Field(default=1e-7, gt=0)
    equal_abs_diff: float = Field(default=1e-7, ge=0)
    tolerance: float = Field(default=1e-5, gt=0)
