"""A server of OpenAI's chat completions that takes no time: what a proxy in front of it adds is all that there is.

Above 8 tokens of `max_tokens`, it waits 10 ms for each token more, and says the same.
"""

import asyncio
import json
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

MODEL = "zero"
INSTANT_TOKENS, _TOKEN_S = 8, 0.01
_WORDS = ["All", " of", " it", " is", " right", "."]
_USAGE = {"prompt_tokens": 12, "completion_tokens": len(_WORDS), "total_tokens": 12 + len(_WORDS)}
_BASE = {"id": "chatcmpl-0", "created": 1, "model": MODEL}


def _chunk(delta: dict[str, str], reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return f"data: {json.dumps({**_BASE, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"


_STREAM = "".join(
    [
        _chunk({"role": "assistant", "content": ""}),
        *(_chunk({"content": word}) for word in _WORDS),
        _chunk({}, "stop"),
        f"data: {json.dumps({**_BASE, 'object': 'chat.completion.chunk', 'choices': [], 'usage': _USAGE})}\n\n",
        "data: [DONE]\n\n",
    ]
)
_WHOLE = {
    **_BASE,
    "object": "chat.completion",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "".join(_WORDS)}, "finish_reason": "stop"},
    ],
    "usage": _USAGE,
}


async def _models(_request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 8192}]})


async def _chat(request: Request) -> Response:
    asked = await request.json()
    await asyncio.sleep(_TOKEN_S * max(0, asked.get("max_tokens", 0) - INSTANT_TOKENS))
    if asked.get("stream"):
        return Response(_STREAM, media_type="text/event-stream")
    return JSONResponse(_WHOLE)


APP = Starlette(
    routes=[Route("/v1/models", _models), Route("/v1/chat/completions", _chat, methods=["POST"])],
)

if __name__ == "__main__":
    uvicorn.run(APP, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
