"""Questions to a running endpoint over HTTP: its health, its models, its plan. They show the client's key if there is
one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from tenuto.deployments.wire.status import SystemStatus
from tenuto.errors import EnvironmentFaultError, first_line, printable, refused
from tenuto.placement.versions import path_of

T = TypeVar("T")
CLIENT_KEY = "TENUTO_API_KEY"
_MOST_BYTES = 64 << 20  # limit: of an answer
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
    except (ValueError, RecursionError) as error:
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
            reason = printable(msgspec.json.decode(body, type=_Refusal).error)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        reason = "not a Tenuto server"
    raise EnvironmentFaultError(f"{url}: {reason}")


class _Refusal(msgspec.Struct):
    error: str


def _get(url: str, timeout_s: float, sent: bytes | None = None) -> tuple[int, bytes]:
    key = client_key()
    return ask_directly(url, timeout_s, sent, {"Authorization": f"Bearer {key}"} if key else {})


def ask_directly(
    url: str, timeout_s: float, sent: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Return status and body of a server's answer, whatever proxy the environment names, and without following a
    redirect: the key and the answer are the business of no other server.

    Args:
        url: of the server.
        timeout_s: for the whole answer, however little of it comes at a time.
        sent: the body of a POST; None: GET.
        headers: to send.

    Raises:
        InvalidInputError: it is no URL.
        EnvironmentFaultError: nobody answers there, or with anything but one answer of HTTP.
    """
    host, port, parts = "", None, urlsplit("")
    with contextlib.suppress(ValueError):  # a port, or an address of IPv6, that is none
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    if not host or parts.scheme not in ("http", "https"):
        raise refused("URL", url, "is not the address of a server", "Write for example http://127.0.0.1:8000.")
    connection = (HTTPSConnection if parts.scheme == "https" else HTTPConnection)(host, port, timeout=timeout_s)
    ends_at = time.monotonic() + timeout_s
    try:
        with contextlib.closing(connection):
            connection.connect()
            watch = threading.Timer(timeout_s, _shut, (connection.sock,))
            watch.daemon = True
            watch.start()
            try:
                target = f"{parts.path or '/'}{parts.query and f'?{parts.query}'}"
                connection.request("GET" if sent is None else "POST", target, sent, dict(headers or {}))
                with connection.getresponse() as response:
                    body = response.read(_MOST_BYTES + 1)
                    if response.length and len(body) <= _MOST_BYTES:
                        raise IncompleteRead(body, response.length)
            finally:
                watch.cancel()
        if len(body) > _MOST_BYTES or time.monotonic() >= ends_at:
            raise ValueError
        return response.status, body
    except (OSError, ValueError, HTTPException) as error:
        reason = printable(first_line(error))
        if type(error) is ValueError or time.monotonic() >= ends_at:
            reason = f"its answer is over {_MOST_BYTES >> 20} MiB, or takes over {timeout_s:g} s"
        proxy = urllib.request.getproxies().get(parts.scheme)
        unused = f" A server is asked directly, and not through the proxy {proxy}." if proxy else ""
        raise EnvironmentFaultError(
            f"{url} does not answer ({reason}).{unused} Start the server with `tenuto serve PLAN`."
        ) from error


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def model_metadata(url: str, model: str) -> dict[str, Any]:
    """Return the Open Inference Protocol metadata of a model, or of NAME:VERSION, or the endpoint's `{"error": …}`."""
    return _mapping(f"{url.rstrip('/')}/v2/models/{path_of(quote(model, safe=':'))}")


def generating_model(url: str, model: str) -> dict[str, Any]:
    """Return what GET /v1/models says of a model that generates, or the endpoint's `{"error": …}`."""
    return _mapping(f"{url.rstrip('/')}/v1/models/{quote(model, safe='')}")


def _mapping(url: str) -> dict[str, Any]:
    answer = get_json(url)
    if not isinstance(answer, dict):
        raise EnvironmentFaultError(f"{url} answers with something else than a model. Is this an inference server?")
    return answer


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
