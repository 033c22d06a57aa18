"""The parts of `benchmarks.gpu_figures`; see there. On the CPU, for trying them, everything is tiny."""

import gc
import json
import platform
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import kvstore.connect
from decode_worker.stealing.models import CachedModel, ModelCache
from decode_worker.worker import DecodeWorker
from engines.base import LoadedEngine
from engines.entry import Engine
from engines.proof import prove
from engines.registry import EngineOptions, open_engine
from engines.sketch import compare
from engines.sketching import fresh_sketch
from infra.broker.embedded.broker import EmbeddedBroker, EmbeddedServer
from kvstore.blocks import BlockRef, block_refs
from kvstore.cluster_state import BestEffortClusterState
from kvstore.memory import MemoryKVStore
from kvstore.uploader import Uploader
from messages.jobs import Part, Sampling
from messages.kv import Block, KVLayout, Record
from prefill_worker.worker import PrefillWorker
from producers.client import Client

Row = dict[str, Any]

DEMO = Path(__file__).parents[1] / "examples" / "model" / "kvasir-demo"
MODEL = "gpu:demo"
LINK_BYTES_PER_S = 1e9
_CONTEXT = 16_384  # of the random model
_LAST_ROW_S = 420.0  # after the start: what is not begun by then is left out, so that all of it takes ten minutes
_SPARE_SHARE = 0.8  # of the free memory, for weights: the rest is for what computing takes
# Of config.json at the hub: the sizes that make a layer's bytes and time.
_SHAPES: dict[str, Row] = {
    "qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151_936,
        "max_position_embeddings": 40_960, "tie_word_embeddings": False,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4,
        "intermediate_size": 2880, "vocab_size": 201_088, "max_position_embeddings": 131_072, "sliding_window": 128,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
# What stands in for them on the CPU.
_TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
         "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32,
         "vocab_size": 512}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """Where it runs, and a folder for what it writes."""

    device: str
    seed: int
    folder: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def is_cuda(self) -> bool:
        """Whether it is the real thing."""
        return self.device == "cuda"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of prompts, in tokens."""
        return (512, 2048, 8192) if self.is_cuda else (32, 64)

    @property
    def longest(self) -> int:
        """Tokens of the prompt whose KV cache is copied out while it is computed."""
        return 2 * self.lengths[-1]

    @property
    def batches(self) -> tuple[int, ...]:
        """Prompts at once."""
        return (1, 4, 8) if self.is_cuda else (1, 2)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object], rounds: int = 3) -> float:
        """The median, after one that does not count."""
        action()
        found = []
        for _ in range(rounds):
            self.wait()
            started = time.perf_counter()
            action()
            self.wait()
            found.append(time.perf_counter() - started)
        return statistics.median(found)

    @contextmanager
    def engine(self, folder: Path, dtype: str, device: str, context: int = 4096, slots: int = 4) -> Iterator[Engine]:
        """A folder in the transformers engine."""
        weights = f"{folder}?dtype={dtype}&device={device}"
        with closing(open_engine("transformers", EngineOptions(weights, context=context, slots=slots))) as engine:
            yield engine

    def random_folder(self) -> Path:
        """A model with random weights of a size that keeps a GPU busy, and the demo's tokenizer; written once."""
        folder = self.folder / "random"
        if not folder.exists():
            size = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16}
            size |= {"num_key_value_heads": 8, "head_dim": 128}
            tiny = {name: _TINY[name] for name in size if name in _TINY} | {"num_hidden_layers": 2}
            vocabulary = json.loads((DEMO / "config.json").read_text())["vocab_size"]
            torch.manual_seed(self.seed)
            stated = (size if self.is_cuda else tiny) | {"vocab_size": vocabulary, "max_position_embeddings": _CONTEXT}
            config = transformers.AutoConfig.for_model("qwen3", **stated)
            transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(DEMO / name, folder)
        return folder

    def ids(self, length: int, engine: Engine) -> tuple[int, ...]:
        """Of a random prompt."""
        return tuple(np.random.default_rng(self.seed).integers(16, engine.info.vocabulary // 2, length).tolist())


def machine(device: str) -> Row:
    """What it runs on."""
    found = {"device": device, "python": platform.python_version(), "torch": torch.__version__}
    found |= {"transformers": version("transformers"), "platform": platform.platform()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_GB": round(properties.total_memory / 1e9, 1)}
        found |= {"cuda": str(torch.version.cuda)}
    return found


def engine_rows(bench: Bench) -> list[Row]:
    """The demo's model: proved, and its sketch beside the CPU's."""
    with bench.engine(DEMO, "f32", "cpu") as reference:
        assert reference.info.layout is not None
        own = fresh_sketch(reference, reference.info.layout)
    rows = []
    for dtype in ("bf16", "f16"):
        with bench.engine(DEMO, dtype, bench.device) as engine:
            assert engine.info.layout is not None
            agreement = compare(own, fresh_sketch(engine, engine.info.layout))
            row = {"dtype": dtype, "why_no_kv": prove(engine, engine), "sketch_differs": agreement.problem}
            shares = [max(keys, values) / rounding for keys, values, rounding in agreement.layers]
            rows.append(row | {"share_of_rounding": max(shares), "attention": _attention()})
    return rows


def _attention() -> str:
    """How transformers computes it where nobody asks for another way, and the kernels that SDPA may take."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(DEMO))
    kernels = [
        name for name in ("flash", "mem_efficient", "math") if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
    ]
    return f"{model.config._attn_implementation} ({', '.join(kernels)})"


def prefill_rows(bench: Bench) -> list[Row]:
    """Tokens a second by length and prompts at once."""
    model = transformers.AutoModelForCausalLM.from_pretrained(bench.random_folder(), dtype=torch.bfloat16)
    return _rates(bench, model.eval().to(bench.device), model.config.vocab_size)


def _rates(bench: Bench, model: Any, vocabulary: int, rounds: int = 3) -> list[Row]:
    rows = []
    for length in bench.lengths:
        for batch in bench.batches:
            row: Row = {"prompt_tokens": length, "prompts": batch}
            ids = torch.randint(0, vocabulary, (batch, length), device=bench.device)

            def run(ids: torch.Tensor = ids) -> None:
                with torch.inference_mode():
                    model.base_model(input_ids=ids, use_cache=True)

            try:
                if time.monotonic() - bench.started > _LAST_ROW_S:
                    row["left_out"] = "no time was left"
                else:
                    row["tokens_per_s"] = round(batch * length / bench.seconds(run, rounds))
            except torch.OutOfMemoryError:
                row["did_not_fit"] = f"{batch} prompts of {length:,} tokens"
                torch.cuda.empty_cache()
            rows.append(row)
    return rows


def export_figures(bench: Bench) -> Row:
    """When blocks come out of a prefill, and what that adds to it."""
    with bench.engine(bench.random_folder(), "bf16", bench.device, context=_CONTEXT) as engine:
        ids = bench.ids(bench.longest, engine)
        came: list[float] = []

        def prefill(emit: Callable[[Record], None]) -> None:
            engine.prefill(ids, emit)

        without = bench.seconds(lambda: engine.prefill(ids, lambda _record: None, first=len(ids)))
        exporting = bench.seconds(partial(prefill, lambda _record: None))
        started = time.perf_counter()
        prefill(lambda _record: came.append(time.perf_counter() - started))
        whole = time.perf_counter() - started
    figures = {"prompt_tokens": len(ids), "blocks": len(came), "seconds": exporting, "seconds_without": without}
    return figures | {"first_block_share": came[0] / whole, "added_share": exporting / without - 1}


class _PacedStore(MemoryKVStore):
    """A store behind a link of so many bytes a second."""

    put_s = 0.0

    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        """See KVStore."""
        seconds = sum(record.data.nbytes for _, record in records) / LINK_BYTES_PER_S
        time.sleep(seconds)
        self.put_s += seconds
        return int(seconds * LINK_BYTES_PER_S)


def copy_figures(bench: Bench) -> Row:
    """Copies out of the device, alone; and an upload at 1 GB/s beside the prefill that it comes from."""
    found: Row = {}
    source = torch.zeros((256 if bench.is_cuda else 4) << 20, dtype=torch.uint8, device=bench.device)
    for name, pinned in (("pinned", True), ("ordinary", False)):
        host = torch.empty_like(source, device="cpu", pin_memory=pinned and bench.is_cuda)
        seconds = bench.seconds(partial(host.copy_, source, non_blocking=True))
        found[f"{name}_GB_per_s"] = source.nbytes / 1e9 / seconds
    with bench.engine(bench.random_folder(), "bf16", bench.device, context=_CONTEXT) as engine:
        layout, ids = engine.info.layout, bench.ids(bench.longest, engine)
        assert layout is not None
        refs = {ref.start: ref for ref in block_refs("gpu", layout, ids, len(ids), 0, "job")}
        alone = bench.seconds(lambda: engine.prefill(ids, lambda _record: None))
        exposed, uploads = [], []
        for _ in range(3):
            store = _PacedStore()
            uploader = Uploader(store, "gpu", layout)

            def put(record: Record, uploader: Uploader = uploader) -> None:
                assert isinstance(record, Block)
                uploader.put(refs[record.start], record)

            started = time.perf_counter()
            engine.prefill(ids, put)
            uploader.finish()
            exposed.append(max(0.0, time.perf_counter() - started - alone))
            uploads.append(store.put_s)
    upload_s, exposed_s = statistics.median(uploads), statistics.median(exposed)
    found |= {"upload_seconds": upload_s, "exposed_seconds": exposed_s, "prefill_seconds": alone}
    return found | {"hidden": 1 - exposed_s / upload_s}


def shape_rows(bench: Bench) -> list[Row]:
    """As many layers of real shapes as fit, and how fast they are."""
    return [_shape(bench, name, dict(shape)) for name, shape in _SHAPES.items()]


def _shape(bench: Bench, name: str, shape: Row) -> Row:
    whole = shape["num_hidden_layers"]
    if not bench.is_cuda:
        shape |= {key: value for key, value in _TINY.items() if key in shape}
        whole = shape["num_hidden_layers"] = 4
    _free_memory(bench)  # of the parts before, too
    one, two = (_num_bytes(shape | {"num_hidden_layers": layers}) for layers in (1, 2))
    layer_bytes, other_bytes = two - one, 2 * one - two
    free = torch.cuda.mem_get_info()[0] if bench.is_cuda else other_bytes / _SPARE_SHARE + 4 * layer_bytes
    layers = min(whole, int((free * _SPARE_SHARE - other_bytes) / layer_bytes))
    row: Row = {"model": name, "layers": max(0, layers), "of_layers": whole, "layer_GB": layer_bytes / 1e9}
    if layers < whole:
        row["did_not_fit"] = f"{whole - max(0, layers)} of {whole} layers of {name}"
    if layers < 1:
        return row
    torch.manual_seed(bench.seed)
    try:
        with torch.device(bench.device):
            model = transformers.AutoModelForCausalLM.from_config(_config(shape, layers), dtype=torch.bfloat16).eval()
        return row | {"rows": _rates(bench, model, shape["vocab_size"], rounds=1)}
    except torch.OutOfMemoryError:
        return row | {"did_not_fit": f"{layers} of {whole} layers of {name}, which should have"}
    finally:
        model = None
        _free_memory(bench)


def _free_memory(bench: Bench) -> None:
    gc.collect()
    if bench.is_cuda:
        torch.cuda.empty_cache()


def _config(shape: Row, layers: int) -> Any:
    return transformers.AutoConfig.for_model(**shape | {"num_hidden_layers": layers})


def _num_bytes(shape: Row) -> int:
    """Of its weights in bfloat16; nothing is allocated."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            _config(shape, shape["num_hidden_layers"]), dtype=torch.bfloat16
        )
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def class_figures(bench: Bench) -> Row:
    """A class by Kvasir's own workers: prefill on the device, decode on the CPU."""
    jobs, in_flight = (200, 16) if bench.is_cuda else (6, 3)
    server, stores = EmbeddedServer(), kvstore.connect.connect("memory://")
    sampling = Sampling(max_tokens=16, temperature=0)
    rubric = "Grade by this rubric: one point for a program that runs, one for its tests. " * 30
    with ExitStack() as stack:
        prefiller = stack.enter_context(bench.engine(DEMO, "f16", bench.device))
        decoder = stack.enter_context(bench.engine(DEMO, "f32", "cpu"))
        why_no_kv = prove(prefiller, decoder)
        home = ModelCache(CachedModel(MODEL, 0, LoadedEngine(decoder, why_no_kv)))
        makers = (
            partial(PrefillWorker, MODEL, LoadedEngine(prefiller, why_no_kv)),
            partial(DecodeWorker, home, kv_check_every=0),
        )
        for make in makers:
            broker = EmbeddedBroker(server)
            worker = make(broker, stores.kv, stores.cluster_state, lambda _event: None)
            thread = threading.Thread(target=worker.run, daemon=True)
            thread.start()
            for end in (broker.close, thread.join, partial(worker.stop, abort=True)):
                stack.callback(end)
        client = Client(EmbeddedBroker(server), BestEffortClusterState(stores.cluster_state), [MODEL])
        stack.callback(client.close)

        def ask(number: int) -> Any:
            own = f"def answer_{number}():\n    return {number} * {number * 7 % 31}\n" * 20
            return client.ask(MODEL, (Part("user", rubric, "class"), Part("user", own)), sampling, deadline_s=600)

        started = time.perf_counter()
        with ThreadPoolExecutor(in_flight) as pool:
            results = list(pool.map(ask, range(jobs)))
        seconds = time.perf_counter() - started
    reports = [result.decode for result in results if result.state == "succeeded" and result.decode]
    return {
        "jobs": jobs,
        "succeeded": len(reports),
        "verified": sum(report.kv_transfer.startswith("verified") for report in reports),
        "why_none": sorted({report.why_none for report in reports if report.why_none}),
        "prompt_tokens": sum(report.prompt_tokens for report in reports),
        "evaluated_tokens": sum(report.evaluated_tokens for report in reports),
        "seconds": seconds,
    }


PARTS: dict[str, Callable[[Bench], Any]] = {
    "engine": engine_rows,
    "prefill": prefill_rows,
    "export": export_figures,
    "copies": copy_figures,
    "shapes": shape_rows,
    "a_class": class_figures,
}
