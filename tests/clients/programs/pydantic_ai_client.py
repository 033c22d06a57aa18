"""pydantic-ai at the gateway: `python pydantic_ai_client.py URL MODEL`."""

import asyncio
import json
import sys
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """A place."""

    name: str
    people: int


async def main(url: str, name: str) -> dict[str, Any]:
    """What each kind of output came back with, all in one event loop: the provider keeps its connections for one."""
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))
    by_tool = Agent(model, output_type=City)
    native = Agent(model, output_type=NativeOutput(City))
    found = {
        "text": (await Agent(model).run("What is a queue?")).output,
        "output_type": (await by_tool.run("Where are the Olympics?")).output.model_dump(),
        "NativeOutput": (await native.run("Where?")).output.model_dump(),
    }
    async with by_tool.run_stream("Where are the Olympics?") as result:
        return {**found, "streamed": (await result.get_output()).model_dump()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:]))))
