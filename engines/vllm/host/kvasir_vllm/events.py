"""What vLLM's connector is asked for and what it says. Both ends import this module, and it nothing.

Who wants something of the connector has a folder, named by one word, in the folder that both reach (`/dev/shm`, or the
`folder` of the connector's extra configuration). In it are the keys and values that travel, as files, and a datagram
socket (`SOCKET`), at which what happens to a request is heard. Files have random names: who can't look into the folder
can name none.

A request takes part by `kv_transfer_params` of the form {"kvasir": {...}}:
    version     VERSION
    key         a word of its own
    folder      where its files are
    block       the length of a block of our KV cache, in tokens
    emit        None, or the position at which the first block to give out begins
    inject      None, or a file's name and how many tokens it holds: of the full layers, (layers, 2, tokens, heads,
                dim), then of the sliding-window layers, so much of the end as they look back at
    sampling    None: the likeliest is taken; else temperature, top_p, top_k, seed
What comes back beside its last token is {"kvasir": {...}}: version, instance (another one each time vLLM is started),
vllm (its release), device, model, context, sizes (of the model's configuration).

A datagram is a JSON object:
    evaluated   id (the key), tokens: how many of its prompt were scheduled so far; instance
    block       id, file, start, end: some blocks, one behind the other; shape (num_layers, kv_heads, head_dim, dtype,
                window, window_layers)
    window      id, file, position, shape: what a prompt's sliding-window layers look back at from its end
    failed      id, kind ("kv"), why
"""

import json
from typing import Any

VERSION = 4  # version of this protocol and of the one in `wire`
SOCKET = "events.sock"
LARGEST = 1 << 16
NAME = "kvasir"


def pack_datagram(message: dict[str, Any]) -> bytes:
    """A datagram."""
    return json.dumps(message).encode()


def unpack_datagram(datagram: bytes) -> dict[str, Any]:
    """The message of a datagram. Raises ValueError."""
    message = json.loads(datagram)
    if not isinstance(message, dict) or not {"op", "id"} <= message.keys():
        raise ValueError("the datagram must be a JSON object with the keys op and id")
    return message
