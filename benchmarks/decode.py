"""What an engine's decode() costs over the library that it drives: 8 transferred sequences at once, greedy, free text.

Another llama.cpp engine has prefilled 8 prompts of different lengths, and is closed again. Their KV caches lie in
memory as canonical blocks. Then, in turns, a round each, both on warm models:

    mlx       tokens_per_s: 8 threads call the engine's decode() with them.
              bare_tokens_per_s: mlx_lm's BatchGenerator with another copy of the weights gets all 8 at once, as
              arrays of MLX's that are there before the clock starts, and is asked for tokens by one thread that
              appends them to lists.
    llamacpp  tokens_per_s: 8 threads call the engine's decode() with them.
              bare_tokens_per_s: 8 threads with a plain HTTP connection each restore a slot file, which is there before
              the clock starts, and read the stream of the same /completion request; same server, same slots.

    vllm      tokens_per_s: 8 threads call the engine's decode() with them.
              bare_tokens_per_s: vLLM's own offline class in a process of its own gets the 8 prompts at once, which lie
              in its prefix cache: it computes what is left of each prompt's last page of 32 tokens. With --engine vllm,
              and only then: it is 1 GB.

The clock runs from when all threads are ready until the last one has its whole answer. So an engine's time holds what
its bare side is spared: importing the KV cache (for llama.cpp: building the slot file, writing it, clearing the slot),
incremental text, and the way of each token to the caller's thread. `ratio` is the median of the rounds' ratios,
not the ratio of the medians: who else uses the machine slows both sides of one round. `equal` says whether every
answer had the same tokens on both sides; with random weights a near tie may fall otherwise, as sums depend on which
sequences happen to share a step.

`cpu_ratio` compares the processor seconds of this process instead, in which the llama.cpp server and MLX run as well,
or, of vLLM, those of its processes, and on the engine's side of this one.
Neighbours that take the cores change it little, where the clock's figures swing by a factor of two; on a machine that
others use it is the one to read. Where a GPU computes it says what the CPU does beside it.

Two models of random weights: one of a million, of which llama.cpp computes a step of 8 in some milliseconds, so that
what is done per token and per job weighs far more than with a real one; and one of 12 million, whose
steps take llama.cpp about as long as those of a 30B take an accelerator. MLX on a CPU gets the first one only, whose
steps take it 30 ms already.

What the figures do not show: a model of real size, whose KV cache is a thousand times larger. On two cores the
engine's Python and the model's arithmetic share the cores, which they do not on a GPU. Left out: schemas, sampling,
who calls decode() while others are at it, and prompts that nobody has prefilled.
"""

import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from benchmarks import harness
from benchmarks.decode_models import Model, models
from benchmarks.vllm_sides import Both
from engines.huggingface.prompt import HFPrompt
from engines.huggingface.weights import open_folder
from engines.llamacpp import slotfile
from engines.llamacpp.engine import LlamaCppEngine
from engines.llamacpp.model import slot_shape
from engines.llamacpp.start import start
from engines.mlx import kv as mlx_kv
from engines.mlx import model as mlx_model
from engines.registry import Engine, EngineOptions, open_engine
from messages.jobs import Sampling, user_prompt
from messages.kv import Block, KVCache, Record

SEQUENCES = 8
CONTEXT = 2048
ROUNDS, QUICK_ROUNDS = 11, 3
VLLM_ROUNDS = 41  # its turns differ more: four processes on a few cores
WORDS = ("the", "program", "reads", "its", "input", "line", "by", "and", "prints", "out", "a", "report", "of", "what")

Answer = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A prompt, and the KV cache of all its tokens but the last."""

    tokens: tuple[int, ...]
    cache: KVCache


@dataclass(frozen=True, slots=True)
class Timed:
    """One side of one round: the answers' tokens, and how long all of them took together."""

    answers: list[Answer]
    seconds: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of all answers together."""
        return sum(map(len, self.answers)) / self.seconds


class Clock:
    """Starts when it is made. Counts seconds, and the processor time of this process, servers inside it included."""

    def __init__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def stop(self, answers: list[Answer]) -> Timed:
        """What has passed."""
        return Timed(answers, time.perf_counter() - self._started[0], time.process_time() - self._started[1])


class Side(Protocol):
    """An engine that decodes a batch, and the same batch through what it drives."""

    def engine(self) -> Timed:
        """Through decode()."""

    def bare(self) -> Timed:
        """Without it."""

    def close(self) -> None:
        """Unload."""


def transferred(gguf: Path, seed: int) -> list[CachedPrompt]:
    """Prompts of 90 to 620 tokens, prefilled in an engine that is gone when this returns."""
    engine = open_engine("llamacpp", EngineOptions(str(gguf), context=CONTEXT, slots=1))
    chosen = random.Random(seed)
    try:
        texts = [" ".join(chosen.choices(WORDS, k=60 * count)) for count in range(1, SEQUENCES + 1)]
        chosen.shuffle(texts)
        return [_prefilled(engine, engine.tokenize(user_prompt(text, ""), 0.0).ids) for text in texts]
    finally:
        engine.close()


def _prefilled(engine: Engine, tokens: tuple[int, ...]) -> CachedPrompt:
    blocks: list[Record] = []
    engine.prefill(tokens[:-1], blocks.append)
    assert engine.info.layout is not None
    return CachedPrompt(tokens, KVCache(engine.info.layout, tuple(each for each in blocks if isinstance(each, Block))))


class MLX:
    """The mlx engine, and BatchGenerator over a second copy of the weights, in a thread of its own as the engine."""

    def __init__(self, model: Model, batch: list[CachedPrompt]) -> None:
        self._batch, self._num_tokens, self._folder = batch, model.answer_tokens["mlx"], str(model.folder)
        self._thread = ThreadPoolExecutor(1)  # MLX arrays belong to the thread that made them
        self._thread.submit(self._load).result()
        self._engine = open_engine("mlx", EngineOptions(self._folder, context=CONTEXT, slots=len(batch)))

    def close(self) -> None:
        """See Side."""
        self._engine.close()
        self._thread.submit(self._unload).result()
        self._thread.shutdown()

    def engine(self) -> Timed:
        """See Side."""
        return through_engine(self._engine, self._batch, self._num_tokens)

    def bare(self) -> Timed:
        """See Side."""
        return self._thread.submit(self._timed).result()

    def _load(self) -> None:
        folder = open_folder(self._folder)
        self._end_ids = sorted(HFPrompt(folder.path).end_ids)
        self._loaded = mlx_model.load(folder, CONTEXT)
        self._stream = mx.new_stream(mx.default_device())

    def _unload(self) -> None:
        del self._loaded
        mx.clear_cache()
        mx.clear_streams()  # MLX wants a thread to do this before it ends

    def _timed(self) -> Timed:
        with mx.stream(self._stream):
            caches = [self._imported(each.cache) for each in self._batch]
            clock = Clock()
            return clock.stop(self._generate(caches))

    def _imported(self, cache: KVCache) -> list[Any]:
        assert self._loaded.layout is not None
        caches: list[Any] = make_prompt_cache(self._loaded.model)
        mlx_kv.fill(caches, self._loaded.layout, cache)
        return caches

    def _generate(self, caches: list[list[Any]]) -> list[Answer]:
        generator: Any = BatchGenerator(
            self._loaded.model,
            max_tokens=self._num_tokens,
            stop_tokens=[[number] for number in self._end_ids],
            completion_batch_size=len(caches),
            stream=self._stream,
        )
        numbers = generator.insert([[each.tokens[-1]] for each in self._batch], caches=caches)
        answers: dict[int, list[int]] = {number: [] for number in numbers}
        unfinished = len(numbers)
        while unfinished:
            _, responses = generator.next()
            for response in responses:
                if response.finish_reason != "stop":
                    answers[response.uid].append(response.token)
                unfinished -= response.finish_reason is not None
        generator.close()
        return [tuple(answers[number]) for number in numbers]


class LlamaCpp:
    """The llamacpp engine, and its server over HTTP."""

    def __init__(self, model: Model, batch: list[CachedPrompt]) -> None:
        self._batch, self._num_tokens = batch, model.answer_tokens["llamacpp"]
        self._backing = start(EngineOptions(str(model.gguf), context=CONTEXT, slots=len(batch)))
        try:
            self._engine = LlamaCppEngine(self._backing, len(batch))
            self._write_slot_files()
        except BaseException:
            self._backing.close()
            raise

    def close(self) -> None:
        """See Side."""
        self._engine.close()

    def engine(self) -> Timed:
        """See Side."""
        return through_engine(self._engine, self._batch, self._num_tokens)

    def bare(self) -> Timed:
        """See Side."""
        return together([partial(self._restore_and_generate, slot) for slot in range(len(self._batch))])

    def _write_slot_files(self) -> None:
        """One for each slot, laid out as the server itself does it."""
        assert self._backing.slot_folder is not None
        assert self._backing.gguf is not None
        connection = self._backing.server.connect(timeout=60.0)
        _post(connection, "/completion", {"prompt": [1, 2, 3], "n_predict": 0, "id_slot": 0, "cache_prompt": True})
        _post(connection, "/slots/0?action=save", {"filename": "probe.slot"})
        connection.close()
        probe = slotfile.parse((self._backing.slot_folder / "probe.slot").read_bytes())
        shape = slot_shape(self._backing.gguf, probe)
        for slot, each in enumerate(self._batch):
            state = slotfile.build(each.tokens[:-1], each.cache, shape, probe.streams)
            (self._backing.slot_folder / f"slot-{slot}.slot").write_bytes(state)

    def _restore_and_generate(self, slot: int) -> Answer:
        connection = self._backing.server.connect(timeout=60.0)
        _post(connection, f"/slots/{slot}?action=restore", {"filename": f"slot-{slot}.slot"})
        body = {
            "prompt": list(self._batch[slot].tokens),
            "id_slot": slot,
            "cache_prompt": True,
            "n_predict": self._num_tokens,
            "stream": True,
            "return_tokens": True,
            "samplers": ["top_k", "top_p", "temperature"],
            "temperature": 0.0,
            "top_p": 0.9,
            "top_k": 1,
            "seed": 0,
            "stop": [],
            "dynatemp_range": 0.0,
            "mirostat": 0,
        }
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer: list[int] = []
        event: dict[str, Any] = {}
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                answer += event["tokens"]
        connection.close()
        if event["timings"]["prompt_n"] != 1:
            raise RuntimeError(
                f"the server evaluated {event['timings']['prompt_n']} prompt tokens: nothing was restored"
            )
        return tuple(answer)


def _post(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> None:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != http.HTTPStatus.OK:
        raise RuntimeError(f"{path} was answered {response.status}: {answer[:200]!r}")


def through_engine(engine: Engine, batch: list[CachedPrompt], num_tokens: int) -> Timed:
    """Decode the batch from as many threads as it has sequences."""
    sampling = Sampling(max_tokens=num_tokens, temperature=0)

    def decode(each: CachedPrompt) -> Answer:
        answer = engine.decode(each.tokens, each.cache, sampling)
        if answer.evaluated_tokens != 1:
            raise RuntimeError(f"the engine evaluated {answer.evaluated_tokens} prompt tokens: nothing was transferred")
        return answer.tokens

    return together([partial(decode, each) for each in batch])


def together(calls: Sequence[Callable[[], Answer]]) -> Timed:
    """Run each call in a thread of its own; from when all threads are ready until the last one is done."""
    ready = threading.Barrier(len(calls) + 1)

    def run(call: Callable[[], Answer]) -> Answer:
        ready.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(run, call) for call in calls]
        ready.wait()
        clock = Clock()
        return clock.stop([future.result() for future in running])


class VLLM:
    """The vllm engine, and vLLM's offline class in another process."""

    def __init__(self, model: Model, batch: list[CachedPrompt]) -> None:
        self._batch, self._num_tokens = batch, model.answer_tokens["vllm"]
        weights = f"{model.folder}?dtype=float32"
        self._ends = sorted(HFPrompt(model.folder).end_ids)
        self._both = Both(weights, CONTEXT, len(batch), prefix_caching=True)

    def close(self) -> None:
        """See Side."""
        self._both.close()

    def engine(self) -> Timed:
        """See Side."""
        self._both.rest()
        before = self._both.engine_cpu_s()
        timed = through_engine(self._both.engine, self._batch, self._num_tokens)
        return replace(timed, cpu_s=self._both.engine_cpu_s() - before)

    def bare(self) -> Timed:
        """See Side."""
        self._both.rest()
        before = self._both.bare_cpu_s()
        done = self._both.bare([each.tokens for each in self._batch], self._num_tokens, self._ends)
        answers = [tuple(token for token in answer if token not in self._ends) for answer in done["answers"]]
        return Timed(answers, done["seconds"], self._both.bare_cpu_s() - before)


SIDES: dict[str, type[MLX] | type[LlamaCpp] | type[VLLM]] = {"mlx": MLX, "llamacpp": LlamaCpp, "vllm": VLLM}


def measure(name: str, model: Model, batch: list[CachedPrompt], num_rounds: int) -> list[tuple[Timed, Timed]]:
    """(engine, bare) of each round; which one goes first changes from round to round."""
    side = SIDES[name](model, batch)
    rounds = []
    try:
        for warm_up in (side.engine, side.bare):  # the first of each also pays for kernels and pages
            warm_up()
        for number in range(num_rounds):
            order = (side.engine, side.bare) if number % 2 else (side.bare, side.engine)
            first, second = order[0](), order[1]()
            rounds.append((first, second) if number % 2 else (second, first))
    finally:
        side.close()
    return rounds


def row(name: str, model: str, rounds: list[tuple[Timed, Timed]]) -> dict[str, Any]:
    """The figures of one engine with one model."""
    ratios = [engine.tokens_per_s / bare.tokens_per_s for engine, bare in rounds]
    return {
        "engine": name,
        "model": model,
        "sequences": SEQUENCES,
        "tokens_per_s": statistics.median(engine.tokens_per_s for engine, _ in rounds),
        "bare_tokens_per_s": statistics.median(bare.tokens_per_s for _, bare in rounds),
        "ratio": statistics.median(ratios),
        "ratios": sorted(ratios),
        "answer_tokens": len(rounds[0][0].answers[0]),
        "rounds": len(rounds),
        "cpu_ratio": statistics.median(bare.cpu_s / engine.cpu_s for engine, bare in rounds),
        "equal": all(engine.answers == bare.answers for engine, bare in rounds),
    }


def told(row: dict[str, Any]) -> str:
    """A row for people."""
    through, bare, ratios = row["tokens_per_s"], row["bare_tokens_per_s"], row["ratios"]
    return (
        f"{row['engine']:9}{row['model']:4}{through:6,.0f} tokens/s through decode(), {bare:6,.0f} bare:"
        f" ratio {row['ratio']:.3f}"
        f" ({ratios[0]:.3f} to {ratios[-1]:.3f}), of processor time {row['cpu_ratio']:.3f},"
        f" {'the same' if row['equal'] else 'other'} tokens"
    )


def main() -> int:
    """Measure, explain, and end with the line of JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("--engine", action="append", choices=SIDES, help="only this one; may be given several times")
    options = parser.parse_args()
    engines = options.engine or ["mlx", "llamacpp"]
    print(harness.machine())
    rows = []
    with models(options.seed, options.quick) as chosen:
        for model in chosen:
            batch = transferred(model.gguf, options.seed)
            lengths = [len(each.tokens) for each in batch]
            print(f"{model.name}: {SEQUENCES} sequences at once, prompts of {', '.join(map(str, lengths))} tokens")
            for name in [name for name in model.answer_tokens if name in engines]:
                num_rounds = VLLM_ROUNDS if name == "vllm" else ROUNDS
                rounds = measure(name, model, batch, QUICK_ROUNDS if options.quick else num_rounds)
                rows.append(row(name, model.name, rounds))
                print(told(rows[-1]), flush=True)
    harness.finish(rows=rows, prompt_tokens=lengths, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
