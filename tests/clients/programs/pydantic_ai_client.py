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


def main(url: str, name: str) -> dict[str, Any]:
    """What each kind of output came back with."""
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))
    by_tool = Agent(model, output_type=City)

    async def streamed() -> City:
        async with by_tool.run_stream("Where are the Olympics?") as result:
            return await result.get_output()

    return {
        "text": Agent(model).run_sync("What is a queue?").output,
        "output_type": by_tool.run_sync("Where are the Olympics?").output.model_dump(),
        "NativeOutput": Agent(model, output_type=NativeOutput(City)).run_sync("Where?").output.model_dump(),
        "streamed": asyncio.run(streamed()).model_dump(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
