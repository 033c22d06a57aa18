"""Recurrent models of random weights whose state is not moved: refused by name, or decoded without KV transfer."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engines.registry import EngineOptions, open_engine
from messages.errors import ConfigError, KVTransferFailed
from messages.jobs import Sampling

pytestmark = pytest.mark.torch

DEMO = Path(__file__).parents[2] / "examples" / "model" / "kvasir-demo"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 64}
OWN: dict[str, dict[str, Any]] = {
    "jamba": {"num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "bamba": MAMBA2 | {"attn_layer_indices": [2]},
    "recurrent_gemma": {"lru_width": 64, "block_types": ["recurrent", "recurrent", "attention"]},
    "rwkv": {"context_length": 1024, "attention_hidden_size": 64},
    "minimax": {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"] * 2},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
    },
    "granitemoehybrid": MAMBA2
    | {
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 96,
    },
    "lfm2": {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_ff_dim": 96,
        "block_auto_adjust_ff_dim": False,
    },
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 128},
}
GREEDY = Sampling(max_tokens=8, temperature=0)


def a_model(folder: Path, kind: str) -> Any:
    """Its weights in `folder`, beside the demo model's tokenizer."""
    demo = AutoConfig.from_pretrained(DEMO)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=demo.vocab_size, **SIZES, **OWN[kind])
    model = AutoModelForCausalLM.from_config(config).eval().float()
    model.save_pretrained(folder)
    for file in DEMO.glob("*token*"):
        shutil.copy(file, folder)
    return model


@pytest.mark.parametrize("kind", ["jamba", "bamba", "recurrent_gemma", "rwkv", "minimax"])
def test_a_model_that_transformers_computes_wrongly_in_parts_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    a_model(tmp_path, kind)

    with pytest.raises(ConfigError, match=f"'{kind}' model .*needs another engine"):
        open_engine("transformers", EngineOptions(str(tmp_path), context=1024, slots=1, threads=1))


@pytest.mark.parametrize("kind", ["nemotron_h", "granitemoehybrid", "lfm2", "falcon_h1"])
def test_other_recurrent_models_are_decoded_without_a_kv_transfer(tmp_path: Path, kind: str) -> None:
    # Given its answer to a prompt longer than what is computed at a time, token by token from all before it
    model = a_model(tmp_path, kind)
    prompt = torch.randint(3, 100, (1, 600), generator=torch.Generator().manual_seed(1))
    expected: list[int] = []
    with torch.inference_mode():
        for _ in range(GREEDY.max_tokens):
            so_far = torch.cat([prompt, torch.tensor([expected], dtype=torch.long)], dim=1)
            expected.append(int(model(so_far, use_cache=False).logits[0, -1].argmax()))

    engine = open_engine("transformers", EngineOptions(str(tmp_path), context=1024, slots=1, threads=1))
    answer = engine.decode(tuple(prompt[0].tolist()), None, GREEDY)
    with pytest.raises(KVTransferFailed, match=f"Kvasir can't transfer the recurrent state of a '{kind}' model"):
        engine.prefill((3, 4, 5), lambda _: None)
    engine.close()

    assert list(answer.tokens) == expected
    assert answer.evaluated_tokens == 600
    assert not engine.info.capabilities.exports_kv
