"""Engines whose weights are conversions of the same model may share KV caches, where the configuration says so.

A GGUF file and a folder of safetensors never have the same fingerprint, because nothing in them proves that they hold
the same weights. `same_weights` in a model's table is the owner's word for it: such engines then go by the name of the
family, which covers what both must agree on all the same.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engines.base import EngineInfo
from engines.rope import Rope, ropes_text
from messages.kv import KVLayout


def family_fingerprint(model: str, engines: Sequence[str], layout: KVLayout, ropes: Sequence[Rope] = ()) -> str:
    """The family's name: model, engines, RoPE, and the shape of the KV cache (the dtype may differ: it is cast).

    RoPE is part of it because an owner's word for weights is none for what two engines compute from them.
    """
    shape: tuple[object, ...] = (layout.num_layers, layout.kv_heads, layout.head_dim)
    shape += (layout.window, layout.window_layers)
    if layout.state_layers:  # left out where there are none: names made before there were states stay
        shape += (layout.recurrent_layers, layout.both_layers, layout.conv_shape, layout.matrix_shape)
    seed = repr((model, sorted(engines), shape, ropes_text(ropes))).encode()
    return "family-" + hashlib.blake2b(seed, digest_size=16, person=b"kvasir.family").hexdigest()


class InFamily:
    """An engine that goes by its family's fingerprint; everything else is the engine's own."""

    def __init__(self, engine: Any, fingerprint: str) -> None:
        self._engine = engine
        self.info: EngineInfo = replace(engine.info, fingerprint=fingerprint, weights=engine.info.fingerprint)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def in_family(engine: Any, model: str, engines: Sequence[str]) -> Any:
    """The engine under its family's name, if it belongs to one and hands anything over; else as it is."""
    info: EngineInfo = engine.info
    if info.engine not in engines or info.layout is None or not info.fingerprint:
        return engine
    return InFamily(engine, family_fingerprint(model, engines, info.layout, info.ropes))
