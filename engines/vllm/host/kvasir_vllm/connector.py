"""vLLM's KV connector: gives the blocks of a prompt's KV cache out as they are computed, and takes one in.

vLLM makes two of it: one beside the scheduler, which sees how many tokens are scheduled, and one in the worker, which
reaches the pages. Both tell the host, by datagrams; neither ever raises there, since that would end the engine.

A request takes part by its `kv_transfer_params`: key, emit (None, or the position of the first block to give out),
block (its length in tokens), inject (None, or a file's name and how many tokens it holds).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from .pages import Pages

_NUMPY_TYPES = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}
_PATIENCE_S = 10.0  # for a host that is slow to read; one that is gone is noticed at once


@dataclass
class Asked:
    """One request, beside the scheduler."""

    key: str
    length: int  # of its prompt
    block: int
    sent: int | None  # up to where blocks were given out; None: none are wanted
    inject: tuple[str, int] | None
    evaluated: int = 0  # tokens of the prompt that were scheduled
    loading: bool = False


@dataclass
class Load:
    """A file to put into a request's pages."""

    key: str
    name: str
    tokens: int
    blocks: list[int]


@dataclass
class Save:
    """Positions to give out, as blocks of `step` tokens."""

    key: str
    begin: int
    end: int
    step: int
    blocks: list[int]


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker is to do in one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class KvasirConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._folder = Path(extra["folder"])
        self._events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._events.settimeout(_PATIENCE_S)
        self._address = str(extra["events"])
        self._asked: dict[str, Asked] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self._pages: Pages | None = None
        self._spoiled: set[int] = set()
        require_one_rank(vllm_config.parallel_config)
        groups = len(kv_cache_config.kv_cache_groups) if kv_cache_config is not None else 1
        if groups != 1:
            raise ValueError(f"a model whose layers are kept in {groups} groups is not transferred")

    # Beside the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens the request's file adds; the prompt's last one is always computed."""
        asked = self._of(request)
        if asked is None or asked.inject is None:
            return 0, False
        usable = min(asked.inject[1], request.num_prompt_tokens - 1)
        return max(0, usable - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load in the step that comes."""
        asked = self._of(request)
        if asked is not None and num_external_tokens > 0:
            asked.loading = True

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """What the worker is to do, and count what is scheduled."""
        step = Step()
        cached = scheduler_output.scheduled_cached_reqs
        before = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            if request_id in self._asked:
                blocks = scheduler_output.kv_connector_block_state.get_block_ids(request_id)[0]
                self._plan(step, self._asked[request_id], before[request_id], scheduled, list(blocks))
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its pages are free at once: all was copied."""
        self._asked.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See request_finished."""
        return self.request_finished(request, [])

    def _of(self, request: Any) -> Asked | None:
        """What is known of a request; None: it is none of ours."""
        given = request.kv_transfer_params
        if not given or "key" not in given:
            return None
        if request.request_id not in self._asked:
            inject = tuple(given["inject"]) if given["inject"] else None
            asked = Asked(given["key"], request.num_prompt_tokens, given["block"], given["emit"], inject)
            self._asked[request.request_id] = asked
        return self._asked[request.request_id]

    def _plan(self, step: Step, asked: Asked, before: int, scheduled: int, blocks: list[int]) -> None:
        if asked.loading and asked.inject is not None:
            asked.loading = False
            step.loads.append(Load(asked.key, asked.inject[0], before, blocks))
        done = min(before + scheduled, asked.length)
        if before < asked.length:
            asked.evaluated += done - before
            self._tell(op="evaluated", id=asked.key, tokens=asked.evaluated)
        # Whole blocks only, but for the prompt's last one.
        end = done if done == asked.length else done // asked.block * asked.block
        if asked.sent is not None and end > asked.sent:
            step.saves.append(Save(asked.key, asked.sent, end, asked.block, blocks))
            asked.sent = end

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Where the pages are. What lies where in them is learnt later: on a CPU it is not settled yet."""
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Put what was transferred into the pages, all of it before the step begins."""
        for load in self._step.loads:
            try:
                self._load(load)
            except Exception as error:  # noqa: BLE001  whatever it is, vLLM goes on
                self._spoiled.update(load.blocks)
                self._tell(op="failed", id=load.key, kind="kv", why=f"the KV cache could not be put in: {error}")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are there when a step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers leave together, when a step ends."""

    def wait_for_save(self) -> None:
        """Give out the blocks that this step completed."""
        for save in self._step.saves:
            try:
                self._save(save)
            except Exception as error:  # noqa: BLE001
                self._tell(op="failed", id=save.key, kind="kv", why=f"the KV cache could not be read: {error}")

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of what could not be put in: vLLM ends these requests, and no other."""
        spoiled, self._spoiled = self._spoiled, set()
        return spoiled

    @property
    def _step(self) -> Step:
        step = self._connector_metadata
        return step if isinstance(step, Step) else Step()

    def _known_pages(self) -> Pages:
        """Raises UnknownPages."""
        if self._pages is None:
            layers = self._vllm_config.compilation_config.static_forward_context
            self._pages = Pages(self._caches, layers)
            self._tell(op="pages", shape=self._pages.shape)
        return self._pages

    def _load(self, load: Load) -> None:
        pages = self._known_pages()
        shape = (pages.shape["num_layers"], 2, load.tokens, pages.heads, pages.dim)
        # Copied on write, so that PyTorch may have it; nothing is written.
        data = np.memmap(self._folder / load.name, _NUMPY_TYPES[pages.dtype], "c", shape=shape)
        pages.write(load.blocks, data)

    def _save(self, save: Save) -> None:
        data = self._known_pages().read(save.blocks, save.begin, save.end)
        name = f"{save.key}-{save.begin}.kv"
        cuts: Sequence[int] = range(save.step, save.end - save.begin, save.step)
        with open(os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for block in np.split(data, list(cuts), axis=2):
                file.write(np.ascontiguousarray(block).data)
        self._tell(op="block", id=save.key, file=name, start=save.begin, end=save.end)

    def _tell(self, **message: Any) -> None:
        with suppress(OSError):  # no host: nobody asks any more
            self._events.sendto(msgpack.packb(message), self._address)


def require_one_rank(parallel: Any) -> None:
    """Raises ValueError where several processes hold the model: each has some heads, or some layers, only."""
    for name in ("tensor", "pipeline", "data"):
        if (size := getattr(parallel, f"{name}_parallel_size")) != 1:
            raise ValueError(
                f"{name}_parallel_size is {size}: KV caches of a model on several ranks are not transferred"
            )
