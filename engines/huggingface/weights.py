"""What a Hugging Face model folder says about its KV caches (shape and fingerprint), and whether its weights are
complete.

A safetensors file: u64 header length, a JSON header (name: dtype, shape, data_offsets), the tensors' bytes.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engines import cached
from engines.huggingface.rope import GATED_DELTA, head_dim, rope_parameters
from messages.errors import ConfigError, InvalidMessage, KVTransferFailed
from messages.kv import DType, KVLayout

FORMAT = "hf/2"  # must change whenever Kvasir's layout of KV blocks changes, even for the same weights
DTYPES: dict[str, DType] = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
# Models with recurrent layers whose states can't be transferred yet.
_RECURRENT = {"bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2",
              "nemotron_h", "olmo_hybrid", "recurrent_gemma", "rwkv", "zamba", "zamba2"}  # fmt: skip

# Architectures for which PyTorch and MLX split a key into two halves, and rotate number i of the first half together
# with number i of the second. If only the first part of a key is rotated, that part is split into halves.
ROTATED_IN_HALVES = {
    *GATED_DELTA,
    "llama",
    "mistral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "olmo2",
    "phi3",
    "gemma3_text",
}
# Types of RoPE whose angles depend on the prompt's length. Keys computed for a short prompt are wrong in a long one.
_GROWING_ROPE = {"dynamic", "longrope", "su"}
# Fields of config.json that don't affect what the model computes.
_IRRELEVANT = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures",
               "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "tokenizer_class"}  # fmt: skip
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_MAX_HEADER = 100 << 20
_CHUNK = 8 << 20


@dataclass(frozen=True)
class HFFolder:
    """A checked model folder: its config.json, its safetensors files, and the requested dtype ("": the folder's)."""

    path: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    dtype: str

    @property
    def text(self) -> dict[str, Any]:
        """The part of config.json that describes the text model."""
        part = self.config.get("text_config")
        return part if isinstance(part, dict) and self.model_type in GATED_DELTA else self.config

    @property
    def model_type(self) -> str:
        """The model type, such as "qwen3" or "gpt_oss"."""
        return str(self.config.get("model_type", ""))


def open_folder(weights: str) -> HFFolder:
    """The folder named by `FOLDER` or `FOLDER?dtype=float32`, or by a hub name such as `org/model`.

    Raises ConfigError, in one sentence, if it is missing, incomplete, damaged or cut short.
    """
    name, _, dtype = weights.partition("?dtype=")
    if dtype and dtype not in DTYPES:
        raise ConfigError(f"{weights}: the dtype must be one of {', '.join(DTYPES)}, not {dtype!r:.40}")
    path = _local_folder(name)
    config = read_json(path / "config.json")
    if (path / _ADAPTER).exists():
        raise ConfigError(
            f"{path} contains a LoRA adapter besides the model ({_ADAPTER}). Some engines would load the adapter, and "
            "others would ignore it: merge it into the weights, or move it away"
        )
    files = tuple(_weight_files(path))
    for file in files:
        for _ in _tensors(file):
            pass
    return HFFolder(path, config, files, dtype)


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """A JSON object from a model folder; {} where an optional one is missing. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        if not path.parent.is_dir():
            raise ConfigError(f"there is no model folder {path.parent}") from None
        raise ConfigError(f"{path.parent} is not a complete Hugging Face model folder: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content


def layout_of(folder: HFFolder, dtype: DType) -> KVLayout:
    """The model's KV layout, from its config.json. Raises KVTransferFailed, which says why its KV cache can't be
    transferred."""
    config, kind = folder.text, folder.model_type
    if kind in _RECURRENT:
        raise KVTransferFailed(f"Kvasir can't transfer the recurrent state of a {kind!r} model")
    if kind not in ROTATED_IN_HALVES:
        raise KVTransferFailed(f"Kvasir does not know how a {kind!r} model keeps its keys")
    partial = rope_parameters(config).get("partial_rotary_factor", 1) != 1 and kind not in GATED_DELTA
    if partial or config.get("rope_traditional") or "kv_lora_rank" in config:
        raise KVTransferFailed(f"{folder.path.name} rotates or compresses its keys in a way that Kvasir does not know")
    if str(rope_parameters(config)["rope_type"]) in _GROWING_ROPE:
        raise KVTransferFailed("the model scales its RoPE with the prompt, so its keys depend on the prompt's length")
    try:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        size = head_dim(config)
        if kind in GATED_DELTA:
            return _gated_delta(config, KVLayout(layers, kv_heads, size, dtype))
        window_layers = _window_layers(config, kind, layers)
        window = int(config["sliding_window"]) if window_layers else 0
        return KVLayout(layers, kv_heads, size, dtype, window, window_layers)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise KVTransferFailed(f"{folder.path / 'config.json'} states no attention sizes: {error!r}") from None
    except InvalidMessage as error:
        raise KVTransferFailed(str(error)) from None


def fingerprint(folder: HFFolder, layout: KVLayout, tokenizer_hash: str) -> str:
    """Names the KV family: configuration (RoPE is part of it), tokenizer, weights, format, block length.

    The same for MLX and PyTorch from the same files.
    """
    parts = {
        "format": FORMAT,
        "config": {key: value for key, value in folder.config.items() if key not in _IRRELEVANT},
        "tokenizer": tokenizer_hash,
        "weights": weights_digest(folder),
        "block_tokens": layout.block_tokens,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def rounding(folder: HFFolder, dtype: DType) -> str:
    """The rounding of the weights, as `EngineInfo.rounding` names it; `dtype` if they aren't quantized."""
    quantized = folder.config.get("quantization") or folder.config.get("quantization_config")
    if not quantized:
        return dtype
    return "q8" if isinstance(quantized, dict) and quantized.get("bits") == 8 else "q4"


def builds(*packages: str) -> str:
    """Names and versions of packages, such as "mlx 0.32.4, mlx-lm 0.32.2"."""
    return ", ".join(f"{package} {version(package)}" for package in packages)


def weights_digest(folder: HFFolder) -> str:
    """SHA-256 over every tensor's name, type, shape and bytes, however they are split into files.

    It is cached in the user's cache folder by the files' paths, sizes and times, because 60 GB take a minute to read.
    """
    stats = [(file, file.stat()) for file in folder.files]
    identity = "\0".join(f"{file.resolve()}\0{cached.file_identity(stat)}" for file, stat in stats)

    def compute_digest() -> str:
        digests = sorted(digest for file in folder.files for digest in _tensor_digests(file))
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    return cached.weights_digest(identity, compute_digest)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte position in the file
    end: int


def _local_folder(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        return path
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        return path
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except Exception as error:  # noqa: BLE001  the hub client raises its own errors and those of its HTTP client
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"there is no model folder {name}, and the model can't be fetched from the hub: {reason:.200}"
        ) from None


def _weight_files(path: Path) -> list[Path]:
    if (path / _INDEX).exists():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{path / _INDEX} has no weight_map: download it again")
        files = [path / str(name) for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(path.glob("model*.safetensors"))
    missing_files = [file.name for file in files if not file.is_file()]
    if missing_files or not files:
        description = f"weights file {missing_files[0]}" if missing_files else "model*.safetensors"
        raise ConfigError(f"{path} is not a complete Hugging Face model folder: it has no {description}")
    return files


def _tensors(file: Path) -> Iterator[_Tensor]:
    """The file's tensors in the order of its header. Raises ConfigError if the file is damaged or cut short."""
    try:
        size = file.stat().st_size
        with file.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ValueError("the file ends inside its header")
            header = json.loads(source.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
                if not 8 + length <= start <= end <= size:
                    raise ValueError(f"{end - size:,} bytes are missing at the end of the file")
                yield _Tensor(name, str(entry["dtype"]), tuple(map(int, entry["shape"])), start, end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the weights file {file} is damaged: {error}; download or copy it again") from None


def _tensor_digests(file: Path) -> Iterator[str]:
    with file.open("rb") as source:
        for tensor in sorted(_tensors(file), key=lambda tensor: tensor.start):
            digest = hashlib.sha256()
            source.seek(tensor.start)
            bytes_left = tensor.end - tensor.start
            while bytes_left and (chunk := source.read(min(bytes_left, _CHUNK))):
                digest.update(chunk)
                bytes_left -= len(chunk)
            yield f"{tensor.name} {tensor.dtype} {tensor.shape} {digest.hexdigest()}"


def _gated_delta(config: dict[str, Any], attention: KVLayout) -> KVLayout:
    """The layout with its recurrent layers: all except every fourth, unless config.json says otherwise."""
    interval = int(config.get("full_attention_interval") or 4)
    kinds = config.get("layer_types") or [
        "full_attention" if (index + 1) % interval == 0 else "linear_attention" for index in range(attention.num_layers)
    ]
    if unsupported_kinds := set(kinds) - {"linear_attention", "full_attention"}:
        raise KVTransferFailed(f"the model has layers of the unsupported kind {sorted(unsupported_kinds)[0]!r:.40}")
    keys, values = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key_size, value_size = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    return replace(
        attention,
        recurrent_layers=tuple(index for index, kind in enumerate(kinds) if kind == "linear_attention"),
        conv_shape=(2 * keys * key_size + values * value_size, int(config["linear_conv_kernel_dim"]) - 1),
        matrix_shape=(values, key_size, value_size),
    )


def _window_layers(config: dict[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """The layers that attend to a sliding window."""
    kinds = config.get("layer_types")
    if kinds is None and kind == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"] * layers
    if kinds is None and kind == "gemma3_text":
        pattern = int(config.get("sliding_window_pattern") or 6)
        kinds = (["sliding_attention"] * (pattern - 1) + ["full_attention"]) * layers
    if kinds is None:
        if config.get("sliding_window") and config.get("use_sliding_window", True):
            raise KVTransferFailed("config.json does not state which layers use a sliding window (layer_types)")
        return ()
    unsupported_kinds = set(kinds[:layers]) - {"sliding_attention", "full_attention"}
    if unsupported_kinds:
        raise KVTransferFailed(f"the model has layers of the unsupported kind {sorted(unsupported_kinds)[0]!r:.40}")
    return tuple(index for index, name in enumerate(kinds[:layers]) if name == "sliding_attention")
