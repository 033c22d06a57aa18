"""LangChain at the gateway: `python langchain_client.py URL MODEL`."""

import json
import sys
from typing import Any

from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Grade(BaseModel):
    """What an answer is worth."""

    letter: str
    points: int


def main(url: str, model: str) -> dict[str, Any]:
    """What each call came back with."""
    usual: Any = {"base_url": f"{url}/v1", "api_key": "x", "model": model, "max_retries": 0}
    chat, texts = ChatOpenAI(**usual), OpenAI(**usual)
    theirs = ChatOllama(base_url=url, model=model)
    found: dict[str, Any] = {
        "invoke": chat.invoke("What is a queue?").content,
        "stream": "".join(str(piece.content) for piece in chat.stream("What is a queue?")),
        "texts": texts.batch(["Once upon a", "In a hole"]),
        "text streamed": "".join(texts.stream("Once upon a")),
        "Ollama": theirs.invoke("What is a queue?").content,
    }
    for method in ("json_schema", "function_calling"):
        found[method] = chat.with_structured_output(Grade, method=method).invoke("Grade this.").model_dump()
        found[f"Ollama {method}"] = theirs.with_structured_output(Grade, method=method).invoke("Grade.").model_dump()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
