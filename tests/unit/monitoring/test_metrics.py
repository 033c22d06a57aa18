"""Moments become figures in base units, under labels of few values, whatever a message says."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from infra.config.settings import load_settings
from kvasir.worker.page import PageOptions, worker_page
from messages.lifecycle import Event, Step
from monitoring.energy import PowerMeter, nvml_watts
from monitoring.metrics import MAX_MODELS, OTHER_LABEL, SECONDS, Metrics
from tests.support.waiting import wait_until

NOW = 1_000_000.0


def metrics() -> Metrics:
    return Metrics(clock=lambda: NOW)


def tell(sink: Metrics, step: Step, model: str = "m", **facts: Any) -> None:
    identity = {"batch_id": "b1", "item_id": "5f.code", "run": 1, "lane": "bulk"}
    sink(Event(step, "job-1", model, identity | facts))


def figure(sink: Metrics, name: str, **labels: str) -> float | None:
    return sink.registry.get_sample_value(f"kvasir_{name}", labels)


def test_a_job_s_way_becomes_waits_tokens_bytes_and_seconds() -> None:
    sink = metrics()
    tell(sink, Step.PREFILL_STARTED, stage="prefill", queue_s=3.0)
    tell(sink, Step.KV_STORED, prefill_s=2.0, put_s=0.5, put_bytes=4096, computed_tokens=300, restored_tokens=700)
    tell(sink, Step.DECODE_STARTED, stage="decode", queue_s=7.0, waited_s=1.5)
    tell(sink, Step.FIRST_TOKEN, stage="decode", ttft_s=7.5)
    tell(
        sink, Step.ANSWERED, stage="decode", completion_tokens=101, transferred_tokens=999, evaluated_tokens=1,
        get_s=0.25, get_bytes=8192, ttft_s=7.5, decode_s=2.6, total_s=9.5,
    )  # fmt: skip
    tell(sink, Step.REPLIED, stage="decode", state="succeeded", total_s=9.5)

    assert figure(sink, "queue_wait_seconds_sum", model="m", stage="prefill", lane="bulk") == 3.0
    assert figure(sink, "queue_wait_seconds_sum", model="m", stage="decode", lane="bulk") == 1.5
    assert figure(sink, "prefill_tokens_total", model="m", source="computed") == 300
    assert figure(sink, "prefill_tokens_total", model="m", source="stored") == 700
    assert figure(sink, "prefill_seconds_sum", model="m") == 2.0
    assert figure(sink, "kv_put_bytes_total", model="m") == 4096
    assert figure(sink, "kv_get_bytes_total", model="m") == 8192
    assert figure(sink, "decode_prompt_tokens_total", model="m", source="transferred") == 999
    assert figure(sink, "kv_transfers_total", model="m", outcome="verified") == 1
    assert figure(sink, "ttft_seconds_sum", model="m", lane="bulk") == 7.5
    assert figure(sink, "tpot_seconds_sum", model="m") == pytest.approx(0.02)
    assert figure(sink, "decode_tokens_total", model="m") == 101
    assert figure(sink, "jobs_total", model="m", stage="decode", state="succeeded") == 1
    assert figure(sink, "answers_total", model="m", question="code") == 1


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (Step.RETRIED, "retries_total"),
        (Step.REDELIVERED, "redeliveries_total"),
        (Step.ISOLATED, "suspects_total"),
        (Step.FAILED, "dead_letters_total"),
    ],
)
def test_what_goes_wrong_is_counted_by_model_and_stage(step: Step, name: str) -> None:
    sink = metrics()
    sink.prepare("m", "decode")
    assert figure(sink, name, model="m", stage="decode") == 0
    tell(sink, step, stage="decode", state="failed", error="Poison")
    assert figure(sink, name, model="m", stage="decode") == 1


def test_a_job_that_goes_back_to_prefill_and_one_without_a_kv_transfer_are_counted() -> None:
    sink = metrics()
    tell(sink, Step.KV_GONE, stage="decode")
    tell(sink, Step.ANSWERED, stage="decode", completion_tokens=1, evaluated_tokens=500)
    assert figure(sink, "reprefills_total", model="m") == 1
    assert figure(sink, "kv_transfers_total", model="m", outcome="none") == 1
    assert figure(sink, "kv_get_seconds_count", model="m") is None


def test_a_steal_is_counted_under_its_reason_with_the_seconds_it_saves() -> None:
    sink = metrics()
    tell(sink, Step.STOLEN, stage="decode", saving_s=12.0, end_there_s=60.0)
    tell(sink, Step.STOLEN, stage="decode", saving_s=3600.0, end_there_s=1e9)  # nobody is at home
    assert figure(sink, "steals_total", model="m", reason="home_busy") == 1
    assert figure(sink, "steals_total", model="m", reason="unserved") == 1
    assert figure(sink, "steal_saved_seconds_total", model="m") == 12.0


def test_what_was_taken_last_bounds_the_age_of_what_waits_and_never_goes_back() -> None:
    sink = metrics()
    tell(sink, Step.PREFILL_STARTED, stage="prefill", queue_s=10.0)
    tell(sink, Step.PREFILL_STARTED, stage="prefill", queue_s=500.0)  # one that came back from a retry level
    taken = figure(sink, "taken_submitted_timestamp_seconds", model="m", stage="prefill", lane="bulk")
    assert taken == NOW - 10.0


def test_no_label_holds_an_id_or_anybody_s_words() -> None:
    sink = metrics()
    for step in Step:
        facts = {"stage": "from Ada's homework", "state": "x", "error": "Ada", "why": "Ada", "queue_s": "Ada"}
        tell(sink, step, **facts)
    samples = [sample for family in sink.registry.collect() for sample in family.samples]
    values = {value for sample in samples for name, value in sample.labels.items() if name != "le"}
    assert values <= {"m", OTHER_LABEL, "bulk", "prefill", "decode", "computed", "stored", "transferred"} | {
        "evaluated", "verified", "none", "code", "home_busy", "unserved", "agrees",
    }  # fmt: skip


def test_any_number_of_models_makes_a_bounded_number_of_series() -> None:
    sink = metrics()
    for number in range(3 * MAX_MODELS):
        tell(sink, Step.RETRIED, model=f"made-up-{number}", stage="prefill")
    assert figure(sink, "retries_total", model=OTHER_LABEL, stage="prefill") == 2 * MAX_MODELS
    samples = [s for family in sink.registry.collect() for s in family.samples if s.name == "kvasir_retries_total"]
    assert len(samples) == MAX_MODELS + 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "many", None])
def test_a_fact_that_is_no_sane_number_counts_as_nothing(value: object) -> None:
    sink = metrics()
    tell(sink, Step.KV_STORED, prefill_s=value, put_bytes=value)
    assert figure(sink, "kv_put_bytes_total", model="m") == 0


def test_names_follow_prometheus_and_every_figure_has_a_description() -> None:
    sink = metrics()
    for family in sink.registry.collect():
        assert re.fullmatch(r"kvasir_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|kb|mb|percent|minutes)$", family.name)


def test_buckets_suit_a_tenth_of_a_second_and_an_hour() -> None:
    assert SECONDS[0] == 0.01
    assert SECONDS[-1] == 3600
    assert list(SECONDS) == sorted(SECONDS)


def test_energy_is_watts_times_seconds_while_a_job_is_in_hand() -> None:
    sink = metrics()
    with PowerMeter(sink.registry, "mac1", is_busy=lambda: True, declared_watts=100.0):
        wait_until(lambda: figure(sink, "energy_joules_total", host="mac1", source="declared"), "a sample was taken")
    assert figure(sink, "power_watts", host="mac1", source="declared") == 100.0


def test_the_text_that_prometheus_reads_is_the_text_that_is_served() -> None:
    from prometheus_client import generate_latest

    sink = metrics()
    sink.prepare("qwen3-coder:30b", "prefill")
    names = {family.name for family in text_string_to_metric_families(generate_latest(sink.registry).decode())}
    assert "kvasir_queue_wait_seconds" in names


def test_milliwatts_of_all_gpus_become_watts(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetPowerUsage=lambda device: (120_500, 80_000)[device],
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    read = nvml_watts()
    assert read is not None
    assert read() == 200.5


def test_a_gpu_that_does_not_tell_counts_as_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 0))
    assert nvml_watts() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert nvml_watts() is None


def _gpu_figures(text: str) -> dict[str, float]:
    return {
        f"{sample.name} {sample.labels['gpu']}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("kvasir_gpu")
    }


def _page(options: PageOptions) -> str:
    """What /metrics of a worker's page says, as its process makes it."""
    with worker_page(load_settings(environ={}), options, "decode", "m") as page:
        return httpx.get(f"{page.url}/metrics").text


def test_a_gpus_use_and_memory_are_on_the_page_as_far_as_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(device: int) -> SimpleNamespace:
        if device:
            raise RuntimeError("Not Supported")  # a GPU in the machine's own memory
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=(87, 0)[device]),
        nvmlDeviceGetMemoryInfo=memory,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert _gpu_figures(_page(PageOptions(0))) == {
        "kvasir_gpu_busy_ratio 0": 0.87,
        "kvasir_gpu_busy_ratio 1": 0.0,
        "kvasir_gpu_memory_used_bytes 0": float(3 << 30),
        "kvasir_gpu_memory_total_bytes 0": float(80 << 30),
    }


def test_without_nvml_a_page_has_no_gpu_and_the_log_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    if nvml_watts():
        pytest.skip("this machine has an NVIDIA GPU")
    caplog.set_level("INFO")
    text = _page(PageOptions(0))
    assert "kvasir_power_watts" in text
    assert _gpu_figures(text) == {}
    assert not [record for record in caplog.records if "NVML" in record.message]
