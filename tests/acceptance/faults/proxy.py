"""A TCP proxy that does to its connections what networks do: delay, slowness, resets, black holes, cuts.

with TcpProxy(target_port) as proxy:
    connect(proxy.port)
    proxy.delay_s = 0.2     # in each direction; bytes stay in order
    proxy.bytes_per_s = 1e4
    proxy.reset()           # RST to both ends of every connection
    proxy.freeze()          # nothing moves, nobody is told; `thaw` delivers what was sent, as TCP does
    proxy.forget()          # what is open now is dead without a word, for ever (a NAT that lost its table)
    proxy.cut()             # reset, and refuse whoever comes, until `heal`
    proxy.silence({host})   # nothing from or to these hosts (None: any) arrives, nobody is told; `heal` resets theirs
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Collection
from typing import Self

from tests.support.servers import HOST, free_port

_CHUNK_BYTES = 64 * 1024
_WAITING_CHUNKS = 64
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST

Waiting = asyncio.Queue[tuple[float, bytes]]


class _Link:
    """One client's connection and the one behind it."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.writers = (near, far)
        self.host = str(near.get_extra_info("peername")[0])
        self.forgotten = False
        self.silenced = False

    def reset(self) -> None:
        """Both ends get a RST."""
        for writer in self.writers:
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


class TcpProxy:
    """From a loopback port of its own to another port, here or on another host. For any thread."""

    def __init__(self, target_port: int, target_host: str = HOST) -> None:
        self.port = free_port()
        self.delay_s = 0.0
        self.bytes_per_s = 0.0  # of each direction of each connection; 0: no limit
        self._target = (target_host, target_port)
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self._refusing = False
        self._silent: Collection[str] | None = ()
        self._loop = asyncio.new_event_loop()
        self._moving = asyncio.Event()
        self._moving.set()
        self._thread = threading.Thread(target=self._run, name=f"proxy to {target_port}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        starting = asyncio.start_server(self._accepted, HOST, self.port)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)
        return self

    def __exit__(self, *_exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def reset(self) -> None:
        """RST to both ends of every connection."""
        self._do(self._reset_all)

    def freeze(self) -> None:
        """Let nothing through, in either direction; new connections are accepted and hang."""
        self._do(self._moving.clear)

    def thaw(self) -> None:
        """Let it through again, with what was sent meanwhile."""
        self._do(self._moving.set)

    def forget(self) -> None:
        """Swallow whatever comes on the connections that are open now. New ones work."""
        self._do(self._forget_all)

    def cut(self) -> None:
        """Reset everything, and reset whoever connects."""
        self._refusing = True
        self.reset()

    def silence(self, hosts: Collection[str] | None) -> None:
        """Swallow whatever comes from and for these hosts (None: all), on connections that are open and on new ones."""
        self._silent = hosts
        self._do(lambda: [self._note_silence(link) for link in self._links])

    def heal(self) -> None:
        """Forward without faults again; what is dead stays dead, and what was silenced is reset."""
        self._refusing = False
        self._silent = ()
        self._do(lambda: [link.reset() for link in list(self._links) if link.silenced])
        self.delay_s = self.bytes_per_s = 0.0
        self.thaw()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        self._reset_all()
        others = list(self._tasks)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _do(self, action: Callable[[], object]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (action(), done.set()))
        done.wait(10)

    def _reset_all(self) -> None:
        for link in list(self._links):
            link.reset()

    def _forget_all(self) -> None:
        for link in self._links:
            link.forgotten = True

    def _note_silence(self, link: _Link) -> None:
        if self._silent is None or link.host in self._silent:
            link.forgotten = link.silenced = True

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:  # nobody there: the client sees a connection that ends at once
            return writer.transport.abort()
        except asyncio.CancelledError:  # the proxy ends
            writer.transport.abort()
            raise
        link = _Link(writer, far_writer)
        if self._refusing:
            return link.reset()
        self._note_silence(link)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(link, reader, far_writer))
                group.create_task(self._pump(link, far_reader, writer))
        finally:
            self._links.discard(link)
            link.reset()

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction. When one end closes, so does the other, after what was on its way."""
        waiting: Waiting = asyncio.Queue(_WAITING_CHUNKS)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write(link, waiting, writer))
            with contextlib.suppress(OSError):
                while data := await reader.read(_CHUNK_BYTES):
                    await waiting.put((self._loop.time() + self.delay_s, data))
            await waiting.put((0.0, b""))

    async def _write(self, link: _Link, waiting: Waiting, writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._moving.wait()
            if link.forgotten or (data and writer.transport.is_closing()):
                continue  # to be swallowed, or for an end that has gone
            if not data:
                break
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
