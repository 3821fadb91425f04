"""The page at /docs: an application's OpenAPI document as one HTML file without outside resources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Response

_STYLE = """
body { max-width: 900px; margin: 0 auto; padding: 16px; font: 15px/1.45 sans-serif; color-scheme: light dark; }
h2 { font-size: 16px; margin: 28px 0 4px; border-top: 1px solid #8886; padding-top: 12px; }
code, pre { font: 13px/1.4 ui-monospace, monospace; } pre { overflow-x: auto; background: #8882; padding: 8px; }
table { border-collapse: collapse; } td { padding: 1px 14px 1px 0; vertical-align: top; }
"""


def add_docs(app: FastAPI) -> None:
    """Add /docs; FastAPI's own page loads scripts from another site, which fails without the internet."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(docs_page(app.openapi()), media_type="text/html; charset=utf-8", headers=headers)


def docs_page(schema: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    routes = "".join(
        "".join(_route(method.upper(), path, about))
        for path, methods in schema["paths"].items()
        for method, about in methods.items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(schema['info'].get('description', ''))} "
        f'For programs: <a href="openapi.json">openapi.json</a>.</p>{routes}</html>'
    )


def _route(method: str, path: str, about: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method} {escape(path)}</code></h2><p>{escape(about.get('summary', ''))}</p>"
    rows = [
        (each["name"], each["in"], "required" if each.get("required") else "", each.get("description", ""))
        for each in about.get("parameters", ())
    ]
    rows += [(code, "answer", "", found.get("description", "")) for code, found in about.get("responses", {}).items()]
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    yield f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
    for kind, body in about.get("requestBody", {}).get("content", {}).items():
        shown = escape(json.dumps(body.get("schema", {}), indent=1))
        yield f"<p>body: <code>{escape(kind)}</code></p><pre>{shown}</pre>"
