"""RoPE as an MLX model computes it: measured on the model's modules, and corrected if it differs from config.json.

mlx-lm's modules read only some of the parameters: YaRN's ramp is always truncated, its attention factor is recomputed,
and qwen's mixtures of experts ignore scaling.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from engines.huggingface.rope import FULL, SLIDING, head_dim, stated_rope
from engines.huggingface.weights import ROTATED_IN_HALVES
from engines.mlx.folder import NO_SCALING
from engines.rope import Rope, difference
from messages.errors import ConfigError, KVTransferFailed

# Positions at which angles are measured. They go up to 4 million, because the slowest pair in use turns by only 1e-7
# radians per position.
_OFFSETS = [4**power for power in range(12)]
_MAX_ANGLE = 1.5  # radians; less than half a turn, but clearly more than rounding errors


class StatedRoPE(nn.Module):  # type: ignore[misc]
    """Rotates keys and queries, (…, tokens, head_dim), by the given frequencies."""

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self._dimensions = 2 * len(rope.frequencies)
        self._periods = 1 / mx.array(rope.frequencies, mx.float32)
        self._scale = rope.scale

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """`x` rotated; its first token is at position `offset`."""
        if self._scale != 1:
            x = x.at[..., : self._dimensions].multiply(self._scale)
        return mx.fast.rope(
            x, self._dimensions, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods
        )


def as_stated(model: nn.Module, config: Mapping[str, Any]) -> tuple[Rope, ...]:
    """What each kind of layer computes, after layers that differ from config.json were given the RoPE that it states.

    Returns () for an architecture whose formulas are not known here; it then transfers nothing. Raises ConfigError if
    what is computed still differs, or if MLX ignores a scaling whose formula is not known.
    """
    config = config.get("text_config") or config
    if config.get("model_type") not in ROTATED_IN_HALVES or config.get("rope_traditional"):
        return ()
    ropes: dict[str, Rope] = {}
    for attention in (layer.self_attn for layer in model.layers if "self_attn" in layer):
        kind = SLIDING if getattr(attention, "is_sliding", False) else FULL
        try:
            ropes[kind] = ropes.get(kind) or stated_rope(config, kind)
        except KVTransferFailed as error:
            if config["model_type"] in NO_SCALING:
                raise ConfigError(
                    f"MLX ignores this model's RoPE scaling: {error}; use the transformers engine"
                ) from None
            return ()
        if _wrong(attention.rope, ropes[kind], config):
            attention.rope = StatedRoPE(ropes[kind])
            if wrong := _wrong(attention.rope, ropes[kind], config):
                raise ConfigError(f"MLX does not compute the RoPE that config.json states: {wrong}; use another engine")
    return tuple(ropes[kind] for kind in (FULL, SLIDING) if kind in ropes)


def measure_rope(rope: nn.Module, size: int) -> Rope:
    """What a module does to a key of `size` numbers, measured from the angles of its pairs at growing positions."""
    unit_rows = _rotate_units(rope, size, 1)
    partner = int(np.argmax(np.abs(unit_rows[0, 1:]))) + 1
    pairs = np.arange(partner)
    frequencies = np.zeros(partner)
    for offset in _OFFSETS:
        rotated_rows = _rotate_units(rope, size, offset)
        angles = np.arctan2(rotated_rows[pairs, pairs + partner], rotated_rows[pairs, pairs])
        frequencies = np.where(frequencies * offset < _MAX_ANGLE, angles / offset, frequencies)
    return Rope(tuple(frequencies.tolist()), float(np.hypot(unit_rows[0, 0], unit_rows[0, partner])))


def _wrong(rope: nn.Module, target: Rope, config: Mapping[str, Any]) -> str:
    return difference([measure_rope(rope, head_dim(config))], [target])


def _rotate_units(rope: nn.Module, size: int, offset: int) -> Any:
    """A matrix whose row i is the i-th unit vector, rotated as at position `offset`."""
    rows = rope(mx.eye(size)[None, :, None, :], offset=offset)
    return np.array(rows[0, :, 0].astype(mx.float32)).astype(np.float64)
