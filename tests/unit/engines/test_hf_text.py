"""Answers as they stream: whole characters, stop words wherever tokens are cut, the final channel only."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engines.harmony import FinalChannel, final_channel
from engines.huggingface.prompt import HFPrompt
from engines.huggingface.text import TextStream, token_bytes

DEMO = Path(__file__).parents[3] / "examples" / "model" / "kvasir-demo"
SINGLE_BYTES = [bytes([value]) for value in range(256)]
CHANNEL, MESSAGE, FINAL, END = 300, 301, 302, 303


def streamed(pieces: list[bytes], stop: tuple[str, ...] = ()) -> list[str]:
    """What comes out when each of `pieces` is a token."""
    stream = TextStream(pieces, stop)
    return [*map(stream.push, range(len(pieces))), stream.finish()]


@given(st.text(max_size=40), st.data())
def test_whatever_the_tokens_cut_the_pieces_join_to_the_text(text: str, data: st.DataObject) -> None:
    # Given a text cut into tokens at any bytes
    raw = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    tokens = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    # When it streams
    out = streamed(tokens)
    # Then no piece holds half a character, and they join to the text
    assert "".join(out) == raw.decode()


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_an_answer_ends_before_its_first_stop_word(text: str, words: list[str], data: st.DataObject) -> None:
    # Given a text cut into tokens anywhere, and words of the same letters
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    tokens = [text[a:b].encode() for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream = TextStream(tokens, words)
    # When it streams until it stops
    shown = ""
    for number in range(len(tokens)):
        if not stream.has_stopped:
            shown += stream.push(number)
    shown += stream.finish()
    # Then what came out is the text before the first end of a stop word, and nothing after it
    ends = [(end, text[:end].find(word)) for end in range(len(text) + 1) for word in words if text[:end].endswith(word)]
    assert stream.has_stopped == bool(ends)
    if not ends:
        assert shown == text
    else:
        assert not any(word in shown for word in words)
        assert text.startswith(shown)
        assert any(text[len(shown) :].startswith(word) for word in words)


def test_what_may_begin_a_stop_word_is_held_back_until_it_is_known() -> None:
    out = streamed([b"a", b"\nEN", b"D", b"?"], ("\nENDE",))
    assert out == ["a", "", "", "\nEND?", ""]


def test_bytes_that_are_no_utf8_become_replacement_characters_and_an_unfinished_one_is_left_out() -> None:
    assert "".join(streamed([b"a\xff", b"b", "é".encode()[:1]])) == "a�b"


def test_the_bytes_of_the_demo_tokenizer_spell_what_it_encodes() -> None:
    prompt = HFPrompt(DEMO)
    spelled = token_bytes(prompt)
    text = "Zeile\t1:  naïve 语言 🙂\r\n  end\x00"
    assert b"".join(spelled[number] for number in prompt.plain_ids(text)).decode() == text
    assert {spelled[number] for number in prompt.control_ids} == {b""}


def test_the_bytes_of_a_sentencepiece_tokenizer_have_spaces_and_single_bytes(tmp_path: Path) -> None:
    # Given a tokenizer whose spaces are visible and whose unknown characters are bytes
    definition = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    definition["model"] |= {"vocab": {"▁the": 0, "<0xC3>": 1, "<0xA9>": 2}, "merges": [], "byte_fallback": True}
    definition |= {"pre_tokenizer": None, "added_tokens": [], "decoder": {"type": "ByteFallback"}}
    for name, body in (("tokenizer", definition), ("tokenizer_config", {"chat_template": "{{ messages[0].content }}"})):
        (tmp_path / f"{name}.json").write_text(json.dumps(body), encoding="utf-8")
    # Then its tokens stand for what they spell
    assert b"".join(token_bytes(HFPrompt(tmp_path))).decode() == " theé"


def test_only_the_final_channel_is_given_out() -> None:
    # Given an answer that thinks aloud first, and mentions the final channel in passing
    vocabulary = [*SINGLE_BYTES, *[b""] * 46, b"", b"", b"final", b""]
    channel = FinalChannel((CHANNEL, FINAL), MESSAGE)
    stream = TextStream(vocabulary, channel=channel)
    thinking = [CHANNEL, *b"analysis", MESSAGE, FINAL, *b"hm", MESSAGE, END]
    header = [CHANNEL, FINAL, *b" json", MESSAGE]
    # When it streams
    out = [stream.push(number) for number in (*thinking, *header, *b"Good.")]
    # Then the reader sees the answer alone
    assert "".join(out) + stream.finish() == "Good."
    assert out[: len(thinking) + len(header)] == [""] * (len(thinking) + len(header))


def test_an_answer_that_never_opens_its_final_channel_is_shown_whole_at_the_end() -> None:
    stream = TextStream([*SINGLE_BYTES, *[b""] * 48], channel=FinalChannel((CHANNEL, FINAL), MESSAGE))
    assert [stream.push(number) for number in (CHANNEL, *b"hm")] == ["", "", ""]
    assert stream.finish() == "hm"


def test_a_model_is_seen_to_have_channels_by_its_tokenizer(tmp_path: Path) -> None:
    # Given a tokenizer with the marks of the Harmony format
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|channel|>"), AddedToken("<|message|>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    prompt = HFPrompt(tmp_path)
    # When an answer opens its final channel
    channel = final_channel(prompt)
    assert channel is not None
    for number in (tokenizer.token_to_id("<|channel|>"), *prompt.plain_ids("final")):
        channel.observe(number)
    assert not channel.is_open
    channel.observe(tokenizer.token_to_id("<|message|>"))
    # Then it is seen; the demo model has none
    assert channel.is_open
    assert final_channel(HFPrompt(DEMO)) is None


@pytest.mark.parametrize("number", [256, 100_000])
def test_an_output_that_the_tokenizer_does_not_know_has_no_text(number: int) -> None:
    assert TextStream(SINGLE_BYTES).push(number) == ""
