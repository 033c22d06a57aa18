"""What the proof at start-up asks of engines; that it tells a good transfer from a bad one is in tests/contract."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engines.base import Capabilities, EngineInfo, TokenizedPrompt
from engines.proof import prove
from messages.errors import KVTransferFailed
from messages.jobs import Part
from messages.kv import KVLayout


class Listening:
    """Has one token for each character, and hands nothing over."""

    def __init__(self, layout: KVLayout) -> None:
        can = Capabilities(prefill=True, decode=True, exports_kv=True, imports_kv=True)
        self.info = EngineInfo("mlx", "cpu", 8192, 1, "family", "t", layout, can, chars_per_token=1.0)
        self.asked: Sequence[int] = ()

    def tokenize(self, prompt: Sequence[Part], clock: float) -> TokenizedPrompt:
        return TokenizedPrompt(tuple(range(sum(len(part.text) for part in prompt))), 0)

    def prefill(self, tokens: Sequence[int], emit: Any) -> None:
        self.asked = tokens
        raise KVTransferFailed("heard")


@pytest.mark.parametrize("window", [0, 128, 4096])
def test_the_prompt_is_longer_than_the_sliding_window(window: int) -> None:
    engine: Any = Listening(KVLayout(2, 2, 16, "f16", window, (0,) if window else ()))
    assert prove(engine, engine) == "the KV transfer at start-up failed: heard"
    assert len(engine.asked) > max(window, 500)
    # And no longer than the context
    engine.info = replace(engine.info, context=300)
    prove(engine, engine)
    assert len(engine.asked) < 300


def test_a_text_of_more_tokens_than_expected_makes_the_prompt_no_longer() -> None:
    engine: Any = Listening(KVLayout(2, 2, 16, "f16", 512, (0,)))
    prove(engine, engine)
    as_expected = len(engine.asked)
    engine.info = replace(engine.info, chars_per_token=4.0)  # and has a token for each character all the same
    prove(engine, engine)
    assert len(engine.asked) == as_expected
