"""Run batches of one model with PyTorch, from numpy to numpy. Serving and profiling both time exactly this.

torch is imported when a runner is made, not with this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tenuto.errors import EnvironmentFaultError, InvalidInputError, Problem
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature
from tenuto.profiles.networks.compiled import CompiledModule
from tenuto.profiles.networks.graphs import GraphedModule
from tenuto.profiles.networks.run_options import RunOptions, split_options

if TYPE_CHECKING:
    import torch

__all__ = ["Arrays", "RunOptions", "TorchRunner", "blank_inputs", "fixed_sizes", "pick_device", "split_options"]

Arrays = dict[str, "np.ndarray[Any, Any]"]


def pick_device(device: str) -> str:
    """Return `cpu` or `cuda` for `auto`, `cpu` or `cuda`; `auto` is CUDA where this torch finds a device.

    Raises:
        EnvironmentFaultError: CUDA was asked for and there is none.
    """
    import torch

    if device == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if device == "auto":
        return "cpu"
    raise EnvironmentFaultError(
        f"torch {torch.__version__} finds no CUDA device. Install a CUDA build of torch and a driver, or use the CPU."
    )


def blank_inputs(signature: ModelSignature, size: int) -> Arrays:
    """Return a batch of zeros in which every position of an attention mask is attended."""
    return {
        t.name: np.full((size, *t.shape), 1 if t.name == "attention_mask" else 0, dtype=np.dtype(t.dtype))
        for t in signature.inputs
    }


def fixed_sizes(largest: int) -> tuple[int, ...]:
    """Return the batch sizes that are compiled or captured: powers of two below the largest, and the largest."""
    return (*(2**k for k in range((largest - 1).bit_length())), largest)


class TorchRunner:
    """One model on one device. Every call is made by one thread at a time."""

    def __init__(
        self, loaded: LoadedModel, device: str, options: RunOptions, *, batch_sizes: Sequence[int] = (),
        stream: torch.cuda.Stream | None = None, name: str = "the model",
    ) -> None:
        """Move the module to the device.

        Args:
            loaded: as `build` returns it.
            device: `cpu` or `cuda` (the first visible one).
            options: see `RunOptions`.
            batch_sizes: the planned ones; only padding and the size of the pinned buffers depend on them.
            stream: CUDA stream to run on, shared by the models of a process; default: a new one.
            name: what to call the model in an error.

        Raises:
            InvalidInputError: an option needs another device.
        """
        import torch

        if options.cuda_graphs and device != "cuda":
            raise InvalidInputError(
                Problem(f"options of {name}: cuda_graphs", True, "CUDA graphs need an NVIDIA GPU; this is a CPU",
                        "Remove the option; `compile: true` works on a CPU.")
            )
        self._torch = torch
        self.device = torch.device("cuda:0" if device == "cuda" else "cpu")
        self.signature = loaded.signature
        self.options = options
        self._batch_sizes = tuple(sorted(batch_sizes))
        if options.has_fixed_sizes and batch_sizes:
            self._batch_sizes = fixed_sizes(max(batch_sizes))
        self._dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[options.dtype]
        module = loaded.module.to(self.device)
        if options.dtype != "fp32":
            module = module.to(self._dtype)
        if options.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module: torch.nn.Module = module
        self._pinned: dict[str, torch.Tensor] = {}
        self._stream: Any = None
        if device == "cuda":
            self._stream = stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._call: Any = module
        if options.compile:
            self._call = CompiledModule(module, name, shapes=len(self._batch_sizes))
        elif options.cuda_graphs:
            self._call = GraphedModule(
                module, name, sizes=self._batch_sizes, warmup_runs=options.warmup_runs, stream=self._stream
            )

    @property
    def warm_sizes(self) -> tuple[int, ...]:
        """Batch sizes to run before requests come: the planned ones, or all that are compiled or captured.

        Graphs are captured from the largest down: what the largest needs, the others fit into.
        """
        return self._batch_sizes[::-1] if self.options.cuda_graphs else self._batch_sizes

    @property
    def on_cuda(self) -> bool:
        """Whether batches run on a CUDA device."""
        return self._stream is not None

    @property
    def weights_mib(self) -> float:
        """Parameters and buffers, in MiB."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors) / 2**20

    def run(self, inputs: Mapping[str, np.ndarray[Any, Any]], batch_size: int) -> Arrays:
        """Run one batch and return its outputs as arrays of the caller's own; blocks until they are there.

        Args:
            inputs: one array per input with a leading batch dimension; may be read-only.
            batch_size: rows in them.

        Raises:
            InvalidInputError: an integer is outside the model's range; found before anything ran.
        """
        arrays, size = self.prepare(inputs, batch_size)
        with self._torch.inference_mode():
            if self._stream is None:
                answer = self.forward(self.as_tensors(arrays))
            else:
                answer = self._run_on_stream(arrays, size, None)
        return self.outputs(answer, batch_size)

    def split_times_ms(self, inputs: Mapping[str, np.ndarray[Any, Any]], batch_size: int) -> dict[str, float]:
        """Return a batch's times on the device by CUDA events: `h2d_ms`, `kernels_ms`, `d2h_ms`; empty on a CPU."""
        if self._stream is None:
            return {}
        torch = self._torch
        arrays, size = self.prepare(inputs, batch_size)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        with torch.inference_mode():
            self._run_on_stream(arrays, size, marks)
        names = ("h2d_ms", "kernels_ms", "d2h_ms")
        return {name: a.elapsed_time(b) for name, a, b in zip(names, marks, marks[1:], strict=False)}

    def prepare(
        self, inputs: Mapping[str, np.ndarray[Any, Any]], batch_size: int
    ) -> tuple[list[np.ndarray[Any, Any]], int]:
        """Return the inputs in the signature's order, padded where the options say so, and their size.

        Raises:
            InvalidInputError: an integer is outside the model's range.
        """
        arrays = [_checked(tensor, inputs[tensor.name]) for tensor in self.signature.inputs]
        size = batch_size
        if self.options.pad_batches or self.options.has_fixed_sizes:
            size = min((s for s in self._batch_sizes if s >= batch_size), default=batch_size)
            if size > batch_size:
                blank = blank_inputs(self.signature, size - batch_size)
                names = [tensor.name for tensor in self.signature.inputs]
                arrays = [np.concatenate([a, blank[name]]) for a, name in zip(arrays, names, strict=True)]
        return arrays, size

    def as_tensors(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """Return tensors on the CPU that share the arrays' memory, or a copy's where torch cannot."""
        return [self._torch.from_numpy(_writable(array)) for array in arrays]

    def forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the model on tensors of its device, in the type and format of the options; on CUDA it only queues."""
        if self.options.dtype != "fp32":
            tensors = [t.to(self._dtype) if t.is_floating_point() else t for t in tensors]
        if self.options.channels_last:
            last = self._torch.channels_last
            tensors = [t.contiguous(memory_format=last) if t.dim() == 4 else t for t in tensors]
        answer = self._call(*tensors)
        return answer if isinstance(answer, tuple) else (answer,)

    def _run_on_stream(
        self, arrays: list[np.ndarray[Any, Any]], size: int, marks: list[Any] | None
    ) -> tuple[torch.Tensor, ...]:
        """Copy through pinned memory on the runner's stream and wait for that stream alone."""
        torch = self._torch

        def mark(index: int) -> None:
            if marks is not None:
                marks[index].record(self._stream)

        staged = [self._stage(spec, array, size) for spec, array in zip(self.signature.inputs, arrays, strict=True)]
        with torch.cuda.stream(self._stream):
            mark(0)
            tensors = [buffer.to(self.device, non_blocking=True) for buffer in staged]
            mark(1)
            answer = self.forward(tensors)
            mark(2)
            host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in answer)
            for target, tensor in zip(host, answer, strict=True):
                target.copy_(tensor, non_blocking=True)
            mark(3)
        self._stream.synchronize()
        return host

    def _stage(self, spec: TensorSignature, array: np.ndarray[Any, Any], size: int) -> torch.Tensor:
        """Copy an input into its pinned buffer, which is kept and only ever grows."""
        buffer = self._pinned.get(spec.name)
        if buffer is None or buffer.shape[0] < size:
            rows = max(size, max(self._batch_sizes, default=0))
            kind = self._torch.from_numpy(np.empty(0, np.dtype(spec.dtype))).dtype
            buffer = self._pinned[spec.name] = self._torch.empty((rows, *spec.shape), dtype=kind, pin_memory=True)
        np.copyto(buffer.numpy()[:size], array)
        return buffer[:size]

    def outputs(self, answer: Sequence[torch.Tensor], batch_size: int) -> Arrays:
        """Return host tensors as the arrays of the signature, without the padding.

        Raises:
            InvalidInputError: they are not what the signature says.
        """
        if len(answer) != len(self.signature.outputs):
            raise InvalidInputError(
                Problem("signature.outputs", len(self.signature.outputs), f"the model returned {len(answer)} tensors",
                        "Name every output of the model in its signature, in order.")
            )
        outputs = {}
        for spec, tensor in zip(self.signature.outputs, answer, strict=True):
            array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()[:batch_size]
            if array.shape != (batch_size, *spec.shape):
                raise InvalidInputError(
                    Problem(f"output {spec.name}", list(array.shape), f"the signature says {[batch_size, *spec.shape]}",
                            "Correct the model's signature.")
                )
            outputs[spec.name] = np.ascontiguousarray(array, dtype=np.dtype(spec.dtype))
        return outputs


def _checked(spec: TensorSignature, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Refuse integers outside the model's range: on CUDA they would cost the whole context, and every model in it."""
    if spec.below is not None and array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= spec.below:
            wrong = low if low < 0 else high
            raise InvalidInputError(
                Problem(spec.name, wrong, f"values must be in [0, {spec.below})", "Use the model's own tokenizer.")
            )
    return array


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array torch may wrap: it warns about read-only memory, although inference never writes to inputs."""
    if array.flags.writeable and array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.array(array, order="C")
