"""Where vLLM's back ends keep keys and values, learnt from their own function: forms that CUDA and CPUs have."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engines.vllm.host.kvasir_vllm.pages import Pages, UnknownPages  # noqa: E402

pytestmark = pytest.mark.torch

LAYERS, BLOCKS, HEADS, SLOTS, DIM = 12, 7, 2, 16, 8


class SideBySide:
    """As FLASH_ATTN, FLASHINFER and TRITON_ATTN: K and V of a token one behind the other."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        tokens = cache.shape[2]
        cache[slots // tokens, :, slots % tokens] = torch.cat((key, value), dim=-1)


class KeysTransposed:
    """As CPU_ATTN: a head's page holds all of its K, transposed, then all of its V."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        blocks, heads, tokens, width = cache.shape
        pages = cache.view(blocks, heads, 2, -1)
        for token, slot in enumerate(slots.tolist()):
            block, place = divmod(slot, tokens)
            pages[block, :, 0].view(heads, width // 2, tokens)[:, :, place] = key[token]
            pages[block, :, 1].view(heads, tokens, width // 2)[:, place] = value[token]


class Rounded:
    """Keeps less than it is given."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        SideBySide().do_kv_cache_update(layer, key // 2, value, cache, slots)


def made(impl: Any, dtype: Any = torch.float32) -> tuple[dict[str, Any], dict[str, Any], list[list[str]]]:
    names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    caches = {name: torch.zeros(BLOCKS, HEADS, SLOTS, 2 * DIM, dtype=dtype) for name in names}
    return caches, {name: SimpleNamespace(impl=impl) for name in names}, [names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("impl", [SideBySide(), KeysTransposed()])
def test_what_a_back_end_stores_is_read_and_what_is_written_it_would_have_stored(impl: Any, dtype: Any) -> None:
    # Given a sequence of 40 tokens that the back end stored in scattered blocks
    caches, layers, groups = made(impl, dtype)
    rows = torch.randn(LAYERS, 2, 40, HEADS, DIM).to(dtype)
    blocks = [5, 1, 4]
    slots = torch.tensor([blocks[at // SLOTS] * SLOTS + at % SLOTS for at in range(40)])
    for number, (name, cache) in enumerate(caches.items()):
        impl.do_kv_cache_update(layers[name], rows[number, 0], rows[number, 1], cache, slots)
    expected = (rows.view(torch.uint16) if dtype is torch.bfloat16 else rows).numpy()
    # When it is read, from anywhere to anywhere, the eleventh layer after the tenth
    pages = Pages(caches, layers, groups)
    everywhere = range(LAYERS)
    assert (pages.full_layers, pages.window_layers, pages.window) == (list(everywhere), [], 0)
    for begin, end in ((0, 40), (0, 16), (8, 33), (16, 40), (39, 40)):
        assert np.array_equal(pages.read(everywhere, [blocks], begin, end), expected[:, :, begin:end])
    # Then it is what was stored; and written to other blocks it lies there as the back end would have put it
    others = [3, 6, 2]
    pages.write(everywhere, [others], 0, expected)
    assert all(torch.equal(cache[3], cache[5]) and torch.equal(cache[6], cache[1]) for cache in caches.values())
    assert np.array_equal(pages.read(everywhere, [others], 0, 40), expected)
    assert all(not cache[0].any() for cache in caches.values())


@pytest.mark.parametrize("impl", [SideBySide(), KeysTransposed()])
def test_layers_with_a_window_have_blocks_of_their_own_and_only_those_that_it_reaches(impl: Any) -> None:
    # Given every third layer without a window, the others in two groups, and a sequence of 40 tokens
    caches, layers, ((*names,),) = made(impl)
    for number, name in enumerate(names):
        layers[name].sliding_window = None if number % 3 == 2 else 12
    groups = [names[2::3], names[0::3], names[1::3]]
    blocks = [[5, 1, 4], [0, 3, 2], [0, 6, 5]]
    pages = Pages(caches, layers, groups)
    assert (pages.full_layers, pages.window) == ([2, 5, 8, 11], 12)
    assert (pages.window_rows(40), pages.window_rows(7)) == (11, 7)
    full, windows = torch.randn(4, 2, 40, HEADS, DIM).numpy(), torch.randn(8, 2, 11, HEADS, DIM).numpy()
    # When both are written
    pages.write(pages.full_layers, blocks, 0, full)
    pages.write(pages.window_layers, blocks, 29, windows)
    # Then both are read again, no block behind the window was touched, and none of another group's
    assert np.array_equal(pages.read(pages.full_layers, blocks, 0, 40), full)
    assert np.array_equal(pages.read(pages.window_layers, blocks, 29, 40), windows)
    for number, name in enumerate(names):
        touched = {block for block in range(BLOCKS) if caches[name][block].any()}
        assert touched == {2: {5, 1, 4}, 0: {3, 2}, 1: {6, 5}}[number % 3]
    # And when they are cleared, nothing is left there
    pages.clear(blocks)
    assert not any(cache.any() for cache in caches.values())


def test_pages_of_another_form_are_refused_with_what_is_wrong() -> None:
    caches, layers, groups = made(SideBySide())
    with pytest.raises(UnknownPages, match="changes, repeats or drops values"):
        Pages(*made(Rounded()))
    with pytest.raises(UnknownPages, match="could not store a probe"):
        Pages(caches, {name: SimpleNamespace(impl=object()) for name in layers}, groups)
    with pytest.raises(UnknownPages, match="float8"):
        Pages(*made(SideBySide(), torch.float8_e4m3fn))
    with pytest.raises(UnknownPages, match=r"shape \(2, 7"):
        Pages({name: torch.zeros(2, 7, 16, 2, 8) for name in caches}, layers, groups)
    with pytest.raises(UnknownPages, match="differ in shape"):
        Pages(caches | {"model.layers.3.self_attn.attn": torch.zeros(BLOCKS, 4, SLOTS, 2 * DIM)}, layers, groups)
    with pytest.raises(UnknownPages, match="layer name 'attn' must contain exactly one number"):
        Pages({"attn": caches.popitem()[1]}, layers, groups)
    # And layers of which one keeps its keys otherwise
    mixed = {name: SimpleNamespace(impl=SideBySide()) for name in layers}
    mixed["model.layers.11.self_attn.attn"] = SimpleNamespace(impl=KeysTransposed())
    with pytest.raises(UnknownPages, match="different orders"):
        Pages(made(SideBySide())[0], mixed, groups)
    # And windows of two lengths
    for name, window in zip(layers, (None, 16, 32), strict=False):
        layers[name].sliding_window = window
    with pytest.raises(UnknownPages, match="sliding windows differ"):
        Pages(made(SideBySide())[0], layers, groups)
