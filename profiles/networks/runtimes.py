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

import numpy as np

from tenuto.errors import EnvironmentFaultError, first_line, refused
from tenuto.profiles.networks.catalogue import BYTES, DTYPES

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
        return _OnnxSession(path, name, device, stream, providers, is_plain=True)


def run_onnx(
    path: Path,
    name: str,
    *,
    device: torch.device,
    stream: torch.cuda.Stream | None,
    with_tensorrt: bool,
    is_plain: bool,
) -> Call:
    """Return a function that runs the batches of an ONNX file; see `run_elsewhere`. `is_plain`: as of its signature."""
    providers = _providers(stream, with_tensorrt=with_tensorrt)
    return _OnnxSession(path, name, device, stream, providers, is_plain=is_plain)


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
        self,
        path: Path,
        name: str,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        wanted: Sequence[str],
        *,
        is_plain: bool,
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
        self._outputs = [(one.name, ONNX_TYPES[one.type], one.shape) for one in self._session.get_outputs()]
        self._has_bytes = any(dtype == BYTES for _, dtype, *_ in (*self._inputs, *self._outputs))
        # Whether the first dimension of every output alone is not known, and is that of every input's, the batch.
        self._is_plain = is_plain and all(
            shape and not isinstance(shape[0], int) and all(isinstance(size, int) for size in shape[1:])
            for _, _, shape in self._outputs
        )

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        """Run a batch."""
        import torch

        if self._has_bytes:
            return self._run_with_bytes(tensors)
        binding, place = self._session.io_binding(), self._device.type
        # They must stay alive until the batch has run. Requests have no bfloat16: they send float32.
        types = [getattr(torch, dtype) for _, dtype in self._inputs]
        given = [tensor.to(dtype).contiguous() for tensor, dtype in zip(tensors, types, strict=True)]
        for (name, _), tensor in zip(self._inputs, given, strict=True):
            number = ONNX_NUMBERS[str(tensor.dtype)]
            binding.bind_input(name, place, 0, number, tuple(tensor.shape), tensor.data_ptr())
        if not self._is_plain:
            for name, *_ in self._outputs:
                binding.bind_output(name, place)
            self._session.run_with_iobinding(binding)
            made_there = zip(binding.get_outputs(), self._outputs, strict=True)
            return tuple(_as_tensor(value, dtype) for value, (_, dtype, _) in made_there)
        rows, answer = given[0].shape[0], []
        for name, dtype, shape in self._outputs:
            made = torch.empty((rows, *shape[1:]), dtype=getattr(torch, dtype), device=self._device)
            binding.bind_output(name, place, 0, ONNX_NUMBERS[str(made.dtype)], tuple(made.shape), made.data_ptr())
            answer.append(made)
        self._session.run_with_iobinding(binding)
        return tuple(answer)

    def _run_with_bytes(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Run a batch with texts, which ONNX Runtime takes from the host; `InvalidInputError` for what is no UTF-8."""
        import torch

        given = {}
        for (name, dtype), tensor in zip(self._inputs, tensors, strict=True):
            if dtype == BYTES:
                try:
                    texts = [each.decode() for each in tensor.flat]
                except UnicodeDecodeError as error:
                    raise refused(
                        f"input {name}", str(error), "is no UTF-8, which ONNX's texts are", "Encode it."
                    ) from None
                given[name] = np.array(texts, object).reshape(tensor.shape)
            else:
                given[name] = tensor.to(getattr(torch, dtype)).cpu().numpy()
        answer = self._session.run(None, given)
        return tuple(
            np.array([text.encode() for text in made.flat], object).reshape(made.shape)
            if dtype == BYTES
            else torch.from_numpy(made)
            for made, (_, dtype, _) in zip(answer, self._outputs, strict=True)
        )


def _as_tensor(value: Any, dtype: str) -> torch.Tensor:
    """Return an output that ONNX Runtime allocated, without a copy."""
    import torch

    made: torch.Tensor = torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())
    return made.view(torch.bool) if dtype == "bool" and made.dtype != torch.bool else made


# format: ONNX's numbers of element types, by which the runtime also names bfloat16, and its words for them.
ONNX_NUMBERS = {
    "torch.float32": 1,
    "torch.uint8": 2,
    "torch.int8": 3,
    "torch.uint16": 4,
    "torch.int16": 5,
    "torch.int32": 6,
    "torch.int64": 7,
    "torch.bool": 9,
    "torch.float16": 10,
    "torch.float64": 11,
    "torch.uint32": 12,
    "torch.uint64": 13,
    "torch.bfloat16": 16,
}
ONNX_TYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(string)": BYTES,
    **{f"tensor({word})": word for word in DTYPES if word not in ("float32", "float64")},
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
