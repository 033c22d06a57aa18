"""Training the demo model: what is trained is the Qwen3 that the engines load, on the prompts that they will see."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from examples.model.assignments import make_class
from examples.model.export import export
from examples.model.formats import NAME
from examples.model.shape import TRAINED
from examples.model.tokens import framed
from examples.model.train import IGNORED, Lessons, Plan, Training, TrainingBatch
from examples.model.worlds import HELD_OUT
from grading.rubric.rubric import ASPECTS

pytestmark = [pytest.mark.torch, pytest.mark.system]

MIB = 1 << 20
FENCE = "0123456789ab"
PLAN = Plan(
    seed=3,
    steps=4,
    classes=1,
    each=2,
    rate=2e-3,
    pace=0.001,  # so that step 3 is in the last lesson
    start="",
    minutes=1e9,
    device="cpu",
    threads=1,
    hold=True,
    workers=0,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a few steps."""
    out = tmp_path_factory.mktemp("run")
    Training(PLAN, out).run()
    return out


@pytest.fixture(scope="module")
def tokenizer(run: Path) -> Tokenizer:
    return Tokenizer.from_file(str(run / "tokenizer.json"))


@pytest.fixture(scope="module")
def batch(tokenizer: Tokenizer) -> TrainingBatch:
    return Lessons(tokenizer, PLAN)[3]


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported")
    export([run], out)
    return out


def test_a_batch_asks_for_the_answers_only_and_for_whole_ones(tokenizer: Tokenizer, batch: TrainingBatch) -> None:
    for own, targets in zip(batch.own[0], batch.targets[0], strict=True):
        asked = targets != IGNORED
        answer = tokenizer.decode(targets[asked].tolist(), skip_special_tokens=False)
        before = tokenizer.decode(own[: int(asked.nonzero()[0]) + 1].tolist(), skip_special_tokens=False)

        assert json.loads(answer.removesuffix("<|im_end|>"))
        assert answer.endswith("}<|im_end|>")
        assert before.endswith("<|im_start|>assistant\n")


def test_a_step_s_batch_is_the_same_wherever_training_was_resumed(tokenizer: Tokenizer, batch: TrainingBatch) -> None:
    resumed = Lessons(tokenizer, PLAN, first=3)[0]

    assert torch.equal(resumed.own, batch.own)
    assert torch.equal(resumed.targets, batch.targets)


def test_prompts_made_in_parts_have_the_tokens_of_the_whole_and_fit_into_2048(tokenizer: Tokenizer) -> None:
    for seed in range(20):
        made = make_class(HELD_OUT, seed, size=2)
        for labelled in made.submissions:
            for role in ASPECTS:
                parts = framed(*made.prompt(role, labelled, FENCE), made.answer(role, labelled))
                ids = [tokenizer.encode(part, add_special_tokens=False).ids for part in parts]

                whole = tokenizer.encode("".join(parts), add_special_tokens=False).ids
                assert [token for part in ids for token in part] == whole
                assert sum(map(len, ids)) <= 2048


def test_the_network_says_what_transformers_says_with_the_exported_weights(
    run: Path, exported: Path, batch: TrainingBatch
) -> None:
    import transformers

    training = Training(PLAN, run)
    training.load()
    with torch.no_grad():
        ours = training.model.logits(training.model(batch.shared, batch.lengths, batch.own))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(exported / NAME, dtype=torch.float32).eval()
        for row, own in enumerate(batch.own[0]):
            whole = torch.cat([batch.shared[0, : batch.lengths[0]], own])[None]
            expected = theirs(whole).logits[0, batch.lengths[0] :]
            # The exported weights are rounded to float16.
            assert torch.allclose(ours[row], expected, atol=0.05 * float(expected.abs().max()))
            assert (ours[row].argmax(-1) == expected.argmax(-1)).float().mean() > 0.98


def test_both_forms_hold_the_same_weights_and_stay_below_8_mb(exported: Path) -> None:
    import gguf

    theirs = {tensor.name: tensor.data for tensor in gguf.GGUFReader(exported / f"{NAME}.gguf").tensors}
    ours = load_file(exported / NAME / "model.safetensors")

    assert len(theirs) == len(ours)
    assert np.array_equal(theirs["token_embd.weight"], ours["model.embed_tokens.weight"].astype(np.float32))
    assert theirs["token_embd.weight"].shape == (TRAINED.vocabulary, TRAINED.hidden)
    assert sum(path.stat().st_size for path in exported.rglob("*") if path.is_file()) < 8 * MIB


def test_training_that_was_stopped_and_resumed_ends_with_the_same_weights(run: Path, tmp_path: Path) -> None:
    Training(replace(PLAN, steps=2), tmp_path).run()
    resumed = Training(PLAN, tmp_path)
    resumed.load()
    resumed.run()

    once, twice = (np.load(folder / "weights.npz") for folder in (run, tmp_path))

    assert all(np.array_equal(once[name], twice[name]) for name in once.files)


def test_training_goes_on_from_weights_that_were_exported_by_questions_too(exported: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, start=str(exported / NAME), steps=1)
    begun = Training(plan, tmp_path)
    weights = load_file(exported / NAME / "model.safetensors")

    assert all(
        torch.equal(value, torch.from_numpy(weights[f"model.{name}"]).float())
        for name, value in begun.model.state_dict().items()
        if name != "embed_tokens.weight"  # in which a question's end has been marked
    )
    asked = [
        begun.tokenizer.decode(Lessons(begun.tokenizer, replace(plan, steps=12))[step].own.flatten().tolist())
        for step in range(12)
    ]
    assert 0 < sum("passage" in text for text in asked) < 12
    begun.run()
    assert begun.step == 1


def test_training_lowers_the_loss_on_what_it_was_shown(
    tokenizer: Tokenizer, batch: TrainingBatch, tmp_path: Path
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    training = Training(PLAN, tmp_path)

    losses: list[Any] = [training._learn(batch)[0].item() for _ in range(6)]

    assert losses[-1] < 0.75 * losses[0]


def test_llama_cpp_continues_a_prompt_as_the_network_does(run: Path, exported: Path, batch: TrainingBatch) -> None:
    import httpx
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(exported / f"{NAME}.gguf")
    params.n_ctx, params.n_parallel, params.hostnames, params.port, params.verbosity = 4096, 1, ["127.0.0.1"], 0, -1
    server = xllamacpp.Server(params)
    prompt = torch.cat(
        [batch.shared[0, : batch.lengths[0]], batch.own[0, 0, : int((batch.targets[0, 0] != IGNORED).nonzero()[0]) + 1]]
    )
    asked = {"prompt": prompt.tolist(), "n_predict": 12, "temperature": 0, "return_tokens": True}
    said = httpx.post(f"{server.listening_address}/completion", json=asked, timeout=60).json()["tokens"]
    del server

    training = Training(PLAN, run)
    training.load()
    shared, own = batch.shared[:, : batch.lengths[0]], prompt[batch.lengths[0] :]
    expected: list[int] = []
    with torch.no_grad():
        for _ in range(12):
            own_now = torch.cat([own, torch.tensor(expected, dtype=torch.long)])[None, None]
            expected.append(int(training.model.logits(training.model(shared, batch.lengths, own_now))[0, -1].argmax()))

    assert said == expected
