"""Reads the head of a request: where it leads, its deadline, its trace, and when a proxy in front took it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from tenuto.deployments.entry.http.exchange import (
    PRIORITY_HEADER,
    SLO_HEADERS,
    TPOT_HEADERS,
    TTFT_HEADERS,
    Exchange,
    Head,
    HttpError,
)
from tenuto.deployments.entry.protocols.oip_requests import OFFLINE, DescribedRequest, parse_slo
from tenuto.deployments.entry.service.planned_model import PlannedModel
from tenuto.deployments.security.keys import Caller

# What answers a request; the last argument is what a request over gRPC asks for, whose body is then its tensors.
Handler = Callable[["Exchange", "Route", "DescribedRequest | None"], None]


class Route(NamedTuple):
    """Where a head leads, and what its headers say; `problem` if they are wrong.

    `slo_ms`: the time allowed; `ttft_ms` and `tpot_ms`: that for the first token, and for each further one.
    `caller`: who asks, if clients have keys. `began_s`: when a proxy in front took the request, in Unix time. `call`
    makes the request's call. `split`: the versions among which a random number below 1 decides, each with its upper
    bound; the bound of the last one is infinity. `shadows`: the versions that get copies, likewise. `action`: what is
    asked for. `offline`: a header says that it may cost no other request its deadline, or its client's key does.
    """

    handle: Handler
    model: PlannedModel | None = None
    slo_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    json_length: int | None = None
    encoding: bytes | None = None
    client_id: str = ""
    problem: HttpError | None = None
    caller: Caller | None = None
    began_s: float | None = None
    traceparent: bytes | None = None
    call: Any = None
    split: tuple[tuple[float, Route], ...] = ()
    shadows: tuple[tuple[float, str], ...] = ()
    action: str = ""
    offline: bool = False


_OPENAI = {
    b"/v1/completions": "completions",
    b"/v1/chat/completions": "chat",
    b"/v1/embeddings": "embeddings",
    b"/v1/rerank": "rerank",
    b"/v2/rerank": "rerank",  # where Cohere's clients ask
    b"/v1/score": "score",
}
OPENAI_ACTIONS = frozenset(_OPENAI.values())  # whose model only the body names
_OF_MODELS = ("infer", "generate", "generate_stream")


def load_path(url: bytes) -> tuple[str, str, str]:
    """Return (action, model, version) for the paths that carry load: the action is `infer`, `predict`, one of
    `generate` and `generate_stream`, or one of `OPENAI_ACTIONS`. The version is "" if it is not named, as the model is
    if only the body names it. For other paths all three are ""."""
    found = _OPENAI.get(url.partition(b"?")[0])
    if found is not None:
        return found, "", ""
    parts = url.partition(b"?")[0].decode("latin-1").split("/")
    if len(parts) in (5, 7) and parts[1:3] == ["v2", "models"] and parts[-1] in _OF_MODELS:
        action, model, version = parts[-1], parts[3], parts[4:-1]
    elif len(parts) in (3, 5) and parts[1] == "predict":
        action, model, version = "predict", parts[2], parts[3:]
    else:
        return "", "", ""
    if version and (version[0] != "versions" or not version[1]):
        return "", "", ""
    return action, unquote(model), unquote(version[1]) if version else ""


def named_model(url: bytes) -> str:
    """Return the model that a path names, whatever is asked of it; empty if it names none, or all of them.

    The path is read as the application reads it, which decodes all of it first.
    """
    parts = unquote(url.partition(b"?")[0].decode("latin-1")).split("/")
    if len(parts) > 3 and parts[1:3] == ["v1", "models"]:
        return "/".join(parts[3:])
    names_one = len(parts) > 3 and parts[1:3] == ["v2", "models"] and parts[3:] != ["stats"]
    return parts[3] if names_one else ""


def route_to(handle: Handler, model: PlannedModel | None, head: Head) -> Route:
    """Return the route of a head that carries load, with what its headers say. `model`: None if only the body names it.

    Raises:
        HttpError: 400 for a deadline that is no number, or no time for a token.
    """
    headers = head.headers
    tpot_ms = _slo_of(headers, TPOT_HEADERS)
    if tpot_ms is not None and tpot_ms <= 0:
        raise HttpError(400, f"header {TPOT_HEADERS[0].decode()} is {tpot_ms:g}. Give a number above 0, in ms.")
    encoding = headers.get(b"content-encoding", b"").strip().lower()  # names without case (RFC 9110, 8.4.1)
    return Route(
        handle,
        model,
        _slo_of(headers, SLO_HEADERS),
        _slo_of(headers, TTFT_HEADERS),
        tpot_ms,
        encoding=None if encoding in (b"", b"identity") else encoding,
        client_id=headers.get(b"x-request-id", b"").decode("latin-1"),
        began_s=None if model is None else _began_s(headers),
        traceparent=headers.get(b"traceparent"),
        offline=_is_offline(headers),
    )


def allowed_ms(
    exchange: Exchange, route: Route, model: PlannedModel, *, offline: bool, named_ms: float | None = None
) -> float:
    """Return the time allowed from arrival to the answer, or to the first token of what generates or streams.

    It is what the client's headers say, else its body (`named_ms`), else the SLO, which what is offline has only where
    its model is; and never more than the client waits.
    """
    is_written = route.ttft_ms is not None and model.ttft_ms < math.inf
    said_ms = route.ttft_ms if is_written else named_ms if route.slo_ms is None else route.slo_ms
    own_ms = math.inf if offline and not model.offline else min(model.slo_ms, model.ttft_ms)
    return min(own_ms if said_ms is None else said_ms, exchange.patience_ms)


def _is_offline(headers: Mapping[bytes, bytes]) -> bool:
    raw = headers.get(PRIORITY_HEADER)
    if raw not in (None, OFFLINE.encode()):
        raise HttpError(400, f"header {PRIORITY_HEADER.decode()} can only be '{OFFLINE}'. Leave it out.")
    return raw is not None


def _slo_of(headers: Mapping[bytes, bytes], names: Sequence[bytes]) -> float | None:
    """Return the time that the first of these headers gives; raises `HttpError` 400 if it is no number."""
    for name in names:
        if (raw := headers.get(name)) is not None:
            return parse_slo(raw.decode("latin-1"), f"header {name.decode()}")
    return None


def _began_s(headers: Mapping[bytes, bytes]) -> float | None:
    """Return when a proxy in front took a request, in Unix time; None if it does not say so in a known form.

    X-Request-Start is written in seconds by nginx (`t=${msec}`), in ms by others, in µs by Apache (`t=%t`).
    """
    raw = headers.get(b"x-request-start")
    if raw is None:
        return None
    text = raw.removeprefix(b"t=")[:32]
    if not text.replace(b".", b"", 1).isdigit():
        return None
    began = float(text)
    return began / (1e6 if began > 1e14 else 1e3 if began > 1e11 else 1.0)  # format: of three servers
