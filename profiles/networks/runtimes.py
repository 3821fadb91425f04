"""Other runtimes than PyTorch's modules: a program that AOTInductor compiled, or ONNX Runtime.

Each is made from the module and called like it, with tensors on the device. So buffers, streams, padding and the
scheduler's batches stay the same. torch is imported on use.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenuto.errors import EnvironmentFaultError, first_line, refused

if TYPE_CHECKING:
    import torch

Call = Callable[..., Any]


def run_elsewhere(
    runtime: str,
    module: torch.nn.Module,
    name: str,
    examples: tuple[torch.Tensor, ...],
    *,
    device: torch.device,
    sizes: Sequence[int],
    stream: torch.cuda.Stream | None,
) -> Call:
    """Compile or convert a module; return a function that runs its batches.

    Args:
        runtime: `aot_inductor`, `onnxruntime` or `tensorrt`.
        module: a module in evaluation mode, on the CPU, in its type.
        name: the model's name for errors.
        examples: inputs of two rows that it accepts.
        device: the device to run on.
        sizes: the batch sizes that will be run; empty: any.
        stream: the stream that it will be called on, if the device is CUDA.

    Raises:
        EnvironmentFaultError: the runtime is not installed, has no provider for the device, or cannot take the model.
        InvalidInputError: the runtime is one of models that generate.
    """
    if runtime == "vllm":
        raise refused("runtime", runtime, f"runs models that generate, and '{name}' does not", "Remove it.")
    if runtime == "aot_inductor":
        return _aot_inductor(module, name, examples, device, sizes)
    providers = _providers(stream, with_tensorrt=runtime == "tensorrt")  # converting takes seconds
    with _as_onnx(module, name, examples) as path:
        return _OnnxSession(path, name, device, stream, providers)


def run_onnx(
    path: Path, name: str, *, device: torch.device, stream: torch.cuda.Stream | None, with_tensorrt: bool
) -> Call:
    """Return a function that runs the batches of an ONNX file; see `run_elsewhere`."""
    return _OnnxSession(path, name, device, stream, _providers(stream, with_tensorrt=with_tensorrt))


def _aot_inductor(
    module: torch.nn.Module, name: str, examples: tuple[torch.Tensor, ...], device: torch.device, sizes: Sequence[int]
) -> Call:
    """Export the module with a batch of any size up to the largest, compile it ahead of time and load the package."""
    import torch
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    module = module.to(device)
    given = tuple(tensor.to(device) for tensor in examples)
    largest = max(sizes, default=0)
    try:
        with _quiet(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            if largest == 1:
                exported = torch.export.export(module, tuple(tensor[:1] for tensor in given))
            else:
                batch = torch.export.Dim("batch", min=1, max=max(largest, 2) if largest else 4096)
                exported = torch.export.export(module, given, dynamic_shapes=tuple({0: batch} for _ in given))
            path = aoti_compile_and_package(exported, package_path=str(Path(folder) / "model.pt2"))
            return aoti_load_package(path)
    except Exception as error:  # torch.export and Inductor raise many kinds
        raise EnvironmentFaultError(
            f"'{name}' cannot be compiled ahead of time: {first_line(error)}. Install a C++ compiler (and CUDA's for "
            "a GPU), or remove `runtime: aot_inductor` from the model's options."
        ) from error


def _providers(stream: torch.cuda.Stream | None, *, with_tensorrt: bool) -> list[str]:
    """Return the providers of ONNX Runtime that must run a network; see `run_elsewhere` for the errors."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise EnvironmentFaultError(
            "the runtime 'onnxruntime' is not installed. Run: pip install 'tenuto[onnx]' (for a GPU then also "
            "onnxruntime-gpu), or remove `runtime` from the model's options."
        ) from error
    providers = ["CPUExecutionProvider"] if stream is None else ["CUDAExecutionProvider"]
    providers = ["TensorrtExecutionProvider", *providers] if with_tensorrt else providers
    available = onnxruntime.get_available_providers()
    missing = [provider for provider in providers if provider not in available]
    if missing:
        raise EnvironmentFaultError(
            f"ONNX Runtime has no {missing[0]} here, only {', '.join(available)}. Install the build that has it, or "
            "remove `runtime` from the model's options."
        )
    return providers


class _OnnxSession:
    """A network in ONNX Runtime. On CUDA its kernels run on our stream, on our tensors' memory."""

    def __init__(
        self, path: Path, name: str, device: torch.device, stream: torch.cuda.Stream | None, wanted: Sequence[str]
    ) -> None:
        import onnxruntime

        self._device = device
        own = {} if stream is None else {"device_id": "0", "user_compute_stream": str(stream.cuda_stream)}
        settings = onnxruntime.SessionOptions()
        if stream is None:
            settings.intra_op_num_threads = _torch_threads()
        providers = [(provider, {} if provider.startswith("CPU") else own) for provider in wanted]
        try:
            self._session: Any = onnxruntime.InferenceSession(str(path), settings, providers=providers)
        except Exception as error:  # the library's own errors have no other common base
            raise EnvironmentFaultError(f"ONNX Runtime cannot load '{name}': {first_line(error)}.") from error
        self._inputs = [(one.name, ONNX_TYPES[one.type]) for one in self._session.get_inputs()]
        self._outputs = [(one.name, ONNX_TYPES[one.type], tuple(one.shape[1:])) for one in self._session.get_outputs()]
        if not all(isinstance(size, int) for _, _, shape in self._outputs for size in shape):
            raise EnvironmentFaultError(
                f"ONNX Runtime does not know the size of every output of '{name}'. Remove `runtime` from its options."
            )

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run a batch."""
        import torch

        binding, place = self._session.io_binding(), self._device.type
        # They must stay alive until the batch has run. Requests have no bfloat16: they send float32.
        types = [getattr(torch, dtype) for _, dtype in self._inputs]
        given = [tensor.to(dtype).contiguous() for tensor, dtype in zip(tensors, types, strict=True)]
        rows = given[0].shape[0]
        for (name, _), tensor in zip(self._inputs, given, strict=True):
            number = ONNX_NUMBERS[str(tensor.dtype)]
            binding.bind_input(name, place, 0, number, tuple(tensor.shape), tensor.data_ptr())
        answer = []
        for name, dtype, shape in self._outputs:
            made = torch.empty((rows, *shape), dtype=getattr(torch, dtype), device=self._device)
            binding.bind_output(name, place, 0, ONNX_NUMBERS[str(made.dtype)], tuple(made.shape), made.data_ptr())
            answer.append(made)
        self._session.run_with_iobinding(binding)
        return tuple(answer)


# format: ONNX's numbers of element types, by which the runtime also names bfloat16, and its words for them.
ONNX_NUMBERS = {
    "torch.float32": 1,
    "torch.uint8": 2,
    "torch.int32": 6,
    "torch.int64": 7,
    "torch.float16": 10,
    "torch.bfloat16": 16,
}
ONNX_TYPES = {
    "tensor(float)": "float32",
    "tensor(uint8)": "uint8",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
}


@contextlib.contextmanager
def _as_onnx(module: torch.nn.Module, name: str, examples: tuple[torch.Tensor, ...]) -> Iterator[Path]:
    """Write the module as an ONNX file for batches of any size; the file exists as long as this context lasts."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        names = [f"input{number}" for number in range(len(examples))]
        batch = torch.export.Dim("batch", min=1, max=4096)  # limit: batch size
        try:
            with _quiet(), torch.no_grad():
                torch.onnx.export(
                    module,
                    examples,
                    str(path),
                    input_names=names,
                    dynamo=True,
                    verbose=False,
                    dynamic_shapes=tuple({0: batch} for _ in examples),
                )
        except Exception as error:  # the exporter raises many kinds
            raise EnvironmentFaultError(
                f"'{name}' cannot be written as ONNX: {first_line(error)}. Install onnx and onnxscript, or remove "
                "`runtime` from the model's options."
            ) from error
        yield path


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of exporters about deprecated calls inside PyTorch, which nobody here can change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()
