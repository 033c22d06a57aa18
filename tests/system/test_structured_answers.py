"""A hundred structured answers of a real model, by pydantic's schemas as they come: no key that nobody declared.

pydantic leaves `additionalProperties` out (`BaseModel.model_json_schema`), and so do most who write schemas by hand.
llama.cpp closes such an object (its pull request 8180), and so do we.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, create_model

from tests.support import smollm2
from tests.support.processes import ModelEntry, serving

pytestmark = pytest.mark.system

ANSWERS = 100
MODEL = "smollm2:135m"
FIELDS = ("name", "city", "colour", "animal", "reason", "title", "points", "year", "is_open", "size")
SHAPES: tuple[Any, ...] = (str, int, bool, float)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    entry = ModelEntry("llamacpp", str(smollm2.weights()), context=1024, slots=2)
    with serving(tmp_path_factory.mktemp("gateway"), MODEL, entry) as url:
        yield url


def draw_model(source: random.Random, depth: int = 0) -> type[BaseModel]:
    """Two to four fields; some optional, some an object or a list of objects."""
    fields: dict[str, Any] = {}
    for name in source.sample(FIELDS, source.randint(2, 4)):
        shape = source.choice(SHAPES)
        if depth == 0 and source.random() < 0.25:
            inner = draw_model(source, 1)
            shape = source.choice((inner, list[inner]))  # type: ignore[valid-type]
        fields[name] = (shape | None, None) if source.random() < 0.2 else (shape, ...)
    return create_model(f"Thing{depth}", **fields)


def undeclared(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
    """The keys in `value` that the schema doesn't name, at any depth."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if isinstance(value, list):
        return [key for each in value for key in undeclared(each, schema.get("items", {}), root)]
    if not isinstance(value, dict):
        return []
    options = [schema, *schema.get("anyOf", [])]
    options = [root["$defs"][each["$ref"].rpartition("/")[2]] if "$ref" in each else each for each in options]
    known = {key: inner for each in options for key, inner in each.get("properties", {}).items()}
    found = [key for key in value if key not in known]
    return found + [
        key for name, inner in value.items() if name in known for key in undeclared(inner, known[name], root)
    ]


def test_no_answer_has_a_key_that_was_not_declared(url: str, tmp_path: Path) -> None:
    source, whole, found = random.Random(8180), 0, []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=120) as client:
        for number in range(ANSWERS):
            schema = draw_model(source).model_json_schema()
            answer = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Describe thing {number} of a museum, with every detail."}],
                response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}},
                max_tokens=160,
                temperature=1.0,
                seed=number,
            ).choices[0]
            if answer.finish_reason == "stop":
                whole += 1
                found += undeclared(json.loads(answer.message.content or ""), schema, schema)
    assert found == []
    assert whole >= ANSWERS // 2  # the others ran into max_tokens, in a long text as a rule
