"""The web application: both APIs, what operators ask, and the form of every error."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from gateway import batches_api, ollama_api, openai_api
from gateway.gateway import Gateway
from gateway.guard import Guard
from gateway.reference import page
from gateway.refusal import ApiError, of_error, of_unread, of_validation
from messages.errors import KvasirError

_NOTHING_FROM_ELSEWHERE = "default-src 'none'; style-src 'unsafe-inline'"


def make_app(gateway: Gateway) -> FastAPI:
    """The application of a gateway."""
    # Routes and not routers: an included router is compared with its own routes again at every request.
    routes = [route for api in (openai_api, batches_api, ollama_api) for route in api.router.routes]
    description = "OpenAI's and Ollama's APIs in front of Kvasir's queues."
    app = FastAPI(title="Kvasir", description=description, docs_url=None, redoc_url=None, routes=routes)
    app.state.gateway = gateway
    app.add_api_route("/", _hello, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/docs", _docs, include_in_schema=False)
    app.add_api_route("/health", _health, tags=["operators"])
    app.add_api_route("/ready", _ready, tags=["operators"])
    app.add_api_route("/metrics", _metrics, tags=["operators"])
    app.add_exception_handler(KvasirError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_bad_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(UnicodeEncodeError, _on_half_a_character)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(Guard, gateway=gateway)
    return app


async def _hello() -> Response:
    return PlainTextResponse("Kvasir is running")


async def _docs(request: Request) -> Response:
    return HTMLResponse(page(request.app.openapi()), headers={"Content-Security-Policy": _NOTHING_FROM_ELSEWHERE})


async def _health() -> dict[str, Any]:
    """200 as long as the process lives."""
    return {"status": "ok"}


async def _ready(request: Request) -> Response:
    """200 if a request could be answered now, else 503 with the reasons."""
    reasons = await request.app.state.gateway.why_not_ready()
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


async def _metrics(request: Request) -> Response:
    """Prometheus text format."""
    return Response(generate_latest(request.app.state.gateway.figures.registry), media_type=CONTENT_TYPE_LATEST)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvasirError)
    return of_error(error).response(request.url.path)


async def _on_bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.__cause__, json.JSONDecodeError):
        return of_unread(error.__cause__).response(request.url.path)
    request_parts = {"body": error.body, "query": request.query_params, "header": request.headers}
    return of_validation(error.errors(), request_parts).response(request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI calls only one kind of them invalid JSON
        return of_unread(error.__cause__).response(path)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"{request.method} {path:.120} is not served; docs/gateway.md lists what is"
    if error.status_code == 405:
        message = f"{request.method} is not served for {path:.120}"
    code = "unknown_url" if error.status_code == 404 else None
    return ApiError(error.status_code, message, code=code).response(path)


async def _on_half_a_character(request: Request, _error: Exception) -> Response:
    return ApiError(400, "the text holds half a character (a lone surrogate)", code="invalid_value").response(
        request.url.path
    )


async def _on_bug(request: Request, _error: Exception) -> Response:
    return ApiError(500, "an error of the gateway's own; its log says more").response(request.url.path)
