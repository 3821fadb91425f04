"""The pages of a server: the live page for operators, and /docs of any application. They load nothing from other
sites."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from fastapi import FastAPI, Response

from tenuto.pages import templates


class Page(NamedTuple):
    """The page and the Content-Security-Policy that goes with it."""

    html: bytes
    policy: str


@cache
def live_page() -> Page:
    """Return the live page. Only its own script may run, so names that come from plans and clients stay text."""
    html = templates(__package__).get_template("live.html").render()
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.encode(), policy)


def add_docs(app: FastAPI) -> None:
    """Add /docs; FastAPI's own page loads scripts from another site, which fails without the internet."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(docs_page(app.openapi()), media_type="text/html; charset=utf-8", headers=headers)


def docs_page(schema: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    return templates(__package__).get_template("docs.html").render(schema)
