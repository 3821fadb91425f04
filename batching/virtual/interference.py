"""How gpu-lets of one GPU slow each other while they run at the same time, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.batching.core.system import ScheduledGpulet


class Interference:
    """Progress of the batches that run on GPUs with several gpu-lets.

    A host's `slowdown` is its factor while all its neighbours run. While k of n neighbours run, the factor is taken as
    1 + (slowdown - 1) k/n; it changes as neighbours start and stop. `shared` holds the gpu-lets that have neighbours.
    """

    def __init__(self) -> None:
        self.shared: set[int] = set()
        self._gpulets: list[ScheduledGpulet] = []
        self._others: dict[int, list[int]] = {}
        self._left_ms: dict[int, float] = {}  # work left of the running batch, in ms without neighbours
        self._slowdown: dict[int, float] = {}
        self._at: dict[int, float] = {}  # when `_left_ms` was brought up to date

    def add(self, gpulets: Sequence[ScheduledGpulet]) -> None:
        """Append the gpu-lets of a system. They slow each other, but not the gpu-lets of earlier systems."""
        by_gpu: dict[str, list[int]] = {}
        for place, gpulet in enumerate(gpulets, len(self._gpulets)):
            for gpu in gpulet.gpus:
                by_gpu.setdefault(gpu, []).append(place)
        self._gpulets += gpulets
        for members in by_gpu.values():
            if len(members) > 1 and any(
                host.slowdown > 1 for member in members for host in self._gpulets[member].hosts.values()
            ):
                for member in members:
                    self._others[member] = [other for other in members if other != member]
        self.shared.update(self._others)

    def begin(self, now_ms: float, gpulet: int, program: int, work_ms: float) -> list[tuple[int, float]]:
        """Start a batch; returns (gpu-let, new finish) of this batch and of every batch whose finish it moves."""
        self._settle(now_ms, gpulet)
        self._left_ms[gpulet] = work_ms
        self._slowdown[gpulet] = self._gpulets[gpulet].hosts[program].slowdown
        self._at[gpulet] = now_ms
        return self._finishes(now_ms, gpulet)

    def end(self, now_ms: float, gpulet: int) -> list[tuple[int, float]]:
        """End or abort a batch; returns (gpu-let, new finish) of the batches of its neighbours."""
        self._settle(now_ms, gpulet)
        for state in (self._left_ms, self._slowdown, self._at):
            state.pop(gpulet, None)
        return self._finishes(now_ms, gpulet)

    def _factor(self, gpulet: int) -> float:
        others = self._others[gpulet]
        busy = sum(1 for other in others if other in self._left_ms)
        return 1.0 + (self._slowdown[gpulet] - 1.0) * busy / len(others)

    def _settle(self, now_ms: float, gpulet: int) -> None:
        for member in (gpulet, *self._others[gpulet]):
            if member in self._left_ms and now_ms > self._at[member]:
                self._left_ms[member] -= (now_ms - self._at[member]) / self._factor(member)
                self._at[member] = now_ms

    def _finishes(self, now_ms: float, gpulet: int) -> list[tuple[int, float]]:
        return [
            (member, max(now_ms, self._at[member]) + max(0.0, self._left_ms[member]) * self._factor(member))
            for member in (gpulet, *self._others[gpulet])
            if member in self._left_ms
        ]
