"""MLX and transformers compute one function from one folder, whichever release of transformers wrote it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers

from engines.huggingface.rope import FULL, SLIDING, stated_rope
from engines.huggingface.weights import open_folder
from engines.mlx import model as mlx_model
from engines.registry import EngineOptions, open_engine
from engines.rope import Rope, difference
from messages.jobs import Sampling, user_prompt
from tests.support.kv_samples import prefilled
from tests.support.rope_folders import CASES, configuration, rewritten

pytestmark = pytest.mark.torch

DEMO = Path(__file__).parents[2] / "examples" / "model" / "kvasir-demo"
GREEDY = Sampling(max_tokens=16, temperature=0)
PROSE = "".join(f"Student {number} handed in {number * 7 % 31} pages.\n" for number in range(12))


@pytest.fixture(scope="module", params=[(case, version) for case in CASES for version in (4, 5)], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model with random weights, saved by transformers 5; its config.json in the words of either version."""
    case, version = request.param
    path = tmp_path_factory.mktemp("model")
    stated = configuration(case, 5)
    config = transformers.AutoConfig.for_model(**stated)
    config.initializer_range = 0.2
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    if version == 4:
        (path / "config.json").write_text(json.dumps(rewritten(written, case, 4)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path)
    yield path
    shutil.rmtree(path)


def test_logits_are_equal_within_rounding(folder: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 1500, 300)
    ours = mlx_model.load(open_folder(str(folder)), 0).model(mx.array(ids[None]))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = reference(torch.tensor(ids[None])).logits[0].numpy()
    np.testing.assert_allclose(np.array(ours)[0], theirs, atol=2e-3 * np.abs(theirs).max())


def test_the_formulas_give_what_transformers_computes(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module, config = model.base_model.rotary_emb, json.loads((folder / "config.json").read_text())
    for kind in (FULL, SLIDING):
        prefix = f"{kind}_" if hasattr(module, f"{kind}_inv_freq") else ""
        frequencies = getattr(module, f"{prefix}inv_freq").double().tolist()
        seen = Rope(tuple(frequencies), float(getattr(module, f"{prefix}attention_scaling")))
        assert difference([seen], [stated_rope(config, kind)]) == ""


def test_a_cache_goes_both_ways_and_the_texts_are_equal(folder: Path) -> None:
    engines = [open_engine(name, EngineOptions(str(folder), context=1024, slots=1)) for name in ("mlx", "transformers")]
    one, other = engines
    tokens = one.tokenize(user_prompt(PROSE, ""), 0.0).ids
    assert (one.info.fingerprint, one.info.layout) == (other.info.fingerprint, other.info.layout)
    assert one.info.fingerprint
    assert difference(one.info.ropes, other.info.ropes) == ""
    answers = [engine.decode(tokens, None, GREEDY) for engine in engines]
    answers += [
        one.decode(tokens, prefilled(other, tokens[:-1]), GREEDY),
        other.decode(tokens, prefilled(one, tokens[:-1]), GREEDY),
    ]
    for engine in engines:
        engine.close()
    assert {(answer.text, answer.tokens) for answer in answers} == {(answers[0].text, answers[0].tokens)}
    assert [answer.evaluated_tokens for answer in answers] == [len(tokens), len(tokens), 1, 1]
