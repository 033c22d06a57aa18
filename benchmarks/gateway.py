"""What the gateway costs: beside our own Python path, beside LiteLLM's proxy, and beside `kvasir run` for batches.

    added_first_token_ms_p50, _p99
        First text of a stream through the gateway less that of `Client.stream`, at `streams` streams at once (a new one
        begins as one ends). A prefill and a decode worker with the simulated engine at 10 tokens a second, over
        RabbitMQ and Redis: 500 events a second, which two cores bear. Goals: 25, 100.
    requests_per_s
        Answers without streaming, 16 requests at a time, of one gateway process without a broker, with the engine
        `openai` in front of a server that takes no time.
    litellm_requests_per_s, ratio
        LiteLLM's proxy in front of the same server: one worker process, no keys, no database; alternating rounds,
        medians. null unless KVASIR_LITELLM names its program, from an environment of its own. Goal: 3.
    batch_lines_per_s, run_lines_per_s, batch_ratio
        A batch of the gateway, from upload to `completed`, and `kvasir run` with the same lines, start of the process
        included. Goal: 0.9.
    batch_peak_MB
        Most memory of the gateway's process over a batch of 50,000 lines and 200 MB. Goal: 250.
    durable_added_ms_p50, durable_added_ms_p99
        What the way over RabbitMQ and Redis adds to a request, 8 at a time: an answer through the gateway and workers
        with the engine `openai`, less one of the server behind it, which takes no time, asked straight. Rounds
        alternate; medians. In process, through LiteLLM (as above), and 1 and 64 at a time, are printed beside. Goals:
        12, 60. Eight that ask again at once keep two cores full: this is their share of the processors, not the length
        of the way.
    paced_added_ms_p50, paced_added_ms_p99
        The same with a server that takes a quarter of a second, as the first tokens of a model do: the processors are
        free, and this is the length of the way.
    cold_ratio, warm_ratio
        An answer of 8 tokens through a gateway with the model in its process, over one of llama.cpp's own server:
        SmolLM2-135M, a prompt of about 47 tokens that is new, and the next turn of its conversation. llama.cpp keeps
        a slot's prefix for whoever comes; Kvasir clears each slot, since it may serve no other key's, and evaluates
        short prompts again. Long prompts (about 1,000 tokens) are printed beside. null with --quick.

The client, which is Python too, shares two cores with all of it: rates of requests are the whole machine's, and a
client of less weight would show more. --quick takes few of everything, and no LiteLLM.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai

from benchmarks import harness
from benchmarks.gateway_zero import INSTANT_TOKENS
from benchmarks.gateway_zero import MODEL as ZERO
from benchmarks.overhead import percentile
from infra.config.settings import load_settings
from kvasir import connect
from messages.jobs import Sampling, TokenEvent
from tests.support import smollm2
from tests.support.processes import Cluster, ModelEntry, RunningProcess, environment
from tests.support.servers import free_port
from tests.support.waiting import wait_until

STREAMS, EACH, ROUNDS = 50, 4, 3
AT_ONCE, SECONDS = 16, 6.0
REQUESTS, TURNS = 640, 12
LINES, LARGE_LINES, LINE_BYTES = 5_000, 50_000, 4_000
PACED = ModelEntry("simulated", "sim:scale=1,prefill=1000000,decode=10,answer=10,spread=1", 8192, slots=64)
INSTANT = ModelEntry("simulated", "sim:scale=0,answer=8,spread=1", 8192, short_prompt_tokens=100_000)
PROMPT = "What is a queue?"
PACED_TOKENS = INSTANT_TOKENS + 25  # a quarter of a second of the server in `gateway_zero`
LITELLM = "KVASIR_LITELLM"


def serve(cluster: Cluster) -> tuple[RunningProcess, str]:
    """A gateway of this cluster, and its URL."""
    running = cluster.start("serve", "--port", "0", "--state", str(cluster.folder / "gateway"))
    return running, _url(running)


def _url(running: RunningProcess) -> str:
    wait_until(lambda: "answers at" in running.text() or not running.alive, "the gateway serves", 60)
    found = re.search(r"answers at (\S+) ", running.text())
    if not found:
        raise RuntimeError(running.text())
    return found[1]


# --- first tokens


def first_tokens(pair: Any, folder: Path, streams: int, rounds: int) -> tuple[float, float]:
    """(p50, p99) in ms that the gateway adds: medians over the rounds."""
    with Cluster(folder, pair.broker_url, pair.store_url, {"paced": PACED}) as cluster:
        cluster.worker("prefill", "paced")
        cluster.worker("decode", "paced")
        _, url = serve(cluster)
        wait_until(lambda: _answers(url), "the gateway sees the workers", 30)
        added = []
        for _ in range(rounds):
            ours = _all_first(lambda: _by_python(cluster), streams)
            theirs = _all_first(lambda: _by_gateway(url), streams)
            added.append([1000 * (percentile(theirs, at) - percentile(ours, at)) for at in (0.5, 0.99)])
            print(f"first token added, p50 and p99: {added[-1][0]:.1f} and {added[-1][1]:.1f} ms", flush=True)
    return median(one[0] for one in added), median(one[1] for one in added)


def _answers(url: str) -> bool:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30) as client:
        try:
            client.chat.completions.create(model="paced", messages=[{"role": "user", "content": "x"}], max_tokens=1)
        except openai.InternalServerError:
            return False
    return True


def _all_first(way: Any, streams: int) -> list[float]:
    """Seconds to the first text of every stream, so many at a time."""
    found: list[float] = []
    with way() as first:
        threads = [threading.Thread(target=lambda: found.extend(first() for _ in range(EACH))) for _ in range(streams)]
        for thread in threads:
            thread.start()
            time.sleep(1.0 / streams)  # an answer's second, so that they don't all begin at once
        for thread in threads:
            thread.join()
    return found


@contextlib.contextmanager
def _by_python(cluster: Cluster) -> Iterator[Any]:
    settings = load_settings(config=cluster.config, environ=cluster.environment)
    with connect(settings, ["paced"]) as client:

        def first() -> float:
            started = time.monotonic()
            seconds = 0.0
            for event in client.stream("paced", PROMPT, Sampling(10)):
                if isinstance(event, TokenEvent) and event.text and not seconds:
                    seconds = time.monotonic() - started
            return seconds

        yield first


@contextlib.contextmanager
def _by_gateway(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60) as client:

        def first() -> float:
            started = time.monotonic()
            seconds = 0.0
            for chunk in client.chat.completions.create(
                model="paced", messages=[{"role": "user", "content": PROMPT}], max_tokens=10, stream=True
            ):
                if chunk.choices and chunk.choices[0].delta.content and not seconds:
                    seconds = time.monotonic() - started
            return seconds

        yield first


# --- requests


async def _rate(url: str, model: str, seconds: float) -> float:
    """Answers a second, `AT_ONCE` requests at a time, after a second of warming up."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
    answered: list[float] = []
    end = time.monotonic() + 1 + seconds

    async def ask(client: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            response = await client.post(f"{url}/v1/chat/completions", json=body)
            if response.status_code != httpx.codes.OK:
                raise RuntimeError(f"{url}: {response.status_code} {response.text[:300]}")
            answered.append(time.monotonic())

    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        await asyncio.gather(*(ask(client) for _ in range(AT_ONCE)))
    return sum(end - seconds <= moment < end for moment in answered) / seconds


def requests(folder: Path, rounds: int, seconds: float, litellm: str) -> tuple[float, float | None, float | None]:
    """(ours, LiteLLM's, ratio): medians of alternating rounds."""
    port = free_port()
    zero = f"http://127.0.0.1:{port}/v1"
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            _process([sys.executable, "-m", "benchmarks.gateway_zero", str(port)], folder, f"{zero}/models")
        )
        config = folder / "zero.toml"
        config.write_text(
            f'[grading]\ncode_model = "{ZERO}"\nfeedback_model = "{ZERO}"\n'
            f'[models.{ZERO}]\nengine = "openai"\ncontext = 8192\nslots = {AT_ONCE}\nweights.openai = "{zero}/{ZERO}"\n'
        )
        serving = ["--config", str(config), "serve", "--port", "0", "--state", str(folder / "alone")]
        gateway = RunningProcess(serving, environment(folder), folder)
        stack.callback(lambda: gateway.terminate() if gateway.alive else None)
        sides = [(_url(gateway), ZERO)]
        if litellm:
            sides.append((stack.enter_context(_litellm(litellm, folder, zero)), ZERO))
        rates = [[asyncio.run(_rate(url, model, seconds)) for url, model in sides] for _ in range(rounds)]
    ours = median(each[0] for each in rates)
    print(f"requests a second: {rates}", flush=True)
    if not litellm:
        return ours, None, None
    return ours, median(each[1] for each in rates), median(each[0] / each[1] for each in rates)


@contextlib.contextmanager
def _litellm(program: str, folder: Path, zero: str) -> Iterator[str]:
    port = free_port()
    config = folder / "litellm.yaml"
    params = {"model": f"openai/{ZERO}", "api_base": zero, "api_key": "x"}
    open_to_all = {"dangerously_permit_weak_or_unset_master_key": True}  # on loopback, as ours is without keys
    listed = [{"model_name": ZERO, "litellm_params": params}]
    config.write_text(json.dumps({"model_list": listed, "general_settings": open_to_all}))
    words = [program, "--config", str(config), "--port", str(port), "--host", "127.0.0.1", "--num_workers", "1"]
    with _process(words, folder, f"http://127.0.0.1:{port}/health/liveliness"):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _process(words: Sequence[str], folder: Path, ready: str) -> Iterator[None]:
    log = folder / f"{Path(words[0]).name}-{free_port()}.log"
    with log.open("wb") as written:
        process = subprocess.Popen(words, stdout=written, stderr=written, start_new_session=True)
    try:
        wait_until(lambda: _is_ready(ready) or process.poll() is not None, f"{ready} answers", 120)
        if process.poll() is not None:
            raise RuntimeError(f"{words[0]} ended with {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


# --- what durability costs


async def _latencies(url: str, model: str, at_once: int, count: int, max_tokens: int = INSTANT_TOKENS) -> list[float]:
    """Milliseconds of each of so many answers, so many at a time."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": max_tokens}
    found: list[float] = []

    async def ask(client: httpx.AsyncClient) -> None:
        for _ in range(max(1, count // at_once)):
            started = time.monotonic()
            response = await client.post(f"{url}/v1/chat/completions", json=body)
            if response.status_code != httpx.codes.OK:
                raise RuntimeError(f"{url}: {response.status_code} {response.text[:300]}")
            found.append(1000 * (time.monotonic() - started))

    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        await asyncio.gather(*(ask(client) for _ in range(at_once)))
    return found


def durable(
    pair: Any, folder: Path, rounds: int, count: int, litellm: str
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(p50, p99) in ms that the way over broker and store adds, 8 at a time: medians over the rounds.

    First with a server that takes no time, then with one that takes `PACED_TOKENS`.
    """
    port = free_port()
    zero = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "benchmarks.gateway_zero", str(port)]
        stack.enter_context(_process(command, folder, f"{zero}/v1/models"))
        entry = ModelEntry("openai", f"{zero}/v1/{ZERO}", 8192, slots=64)
        cluster = stack.enter_context(Cluster(folder / "cluster", pair.broker_url, pair.store_url, {ZERO: entry}))
        cluster.worker("prefill", ZERO)
        cluster.worker("decode", ZERO)
        sides = {"straight": zero, "durable": serve(cluster)[1]}
        serving = ["--config", str(cluster.config), "serve", "--port", "0", "--state", str(folder / "alone")]
        alone = RunningProcess(serving, environment(folder), folder)
        stack.callback(alone.kill)
        sides["in process"] = _url(alone)
        if litellm:
            sides["LiteLLM"] = stack.enter_context(_litellm(litellm, folder, f"{zero}/v1"))
        ways = [(1, INSTANT_TOKENS), (8, INSTANT_TOKENS), (64, INSTANT_TOKENS), (8, PACED_TOKENS)]
        added: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for at_once, tokens in ways * rounds:
            found = {name: asyncio.run(_latencies(url, ZERO, at_once, count, tokens)) for name, url in sides.items()}
            p50s, p99s = ({name: percentile(each, at) for name, each in found.items()} for at in (0.5, 0.99))
            pairs = ", ".join(f"{name} {p50s[name]:.1f} and {p99s[name]:.1f}" for name in sides)
            print(f"{at_once} at a time, {tokens} tokens, ms p50 and p99: {pairs}", flush=True)
            more = (p50s["durable"] - p50s["straight"], p99s["durable"] - p99s["straight"])
            added.setdefault((at_once, tokens), []).append(more)
    instant, paced = added[8, INSTANT_TOKENS], added[8, PACED_TOKENS]
    return (
        (median(p50 for p50, _ in instant), median(p99 for _, p99 in instant)),
        (median(p50 for p50, _ in paced), median(p99 for _, p99 in paced)),
    )


def turns(folder: Path, count: int, seed: int) -> tuple[float, float]:
    """(cold, warm): seconds through a gateway over those of llama.cpp's server, of short prompts."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        words = [sys.executable, "-m", "tests.support.llama_server_program", "--model", str(smollm2.weights())]
        words += ["--host", "127.0.0.1", "--port", str(port), "--ctx-size", "16384", "--parallel", "4"]
        words += ["--flash-attn", "on", "--no-webui", "--slot-save-path", f"{folder}/", "--cache-ram", "8192"]
        straight = f"http://127.0.0.1:{port}"
        stack.enter_context(_process(words, folder, f"{straight}/health"))
        config = folder / "smollm2.toml"
        config.write_text(
            f'[models."smollm2"]\nengine = "llamacpp"\ncontext = 4096\nweights.llamacpp = "{smollm2.weights()}"\n'
        )
        serving = ["--config", str(config), "serve", "--port", "0", "--state", str(folder / "state")]
        gateway = RunningProcess(serving, environment(folder), folder)
        stack.callback(gateway.kill)
        sides = (_url(gateway), straight)
        source = random.Random(seed)
        ratios = {}
        for name, size in (("long", 220), ("short", 5)):
            pairs = [[_two_turns(url, " ".join(_words(source, size))) for url in sides] for _ in range(count)]
            seconds = [[median(pair[side][turn] for pair in pairs) for side in range(2)] for turn in range(2)]
            ratios[name] = [ours / theirs for ours, theirs in seconds]
            print(f"{name} prompts, cold and warm: {ratios[name][0]:.2f} and {ratios[name][1]:.2f}", flush=True)
    return ratios["short"][0], ratios["short"][1]


def _words(source: random.Random, count: int) -> list[str]:
    return ["".join(source.choices("aeioulmnrst", k=6)) for _ in range(count)]


def _two_turns(url: str, question: str) -> tuple[float, float]:
    """Seconds of an answer, and of the next turn's."""
    messages = [{"role": "user", "content": question}]
    found = []
    for _ in range(2):
        body = {"model": "smollm2", "messages": messages, "max_tokens": 8, "temperature": 0}
        started = time.monotonic()
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
        found.append(time.monotonic() - started)
        said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "."}
        messages = [*messages, said, {"role": "user", "content": "And then?"}]
    return found[0], found[1]


# --- batches


def batches(pair: Any, folder: Path, rounds: int, lines: int, large: int) -> tuple[float, float, float]:
    """(lines a second of a batch, those of `kvasir run`, most memory in MB with the large one)."""
    with Cluster(folder, pair.broker_url, pair.store_url, {"instant": INSTANT}) as cluster:
        cluster.worker("prefill", "instant")
        cluster.worker("decode", "instant")
        gateway, url = serve(cluster)
        prompts = folder / "prompts.jsonl"
        prompts.write_bytes(_lines(lines, len(PROMPT)))
        by_gateway, by_run = [], []
        for number in range(rounds):
            by_gateway.append(lines / _batch(url, prompts))
            started = time.monotonic()
            done = cluster.run("run", str(prompts), "--out", str(folder / f"run-{number}"), "--quiet", timeout_s=300)
            if done.code:
                raise RuntimeError(done.stderr)
            by_run.append(lines / (time.monotonic() - started))
            print(f"lines a second: batch {by_gateway[-1]:.0f}, kvasir run {by_run[-1]:.0f}", flush=True)
        prompts.write_bytes(_lines(large, LINE_BYTES))
        _batch(url, prompts)
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{gateway.pid}/status").read_text())
    return median(by_gateway), median(by_run), int(peak[1]) / 1000 if peak else 0.0


def _lines(count: int, size: int) -> bytes:
    """So many requests whose prompts have so many characters."""
    made = []
    for number in range(count):
        prompt = f"{number} {PROMPT} ".ljust(size, "x")
        body = {"model": "instant", "max_tokens": 8, "messages": [{"role": "user", "content": prompt}]}
        made.append({"custom_id": f"n{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    return b"\n".join(json.dumps(line).encode() for line in made)


def _batch(url: str, prompts: Path) -> float:
    """Seconds from the upload to the answers."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=300) as client:
        started = time.monotonic()
        file = client.files.create(file=prompts, purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(0.1)
            batch = client.batches.retrieve(batch.id)
        seconds = time.monotonic() - started
    if batch.status != "completed" or (batch.request_counts and batch.request_counts.failed):
        raise RuntimeError(f"the batch is {batch.status}: {batch.request_counts} {batch.errors}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = harness.options(__doc__, arguments)
    print(harness.machine(), flush=True)
    litellm = "" if options.quick else os.environ.get(LITELLM, "")
    rounds = 1 if options.quick else ROUNDS
    with harness.pair() as pair, tempfile.TemporaryDirectory(prefix="kvasir-gateway-") as name:
        folder = Path(name)
        p50, p99 = first_tokens(pair, folder / "first", 10 if options.quick else STREAMS, rounds)
        (folder / "zero").mkdir()
        ours, theirs, ratio = requests(folder / "zero", rounds, 1.0 if options.quick else SECONDS, litellm)
        (folder / "durable").mkdir()
        (added_p50, added_p99), (paced_p50, paced_p99) = durable(
            pair, folder / "durable", rounds, 64 if options.quick else REQUESTS, litellm
        )
        (folder / "turns").mkdir()
        cold, warm = (None, None) if options.quick else turns(folder / "turns", TURNS, options.seed)
        sizes = (300, 1000) if options.quick else (LINES, LARGE_LINES)
        by_batch, by_run, peak = batches(pair, folder / "batch", rounds, *sizes)
    harness.finish(
        added_first_token_ms_p50=p50,
        added_first_token_ms_p99=p99,
        streams=STREAMS,
        requests_per_s=ours,
        litellm_requests_per_s=theirs,
        ratio=ratio,
        batch_lines_per_s=by_batch,
        run_lines_per_s=by_run,
        batch_ratio=by_batch / by_run,
        batch_peak_MB=peak,
        durable_added_ms_p50=added_p50,
        durable_added_ms_p99=added_p99,
        paced_added_ms_p50=paced_p50,
        paced_added_ms_p99=paced_p99,
        cold_ratio=cold,
        warm_ratio=warm,
    )


if __name__ == "__main__":
    main()
