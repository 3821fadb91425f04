"""A module replayed from CUDA graphs: one per fixed batch size, so that a batch costs one launch instead of hundreds.

torch is imported when a module is made, not with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tenuto.errors import EnvironmentFaultError

if TYPE_CHECKING:
    import torch

__all__ = ["GraphedModule", "UncapturableError"]


class UncapturableError(EnvironmentFaultError):
    """A network does something that no CUDA graph can hold."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """What was captured for one batch size: it reads `inputs` and writes `outputs`, always the same memory."""

    graph: Any
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


class GraphedModule:
    """Calls a module through its graphs. Every call is made on one stream, by one thread at a time.

    Invariant: a graph is captured once per size. Inputs are copied into the graph's own memory and outputs out of it
    on the stream, so that the memory of a batch is free once the next one is launched.
    """

    def __init__(
        self, module: Callable[..., Any], name: str, *, sizes: Sequence[int], warmup_runs: int,
        stream: torch.cuda.Stream,
    ) -> None:  # fmt: skip
        """Prepare; the first call of a size warms up and captures.

        Args:
            module: the forward pass on the device.
            name: what to call the model in an error.
            sizes: batch sizes to capture; others run without a graph.
            warmup_runs: before a capture: libraries choose algorithms and get their workspaces then, which a capture
                must not do.
            stream: to capture on.
        """
        import torch

        self._torch = torch
        self._module = module
        self._name = name
        self._sizes = frozenset(sizes)
        self._warmup_runs = warmup_runs
        self._stream = stream
        self._graphs: dict[int, _Graph] = {}
        # One pool for all sizes: they never run at the same time, and results are copied out before another runs.
        self._pool: Any = None

    @property
    def captured(self) -> tuple[int, ...]:
        """Batch sizes that have a graph, ascending."""
        return tuple(sorted(self._graphs))

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run a batch on the current stream; returns tensors of the caller's own.

        Raises:
            UncapturableError: the module does something that cannot be captured.
        """
        size = int(tensors[0].shape[0])
        if size not in self._sizes:
            return self._module(*tensors)
        found = self._graphs.get(size)
        if found is None:
            found = self._graphs[size] = self._capture(tensors)
        for static, tensor in zip(found.inputs, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        found.graph.replay()
        return tuple(tensor.clone() for tensor in found.outputs)

    def _capture(self, tensors: Sequence[torch.Tensor]) -> _Graph:
        torch = self._torch
        inputs = tuple(tensor.clone() for tensor in tensors)
        for _ in range(self._warmup_runs):
            self._module(*inputs)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                answer = self._module(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UncapturableError(
                f"'{self._name}' cannot be captured as a CUDA graph at batch {len(inputs[0])}: {line.rstrip('. ')}. "
                "Its forward pass waits for the GPU or changes with its input; remove `cuda_graphs: true` from its "
                "options."
            ) from error
        return _Graph(graph, inputs, tuple(answer) if isinstance(answer, (tuple, list)) else (answer,))
