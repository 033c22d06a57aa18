"""The matrix of engines: every pair transfers KV or is refused, and none takes a spoiled cache for a good one."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import harness, matrix, matrix_models
from benchmarks.matrix_mutations import MUTATIONS, STATE_MUTATIONS, spoiled
from benchmarks.matrix_real import AGREEMENT, MARGIN
from messages.kv import Block, KVCache, KVLayout, Window

pytestmark = pytest.mark.torch

PAIRS = list(product(matrix.ENGINES, repeat=2))
WHOLE = ["qwen3", "llama-llama3", "llama-yarn", "mistral", "qwen2", "olmo2", "phi3", "gemma3", "gpt-oss-yarn"]
WHOLE += ["llama-v5", "qwen2-v5", "qwen3-moe-v5", *matrix_models.HYBRID]
# Pairs that share KV caches, of models that one engine computes otherwise than their folder states.
PARTLY = {
    "gpt-oss-untruncated": [("llamacpp", "llamacpp"), *product(("mlx", "transformers"), repeat=2)],
    "qwen2-window": [("llamacpp", "llamacpp"), ("transformers", "transformers")],
}


@pytest.fixture(scope="module")
def found(store_url: str) -> dict[str, Any]:
    # Minutes on two cores, and more beside other tests.
    command = ["--models", *WHOLE, *PARTLY]
    return harness.fresh_process("benchmarks.matrix", *command, store_url=store_url, timeout_s=1800)


def pairs_of(rows: list[dict[str, Any]], model: str) -> list[tuple[str, str]]:
    return sorted((row["prefill"], row["decode"]) for row in rows if row["model"] == model)


def test_every_pair_of_engines_answers_as_without_a_kv_transfer(found: dict[str, Any]) -> None:
    for model in WHOLE:
        assert pairs_of(found["pairs"], model) == PAIRS
    assert {row["evaluated_tokens"] for row in found["pairs"]} == {1}
    assert {(row["first_divergence"], row["margin"]) for row in found["pairs"]} == {(None, None)}
    assert {row["sketch_agrees"] for row in found["pairs"]} == {True}
    resumed = {row["model"]: row["resumed_equal"] for row in found["pairs"] if "resumed_equal" in row}
    assert resumed == dict.fromkeys(matrix_models.HYBRID, True)
    assert found["all_equal"]
    assert found["all_held"]


@pytest.mark.parametrize("model", PARTLY)
def test_an_engine_that_computes_something_else_is_named(model: str, found: dict[str, Any]) -> None:
    assert pairs_of(found["pairs"], model) == sorted(PARTLY[model])
    assert pairs_of(found["refused"], model) == sorted(set(PAIRS) - set(PARTLY[model]))
    culprit = {"gpt-oss-untruncated": "llamacpp", "qwen2-window": "(llamacpp|MLX|mlx)"}[model]
    for row in found["refused"]:
        if row["model"] == model:
            assert re.search(culprit, row["reason"]), row
            absent = model == "qwen2-window" and "mlx" in (row["prefill"], row["decode"])  # it does not start
            assert row["sketch_agrees"] is (None if absent else False), row


def test_no_other_model_is_refused(found: dict[str, Any]) -> None:
    assert {row["model"] for row in found["refused"]} == set(PARTLY)


def test_every_pair_of_engines_notices_a_spoiled_cache(found: dict[str, Any]) -> None:
    hybrid = [row for row in found["pairs"] if row["model"] in matrix_models.HYBRID]
    expected = len(found["pairs"]) * len(MUTATIONS) + len(hybrid) * len(STATE_MUTATIONS)
    assert len(found["controls"]) == expected
    assert found["all_caught"], [row for row in found["controls"] if not row["caught"]]


def test_engines_agree_about_every_key_and_value(found: dict[str, Any]) -> None:
    # llama.cpp computes attention in float16, PyTorch and MLX in float32
    for row in found["pairs"]:
        rounded = "llamacpp" in (row["prefill"], row["decode"])
        assert row["max_difference"] < (0.02 if rounded else 1e-4), row


def test_a_pair_that_differs_or_evaluates_the_prompt_again_is_not_passed_over() -> None:
    row = {"model": "qwen3", "prefill": "mlx", "decode": "llamacpp", "equal": True, "evaluated_tokens": 1}
    windowed = row | {"model": "gpt-oss", "evaluated_tokens": 8}

    assert matrix.is_held(row)
    assert matrix.is_held(windowed)
    assert matrix.is_held(row | {"resumed_equal": True})
    assert not matrix.is_held(row | {"resumed_equal": False})
    assert not matrix.is_held(row | {"equal": False})
    assert not matrix.is_held(row | {"evaluated_tokens": 2})
    assert not matrix.is_held(windowed | {"decode": "mlx"})
    assert not matrix.verdict({"pairs": [row], "controls": []}, ["qwen3", "llama"])["all_equal"]
    assert not matrix.verdict({"pairs": [], "controls": []}, [])["all_caught"]


def test_real_weights_may_part_where_the_receiver_was_undecided_and_nowhere_else() -> None:
    model, held = matrix.REAL[0], {"equal": True, "evaluated_tokens": 1, "margin": None, "agreement": 1.0}
    row = {"model": model, "equal": False, "evaluated_tokens": 1, "margin": MARGIN, "agreement": AGREEMENT}
    row |= {"own_shift": {"largest": MARGIN / 2}, "resumed": held}
    verdict = matrix.verdict({"pairs": [row], "controls": []}, [model])
    assert (verdict["all_equal"], verdict["all_held"]) == (False, True)

    assert matrix.is_held(row | {"equal": True, "margin": None})
    for wrong in (
        {"margin": MARGIN + 0.01},
        {"margin": None},
        {"agreement": AGREEMENT - 0.01},
        {"evaluated_tokens": 2},
    ):
        assert not matrix.is_held(row | wrong)
        assert not matrix.is_held(row | {"resumed": held | {"equal": False} | wrong})
    assert not matrix.is_held(row | {"failure": "none"})
    # A receiver that moves its own leads further has no smaller bound than that, and no larger one
    restless = row | {"own_shift": {"largest": 0.4}}
    assert matrix.is_held(restless | {"margin": 0.4})
    assert not matrix.is_held(restless | {"margin": 0.41})


def test_each_mutation_changes_the_cache_and_its_sliding_window_as_it_says() -> None:
    # Given caches of three blocks with a window
    layout = KVLayout(2, 2, 16, "f32", 16, (0,))
    cache, foreign = (_random_cache(layout, seed) for seed in (1, 2))
    # When each is spoiled
    wrong = spoiled(cache, foreign)
    # Then no two of them are alike, and all but the foreign block's spoil the window too
    assert tuple(wrong) == MUTATIONS
    assert len({each.blocks[1].data.tobytes() for each in (cache, *wrong.values())}) == len(MUTATIONS) + 1
    assert cache.window is not None
    same = [name for name, each in wrong.items() if each.window and np.array_equal(each.window.data, cache.window.data)]
    assert same == ["one foreign block"]


def _random_cache(layout: KVLayout, seed: int) -> KVCache:
    random = np.random.default_rng(seed)
    blocks = tuple(Block(a, random.random(layout.block_shape(b - a), np.float32)) for a, b in layout.block_spans(80))
    return KVCache(layout, blocks, Window(80, random.random((1, 2, 16, 2, 16), np.float32)))


def test_a_key_rotated_on_is_the_key_of_the_next_position(tmp_path: Path) -> None:
    # Given the first layer's keys of the same token at positions 0 and 1
    import torch

    from engines.transformers.model import TorchModel, find_weights

    matrix_models.write(tmp_path, "qwen3", 0)
    model = TorchModel(find_weights(str(matrix_models.weights_for("transformers", tmp_path, "qwen3"))))
    run = model.new_run()
    model.compute(run, [7, 7], lambda: None)
    rows = torch.stack((run.past.layers[0].keys[0], run.past.layers[0].values[0])).transpose(1, 2)
    data = rows.numpy()[None]
    layout = KVLayout(1, matrix_models.KV_HEADS, matrix_models.HEAD_DIM, "f32")
    cache = KVCache(layout, (Block(0, np.ascontiguousarray(data)),))
    # When its keys are rotated on
    moved = spoiled(cache, cache)["positions off by one"]
    # Then the first one's became the second one's
    np.testing.assert_allclose(moved.blocks[0].data[0, 0, 0], data[0, 0, 1], atol=1e-5)
