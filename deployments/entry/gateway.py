"""The HTTP entry: Open Inference Protocol v2, `/predict`, health and documentation, with the dispatcher in the same
process, or fed in bundles where several gateways share it.

The infer path is plain ASGI in front of FastAPI: routing, validation and response models would cost more than the
rest of a request. FastAPI serves everything else and describes all of it at `/docs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from fastapi import FastAPI

from tenuto import __version__
from tenuto.deployments.dispatch.correction import NetworkMeter
from tenuto.deployments.dispatch.dispatcher import Dispatcher
from tenuto.deployments.dispatch.dispatcher_process import BundleServer
from tenuto.deployments.entry.front import Front
from tenuto.deployments.entry.http import (
    HttpError,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    send_error,
    send_json,
    send_response,
)
from tenuto.deployments.entry.oip import BadRequestError, check_outputs, encode_response, parse_infer, parse_slo
from tenuto.deployments.entry.remote import RemoteDispatchers
from tenuto.deployments.entry.routes import add_routes
from tenuto.deployments.entry.served import ServedModel
from tenuto.deployments.serve.finders import find_dispatcher, find_gpulet
from tenuto.deployments.serve.settings import ServingSettings
from tenuto.deployments.wire.answers import Answer
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome

__all__ = ["Gateway", "build"]

logger = logging.getLogger("ray.serve")

_PRINTABLE = "".join(chr(code) for code in range(33, 127) if code != ord("%"))


class Gateway:
    """The Serve deployment. `reconfigure` gives it a plan; without one every model is unknown and nothing is ready."""

    def __init__(self, _options: Mapping[str, Any] | None = None) -> None:
        self._front: Front | None = None
        self._bundles: BundleServer | None = None  # for Python handles, where this gateway schedules by itself
        self._sub_clusters: dict[str, list[str]] = {}
        self._max_body_bytes = 64 << 20
        self._app: FastAPI | None = None
        self._id_prefix = secrets.token_hex(4)
        self._request_numbers = itertools.count()

    # --- Serve's side -------------------------------------------------------------------------------------------

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the ASGI application; Serve calls this once after the constructor."""
        self._app = make_app(self)
        return self._app

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Follow a new plan without a restart."""
        settings = ServingSettings.from_user_config(user_config)
        self._max_body_bytes = settings.max_body_bytes
        self._sub_clusters = {name: list(models) for name, models in settings.sub_clusters.items()}
        if settings.sub_clusters:
            await self._follow_remotely(settings)
        else:
            await self._follow_alone(settings)

    async def _follow_alone(self, settings: ServingSettings) -> None:
        """Schedule in this process."""
        if not isinstance(self._front, Dispatcher):
            old, self._front = (
                self._front,
                Dispatcher(
                    settings.build_scheduler,
                    find_gpulet,
                    max_queued=settings.max_queued,
                    network=NetworkMeter(settings.response_ms),
                    on_change=self._on_change,
                ),
            )
            self._bundles = BundleServer(self._front)
            if old is not None:
                await old.close()
        else:
            self._front.configure(
                settings.build_scheduler, max_queued=settings.max_queued, response_ms=settings.response_ms
            )
        self._front.apply(settings.plan)

    async def _follow_remotely(self, settings: ServingSettings) -> None:
        """Feed the dispatchers of the sub-clusters."""
        if not isinstance(self._front, RemoteDispatchers):
            old, self._front = self._front, RemoteDispatchers(find_dispatcher)
            self._bundles = None
            if old is not None:
                await old.close()
        await self._front.apply(settings.plan, settings.sub_clusters)

    def _on_change(self) -> None:
        if self._bundles is not None:
            self._bundles.announce()

    async def entry(self) -> dict[str, Any] | None:
        """Return the plan and the models of every sub-cluster for `TenutoHandle`; none where this gateway schedules."""
        plan = self._front.plan if self._front is not None else None
        return None if plan is None else {"plan": plan.to_data(), "sub_clusters": self._sub_clusters}

    async def describe(self, node_id: str = "") -> dict[str, Any]:
        """Return how a Python handle on a node reaches this gateway's own dispatcher."""
        if self._bundles is None:
            raise HttpError(503, "this gateway has no dispatcher of its own. Connect again.", retry_after_s=1)
        return await self._bundles.describe(node_id)

    async def __del__(self) -> None:
        """Answer what waits and disconnect; Serve calls this after draining."""
        if self._front is not None:
            await self._front.close()

    @property
    def front(self) -> Front:
        """The scheduling side; raises `HttpError` 503 before the first plan."""
        if self._front is None:
            raise HttpError(503, "no plan is applied yet. Wait a moment and retry.", retry_after_s=1)
        return self._front

    def served(self, name: str) -> ServedModel:
        """Return a model that can be asked now.

        Raises:
            HttpError: 404 for a model the plan does not know, 503 for one that is unserved or whose gpu-lets are
                starting.
        """
        front = self.front
        plan = front.plan
        names = [spec.name for spec in plan.models] if plan is not None else []
        if plan is None or name not in names:
            raise HttpError(404, f"unknown model '{name}'. Models here: {', '.join(names) or '(none)'}.")
        model = front.served(name)
        if model is not None and front.is_ready(name):
            return model
        if name in plan.unserved:
            why = plan.unserved_reasons.get(name, "no reason given")
            raise HttpError(
                503, f"the plan leaves '{name}' unserved: {why}. Plan again with more GPUs or another policy."
            )
        raise HttpError(503, f"no gpu-let of '{name}' is ready. Retry in a few seconds.", retry_after_s=2)

    # --- the infer path -----------------------------------------------------------------------------------------

    async def infer(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer POST /v2/models/{name}/infer."""
        model = self.served(name)
        body = await read_body(scope, receive, self._max_body_bytes)
        length = header(scope, b"inference-header-content-length")
        if length is not None and not length.isdigit():
            raise HttpError(
                400, f"Inference-Header-Content-Length is {length.decode('latin-1')!r}. Give a number of bytes."
            )
        try:
            request = parse_infer(body, None if length is None else int(length), model.inputs)
            check_outputs(request.outputs, model.outputs)
            slo_ms = self._slo(scope, request.slo_ms)
        except BadRequestError as error:
            raise HttpError(400, str(error)) from None
        request_id = self._request_id(scope, request.id)
        answers = await self._submit(name, request.parts, slo_ms, request_id)
        self._raise_unless_ok(answers, request_id)
        parameters, headers = _split(answers, request_id)
        answered_at = time.monotonic()
        payload, json_length = encode_response(name, request, [a.outputs for a in answers], parameters, model.labels)
        if json_length is None:
            headers.append((b"content-type", b"application/json"))
        else:
            headers.append((b"content-type", b"application/octet-stream"))
            headers.append((b"inference-header-content-length", b"%d" % json_length))
        await send_response(send, 200, payload, headers)
        self.front.record_answer((time.monotonic() - answered_at) * 1000.0)

    async def predict(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer POST /predict/{name} with a raw image or text body."""
        model = self.served(name)
        body = await read_body(scope, receive, self._max_body_bytes)
        try:
            slo_ms = self._slo(scope, None)
            # Decoding and resizing is real work: off the loop, where it would delay every timer.
            parts = await asyncio.get_running_loop().run_in_executor(None, model.preprocess, body)
        except (BadRequestError, InvalidInputError) as error:
            raise HttpError(400, str(error)) from None
        request_id = self._request_id(scope, "")
        answers = await self._submit(name, [parts], slo_ms, request_id)
        self._raise_unless_ok(answers, request_id)
        parameters, headers = _split(answers, request_id)
        document = {"model_name": name, "predictions": model.postprocess(answers[0].outputs), "parameters": parameters}
        await send_json(send, 200, document, headers)

    async def _submit(self, name: str, parts: list[Any], slo_ms: float | None, request_id: str) -> list[Answer]:
        """Wait for every sample; a client that goes away cancels this coroutine, which frees their places."""
        submit = self.front.submit
        if len(parts) == 1:
            return [await submit(name, parts[0], slo_ms, request_id)]
        futures = [submit(name, sample, slo_ms, request_id) for sample in parts]
        try:
            return await asyncio.gather(*futures)
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise

    @staticmethod
    def _slo(scope: Scope, from_body: float | None) -> float | None:
        raw = header(scope, b"x-slo-ms")
        return from_body if raw is None else parse_slo(raw.decode("latin-1"), "header X-SLO-Ms")

    def _request_id(self, scope: Scope, from_body: str) -> str:
        """Return the client's id of a request: the protocol's `id`, else header X-Request-Id, else one made here.

        It goes into headers and logs, so that what is not printable ASCII is percent-encoded, and 128 characters kept.
        """
        raw = from_body or (header(scope, b"x-request-id") or b"").decode("latin-1")
        if not raw:
            return f"{self._id_prefix}-{next(self._request_numbers)}"
        return raw[:128] if raw.isascii() and raw.isprintable() else quote(raw, safe=_PRINTABLE)[:128]

    @staticmethod
    def _raise_unless_ok(answers: list[Answer], request_id: str) -> None:
        for answer in answers:
            if answer.outcome is not Outcome.OK:
                _, headers = _split([answer], request_id)
                raise HttpError(
                    answer.outcome.http_status,
                    answer.reason,
                    retry_after_s=answer.retry_after_s,
                    headers=headers,
                    details={"outcome": answer.outcome.word},
                )


def _split(answers: list[Answer], request_id: str) -> tuple[dict[str, Any], list[tuple[bytes, bytes]]]:
    """Return the times of a request as response parameters and as headers; of several samples, those of the slowest."""
    answer = max(answers, key=lambda a: a.queue_ms + a.execution_ms) if len(answers) > 1 else answers[0]
    parameters = {
        "queue_ms": round(answer.queue_ms, 3),
        "batching_ms": round(answer.batching_ms, 3),
        "execution_ms": round(answer.execution_ms, 3),
        "batch_size": answer.batch_size,
        "gpulet": answer.gpulet,
        "emulated": answer.emulated,
    }
    headers = [
        (b"x-tenuto-queue-ms", b"%.3f" % answer.queue_ms),
        (b"x-tenuto-batching-ms", b"%.3f" % answer.batching_ms),
        (b"x-tenuto-execution-ms", b"%.3f" % answer.execution_ms),
        (b"x-tenuto-batch-size", b"%d" % answer.batch_size),
        (b"x-tenuto-gpulet", answer.gpulet.encode()),
        (b"x-tenuto-request-id", request_id.encode()),
    ]
    if not math.isnan(answer.start_ms):
        headers.append((b"x-tenuto-start-ms", b"%.3f" % answer.start_ms))
    return parameters, headers


def make_app(gateway: Gateway) -> FastAPI:
    """Return the application: the two hot paths as plain ASGI, the rest as FastAPI routes."""

    class App(FastAPI):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["method"] == "POST":
                target = _hot_path(scope["path"][len(scope.get("root_path", "")) :])
                if target is not None:
                    action, name = target
                    try:
                        await (gateway.infer if action == "infer" else gateway.predict)(name, scope, receive, send)
                    except HttpError as error:
                        with contextlib.suppress(ConnectionError):
                            await send_error(send, error)
                    except Exception as error:
                        logger.exception("a request for '%s' failed", name)
                        await send_error(send, HttpError(500, f"internal error: {type(error).__name__}: {error}"))
                    return
            await super().__call__(scope, receive, send)

    app = App(title="Tenuto", version=__version__, description="Multi-model inference with latency SLOs.")
    add_routes(app, gateway)
    return app


def _hot_path(path: str) -> tuple[str, str] | None:
    """Return (infer|predict, model) for the two paths that carry load."""
    parts = path.split("/")
    if len(parts) == 5 and parts[1] == "v2" and parts[2] == "models" and parts[4] == "infer":
        return "infer", unquote(parts[3])
    if len(parts) == 7 and parts[1] == "v2" and parts[4] == "versions" and parts[6] == "infer":
        return "infer", unquote(parts[3])
    if len(parts) == 3 and parts[1] == "predict":
        return "predict", unquote(parts[2])
    return None


def build(args: dict[str, Any]) -> Any:
    """Return the entry's Serve application; named as `import_path` in the generated Serve config."""
    from ray import serve

    return serve.deployment(name="gateway")(serve.ingress()(Gateway)).bind(args)
