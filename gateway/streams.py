"""A stream as a response: what fails before its first line has a status of its own, what fails later is a line."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from fastapi.responses import StreamingResponse

from gateway.refusal import ApiError

_OPEN_S = 10.0  # then the response begins, whatever comes


async def stream_response(
    lines: AsyncGenerator[str, None],
    error_line: Callable[[ApiError], str],
    media_type: str,
    still_waiting: str = "",
) -> StreamingResponse:
    """A response of these lines. `error_line`: the one that ends it after a failure; `still_waiting` keeps it open."""
    first = asyncio.ensure_future(anext(lines))
    await asyncio.wait({first}, timeout=_OPEN_S)
    if first.done():
        first.result()

    async def body() -> AsyncIterator[str]:
        try:
            while not first.done():
                if still_waiting:
                    yield still_waiting
                await asyncio.wait({first}, timeout=_OPEN_S)
            yield first.result()
            async for line in lines:
                yield line
        except ApiError as refusal:
            yield error_line(refusal)
        finally:
            first.cancel()

    return StreamingResponse(body(), media_type=media_type, headers={"Cache-Control": "no-cache"})
