"""LangChain's own client, unmodified, asks the gateway."""

from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.support.gateway import ServedGateway
from tests.support.pipeline import MODEL, Pipeline

SAID = [
    SystemMessage("Be brief."),
    HumanMessage("What is a queue?"),
    AIMessage("A line."),
    HumanMessage("And a stack?"),
]


# A token takes 50 ms: an answer in no time is one piece.
PACED = "sim:scale=1,prefill=1000000,decode=20,answer=8,spread=1"


class Grade(BaseModel):
    """What an answer is worth."""

    letter: Literal["A", "B", "C"]
    points: int


def chat(served: ServedGateway, **options: Any) -> ChatOpenAI:
    """As its user makes it, with nothing but another URL."""
    asked: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": SecretStr("x"), "model": MODEL}
    return ChatOpenAI(**asked, max_retries=0, **options)


def test_a_conversation_is_answered_whole_and_in_pieces(served: ServedGateway, pipeline: Pipeline) -> None:
    pipeline.start(PACED)
    model = chat(served, temperature=0, seed=7, max_tokens=12)

    whole = model.invoke(SAID)
    pieces = list(model.stream(SAID, stream_usage=True))
    together = pieces[0]
    for piece in pieces[1:]:
        together += piece

    assert isinstance(whole, AIMessage)
    assert isinstance(together, AIMessageChunk)
    assert whole.content
    assert together.content == whole.content
    assert sum(bool(piece.content) for piece in pieces) > 1
    assert whole.usage_metadata
    assert whole.usage_metadata["output_tokens"] > 0
    assert together.usage_metadata == whole.usage_metadata
    assert together.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


def test_a_batch_has_its_answers_in_the_order_of_its_questions(served: ServedGateway, pipeline: Pipeline) -> None:
    pipeline.start()
    model = chat(served, temperature=0, seed=7, max_tokens=12)
    questions = [f"What is {name}?" for name in ("a queue", "a stack", "a heap", "a tree")]

    together = [made.content for made in model.batch(list(questions))]

    assert together == [model.invoke(question).content for question in questions]
    assert len(set(map(str, together))) == len(questions)


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_structured_output_is_of_its_class(served: ServedGateway, pipeline: Pipeline, method: Any) -> None:
    pipeline.start()
    if method != "json_mode":
        made: Any = chat(served, max_tokens=40).with_structured_output(Grade, method=method).invoke("Grade this.")
        assert isinstance(made, Grade)
    else:
        made = chat(served).with_structured_output(method=method, schema=None).invoke("Grade this as JSON.")
        assert isinstance(made, dict)


def test_functions_to_choose_among_are_refused_naming_what_is_served(served: ServedGateway, pipeline: Pipeline) -> None:
    pipeline.start()
    with pytest.raises(openai.BadRequestError) as refused:
        chat(served).bind_tools([Grade]).invoke("Grade this.")
    assert refused.value.param == "tools"
    assert "tool_choice" in str(refused.value)
    assert "json_schema" in str(refused.value)
