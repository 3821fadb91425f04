"""The routes for operators of a running server, on a port of their own: the live page, status, last requests, metrics.

Clients must not see these: they name other clients' requests, and details of the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tenuto import __version__
from tenuto.deployments.operator.exposition import CONTENT_TYPE, render_metrics
from tenuto.deployments.operator.live_view import LiveView
from tenuto.deployments.operator.web_pages import add_docs, live_page
from tenuto.deployments.security.cross_site import refusal_reason
from tenuto.deployments.wire.status import EndedRequest, SystemStatus

STARTING_S = 2  # pace: when to ask again for what starts
_MOST_REQUESTS = 4096  # limit: requests of the log in one answer


class Watched(Protocol):
    """The server that operators watch."""

    def missing(self) -> list[str]:
        """Return the gpu-lets that cannot be used yet."""

    async def status(self) -> SystemStatus:
        """Return the plan, the gpu-lets and the counts; raises `TimeoutError` if a dispatcher does not answer."""

    async def waiting(self) -> dict[str, int]:
        """Return how many requests of each model wait for a batch; raises as `status` does."""

    async def ended(self, id: str | None, limit: int) -> list[EndedRequest]:
        """Return the last requests that ended, newest first; with an id, only those with it; raises as `status`
        does."""


def make_operator_app(watched: Watched, is_local: Callable[[], bool] = lambda: True) -> FastAPI:
    """Return the operators' application. `is_local`: see `add_operator_routes`."""
    app = make_api("Tenuto for operators", "What runs against what was planned.", _complete)
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
        reason = f"gpu-lets not connected yet: {', '.join(missing)}"
        return JSONResponse({"ready": False, "error": reason}, 503, {"retry-after": str(STARTING_S)})

    add_operator_routes(app, watched, is_local)
    return app


def make_api(title: str, description: str, complete: Callable[[dict[str, Any]], None]) -> FastAPI:
    """Return an application that has /docs and no other route.

    Args:
        title: its name in its OpenAPI document.
        description: what it is for.
        complete: adds to the OpenAPI document what FastAPI does not know; called once.
    """
    app = FastAPI(
        title=title,
        version=__version__,
        description=description,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        servers=[{"url": "/", "description": "This server."}],
        responses={"4XX": {"description": "Refused: `error` says why."}},
        redirect_slashes=False,  # only the client knows the name by which it reached this server
        docs_url=None,
        redoc_url=None,
    )
    add_docs(app)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            complete(FastAPI.openapi(app))
        assert app.openapi_schema is not None  # FastAPI keeps what it makes
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _complete(document: dict[str, Any]) -> None:
    document["security"] = []  # operators need no key


def plain_error(_path: str, text: str) -> dict[str, Any]:
    """Return an error as Triton writes it."""
    return {"error": text}


def add_error_answers(app: FastAPI, here: str, written: Callable[[str, str], dict[str, Any]] = plain_error) -> None:
    """Answer when a dispatcher does not answer, and for unknown paths.

    Args:
        app: the application.
        here: names what /docs describes.
        written: returns an error as the interface of a path writes it.
    """

    @app.exception_handler(TimeoutError)
    async def _timeout(request: Request, error: TimeoutError) -> JSONResponse:
        text = f"a dispatcher does not answer ({error or 'in time'}). Retry in a few seconds."
        return JSONResponse(written(request.url.path, text), 503, {"retry-after": str(STARTING_S)})

    @app.exception_handler(HTTPException)
    async def _not_found(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail}. See /docs for what {here} answers."
        return JSONResponse(written(request.url.path, text), error.status_code, getattr(error, "headers", None))


def add_operator_routes(app: FastAPI, watched: Watched, is_local: Callable[[], bool] = lambda: True) -> None:
    """Add the routes to an application. `is_local`: whether only this machine reaches them. Then requests that name
    another host, or come from another site's page, are refused with 403."""
    view = LiveView(watched.status)

    async def refuse_foreign(request: Request) -> None:
        reason = refusal_reason(request.headers) if is_local() else None
        if reason is not None:
            raise HTTPException(403, reason)

    router = APIRouter(dependencies=[Depends(refuse_foreign)])

    @router.get("/", tags=["page"], summary="The live page", response_class=Response)
    async def page() -> Response:
        page_files = live_page()
        headers = {
            "content-security-policy": page_files.policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-store",
        }
        return Response(page_files.html, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/live", tags=["page"], summary="What the live page shows: status, figures of ten seconds, two minutes")
    async def live() -> Response:
        return _json(await view.look())

    @router.get("/status", tags=["status"], summary="The plan, what each gpu-let really got, and counts per model")
    async def status() -> Response:
        return _json(await watched.status())

    @router.get("/status/queue", tags=["status"], summary="Requests that wait for a batch, by model")
    async def queue() -> Response:
        return _json(await watched.waiting())

    @router.get("/requests", tags=["status"], summary="The last requests that ended, newest first, with their times")
    async def requests(
        id: Annotated[str | None, Query(max_length=1024)] = None,
        limit: Annotated[int, Query(ge=1, le=_MOST_REQUESTS)] = 100,
    ) -> Response:
        return _json((await watched.ended(id, limit))[:limit])

    @router.get("/metrics", tags=["status"], summary="The figures of /status as Prometheus text")
    async def metrics() -> Response:
        # In a thread: fifty models make half a megabyte, and requests must not wait for that.
        text = await asyncio.to_thread(render_metrics, await watched.status())
        return Response(text, media_type=CONTENT_TYPE)

    app.include_router(router)


def _json(data: Any) -> Response:
    """Return JSON. FastAPI's own way would walk through the data first, which takes ten times as long as writing it."""
    return Response(msgspec.json.encode(data), media_type="application/json")
