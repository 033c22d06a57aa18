"""The sizes of a small Qwen3, as training and both file forms need them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything that config.json and a GGUF header say about the weights. `tied`: no output matrix of its own."""

    vocabulary: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    context: int
    rope_theta: float
    rms_epsilon: float
    tied: bool


# About 1.23 million weights: float16 and float32 copies of them are 7.4 MB. Trained on prompts of up to about 2,000
# tokens; the longer context is room that the planning of prompts and answers asks for.
TRAINED = Shape(
    vocabulary=1536,
    layers=4,
    hidden=160,
    heads=4,
    kv_heads=2,
    head_dim=64,
    feed_forward=256,
    context=16_384,
    rope_theta=1_000_000.0,
    rms_epsilon=1e-6,
    tied=True,
)
