"""The matrix of engines, for one model: every pair hands over, and none takes a spoiled cache for a good one."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import harness, matrix, matrix_models
from benchmarks.matrix_mutations import MUTATIONS, spoiled
from messages.kv import Block, KVCache, KVLayout, Window

pytestmark = pytest.mark.torch

PAIRS = list(product(matrix.ENGINES, repeat=2))


@pytest.fixture(scope="module")
def found(store_url: str) -> dict[str, Any]:
    return harness.fresh_process("benchmarks.matrix", "--models", "qwen3", store_url=store_url)


def test_every_pair_of_engines_answers_as_without_a_hand_over(found: dict[str, Any]) -> None:
    assert [(row["prefill"], row["decode"]) for row in found["pairs"]] == [(a, b) for b, a in PAIRS]
    assert [row["evaluated_tokens"] for row in found["pairs"]] == [1] * len(PAIRS)
    assert found["refused"] == []
    assert found["all_equal"]


def test_every_pair_of_engines_notices_a_spoiled_cache(found: dict[str, Any]) -> None:
    assert len(found["controls"]) == len(PAIRS) * len(MUTATIONS)
    assert found["all_caught"]


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
    assert not matrix.is_held(row | {"equal": False})
    assert not matrix.is_held(row | {"evaluated_tokens": 2})
    assert not matrix.is_held(windowed | {"decode": "mlx"})
    assert not matrix.verdict({"pairs": [row], "controls": []}, ["qwen3", "llama"])["all_equal"]
    assert not matrix.verdict({"pairs": [], "controls": []}, [])["all_caught"]


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

    from engines.transformers_model import TorchModel, find_weights

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
