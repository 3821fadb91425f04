"""The computation of a program: one model with its options, or several merged into one. torch is imported on use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tenuto.errors import refused
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, with_pixels
from tenuto.profiles.networks.compiled import CompiledModule
from tenuto.profiles.networks.graphs import GraphedModule, UncapturableError
from tenuto.profiles.networks.inputs import random_inputs
from tenuto.profiles.networks.intake import Intake, network_dtype
from tenuto.profiles.networks.model_options import ChosenOptions, captured_sizes, compiled_sizes
from tenuto.profiles.networks.runtimes import run_elsewhere, run_onnx

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "Sequence[torch.Tensor]"]
"""The tensors of each model, in the order of its signature."""


class Network(Protocol):
    """The computation of a program on its device. One thread at a time calls it; on CUDA always on one stream."""

    @property
    def signatures(self) -> Mapping[str, ModelSignature]:
        """The signature of each of its models, in order."""

    def __call__(self, batches: Tensors) -> dict[str, tuple[torch.Tensor, ...]]:
        """Compute the outputs of every model that has a batch, with its own number of rows. On CUDA it only queues."""

    def padded(self, rows: int) -> int:
        """Return the number of rows to which a model's batch is padded."""

    def warm_up_rows(self) -> Sequence[Mapping[str, int]]:
        """Return the batches to run before requests come, as rows by model, in order."""

    @property
    def largest_batch(self) -> int:
        """The largest planned batch of any of its models; 1 if none is planned."""

    @property
    def weights_mib(self) -> float:
        """Parameters and buffers on the device, in MiB."""

    @property
    def notes(self) -> Sequence[str]:
        """The options that it runs without, and why."""

    @property
    def way(self) -> str:
        """How it runs: `plain`, `cuda_graphs`, `compile`, `merged`, or another runtime."""

    def facts(self) -> dict[str, float | int]:
        """Return figures of merging; empty for a lone model."""


class LoneModel:
    """A program of one model."""

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        device: torch.device,
        options: ChosenOptions,
        *,
        batch_sizes: Sequence[int] = (),
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Move the module to the device, or hand it to another runtime.

        Args:
            name: the name of the model.
            loaded: the result of `build`.
            device: the device to run on.
            options: see `ChosenOptions`.
            batch_sizes: the planned batch sizes.
            stream: the stream that it will be called on, if the device is CUDA.

        Raises:
            InvalidInputError: an option needs another device.
            EnvironmentFaultError: the runtime is not installed, or cannot take the model.
        """
        import torch

        if options.cuda_graphs and stream is None:
            raise refused(
                f"options of {name}: cuda_graphs",
                True,
                "CUDA graphs need an NVIDIA GPU; this is a CPU",
                "Remove the option; `compile: true` works on a CPU.",
            )
        if loaded.signature.has_bytes:
            options = _plainly_run(name, options, "tensors of bytes, which only PyTorch's plain forward pass can take")
        elif loaded.signature.answers == "boxes":  # their coordinates are not exact in half precision
            why = "boxes as outputs, which only PyTorch's plain forward pass can make"
            options = replace(_plainly_run(name, options, why), dtype="fp32")
        elif not loaded.signature.is_plain:
            why = "no fixed shapes with a batch of any size in front, which these are for"
            given = replace(options, runtime="torch") if loaded.onnx_file is not None else options
            if options.pad_batches:
                raise refused(f"options of {name}", "pad_batches", f"the model has {why}", "Remove this option.")
            options = replace(_plainly_run(name, given, why), runtime=options.runtime)
        signature = with_pixels(loaded.signature, preferred=options.uint8_input)
        self._is_plain = signature.is_plain
        self.signatures: Mapping[str, ModelSignature] = {name: signature}
        self.notes: list[str] = []
        self._name = name
        self._options = options
        self._on_cuda = stream is not None
        self._sizes = tuple(sorted(batch_sizes))
        if options.prepared_sizes and batch_sizes:
            sizes = captured_sizes if options.cuda_graphs else compiled_sizes
            self._sizes = sizes(max(batch_sizes))
        self._dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[options.dtype]
        self._module: torch.nn.Module | None = None
        self._call: Any
        module = loaded.module
        if loaded.onnx_file is not None:
            file = Path(loaded.onnx_file)
            self._call = run_onnx(
                file,
                name,
                device=device,
                stream=stream,
                with_tensorrt=options.runtime == "tensorrt",
                is_plain=signature.is_plain,
            )
            self.weights_mib = sum(each.stat().st_size for each in (file, *map(Path, loaded.onnx_data))) / 2**20
            return
        if options.fold_batch_norms:
            module = self._folded(module)
        if options.dtype != "fp32":
            module = module.to(self._dtype)
        elif (own := {each.dtype for each in module.parameters()}) in ({torch.float16}, {torch.bfloat16}):
            (self._dtype,) = own  # a network that was saved in half precision runs in it
        self.weights_mib = size_mib(module)
        pictures = signature.image if "uint8" in signature.inputs[0].accepts else None
        if options.runtime != "torch":
            intake = Intake(self._dtype, device, pictures=pictures)
            elsewhere = run_elsewhere(
                options.runtime,
                module,
                name,
                self._examples(self._dtype),
                device=device,
                sizes=self._sizes,
                stream=stream,
            )
            self._call = lambda *tensors: elsewhere(*intake(tensors))
            return
        module = module.to(device)
        channels_last = options.channels_last and any(p.dim() == 4 for p in module.parameters())
        if channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._module = module
        self._intake = intake = Intake(self._dtype, device, channels_last=channels_last, pictures=pictures)
        self._call = self._forward
        if options.compile:
            compiled = CompiledModule(module, name, shapes=len(self._sizes))
            self._call = lambda *tensors: compiled(*intake(tensors))
        elif options.cuda_graphs and stream is not None:
            self._call = GraphedModule(
                module, name, intake, sizes=self._sizes, warmup_runs=options.warmup_runs, stream=stream
            )

    @property
    def module(self) -> torch.nn.Module:
        """The network in PyTorch; ValueError if another runtime runs it."""
        if self._module is None:
            raise ValueError(f"'{self._name}' is not run by PyTorch")
        return self._module

    def _folded(self, module: torch.nn.Module) -> torch.nn.Module:
        import torch

        from tenuto.profiles.networks.folding import fold_batch_norms

        folded, count = fold_batch_norms(module, self._examples(torch.float32))
        if not count and any(isinstance(part, torch.nn.BatchNorm2d) for part in module.modules()):
            self.notes.append("batch norms are not folded: its outputs would change, or it cannot be traced")
        return folded

    def _examples(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return a batch of two that the model accepts. (With one row, networks may skip steps that others need.)"""
        import torch

        signature = self.signatures[self._name]
        arrays = random_inputs(signature, 2)
        tensors = (torch.from_numpy(arrays[spec.name]) for spec in signature.inputs)
        return tuple(t.to(network_dtype(t.dtype, dtype)) for t in tensors)

    def __call__(self, batches: Tensors) -> dict[str, tuple[torch.Tensor, ...]]:
        """Compute the model's outputs in the type and format of its options."""
        tensors = list(batches[self._name])
        if self._on_cuda:
            set_backends(self._options)
        try:
            answer = self._call(*tensors)
        except UncapturableError as error:
            if self._options.graphs_are_asked_for:
                raise
            self.notes.append(f"runs without CUDA graphs: {error}")
            self._call = self._forward
            answer = self._call(*tensors)
        return {self._name: tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)}

    def _forward(self, *tensors: torch.Tensor) -> Any:
        return self.module(*self._intake(tensors))

    def padded(self, rows: int) -> int:
        """Return the next size that is compiled, captured or planned, if the options ask for padding."""
        if not (self._options.pad_batches or self._options.prepared_sizes):
            return rows
        return min((size for size in self._sizes if size >= rows), default=rows)

    def warm_up_rows(self) -> Sequence[Mapping[str, int]]:
        """Return every planned, compiled or captured size.

        Graphs are captured from the largest down, as the smaller ones fit into the memory of the largest.
        """
        sizes = self._sizes[::-1] if self._options.cuda_graphs else self._sizes
        if not self._is_plain:  # blank batches have the largest sizes
            sizes = tuple(sorted({*sizes[:1], *sizes[-1:]}))
        return [{self._name: size} for size in sizes]

    @property
    def largest_batch(self) -> int:
        """The largest of these sizes."""
        return max(self._sizes, default=1)

    @property
    def way(self) -> str:
        """How it really runs."""
        if self._module is None:
            return "onnxruntime" if self._options.runtime == "torch" else self._options.runtime
        if self._options.compile:
            return "compile"
        return "cuda_graphs" if isinstance(self._call, GraphedModule) else "plain"

    def facts(self) -> dict[str, float | int]:
        """Return nothing, as nothing was merged."""
        return {}


def _plainly_run(name: str, options: ChosenOptions, why: str) -> ChosenOptions:
    """Return the options of a model that is neither compiled, captured nor converted; the model has `why`.

    Raises:
        InvalidInputError: an option asks for it.
    """
    if options.compile or options.graphs_are_asked_for or options.runtime != "torch":
        names = "compile, cuda_graphs or runtime"
        raise refused(f"options of {name}", names, f"the model has {why}", "Remove these options.")
    return replace(options, cuda_graphs=False, fold_batch_norms=False)


def size_mib(module: torch.nn.Module) -> float:
    """Return the memory of parameters and buffers in MiB."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers())) / 2**20


def set_backends(options: ChosenOptions) -> None:
    """Set PyTorch's switches for the whole process before a call on CUDA, because models of one process may differ.

    They are always set, as PyTorch's own default runs fp32 convolutions in TF32. The older names of the switches are
    used: after the newer ones are set, reading an older one raises an error in libraries (seen with 2.11 and 2.13).
    """
    import torch

    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    torch.backends.cudnn.allow_tf32 = options.tf32
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
