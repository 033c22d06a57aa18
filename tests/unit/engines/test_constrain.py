"""Constraints: whatever a model would like to say, what it may say is JSON that fits the schema."""

import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from engines.huggingface.constrain import Constrainer, Constraint
from engines.huggingface.prompt import HFPrompt
from engines.huggingface.text import TextStream, token_bytes
from messages.errors import ConfigError, InvalidSchema
from tests.contract.test_engines import GRADE_SCHEMA as GRADE

DEMO = Path(__file__).parents[3] / "examples" / "model" / "kvasir-demo"
WIDTH = 2560 + 37  # a model may have more outputs than its tokenizer has tokens


@pytest.fixture(scope="module")
def prompt() -> HFPrompt:
    return HFPrompt(DEMO)


@pytest.fixture(scope="module")
def constrainer(prompt: HFPrompt) -> Constrainer:
    return Constrainer(prompt, WIDTH)


def answer(constraint: Constraint, prompt: HFPrompt, seed: int) -> str:
    """What a model that likes all tokens equally says under a constraint."""
    source, stream, text = np.random.default_rng(seed), TextStream(token_bytes(prompt)), ""
    for _ in range(500):
        token = int(source.choice(np.flatnonzero(constraint.compute_mask())))
        constraint.accept(token)
        if token in prompt.end_ids:
            return text + stream.finish()
        text += stream.push(token)
    raise AssertionError(f"no end after 500 tokens: {text!r}")


@pytest.mark.parametrize("seed", range(5))
def test_a_random_answer_fits_the_schema(constrainer: Constrainer, prompt: HFPrompt, seed: int) -> None:
    text = answer(constrainer.start(json.dumps(GRADE)), prompt, seed)
    jsonschema.validate(json.loads(text), GRADE)


def test_white_space_is_one_space_and_no_line_breaks(constrainer: Constrainer, prompt: HFPrompt) -> None:
    # Given a schema without texts, in which only white space is free
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}}, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    # Then there is one way to write it
    texts = {answer(constrainer.start(json.dumps(schema)), prompt, seed) for seed in range(5)}
    assert texts == {'{"a": 1, "b": [1, 2]}'}


def test_a_mask_is_as_wide_as_the_models_logits_and_rules_out_what_has_no_text(
    constrainer: Constrainer, prompt: HFPrompt
) -> None:
    allowed = constrainer.start(json.dumps(GRADE)).compute_mask()
    assert allowed.shape == (WIDTH,)
    assert allowed.any()
    assert not allowed[2560:].any()
    assert not any(allowed[number] for number in prompt.control_ids)


def test_after_its_end_an_answer_may_go_on_with_nothing_but_an_end(constrainer: Constrainer, prompt: HFPrompt) -> None:
    constraint = constrainer.start('{"type": "boolean"}')
    for token in (*prompt.plain_ids("true"), prompt.control_id("<|im_end|>")):
        assert token is not None
        constraint.accept(token)
    assert set(np.flatnonzero(constraint.compute_mask())) == prompt.end_ids


def test_a_token_that_was_not_allowed_is_reported(constrainer: Constrainer, prompt: HFPrompt) -> None:
    constraint = constrainer.start(json.dumps(GRADE))
    with pytest.raises(InvalidSchema, match="can't be enforced"):
        constraint.accept(prompt.plain_ids("no")[0])


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type": "nonsense"}', "nonsense"),
        ('{"$ref": "#/nowhere"}', "nowhere"),
        ('{"enum": []}', "Unsatisfiable"),
        ('{"type": "integer", "minimum": 3, "maximum": 1}', "minimum"),
        ('{"not": {}}', "not"),
        ('{"type": "string", "pattern": "("}', "unclosed"),
    ],
)
def test_a_schema_that_can_not_be_enforced_is_refused_with_the_reason(
    constrainer: Constrainer, schema: str, reason: str
) -> None:
    with pytest.raises(InvalidSchema, match=reason):
        constrainer.start(schema)


def test_a_model_that_thinks_aloud_is_constrained_when_its_final_channel_opens(tmp_path: Path) -> None:
    # Given a model of the Harmony format
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<|channel|>", "<|message|>", "<|return|>")])
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt = HFPrompt(tmp_path)
    channel, message = (tokenizer.token_to_id(text) for text in ("<|channel|>", "<|message|>"))
    constraint = Constrainer(prompt, WIDTH).start(json.dumps(GRADE))
    # When it thinks, then everything is allowed but to end
    for token in (channel, *prompt.plain_ids("analysis"), message, *prompt.plain_ids("so final it is")):
        allowed = constraint.compute_mask()
        assert set(np.flatnonzero(~allowed)) == prompt.end_ids
        constraint.accept(token)
    # And when it opens its final channel, then the answer fits the schema
    for token in (channel, *prompt.plain_ids("final"), message):
        constraint.accept(token)
    jsonschema.validate(json.loads(answer(constraint, prompt, 1)), GRADE)


def test_a_tokenizer_without_any_end_can_not_be_constrained(tmp_path: Path) -> None:
    # Given a folder in which nothing names a token that ends an answer
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    with pytest.raises(ConfigError, match="ends an answer"):
        Constrainer(HFPrompt(tmp_path), WIDTH)
