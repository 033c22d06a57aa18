"""When a worker starts, proves that KV caches can be transferred: it transfers a small one, and compares the answer
with a cold run.

Engines declare what they can do, but releases and builds differ, and most failures are silent: the receiver computes
the prompt again, or answers from a cache that it misread.
"""

import re

from engines.base import DecodeEngine, EngineInfo, PrefillEngine
from engines.rope import difference
from messages.errors import InvalidPrompt, KvasirError
from messages.jobs import Part, Sampling, user_prompt
from messages.kv import Record, assemble_cache

_PROMPT_TOKENS = 600
_BEYOND_WINDOW = 100  # the prompt is at least this many tokens longer than a sliding window
_ANSWER_TOKENS = 6


_OUTSIDE = "; prompts go to {}, outside private networks"


def outside_in(why_no_kv: str) -> str:
    """The host outside private networks that a reason from `prove` names; "" if there is none."""
    match = re.search(_OUTSIDE.format("(.+)"), why_no_kv)
    return match[1] if match else ""


def prove(prefill: PrefillEngine, decode: DecodeEngine) -> str:
    """Transfer a prompt's KV cache from `prefill` to `decode`, which may be the same engine. "": proved; otherwise why
    not, in one sentence."""
    reason = _obstacle(prefill.info, decode.info)
    if reason:
        return reason
    try:
        return _compare(prefill, decode)
    except KvasirError as error:
        return f"the KV transfer at start-up failed: {error}"


def _obstacle(prefill: EngineInfo, decode: EngineInfo) -> str:
    if not prefill.capabilities.exports_kv or prefill.layout is None:
        destination_note = _OUTSIDE.format(prefill.outside) if prefill.outside else ""
        return f"the {prefill.engine} engine can't give out a KV cache{destination_note}"
    if not decode.capabilities.imports_kv or decode.layout is None:
        return f"the {decode.engine} engine takes no KV cache in"
    if rope_difference := difference(prefill.ropes, decode.ropes):
        return (
            f"{prefill.engine} and {decode.engine} compute different keys, {rope_difference}: give both the same model"
        )
    if prefill.fingerprint != decode.fingerprint:
        return f"the engines hold different weights: KV family {prefill.fingerprint}, not {decode.fingerprint}"
    return prefill.layout.why_unsupported


def _compare(prefill: PrefillEngine, decode: DecodeEngine) -> str:
    layout = prefill.info.layout
    assert layout is not None
    length = max(_PROMPT_TOKENS, layout.window + _BEYOND_WINDOW)
    tokens = _prompt(prefill, min(prefill.info.context, decode.info.context), length)
    records: list[Record] = []
    prefill.prefill(tokens[:-1], records.append)
    cache = assemble_cache(layout, records)
    greedy = Sampling(max_tokens=_ANSWER_TOKENS, temperature=0)
    warm, cold = decode.decode(tokens, cache, greedy), decode.decode(tokens, None, greedy)
    if cold.evaluated_tokens != len(tokens):
        return (
            f"a cold run evaluated {cold.evaluated_tokens} of {len(tokens)} prompt tokens: its counter proves nothing"
        )
    if warm.evaluated_tokens != 1:
        return f"the decoder evaluated {warm.evaluated_tokens} prompt tokens of a transferred cache, not 1"
    if (warm.text, warm.tokens) != (cold.text, cold.tokens):
        return f"the transferred cache led to another answer: {warm.text!r:.60}, and a cold run to {cold.text!r:.60}"
    return ""


def _prompt(engine: PrefillEngine, context: int, length: int) -> tuple[int, ...]:
    """The ids of a prompt of `length` tokens, or fewer if the context is small.

    The text is cut to that length, because digits can take more tokens than other text (in Gemma 3 2.3 times as many),
    and each token is computed twice.
    """
    lines = (f"Line {number} of {number * number}: is {number * 7 % 31} prime?\n" for number in range(length))
    length = min(length, context - _ANSWER_TOKENS)
    text = "".join(lines)[: int(length * (engine.info.chars_per_token or 4))]
    try:
        return engine.tokenize(user_prompt("", text), 0.0).ids[:length]
    except InvalidPrompt:  # the model has no chat template
        return engine.tokenize((Part("raw", text),), 0.0).ids[:length]
