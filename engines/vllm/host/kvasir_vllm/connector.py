"""vLLM's KV connector: gives the blocks of a prompt's KV cache out as they are computed, and takes one in.

vLLM makes two of it: one beside the scheduler, which sees how many tokens are scheduled, and one in the worker, which
reaches the pages. Both tell who asked, by datagrams (`events`); neither ever raises there, since that would end the
engine. vLLM may be a server that others use too, by HTTP: so nothing that a request says is trusted either.
"""

import math
import os
import re
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from . import events
from .pages import Pages
from .shared_folder import open_file, open_folder, send

SAMPLER = f"{__package__}.sampling:KvasirSampler"
_SHARED_MEMORY = "/dev/shm"
_WORD = re.compile(r"[A-Za-z0-9_-]{1,100}")  # a path component that can't lead out of the folder
_SIZES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NUMPY_TYPES = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}
_PATIENCE_S = 10.0  # a slow reader has this many seconds to receive a message; a reader that is gone is noticed at once


@dataclass
class TransferRequest:
    """One request, as seen beside the scheduler."""

    key: str
    folder: str
    length: int  # of its prompt
    block: int
    emitted_until: int | None  # the blocks up to this position have been sent; None if no blocks were requested
    inject: tuple[str, int] | None
    evaluated_tokens: int = 0  # how many of the prompt's tokens vLLM has scheduled
    loading: bool = False


@dataclass
class Load:
    """The first `prefix_length` positions of a file of `tokens`, to put into a request's pages."""

    key: str
    folder: str
    name: str
    tokens: int
    prefix_length: int
    blocks: tuple[list[int], ...]  # one list of block ids for each group of layers


@dataclass
class Save:
    """Positions to give out, as blocks of `step` tokens; behind a prompt's last one, what its windows still see."""

    key: str
    folder: str
    begin: int
    end: int
    step: int
    blocks: tuple[list[int], ...]
    last: bool


@dataclass
class TransferPlan(KVConnectorMetadata):  # type: ignore[misc]
    """The worker's tasks in one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class KvasirConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        require_one_rank(vllm_config.parallel_config)
        require_settings(vllm_config)
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        self._root = Path(extra.get("folder", _SHARED_MEMORY))
        self._events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._events.settimeout(_PATIENCE_S)
        self._instance = uuid.uuid4().hex
        self._transfer_requests: dict[str, TransferRequest] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self._pages: Pages | None = None
        self._spoiled_blocks: set[int] = set()
        self._groups = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]

    # Beside the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens the request's file adds. The prompt's last token is always computed."""
        transfer = self._transfer_of(request)
        if transfer is None or transfer.inject is None or self._would_stay(request):
            return 0, False
        usable = min(transfer.inject[1], request.num_prompt_tokens - 1)
        return max(0, usable - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load the request's file in the next step."""
        transfer = self._transfer_of(request)
        if transfer is not None and num_external_tokens > 0:
            transfer.loading = True

    def build_connector_meta(self, scheduler_output: Any) -> TransferPlan:
        """The worker's tasks for this step. Also counts the scheduled tokens."""
        step = TransferPlan()
        cached = scheduler_output.scheduled_cached_reqs
        computed_tokens = {
            request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs
        }
        computed_tokens |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            transfer = self._transfer_requests.get(request_id)
            # The lists of blocks are needed only for a prompt's steps. At each step of an answer, copying them would
            # only cost time.
            if transfer is not None and computed_tokens[request_id] < transfer.length:
                blocks = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
                self._plan(
                    step, transfer, computed_tokens[request_id], num_scheduled, tuple(list(group) for group in blocks)
                )
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its pages are free at once: all was copied. Who asked learns what answers, also if it can't be given more."""
        self._transfer_requests.pop(request.request_id, None)
        return False, {events.NAME: self._description()} if _transfer_params(request) else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See request_finished."""
        return self.request_finished(request, [])

    def _transfer_of(self, request: Any) -> TransferRequest | None:
        """The transfer of a request; None if the request is not Kvasir's."""
        if request.request_id not in self._transfer_requests:
            transfer = _parse_request(_transfer_params(request), request.num_prompt_tokens)
            if transfer is None:
                return None
            self._transfer_requests[request.request_id] = transfer
        return self._transfer_requests[request.request_id]

    def _would_stay(self, request: Any) -> bool:
        """Whether what can't be put in would be found by others: vLLM can't be told of it where there are groups."""
        is_shared = self._vllm_config.cache_config.enable_prefix_caching and not request.cache_salt
        return len(self._groups) > 1 and bool(is_shared)

    def _description(self) -> dict[str, Any]:
        model = self._vllm_config.model_config
        return {
            "version": events.VERSION,
            "instance": self._instance,
            "vllm": vllm.__version__,
            "device": self._vllm_config.device_config.device_type,
            "model": str(model.model),
            "context": model.max_model_len,
            "sizes": {name: getattr(model.hf_text_config, name, None) for name in _SIZES},
        }

    def _plan(
        self,
        step: TransferPlan,
        transfer: TransferRequest,
        start: int,
        num_scheduled: int,
        blocks: tuple[list[int], ...],
    ) -> None:
        if transfer.loading and transfer.inject is not None:
            transfer.loading = False
            step.loads.append(Load(transfer.key, transfer.folder, *transfer.inject, start, blocks))
        position = min(start + num_scheduled, transfer.length)
        transfer.evaluated_tokens += position - start
        self._notify(transfer, op="evaluated", tokens=transfer.evaluated_tokens, instance=self._instance)
        # A block is sent when it is complete. Only a prompt's last block can be sent incomplete.
        end = position if position == transfer.length else position // transfer.block * transfer.block
        last = position == transfer.length
        if transfer.emitted_until is not None and (end > transfer.emitted_until or last):
            step.saves.append(
                Save(transfer.key, transfer.folder, transfer.emitted_until, end, transfer.block, blocks, last)
            )
            transfer.emitted_until = max(end, transfer.emitted_until)

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note where the pages are. Their inner layout is learnt later, because on a CPU it is not settled yet."""
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the transferred caches into the pages, all of them before the step begins."""
        for load in self._step.loads:
            try:
                self._load(load)
            except Exception as error:  # noqa: BLE001  vLLM must go on whatever the error is
                self._fail_load(load)
                self._notify(load, op="failed", kind="kv", why=f"the KV cache could not be put in: {error}")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for, because all layers are loaded when a step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do, because all layers leave together when a step ends."""

    def wait_for_save(self) -> None:
        """Give out the blocks that this step completed."""
        for save in self._step.saves:
            try:
                self._save(save)
            except Exception as error:  # noqa: BLE001
                self._notify(save, op="failed", kind="kv", why=f"the KV cache could not be read: {error}")

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of what could not be put in: vLLM ends these requests, and no other. It asks this of one group only."""
        spoiled_block_ids, self._spoiled_blocks = self._spoiled_blocks, set()
        return spoiled_block_ids

    @property
    def _step(self) -> TransferPlan:
        step = self._connector_metadata
        return step if isinstance(step, TransferPlan) else TransferPlan()

    def _known_pages(self) -> Pages:
        """Raises UnknownPages."""
        if self._pages is None:
            layers = self._vllm_config.compilation_config.static_forward_context
            self._pages = Pages(self._caches, layers, self._groups)
        return self._pages

    def _load(self, load: Load) -> None:
        pages = self._known_pages()
        if pages.window and load.prefix_length < load.tokens:
            raise ValueError("a sliding window can't go back to an earlier position")
        rows = pages.window_rows(load.tokens)
        full = (len(pages.full_layers), 2, load.tokens, pages.heads, pages.dim)
        windows = (len(pages.window_layers), 2, rows, pages.heads, pages.dim)
        with self._folder(load) as folder, open(open_file(folder, load.name, os.O_RDONLY), "rb") as file:
            # PyTorch accepts only writable arrays. So the file is memory-mapped copy-on-write, although nothing is
            # written to it.
            data = np.memmap(file, _NUMPY_TYPES[pages.dtype], "c")
        full_data, window_data = np.split(data, [math.prod(full)])
        pages.write(pages.full_layers, load.blocks, 0, full_data.reshape(full)[:, :, : load.prefix_length])
        if pages.window:
            pages.write(pages.window_layers, load.blocks, load.tokens - rows, window_data.reshape(windows))

    def _fail_load(self, load: Load) -> None:
        """Have its request ended; where vLLM can't, whoever asks has been told, and the pages hold nobody's text."""
        if len(self._groups) == 1:
            self._spoiled_blocks.update(load.blocks[0])
        else:
            self._known_pages().clear(load.blocks)

    def _save(self, save: Save) -> None:
        pages = self._known_pages()
        if save.end > save.begin:
            data = pages.read(pages.full_layers, save.blocks, save.begin, save.end)
            cuts: Sequence[int] = range(save.step, save.end - save.begin, save.step)
            blocks = np.split(data, list(cuts), axis=2)
            self._give_out(save, blocks, f"{save.key}-{save.begin}.kv", op="block", start=save.begin, end=save.end)
        if save.last and pages.window:
            begin = save.end - pages.window_rows(save.end)
            data = pages.read(pages.window_layers, save.blocks, begin, save.end)
            self._give_out(save, [data], f"{save.key}-window.kv", op="window", position=save.end)

    def _give_out(self, save: Save, arrays: Sequence[NDArray[Any]], name: str, **message: Any) -> None:
        with self._folder(save) as folder:
            with open(open_file(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                for array in arrays:
                    file.write(np.ascontiguousarray(array).data)
            if not self._notify(save, **message, file=name, shape=self._known_pages().shape):
                os.unlink(name, dir_fd=folder)  # nobody will read the file

    @contextmanager
    def _folder(self, transfer: TransferRequest | Load | Save) -> Iterator[int]:
        """A handle of a request's folder. It is needed because this process may be root, and others can write to shared
        memory."""
        folder = open_folder(self._root / transfer.folder)
        try:
            yield folder
        finally:
            os.close(folder)

    def _notify(self, recipient: TransferRequest | Load | Save, **message: Any) -> bool:
        """Send a message. Returns whether it was received."""
        datagram = events.pack_datagram(message | {"id": recipient.key})
        try:
            with self._folder(recipient) as folder:
                send(self._events, datagram, folder, events.SOCKET)
        except OSError:  # the requester is gone
            return False
        return True


def _transfer_params(request: Any) -> Any:
    """The request's message to Kvasir; None if it has none."""
    transfer = request.kv_transfer_params
    return transfer.get(events.NAME) if isinstance(transfer, dict) else None


def _parse_request(params: Any, length: int) -> TransferRequest | None:
    """What a request of `length` tokens asks for; None if it is not Kvasir's, of another version, or garbled."""
    try:
        words = [params["key"], params["folder"]]
        inject = params["inject"]
        if inject is not None:
            name, tokens = inject
            inject = (name, int(tokens))
            words.append(name.removesuffix(".kv"))
        emit = None if params["emit"] is None else int(params["emit"])
        transfer = TransferRequest(params["key"], params["folder"], length, int(params["block"]), emit, inject)
        fits = (
            params["version"] == events.VERSION
            and transfer.block > 0
            and (emit or 0) >= 0
            and all(map(_WORD.fullmatch, words))
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    return transfer if fits else None


def require_one_rank(parallel: Any) -> None:
    """Raises ValueError where several processes hold the model: each has some heads, or some layers, only."""
    for name in ("tensor", "pipeline", "data"):
        if (size := getattr(parallel, f"{name}_parallel_size")) != 1:
            raise ValueError(
                f"{name}_parallel_size must be 1, not {size}: KV caches of several ranks can't be transferred"
            )


def require_settings(config: Any) -> None:
    """Raises ValueError where vLLM would not answer as Kvasir's other engines do: a server has flags of its own."""
    model, schema = config.model_config, config.structured_outputs_config
    flags = {
        f"--logits-processors {SAMPLER}": SAMPLER in (model.logits_processors or ()),
        "--generation-config vllm": model.generation_config == "vllm" and not model.override_generation_config,
        '--structured-outputs-config \'{"backend": "guidance", "disable_any_whitespace": true}\'': (
            schema.backend == "guidance" and schema.disable_any_whitespace
        ),
        "kv_load_failure_policy fail": config.kv_transfer_config.kv_load_failure_policy == "fail",
    }
    if missing_flags := [flag for flag, is_set in flags.items() if not is_set]:
        raise ValueError(f"Kvasir's connector needs vLLM to be started with {', '.join(missing_flags)}")
