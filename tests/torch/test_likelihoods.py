"""The shares of a criterion's steps are those that Transformers itself gives for SmolLM2, whoever was asked."""

import json
import threading
from collections.abc import Sequence
from functools import partial
from math import prod

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from benchmarks.matrix_caches import prefilled
from decode_worker.likelihoods import value_likelihoods
from engines.registry import EngineOptions, open_engine
from messages.jobs import PrefillJob, Sampling, user_prompt
from tests.support import smollm2, smollm2_folders

pytestmark = pytest.mark.torch

STEPS = [0, 0.5, 1, 2, 10]
SCHEMA = json.dumps({"type": "object", "properties": {"evidence": {"type": "string"}, "points": {"enum": STEPS}}})
PROMPT = user_prompt("Grade this student's answer to: what is 2 + 2?\n", "It is 4.\nGive 0, 0.5, 1, 2 or 10 points.")
START = '{"evidence": "It is 4.", "points": '
ANSWER = START + '1, "feedback": "Right."}'
OPENED = {"transformers": partial(smollm2_folders.folder, "f32"), "llamacpp": smollm2.weights}


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2_folders.folder("f32"), dtype=torch.float32)


def expected(model: transformers.PreTrainedModel, ids: Sequence[int], tokenizer: Tokenizer) -> list[float]:
    """By one pass each: the product of a step's tokens, times what doesn't make it another step (10 after a 1)."""
    start = tokenizer.encode(START, add_special_tokens=False).ids
    goes_on = [tokenizer.decode([id])[:1] in tuple("0123456789.") for id in range(tokenizer.get_vocab_size())]
    found = []
    for step in map(json.dumps, STEPS):
        tokens = tokenizer.encode(START + step, add_special_tokens=False).ids
        assert tokens[: len(start)] == start
        with torch.no_grad():
            shares = model(torch.tensor([[*ids, *tokens]])).logits[0].double().softmax(-1)
        share = prod(float(shares[len(ids) + at - 1, tokens[at]]) for at in range(len(start), len(tokens)))
        longer = any(other != step and other.startswith(step) for other in map(json.dumps, STEPS))
        found.append(share * float(shares[-1][~torch.tensor(goes_on)].sum()) if longer else share)
    return [share / sum(found) for share in found]


@pytest.mark.parametrize("name", OPENED)
def test_every_engine_tells_the_shares_that_transformers_does(name: str, model) -> None:
    engine = open_engine(name, EngineOptions(str(OPENED[name]()), 2048, slots=1, threads=2))
    try:
        ids = engine.tokenize(PROMPT, 0.0).ids
        tokenizer = Tokenizer.from_file(str(smollm2_folders.folder("f32") / "tokenizer.json"))
        answer = tokenizer.encode(ANSWER, add_special_tokens=False).ids
        assert engine.text_of(answer) == ANSWER
        by_transformers = expected(model, ids, tokenizer)
        assert sorted(by_transformers)[-2] > 0.05, "else little would be compared"

        for cache in (None, prefilled(engine, ids)):
            ask = PrefillJob("j", "b", "i", "m", PROMPT, Sampling(120, json_schema=SCHEMA), tokens=ids)
            shares = value_likelihoods(engine, ask, cache, ANSWER, answer, threading.Event())
            assert shares == pytest.approx(by_transformers, abs=0.02)
    finally:
        engine.close()
