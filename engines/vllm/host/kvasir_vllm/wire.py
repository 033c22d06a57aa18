"""What Kvasir and its vLLM host say to each other. Both ends import this module, and it nothing but msgpack.

A message is a u32 length (little-endian) and a msgpack map with a text "op". Kvasir listens on a Unix socket, to which
the host connects. Keys and values travel beside it, as files in the socket's folder, which is this user's alone;
`events` is how the host's connector gives them out.

From Kvasir:
    load        version, block (tokens in a block of our KV cache), arguments (for vLLM): first, once
    generate    id, tokens, max_tokens, ends (ids that end the answer), sampling (None: the likeliest; else temperature,
                top_p, top_k, seed), constraint (of vLLM's structured outputs; {}: none), logprobs (how many; 0: none),
                interval (tokens of the answer in a message, but for the first),
                emit (None, or the position at which the first block to give out begins), inject (None, or a file's name
                and its tokens): see `events`
    abort       id
From the host:
    loaded      version, vllm (its release), device, shape (see `events`)
    refused     why: the model is not loaded, and the host ends
    step        id: some of its prompt is being computed
    block       id, file, start, end: some blocks of the KV cache, one behind the other
    window      id, file, position: what its sliding-window layers look back at
    tokens      id, tokens: the next ones of the answer; logprobs of the first if they were asked for; evaluated: how
                many of the prompt's tokens vLLM was seen to schedule so far
    done        id, evaluated
    failed      id, kind ("kv", "schema" or "engine"), why
"""

import struct
from collections.abc import Callable
from typing import Any

import msgpack

from .events import VERSION as VERSION

LENGTH = struct.Struct("<I")
MAX_BYTES = 64 << 20

Message = dict[str, Any]


class GarbledMessage(Exception):
    """The bytes are not a message of this protocol."""


def pack_message(message: Message) -> bytes:
    """A message with its length in front."""
    body: bytes = msgpack.packb(message)
    return LENGTH.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """Bytes that follow these four. Raises GarbledMessage."""
    length: int = LENGTH.unpack(head)[0]
    if length > MAX_BYTES:
        raise GarbledMessage(f"the message is {length:,} bytes long; at most {MAX_BYTES:,} are allowed")
    return length


def unpack_message(body: bytes) -> Message:
    """The message in these bytes. Raises GarbledMessage."""
    try:
        message = msgpack.unpackb(body)
    except ValueError as error:
        raise GarbledMessage(f"the message is not msgpack: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise GarbledMessage("the message is not a map with an 'op'")
    return message


def read_message(read_bytes: Callable[[int], bytes]) -> Message | None:
    """The next message of a stream; None at its end. `read_bytes` gives as many as asked for, fewer at the end."""
    head = read_bytes(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    length = length_of(head)
    body = read_bytes(length)
    return unpack_message(body) if len(body) == length else None
