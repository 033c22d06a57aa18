"""What every engine that hands KV caches over must keep, on two engine objects: one prefills, the other decodes."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import jsonschema
import pytest

from engines.base import Answer
from engines.proof import prove
from engines.questions import tokenize_job
from engines.registry import Engine, EngineOptions, open_engine
from engines.sketch import compare
from engines.sketching import sketch_of
from messages.errors import Cancelled, ContextExceeded, EngineUnavailable, InvalidSchema, KVTransferFailed
from messages.jobs import Part, PrefillJob, Question, Sampling, user_prompt
from messages.kv import Block, KVCache, KVLayout
from tests.support.tiny_gguf import TinyModel, write_gguf
from tests.support.tiny_hf import write_hf

ENGINES = ("llamacpp", "mlx", "simulated", pytest.param("vllm", marks=pytest.mark.vllm))
CONTEXT, SLOTS = 4096, 3
SHARED = "".join(f"Criterion {n}: the program reads its input and prints line {n} of the report.\n" for n in range(70))
GREEDY = Sampling(max_tokens=16, temperature=0)
GRADE_SCHEMA = {
    "type": "object",
    "properties": {
        "points": {"type": "integer", "minimum": 0, "maximum": 10},
        "verdict": {"enum": ["pass", "fail"]},
        "remarks": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["points", "verdict", "remarks"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Pair:
    prefill: Engine
    decode: Engine

    def prompt(self, own: str) -> tuple[int, ...]:
        return self.prefill.tokenize(user_prompt(SHARED, own), 0.0).ids

    def cache(self, tokens: tuple[int, ...]) -> KVCache:
        return KVCache(layout_of(self.prefill), tuple(blocks_of(self.prefill, tokens[:-1])))


def layout_of(engine: Engine) -> KVLayout:
    assert engine.info.layout is not None
    return engine.info.layout


def blocks_of(engine: Engine, tokens: tuple[int, ...], **how: object) -> list[Block]:
    blocks: list[Block] = []
    engine.prefill(tokens, blocks.append, **how)
    return blocks


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("model")
    path = write_gguf(folder / "tiny.gguf")
    small = TinyModel(layers=1)  # MLX is slow on CPUs
    hf = write_hf(folder / "tiny", write_gguf(folder / "small.gguf", small), small)
    wide = TinyModel(head_dim=32, seed=1)  # vLLM's attention on CPUs knows none narrower
    vllm = write_hf(folder / "wide", write_gguf(folder / "wide.gguf", wide), wide)
    return {"simulated": "sim:scale=0.001", "llamacpp": str(path), "mlx": str(hf), "vllm": str(vllm)}


@pytest.fixture(scope="module", params=ENGINES)
def pair(request: pytest.FixtureRequest, weights: dict[str, str]) -> Iterator[Pair]:
    options = EngineOptions(weights[request.param], context=CONTEXT, slots=SLOTS, threads=1)
    prefill, decode = open_engine(request.param, replace(options, slots=1)), open_engine(request.param, options)
    yield Pair(prefill, decode)
    prefill.close()
    decode.close()


def test_an_answer_from_a_transferred_cache_is_the_answer_of_a_cold_run(pair: Pair) -> None:
    # Given a prompt of more than 1,000 tokens, prefilled by one engine
    tokens = pair.prompt("def main(): pass")
    assert len(tokens) > 1000
    # When the other decodes it with that cache, and without
    warm = pair.decode.decode(tokens, pair.cache(tokens), GREEDY)
    cold = pair.decode.decode(tokens, None, GREEDY)
    # Then both say the same, and the engine's counter shows who computed the prompt
    assert (warm.text, warm.tokens, warm.finish_reason) == (cold.text, cold.tokens, cold.finish_reason)
    assert (warm.evaluated_tokens, cold.evaluated_tokens) == (1, len(tokens))
    assert warm.tokens


def test_the_kv_transfer_proof_accepts_two_engines_with_the_same_weights(pair: Pair) -> None:
    assert prove(pair.prefill, pair.decode) == ""


def test_two_engines_with_the_same_weights_make_the_same_sketch_to_the_bit(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two engines that can't read one another's file
    made = []
    for number, engine in enumerate((pair.prefill, pair.decode)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
        made.append(sketch_of(engine))
    if pair.prefill.info.engine == "simulated":
        assert made == [None, None]  # it checks every bit of what it gets instead
        return
    # Then the class's blocks of one are the other's
    one, other = made
    assert one
    assert other
    assert (one.name, one.tokens, one.engine) == (other.name, 2047, pair.prefill.info.engine)
    assert compare(one, other) == replace(compare(one, other), problem="", formats_differ=False)
    assert pair.prefill.info.build


def test_the_first_shared_ids_are_those_of_every_prompt_with_this_prefix(pair: Pair) -> None:
    # Given prompts whose suffix begins in different ways
    owns = ("x", " x", "\n\nx", "42", "", "é", ".")
    prompts = [pair.prefill.tokenize(user_prompt(SHARED, own), 0.0) for own in owns]
    # Then their ids agree up to `shared`, which covers nearly all of the prefix
    shared = min(prompt.shared_tokens for prompt in prompts)
    assert len({prompt.ids[:shared] for prompt in prompts}) == 1
    assert shared > 0.95 * min(len(prompt.ids) for prompt in prompts)
    assert len({prompt.shared_tokens for prompt in prompts}) == 1


def test_a_conversation_shares_what_is_the_class_s_and_nothing_of_anybody_s_own(pair: Pair) -> None:
    # Given conversations whose class-wide part is the system's message, or ends within the user's first
    system, asked = Part("system", SHARED, "class"), Part("user", "Grade this: ", "class")
    owns = ("x", " x", "\n\nx", "42", "é", ".")
    for before in ((system,), (system, asked)):
        prompts = [pair.prefill.tokenize((*before, Part("user", own)), 0.0) for own in owns]
        shared = {prompt.shared_tokens for prompt in prompts}
        # Then they share one beginning, nearly all of it, and both engines say the same
        assert len(shared) == 1
        assert len({prompt.ids[: max(shared)] for prompt in prompts}) == 1
        assert max(shared) > 0.95 * min(len(prompt.ids) for prompt in prompts)
        assert pair.decode.tokenize((*before, Part("user", "x")), 0.0) == prompts[0]
    # And roles are part of a prompt
    said = (system, Part("user", "a"), Part("assistant", "b"), Part("user", "c"))
    texts = [said, (*said[:2], Part("user", "b"), said[3]), (Part("user", SHARED, "class"), *said[1:])]
    assert len({pair.prefill.tokenize(prompt, 0.0).ids for prompt in texts}) == 3


def test_questions_are_tokenized_as_whole_prompts_and_share_their_longest_beginning(pair: Pair) -> None:
    # Given a student's prompt, and questions whose beginnings merge with its end in different ways
    ends = ("?", " indeed", "s", "\n\nPoints:", " ", "'s name", "é")
    questions = tuple(Question((Part("user", end + " Why is it so?"),), GREEDY) for end in ends)
    before = user_prompt(SHARED, "def total(values): return sum(value")
    job = PrefillJob("job", "batch", "item", "tiny:1b", before, GREEDY, questions=questions)
    asked = tokenize_job(pair.prefill, job)
    # Then each has the ids of its whole prompt, and what they share is as long as can be
    whole = [pair.prefill.tokenize((*before, *one.suffix), 0.0) for one in questions]
    assert [(*asked.tokens, *one.tokens) for one in asked.questions] == [prompt.ids for prompt in whole]
    assert all(one.tokens for one in asked.questions)
    assert len({one.tokens[0] for one in asked.questions}) > 1
    assert asked.shared_tokens == whole[0].shared_tokens
    assert tokenize_job(pair.decode, job) == asked
    # And an only question has no more than itself, and what merged with it
    only = tokenize_job(pair.prefill, replace(job, questions=questions[:1]))
    (rest,) = only.questions
    assert (*only.tokens, *rest.tokens) == whole[0].ids
    assert 0 <= len(only.tokens) - len(asked.tokens) < 8
    twice = tokenize_job(pair.prefill, replace(job, questions=questions[:1] * 2))
    assert (twice.tokens, twice.questions) == (only.tokens, (rest, rest))


def test_both_engines_tokenize_alike(pair: Pair) -> None:
    assert pair.prefill.tokenize(user_prompt(SHARED, "own"), 5.0) == pair.decode.tokenize(
        user_prompt(SHARED, "own"), 5.0
    )


def test_a_prefill_resumed_from_a_stored_prefix_computes_only_the_rest(pair: Pair) -> None:
    # Given the cache of a prompt, of which the first half is stored
    tokens = pair.prompt("resumed")[:-1]
    layout = layout_of(pair.prefill)
    whole = blocks_of(pair.prefill, tokens)
    half = KVCache(layout, tuple(whole[: len(whole) // 2]))
    # When the prompt is prefilled again from there
    rest: list[Block] = []
    done = pair.prefill.prefill(tokens, rest.append, first=half.num_tokens, resume=half)
    # Then only the missing tokens are computed, and only the missing blocks are emitted
    assert (done.computed_tokens, done.restored_tokens) == (len(tokens) - half.num_tokens, half.num_tokens)
    assert [block.start for block in rest] == [block.start for block in whole[len(whole) // 2 :]]
    # And they lead to the same answer
    full = (*tokens, pair.prompt("resumed")[-1])
    answer = pair.decode.decode(full, KVCache(layout, half.blocks + tuple(rest)), GREEDY)
    assert answer.text == pair.decode.decode(full, None, GREEDY).text
    assert answer.evaluated_tokens == 1


def test_the_pieces_of_a_stream_join_to_the_text(pair: Pair) -> None:
    pieces: list[str] = []
    answer = pair.decode.decode(pair.prompt("stream"), None, GREEDY, on_text=pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces) == answer.text


def test_an_answer_under_a_schema_parses_and_fits_it(pair: Pair) -> None:
    for seed in range(3):
        sampling = Sampling(max_tokens=400, temperature=0.8, seed=seed, json_schema=json.dumps(GRADE_SCHEMA))
        answer = pair.decode.decode(pair.prompt("grade me"), None, sampling)
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), GRADE_SCHEMA)


@pytest.mark.parametrize("schema", ['{"type": "nonsense"}', '{"$ref": "#/nowhere"}'])
def test_a_schema_that_can_not_be_enforced_is_refused(pair: Pair, schema: str) -> None:
    with pytest.raises(InvalidSchema):
        pair.decode.decode(pair.prompt("x"), None, Sampling(max_tokens=8, json_schema=schema))


def test_sampling_repeats_with_its_seed_and_differs_with_another(pair: Pair) -> None:
    tokens = pair.prompt("sample")

    def text(seed: int) -> str:
        return pair.decode.decode(tokens, None, Sampling(max_tokens=24, temperature=1.5, top_p=1, seed=seed)).text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_an_answer_that_max_tokens_cuts_says_so(pair: Pair) -> None:
    answer = pair.decode.decode(pair.prompt("cut"), None, Sampling(max_tokens=2, temperature=1.5, seed=4))
    assert (answer.finish_reason, answer.completion_tokens) == ("length", 2)


def test_concurrent_decodes_in_all_slots_say_what_each_says_alone(pair: Pair) -> None:
    # Given five prompts for three slots, each with its cache and its answer alone
    texts = ("n_ferry=12 ", "max_rain=77 ", "total ", "Grade it. ", "# Rubric ")
    prompts = [pair.prompt(text * 12) for text in texts]
    caches = [pair.cache(prompt) for prompt in prompts]
    alone = [pair.decode.decode(p, c, GREEDY).text for p, c in zip(prompts, caches, strict=True)]
    assert len(set(alone)) > 3
    # When they are decoded at once
    with ThreadPoolExecutor(len(prompts)) as threads:
        together: list[Answer] = list(
            threads.map(lambda both: pair.decode.decode(*both, GREEDY), zip(prompts, caches, strict=True))
        )
    # Then each is as alone, from its own cache
    assert [answer.text for answer in together] == alone
    assert {answer.evaluated_tokens for answer in together} == {1}


def test_a_decode_that_is_stopped_raises_cancelled_and_leaves_its_slot_free(pair: Pair) -> None:
    # Given a long answer, stopped at its first piece
    stop = threading.Event()
    sampling = Sampling(max_tokens=2000, temperature=1.5, top_p=1)
    pieces: list[str] = []

    def stop_now(piece: str) -> None:
        pieces.append(piece)
        stop.set()

    # When it runs
    with pytest.raises(Cancelled):
        pair.decode.decode(pair.prompt("stop me"), None, sampling, on_text=stop_now, stop=stop)
    # Then it ended at once, and all slots still work
    assert len(pieces) == 1
    tokens = pair.prompt("next")
    with ThreadPoolExecutor(SLOTS) as threads:
        answers = list(threads.map(lambda _: pair.decode.decode(tokens, None, GREEDY), range(SLOTS)))
    assert {answer.evaluated_tokens for answer in answers} == {len(tokens)}


def test_a_prefill_that_is_stopped_before_it_begins_raises_cancelled(pair: Pair) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        blocks_of(pair.prefill, pair.prompt("stop"), stop=stop)


def test_the_next_prompt_is_computed_while_blocks_are_stored_if_the_engine_takes_two(pair: Pair) -> None:
    # Given a prompt whose last block can't be stored for now
    tokens, computed, stored = pair.prompt("def main(): pass")[:-1], threading.Event(), threading.Event()

    def store_last(block: Block) -> None:
        if block.end == len(tokens):
            computed.set()
            stored.wait(60)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pair.prefill.prefill, tokens, store_last)
        assert computed.wait(60)
        # When another is given
        second = threads.submit(blocks_of, pair.prefill, tokens)
        # Then it is computed now, unless the engine takes one prompt after the other
        done, _ = wait([second], timeout=60 if pair.prefill.info.prefill_slots > 1 else 1)
        assert bool(done) == (pair.prefill.info.prefill_slots > 1)
        stored.set()
        assert first.result().computed_tokens
        assert second.result()[-1].end == len(tokens)


def test_prompt_and_answer_that_do_not_fit_the_context_are_refused(pair: Pair) -> None:
    tokens = pair.prompt("long")
    with pytest.raises(ContextExceeded):
        pair.decode.decode(tokens, None, Sampling(max_tokens=CONTEXT))
    with pytest.raises(ContextExceeded):
        blocks_of(pair.prefill, tokens * 5)


def test_prompt_and_answer_that_just_fit_the_context_are_accepted(pair: Pair) -> None:
    tokens = pair.prompt("fits")
    tokens = (tokens * 5)[: CONTEXT - 2]
    answer = pair.decode.decode(tokens, None, Sampling(max_tokens=2, temperature=0))
    assert answer.evaluated_tokens == CONTEXT - 2


def test_a_cache_of_another_layout_is_refused(pair: Pair) -> None:
    # Given a cache of a model with twice the heads
    tokens = pair.prompt("layout")
    other = open_engine("simulated", EngineOptions(f"sim:scale=0,layers=2,kv_heads=8,head_dim=8,context={CONTEXT}"))
    cache = KVCache(layout_of(other), tuple(blocks_of(other, tokens[:-1])))
    # Then it is not decoded from
    with pytest.raises(KVTransferFailed, match="layout"):
        pair.decode.decode(tokens, cache, GREEDY)


def test_a_cache_that_leaves_no_token_to_evaluate_is_refused(pair: Pair) -> None:
    tokens = pair.prompt("short")
    with pytest.raises(KVTransferFailed, match="covers"):
        pair.decode.decode(tokens, pair.cache((*tokens, 7)), GREEDY)


@pytest.mark.parametrize("left", [2, 40, 1000])
def test_of_a_cache_of_the_prompt_s_beginning_only_the_rest_is_evaluated(pair: Pair, left: int) -> None:
    # Given the cache of a beginning that ends anywhere, within a block too
    tokens = pair.prompt("def main(): pass # shorter")
    cache = pair.cache(tokens[: len(tokens) - left + 1])
    # When the prompt is decoded from there
    warm, cold = pair.decode.decode(tokens, cache, GREEDY), pair.decode.decode(tokens, None, GREEDY)
    # Then it says what a cold run says, and the engine's counter shows what was left
    assert (warm.text, warm.tokens) == (cold.text, cold.tokens)
    assert warm.evaluated_tokens == left


def test_many_answers_forked_from_one_import_say_what_each_says_alone(pair: Pair) -> None:
    # Given a prompt with more questions than there are slots, and a neighbour with a prompt of its own
    begun, other = pair.prompt("n_ferry=12 " * 12), pair.prompt("max_rain=77 " * 12)
    owns = ("Why? ", "total " * 9, "É", "Is it named? ", "# Rubric ")
    asked = [(*begun, *pair.decode.tokenize(user_prompt("", own), 0.0).ids) for own in owns]
    cache, theirs = pair.cache((*begun, 7)), pair.cache(other)
    alone = [pair.decode.decode(tokens, None, GREEDY).text for tokens in (*asked, other)]
    assert len(set(alone)) > 2
    # When all are answered at once, the questions from one import
    with ThreadPoolExecutor(len(alone)) as threads, pair.decode.pin_cache(begun, cache):
        forked = [threads.submit(pair.decode.decode, tokens, cache, GREEDY) for tokens in asked]
        answers = [one.result() for one in (*forked, threads.submit(pair.decode.decode, other, theirs, GREEDY))]
    # Then each is as alone, and evaluated just what was left of its prompt
    assert [answer.text for answer in answers] == alone
    assert [answer.evaluated_tokens for answer in answers] == [*(len(ids) - len(begun) for ids in asked), 1]
    # and afterwards the same cache serves as before
    assert pair.decode.decode(asked[0], cache, GREEDY).text == alone[0]


@pytest.mark.parametrize("name", ENGINES)
def test_closing_ends_a_decode_in_progress_with_engine_unavailable(name: str, weights: dict[str, str]) -> None:
    # Given an engine at work
    engine = open_engine(name, EngineOptions(weights[name], context=CONTEXT, slots=1, threads=1))
    tokens = engine.tokenize(user_prompt("", "work"), 0.0).ids
    sampling = Sampling(max_tokens=3000, temperature=1.5, top_p=1, json_schema="")
    closing = threading.Thread(target=engine.close)
    # When it is closed while it streams
    with pytest.raises(EngineUnavailable):
        engine.decode(tokens, None, sampling, on_text=lambda _: closing.ident or closing.start())
    closing.join()
    # Then it stays closed, and closing again is harmless
    engine.close()
    with pytest.raises(EngineUnavailable):
        engine.decode(tokens, None, sampling)
