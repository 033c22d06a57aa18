"""The web application: both APIs, the pages for operators, and the form of every error."""

import functools
import json
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from gateway import batches_api, ollama_api, openai_api
from gateway.gateway import Gateway
from gateway.guard import Guard
from gateway.reference import page
from gateway.refusal import ApiError, of_error, of_unread, of_validation
from messages.errors import KvasirError

_NOTHING_FROM_ELSEWHERE = "default-src 'none'; style-src 'unsafe-inline'"
_for_operators = APIRouter(tags=["operators"])


def make_app(gateway: Gateway) -> FastAPI:
    """The application of a gateway."""
    # The routes are copied out of their routers because FastAPI matches an included router's routes twice per request.
    routes = [
        route
        for router in (openai_api.router, batches_api.router, ollama_api.router, _for_operators)
        for route in router.routes
    ]
    app = FastAPI(
        title="Kvasir",
        description="This gateway offers Kvasir's models through the APIs of OpenAI and Ollama.",
        openapi_url=None,
        redoc_url=None,
        routes=routes,
        exception_handlers={
            KvasirError: _on_error,
            RequestValidationError: _on_bad_body,
            HTTPException: _on_http_error,
            UnicodeEncodeError: _on_half_a_character,
            Exception: _on_bug,
        },
        middleware=[Middleware(Guard, gateway=gateway)],
    )
    app.state.gateway = gateway
    app.state.descriptions = functools.cache(lambda: _descriptions(app))
    return app


@_for_operators.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def _hello() -> Response:
    return PlainTextResponse("Kvasir is running")


@_for_operators.get("/docs", include_in_schema=False)
@_for_operators.api_route("/openapi.json", methods=["GET", "HEAD"], include_in_schema=False)
async def _describe(request: Request) -> Response:
    return cast(Response, request.app.state.descriptions()[request.url.path])


def _descriptions(app: FastAPI) -> dict[str, Response]:
    """Build the OpenAPI descriptions of both APIs, as a page and as JSON.

    They are built once: clients without a key may ask for them often.
    """
    return {
        "/docs": HTMLResponse(page(app.openapi()), headers={"Content-Security-Policy": _NOTHING_FROM_ELSEWHERE}),
        "/openapi.json": JSONResponse(app.openapi()),
    }


@_for_operators.get("/health")
async def _health() -> dict[str, Any]:
    """Answer 200 as long as the process lives."""
    return {"status": "ok"}


@_for_operators.get("/ready")
async def _ready(request: Request) -> Response:
    """Answer 200 if a request could be answered now, else 503 with the reasons."""
    reasons = await request.app.state.gateway.why_not_ready()
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@_for_operators.get("/metrics")
async def _metrics(request: Request) -> Response:
    """Return the metrics in Prometheus text format. They name only the models that the key may use."""
    figures = request.app.state.gateway.figures
    return Response(figures.as_text(request.state.key), media_type=CONTENT_TYPE_LATEST)


async def _on_error(request: Request, error: KvasirError) -> Response:
    return of_error(error).response(request.url.path)


async def _on_bad_body(request: Request, error: RequestValidationError) -> Response:
    if isinstance(error.__cause__, json.JSONDecodeError):
        return of_unread(error.__cause__).response(request.url.path)
    request_parts = {"body": error.body, "query": request.query_params, "header": request.headers}
    return of_validation(error.errors(), request_parts).response(request.url.path)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    if isinstance(error.__cause__, KvasirError):
        return await _on_error(request, error.__cause__)
    # FastAPI recognizes only JSONDecodeError as invalid JSON. Nesting that is too deep, for example, raises another
    # error.
    if isinstance(error.__cause__, ValueError | RecursionError):
        return of_unread(error.__cause__).response(path)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"{request.method} {path:.120} is not served; docs/reference/api.md lists what is"
    if error.status_code == 405:
        message = f"{request.method} is not served for {path:.120}"
    return ApiError(error.status_code, message, code="unknown_url" if error.status_code == 404 else None).response(path)


async def _on_half_a_character(request: Request, _error: UnicodeEncodeError) -> Response:
    return ApiError(400, "the text holds half a character (a lone surrogate)", code="invalid_value").response(
        request.url.path
    )


async def _on_bug(request: Request, _error: Exception) -> Response:
    return ApiError(500, "an error of the gateway's own; its log says more").response(request.url.path)
