"""LiteLLM as a gateway's client, run by a Python that has it: `python litellm_client.py URL MODEL`. One JSON object."""

import asyncio
import json
import sys
from typing import Any

import litellm


def main(url: str, model: str) -> dict[str, Any]:
    """What each call came back with; an error: its class and what it says."""
    messages = [{"role": "user", "content": "What is a queue?"}]
    openai: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "x", "max_retries": 0, "seed": 7}
    whole = litellm.completion(messages=messages, **openai)
    pieces = litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **openai)
    chunks = list(pieces)
    replies: dict[str, Any] = {
        "whole": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "usage": whole.usage.model_dump(),
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "streamed_usage": chunks[-1].usage.model_dump(),
        "asynchronous": asyncio.run(litellm.acompletion(messages=messages, **openai)).choices[0].message.content,
        "two": [choice.message.content for choice in litellm.completion(messages=messages, n=2, **openai).choices],
        "completed": litellm.text_completion(
            prompt="What is a queue?", **openai | {"model": f"text-completion-openai/{model}"}
        )
        .choices[0]
        .text,
        "ollama": litellm.completion(model=f"ollama_chat/{model}", api_base=url, messages=messages, seed=7)
        .choices[0]
        .message.content,
    }
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    for name, arguments in (("unknown", {"model": "openai/gpt-4o"}), ("refused", {"tools": tools})):
        try:
            litellm.completion(messages=messages, **openai | arguments)
        except (litellm.NotFoundError, litellm.BadRequestError) as error:
            replies[name] = [type(error).__name__, str(error)]
    return replies


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
