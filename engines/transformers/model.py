"""Loads a causal language model into PyTorch, and feeds it tokens."""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import DynamicCache

from engines.entry import options_in
from engines.huggingface import weights as hf_weights
from engines.huggingface.rope import FULL, SLIDING, stated_rope
from engines.huggingface.weights import DTYPES, HFFolder, open_folder
from engines.rope import Rope, difference
from engines.transformers import kv as torch_kv
from engines.transformers.kv import TORCH_TYPES
from messages.errors import ConfigError, EngineUnavailable, KVTransferFailed
from messages.kv import KVLayout

Check = Callable[[], None]  # raises an error if the computation must stop

_DEVICES = ("cpu", "cuda")
# transformers 5.23 computes these models wrongly if a sequence is split into two calls. After 100 tokens, the logits
# differ from those of a single call: jamba loses its recurrent states, and bamba counts positions from 0 again.
_WRONG_IN_PARTS = {"bamba", "jamba", "recurrent_gemma"}


@dataclass(frozen=True, slots=True)
class Weights:
    """The parts of `weights`: a model folder, a dtype (None: as in the files), a device."""

    folder: HFFolder
    dtype: torch.dtype | None
    device: torch.device


def find_weights(weights: str) -> Weights:
    """`FOLDER` or a hub's `OWNER/NAME`, then, if wanted, `?dtype=f32|f16|bf16` and `&device=cpu|cuda`.

    A hub's model is downloaded into the hub's own cache, once. Raises ConfigError.
    """
    name, _, query = weights.partition("?")
    settings = options_in(weights, query, "dtype", "device")
    dtype = DTYPES.get(settings.get("dtype", ""), settings.get("dtype"))
    if dtype is not None and dtype not in TORCH_TYPES:
        raise ConfigError(f"weights {weights!r}: dtype must be one of {', '.join(TORCH_TYPES)}, not {dtype!r}")
    device = _device(settings.get("device", ""))
    if Path(name).expanduser().is_file():
        raise ConfigError(
            f"{name} is a file; the transformers engine takes a model folder, or OWNER/NAME of a model on a hub"
        )
    return Weights(open_folder(name), TORCH_TYPES[dtype] if dtype else None, device)


@dataclass
class ModelRun:
    """One sequence: its cache, and the engine's counter of tokens that it was fed."""

    past: DynamicCache
    fed_tokens: int = 0

    @property
    def length(self) -> int:
        """Tokens in the cache, restored ones included."""
        return int(self.past.get_seq_length())


class TorchModel:
    """A loaded model. Callable from any thread, each with its own ModelRun."""

    def __init__(self, weights: Weights) -> None:
        """Raises ConfigError if the folder holds no causal language model, or a damaged one."""
        self._model = _load(weights)
        self.config = self._model.config.get_text_config(decoder=True)
        self.device = self._model.device
        # The name of `forward`'s cache argument. transformers 5.24 renamed it from `past_key_values` to `cache`.
        self._cache = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        self._local = threading.local()
        self._require_cache(weights.folder)
        for layer in getattr(self._model.base_model, "layers", ()):
            layer.register_forward_pre_hook(self._between_layers)

    @property
    def context(self) -> int:
        """Positions that the model was trained for."""
        return int(getattr(self.config, "max_position_embeddings", 0) or 4096)

    def new_run(self) -> ModelRun:
        """An empty sequence."""
        return ModelRun(DynamicCache(config=self.config))

    def compute(self, run: ModelRun, tokens: Sequence[int], check: Check) -> None:
        """Extend the cache without computing logits. On CUDA the work may still be running when this returns.

        `check` runs before every layer, and stops the work by raising.
        """
        if tokens:
            with self._feeding(run, tokens, check) as arguments:
                self._model.base_model(**arguments)

    def scores(self, run: ModelRun, tokens: Sequence[int], check: Check) -> NDArray[np.float32]:
        """Extend the cache. Returns every token's logit after the last one. `check` is the same as in `compute`."""
        with self._feeding(run, tokens, check) as arguments:
            logits = self._model(**arguments, logits_to_keep=1).logits
            scores: NDArray[np.float32] = logits[0, -1].float().cpu().numpy()
        return scores

    def layout(self, folder: HFFolder) -> KVLayout:
        """The layout of this model's caches, which config.json states and which PyTorch's caches must confirm.

        Raises KVTransferFailed, which says why they can't be transferred.
        """
        # This call refuses models with unsupported caches. Such caches lack the attributes that are read below.
        hf_weights.layout_of(folder, "f32")
        run = self.new_run()
        self.compute(run, range(4), lambda: None)
        observed_layout = torch_kv.layout_of(run.past)
        stated_layout = hf_weights.layout_of(folder, observed_layout.dtype)
        if observed_layout != stated_layout:
            raise KVTransferFailed(
                f"PyTorch's KV cache has the layout {observed_layout}, but config.json states {stated_layout}"
            )
        return observed_layout

    def ropes(self, folder: HFFolder) -> tuple[Rope, ...]:
        """The model's RoPE as its module computes it. It must be what config.json states. Raises KVTransferFailed."""
        module = getattr(self._model.base_model, "rotary_emb", None)
        # The module has one set of frequencies for all layers, or one for each kind of layer.
        prefixes = {"": FULL} if hasattr(module, "inv_freq") else {f"{kind}_": kind for kind in (FULL, SLIDING)}
        observed_ropes = []
        for prefix in prefixes:
            frequencies = getattr(module, f"{prefix}inv_freq", None)
            if frequencies is None:
                raise KVTransferFailed(
                    f"Kvasir does not know where transformers keeps the RoPE of a {folder.model_type!r} model"
                )
            scale = float(getattr(module, f"{prefix}attention_scaling"))
            observed_ropes.append(Rope(tuple(frequencies.double().tolist()), scale))
        stated_ropes = tuple(stated_rope(folder.text, kind) for kind in prefixes.values())
        if wrong := difference(observed_ropes, stated_ropes):
            raise KVTransferFailed(f"transformers does not compute the RoPE that config.json states: {wrong}")
        return stated_ropes

    def _require_cache(self, folder: HFFolder) -> None:
        """Raises ConfigError if the model does not keep a sequence in the kind of cache that it is given here.

        Some bring a cache of their own; some take this one, and begin again with each call.
        """
        run = self.new_run()
        try:
            for _ in range(2):
                self.compute(run, [0], lambda: None)
            problem = "" if run.length == run.fed_tokens else "it stored nothing in the cache"
        except Exception as error:  # noqa: BLE001  each model's own
            problem = _first_line(error)
        if problem:
            raise ConfigError(
                f"transformers can't continue a sequence of a {folder.model_type!r} model from its KV cache: "
                f"{problem:.200}; {folder.path} needs another engine"
            )

    @contextmanager
    def _feeding(self, run: ModelRun, tokens: Sequence[int], check: Check) -> Iterator[dict[str, Any]]:
        self._local.check = check
        ids = torch.tensor([list(tokens)], device=self.device)
        try:
            check()
            with torch.inference_mode():
                yield {"input_ids": ids, self._cache: run.past, "use_cache": True}
        except RuntimeError as error:
            raise EngineUnavailable(f"PyTorch failed on {self.device}: {_first_line(error)}") from error
        finally:
            self._local.check = None
        run.fed_tokens += len(tokens)

    def _between_layers(self, *_: Any) -> None:
        if check := getattr(self._local, "check", None):
            check()


def _device(name: str) -> torch.device:
    if name and name not in _DEVICES:
        raise ConfigError(f"the transformers engine runs on {' or '.join(_DEVICES)}, not on {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"PyTorch {torch.__version__} finds no CUDA device: install its CUDA build, or use device=cpu"
        )
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _load(weights: Weights) -> Any:
    transformers.utils.logging.disable_progress_bar()
    if weights.folder.model_type in _WRONG_IN_PARTS:
        raise ConfigError(
            f"transformers computes a {weights.folder.model_type!r} model wrongly if prompt and answer are computed "
            f"in separate calls: {weights.folder.path} needs another engine"
        )
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            weights.folder.path,
            dtype=weights.dtype or "auto",
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # noqa: BLE001  OSError, ValueError, SafetensorError, RuntimeError, KeyError…
        raise ConfigError(f"PyTorch can't load {weights.folder.path}: {_first_line(error)}") from None
    missing_tensors = sorted(report["missing_keys"])
    if missing_tensors:
        raise ConfigError(
            f"{weights.folder.path} is not complete: it lacks {len(missing_tensors)} of the model's tensors, "
            f"for example {missing_tensors[0]!r}"
        )
    try:
        return model.eval().to(weights.device)
    except RuntimeError as error:
        raise ConfigError(f"{weights.device} can't hold {weights.folder.path}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
