"""Engines whose weights were converted from the same model may share KV caches, if the configuration says so.

A GGUF file and a folder of safetensors never have the same fingerprint, because nothing in them proves that they hold
the same weights. With `same_weights` in a model's table, the owner asserts it. These engines then use the family's
fingerprint, which still covers everything on which both must agree.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engines.base import EngineInfo
from engines.rope import Rope, ropes_text
from messages.kv import KVLayout


def family_fingerprint(model: str, engines: Sequence[str], layout: KVLayout, ropes: Sequence[Rope] = ()) -> str:
    """The family's fingerprint: a hash of model, engines, RoPE, and the shape of the KV cache. (The dtype may differ,
    because values are cast.)

    RoPE is included because equal weights don't guarantee that two engines compute the same RoPE from them.
    """
    shape: tuple[object, ...] = (layout.num_layers, layout.kv_heads, layout.head_dim)
    shape += (layout.window, layout.window_layers)
    # Recurrent states are part of the fingerprint only if the model has some, so that older fingerprints stay valid.
    if layout.state_layers:
        shape += (layout.recurrent_layers, layout.both_layers, layout.conv_shape, layout.matrix_shape)
    seed = repr((model, sorted(engines), shape, ropes_text(ropes))).encode()
    return "family-" + hashlib.blake2b(seed, digest_size=16, person=b"kvasir.family").hexdigest()


class InFamily:
    """An engine that uses its family's fingerprint. Everything else is the engine's own."""

    def __init__(self, engine: Any, fingerprint: str) -> None:
        self._engine = engine
        self.info: EngineInfo = replace(engine.info, fingerprint=fingerprint, weights=engine.info.fingerprint)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def in_family(engine: Any, model: str, engines: Sequence[str]) -> Any:
    """The engine with its family's fingerprint, if it belongs to a family and transfers KV caches; otherwise
    unchanged."""
    info: EngineInfo = engine.info
    if info.engine not in engines or info.layout is None or not info.fingerprint:
        return engine
    return InFamily(engine, family_fingerprint(model, engines, info.layout, info.ropes))
