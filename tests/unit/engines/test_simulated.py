"""The simulated engine: settings, and a KV cache that it knows again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.registry import EngineOptions
from engines.simulated.engine import SimulatedEngine, open_engine
from messages.errors import ConfigError, EngineUnavailable, KVTransferFailed
from messages.jobs import Part, Sampling, user_prompt
from messages.kv import Block, KVCache, Record, Window, assemble_cache, is_finite

FAST = "sim:scale=0"


def engine(weights: str = FAST, slots: int = 1) -> SimulatedEngine:
    return open_engine(EngineOptions(weights, slots=slots))


def prefilled(machine: SimulatedEngine, tokens: tuple[int, ...]) -> KVCache:
    records: list[Record] = []
    machine.prefill(tokens, records.append)
    assert machine.info.layout is not None
    return assemble_cache(machine.info.layout, records)


def test_settings_left_out_have_defaults_and_the_option_wins_over_the_context() -> None:
    assert engine("sim:").info.context == 32768
    assert open_engine(EngineOptions("sim:context=99", context=50)).info.context == 50


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ("model.gguf", "look like"),
        ("sim:spede=3", "no setting 'spede'"),
        ("sim:decode=fast", "must be a number"),
        ("sim:decode=0", "at least"),
        ("sim:scale=nan", "at least"),
        ("sim:layers=0", "num_layers"),
        ("sim:layers=2,recurrent=2", "must be an attention layer"),
        ("sim:recurrent=-1", "at least"),
        ("sim:batch=0", "at least 1"),
        ("sim:dtype=int8", "dtype"),
    ],
)
def test_settings_that_make_no_model_are_refused_by_name(weights: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        engine(weights)


def test_a_hybrid_one_knows_its_states_again_and_nobody_elses() -> None:
    machine = engine(f"{FAST},layers=4,recurrent=3")
    tokens, others = tuple(range(70)), tuple(range(1, 71))
    cache, foreign = prefilled(machine, tokens[:-1]), prefilled(machine, others[:-1])

    assert [state.layer for state in cache.states] == [0, 1, 2]
    assert machine.decode(tokens, cache, Sampling(8)).evaluated_tokens == 1
    with pytest.raises(KVTransferFailed, match="the state of layer 0 belongs to other tokens"):
        machine.decode(tokens, replace(cache, states=foreign.states), Sampling(8))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_its_kv_cache_has_the_true_size_and_finite_numbers(dtype: str) -> None:
    machine = engine(f"sim:scale=0,layers=3,kv_heads=3,head_dim=10,dtype={dtype}")
    cache = prefilled(machine, tuple(range(70)))
    assert sum(block.data.nbytes for block in cache.blocks) == 70 * cache.layout.token_bytes
    assert all(is_finite(block.data, cache.layout.dtype) for block in cache.blocks)


@settings(deadline=None)
@given(changed=st.integers(0, 69), token=st.integers(0, 1 << 17))
def test_a_cache_of_other_tokens_is_refused(changed: int, token: int) -> None:
    # Given the cache of one prompt, and a prompt that differs in one token
    machine = engine()
    tokens = tuple(range(200, 271))
    other = (*tokens[:changed], token, *tokens[changed + 1 :])
    cache = prefilled(machine, tokens[:-1])
    # Then the other is not decoded from it, unless it is the same after all
    if other == tokens:
        return
    with pytest.raises(KVTransferFailed, match="other tokens"):
        machine.decode(other, cache, Sampling(1))


def test_blocks_that_changed_places_are_refused() -> None:
    machine = engine()
    tokens = tuple(range(65))
    first, second = prefilled(machine, tokens[:-1]).blocks
    assert machine.info.layout is not None
    swapped = KVCache(machine.info.layout, (replace(second, start=0), replace(first, start=32)))
    with pytest.raises(KVTransferFailed, match="block at position 0"):
        machine.decode(tokens, swapped, Sampling(1))


def test_one_flipped_bit_is_noticed() -> None:
    machine = engine()
    cache = prefilled(machine, (1, 2, 3))
    damaged = cache.blocks[0].data.copy()
    damaged.view(np.uint8).reshape(-1)[-1] ^= 1
    with pytest.raises(KVTransferFailed):
        machine.decode((1, 2, 3, 4), KVCache(cache.layout, (Block(0, damaged),)), Sampling(1))


def test_machines_with_other_rates_share_a_kv_family_and_other_seeds_do_not() -> None:
    fingerprints = [engine(f"sim:{more}").info.fingerprint for more in ("prefill=9", "decode=3,scale=0", "seed=2")]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_an_answer_ends_before_a_stop_word() -> None:
    machine = engine("sim:scale=0,answer=400")
    whole = machine.decode((1, 2, 3), None, Sampling(600)).text
    word = whole[400:407]
    answer = machine.decode((1, 2, 3), None, Sampling(600, stop=(word,)))
    assert answer.text == whole[: whole.index(word)]
    assert answer.finish_reason == "stop"


def test_blocks_come_while_later_ones_are_computed() -> None:
    # Given a machine that is closed as its first block comes
    machine = engine("sim:prefill=64,scale=0.001")
    emitted: list[Block] = []

    def take(block: Block | Window) -> None:
        assert isinstance(block, Block)
        emitted.append(block)
        machine.close()

    # When it prefills two
    with pytest.raises(EngineUnavailable):
        machine.prefill(tuple(range(64)), take)
    # Then the first had come before the second was computed
    assert [block.start for block in emitted] == [0]


def test_a_conversation_has_a_mark_for_each_role_and_shares_what_is_the_class_s() -> None:
    machine = engine()
    system, own = Part("system", "abcdefg", "class"), Part("user", "12345678")
    one, other = (machine.tokenize((system, replace(own, text=text)), 0.0) for text in ("12345678", "x"))
    # Begin, a mark and two ids of each message, and the mark of the answer; the next message's mark is everybody's
    assert len(one.ids) == 1 + 3 + 3 + 1
    assert one.shared_tokens == other.shared_tokens == 1 + 3 + 1
    assert one.ids[: one.shared_tokens] == other.ids[: other.shared_tokens]
    # Other roles, or another end of a message, are another prompt; another end of a part is not
    texts = [
        (system, own),
        (Part("user", "abcdefg", "class"), own),
        (system, Part("user", "1234"), Part("user", "5678")),
    ]
    ids = [machine.tokenize(prompt, 0.0).ids for prompt in texts]
    assert ids[0] == ids[2] != ids[1]
    whole = machine.tokenize((Part("user", "abcdefg", "class"), Part("user", "12345678", "class")), 0.0)
    assert (len(whole.ids), whole.shared_tokens) == (1 + 1 + 4 + 1, 2 + 15 // 4)


def test_a_lone_surrogate_in_the_text_is_tokenized_like_any_other() -> None:
    assert len(engine().tokenize(user_prompt("ab\ud800", ""), 0.0).ids) == 4
