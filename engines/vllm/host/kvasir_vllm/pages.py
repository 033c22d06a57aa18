"""Finds out where a vLLM attention back end keeps keys and values in its pages.

vLLM hands out each layer's cache as (blocks, heads, tokens, width): what lies where in a page is the back end's own
affair (on a CPU keys lie transposed). So known numbers are stored through the back end's own function, once, and where
they turn up is where it keeps them. Reading and writing is then the same for all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_DIGIT = 64  # whole numbers below this are exact in every dtype


class UnknownPages(Exception):
    """Keys and values are stored in a form that is not known here."""


class Pages:
    """Reads and writes the pages of all layers of one model.

    vLLM keeps layers in groups. A sequence has page numbers for each, and where a group's layers have a sliding window
    the pages that lie behind it are the page 0, which nobody reads.
    """

    def __init__(
        self, caches: dict[str, torch.Tensor], layers: dict[str, Any], groups: Sequence[Sequence[str]]
    ) -> None:
        """`caches`: each layer's pages by name; `layers`: vLLM's attention layers; `groups`: names of the layers of
        each. Raises UnknownPages."""
        names = sorted(caches, key=_number)
        self._caches = [caches[name] for name in names]
        group_of = {name: number for number, group in enumerate(groups) for name in group}
        self._groups = [group_of[name] for name in names]
        windows = [int(getattr(layers[name], "sliding_window", None) or 0) for name in names]
        if len(set(windows) - {0}) > 1:
            raise UnknownPages("the model's sliding windows differ in length")
        self.window = max(windows)
        self.full_layers = [layer for layer, window in enumerate(windows) if not window]
        self.window_layers = [layer for layer, window in enumerate(windows) if window]
        first, layer = self._caches[0], layers[names[0]]
        _require_plain(self._caches)
        self.tokens = int(first.shape[2])
        self.heads, self.dim, self.dtype = int(first.shape[1]), int(first.shape[3]) // 2, DTYPES[first.dtype]
        self._positions = self._probe(first, layer)
        if len(names) > 1 and not torch.equal(self._positions, self._probe(self._caches[-1], layers[names[-1]])):
            raise UnknownPages("the model's layers keep keys and values in different orders")

    @property
    def shape(self) -> dict[str, Any]:
        """The sizes, under KVLayout's field names."""
        sizes = {"num_layers": len(self._caches), "kv_heads": self.heads, "head_dim": self.dim, "dtype": self.dtype}
        return sizes | {"window": self.window, "window_layers": self.window_layers}

    def window_rows(self, position: int) -> int:
        """The number of rows before a position that its sliding-window layers still see."""
        return min(self.window - 1, position)

    def read(self, layers: Sequence[int], blocks: Sequence[Sequence[int]], begin: int, end: int) -> NDArray[Any]:
        """Positions of a sequence in its groups' blocks: (layers, 2, tokens, heads, dim); bfloat16 as bit patterns."""
        first = begin // self.tokens
        layer_rows = []
        for layer in layers:
            ids = torch.tensor(
                blocks[self._groups[layer]][first : -(-end // self.tokens)], device=self._positions.device
            )
            layer_rows.append(self._rows(self._caches[layer][ids]))  # shape: (tokens, 2, heads, dim)
        rows = torch.stack(layer_rows)[:, begin - first * self.tokens : end - first * self.tokens]
        rows = rows.transpose(1, 2).contiguous().cpu()
        array: NDArray[Any] = (rows.view(torch.uint16) if rows.dtype is torch.bfloat16 else rows).numpy()
        return array

    def write(self, layers: Sequence[int], blocks: Sequence[Sequence[int]], begin: int, data: NDArray[Any]) -> None:
        """Put positions of a sequence, from `begin` on, into its groups' blocks: (layers, 2, tokens, heads, dim)."""
        count = data.shape[2]
        first, last = begin // self.tokens, -(-(begin + count) // self.tokens)
        offset = begin - first * self.tokens
        pages = torch.arange(last - first, device=self._positions.device)[:, None] * self._positions.numel()
        # One row for each position to write, with the places of its numbers in the flattened `contents`.
        places = (pages + self._positions[None]).reshape((last - first) * self.tokens, -1)[offset : offset + count]
        for layer, layer_data in zip(layers, data, strict=True):
            cache = self._caches[layer]
            ids = torch.tensor(blocks[self._groups[layer]][first:last], device=cache.device)
            rows = torch.from_numpy(layer_data).to(cache.device)
            rows = rows.view(torch.bfloat16) if self.dtype == "bf16" else rows
            contents = cache[ids].contiguous()
            contents.view(-1)[places] = rows.transpose(0, 1).reshape(count, -1)
            cache[ids] = contents

    def clear(self, blocks: Sequence[Sequence[int]]) -> None:
        """Leave nothing of the blocks' previous owner."""
        for group, cache in zip(self._groups, self._caches, strict=True):
            cache[torch.tensor(blocks[group], device=cache.device)] = 0

    def _rows(self, pages: torch.Tensor) -> torch.Tensor:
        flat = pages.reshape(pages.shape[0], -1)[:, self._positions]
        return flat.reshape(-1, 2, self.heads, self.dim)

    def _probe(self, cache: torch.Tensor, layer: Any) -> torch.Tensor:
        """For each number of a page's tokens, in the order (token, K or V, head, dim), its place in the page."""
        count = cache[0].numel()
        page = torch.empty_strided((1, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
        slots = torch.arange(self.tokens, device=cache.device)
        number_at = torch.zeros(count, dtype=torch.int64, device=cache.device)
        place = 1
        while place < count:
            digits = torch.arange(count, device=cache.device) // place % _DIGIT
            rows = digits.to(cache.dtype).reshape(self.tokens, 2, self.heads, self.dim)
            page.fill_(_DIGIT)
            keys, values = rows[:, 0].contiguous(), rows[:, 1].contiguous()
            try:
                layer.impl.do_kv_cache_update(layer, keys, values, page, slots)
            except Exception as error:
                raise UnknownPages(f"{type(layer.impl).__name__} could not store a probe: {error!r:.200}") from error
            number_at += page.reshape(-1).to(torch.int64) * place
            place *= _DIGIT
        positions = torch.empty_like(number_at)
        if not torch.equal(number_at.sort().values, torch.arange(count, device=cache.device)):
            raise UnknownPages(
                f"{type(layer.impl).__name__} changes, repeats or drops values of K and V when it stores them"
            )
        positions[number_at] = torch.arange(count, device=cache.device)
        return positions


def _number(name: str) -> int:
    """The number of a layer, from a name such as "model.layers.7.self_attn.attn"."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise UnknownPages(f"the layer name {name!r} must contain exactly one number")
    return numbers[0]


def _require_plain(caches: Sequence[torch.Tensor]) -> None:
    if len({(cache.shape, cache.stride(), cache.dtype) for cache in caches}) != 1:
        raise UnknownPages("the pages of the model's layers differ in shape or type")
    cache = caches[0]
    if cache.ndim != 4 or cache.shape[3] % 2:
        raise UnknownPages(f"pages of the shape {tuple(cache.shape)} are not supported")
    if cache.dtype not in DTYPES:
        raise UnknownPages(f"Kvasir can't transfer a KV cache of {cache.dtype}, only of f32, f16 and bf16")
