"""A model's own hooks as a gateway calls them, in processes beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tenuto.deployments.entry.service.hook_process import Done, HookAnswer, Postprocess, Preprocess, SetUp
from tenuto.deployments.entry.service.process_pool import HANGS_S, HookFaultError, ProcessPool
from tenuto.deployments.wire.tensors import Buffer, InputPart, OutputTensor, RequestInputs
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
from tenuto.profiles.networks.model_options import HookOptions

_MOST_ANSWER_BYTES = 16 << 20  # limit: the size of the JSON of one answer


class HookPool:
    """The hooks of one model, in processes of their own. Made, used and closed on one event loop."""

    def __init__(
        self, model: str, options: HookOptions, signature: ModelSignature, slo_ms: float, *, hangs_s: float = HANGS_S
    ) -> None:
        """Start the processes.

        Args:
            model: its name, for the log.
            options: which hooks, in how many processes.
            signature: of the model.
            slo_ms: of the plan.
            hangs_s: how long a call may take where the SLO is shorter.
        """
        assert options.hooks is not None
        self._model, self._signature = model, signature
        self._pool = ProcessPool(
            f"the hooks of '{model}'",
            SetUp(options.hooks, signature),
            options.hook_processes,
            longest_s=max(hangs_s, slo_ms / 1000.0),
            most_bytes=_most_bytes(signature),
        )

        self.longest_ms = self._pool.longest_ms

    @property
    def after_ms(self) -> float:
        """What `postprocess` takes: the longest lately, which fades."""
        return self.longest_ms[Postprocess]

    def preprocess(self, body: Buffer, latest_ms: float) -> asyncio.Future[RequestInputs]:
        """Begin to make the input tensors of a request.

        Args:
            body: of the request.
            latest_ms: until when it may begin, on the monotonic clock.

        Raises:
            HttpError: 429 where too many wait, 503 where the hooks cannot be started.
        """
        return self._pool.begin(Preprocess(), [body], latest_ms, self._inputs)

    def postprocess(self, outputs: Sequence[OutputTensor], request: Buffer, latest_ms: float) -> asyncio.Future[bytes]:
        """Begin to make the JSON of an answer; `request`: the body that `preprocess` got. Errors as there."""
        call = Postprocess([(each.name, each.dtype, each.shape) for each in outputs])
        parts: list[Buffer] = [each.data for each in outputs]
        if isinstance(self._pool.set_up, Done) and self._pool.set_up.sees_request:
            parts.append(request)
        return self._pool.begin(call, parts, latest_ms, lambda _, body: bytes(body))

    def _inputs(self, answer: HookAnswer, body: memoryview) -> RequestInputs:
        """Cut the bytes behind an answer into tensors. Sizes and types are checked, as an attacker may have taken over
        the process, and must not harm a gpu-let."""
        signature, dtypes, shapes = self._signature, getattr(answer, "dtypes", []), getattr(answer, "shapes", [])
        try:
            sizes = signature.sizes_of(shapes)
        except ValueError as error:
            raise HookFaultError(f"the hooks of '{self._model}' returned other shapes: {error}") from None
        parts: list[InputPart] = []
        for tensor, dtype in zip(signature.at(sizes).inputs, dtypes, strict=False):
            if dtype != tensor.dtype and dtype not in tensor.accepts:
                raise HookFaultError(f"the hooks of '{self._model}' returned {dtype} for {tensor.name}")
            size = _bytes(tensor, dtype)
            parts.append(InputPart(body[:size], "" if dtype == tensor.dtype else dtype))
            if parts[-1].nbytes != size:
                break
            body = body[size:]
        if len(parts) != len(signature.inputs) or parts[-1].nbytes != size:
            raise HookFaultError(f"the hooks of '{self._model}' returned too few bytes")
        return RequestInputs(parts, sizes)

    def close(self) -> None:
        """End the processes, and refuse the calls that wait."""
        self._pool.close()


def _most_bytes(signature: ModelSignature) -> int:
    inputs = sum(
        max(_bytes(each, dtype) for dtype in (each.dtype, *each.accepts))
        for each in signature.at(signature.most_sizes).inputs
    )
    return max(inputs, _MOST_ANSWER_BYTES)


def _bytes(tensor: TensorSignature, dtype: str) -> int:
    return int(np.prod(tensor.fixed_shape, dtype=np.int64)) * np.dtype(dtype).itemsize
