"""The traffic between cells as a configuration of HAProxy, and as HTTPRoutes of the Gateway API.

A request goes by its model: the path says it, or the header `X-Tenuto-Model`, or on paths of OpenAI the body. The
proxies know cells and weights; whatever decides is in the step that they come from.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from tenuto.documents import dump_yaml
from tenuto.errors import Problem, raise_if_any
from tenuto.placement.fleet.traffic_spread import Shares

STEP_PATH = "/fleet/step"
MODEL_HEADER = "X-Tenuto-Model"
_HEAVIEST = 256  # format: the largest weight of a server in HAProxy
_CHECK_S = 1  # pace: between two checks of a cell, and for its answer
_FALLS = 2  # limit: checks in a row that fail before a cell counts as down
# Derived: after the loss of a cell that no longer says anything. HAProxy 2.8 took 3.3 to 4.0 s (2026-11-30), and 1.0 to
# 1.9 s where connections were refused, and then it sends requests elsewhere at once.
FOLLOWS_S = 2.0 * _FALLS * _CHECK_S
_PARTS = 10_000  # format: weights of an HTTPRoute sum to about this; it may be a million

_HAPROXY = """\
# Step {step}. Weights of traffic over cells; `models.map` beside this file says which backend has a model.
global
  default-path config

defaults
  mode http
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  timeout http-request 10s
  timeout queue 2s

frontend models
  bind {bind}
  http-request return status 200 content-type text/plain string "{step}" if {{ path {path} }}
  http-request set-var(txn.model) path,field(4,/) if {{ path_beg /v2/models/ }}
  http-request set-var(txn.model) path,field(3,/) if {{ path_beg /predict/ }}
  acl has_header req.hdr({header}) -m found
  acl openai path_beg /v1/
  http-request set-var(txn.model) req.hdr({header}) if openai has_header
  http-request wait-for-body time 1s if openai !has_header METH_POST
  http-request set-var(txn.model) req.body,json_query('$.model') if openai !has_header METH_POST
  http-request set-var(txn.backend) var(txn.model),field(1,:),map_str(models.map)
  use_backend %[var(txn.backend)] if {{ var(txn.backend) -m found }}
  default_backend any

# One check for each cell; the servers of all backends follow it.
backend cells
  option httpchk GET /v2/health/ready
  default-server check inter {check_s}s fall {falls} rise 2
{cells}
"""
# A request is sent again only where none was executed: there was no connection, or the cell refused it as not ready.
_BACKEND = """
backend {name}
  balance roundrobin
  option redispatch 1
  option http-buffer-request
  retries 3
  retry-on conn-failure 503
{servers}
"""


def weights_of(shares: Mapping[str, float], most: int) -> dict[str, int]:
    """Return whole weights of which the largest is `most`, and none is 0 that has a share."""
    largest = max(shares.values(), default=0.0)
    return {cell: max(1, round(most * share / largest)) for cell, share in shares.items() if share > 0.0}


def haproxy_files(traffic: Shares, urls: Mapping[str, str], step: str, bind: str) -> dict[str, str]:
    """Return `haproxy.cfg` and `models.map`. Models with the same weights share a backend. A cell without traffic of a
    model is not among its servers, so that connections to it end by themselves.

    Raises:
        InvalidInputError: a cell has no URL.
    """
    _check_urls(traffic, urls)
    names: dict[tuple[tuple[str, int], ...], str] = {}
    lines, total = [], defaultdict[str, float](float)
    for model, shares in traffic.items():
        if shares:
            key = tuple(sorted(weights_of(shares, _HEAVIEST).items()))
            lines.append(f"{model} {names.setdefault(key, f'b{len(names)}')}")
        for cell, share in shares.items():
            total[cell] += share
    every = tuple(sorted(weights_of(total, _HEAVIEST).items()))
    text = _HAPROXY.format(
        step=step,
        bind=bind,
        path=STEP_PATH,
        header=MODEL_HEADER.lower(),
        check_s=_CHECK_S,
        falls=_FALLS,
        cells="\n".join(f"  server {cell} {_server(urls[cell])}" for cell in sorted(urls)),
    )
    for key, name in [*names.items(), (every, "any")]:
        servers = (f"  server {cell} {_server(urls[cell])} weight {weight} track cells/{cell}" for cell, weight in key)
        text += _BACKEND.format(name=name, servers="\n".join(servers))
    return {"haproxy.cfg": text, "models.map": "".join(f"{line}\n" for line in lines)}


def _server(url: str) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}:{_port(url)}" + (" ssl verify required ca-file @system-ca" if parts.scheme == "https" else "")


def http_routes(traffic: Shares, urls: Mapping[str, str], step: str, gateway: str) -> str:
    """Return an HTTPRoute for each model, behind a Gateway of this name. A cell is a Service with the cell's name.

    Raises:
        InvalidInputError: a cell has no URL, whose port its Service has.
    """
    _check_urls(traffic, urls)
    routes = (_route(model, shares, urls, step, gateway) for model, shares in traffic.items() if shares)
    return "---\n".join(dump_yaml(route, is_part=True) for route in routes)


def _route(model: str, shares: Mapping[str, float], urls: Mapping[str, str], step: str, gateway: str) -> dict[str, Any]:
    prefixes = (f"/v2/models/{model}", f"/predict/{model}")
    matches: list[dict[str, Any]] = [{"path": {"type": "PathPrefix", "value": path}} for path in prefixes]
    header = [{"type": "Exact", "name": MODEL_HEADER, "value": model}]
    matches.append({"path": {"type": "PathPrefix", "value": "/v1"}, "headers": header})
    weights = weights_of(shares, _PARTS)
    backends = [{"name": _label(cell), "port": _port(urls[cell]), "weight": weight} for cell, weight in weights.items()]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": f"tenuto-{_label(model)}", "annotations": {"tenuto/step": step}},
        "spec": {"parentRefs": [{"name": gateway}], "rules": [{"matches": matches, "backendRefs": backends}]},
    }


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def _label(name: str) -> str:
    """Return a name as Kubernetes allows it (RFC 1123), with what tells it from others where something was changed."""
    label = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:40]
    return label if label == name else f"{label}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _check_urls(traffic: Shares, urls: Mapping[str, str]) -> None:
    cells: Iterable[str] = sorted({cell for shares in traffic.values() for cell in shares} - urls.keys())
    cure = "Give it in the fleet file, such as http://10.0.0.1:8000."
    raise_if_any(Problem(f"cells.{cell}.url", None, "is missing, and proxies need it", cure) for cell in cells)
