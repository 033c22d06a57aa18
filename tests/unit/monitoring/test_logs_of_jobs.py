"""Whatever happens to a job, its log lines say which, where and how long, and never what was in it or whose it was."""

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from messages.errors import EngineUnavailable, KVTransferFailed
from messages.jobs import PrefillJob, Sampling
from messages.lifecycle import Event
from monitoring import logs
from monitoring.metrics import Metrics
from tests.support.pipeline import Pipeline, WatchedEngine, always_fails, fails

Read = Callable[[], str]

STUDENT = "Fairweather Ada"
PROMPT = f"# {STUDENT}\nThe churn rate is what leaves us, divided by what was there. " * 12
SECRETS = ("Fairweather", "churn", "leaves us")


class Watched(Pipeline):
    """Tells the logs and the metrics too, as a worker process does."""

    metrics = Metrics()

    def observe(self, event: Event) -> None:
        super().observe(event)
        logs.log_event(event)
        self.metrics(event)


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Read]:
    """Everything that any logger of ours writes, from DEBUG on, as JSON lines."""
    levels = {name: logging.getLogger(name).level for name in ("", *logs.ROOMS)}
    logs.configure("debug", "json")
    yield lambda: capsys.readouterr().err
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, logs._Stderr)]:
        root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def run(job_fields: dict[str, Any], decode: WatchedEngine) -> PrefillJob:
    with Watched() as pipeline:
        pipeline.start_prefill()
        pipeline.start_decode(decode)
        job = pipeline.job(own_text=PROMPT, **job_fields)
        pipeline.run(job)
    return job


def engine(effect: Any = None) -> WatchedEngine:
    made = WatchedEngine()
    if effect:
        made.before_decode = effect
    return made


def lines(written: Read, job: PrefillJob) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in written().splitlines()]
    return [line for line in read if line["logger"] == "monitoring.jobs" and line["job"] == job.job_id]


def test_each_step_is_a_line_with_job_batch_model_and_stage(written: Read) -> None:
    job = run({}, engine())
    told = lines(written, job)
    assert [line["event"] for line in told][:3] == ["submitted", "prefill_started", "kv_stored"]
    for line in told:
        assert (line["batch"], line["model"]) == (job.batch_id, job.model)
        assert line["stage"] in ("prefill", "decode")
    seconds = {line["event"]: [name for name in line if name.endswith("_s")] for line in told}
    for event in ("prefill_started", "kv_stored", "decode_started", "answered", "replied"):
        assert seconds[event], event


@pytest.mark.parametrize(
    ("event", "job_fields", "effect"),
    [
        ("replied", {}, None),
        ("failed", {"sampling": Sampling(max_tokens=100_000)}, None),  # more than the context
        ("retried", {}, fails(EngineUnavailable(f"while at {PROMPT[:40]}"))),
        ("kv_gone", {}, fails(KVTransferFailed("a block is missing"))),
        ("failed", {}, always_fails(ValueError(f"a bug at {PROMPT[:40]}"))),
    ],
)
def test_no_job_line_and_no_figure_holds_a_prompt_or_a_name(
    written: Read, event: str, job_fields: dict[str, Any], effect: Any
) -> None:
    job = run(job_fields, engine(effect))
    told = lines(written, job)
    assert event in [line["event"] for line in told]
    figures = [sample for family in Watched.metrics.registry.collect() for sample in family.samples]
    for secret in SECRETS:
        assert secret not in json.dumps(told)
        assert secret not in str(figures)


def test_no_line_of_any_logger_holds_a_prompt_or_a_name_when_all_goes_well(written: Read) -> None:
    run({}, engine())
    told = written()
    assert "passed_on" in told
    assert not [secret for secret in SECRETS if secret in told]
