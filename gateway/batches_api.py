"""OpenAI's API: files and batches. docs/reference/api.md lists every field."""

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect

from gateway.batches import StoredBatch
from gateway.files import StoredFile
from gateway.gateway import ThisGateway
from gateway.guard import UPLOAD_S
from gateway.openai_api import ChatRequest, CompletionRequest
from gateway.refusal import RESPONSES, RETRY_S, ApiError
from gateway.requests import BoundedRoute, Strict, validated
from producers.batch import prompt_lines
from producers.batch.prompt_lines import BadLine

router = APIRouter(prefix="/v1", tags=["OpenAI"], responses=RESPONSES, route_class=BoundedRoute)

_Text = Annotated[str, Field(max_length=512)]
# Uploads have their own thread pool, so that large uploads don't block other requests.
_keeper = ThreadPoolExecutor(2, "files")


def check_body(body: dict[str, Any], url: str) -> None:
    """Check the body of a batch's line. Raises BadLine if it is not served."""
    try:
        request = validated(ChatRequest if url == prompt_lines.CHAT else CompletionRequest, body)
        if request.stream:
            raise BadLine("'stream' is not supported in a batch")
        if isinstance(request, ChatRequest) and request.forced_function():
            raise BadLine("'tools' are not supported in a batch: use response_format to set the form of the answer")
    except ApiError as error:
        raise BadLine(str(error)) from None


class ExpiresAfter(Strict):
    """The output files are deleted this many seconds after they were made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class BatchRequest(Strict):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: dict[Annotated[str, Field(max_length=64)], _Text] | None = Field(None, max_length=16)
    output_expires_after: ExpiresAfter | None = None


@router.post("/files")
async def upload(request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """Keep an uploaded file of prompts. The form has the fields `file` and `purpose` (`batch`)."""
    try:
        async with asyncio.timeout(UPLOAD_S), request.form(max_files=1, max_fields=8) as form:
            file = _form_file(form)
            name = (file.filename or "prompts.jsonl")[-255:].encode("utf-8", "replace").decode()
            return _file(
                await asyncio.get_running_loop().run_in_executor(
                    _keeper, gateway.batches.files.add, _owner(request), name, file.file
                )
            )
    except TimeoutError:
        raise ApiError(408, f"the upload took longer than {UPLOAD_S:g} s: send a smaller file") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has left") from None


def _form_file(form: FormData) -> UploadFile:
    """Return the uploaded file of a form. Raises ApiError unless it is a file for a batch."""
    for name in form:
        if name not in ("file", "purpose"):
            raise ApiError(400, f"{name!r:.80} is not a field of this form", name[:80], "unsupported_parameter")
    if form.get("purpose") != "batch":
        raise ApiError(
            400,
            "the purpose must be 'batch': the gateway stores files for no other purpose",
            "purpose",
            "invalid_value",
        )
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "the form has no file: send it in the field 'file'", "file", "invalid_value")
    return file


@router.get("/files")
async def files(
    request: Request,
    gateway: ThisGateway,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str = "",
) -> dict[str, Any]:
    """Return a page of this key's files."""
    descriptions = [
        description for description in gateway.batches.files.of(_owner(request)) if purpose in ("", description.purpose)
    ]
    return _page([_file(description) for description in descriptions[:: 1 if order == "asc" else -1]], after, limit)


@router.get("/files/{name}")
async def file(name: str, request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """One of them."""
    return _file(gateway.batches.files.get(name, _owner(request)))


@router.get("/files/{name}/content")
async def content(name: str, request: Request, gateway: ThisGateway) -> Response:
    """The file's content."""
    store = gateway.batches.files
    return FileResponse(store.path(store.get(name, _owner(request)).id), media_type="application/octet-stream")


@router.delete("/files/{name}")
async def delete(name: str, request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """Delete a file. A file that a batch reads can't be deleted."""
    await asyncio.to_thread(gateway.batches.delete_file, name, _owner(request))
    return {"id": name, "object": "file", "deleted": True}


@router.post("/batches")
async def create(
    body: BatchRequest,
    request: Request,
    gateway: ThisGateway,
    idempotency_key: Annotated[str, Header(max_length=255)] = "",
) -> dict[str, Any]:
    """Begin a batch. The same content with the same Idempotency-Key returns the existing batch."""
    if gateway.is_stopping:
        raise ApiError(503, "the gateway is stopping", code="stopping", retry_s=RETRY_S)
    input_file = gateway.batches.files.get(body.input_file_id, _owner(request))
    if input_file.purpose != "batch":
        raise ApiError(
            400,
            "the file's purpose is not 'batch': upload it again with purpose 'batch'",
            "input_file_id",
            "invalid_value",
        )
    models = {name: await gateway.defaults(gateway.models[name]) for name in gateway.visible(request.state.key)}
    new = partial(
        gateway.batches.create,
        endpoint=body.endpoint,
        output_expires_s=body.output_expires_after.seconds if body.output_expires_after else 0,
    )
    return _batch(await asyncio.to_thread(new, input_file, idempotency_key, body.metadata or {}, models))


@router.get("/batches")
async def batches(
    request: Request, gateway: ThisGateway, after: str = "", limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    """Return a page of this key's batches, newest first."""
    descriptions = gateway.batches.of(_owner(request))
    return _page([_batch(description) for description in reversed(descriptions)], after, limit)


@router.get("/batches/{name}")
async def batch(name: str, request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """One of them."""
    return _batch(gateway.batches.get(name, _owner(request)))


@router.post("/batches/{name}/cancel")
async def cancel(name: str, request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """Cancel a batch. The answers that it has are kept."""
    return _batch(await asyncio.to_thread(gateway.batches.cancel, name, _owner(request)))


def _owner(request: Request) -> str:
    return request.state.key.name if request.state.key else ""


def _page(objects: Sequence[dict[str, Any]], cursor: str, limit: int) -> dict[str, Any]:
    """Return the page after `cursor`. Raises ApiError if no object has that id."""
    ids = [entry["id"] for entry in objects]
    if cursor and cursor not in ids:
        raise ApiError(
            400, f"no entry has the id {cursor!r:.80}: take the id from an earlier page", "after", "invalid_value"
        )
    start = ids.index(cursor) + 1 if cursor else 0
    page = objects[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ids),
    }


def _file(description: StoredFile) -> dict[str, Any]:
    return {
        "id": description.id,
        "object": "file",
        "bytes": description.size,
        "created_at": int(description.created),
        "expires_at": int(description.expires) or None,
        "filename": description.name,
        "purpose": description.purpose,
        "status": "processed",
        "status_details": None,
    }


def _line_of(error: str) -> int | None:
    """Return the line number that a batch's error begins with, or None."""
    match = re.match(r"line (\d+)\b", error)
    return int(match[1]) if match else None


_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def _batch(description: StoredBatch) -> dict[str, Any]:
    problems = [
        {"code": "invalid_request", "line": _line_of(error), "message": error, "param": None}
        for error in description.errors
    ]
    return {
        "id": description.id,
        "object": "batch",
        "endpoint": description.endpoint,
        "completion_window": "24h",
        "input_file_id": description.input_file_id,
        "status": description.status,
        "created_at": int(description.created),
        "expires_at": int(description.expires),
        **{f"{status}_at": description.since.get(status) for status in _TIMES},
        "output_file_id": description.output_file_id or None,
        "error_file_id": description.error_file_id or None,
        "errors": {"object": "list", "data": problems} if problems else None,
        "request_counts": {
            "total": description.total,
            "completed": description.completed,
            "failed": description.failed,
        },
        "metadata": dict(description.metadata) or None,
    }
