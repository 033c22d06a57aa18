"""Loads a Hugging Face folder into MLX, on whatever device MLX has, and looks at the caches that the model makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from engines import mlx_kv
from engines.hf_weights import HFFolder, layout_of
from messages.errors import ConfigError, HandOverFailed
from messages.kv import KVLayout

_PROBE = [[0, 1, 2]]


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `layout` is None where nothing can be handed over, and `no_hand_over` says why."""

    model: Any
    device: str
    num_logits: int
    layout: KVLayout | None
    no_hand_over: str


def load(folder: HFFolder) -> LoadedModel:
    """Load the weights and run the model once. Raises ConfigError, in one sentence, if MLX can't."""
    try:
        model, config = load_model(folder.path, lazy=bool(folder.dtype))
        if folder.dtype and "quantization" not in config:
            model.set_dtype(getattr(mx, folder.dtype))
        mx.eval(model.parameters())
        caches = make_prompt_cache(model)
        logits = model(mx.array(_PROBE), cache=caches)
        mx.eval(logits, mlx_kv.arrays(caches))
    except Exception as error:  # noqa: BLE001  the library raises whatever its loaders meet
        raise ConfigError(f"MLX can't load {folder.path}: {' '.join(str(error).split()):.300}") from None
    layout, reason = _layout(folder, caches)
    return LoadedModel(model, device(), int(logits.shape[-1]), layout, reason)


def device() -> str:
    """Where MLX computes: "metal", "cuda" or "cpu"."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _layout(folder: HFFolder, caches: list[Any]) -> tuple[KVLayout | None, str]:
    """What MLX is seen to keep must be what the configuration says, which PyTorch goes by."""
    try:
        seen = mlx_kv.observed_layout(caches)
        stated = layout_of(folder, seen.dtype)
    except HandOverFailed as error:
        return None, str(error)
    if seen != stated:
        return None, f"MLX keeps {seen} where {folder.path / 'config.json'} states {stated}"
    return seen, ""
