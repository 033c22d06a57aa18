"""The host process: owns vLLM's engine, and does what Kvasir asks for over a Unix socket (`wire`).

`python -m kvasir_vllm.main SOCKET`. It ends when the connection does, when the engine dies, or with a sentence if the
model can't be loaded.
"""

import asyncio
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from . import events, wire
from .connector import SAMPLER, require_one_rank
from .shared_folder import bind, open_folder

_PROBE = "probe"
_PROBE_TOKENS = 4
# vLLM 0.32 and newer have `stream_interval`. In older releases, tokens arrive one by one.
_INTERVALS = hasattr(SamplingParams, "stream_interval")


class Host:
    """One engine, and the requests that it is working on."""

    def __init__(self, path: Path, writer: asyncio.StreamWriter) -> None:
        self._folder = path.parent
        self._writer = writer
        self._outbox: list[bytes] = []
        self._evaluated_tokens: dict[str, int] = {}
        self._failed_keys: set[str] = set()
        self._shape: dict[str, Any] = {}
        self._probe_problem = ""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        handle = open_folder(self._folder)
        with suppress(FileNotFoundError):
            os.unlink(events.SOCKET, dir_fd=handle)
        self._events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bind(self._events, handle, self._folder / events.SOCKET)
        self._events.setblocking(False)
        self._block = 1

    async def load(self, request: wire.Message) -> None:
        """Load the model, and learn how it keeps its KV cache. Raises RuntimeError with one sentence."""
        if request.get("version") != wire.VERSION:
            raise RuntimeError(
                f"Kvasir speaks version {request.get('version')} of this protocol, but the vLLM host speaks version "
                f"{wire.VERSION}"
            )
        connector = KVTransferConfig(
            kv_connector="KvasirConnector",
            kv_connector_module_path=f"{__package__}.connector",
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"folder": str(self._folder.parent)},
        )
        self._block = request["block"]
        arguments = AsyncEngineArgs(**request["arguments"], kv_transfer_config=connector, logits_processors=[SAMPLER])
        require_one_rank(arguments)  # the connector checks this, too, but vLLM does not pass on its error
        self._engine = AsyncLLM.from_engine_args(arguments)
        asyncio.get_running_loop().add_reader(self._events, self._drain)
        await self._probe()
        device = self._engine.vllm_config.device_config.device_type
        self._queue_message(op="loaded", version=wire.VERSION, vllm=vllm.__version__, device=device, shape=self._shape)

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve requests until Kvasir closes the connection."""
        while (message := await _next(reader)) is not None:
            if message["op"] == "generate":
                self._tasks[message["id"]] = asyncio.create_task(self._generate(message))
            elif message["op"] == "abort":
                await self._engine.abort(message["id"])

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()

    async def _probe(self) -> None:
        """Compute a prompt of a few tokens, so that the connector can examine the pages."""
        transfer = self._transfer(key=_PROBE, emit=0, inject=None, sampling=None)
        parameters = SamplingParams(max_tokens=1, detokenize=False, extra_args=transfer)
        prompt = {"prompt_token_ids": list(range(_PROBE_TOKENS))}
        async for _ in self._engine.generate(prompt, parameters, _PROBE):
            pass
        self._drain()
        if not self._shape:
            raise RuntimeError(self._probe_problem or "vLLM returned no KV cache")

    async def _generate(self, request: wire.Message) -> None:
        key = request["id"]
        try:
            await self._answer(key, request)
        except EngineDeadError:
            self._queue_message(op="failed", id=key, kind="engine", why="vLLM's engine died")
            self._send()
            self._writer.close()  # this ends the process, and Kvasir starts another one
        except ValueError as error:  # vLLM refused the request
            self._queue_message(
                op="failed", id=key, kind="schema" if request["constraint"] else "engine", why=f"{error}"[:500]
            )
        except Exception as error:  # noqa: BLE001
            self._queue_message(op="failed", id=key, kind="engine", why=repr(error)[:500])
        finally:
            self._tasks.pop(key, None)
            self._evaluated_tokens.pop(key, None)
            self._failed_keys.discard(key)

    async def _answer(self, key: str, request: wire.Message) -> None:
        prompt = {"prompt_token_ids": request["tokens"]}
        async for output in self._engine.generate(prompt, self._parameters(request), key):
            self._drain()  # handle the connector's waiting messages first
            if key in self._failed_keys:
                # Abort the failed request. vLLM itself ends it only if the model has one group of layers. With several
                # groups, the request would go on without the keys and values that could not be loaded.
                await self._engine.abort(key)
                return
            (completion,) = output.outputs
            if completion.finish_reason == "error":
                self._queue_message(op="failed", id=key, kind="kv", why="vLLM could not use the KV cache")
                return
            likely = _likely(completion.logprobs) if request["logprobs"] else None
            evaluated_tokens = self._evaluated_tokens.get(key, 0)
            self._queue_message(
                op="tokens", id=key, tokens=list(completion.token_ids), logprobs=likely, evaluated=evaluated_tokens
            )
        self._drain()
        self._queue_message(op="done", id=key, evaluated=self._evaluated_tokens.get(key, 0))

    def _parameters(self, request: wire.Message) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            max_tokens=request["max_tokens"],
            stop_token_ids=request["ends"],
            detokenize=False,
            logprobs=request["logprobs"] or None,
            structured_outputs=StructuredOutputsParams(**request["constraint"]) if request["constraint"] else None,
            output_kind=RequestOutputKind.DELTA,
            **({"stream_interval": request["interval"]} if _INTERVALS else {}),
            extra_args=self._transfer(
                key=request["id"], **{name: request[name] for name in ("emit", "inject", "sampling")}
            ),
        )

    def _transfer(self, **settings: Any) -> dict[str, Any]:
        transfer = {"version": events.VERSION, "folder": self._folder.name, "block": self._block} | settings
        return {"kv_transfer_params": {events.NAME: transfer}}

    def _drain(self) -> None:
        """Receive the connector's waiting messages."""
        with suppress(BlockingIOError):
            while True:
                message = events.unpack_datagram(self._events.recv(events.LARGEST))
                if message["op"] == "evaluated":
                    self._evaluated_tokens[message["id"]] = message["tokens"]
                    self._queue_message(op="step", id=message["id"])
                elif message["id"] == _PROBE:
                    self._probe_problem = message.get("why", "")
                    self._shape = message.get("shape", {})
                    if "file" in message:
                        (self._folder / message["file"]).unlink()
                else:
                    if message["op"] == "failed":
                        self._failed_keys.add(message["id"])
                    self._queue_message(**message)

    def _queue_message(self, **message: Any) -> None:
        """Queue a message, to be sent with the others of the same vLLM step, because each write wakes Kvasir."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)
        self._outbox.append(wire.pack_message(message))

    def _send(self) -> None:
        self._writer.write(b"".join(self._outbox))
        self._outbox.clear()


def _likely(logprobs: Any) -> list[tuple[int, float]]:
    first = logprobs[0] if logprobs else {}
    return [(int(token), float(logprob.logprob)) for token, logprob in first.items()]


async def _next(reader: asyncio.StreamReader) -> wire.Message | None:
    try:
        head = await reader.readexactly(wire.LENGTH.size)
        return wire.unpack_message(await reader.readexactly(wire.length_of(head)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _run(path: Path) -> int:
    reader, writer = await asyncio.open_unix_connection(path)
    request = await _next(reader)
    if request is None:
        return 0
    host = Host(path, writer)
    try:
        await host.load(request)
    except Exception as error:  # noqa: BLE001  vLLM may raise any error
        writer.write(wire.pack_message({"op": "refused", "why": " ".join(str(error).split())[:1000] or repr(error)}))
        await writer.drain()
        return 1
    try:
        await host.serve(reader)
    finally:
        host.close()
    return 0


if __name__ == "__main__":
    code = asyncio.run(_run(Path(sys.argv[1])))
    sys.stdout.flush()
    os._exit(code)  # a normal exit would wait for vLLM's threads, which don't end
