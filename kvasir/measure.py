"""`kvasir measure`: measures this machine's speed with its models, as curves for kvasir.toml.

Decode is measured with several sequences at once, each with a prompt of CONTEXT_TOKENS; prefill with one prompt at a
time. Prompts are random words, so that nothing computed earlier can be reused.
"""

import json
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import date
from importlib.metadata import packages_distributions, version
from pathlib import Path

import click

from engines.base import EngineInfo
from engines.registry import Engine, entries, open_engine
from infra.config.sources import user_data_dir
from kvasir.connect import engine_options, require_cluster
from kvasir.doctor.cluster import measured_links
from kvasir.doctor.services import link_text
from kvasir.options import Globals, Number
from kvasir.terminal import say
from messages.errors import KvasirError, UsageError
from messages.jobs import Sampling, user_prompt
from messages.kv import KVCache, Record, assemble_cache
from messages.workers import MAX_LINKS, Link

CONTEXT_TOKENS = 2048
ANSWER_TOKENS = 128
ROUNDS = 3  # the result is the median of the rounds; if time is short, one round is enough
FILE_NAME = "rates.json"  # in the user's data folder; holds the last measurement of each model and link

Points = list[tuple[int, float]]


@click.command()
@click.option("--model", "names", multiple=True, help="Measure this model; can be repeated [default: all].")
@click.option("--engine", default="", help="Use this engine [default: the engine set for the model].")
@click.option(
    "--slots",
    type=click.IntRange(1, 1024),
    default=16,
    show_default=True,
    help="Measure up to this many sequences at once.",
)
@click.option(
    "--machine",
    default="",
    help="Use this machine name in the lines that are printed for kvasir.toml [default: the host name].",
)
@click.option(
    "--minutes", type=Number(0), default=5.0, show_default=True, help="Limit the total time for all models, in minutes."
)
@click.option(
    "--links", "only_links", is_flag=True, help="Measure the links to the broker and the store instead of models."
)
@click.pass_obj
def measure(
    global_options: Globals,
    /,
    names: tuple[str, ...],
    engine: str,
    slots: int,
    machine: str,
    minutes: float,
    only_links: bool,
) -> int:
    """Measure a model's tokens a second on this machine, and print them as a block for kvasir.toml.

    Decode is measured by the number of sequences, prefill by the prompt's length. Stop this machine's workers first.

    With --links, measure how far away the broker and the store are, whether large messages pass, and how fast KV caches
    travel. Workers that start afterwards register the figures, and kvasir doctor says how long a class takes at that
    rate.
    """
    settings = global_options.settings()
    if only_links:
        require_cluster(settings, "measure --links")
        # If both services run on one machine, the store's figures replace the broker's.
        links = {link.peer: link for link in measured_links(settings)}
        say("\n".join(map(link_text, links.values())))
        keep(_file(), "links", {peer: asdict(link) for peer, link in links.items()})
        return 0
    models = [settings.model(name) for name in names or settings.models]
    if not models:
        raise UsageError("no model is configured: add [models.NAME] with weights to kvasir.toml")
    rates = {}
    for model in models:
        name, weights = model.weights_for(engine)
        with closing(open_engine(name, engine_options(model, name, weights, model.context, slots))) as loaded:
            ends_at = time.monotonic() + 60 * minutes / len(models)
            prefill, decode = prefill_points(loaded, ends_at), decode_points(loaded, slots, ends_at)
        rates[model.name] = {
            "measured": date.today().isoformat(),
            "build": _build(loaded.info),
            "prefill_curve": prefill,
            "decode_curve": decode,
        }
        say(
            f"# Measured on {date.today().isoformat()} with {_build(loaded.info)}\n"
            f'[machines.{machine or socket.gethostname()}.rates."{model.name}"]\n'
            f"prefill_curve = {json.dumps(prefill)}\n"
            f"decode_curve = {json.dumps(decode)}"
        )
    keep(_file(), "models", rates)
    return 0


def prefill_points(engine: Engine, ends_at: float) -> Points:
    """Return tokens per second for prompts of several lengths.

    After `ends_at` (monotonic time), each length gets only one round.
    """
    lengths = [length for length in (512, 2048, 8192, 32_768) if length < engine.info.context]
    return _medians(lengths or [engine.info.context // 2], lambda length: _prefill(engine, length)[2], ends_at)


def decode_points(engine: Engine, slots: int, ends_at: float) -> Points:
    """Return tokens per second of 1, 2, 4, … sequences together, up to all slots. `ends_at`: see `prefill_points`."""
    counts = sorted({*(1 << power for power in range(slots.bit_length())), slots})
    length = min(CONTEXT_TOKENS, engine.info.context // 2)
    prompts = [_prefill(engine, length)[:2] for _ in range(slots)]
    return _medians(counts, lambda count: _decode(engine, prompts[:count]), ends_at)


def kept_links() -> tuple[Link, ...]:
    """Return the last measurement of this machine's links; () if there is none or it can't be read."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, KvasirError):
        return tuple(Link(**link) for link in json.loads(_file().read_text("utf-8"))["links"].values())[-MAX_LINKS:]
    return ()


def _file() -> Path:
    return (user_data_dir(os.environ) or Path()) / FILE_NAME


def keep(path: Path, key: str, measured: Mapping[str, object]) -> None:
    """Write the measurements under `key`. Earlier measurements are kept. Raises UsageError."""
    try:
        earlier = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"version": 1, **earlier, key: earlier.get(key, {}) | dict(measured)}, indent=2) + "\n", "utf-8"
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"can't save the measurements in {path}: {error}") from None


def _medians(sizes: Sequence[int], measure_once: Callable[[int], float], ends_at: float) -> Points:
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(ROUNDS):
        for size in sizes:
            if number == 0 or time.monotonic() < ends_at:
                rates[size].append(measure_once(size))
    return [(size, round(statistics.median(values), 1)) for size, values in rates.items()]


def _prefill(engine: Engine, length: int) -> tuple[tuple[int, ...], KVCache | None, float]:
    """Return a prompt's tokens, its KV cache and the tokens per second.

    The KV cache lacks the last token. It is None if the engine exports none.
    """
    words = " ".join(random.choices(("river", "ferry", "market", "garden", "school", "harbour"), k=2 * length))
    tokens = engine.tokenize(user_prompt("", f"{random.random()} {words}"), time.time()).ids[:length]
    records: list[Record] = []
    start = time.monotonic()
    report = engine.prefill(tokens[:-1], records.append)
    rate = report.computed_tokens / (report.prefill_s or time.monotonic() - start)
    layout = engine.info.layout
    return tokens, assemble_cache(layout, records) if layout and records else None, rate


def _decode(engine: Engine, prompts: Sequence[tuple[tuple[int, ...], KVCache | None]]) -> float:
    """Decode all prompts at once.

    Each counts only after its first token, so that importing the cache is not measured.
    """
    with ThreadPoolExecutor(len(prompts)) as pool:
        sampling = Sampling(max_tokens=ANSWER_TOKENS, seed=1)
        answers = list(pool.map(lambda prompt: engine.decode(prompt[0], prompt[1], sampling), prompts))
    return sum(
        (answer.completion_tokens - 1) / (answer.seconds - answer.first_token_s)
        for answer in answers
        if answer.completion_tokens > 1 and answer.seconds > answer.first_token_s
    )


def _build(info: EngineInfo) -> str:
    """Return the engine, the installed versions of its packages, and the device."""
    names = packages_distributions()
    packages = [names[module][0] for module in entries()[info.engine].packages if module in names]
    return f"{', '.join([info.engine, *(f'{name} {version(name)}' for name in packages)])} on {info.device}"
