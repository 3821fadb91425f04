"""What a program computes: one model as its options say, or several merged into one. torch is imported on use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tenuto.errors import InvalidInputError, Problem
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature
from tenuto.profiles.networks.compiled import CompiledModule
from tenuto.profiles.networks.graphs import GraphedModule
from tenuto.profiles.networks.model_options import RunOptions, fixed_sizes

if TYPE_CHECKING:
    import torch

__all__ = ["LoneModel", "Network", "Tensors"]

Tensors = Mapping[str, "Sequence[torch.Tensor]"]
"""By model, its tensors in the signature's order."""


class Network(Protocol):
    """The computation of a program on its device. One thread at a time calls it, on CUDA on one stream."""

    @property
    def signatures(self) -> Mapping[str, ModelSignature]:
        """What goes in and out of each of its models, in order."""

    def __call__(self, batches: Tensors) -> dict[str, tuple[torch.Tensor, ...]]:
        """Compute the outputs of every model that has a batch, each of its own number of rows; on CUDA only queues."""

    def padded(self, rows: int) -> int:
        """Return how many rows a model's batch is filled up to."""

    def warm_up_rows(self) -> Sequence[Mapping[str, int]]:
        """Return the batches to run before requests come, as rows by model, in order."""

    @property
    def largest_batch(self) -> int:
        """The most rows that a batch of any of its models is planned with, 1 where nothing is planned."""

    @property
    def weights_mib(self) -> float:
        """Parameters and buffers on the device, in MiB."""

    def facts(self) -> dict[str, float | int]:
        """Return what merging did, empty for a lone model."""


class LoneModel:
    """A program of one model."""

    def __init__(
        self, name: str, loaded: LoadedModel, device: torch.device, options: RunOptions, *,
        batch_sizes: Sequence[int] = (), stream: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        """Move the module to the device.

        Args:
            name: of the model.
            loaded: as `build` returns it.
            device: where it runs.
            options: see `RunOptions`.
            batch_sizes: the planned ones.
            stream: that it will be called on, where the device is CUDA.

        Raises:
            InvalidInputError: an option needs another device.
        """
        import torch

        if options.cuda_graphs and stream is None:
            raise InvalidInputError(
                Problem(f"options of {name}: cuda_graphs", True, "CUDA graphs need an NVIDIA GPU; this is a CPU",
                        "Remove the option; `compile: true` works on a CPU.")
            )  # fmt: skip
        self.signatures: Mapping[str, ModelSignature] = {name: loaded.signature}
        self._name = name
        self._options = options
        self._sizes = tuple(sorted(batch_sizes))
        if options.has_fixed_sizes and batch_sizes:
            self._sizes = fixed_sizes(max(batch_sizes))
        self._dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[options.dtype]
        self._channels_last = torch.channels_last
        module = loaded.module.to(device)
        if options.dtype != "fp32":
            module = module.to(self._dtype)
        if options.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module: torch.nn.Module = module
        self._call: Any = module
        if options.compile:
            self._call = CompiledModule(module, name, shapes=len(self._sizes))
        elif options.cuda_graphs and stream is not None:
            self._call = GraphedModule(
                module, name, sizes=self._sizes, warmup_runs=options.warmup_runs, stream=stream
            )

    def __call__(self, batches: Tensors) -> dict[str, tuple[torch.Tensor, ...]]:
        """Compute the model's outputs in the type and format of its options."""
        tensors = list(batches[self._name])
        if self._options.dtype != "fp32":
            tensors = [t.to(self._dtype) if t.is_floating_point() else t for t in tensors]
        if self._options.channels_last:
            tensors = [t.contiguous(memory_format=self._channels_last) if t.dim() == 4 else t for t in tensors]
        answer = self._call(*tensors)
        return {self._name: answer if isinstance(answer, tuple) else (answer,)}

    def padded(self, rows: int) -> int:
        """Return the next size that is compiled, captured or planned, where the options ask for padding."""
        if not (self._options.pad_batches or self._options.has_fixed_sizes):
            return rows
        return min((size for size in self._sizes if size >= rows), default=rows)

    def warm_up_rows(self) -> Sequence[Mapping[str, int]]:
        """Return every planned, compiled or captured size.

        Graphs are captured from the largest down: what the largest needs, the others fit into.
        """
        sizes = self._sizes[::-1] if self._options.cuda_graphs else self._sizes
        return [{self._name: size} for size in sizes]

    @property
    def largest_batch(self) -> int:
        """The largest size of those."""
        return max(self._sizes, default=1)

    @property
    def weights_mib(self) -> float:
        """Parameters and buffers, in MiB."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors) / 2**20

    def facts(self) -> dict[str, float | int]:
        """Return nothing: nothing was merged."""
        return {}
