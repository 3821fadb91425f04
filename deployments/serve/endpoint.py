"""Questions to a running endpoint over HTTP: its health, its models, its plan. They show the client's key if there is
one."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPResponse
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from tenuto.deployments.wire.status import SystemStatus
from tenuto.errors import EnvironmentFaultError, refused
from tenuto.placement.versions import path_of

T = TypeVar("T")
CLIENT_KEY = "TENUTO_API_KEY"
_MOST_BYTES = 64 << 20  # limit: of an answer
_PART_BYTES = 1 << 16  # limit: that are read at once
_READING = threading.Lock()  # msgspec crashes where two threads build the reader of one type, at its first use


def client_key() -> str:
    """Return the API key that this process shows as a client; empty if it has none.

    Raises:
        InvalidInputError: it has characters that no header may have.
    """
    key = os.environ.get(CLIENT_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise refused(CLIENT_KEY, None, "has characters that no key has", "Copy the key again.")
    return key


def get_json(url: str, timeout_s: float = 5.0) -> Any:  # limit: for the answer
    """Return the JSON document at a URL, also for an error status.

    Raises:
        InvalidInputError: it is no URL.
        EnvironmentFaultError: nobody answers there, or the answer is not JSON.
    """
    status, body = _get(url, timeout_s)
    try:
        return json.loads(body)
    except ValueError as error:
        raise EnvironmentFaultError(f"{url} answered {status} without JSON. Is this a Tenuto server?") from error


def get_told(url: str, kind: type[T], timeout_s: float = 5.0) -> T:  # limit: for the answer
    """Return the document of a Tenuto server at a URL, read as type `kind`.

    Raises:
        InvalidInputError: it is no URL.
        EnvironmentFaultError: nobody answers there, or the answer is another document.
    """
    status, body = _get(url, timeout_s)
    try:
        with _READING:
            if status < 400:
                return msgspec.json.decode(body, type=kind)
            reason = msgspec.json.decode(body, type=_Refusal).error
    except msgspec.MsgspecError:
        reason = "not a Tenuto server"
    raise EnvironmentFaultError(f"{url}: {reason}")


class _Refusal(msgspec.Struct):
    error: str


def _get(url: str, timeout_s: float, sent: bytes | None = None) -> tuple[int, bytes]:
    if not url.startswith(("http://", "https://")):
        raise refused("URL", url, "is not the address of a server", "Write for example http://127.0.0.1:8000.")
    key = client_key()
    request = urllib.request.Request(url, sent, {"Authorization": f"Bearer {key}"} if key else {})
    try:
        with open_directly(request, timeout_s) as response:
            return response.status, _read_body(response, timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _read_body(error, timeout_s)
    except (OSError, ValueError) as error:
        proxy = urllib.request.getproxies().get(request.type)
        unused = f" A server is asked directly, and not through the proxy {proxy}." if proxy else ""
        raise EnvironmentFaultError(
            f"{url} does not answer ({error}).{unused} Start the server with `tenuto serve PLAN`."
        ) from error


def _read_body(response: HTTPResponse | urllib.error.HTTPError, within_s: float) -> bytes:
    """Return a body, which nobody may make endless: neither long nor slow."""
    body, ends_s = bytearray(), time.monotonic() + within_s
    while part := response.read1(_PART_BYTES):
        body += part
        if len(body) > _MOST_BYTES or time.monotonic() > ends_s:
            raise ValueError(f"its answer is over {_MOST_BYTES >> 20} MiB, or takes over {within_s:g} s")
    return bytes(body)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any, **_named: Any) -> None:
        """Follow none: a deployment sends none, and the key would go along."""


def open_directly(request: urllib.request.Request, timeout_s: float) -> Any:
    """Open a URL of a deployment, whatever proxy the environment names: the key and the answer are no proxy's business,
    nor that of another server.

    Raises:
        OSError: nobody answers there, or with an error status or a redirect (`urllib.error.HTTPError`).
    """
    direct = urllib.request.ProxyHandler({})
    return urllib.request.build_opener(direct, _NoRedirects).open(request, timeout=timeout_s)


def model_metadata(url: str, model: str) -> dict[str, Any]:
    """Return the Open Inference Protocol metadata of a model, or of NAME:VERSION, or the endpoint's `{"error": …}`."""
    metadata: dict[str, Any] = get_json(f"{url.rstrip('/')}/v2/models/{path_of(quote(model, safe=':'))}")
    return metadata


def generating_model(url: str, model: str) -> dict[str, Any]:
    """Return what GET /v1/models says of a model that generates, or the endpoint's `{"error": …}`."""
    model_data: dict[str, Any] = get_json(f"{url.rstrip('/')}/v1/models/{quote(model, safe='')}")
    return model_data


def why_unread(url: str, model: str, body: bytes, timeout_s: float = 30.0) -> str | None:  # limit: for the answer
    """Ask a model, or NAME:VERSION, with a raw body; return why such a body is refused, whenever it is sent, or None.

    Raises:
        EnvironmentFaultError: nobody answers.
    """
    status, answer = _get(f"{url.rstrip('/')}/predict/{path_of(quote(model, safe=':'))}", timeout_s, body)
    if not 400 <= status < 500 or status in (408, 429):
        return None
    try:
        return msgspec.json.decode(answer, type=_Refusal).error
    except msgspec.MsgspecError:
        return f"HTTP {status}"


def served_plan(url: str) -> dict[str, Any]:
    """Return the plan a Tenuto endpoint serves, as plain data.

    Raises:
        EnvironmentFaultError: the endpoint is not Tenuto, or has no plan.
    """
    plan = get_told(f"{url.rstrip('/')}/status", SystemStatus).plan
    if plan is None:
        raise EnvironmentFaultError(f"{url}/status carries no plan. Give the plan file instead of the address.")
    return plan
