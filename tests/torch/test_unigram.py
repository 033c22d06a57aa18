"""A real unigram vocabulary: two engines read its folder alike, and llama.cpp's reading of it is told apart."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from engines.chat import HARD_SAMPLE, SAMPLE
from engines.proof import prove
from engines.registry import Engine, EngineOptions, open_engine
from engines.sketch import compare
from engines.sketching import fresh_sketch
from messages.jobs import user_prompt
from tests.support import unigram

pytestmark = pytest.mark.torch

MON = "ဘာသာမန် တၟေင်ဂွံညာတ် ကောန်ဂကူမန်  မန်"  # with two spaces
TEXTS = (SAMPLE, HARD_SAMPLE, MON, "</s><s>user <unk><0x0A> no marks", "\U00012345\x01\t")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unigram.write(tmp_path_factory.mktemp("unigram"))


def opened(name: str, weights: Path) -> Engine:
    return open_engine(name, EngineOptions(str(weights), context=1024, slots=2, threads=1))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(closing(opened(name, folder))) for name in ("mlx", "transformers")}


def test_both_engines_that_read_the_folder_have_one_tokenizer_and_one_kv_cache(engines: dict[str, Engine]) -> None:
    first, second = engines.values()
    assert first.info.tokenizer == second.info.tokenizer
    for text in TEXTS:
        ids = first.tokenize(user_prompt("", text), 0.0).ids
        assert ids == second.tokenize(user_prompt("", text), 0.0).ids
        assert ids.count(1) == 2, "the template's own, and none of the text's"
    assert first.info.layout
    assert second.info.layout
    sketches = fresh_sketch(first, first.info.layout), fresh_sketch(second, second.info.layout)
    assert compare(*sketches).problem == ""
    assert [prove(engine, engine) for engine in engines.values()] == ["", ""]


def test_scores_that_cut_a_text_otherwise_make_another_tokenizer(
    engines: dict[str, Engine], folder: Path, tmp_path: Path
) -> None:
    """Ids keep their texts, so nothing but the sample tells."""
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in folder.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    stated = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    assert "▁values" in [piece for piece, _ in stated["model"]["vocab"]]
    for entry in stated["model"]["vocab"]:
        if entry[0] == "▁values":
            entry[1] = -99.0
    (changed / "tokenizer.json").write_text(json.dumps(stated), "utf-8")
    with closing(opened("transformers", changed)) as engine:
        assert engine.info.tokenizer != engines["transformers"].info.tokenizer


def test_a_gguf_of_it_is_the_same_tokenizer_only_if_it_cuts_the_sample_alike(
    engines: dict[str, Engine], folder: Path, tmp_path: Path
) -> None:
    """Its normalizer, which drops what has no width, can't be said in a GGUF: llama.cpp is to be refused as a pair."""
    with closing(opened("llamacpp", unigram.write_gguf(folder, tmp_path / "unigram.gguf"))) as engine:
        prompts = [user_prompt("", text) for text in TEXTS]
        alike = [engine.tokenize(prompt, 0.0).ids == engines["mlx"].tokenize(prompt, 0.0).ids for prompt in prompts]
        assert not alike[TEXTS.index(HARD_SAMPLE)]
        assert engine.info.tokenizer != engines["mlx"].info.tokenizer
        assert prove(engine, engine) == ""
