"""A real SentencePiece vocabulary: the GGUF file and the folder of one model are one tokenizer, and one KV cache."""

import pytest

from engines.chat import HARD_SAMPLE
from engines.llamacpp.engine import LlamaCppEngine
from engines.llamacpp.engine import open_engine as open_llamacpp
from engines.registry import EngineOptions
from engines.sketch import compare
from engines.sketching import sketch_of
from engines.transformers.engine import TransformersEngine
from engines.transformers.engine import open_engine as open_transformers
from messages.jobs import user_prompt
from tests.support import gemma3

pytestmark = pytest.mark.torch

TEXTS = (
    HARD_SAMPLE,
    "<html><table><b>bold</b></table> <unused7> [multimodal] <start_of_turn>user",
    "\n\n\n   \t\tdef f(x):\n        return x ** 2  # 平方\n",
    "0123456789 1e-05 0x1F 3,14",
)


@pytest.fixture(scope="module")
def llamacpp() -> LlamaCppEngine:
    return open_llamacpp(EngineOptions(str(gemma3.weights()), context=2048, slots=1))


@pytest.fixture(scope="module")
def transformers() -> TransformersEngine:
    return open_transformers(EngineOptions(str(gemma3.folder()), context=2048, slots=1))


def test_a_gguf_and_a_folder_of_sentencepiece_have_one_tokenizer(
    llamacpp: LlamaCppEngine, transformers: TransformersEngine
) -> None:
    assert llamacpp.info.tokenizer == transformers.info.tokenizer
    for text in TEXTS:
        prompt = user_prompt("", text)
        assert llamacpp.tokenize(prompt, 0.0).ids == transformers.tokenize(prompt, 0.0).ids


def test_a_text_full_of_marks_takes_one_request_and_has_none_of_their_tokens(
    llamacpp: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = llamacpp._prompt
    text = "<tr><td><b>one</b></td></tr>\n" * 40
    found = set(prompt.plain_ids(text))  # after which each mark is known
    paths: list[str] = []
    post = prompt._server.post
    monkeypatch.setattr(prompt._server, "post", lambda path, body: paths.append(path) or post(path, body))
    assert set(prompt.plain_ids(text)) == found
    assert paths == ["/tokenize"]
    body = {"content": ["<tr>", "<td>", "<b>", "</b>", "</td>", "</tr>"], "add_special": False, "parse_special": False}
    marks = post("/tokenize", body)["tokens"]
    assert len(marks) == 6
    assert not found & {*marks}


@pytest.mark.public_report("ggml-org/llama.cpp 28194", "ggml-org/llama.cpp 25295", "ggml-org/llama.cpp 26676")
def test_their_kv_caches_agree_past_the_window(llamacpp: LlamaCppEngine, transformers: TransformersEngine) -> None:
    first, second = sketch_of(llamacpp), sketch_of(transformers)

    assert first is not None
    assert second is not None
    assert first.tokens > 2 * 512
    for agreement in (compare(first, second), compare(second, first)):
        assert agreement.problem == ""
        assert all(max(keys, values) < tolerance / 2 for keys, values, tolerance in agreement.layers)
