"""LiteLLM at the gateway by its four prefixes: `python litellm_client.py URL MODEL`."""

import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel


class Grade(BaseModel):
    """What an answer is worth."""

    letter: str
    points: int


def main(url: str, model: str) -> dict[str, Any]:
    """What each call came back with."""
    messages = [{"role": "user", "content": "Grade this."}]
    found: dict[str, Any] = {}
    for prefix in ("openai", "hosted_vllm", "ollama_chat", "ollama"):
        is_openai = prefix in ("openai", "hosted_vllm")
        usual: Any = {"model": f"{prefix}/{model}", "api_base": f"{url}/v1" if is_openai else url, "api_key": "x"}
        usual |= {"messages": messages, "max_retries": 0}
        found[prefix] = litellm.completion(**usual).choices[0].message.content
        pieces = litellm.completion(**usual, stream=True)
        found[f"{prefix} streamed"] = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        found[f"{prefix} structured"] = litellm.completion(**usual, response_format=Grade).choices[0].message.content
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", api_base=f"{url}/v1", api_key="x", prompt=["Once upon a", "In a hole"]
    )
    found["texts"] = [choice.text for choice in text.choices]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
