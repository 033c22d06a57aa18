"""llama-index at the gateway: `python llama_index_client.py URL MODEL`."""

import json
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Album(BaseModel):
    """Some music."""

    title: str
    songs: list[str]


def main(url: str, model: str) -> dict[str, Any]:
    """What each call came back with."""
    usual: Any = {"model": model, "api_base": f"{url}/v1", "api_key": "x", "max_retries": 0}
    raw = OpenAILike(**usual)
    chats = OpenAILike(**usual, is_chat_model=True, is_function_calling_model=True)
    theirs = Ollama(model=model, base_url=url, request_timeout=60)
    said = [ChatMessage(role="user", content="Make an album.")]
    found: dict[str, Any] = {
        "complete": raw.complete("Once upon a").text,
        "complete streamed": "".join(piece.delta or "" for piece in raw.stream_complete("Once upon a")),
        "chat": chats.chat(said).message.content,
        "chat streamed": "".join(piece.delta or "" for piece in chats.stream_chat(said)),
        "Ollama complete": theirs.complete("Once upon a").text,
        "Ollama streamed": "".join(piece.delta or "" for piece in theirs.stream_complete("Once upon a")),
    }
    for name, llm in (("structured", chats), ("Ollama structured", theirs)):
        found[name] = llm.as_structured_llm(Album).chat(said).raw.model_dump()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
