"""Streams as responses. An error before the first line sets the HTTP status; a later error is sent as a line."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from fastapi.responses import StreamingResponse

from gateway.refusal import ApiError

_OPEN_S = 10.0  # after this time, the response begins even if no line is ready


async def stream_response(
    lines: AsyncGenerator[str, None],
    error_line: Callable[[ApiError], str],
    media_type: str,
    still_waiting: str = "",
) -> StreamingResponse:
    """Return a response of these lines.

    `error_line` makes the last line after a failure. `still_waiting` is sent to keep the connection open.
    """
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
