"""Whether the JSON schemas that clients send can be kept. Preparing one may take minutes, whatever its size, so that it
is tried in a process that can be killed, before a gpu-let prepares it."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
from functools import partial

from tenuto.deployments.entry.http.bounded_cache import BoundedCache
from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.service.hook_pool import HookPool
from tenuto.deployments.entry.service.process_pool import HookFaultError
from tenuto.deployments.wire.tensors import InputPart
from tenuto.profiles.networks.grammars import CHECKED_S, NEEDED, SCHEMA_HOOKS, SchemaHooks
from tenuto.profiles.networks.model_options import HookOptions

_FIELD = "response_format"
_MOST_KNOWN = 4096  # limit: schemas that need no check again; each takes 100 bytes


class SchemaChecks:
    """Checks schemas, each once. Made, used and closed on one event loop; the processes start with the first schema."""

    def __init__(self) -> None:
        self._hooks: HookPool | None = None
        self._known: BoundedCache[bytes, None] = BoundedCache(_MOST_KNOWN)  # digests

    def is_known(self, schema: str) -> bool:
        """Whether a schema was found to be one that can be kept."""
        return _digest(schema) in self._known

    def check(self, schema: str, latest_ms: float) -> asyncio.Future[None]:
        """Begin to check a schema; the future fails with `HttpError` when it cannot be kept.

        Args:
            schema: JSON.
            latest_ms: until when that may begin, on the monotonic clock.

        Raises:
            HttpError: 400 without the package, 429 where too many wait, 503 where no process can be started.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise HttpError(400, f"'{_FIELD}' {NEEDED}", param=_FIELD)
        if self._hooks is None:
            options = HookOptions(hooks=SCHEMA_HOOKS, hook_processes=2)
            # Limit: ten times the processor time, on a busy machine.
            self._hooks = HookPool(_FIELD, options, SchemaHooks.signature, 0.0, hangs_s=10.0 * CHECKED_S)
        checked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        made = self._hooks.preprocess(schema.encode(), latest_ms)
        made.add_done_callback(partial(self._checked, schema, checked))
        return checked

    def _checked(self, schema: str, checked: asyncio.Future[None], made: asyncio.Future[list[InputPart]]) -> None:
        error = None if made.cancelled() else made.exception()
        if error is None:
            self._known.add(_digest(schema), None)
        if checked.done():  # the client has left
            return
        if error is None:
            checked.set_result(None)
        elif isinstance(error, HookFaultError):
            rule = f"has a schema that takes more than {CHECKED_S:g} s to prepare. Send a simpler one."
            checked.set_exception(HttpError(400, f"'{_FIELD}' {rule}", param=_FIELD))
        elif isinstance(error, HttpError) and error.status == 400:
            reason = error.message.rstrip(".")
            rule = f"has a schema that cannot be kept: {reason}. Send one without that."
            checked.set_exception(HttpError(400, f"'{_FIELD}' {rule}", param=_FIELD))
        else:
            checked.set_exception(error)

    def close(self) -> None:
        """End the processes."""
        if self._hooks is not None:
            self._hooks.close()


def _digest(schema: str) -> bytes:
    return hashlib.blake2b(schema.encode(), digest_size=16).digest()
