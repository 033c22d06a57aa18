"""PyTorch and llama.cpp say the same of the demo model: tokens, logits, answers, and every key and value.

This is what makes llama.cpp's slot files canonical KV: if an adapter permuted, scaled or shifted anything, PyTorch's
`past_key_values` of the same weights would differ.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engines.llamacpp import slotfile
from engines.llamacpp.gguf_file import read_gguf
from engines.llamacpp.model import slot_shape
from messages.kv import KVCache, cast
from tests.support.kv_samples import layer_of

pytestmark = pytest.mark.torch

MODEL = Path(__file__).parents[2] / "examples" / "model"
FOLDER, FILE = MODEL / "kvasir-demo", MODEL / "kvasir-demo.gguf"
CLASS = MODEL.parent / "homework"
QUESTION = (CLASS / "ASSIGNMENT.md").read_text(encoding="utf-8") + "\nHow would you grade this?"
CONTEXT = 4096
NUM_ANSWER = 24
# llama.cpp keeps K and V in float16, and computes attention with it; PyTorch runs in float32 here.
LOGIT_TOLERANCE = 0.05
KV_TOLERANCE = 0.04  # on values up to 10.5; the largest difference seen is 0.023


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def torch_model() -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def slot_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def llama(slot_folder: Path) -> Iterator[httpx.Client]:
    """A llama.cpp server of the GGUF file, of one slot."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(FILE)
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.slot_save_path = f"{slot_folder}/"
    params.endpoint_slots = True
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.verbosity = -1
    server = xllamacpp.Server(params)
    with httpx.Client(base_url=server.listening_address, timeout=60) as client:
        yield client
    del server


def post(llama: httpx.Client, path: str, **fields: Any) -> Any:
    response = llama.post(path, json=fields)
    response.raise_for_status()
    return response.json()


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    """A question in the chat template, as token ids: some hundreds, more than one of llama.cpp's blocks."""
    message = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


@pytest.fixture(scope="module")
def saved_cache(llama: httpx.Client, prompt: list[int], slot_folder: Path) -> KVCache:
    """The prompt's KV cache as llama.cpp computed it, read from its slot file."""
    post(llama, "/completion", prompt=prompt, n_predict=0, id_slot=0, cache_prompt=True)
    post(llama, "/slots/0?action=save", filename="prompt.bin")
    file = slotfile.parse((slot_folder / "prompt.bin").read_bytes())
    assert list(file.tokens) == prompt
    shape = slot_shape(read_gguf(FILE), file)
    return KVCache(shape.layout, tuple(slotfile.to_blocks(file, shape)))


def torch_prefill(torch_model: Any, prompt: list[int]) -> Any:
    import torch

    with torch.no_grad():
        return torch_model(torch.tensor([prompt]), use_cache=True)


def test_the_chat_template_renders_alike(tokenizer: Any, llama: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grade {{ this }}.\n"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ]

    ours = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    theirs = post(llama, "/apply-template", messages=messages)["prompt"]

    assert ours == theirs


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        (CLASS / "submissions" / "foxglovefinn_48106_910006_riverside.Rmd").read_text(encoding="utf-8"),
        "it's  12345\n\n\tx <- c(1,2)\r\n naïve e\u0301 日本語 🙂 \u00a0 end ",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    ],
    ids=["prose", "R Markdown", "odd characters", "special tokens"],
)
def test_all_three_tokenizers_give_the_same_ids(text: str, tokenizer: Any, llama: httpx.Client) -> None:
    from tokenizers import Tokenizer

    from_file = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text, add_special_tokens=False).ids

    assert tokenizer(text)["input_ids"] == from_file
    assert post(llama, "/tokenize", content=text, add_special=False, parse_special=True)["tokens"] == from_file


def test_the_first_tokens_logits_agree(torch_model: Any, llama: httpx.Client, prompt: list[int]) -> None:
    import torch

    logits = torch_prefill(torch_model, prompt).logits[0, -1]
    expected = torch.log_softmax(logits, -1)
    answer = post(llama, "/completion", prompt=prompt, n_predict=1, temperature=0, n_probs=20, cache_prompt=False)
    likeliest = answer["completion_probabilities"][0]["top_logprobs"]

    assert likeliest[0]["id"] == int(expected.argmax())
    assert len(likeliest) == 20
    for entry in likeliest:
        assert entry["logprob"] == pytest.approx(float(expected[entry["id"]]), abs=LOGIT_TOLERANCE)


def test_the_greedy_answer_is_the_same(torch_model: Any, llama: httpx.Client, prompt: list[int]) -> None:
    import torch

    ids = torch.tensor([prompt])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_ANSWER, "do_sample": False}
    expected = torch_model.generate(ids, **settings)[0, len(prompt) :].tolist()
    request = {"prompt": prompt, "n_predict": NUM_ANSWER, "temperature": 0, "cache_prompt": False}

    answer = post(llama, "/completion", return_tokens=True, **request)

    assert answer["tokens"] == expected


def test_every_key_and_value_in_the_slot_file_is_pytorchs(
    torch_model: Any, saved_cache: KVCache, prompt: list[int]
) -> None:
    layers = torch_prefill(torch_model, prompt).past_key_values.layers

    assert saved_cache.num_tokens == len(prompt)
    assert saved_cache.layout.num_layers == len(layers)
    for index, layer in enumerate(layers):
        keys, values = (cast(array, saved_cache.layout.dtype, "f32") for array in layer_of(saved_cache, index))
        # PyTorch: (1, kv_heads, tokens, head_dim); canonical: (tokens, kv_heads, head_dim).
        np.testing.assert_allclose(keys, layer.keys[0].transpose(0, 1).numpy(), atol=KV_TOLERANCE)
        np.testing.assert_allclose(values, layer.values[0].transpose(0, 1).numpy(), atol=KV_TOLERANCE)


def test_the_comparison_would_notice_heads_or_halves_out_of_place(saved_cache: KVCache) -> None:
    for index in range(saved_cache.layout.num_layers):
        keys, values = (cast(array, saved_cache.layout.dtype, "f32") for array in layer_of(saved_cache, index))

        for other in (keys[:, ::-1], np.roll(keys, 1, axis=0), slotfile.to_interleaved(keys), values):
            assert np.abs(other - keys).max() > 100 * KV_TOLERANCE
