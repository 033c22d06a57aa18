"""What operators see: metrics with labels and help, a worker's page, names of events and their facts, log lines."""

import contextlib
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from prometheus_client import CollectorRegistry

from gateway.figures import GatewayMetrics
from kvasir.worker.page import WorkerPage
from messages.errors import EngineUnavailable, StoreUnavailable
from messages.jobs import PrefillJob, Sampling
from messages.lifecycle import Event, Step
from monitoring import logs
from monitoring.energy import GpuCollector, PowerMeter
from tests.support.pipeline import Pipeline, always_fails, fails
from tests.support.waiting import wait_until
from tests.unit.messages.golden.make import MESSAGES

MODEL, OTHER = "tiny:1b", "other:1b"
FACTS: dict[str, Any] = {
    **{
        "batch_id": "batch-1",
        "stage": "decode",
        "run": 2,
        "lane": "now",
        "item_id": "item-1.code",
        "state": "succeeded",
    },
    **{"queue_s": 2.0, "waited_s": 1.5, "prefill_s": 0.5, "put_s": 0.25, "put_bytes": 4096, "computed_tokens": 300},
    **{"restored_tokens": 100, "end_there_s": 60.0, "saving_s": 30.0, "differs": True, "seconds": 0.75},
    **{"ttft_s": 3.0, "completion_tokens": 11, "decode_s": 4.0, "total_s": 8.0, "transferred_tokens": 399},
    **{"evaluated_tokens": 1, "prompt_tokens": 400, "get_s": 0.125, "get_bytes": 2048, "error": "EngineUnavailable"},
    **{"worker_id": "host.2.b", "kv_transfer": "verified", "text": "a prompt", "name": "Ada", "attempts": 3},
}


def recorded() -> dict[str, Any]:
    """All of it."""
    return {
        "metrics": metrics(),
        "steps": [step.value for step in Step],
        "facts of steps": facts(),
        "log lines": lines(),
    }


# --- metrics


def metrics() -> dict[str, Any]:
    """Each family as it is scraped, after one event of every step with known facts."""
    workers = {role: _worker(role) for role in ("prefill", "decode")}
    gateway = GatewayMetrics([MODEL])
    gateway.count_result(MESSAGES["result-succeeded"], 1.5)  # type: ignore[arg-type]
    gateway.requests.labels("400").inc()
    power = CollectorRegistry()
    with PowerMeter(power, "host", lambda: True, 140.0):
        pass
    with mock.patch.dict(sys.modules, {"pynvml": _one_gpu()}):
        power.register(GpuCollector("host"))
        gpus = _families(power)
    found = {f"{role} worker": _families(page.metrics.registry) for role, page in workers.items()}
    return found | {
        "gateway": _families(gateway.registry),
        "power": gpus,
        "pages": {role: {path: _page(page, path) for path in PATHS} for role, page in workers.items()},
    }


PATHS = ("/health", "/ready", "/status", "/other")


def _one_gpu() -> Any:
    """NVIDIA's library, on a machine with one GPU."""
    figures = {"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50)}
    figures["nvmlDeviceGetMemoryInfo"] = SimpleNamespace(used=3, total=4)
    calls: dict[str, Any] = {name: lambda _gpu, figure=figure: figure for name, figure in figures.items()}
    calls |= {"nvmlInit": lambda: None, "nvmlDeviceGetCount": lambda: 1, "nvmlDeviceGetHandleByIndex": lambda at: at}
    return SimpleNamespace(**calls)


def _worker(role: str) -> WorkerPage:
    page = WorkerPage(role, MODEL, [OTHER])  # type: ignore[arg-type]
    card = replace(MESSAGES["card-every-field"], role=role, model=MODEL, resident=(MODEL, OTHER))  # type: ignore[type-var]
    with Pipeline() as pipeline:
        page.mark_loaded(lambda: card, pipeline.broker, _Away())  # type: ignore[arg-type,return-value]
    for step in Step:
        page.metrics(Event(step, "job-1", MODEL, FACTS | {"stage": role}))
    page.metrics(Event(Step.REPLIED, "job-2", MODEL, {"stage": "x", "lane": "x", "state": "x"}))
    return page


class _Away:
    def now(self) -> float:
        raise StoreUnavailable("connection refused")


def _page(page: WorkerPage, path: str) -> dict[str, Any]:
    status, kind, body = page.page().answer(path)
    said = json.loads(body)
    return {"status": status, "type": kind, "body": said | {"uptime_s": 0.0} if "uptime_s" in said else said}


def _families(registry: CollectorRegistry) -> dict[str, Any]:
    return {family.name: _family(family) for family in registry.collect()}


def _family(family: Any) -> dict[str, Any]:
    """Of a histogram the edges of its buckets, how many and the sum; times of day not."""
    edges = list(dict.fromkeys(each.labels["le"] for each in family.samples if each.name.endswith("_bucket")))
    plain = [each for each in family.samples if not each.name.endswith(("_bucket", "_created"))]
    made = {"type": family.type, "help": family.documentation, "samples": sorted(map(_sample, plain))}
    return made | {"buckets": " ".join(edges)} if edges else made


def _sample(each: Any) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in each.labels.items())
    value = "<time>" if each.name.endswith("_timestamp_seconds") else f"{each.value:g}"
    return f"{each.name} {{{labels}}} {value}"


# --- events


def facts() -> dict[str, list[str]]:
    """What workers and clients tell of each step that can be had here at once: the names of its facts."""
    found: dict[str, set[str]] = {}
    for events in (_good(), _bad()):
        for event in events:
            found.setdefault(event.step.value, set()).update(event.facts)
    return {step: sorted(names) for step, names in sorted(found.items())}


def _good() -> list[Event]:
    """A job that is checked and streamed; one that is retried at decode; one past its deadline."""
    with Pipeline() as pipeline:
        pipeline.start_prefill()
        decode = pipeline.start_decode(kv_check_every=1)
        pipeline.run(pipeline.job())
        decode.engine.before_decode = fails(EngineUnavailable("gone"))
        late: PrefillJob = replace(pipeline.job("late"), deadline=1.0)
        pipeline.submit(pipeline.job("again"), late)
        wait_until(lambda: Step.EXPIRED in {each.step for each in pipeline.events}, "a job has expired")
        wait_until(lambda: Step.RETRIED in {each.step for each in pipeline.events}, "a job is retried")
        pipeline.result(pipeline.job("again"))
        pipeline.nothing_is_left()
        return pipeline.events


def _bad() -> list[Event]:
    """A job whose KV cache is gone, and one that an engine has a bug with."""
    with Pipeline() as pipeline:
        prefill, job = pipeline.start_prefill(), pipeline.job()
        pipeline.submit(job)
        wait_until(lambda: Step.PASSED_ON in pipeline.steps(job), "it is prefilled")
        pipeline.kv.delete(pipeline.refs(job))
        decode = pipeline.start_decode()
        pipeline.result(job)
        decode.engine.before_decode = always_fails(RuntimeError("a bug"))
        with _quiet():
            pipeline.run(pipeline.job("bug", sampling=Sampling(max_tokens=3)))
        assert prefill.thread.is_alive()
        pipeline.nothing_is_left()
        return pipeline.events


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


# --- log lines


def lines() -> dict[str, Any]:
    """In each style: a job's line, the beginnings of the other steps' lines, and a sentence."""
    return {style: _lines(style) for style in ("console", "json")}


def _lines(style: str) -> list[str]:
    names = ("", *logs.ROOMS)
    kept = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    switches = ("logThreads", "logProcesses", "logMultiprocessing", "_srcfile")
    before = {name: getattr(logging, name) for name in switches}
    root, handlers = logging.getLogger(), list(logging.getLogger().handlers)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        logs.configure("debug", style)  # type: ignore[arg-type]
        for step in Step:
            logs.log_event(Event(step, "job-1", MODEL, FACTS))
        logging.getLogger("monitoring.forms").warning("a sentence, of %d", 7)
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    for logger, level in kept:
        logger.setLevel(level)
    for name, value in before.items():
        setattr(logging, name, value)
    times = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00|^\d\d:\d\d:\d\d")
    whole, *others, sentence = [times.sub("<time>", line) for line in said.getvalue().splitlines()]
    return [whole, *(re.split(r' job=|, "job"', line)[0] for line in others), sentence]
