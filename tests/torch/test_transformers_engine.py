"""The transformers engine keeps the contract, alone and together with llama.cpp, and says what it can't load."""

import gc
import inspect
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers

from engines.huggingface.prompt import HFPrompt
from engines.logprobs import logprob_gap
from engines.proof import prove
from engines.registry import Engine, EngineOptions, open_engine
from engines.transformers.model import TorchModel, find_weights
from engines.transformers.sampling import Sampler
from messages.errors import Cancelled, ConfigError, KVTransferFailed
from messages.jobs import Sampling, user_prompt
from messages.kv import Block, KVCache
from tests.contract import test_engines as contract
from tests.contract.test_engines import CONTEXT, GREEDY, SHARED, SLOTS, Pair, blocks_of, layout_of
from tests.support.homework import example_prompt
from tests.support.kv_samples import layer_of, prefilled
from tests.support.tiny_gguf import TinyModel, write_gguf
from tests.support.tiny_hf import write_hf

pytestmark = [pytest.mark.torch, pytest.mark.gate]

MODEL = Path(__file__).parents[2] / "examples" / "model"
FOLDER, GGUF = MODEL / "kvasir-demo", MODEL / "kvasir-demo.gguf"
QUESTION = (MODEL.parent / "homework" / "ASSIGNMENT.md").read_text(encoding="utf-8")
WINDOW = 16
CHUNK = 512  # tokens that are computed at a time on a CPU


def load(weights: str, slots: int = SLOTS) -> Engine:
    return open_engine("transformers", EngineOptions(weights, context=CONTEXT, slots=slots, threads=1))


def cache_of(engine: Engine, tokens: tuple[int, ...], **how: Any) -> KVCache:
    """The cache of all tokens but the last."""
    return prefilled(engine, tokens[:-1], **how)


# The contract

for _name, _test in vars(contract).items():
    if _name.startswith("test_") and "pair" in inspect.signature(_test).parameters:
        globals()[_name] = _test


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, tiny = tmp_path_factory.mktemp("random"), TinyModel()  # the demo's model says much the same of any prompt
    weights = f"{write_hf(folder / 'tiny', write_gguf(folder / 'tiny.gguf'), tiny)}?dtype=f32"
    prefill, decode = load(weights, slots=1), load(weights)
    yield Pair(prefill, decode)
    prefill.close()
    decode.close()


def test_closing_ends_a_decode_in_progress_with_engine_unavailable() -> None:
    contract.test_closing_ends_a_decode_in_progress_with_engine_unavailable(
        "transformers", {"transformers": str(FOLDER)}
    )


def test_closing_lets_go_of_the_model() -> None:
    before = count_models()
    engine = load(str(FOLDER))
    assert count_models() == before + 1
    engine.close()
    assert count_models() == before


def count_models() -> int:
    return sum(type(thing) is TorchModel for thing in gc.get_objects())


# KV transfer to and from llama.cpp


@pytest.fixture(scope="module")
def llama() -> Iterator[Engine]:
    engine = open_engine("llamacpp", EngineOptions(str(GGUF), context=CONTEXT, slots=1, threads=1))
    yield engine
    engine.close()


@pytest.mark.parametrize("dtype", ["", "?dtype=f32", "?dtype=bf16"], ids=["as in the weights", "f32", "bf16"])
@pytest.mark.parametrize("towards", ["llamacpp", "transformers"])
def test_a_cache_transferred_between_pytorch_and_llama_cpp_leads_to_the_same_answer(
    llama: Engine, towards: str, dtype: str
) -> None:
    # Given a prompt of several chunks, which both tokenize alike, prefilled by one engine
    torch_engine = load(f"{FOLDER}{dtype}", slots=1)
    prefill, decode = (torch_engine, llama) if towards == "llamacpp" else (llama, torch_engine)
    prompt = user_prompt("", example_prompt("code", "brookside"))  # one that the model knows: no token is a near tie
    tokens = prefill.tokenize(prompt, 0.0).ids
    assert tokens == decode.tokenize(prompt, 0.0).ids
    assert len(tokens) > CHUNK
    cache = cache_of(prefill, tokens)
    # When the other decodes from it, and cold
    sampling = Sampling(max_tokens=24, temperature=0)
    warm, cold = decode.decode(tokens, cache, sampling), decode.decode(tokens, None, sampling)
    torch_engine.close()
    # Then it says the same, and evaluated one prompt token
    assert (warm.text, warm.tokens) == (cold.text, cold.tokens)
    assert (warm.evaluated_tokens, cold.evaluated_tokens) == (1, len(tokens))
    assert warm.completion_tokens == 24


# Prefill


def test_blocks_leave_while_later_ones_are_to_be_computed_and_a_stop_ends_the_rest(pair: Pair) -> None:
    # Given a prompt of several chunks
    tokens, stop = pair.prompt("early"), threading.Event()
    emitted: list[Block] = []
    assert len(tokens) > 2 * CHUNK

    # When it is stopped at its first block
    def emit(block: Any) -> None:
        emitted.append(block)
        stop.set()

    with pytest.raises(Cancelled):
        pair.prefill.prefill(tokens, emit, stop=stop)
    # Then only the first chunk had been computed
    assert emitted[-1].end == CHUNK


def test_a_stop_takes_effect_between_two_layers() -> None:
    # Given a model of three layers, and a check that fails at its second layer
    model = TorchModel(find_weights(str(FOLDER)))
    calls: list[None] = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 3:  # before the work, before layer 1, before layer 2
            raise Cancelled("enough")

    # When it computes
    run = model.new_run()
    with pytest.raises(Cancelled):
        model.compute(run, [1, 2, 3], check)
    # Then the work ended there
    assert (len(calls), run.fed_tokens) == (3, 0)


@pytest.mark.parametrize("resumed", [1, 32, 300, 500, 999])
@pytest.mark.parametrize("first", [0, 64, 512])
def test_a_prefill_from_any_stored_prefix_gives_the_blocks_of_a_whole_one(pair: Pair, resumed: int, first: int) -> None:
    # Given a prompt, and the cache of a beginning that may end inside a block or a chunk
    tokens = pair.prompt("resume")[:1000]
    whole = cache_of(pair.prefill, tokens).blocks
    prefix = cache_of(pair.prefill, tokens[: resumed + 1])
    # When it is prefilled from there, without the blocks that are stored already
    rest: list[Any] = []
    done = pair.prefill.prefill(tokens[:-1], rest.append, first=first, resume=prefix)
    # Then the others are what they would have been
    assert (done.computed_tokens, done.restored_tokens) == (999 - resumed, resumed)
    expected = [block for block in whole if block.end > first]
    assert [(block.start, block.end) for block in rest] == [(block.start, block.end) for block in expected]
    for block, other in zip(rest, expected, strict=True):
        np.testing.assert_allclose(block.data, other.data, atol=1e-4)


def test_a_prefix_longer_than_the_prompt_is_refused(pair: Pair) -> None:
    tokens = pair.prompt("longer")
    with pytest.raises(KVTransferFailed, match="covers"):
        blocks_of(pair.prefill, tokens[:100], resume=cache_of(pair.prefill, tokens[:102]))


def test_bfloat16_travels_as_its_bit_pattern() -> None:
    engine, precise = load(f"{FOLDER}?dtype=bf16"), load(f"{FOLDER}?dtype=f32")
    tokens = engine.tokenize(user_prompt(SHARED, "bits"), 0.0).ids[:200]
    ours, exact = cache_of(engine, tokens), cache_of(precise, tokens)

    assert ours.layout.dtype == "bf16"
    for layer in range(ours.layout.num_layers):
        patterns = np.stack(layer_of(ours, layer))
        assert patterns.dtype == np.uint16
        floats = (patterns.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(floats, np.stack(layer_of(exact, layer)), atol=0.3)
    assert prove(engine, engine) == ""
    engine.close()
    precise.close()


# Models whose caches are not transferred


# Sliding windows


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A tiny gpt-oss with random weights, and the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    config = transformers.GptOssConfig(
        vocab_size=1536,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        initializer_range=0.3,
        eos_token_id=1535,
        pad_token_id=1533,
    )
    torch.manual_seed(4)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder)
    engine = load(str(folder), slots=1)
    yield engine
    engine.close()


def test_what_is_expected_within_an_answer_is_read_after_what_was_computed_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    scores, compute = TorchModel.scores, TorchModel.compute

    def counted(how: Any, model: TorchModel, run: Any, tokens: Any, check: Any) -> Any:
        read.append(len(tokens))
        return how(model, run, tokens, check)

    # Given the answer to a question, forked from a cache
    engine = load(str(FOLDER))
    ids = engine.tokenize(user_prompt(QUESTION, ""), 0.0).ids
    cache = cache_of(engine, ids[:101])
    tokens = (*ids[:100], *ids[200:240])
    with engine.pin_cache(ids, cache):
        answer = engine.decode(tokens, cache, GREEDY)
        monkeypatch.setattr(TorchModel, "scores", lambda *given: counted(scores, *given))
        monkeypatch.setattr(TorchModel, "compute", lambda *given: counted(compute, *given))
        # When what may follow its beginning is asked, and a little later
        place = (*tokens, *answer.tokens[:5])
        warm, further = engine.top_logprobs(place, cache), engine.top_logprobs((*place, 7), cache)
        # Then a token is read for each; and what was imported is as it was
        assert read == [1, 1]
        assert engine.decode(tokens, cache, GREEDY).tokens == answer.tokens
    assert logprob_gap(engine.top_logprobs(place, None), warm) < 0.01
    assert logprob_gap(engine.top_logprobs((*place, 7), None), further) < 0.01
    engine.close()


def test_a_sliding_window_models_layout_names_its_layers(gpt_oss: Engine) -> None:
    layout = layout_of(gpt_oss)
    assert (layout.window, layout.window_layers, layout.full_layers) == (WINDOW, (0, 2), (1, 3))


@pytest.mark.parametrize("length", [2, 10, 16, 17, 40, 3 * WINDOW + 1, 700])
def test_a_transferred_window_leads_to_the_answer_of_a_cold_run(gpt_oss: Engine, length: int) -> None:
    tokens = gpt_oss.tokenize(user_prompt(QUESTION, QUESTION), 0.0).ids[:length]
    sampling = Sampling(max_tokens=3 * WINDOW, temperature=0)

    warm, cold = gpt_oss.decode(tokens, cache_of(gpt_oss, tokens), sampling), gpt_oss.decode(tokens, None, sampling)

    assert warm.tokens == cold.tokens
    assert len(set(warm.tokens)) > 8
    assert (warm.evaluated_tokens, cold.evaluated_tokens) == (1, length)


@pytest.mark.parametrize("begun", [5, 16, 100])
def test_answers_forked_from_a_window_leave_it_as_it_was(gpt_oss: Engine, begun: int) -> None:
    ids = gpt_oss.tokenize(user_prompt(QUESTION, ""), 0.0).ids
    cache = cache_of(gpt_oss, ids[: begun + 1])
    prompts = [(*ids[:begun], *ids[start : start + 30]) for start in (200, 240, 280)]
    sampling = Sampling(max_tokens=2 * WINDOW, temperature=0)

    with gpt_oss.pin_cache(ids, cache):
        forked = [gpt_oss.decode(tokens, cache, sampling) for tokens in (*prompts, prompts[0])]

    assert [one.tokens for one in forked[:3]] == [gpt_oss.decode(one, None, sampling).tokens for one in prompts]
    assert forked[3].tokens == forked[0].tokens
    assert {one.evaluated_tokens for one in forked} == {30}


def test_a_window_of_another_prompt_leads_to_another_answer(gpt_oss: Engine) -> None:
    """Else the tests above would prove nothing."""
    one, other = (
        gpt_oss.tokenize(user_prompt(QUESTION, own), 0.0).ids[-200:] for own in ("", "\nWrite all of it in capitals.")
    )
    cache, foreign = cache_of(gpt_oss, one), cache_of(gpt_oss, other)
    sampling = Sampling(max_tokens=3 * WINDOW, temperature=0)

    mixed = gpt_oss.decode(one, KVCache(cache.layout, cache.blocks, foreign.window), sampling)

    assert mixed.tokens != gpt_oss.decode(one, None, sampling).tokens


@pytest.mark.parametrize("shared", [5, 16, 100, 300])
def test_a_sliding_window_prefill_resumes_from_the_shared_prefix(gpt_oss: Engine, shared: int) -> None:
    # Given a prompt of which the class-wide part is stored
    tokens = gpt_oss.tokenize(user_prompt(QUESTION, ""), 0.0).ids[:400]
    whole = cache_of(gpt_oss, tokens)
    prefix = cache_of(gpt_oss, tokens[: shared + 1])
    # When the rest is prefilled from there
    resumed = cache_of(gpt_oss, tokens, resume=prefix)
    # Then blocks and window are those of a full computation, and so is the answer
    assert whole.window is not None
    assert resumed.window is not None
    np.testing.assert_allclose(resumed.window.data, whole.window.data, atol=1e-4)
    for block, other in zip(resumed.blocks, whole.blocks, strict=True):
        np.testing.assert_allclose(block.data, other.data, atol=1e-4)
    sampling = Sampling(max_tokens=32, temperature=0)
    assert gpt_oss.decode(tokens, resumed, sampling).tokens == gpt_oss.decode(tokens, None, sampling).tokens


def test_the_kv_transfer_proof_accepts_a_sliding_window_model(gpt_oss: Engine) -> None:
    assert prove(gpt_oss, gpt_oss) == ""


# Decode


def test_a_stop_string_ends_the_answer_and_is_left_out(pair: Pair) -> None:
    # Given an answer, and a piece from its middle
    tokens = pair.prompt("stop string")
    text = pair.decode.decode(tokens, None, GREEDY).text
    word = text[len(text) // 2 :][:6]
    # When that piece is a stop string
    pieces: list[str] = []
    sampling = Sampling(max_tokens=16, temperature=0, stop=("never said", word))
    answer = pair.decode.decode(tokens, None, sampling, on_text=pieces.append)
    # Then the answer ends before it, and not a letter of it was streamed
    assert (answer.text, answer.finish_reason) == (text[: text.index(word)], "stop")
    assert "".join(pieces) == answer.text


def test_the_likeliest_token_alone_is_what_greedy_takes(pair: Pair) -> None:
    tokens = pair.prompt("likeliest")
    greedy = pair.decode.decode(tokens, None, GREEDY).tokens
    for only in ({"top_k": 1}, {"top_p": 0.0}):
        sampling = Sampling(max_tokens=16, temperature=2.0, **{"top_p": 1.0} | only)  # type: ignore[arg-type]
        assert pair.decode.decode(tokens, None, sampling).tokens == greedy


SCORES = np.log(np.array([0.05, 0.4, 0.15, 0.3, 0.1], np.float32))


@pytest.mark.parametrize(
    ("limits", "possible"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.6}, {1, 3}),  # 0.4 + 0.3 reaches it
        ({"top_p": 0.75}, {1, 3, 2}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),  # of 0.85: 0.7 is 82%
        ({"top_p": 0.6, "temperature": 0.05}, {1}),  # what is left at this temperature is one token, nearly always
        ({"top_p": 0.75, "temperature": 5.0}, {1, 3, 2}),  # top_p counts before the temperature flattens
    ],
)
def test_top_k_then_top_p_then_temperature_choose(limits: dict[str, float], possible: set[int]) -> None:
    sampler = Sampler(Sampling(max_tokens=1, **{"temperature": 1.0, "top_p": 1.0} | limits))  # type: ignore[arg-type]
    drawn = [sampler.choose(SCORES) for _ in range(400)]
    assert {token for token in drawn if drawn.count(token) > 4} == possible


def test_tokens_are_drawn_as_often_as_their_scores_say() -> None:
    sampler = Sampler(Sampling(max_tokens=1, temperature=1, top_p=1))
    drawn = [sampler.choose(SCORES) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, np.exp(SCORES), atol=0.03)


def test_a_token_that_is_ruled_out_is_never_chosen() -> None:
    scores = np.where(np.arange(5) == 2, SCORES, -np.inf)
    for sampling in (Sampling(max_tokens=1, temperature=0), Sampling(max_tokens=1, temperature=5, top_p=1, top_k=4)):
        assert {Sampler(sampling).choose(scores) for _ in range(20)} == {2}


# What can't be loaded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model's folder, to be spoilt."""
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))


def refused(weights: str | Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        load(str(weights))
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no model folder.*nowhere")


def test_a_file_in_place_of_a_folder_is_refused() -> None:
    refused(GGUF, "is a file; the transformers engine takes a model folder")


def test_a_hub_name_that_can_not_be_had_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refused("nobody/no-such-model", "nobody/no-such-model")


def test_a_truncated_weights_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(folder, "model.safetensors is damaged: .* bytes are missing")


def test_weights_that_lack_a_tensor_are_refused(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "lacks 1 of the model's tensors, for example 'model.layers.1.self_attn.k_proj.weight'")


def test_weights_of_other_shapes_are_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 160', '"hidden_size": 96'))
    refused(folder, "can't load")


def test_a_model_that_is_no_causal_language_model_is_refused(folder: Path) -> None:
    transformers.T5Config(eos_token_id=2559, pad_token_id=2557).save_pretrained(folder)
    refused(folder, "can't load.*T5Config")


@pytest.mark.parametrize(
    ("query", "match"),
    [("dtype=q4", "dtype must be one of"), ("device=tpu", "not on 'tpu'"), ("threads=2", "unknown option 'threads'")],
)
def test_a_wish_that_is_not_understood_is_refused(query: str, match: str) -> None:
    refused(f"{FOLDER}?{query}", match)


def test_asking_for_cuda_where_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(f"{FOLDER}?device=cuda", "finds no CUDA device")


def test_a_model_whose_keys_depend_on_the_prompts_length_hands_nothing_over(folder: Path) -> None:
    # Given a model with dynamically scaled RoPE
    config = folder / "config.json"
    scaled = '"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_theta"'
    config.write_text(config.read_text().replace('"rope_theta"', scaled))
    # Then it decodes, and hands nothing over
    engine = load(str(folder))
    tokens = HFPrompt(folder).tokenize(user_prompt("", "Hello"), 0.0).ids
    assert engine.decode(tokens, None, GREEDY).evaluated_tokens == len(tokens)
    assert engine.info.layout is None
    assert not engine.info.capabilities.exports_kv
    with pytest.raises(KVTransferFailed, match="RoPE"):
        engine.prefill(tokens, lambda record: None)


def test_the_registration_tells_the_device_in_use(pair: Pair) -> None:
    assert pair.decode.info.device == ("cuda" if torch.cuda.is_available() else "cpu")
