"""A model's own hooks as a gateway calls them, in processes beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tenuto.deployments.entry.service.hook_process import HookAnswer, Postprocess, Preprocess, SetUp
from tenuto.deployments.entry.service.process_pool import HANGS_S, ProcessPool, cut_requests
from tenuto.deployments.wire.tensors import Buffer, OutputTensor, RequestInputs, most_row_bytes
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.model_options import HookOptions

_MOST_ANSWER_BYTES = 16 << 20  # limit: the size of the JSON of one answer


class HookPool(ProcessPool):
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
        self._signature = signature
        super().__init__(
            f"the hooks of '{model}'",
            SetUp(options.hooks, signature),
            options.hook_processes,
            longest_s=max(hangs_s, slo_ms / 1000.0),
            most_bytes=max(most_row_bytes(signature.inputs, signature.sizes), _MOST_ANSWER_BYTES),
        )

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
        return self.begin(Preprocess(), [body], latest_ms, self._inputs)

    def postprocess(self, outputs: Sequence[OutputTensor], request: Buffer, latest_ms: float) -> asyncio.Future[bytes]:
        """Begin to make the JSON of an answer; `request`: the body that `preprocess` got. Errors as there."""
        call = Postprocess([(each.name, each.dtype, each.shape) for each in outputs])
        seen = [request] if self.set_up is not None and self.set_up.sees_request else []
        return self.begin(call, [*(each.data for each in outputs), *seen], latest_ms, lambda _, body: bytes(body))

    def _inputs(self, answer: HookAnswer, body: memoryview) -> RequestInputs:
        """Cut the bytes behind an answer into the one request that hooks make."""
        return cut_requests(answer, body, self._signature, self.code, range(1, 2))[0]
