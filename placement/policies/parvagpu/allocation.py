"""ParvaGPU's segment allocator: on which GPU, from which memory slice on, a segment lies, and dissolving GPUs that
are hardly used.

Lee et al., "ParvaGPU" (SC 2024), section III-E and its published code. Its code fits segments by the number of free
GPCs alone; here they also need a place that MIG has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tenuto.placement.policies.parvagpu.segments import Segment, Service
from tenuto.profiles.mig_instances import ALL_GPCS, InstanceProfile

# Paper: the starts that its code tries for each size, in this order.
STARTS: Mapping[int, Sequence[int]] = {7: (0,), 4: (0,), 3: (4, 0), 2: (0, 4, 2), 1: (0, 6, 4, 1, 2, 3, 5)}
THIN = 4  # paper: section III-E2; GPUs with at most so many GPCs in use are dissolved


@dataclass
class CutGpu:
    """A GPU with the segments on it, by the memory slice where their instances begin."""

    sizes: Mapping[int, InstanceProfile]
    placed: dict[int, Segment] = field(default_factory=dict)

    @property
    def used(self) -> int:
        """GPCs in use."""
        return sum(segment.gpcs for segment in self.placed.values())

    def start_of(self, gpcs: int) -> int | None:
        """Return where an instance of so many GPCs may begin, the first of `STARTS`; None where it has no room."""
        if self.used + gpcs > ALL_GPCS:
            return None
        if gpcs == 3 and any(segment.gpcs == 3 for segment in self.placed.values()):
            return None  # as published: two of 3 GPCs leave the seventh to nobody
        size = self.sizes[gpcs]
        for start in STARTS[gpcs]:
            if start in size.starts and all(self._is_apart(start, size.slices, other) for other in self.placed):
                return start
        return None

    def _is_apart(self, start: int, slices: int, other: int) -> bool:
        return start + slices <= other or other + self.sizes[self.placed[other].gpcs].slices <= start


class Allocator:
    """Lays segments on GPUs, the largest first, each on the GPU that then has the fewest GPCs left."""

    def __init__(self, sizes: Mapping[int, InstanceProfile], most_gpus: float) -> None:
        """`sizes`: by GPCs; `most_gpus`: that there are."""
        self.gpus: list[CutGpu] = []
        self._left_out: list[Segment] = []
        self._sizes, self._most = sizes, most_gpus

    def place(self, segments: Sequence[Segment]) -> None:
        """Lay segments; those for which there is no GPU are left out."""
        for segment in sorted(segments, key=lambda each: -each.gpcs):
            able = [gpu for gpu in self.gpus if gpu.start_of(segment.gpcs) is not None]
            if not able and len(self.gpus) < self._most:
                self.gpus.append(CutGpu(self._sizes))
                able = [self.gpus[-1]]
            best = max(able, key=lambda gpu: gpu.used, default=None)
            start = None if best is None else best.start_of(segment.gpcs)
            if best is None or start is None:
                self._left_out.append(segment)
            else:
                best.placed[start] = segment

    def dissolve(self, services: Mapping[str, Service]) -> None:
        """Make segments of 1 and 2 GPCs of those on thin GPUs, the last GPU first, and lay them anew.

        Args:
            services: of all models, by name.
        """
        over_rps: dict[str, float] = defaultdict(float)
        for gpu in reversed(self.gpus):
            if not 0 < gpu.used <= THIN:
                continue
            for start in range(ALL_GPCS):
                segment = gpu.placed.pop(start, None)
                if segment is not None:
                    over_rps[segment.model] += segment.throughput_rps
                    small = services[segment.model].small_segments(over_rps[segment.model]) or [segment]
                    over_rps[segment.model] -= sum(each.throughput_rps for each in small)
                    self.place(small)
        self.gpus = [gpu for gpu in self.gpus if gpu.placed]
        again, self._left_out = self._left_out, []
        self.place(again)
