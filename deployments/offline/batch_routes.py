"""OpenAI's interface to files and batches, for clients that a gateway has let through."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Annotated

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from pydantic import Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.http.relay import CLIENT_HEADER
from tenuto.deployments.entry.http.server import BODY_S
from tenuto.deployments.entry.service.routing import load_path
from tenuto.deployments.offline.batch_runner import BatchRunner
from tenuto.deployments.offline.batch_store import BatchStore, StoreError
from tenuto.documents import StrictModel

_FILES, _BATCHES = "/v1/files", "/v1/batches"
_ENDPOINTS = ("completions", "chat", "embeddings", "rerank", "score", "infer")
_NO_ENDPOINT = (
    "takes no batches. Give /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/rerank, /v1/score, or "
    "/v2/models/NAME/infer."
)
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}  # unit
_LONGEST_S = 30 * 86_400  # limit: of a completion window
_FORM_BYTES = 1 << 12  # limit: of a form beside its file
_BODY_BYTES = 1 << 16  # limit: of a batch, which gateways check, too, where the length is known
_AGAIN_S = 10.0  # pace: until a client asks again after the disk or the database refused
_NO_FORM = "send a form (multipart/form-data) with purpose=batch and a file, and nothing else."
_PAGE = 20  # default: entries of a list, as in OpenAI's interface
Limit = Annotated[int, Query(ge=1, le=100)]


class _StoredFile(FileResponse):
    """A file, or the part of it that header `range` names. Starlette refuses a wrong one in words of its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def checked(message: Message) -> None:
            if message.get("status", 200) >= 400:
                text = "header range must name bytes that the file has, such as bytes=0-1023. Leave it out for all."
                has = b"".join(b"%s: %s\r\n" % each for each in message["headers"] if each[0] == b"content-range")
                raise HttpError(message["status"], text, headers=has)
            await send(message)

        await super().__call__(scope, receive, checked)


class BatchBody(StrictModel):
    """What a batch is made of."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None


def make_batch_app(store: BatchStore, runner: BatchRunner) -> FastAPI:
    """Return the application that answers for a store."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(HttpError)
    @app.exception_handler(StoreError)
    @app.exception_handler(MultiPartException)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(OSError)
    @app.exception_handler(sqlite3.Error)
    @app.exception_handler(Exception)
    async def _refuse(_request: Request, error: Exception) -> Response:
        refusal = _refusal(error)
        lines = (line.split(": ", 1) for line in refusal.lines().decode().splitlines())
        return Response(refusal.payload(_FILES.encode()), refusal.status, dict(lines))

    @app.post(_FILES)
    async def upload(request: Request) -> Response:
        stream, request.state.sends = request.stream(), "expect" not in request.headers
        try:
            return await take_file(request, stream)
        except (StoreError, MultiPartException, OSError, sqlite3.Error):
            if request.state.sends:  # most clients read an answer when they have sent everything
                with suppress(TimeoutError, ClientDisconnect):
                    async with asyncio.timeout(BODY_S):
                        async for _ in stream:
                            pass
            raise

    async def take_file(request: Request, stream: AsyncGenerator[bytes, None]) -> Response:
        room = await runner.on_disk(store.room_bytes, _key(request))

        def check(size: int) -> None:
            if size > room + _FORM_BYTES:
                raise StoreError(413, f"a file may have {room >> 20} MiB now. Split it, or delete others.")

        async def bounded() -> AsyncGenerator[bytes, None]:
            came, request.state.sends = 0, True
            async for chunk in stream:
                came += len(chunk)
                check(came)
                yield chunk

        check(int(request.headers.get("content-length", 0)))
        if "content-type" not in request.headers:
            raise StoreError(400, _NO_FORM)
        parser = MultiPartParser(request.headers, bounded(), max_files=1, max_fields=1, max_part_size=_FORM_BYTES)
        form = await parser.parse()
        try:
            file = form.get("file")
            if form.get("purpose") != "batch" or not isinstance(file, UploadFile):
                raise StoreError(400, _NO_FORM)
            file_id = await asyncio.to_thread(store.copy_file, file.file)
            return _json(await runner.on_disk(store.add_file, _key(request), (file.filename or "")[:255], file_id))
        finally:
            await form.close()

    @app.delete(_FILES + "/{file_id}")
    async def delete(request: Request, file_id: str) -> Response:
        await runner.on_disk(store.delete_file, _key(request), file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})

    @app.get(_FILES + "/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        await runner.on_disk(store.document, _key(request), "file", file_id)
        return _StoredFile(store.path(file_id), media_type="application/jsonl")

    @app.post(_BATCHES)
    async def begin(request: Request) -> Response:
        body = BatchBody.model_validate_json(await _short_body(request))  # whatever type the client says it has
        if load_path(body.endpoint.encode())[0] not in _ENDPOINTS or "?" in body.endpoint:
            raise StoreError(400, f"endpoint {body.endpoint[:200]!r} {_NO_ENDPOINT}")
        window = _WINDOW.fullmatch(body.completion_window)
        window_s = int(window[1]) * _UNITS_S[window[2]] if window else 0
        if not 0 < window_s <= _LONGEST_S:
            raise StoreError(400, "completion_window must be a number with s, m, h or d, such as 24h; 30d at most.")
        terms = (body.input_file_id, body.endpoint, body.completion_window, window_s, body.metadata)
        return _json(await runner.on_disk(store.add_batch, _key(request), *terms))

    for path, kind in ((_FILES, "file"), (_BATCHES, "batch")):
        _show(app, path, kind, store, runner)

    @app.post(_BATCHES + "/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        return _json(await runner.on_disk(store.cancel, _key(request), batch_id))

    return app


def _show(app: FastAPI, path: str, kind: str, store: BatchStore, runner: BatchRunner) -> None:
    """Let clients list their files or batches, and see one."""

    @app.get(path)
    async def documents(request: Request, after: str | None = None, limit: Limit = _PAGE) -> Response:
        return _list(await runner.on_disk(store.documents, _key(request), kind, after, limit + 1), limit)

    @app.get(path + "/{document_id}")
    async def document(request: Request, document_id: str) -> Response:
        return _json(await runner.on_disk(store.document, _key(request), kind, document_id))


async def _short_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY_BYTES:
            raise StoreError(413, f"a batch may have {_BODY_BYTES >> 10} KiB. Its requests belong into a file.")
    return body


def _key(request: Request) -> str:
    return request.headers.get(CLIENT_HEADER, "")


def _refusal(error: Exception) -> HttpError:
    """Return what a client is told of an error."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, StoreError):
        return HttpError(error.status, error.message, retry_after_s=1.0 if error.status in (429, 503) else None)
    if isinstance(error, HTTPException):
        return HttpError(error.status_code, f"{error.detail}: there is no such request for files and batches.")
    if isinstance(error, RequestValidationError | ValidationError):
        return HttpError(400, "; ".join(f"{(each['loc'] or ['body'])[-1]}: {each['msg']}" for each in error.errors()))
    if isinstance(error, MultiPartException):
        return HttpError(400, f"the form is not well-formed: {error.message}")
    if not isinstance(error, OSError | sqlite3.Error):
        return HttpError(500, "the store of batches has failed. Its log says why.")
    status = 507 if isinstance(error, OSError) else 503
    reason = f"the store of batches cannot do this: {error}. Ask who runs this server."
    return HttpError(status, reason, retry_after_s=_AGAIN_S)


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


def _list(rows: list[tuple[str, msgspec.Raw]], limit: int) -> Response:
    shown = rows[:limit]
    ends = {"first_id": shown[0][0], "last_id": shown[-1][0]} if shown else {"first_id": None, "last_id": None}
    data = [document for _, document in shown]
    return _json({"object": "list", "data": data, **ends, "has_more": len(rows) > limit})
