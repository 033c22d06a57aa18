"""Block keys: equal exactly where the KV is equal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks import block_refs, is_shared, shared_boundary, window_ref
from messages import checks
from messages.kv import DType, KVLayout
from tests.support.kv_samples import FINGERPRINT, layout, tokens

LAYOUT = layout()
IDS = tokens(200)


def _chains(ids: list[int], fingerprint: str = FINGERPRINT, lay: KVLayout = LAYOUT) -> list[str]:
    return [ref.chain for ref in block_refs(fingerprint, lay, ids, len(ids), 0, "job")]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=150), st.data())
def test_refs_cover_exactly_the_tokens_asked_for(ids: list[int], data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, len(ids)))

    refs = block_refs(FINGERPRINT, LAYOUT, ids, num_tokens, 0, "job")

    assert [p for ref in refs for p in range(ref.start, ref.end)] == list(range(num_tokens))


@given(st.integers(0, 199))
def test_a_changed_token_changes_its_block_and_every_later_one_only(position: int) -> None:
    changed = list(IDS)
    changed[position] += 1

    same = [a == b for a, b in zip(_chains(IDS), _chains(changed), strict=True)]

    hit = position // LAYOUT.block_tokens
    assert same == [True] * hit + [False] * (len(same) - hit)


def test_equal_runs_of_tokens_at_different_places_have_different_chains() -> None:
    chains = _chains([7] * 96)

    assert len(set(chains)) == 3


def test_a_partial_block_is_not_the_whole_one() -> None:
    assert _chains(IDS[:40])[1] != _chains(IDS[:64])[1]
    assert _chains(IDS[:40])[0] == _chains(IDS[:64])[0]


@pytest.mark.public_report("sgl-project/sglang 33268")
def test_another_model_block_length_or_dtype_has_other_chains() -> None:
    long_rows = KVLayout(64, 32, 128, "f16")
    dtypes: tuple[DType, ...] = ("f16", "bf16", "f32")
    firsts = {_chains(IDS[:1], lay=layout(dtype))[0] for dtype in dtypes}

    firsts |= {_chains(IDS[:1], fingerprint="other")[0], _chains(IDS[:1], lay=long_rows)[0]}

    assert len(firsts) == 5


@given(st.integers(0, 200))
def test_whole_blocks_within_the_class_wide_part_are_shared_and_the_others_have_an_owner(shared_tokens: int) -> None:
    refs = block_refs(FINGERPRINT, LAYOUT, IDS, 200, shared_tokens, "job-1")

    boundary = shared_boundary(LAYOUT, shared_tokens)
    assert [ref.is_shared for ref in refs] == [ref.end <= boundary for ref in refs]
    assert all(("job-1" in ref.key) != ref.is_shared for ref in refs)


def test_jobs_share_the_keys_of_what_they_have_in_common_and_no_others() -> None:
    one = block_refs(FINGERPRINT, LAYOUT, IDS, 200, 100, "job-1")
    two = block_refs(FINGERPRINT, LAYOUT, IDS, 200, 100, "job-2")

    assert {ref.key for ref in one} & {ref.key for ref in two} == {ref.key for ref in one[:3]}


def test_a_conversations_whole_blocks_are_kept_under_its_tag_for_those_who_have_it() -> None:
    def keys(job: str, tag: str, shared: int = 64) -> list[str]:
        return [ref.key for ref in block_refs(FINGERPRINT, LAYOUT, IDS, 200, shared, job, tag=tag)]

    refs = block_refs(FINGERPRINT, LAYOUT, IDS, 200, 64, "job-1", tag="ada")

    assert [ref.is_shared for ref in refs] == [True] * 6 + [False], "the last block is not whole"
    assert [ref.is_tagged for ref in refs] == [False, False, True, True, True, True, False]
    assert keys("job-1", "ada")[:6] == keys("job-2", "ada")[:6]
    assert set(keys("job-1", "ada")) & set(keys("job-1", "bob")) == {*keys("job-1", "ada")[:2], refs[-1].key}
    assert all(is_shared(key) for key in keys("job-1", "ada")[:6])


def test_a_window_record_has_a_key_of_its_own_at_its_blocks_end() -> None:
    for last in block_refs(FINGERPRINT, LAYOUT, IDS, 200, 64, "job-1"):
        ref = window_ref(last)

        assert ref.key == last.key.replace("kv:", "kvw:", 1)
        assert (ref.start, ref.end, ref.chain, ref.is_shared) == (last.end, last.end, last.chain, last.is_shared)


def test_keys_are_plain_text_of_bounded_length() -> None:
    for ref in block_refs("f" * 128, LAYOUT, IDS, 200, 64, "j" * 128):
        checks.text("key", ref.key, 512)
        assert ref.key.isascii()
        assert " " not in ref.key
