"""A module replayed from CUDA graphs: one per fixed batch size, so that a batch costs one launch instead of hundreds.

torch is imported when a module is made, not with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tenuto.errors import EnvironmentFaultError, first_line
from tenuto.profiles.networks.intake import Intake

if TYPE_CHECKING:
    import torch


class UncapturableError(EnvironmentFaultError):
    """A network does something that cannot be captured in a CUDA graph."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """The graph of one batch size. It reads the first rows of the inputs, which all sizes share, and writes
    `outputs`."""

    graph: Any
    outputs: tuple[torch.Tensor, ...]


class GraphedModule:
    """Calls a module through its graphs. Every call is made on one stream, by one thread at a time.

    Invariant: a graph is captured once per size. Inputs are written into the graphs' memory and outputs copied out of
    it on the stream, so that the memory of a batch is free once the next one is launched.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        name: str,
        intake: Intake,
        *,
        sizes: Sequence[int],
        warmup_runs: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """Prepare; the first call of a size warms up and captures.

        Args:
            module: the forward pass on the device.
            name: the model's name for errors.
            intake: writes batches into the graphs' memory, in the type and layout that the module takes.
            sizes: batch sizes to capture; other sizes run without a graph.
            warmup_runs: runs before a capture. In these, libraries choose algorithms and get their workspaces, which
                must not happen during a capture.
            stream: the stream to capture on.
        """
        import torch

        self._torch = torch
        self._module = module
        self._name = name
        self._intake = intake
        self._sizes = frozenset(sizes)
        self._inputs: tuple[torch.Tensor, ...] = ()  # for the largest size; other sizes use the first rows
        self._warmup_runs = warmup_runs
        self._stream = stream
        self._graphs: dict[int, _Graph] = {}
        # All sizes share one pool, as two never run at the same time, and results are copied out before the next run.
        self._pool: Any = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run a batch on the current stream; returns tensors of the caller's own.

        Raises:
            UncapturableError: the module does something that cannot be captured.
        """
        size = int(tensors[0].shape[0])
        if size not in self._sizes:
            return self._module(*self._intake(tensors))
        if not self._inputs:
            self._inputs = tuple(self._intake.room(tensor, max(self._sizes)) for tensor in tensors)
        inputs = tuple(room[:size] for room in self._inputs)
        for room, tensor in zip(inputs, tensors, strict=True):
            self._intake.write(room, tensor)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._capture(inputs)
        graph.graph.replay()
        return tuple(tensor.clone() for tensor in graph.outputs)

    def _capture(self, inputs: tuple[torch.Tensor, ...]) -> _Graph:
        torch = self._torch
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
            raise UncapturableError(
                f"'{self._name}' cannot be captured as a CUDA graph at batch {len(inputs[0])}: {first_line(error)}. "
                "Its forward pass waits for the GPU or changes with its input; remove `cuda_graphs: true` from its "
                "options."
            ) from error
        return _Graph(graph, tuple(answer) if isinstance(answer, (tuple, list)) else (answer,))
