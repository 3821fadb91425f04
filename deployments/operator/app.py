"""What operators ask of a running server, on a port of its own: the live page, status, last requests, metrics.

Nothing here belongs before clients: it names other clients' requests, and what the machine is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import orjson
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tenuto import __version__
from tenuto.deployments.operator.exposition import CONTENT_TYPE, render_metrics
from tenuto.deployments.operator.live import LiveView
from tenuto.deployments.operator.page import live_page

_MOST_REQUESTS = 4096


class Watched(Protocol):
    """The server that operators watch."""

    def missing(self) -> list[str]:
        """Return the gpu-lets that cannot be used yet."""

    async def status(self) -> Mapping[str, Any]:
        """Return the plan, the gpu-lets and the counts; raises `TimeoutError` where a dispatcher does not answer."""

    async def queue(self) -> Mapping[str, int]:
        """Return how many requests of each model wait for a batch; raises as `status` does."""

    async def requests(self, id: str | None, limit: int) -> list[dict[str, Any]]:
        """Return the last requests that ended, newest first; with an id, those of it; raises as `status` does."""


def make_operator_app(watched: Watched) -> FastAPI:
    """Return the operators' application."""
    app = FastAPI(
        title="Tenuto for operators", version=__version__, description="What runs against what was planned.",
        redirect_slashes=False,
    )  # fmt: skip

    add_error_answers(app, "this port")

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        return JSONResponse({"error": f"invalid request: {problems}"}, 400)

    @app.get("/v2/health/live", tags=["health"], summary="Whether the process answers")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/v2/health/ready", tags=["health"], summary="Whether every gpu-let of the plan is connected")
    async def ready() -> JSONResponse:
        missing = watched.missing()
        if not missing:
            return JSONResponse({"ready": True})
        return JSONResponse({"ready": False, "error": f"gpu-lets not connected yet: {', '.join(missing)}"}, 503)

    add_operator_routes(app, watched)
    return app


def add_error_answers(app: FastAPI, here: str) -> None:
    """Say as `{"error": …}` that a dispatcher does not answer, and that nothing is known by a path; `here` is what
    /docs describes."""

    @app.exception_handler(TimeoutError)
    async def _timeout(_request: Request, error: TimeoutError) -> JSONResponse:
        text = f"a dispatcher does not answer ({error or 'in time'}). Retry in a few seconds."
        return JSONResponse({"error": text}, 503, {"retry-after": "2"})

    @app.exception_handler(HTTPException)
    async def _not_found(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail}. See /docs for what {here} answers."
        return JSONResponse({"error": text}, error.status_code, getattr(error, "headers", None))


def add_operator_routes(app: FastAPI, watched: Watched) -> None:
    """Add the routes to an application."""
    view = LiveView(watched.status)

    @app.get("/", tags=["page"], summary="The live page", response_class=Response)
    async def page() -> Response:
        found = live_page()
        headers = {
            "content-security-policy": found.policy, "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer", "cache-control": "no-store",
        }  # fmt: skip
        return Response(found.html, media_type="text/html; charset=utf-8", headers=headers)

    @app.get("/live", tags=["page"], summary="What the live page shows: status, figures of ten seconds, two minutes")
    async def live() -> Response:
        return _json(await view.look())

    @app.get("/status", tags=["status"], summary="The plan, what each gpu-let really got, and counts per model")
    async def status() -> Response:
        return _json(await watched.status())

    @app.get("/status/queue", tags=["status"], summary="Requests that wait for a batch, by model")
    async def queue() -> Response:
        return _json(await watched.queue())

    @app.get("/requests", tags=["status"], summary="The last requests that ended, newest first, with their times")
    async def requests(
        id: Annotated[str | None, Query(max_length=1024)] = None,
        limit: Annotated[int, Query(ge=1, le=_MOST_REQUESTS)] = 100,
    ) -> Response:
        return _json((await watched.requests(id, limit))[:limit])

    @app.get("/metrics", tags=["status"], summary="The figures of /status as Prometheus text")
    async def metrics() -> Response:
        # In a thread: fifty models make half a megabyte, and requests are not to wait for it.
        text = await asyncio.to_thread(render_metrics, await watched.status())
        return Response(text, media_type=CONTENT_TYPE)


def _json(data: Any) -> Response:
    """Return JSON without the library's walk through it, which takes ten times as long as writing it."""
    return Response(orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
