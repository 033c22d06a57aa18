"""OpenAI's API: files and batches. docs/gateway.md lists every field."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field, ValidationError, model_validator
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect

from gateway.batches import StoredBatch
from gateway.files import StoredFile
from gateway.gateway import gateway_of
from gateway.guard import UPLOAD_S
from gateway.openai_api import ChatRequest
from gateway.refusal import DESCRIBED, RETRY_S, Refused, of_validation
from gateway.requests import Strict, wanted
from producers.batch.openai_body import Defaults
from producers.batch.prompt_lines import BadLine

router = APIRouter(prefix="/v1", tags=["OpenAI"], responses=DESCRIBED)

_Text = Annotated[str, Field(max_length=512)]


def check_body(body: dict[str, Any]) -> None:
    """Raises BadLine for a line's body that is not served."""
    try:
        if ChatRequest.model_validate(body).stream:
            raise BadLine("'stream' is not served in a batch")
    except ValidationError as error:
        problems = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise BadLine(str(of_validation(problems, {"body": body}))) from None
    except Refused as error:
        raise BadLine(str(error)) from None


class BatchRequest(Strict):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions"]
    completion_window: Literal["24h"]
    metadata: dict[Annotated[str, Field(max_length=64)], _Text] = Field(default_factory=dict, max_length=16)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, body: Any) -> Any:
        return wanted(body, {"output_expires_after": ()}) if isinstance(body, dict) else body


@router.post("/files")
async def upload(request: Request) -> dict[str, Any]:
    """Keep a file of prompts; a form with `file` and `purpose` (`batch`)."""
    batches = gateway_of(request).batches
    try:
        async with asyncio.timeout(UPLOAD_S), request.form(max_files=1, max_fields=8) as form:
            file = _uploaded(form)
            name = (file.filename or "prompts.jsonl")[-255:].encode("utf-8", "replace").decode()
            return _file(await asyncio.to_thread(batches.files.add, _owner(request), name, file.file))
    except TimeoutError:
        raise Refused(408, f"the file took longer than {UPLOAD_S:g} s") from None
    except ClientDisconnect:
        raise Refused(499, "the client has left") from None


def _uploaded(form: FormData) -> UploadFile:
    """Raises Refused for all but a batch's file."""
    for name in form:
        if name not in ("file", "purpose"):
            raise Refused(400, f"{name!r:.80} is not served", name[:80], "unsupported_parameter")
    if form.get("purpose") != "batch":
        raise Refused(400, "only files with purpose 'batch' are kept", "purpose", "invalid_value")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise Refused(400, "the form has no file", "file", "invalid_value")
    return file


@router.get("/files")
async def files(
    request: Request,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str = "",
) -> dict[str, Any]:
    """A page of this key's files."""
    found = [each for each in gateway_of(request).batches.files.of(_owner(request)) if purpose in ("", each.purpose)]
    return _page([_file(each) for each in (found if order == "asc" else found[::-1])], after, limit)


@router.get("/files/{name}")
async def file(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    return _file(gateway_of(request).batches.files.get(name, _owner(request)))


@router.get("/files/{name}/content")
async def content(name: str, request: Request) -> Response:
    """What is in it."""
    kept = gateway_of(request).batches.files
    return FileResponse(kept.path(kept.get(name, _owner(request)).id), media_type="application/octet-stream")


@router.delete("/files/{name}")
async def delete(name: str, request: Request) -> dict[str, Any]:
    """Delete one that no batch reads."""
    await asyncio.to_thread(gateway_of(request).batches.delete_file, name, _owner(request))
    return {"id": name, "object": "file", "deleted": True}


@router.post("/batches")
async def create(
    body: BatchRequest, request: Request, idempotency_key: Annotated[str, Header(max_length=255)] = ""
) -> dict[str, Any]:
    """Begin a batch; the same content with the same Idempotency-Key is the batch that there is already."""
    gateway = gateway_of(request)
    if gateway.stopping:
        raise Refused(503, "the gateway is stopping", code="stopping", retry_s=RETRY_S)
    found = gateway.batches.files.get(body.input_file_id, _owner(request))
    if found.purpose != "batch":
        raise Refused(400, "the file was not sent with purpose 'batch'", "input_file_id", "invalid_value")
    models = {}
    for name in gateway.visible(request.state.key):
        model = gateway.models[name]
        models[name] = Defaults(name, await gateway.default_tokens(name), model.temperature, model.top_p)
    return _batch(await asyncio.to_thread(gateway.batches.create, found, idempotency_key, body.metadata, models))


@router.get("/batches")
async def batches(request: Request, after: str = "", limit: Annotated[int, Query(ge=1, le=100)] = 20) -> dict[str, Any]:
    """A page of this key's batches, the newest first."""
    found = gateway_of(request).batches.of(_owner(request))
    return _page([_batch(each) for each in reversed(found)], after, limit)


@router.get("/batches/{name}")
async def batch(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    return _batch(gateway_of(request).batches.get(name, _owner(request)))


@router.post("/batches/{name}/cancel")
async def cancel(name: str, request: Request) -> dict[str, Any]:
    """End it; what is answered already stays."""
    return _batch(await asyncio.to_thread(gateway_of(request).batches.cancel, name, _owner(request)))


def _owner(request: Request) -> str:
    return request.state.key.name if request.state.key else ""


def _page(objects: Sequence[dict[str, Any]], after: str, limit: int) -> dict[str, Any]:
    """Raises Refused if there is nothing to come after."""
    ids = [each["id"] for each in objects]
    if after and after not in ids:
        raise Refused(400, f"there is no {after!r:.80} to go on after", "after", "invalid_value")
    start = ids.index(after) + 1 if after else 0
    page = objects[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ids),
    }


def _file(stored: StoredFile) -> dict[str, Any]:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.size,
        "created_at": int(stored.created),
        "expires_at": None,
        "filename": stored.name,
        "purpose": stored.purpose,
        "status": "processed",
        "status_details": None,
    }


_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def _batch(stored: StoredBatch) -> dict[str, Any]:
    problems = [{"code": "invalid_request", "line": None, "message": each, "param": None} for each in stored.errors]
    return {
        "id": stored.id,
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "input_file_id": stored.input_file_id,
        "status": stored.status,
        "created_at": int(stored.created),
        "expires_at": int(stored.expires),
        **{f"{status}_at": stored.since.get(status) for status in _TIMES},
        "output_file_id": stored.output_file_id or None,
        "error_file_id": stored.error_file_id or None,
        "errors": {"object": "list", "data": problems} if problems else None,
        "request_counts": {"total": stored.total, "completed": stored.completed, "failed": stored.failed},
        "metadata": dict(stored.metadata) or None,
    }
