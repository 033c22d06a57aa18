"""JSON is counted before it is read."""

import json
import time

import pytest

from benchmarks.harness import peak_growth
from messages import bounded_json
from messages.bounded_json import TooManyValues
from messages.limits import MAX_BODY_BYTES, MAX_JSON_PIECES

MANY = MAX_JSON_PIECES + 1


@pytest.mark.parametrize(
    "text", ["[" + ",".join(["{}"] * MANY) + "]", json.dumps(["a"] * MANY), "[" * MANY, '{"a":' * MANY, '["' * MANY]
)
def test_too_many_values_are_not_made(text: str) -> None:
    with pytest.raises(TooManyValues):
        bounded_json.loads(text.encode())


@pytest.mark.parametrize(
    "value",
    [
        {"text": '[{,"\\' * (MAX_BODY_BYTES // 16)},  # what is in a text counts nothing
        [*range(MAX_JSON_PIECES - 1)],
        {"messages": [{"role": "user", "content": "x" * 10_000}] * 256},
    ],
)
def test_all_else_is_read_as_it_is(value: object) -> None:
    assert bounded_json.loads(json.dumps(value).encode()) == value


@pytest.mark.parametrize("text", ['"' + "a" * MAX_BODY_BYTES, '"' + "\\" * MAX_BODY_BYTES, '["a' * MANY, "\\" * MANY])
def test_a_text_without_an_end_is_read_once(text: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match=r"."):
        bounded_json.loads(text.encode())
    assert time.process_time() - start < 2


def test_counting_takes_no_memory() -> None:
    text = b"[" + b"[]," * (MAX_BODY_BYTES // 3) + b"[]]"

    def read() -> None:
        with pytest.raises(TooManyValues):
            bounded_json.loads(text)

    assert (peak_growth(read) or 0) < 32 << 20
