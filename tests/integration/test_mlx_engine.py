"""The MLX engine on models that llama.cpp has too: KV transfer both ways, the running batch, and how it fails."""

import json
import logging
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import make_prompt_cache
from safetensors.numpy import load_file, save_file

from benchmarks import matrix_models
from engines.huggingface.weights import open_folder
from engines.logprobs import TOP, logprob_gap
from engines.mlx import model as mlx_model
from engines.proof import prove
from engines.registry import Engine, EngineOptions, open_engine
from messages.errors import Cancelled, ConfigError, EngineUnavailable, InvalidSchema, KVTransferFailed
from messages.jobs import Sampling, user_prompt
from messages.kv import Block, Record
from tests.support.kv_samples import prefilled
from tests.support.tiny_gguf import TinyModel, write_gguf
from tests.support.tiny_hf import write_hf

MODEL = Path(__file__).parents[2] / "examples" / "model"
GREEDY = Sampling(max_tokens=16, temperature=0)
PROSE = "the program reads its input line by line, and it prints out the report.\n" * 6
GRADE = json.dumps(
    {
        "type": "object",
        "properties": {"points": {"type": "integer", "minimum": 0, "maximum": 9}, "passed": {"type": "boolean"}},
        "required": ["points", "passed"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True)
class Twins:
    """The same weights in two engines."""

    mlx: Engine
    llamacpp: Engine


def load(weights: Path | str, slots: int = 3, name: str = "mlx") -> Engine:
    return open_engine(name, EngineOptions(str(weights), context=2048, slots=slots, threads=1))


def tiny(folder: Path, architecture: str, layers: int = 2, seed: int = 0) -> tuple[Path, Path]:
    """A folder and a GGUF file of the same weights."""
    model = TinyModel(architecture, layers=layers, seed=seed)
    folder.mkdir(exist_ok=True)
    source = write_gguf(folder / "tiny.gguf", model)
    return write_hf(folder / "tiny", source, model), source


@pytest.fixture(scope="module", params=["kvasir-demo", "qwen2", "gpt-oss"])
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    if request.param == "kvasir-demo":
        # Its float16 values kept as float32, as in its GGUF file, so that both engines compute alike.
        pair = Twins(load(f"{MODEL / 'kvasir-demo'}?dtype=float32"), load(MODEL / "kvasir-demo.gguf", name="llamacpp"))
    else:
        folder, source = tiny(tmp_path_factory.mktemp("tiny"), request.param)
        pair = Twins(load(folder), load(source, name="llamacpp"))
    yield pair
    pair.mlx.close()
    pair.llamacpp.close()


@pytest.mark.parametrize("receiver", ["mlx", "llamacpp"])
def test_both_engines_expect_the_same_next_token_whoever_computed_the_kv_cache(twins: Twins, receiver: str) -> None:
    own, other = (twins.mlx, twins.llamacpp) if receiver == "mlx" else (twins.llamacpp, twins.mlx)
    tokens = own.tokenize(user_prompt("Grade this. ", PROSE), 0.0).ids
    foreign = own.tokenize(user_prompt("Grade that. ", PROSE.replace("line", "word")), 0.0).ids[: len(tokens)]
    cold = own.top_logprobs(tokens, None)

    transferred = own.top_logprobs(tokens, prefilled(other, tokens[:-1]))
    spoilt = own.top_logprobs(tokens, prefilled(own, (*foreign, *tokens)[: len(tokens) - 1]))

    assert list(cold.values()) == sorted(cold.values(), reverse=True)
    assert len(cold) == TOP
    assert sum(map(math.exp, cold.values())) <= 1 + 1e-6
    rounded, wrong = logprob_gap(cold, transferred), logprob_gap(cold, spoilt)
    assert logprob_gap(cold, other.top_logprobs(tokens, None)) < 0.05
    assert rounded < 0.05
    assert wrong > 3 * max(rounded, 0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")[0]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    opened = load(folder)
    yield opened
    opened.close()


@pytest.mark.parametrize("length", [2, 17, 48, 120])
def test_a_cache_handed_from_one_engine_to_the_other_gives_the_answer_of_a_cold_run(twins: Twins, length: int) -> None:
    # Given prompts shorter and longer than a window of 16, and than two blocks
    tokens = twins.mlx.tokenize(user_prompt(PROSE, "own"), 0.0).ids[:length]
    for sender, receiver in ((twins.llamacpp, twins.mlx), (twins.mlx, twins.llamacpp), (twins.mlx, twins.mlx)):
        # When one engine prefills, and the other decodes
        warm = receiver.decode(tokens, prefilled(sender, tokens[:-1]), GREEDY)
        cold = receiver.decode(tokens, None, GREEDY)
        # Then the receiver says what it says by itself, and has evaluated one prompt token
        assert (warm.text, warm.tokens) == (cold.text, cold.tokens)
        assert (warm.evaluated_tokens, cold.evaluated_tokens) == (1, length)


def test_both_engines_tokenize_alike(twins: Twins) -> None:
    for own in ("own", " own", "\n", "a<|im_end|>b", "é"):
        assert twins.mlx.tokenize(user_prompt(PROSE, own), 0.0) == twins.llamacpp.tokenize(user_prompt(PROSE, own), 0.0)


def test_the_engine_proves_its_own_kv_transfer_and_names_its_device(twins: Twins) -> None:
    assert prove(twins.mlx, twins.mlx) == ""
    devices = {"cpu"} if mx.default_device() == mx.cpu else {"metal", "cuda"}
    assert twins.mlx.info.device in devices


def test_blocks_come_out_while_later_ones_are_not_yet_computed(engine: Engine) -> None:
    # Given a prompt of more than three chunks, and a stop that is set at the first block
    tokens = (engine.tokenize(user_prompt(PROSE, ""), 0.0).ids * 30)[:2000]
    stop = threading.Event()
    seen: list[int] = []

    def stop_at_once(record: Record) -> None:
        assert isinstance(record, Block)
        seen.append(record.end)
        stop.set()

    # When it is prefilled, then it ends there: the last block was not needed for the first
    with pytest.raises(Cancelled):
        engine.prefill(tokens, stop_at_once, stop=stop)
    assert seen == [32]


def test_a_prefill_resumed_anywhere_emits_every_block_after_first(engine: Engine) -> None:
    tokens = (engine.tokenize(user_prompt(PROSE, ""), 0.0).ids * 5)[:600]
    whole = prefilled(engine, tokens)
    for position, first in ((64, 64), (64, 0), (50, 32), (600, 576), (600, 600)):
        # Given the cache of a prefix that ends at `position`, within a block or at its end
        prefix = prefilled(engine, tokens[:position])
        records: list[Record] = []
        # When the prompt is prefilled from there
        done = engine.prefill(tokens, records.append, first=first, resume=prefix)
        # Then the rest is computed, and the blocks from `first` on are those of the whole prompt
        assert (done.computed_tokens, done.restored_tokens) == (600 - position, position)
        expected = [block for block in whole.blocks if block.end > first]
        blocks = [record for record in records if isinstance(record, Block)]
        assert [block.start for block in blocks] == [block.start for block in expected]
        for block, same in zip(blocks, expected, strict=True):
            np.testing.assert_allclose(block.data, same.data, rtol=1e-3, atol=1e-4)


def test_a_prefix_longer_than_the_prompt_is_refused(engine: Engine) -> None:
    tokens = engine.tokenize(user_prompt(PROSE, ""), 0.0).ids[:64]
    with pytest.raises(KVTransferFailed, match="covers 64 of the prompt's 40 tokens"):
        engine.prefill(tokens[:40], lambda _: None, resume=prefilled(engine, tokens))


def test_answers_that_join_and_leave_a_running_batch_are_those_they_are_alone(tmp_path: Path) -> None:
    # Given a gpt-oss with windows of 16, and prompts of 3 to 120 tokens, transferred or not, with answers of 1 to 40
    engine = load(tiny(tmp_path, "gpt-oss", layers=4)[0])
    whole = engine.tokenize(user_prompt(PROSE, ""), 0.0).ids
    jobs = [
        (whole[start : start + length], length % 2 == 0, Sampling(max_tokens=answer, temperature=0))
        for start, (length, answer) in enumerate([(90, 40), (3, 1), (16, 24), (17, 30), (120, 5), (41, 12), (50, 20)])
    ]

    def answer(job: tuple[tuple[int, ...], bool, Sampling]) -> tuple[int, ...]:
        tokens, transferred, sampling = job
        cache = prefilled(engine, tokens[:-1]) if transferred else None
        return engine.decode(tokens, cache, sampling).tokens

    alone = [answer(job) for job in jobs]
    # When they run three at a time, each joining as another leaves
    with ThreadPoolExecutor(len(jobs)) as threads:
        together = list(threads.map(answer, jobs))
    # Then nobody's neighbours changed anything
    assert together == alone
    engine.close()


@pytest.mark.parametrize("begun", [3, 16, 17, 90])
def test_answers_forked_from_one_import_are_those_of_cold_runs(tmp_path: Path, begun: int) -> None:
    # Given a gpt-oss with windows of 16, a prompt's beginning, and more ends of it than there are slots
    engine = load(tiny(tmp_path, "gpt-oss", layers=4)[0])
    whole = engine.tokenize(user_prompt(PROSE, ""), 0.0).ids
    cache = prefilled(engine, whole[:begun])
    prompts = [(*whole[:begun], *whole[start : start + own]) for start, own in ((20, 1), (30, 30), (60, 5), (90, 2))]
    cold = [engine.decode(tokens, None, GREEDY) for tokens in prompts]
    # When they are decoded together, and once more
    with engine.pin_cache(whole, cache), ThreadPoolExecutor(4) as threads:
        forked = list(threads.map(lambda tokens: engine.decode(tokens, cache, GREEDY), prompts * 2))
    # Then each is what a cold run says, and evaluated its own tokens only
    assert [answer.tokens for answer in forked] == [answer.tokens for answer in cold] * 2
    assert [answer.evaluated_tokens for answer in forked] == [1, 30, 5, 2] * 2
    engine.close()


def test_free_and_constrained_and_random_answers_share_a_batch(engine: Engine) -> None:
    # Given answers that differ in all that sampling knows
    tokens = engine.tokenize(user_prompt(PROSE, "grade"), 0.0).ids
    kinds = [
        GREEDY,
        Sampling(max_tokens=60, temperature=1.0, seed=3, json_schema=GRADE),
        Sampling(max_tokens=20, temperature=1.5, top_p=1, seed=1),
        Sampling(max_tokens=9, temperature=0, json_schema=GRADE),
        Sampling(max_tokens=30, temperature=0.9, top_p=0.5, top_k=20, seed=2),
    ]
    alone = [engine.decode(tokens, None, kind) for kind in kinds]
    # When they run together, twice over
    with ThreadPoolExecutor(10) as threads:
        together = list(threads.map(lambda kind: engine.decode(tokens, None, kind), kinds * 2))
    # Then each is what it is alone
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone] * 2
    assert 0 <= json.loads(alone[1].text)["points"] <= 9


def test_sampling_means_what_it_says(engine: Engine) -> None:
    # Given one prompt
    tokens = engine.tokenize(user_prompt(PROSE, "x"), 0.0).ids

    def tokens_of(**how: float) -> tuple[int, ...]:
        return engine.decode(tokens, None, Sampling(max_tokens=12, **how)).tokens  # type: ignore[arg-type]

    greedy = tokens_of(temperature=0)
    # Then the narrowest choices are greedy, whatever the temperature, and wide ones differ by seed
    assert tokens_of(temperature=5, top_k=1) == greedy
    assert tokens_of(temperature=5, top_p=0) == greedy
    assert len({tokens_of(temperature=2, top_p=1, seed=seed) for seed in range(4)}) == 4


def test_a_stop_word_ends_the_answer_before_it(engine: Engine) -> None:
    # Given what the model says freely
    tokens = engine.tokenize(user_prompt(PROSE, "x"), 0.0).ids
    free = engine.decode(tokens, None, Sampling(max_tokens=40, temperature=0))
    word = free.text[10:14]
    # When a part of that is a stop word
    pieces: list[str] = []
    answer = engine.decode(tokens, None, Sampling(max_tokens=40, temperature=0, stop=(word,)), on_text=pieces.append)
    # Then the answer ends where it begins, and so do the pieces
    assert answer.text == "".join(pieces) == free.text[: free.text.find(word)]
    assert answer.finish_reason == "stop"
    assert answer.completion_tokens < 40


def test_a_schema_that_is_given_up_on_while_decoding_ends_that_answer_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a constraint that has become too hard after three tokens
    tokens = engine.tokenize(user_prompt(PROSE, "x"), 0.0).ids
    accepted: list[int] = []

    def give_up(_: object, token: int) -> None:
        accepted.append(token)
        if len(accepted) == 3:
            raise InvalidSchema("too hard")

    monkeypatch.setattr("engines.huggingface.constrain.Constraint.accept", give_up)
    # When it runs beside a free answer
    with ThreadPoolExecutor(2) as threads:
        free = threads.submit(engine.decode, tokens, None, Sampling(max_tokens=60, temperature=0))
        with pytest.raises(InvalidSchema, match="too hard"):
            engine.decode(tokens, None, Sampling(max_tokens=60, temperature=0, json_schema=GRADE))
        # Then the other one is not touched
        assert len(free.result().tokens) == 60


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_ids_of_another_vocabulary_are_refused_before_mlx_sees_them(engine: Engine, token: int) -> None:
    with pytest.raises(EngineUnavailable, match="with this model's tokenizer"):
        engine.decode((1, token, 1), None, GREEDY)
    with pytest.raises(EngineUnavailable, match="with this model's tokenizer"):
        engine.prefill((1, token), lambda _: None)


def out_of_memory(*_: object) -> mx.array:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("place", "value"),
    [("engines.mlx.kv.fill", out_of_memory), ("engines.mlx.engine.sampler_for", lambda _: out_of_memory)],
    ids=["while a cache is put in", "while the batch decodes"],
)
def test_a_failure_inside_mlx_is_an_unavailable_engine_which_works_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str, value: object
) -> None:
    # Given a prompt and its cache, and an MLX that fails
    tokens = engine.tokenize(user_prompt(PROSE, "x"), 0.0).ids
    cache = prefilled(engine, tokens[:-1])
    with monkeypatch.context() as patched:
        patched.setattr(place, value)
        # When it is decoded, then the caller hears of it
        with pytest.raises(EngineUnavailable, match="out of memory"):
            engine.decode(tokens, cache, GREEDY)
    # And the next answer is as ever
    assert engine.decode(tokens, cache, GREEDY).evaluated_tokens == 1


@pytest.mark.public_report("ml-explore/mlx-lm 1914")
@pytest.mark.parametrize("step", [2, 3, 15, 17])
def test_a_model_with_windows_fed_several_tokens_a_call_computes_what_it_does_of_all_at_once(
    step: int, tmp_path: Path
) -> None:
    # Given a ring of 16 rows to which mlx-lm appends several rows without letting as many go
    matrix_models.write(tmp_path, "gemma3", 0)
    model = mlx_model.load(open_folder(str(matrix_models.weights_for("mlx", tmp_path, "gemma3"))), 0).model
    ids = np.random.default_rng(step).integers(0, matrix_models.num_plain_tokens(), (1, 70))
    # When a prompt goes far past the window, by steps
    cache = make_prompt_cache(model)
    parts = [np.array(model(mx.array(ids[:, at : at + step]), cache=cache)) for at in range(0, 70, step)]
    # Then no row beyond the window was seen
    whole = np.array(model(mx.array(ids)))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-3 * np.abs(whole).max())


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-6), ("float16", 2e-4), ("bfloat16", 0.0)])
def test_gemma_3s_embeddings_are_scaled_by_the_root_that_transformers_takes(dtype: str, within: float) -> None:
    """modeling_gemma3.py, Gemma3TextScaledWordEmbedding: the root of hidden_size in the weights' dtype. mlx-lm rounds
    it to bfloat16 (gemma3_text.py, Gemma3Model): 25.25 for 25.298."""
    # Given the width of Gemma 3 270M, whose root no bfloat16 holds, and a layer that notes what it is given
    arguments = gemma3_text.ModelArgs(
        "gemma3_text", hidden_size=640, num_hidden_layers=1, intermediate_size=8, num_attention_heads=1, head_dim=8,
        vocab_size=16, sliding_window_pattern=1,
    )  # fmt: skip
    model = mlx_model.exactly_scaled(gemma3_text.Model)(arguments)
    model.set_dtype(getattr(mx, dtype))
    seen: list[mx.array] = []
    model.model.layers = [lambda embeddings, _mask, _cache: seen.append(embeddings) or embeddings]
    # When it is asked
    model(mx.array([[3]]))
    # Then it was given the embedding times that root
    root = mx.array(640**0.5).astype(getattr(mx, dtype))
    expected = model.model.embed_tokens(mx.array([[3]])) * root
    given, due = (float(mx.abs(each.astype(mx.float32)).sum()) for each in (seen[0], expected))
    assert given == pytest.approx(due, rel=within, abs=0.0)


@pytest.mark.public_report("ml-explore/mlx-lm 1776")
def test_a_model_with_windows_and_one_without_in_one_process_answer_from_stored_caches_as_each_alone(
    tmp_path: Path,
) -> None:
    # Given both, as a worker holds them that takes another model's jobs, and for each a prompt past the window of 16
    engines = [load(tiny(tmp_path / name, name, layers=4)[0]) for name in ("gpt-oss", "qwen3")]
    prompts = [engine.tokenize(user_prompt(PROSE, ""), 0.0).ids[:90] for engine in engines]
    cold = [engine.decode(tokens, None, GREEDY).tokens for engine, tokens in zip(engines, prompts, strict=True)]
    caches = [prefilled(engine, tokens[:-1]) for engine, tokens in zip(engines, prompts, strict=True)]

    def answer(number: int) -> tuple[tuple[int, ...], int]:
        found = engines[number].decode(prompts[number], caches[number], GREEDY)
        return found.tokens, found.evaluated_tokens

    # When each cache is used again and again, in turn, and then all at once
    turns = [0, 1] * 4
    in_turn = [answer(number) for number in turns]
    with ThreadPoolExecutor(len(turns)) as threads:
        together = list(threads.map(answer, turns))
    # Then no use of one changed the other
    assert in_turn == together == [(cold[number], 1) for number in turns]
    for engine in engines:
        engine.close()


def test_the_fingerprint_names_the_weights_and_not_the_folder_or_its_files(folder: Path, tmp_path: Path) -> None:
    # Given a model, a copy of it cut into two files, and one with other numbers
    copy = shutil.copytree(folder, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, copy / f"model-{number}.safetensors")
    infos = []
    for path in (folder, copy, tiny(tmp_path / "other", "qwen3", seed=1)[0]):
        opened = load(path)
        infos.append(opened.info)
        opened.close()
    # Then the copy is of the same family, the other isn't, and the tokenizer is the same in all
    assert infos[0].fingerprint == infos[1].fingerprint != infos[2].fingerprint
    assert len({info.tokenizer for info in infos}) == 1


def test_a_model_in_bfloat16_hands_bit_patterns_over(folder: Path) -> None:
    engine = load(f"{folder}?dtype=bfloat16")
    assert engine.info.layout is not None
    assert engine.info.layout.dtype == "bf16"
    tokens = engine.tokenize(user_prompt(PROSE, ""), 0.0).ids
    cache = prefilled(engine, tokens[:-1])
    assert cache.blocks[0].data.dtype == np.uint16
    warm, cold = engine.decode(tokens, cache, GREEDY), engine.decode(tokens, None, GREEDY)
    assert (warm.tokens, warm.evaluated_tokens) == (cold.tokens, 1)
    engine.close()


def edited(folder: Path, target: Path, **changes: object) -> Path:
    """A copy whose config.json differs."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8")) | changes
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def test_a_model_whose_keys_are_not_known_here_decodes_but_hands_nothing_over(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a model whose windows are stated in a way that engines read differently
    with caplog.at_level(logging.WARNING):
        engine = load(edited(folder, tmp_path / "windowed", use_sliding_window=True, sliding_window=64))
    # Then it says that it hands nothing over, and why, and still answers
    assert "which layers use a sliding window" in caplog.text
    assert not engine.info.capabilities.exports_kv
    assert (engine.info.layout, engine.info.fingerprint) == (None, "")
    tokens = engine.tokenize(user_prompt("hello", ""), 0.0).ids
    assert engine.decode(tokens, None, GREEDY).evaluated_tokens == len(tokens)
    with pytest.raises(KVTransferFailed, match="which layers use a sliding window"):
        engine.prefill(tokens, lambda _: None)
    engine.close()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"hidden_size": 32}, "MLX can't load"),
        ({"num_hidden_layers": 3}, "MLX can't load"),
        ({"model_file": "mine.py"}, "MLX can't load"),
    ],
    ids=["unknown architecture", "other sizes", "missing layers", "code of its own"],
)
def test_a_folder_that_mlx_can_not_load_is_refused_in_one_sentence(
    folder: Path, tmp_path: Path, changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as raised:
        load(edited(folder, tmp_path / "edited", **changes))
    assert "\n" not in str(raised.value)


@pytest.mark.system  # a process each
def test_a_program_that_can_not_load_its_folder_ends_without_a_crash(folder: Path, tmp_path: Path) -> None:
    # Given programs that end as soon as a folder is refused, when MLX's own thread may still be at work
    wrong = edited(folder, tmp_path / "edited", hidden_size=32)
    program = f"""
from engines.registry import EngineOptions, open_engine
open_engine("mlx", EngineOptions({str(folder)!r}, context=512)).close()
open_engine("mlx", EngineOptions({str(wrong)!r}, context=512))
"""
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(5)]
    # Then each ends with the refusal, and none is aborted
    assert [run.returncode for run in runs] == [1] * 5
    assert all("MLX can't load" in run.stderr for run in runs)


@pytest.mark.system  # a process each
@pytest.mark.parametrize("last", ["engine.close()", "pass"], ids=["closed", "left open"])
def test_a_process_that_used_the_engine_ends_without_a_crash(folder: Path, last: str) -> None:
    # Given a program that decodes, whether or not it closes the engine
    program = f"""
from engines.registry import EngineOptions, open_engine
from messages.jobs import Sampling
engine = open_engine("mlx", EngineOptions({str(folder)!r}, context=512))
print(len(engine.decode((1, 2, 3), None, Sampling(max_tokens=4, temperature=0)).tokens))
{last}
"""
    # When it runs, several times: MLX's own clean-up raced the interpreter's
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(3)]
    # Then it ends as programs do
    assert [(run.returncode, run.stdout, run.stderr) for run in runs] == [(0, "4\n", "")] * 3
