"""What a worker's page says while it loads, works, and loses its services."""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.config.settings import load_settings
from kvasir.worker.page import PageOptions, WorkerPage, worker_page
from kvstore.memory import MemoryClusterState
from messages.errors import ConfigError, StoreUnavailable
from messages.workers import WorkerDetails, WorkerInfo
from monitoring.server import PageServer
from tests.support.pipeline import MODEL, Pipeline

CONFIG = """
[machines.here]
host = "{host}"
watts = 140
"""


class AwayClusterState(MemoryClusterState):
    """A store that can't be reached."""

    def now(self) -> float:
        raise StoreUnavailable("connection refused")


def answer(page: WorkerPage, path: str) -> tuple[int, dict[str, Any]]:
    status, _kind, body = page.page().answer(path)
    return status, json.loads(body)


def test_a_worker_that_loads_lives_and_is_not_ready() -> None:
    page = WorkerPage("decode", MODEL, [])
    assert answer(page, "/health") == (200, {"status": "loading", "model": MODEL, "loaded": False, "backend": ""})
    assert answer(page, "/ready") == (
        503,
        {"ready": False, "reasons": [f"{MODEL} is still being loaded, or its KV transfer is being tested"]},
    )
    assert answer(page, "/status")[1]["ready"] is False
    assert page.page().answer("/metrics")[0] == 200


def test_a_loaded_worker_is_ready_until_a_service_is_away() -> None:
    page = WorkerPage("decode", MODEL, ["another"])
    with Pipeline() as pipeline:
        worker = pipeline.start_decode().worker
        page.mark_loaded(worker.registration, pipeline.broker, pipeline.cluster_state)
        health = {"status": "ok", "model": MODEL, "loaded": True, "backend": "simulated on simulated"}
        assert answer(page, "/health") == (200, health)
        assert answer(page, "/ready") == (200, {"ready": True, "reasons": []})
        assert answer(page, "/status")[1]["worker_id"] == worker.worker_id

        page.mark_loaded(worker.registration, pipeline.broker, AwayClusterState())
        status, said = answer(page, "/ready")
    assert (status, said["reasons"]) == (503, ["the store can't be reached: connection refused"])
    assert answer(page, "/health")[0] == 200


def test_a_worker_that_paused_itself_is_not_ready_and_says_why() -> None:
    page = WorkerPage("decode", MODEL, [])
    details = WorkerDetails(paused_because="three KV caches did not come")
    registration = WorkerInfo("w", "decode", MODEL, "mlx", "metal", "", "", 8, 4, "mac2", 1, 0.0, details=details)
    with Pipeline() as pipeline:
        page.mark_loaded(lambda: registration, pipeline.broker, pipeline.cluster_state)
        status, said = answer(page, "/ready")
    assert (status, said["reasons"]) == (503, ["it paused itself: three KV caches did not come"])
    assert page.metrics.registry.get_sample_value("kvasir_paused", {"model": MODEL, "stage": "decode"}) == 1


def test_the_figures_of_a_loaded_worker_name_it_and_its_resident_models() -> None:
    page = WorkerPage("decode", MODEL, [])
    registration = WorkerInfo(
        "w", "decode", MODEL, "mlx", "metal", "", "", 8, 4, "mac2", 1, 0.0, busy=3,
        resident=(MODEL, "another"), resident_tokens_per_s=(1.0, 1.0), resident_answer_tokens=(1.0, 1.0),
    )  # fmt: skip
    with Pipeline() as pipeline:
        page.mark_loaded(lambda: registration, pipeline.broker, pipeline.cluster_state)
    figure = page.metrics.registry.get_sample_value
    labels = {"model": MODEL, "stage": "decode"}
    assert figure("kvasir_slots_busy", labels) == 3
    assert figure("kvasir_model_resident", labels | {"model": "another"}) == 1
    assert figure("kvasir_worker_info", labels | {"engine": "mlx", "device": "metal", "host": "mac2"}) == 1


def test_nothing_listens_unless_a_port_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_given: object) -> None:
        raise AssertionError("nobody asked for a server")

    monkeypatch.setattr(PageServer, "__init__", refuse)
    with worker_page(load_settings(environ={}), PageOptions(), "prefill", MODEL) as page:
        assert page.metrics.registry is not None


@pytest.mark.parametrize(("host", "source"), [("127.0.0.1", "declared"), ("192.0.2.1", "unknown")])
def test_watts_are_those_declared_for_this_machine(tmp_path: Path, host: str, source: str) -> None:
    config = tmp_path / "kvasir.toml"
    config.write_text(CONFIG.format(host=host))
    with worker_page(load_settings(config=config, environ={}), PageOptions(0), "prefill", MODEL) as page:
        text = httpx.get(f"{page.url}/metrics").text
    assert f'kvasir_power_watts{{host="{socket.gethostname()}",source="{source}"}}' in text


def test_a_port_in_use_ends_the_worker_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = PageOptions(taken.getsockname()[1])
        with (
            pytest.raises(ConfigError, match="choose another port"),
            worker_page(load_settings(environ={}), options, "prefill", MODEL),
        ):
            raise AssertionError("it started")
