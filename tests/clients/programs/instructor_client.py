"""instructor at the gateway, in its default mode and under a schema: `python instructor_client.py URL MODEL`."""

import json
import sys
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


def main(url: str, model: str) -> dict[str, Any]:
    """What each mode came back with."""
    client = OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    messages: Any = [{"role": "user", "content": "Ada is 36."}]
    found: dict[str, Any] = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        ask: Any = {"model": model, "messages": messages, "response_model": Person, "max_retries": 0}
        asker = instructor.from_openai(client, mode=mode)
        found[mode.name] = asker.chat.completions.create(**ask).model_dump()
        *_, last = asker.chat.completions.create_partial(**ask)
        found[f"{mode.name} streamed"] = last.model_dump()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
