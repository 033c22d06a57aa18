"""Loads a Hugging Face folder into MLX on its default device, and examines the caches that the model makes."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

from engines.huggingface.weights import HFFolder, layout_of
from engines.mlx import folder as mlx_folder
from engines.mlx import kv as mlx_kv
from engines.mlx import rope as mlx_rope
from engines.rope import Rope
from messages.errors import ConfigError, KVTransferFailed
from messages.kv import KVLayout

_PROBE = [[0, 1, 2]]


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. If nothing can be transferred, `layout` is None, and `no_kv_transfer` says why."""

    model: Any
    device: str
    num_logits: int
    layout: KVLayout | None
    ropes: tuple[Rope, ...]
    no_kv_transfer: str


def load(folder: HFFolder, context: int) -> LoadedModel:
    """Load the weights and run the model once. `context` is the most tokens of prompt and answer.

    Raises ConfigError, in one sentence, if MLX can't load the model, or would compute something other than config.json
    states.
    """
    mlx_folder.require_no_ignored_window(folder, context)
    try:
        model, config = load_model(
            folder.path,
            lazy=bool(folder.dtype),
            model_config=mlx_folder.config_changes(folder.config),
            get_model_classes=_classes,
        )
        if folder.dtype and "quantization" not in config:
            model.set_dtype(getattr(mx, folder.dtype))
        mx.eval(model.parameters())
        ropes = mlx_rope.as_stated(model, folder.config)
        caches = make_prompt_cache(model)
        logits = model(mx.array(_PROBE), cache=caches)
        mx.eval(logits, mlx_kv.arrays(caches))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  the library's loaders may raise any error
        raise ConfigError(f"MLX can't load {folder.path}: {' '.join(str(error).split()):.300}") from None
    layout, reason = _layout(folder, caches)
    if layout is not None and not ropes:
        layout, reason = None, f"the RoPE of {folder.path.name} is not known here"
    return LoadedModel(model, device(), int(logits.shape[-1]), layout, ropes if layout else (), reason)


def _classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes. The model's class also accepts tensors under transformers 5's names, and scales embeddings as
    transformers does."""
    model, arguments = _get_classes(config)
    kind = str(config.get("model_type"))
    if kind == "gemma3_text":
        return exactly_scaled(model), arguments
    if kind not in ("gpt_oss", "qwen2_moe", "qwen3_moe"):
        return model, arguments

    class Renaming(model):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, Any]) -> Any:
            return super().sanitize(mlx_folder.rename_tensors(kind, weights))

    return Renaming, arguments


def exactly_scaled(model: Any) -> Any:
    """mlx-lm's Gemma 3, with embeddings scaled as transformers scales them.

    Both multiply by the root of `hidden_size`. mlx-lm rounds it to bfloat16 whatever the weights are (gemma3_text.py,
    Gemma3Model), transformers to the weights' dtype (modeling_gemma3.py, Gemma3TextScaledWordEmbedding), and llama.cpp
    keeps float32. For 640 the first is 0.19 % less, which is more than rounding makes of float32 or float16 weights.
    """

    class Scaled(model):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            embeddings = self.model.embed_tokens(inputs)
            scale = mx.array(self.args.hidden_size**0.5)
            correction = scale.astype(embeddings.dtype) / scale.astype(mx.bfloat16).astype(embeddings.dtype)
            logits: mx.array = super().__call__(inputs, cache, embeddings * correction)
            return logits

    return Scaled


def device() -> str:
    """The device on which MLX computes: "metal", "cuda" or "cpu"."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _layout(folder: HFFolder, caches: list[Any]) -> tuple[KVLayout | None, str]:
    """The layout that MLX uses. If it differs from the configuration's, which PyTorch follows: None, and why."""
    try:
        # `layout_of` is called first, because its error says why a model is not supported.
        layout_of(folder, "f32")
        observed_layout = mlx_kv.observed_layout(caches)
        stated_layout = layout_of(folder, observed_layout.dtype)
    except KVTransferFailed as error:
        return None, str(error)
    if observed_layout != stated_layout:
        return None, f"MLX keeps {observed_layout} where {folder.path / 'config.json'} states {stated_layout}"
    return observed_layout, ""
