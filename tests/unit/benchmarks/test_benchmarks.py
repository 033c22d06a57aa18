"""Every benchmark keeps its promise: `--quick` prints all its keys and leaves nothing behind."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import redis

import benchmarks
from benchmarks import harness, kvstore
from tests.support import services

ROOT = Path(benchmarks.__path__[0]).parent
GIVE_UP_S = 300  # on a quiet machine `--quick` takes 45 seconds at most; how fast it is, is no matter for a test
KEYS = {
    "kvstore": "put_MBps get_MBps raw_put_MBps raw_get_MBps put_ratio get_ratio redis_py_put_ratio redis_py_get_ratio"
    " json_put_ratio extra_put_MB extra_get_MB",
    "prefix": "computed_tokens ideal_tokens tokens_ratio stored_bytes ideal_bytes bytes_ratio seconds"
    " seconds_without_sharing",
    "questions": "prefill_ratio kv_bytes_ratio speedup rows",
    "overlap": "upload_seconds exposed_seconds hidden",
    "matrix": "pairs refused controls all_equal all_held all_caught",
    "decode": "rows",
    "fleet": "rows worst_ratio_to_ideal contending worst_ratio_to_lp",
    "overhead": "p50_ms p99_ms jobs_per_s dramatiq_jobs_per_s ratio submit_per_s in_process_jobs_per_s",
    "idle": "both_percent decode_percent prefill_percent broker_percent redis_percent",
    "plan": "rows worst_error",
    "desk": "interactions p95_ms p99_ms growth_mb keys_per_correction paint_ms_p95 next_ms_p95 out_of_view",
    "finish": "nights coverage median_width longest_wait_ratio longest_turn_ratio",
    "doors": "classes wrong_cells leaked_names dropped_files blank_members completed refused_wrongly",
    "faults": "seed rows total_lost",
    "attacks": "flagged false_flags by_language by_family shipped unseen_languages disguised",
    "gateway": "added_first_token_ms_p50 added_first_token_ms_p99 streams requests_per_s litellm_requests_per_s ratio"
    " batch_lines_per_s batch_peak_MB",
    "bound": "coverage released_share rows warned",
    "network": "rows makespan_ratio hidden",
    "evaluate": "qwk mae bias by_band ceiling floor coverage doubts",
    "groups": "decisions_share added_error wrong_spreads wrong_unread cuts planted",
    "names": "planted found found_share changed_other_share names_only_seconds",
    "path": "statements",
    "batch": "batch",
    "sketches": "pairs mutations all_agree all_refused",
    "scaling": "jobs decode_workers slots makespan_s ideal_s ratio_to_ideal jobs_per_s peak_MB grown_MB cpu_ms"
    " cpu_share",
    "hostile": "sockets unguarded bombs peak_MB worst_health_s neighbour_ratio ordinary_ratio served legitimate ended",
    "fuzz": "seed batch_total batch_succeeded restarts bugs",
}


def _names() -> list[str]:
    found = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)}
    return sorted(name for name in found - {"harness"} if "_" not in name)  # a part of one has an underscore


@pytest.mark.system
@pytest.mark.parametrize("name", _names())
def test_quick_ends_with_every_key(name: str, monkeypatch: pytest.MonkeyPatch, store_url: str) -> None:
    monkeypatch.setenv(services.STORE_VARIABLE, store_url)
    client = redis.Redis.from_url(store_url)
    before = set(client.scan_iter("kv*"))

    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--seed", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = harness.last_object(done.stdout)
    assert set(KEYS[name].split()) <= set(found)
    assert set(client.scan_iter("kv*")) <= before, "keys were left behind"
    client.close()


def test_every_benchmark_has_its_keys_here() -> None:
    assert set(KEYS) == set(_names())


def test_the_last_line_is_json_that_any_reader_takes(capsys: pytest.CaptureFixture[str]) -> None:
    click.echo("words first")

    harness.finish(a=1.23456789, b=[{"c": 98765.4321}], d=12345678, e=None)

    assert harness.last_object(capsys.readouterr().out) == {"a": 1.235, "b": [{"c": 98770.0}], "d": 12345678, "e": None}
    with pytest.raises(ValueError):
        harness.finish(hidden=float("nan"))


def test_a_run_in_which_raw_sockets_are_slow_is_void() -> None:
    assert _figures(raw=1.0, redis_py=3.4)["void"]
    assert not _figures(raw=1.0, redis_py=3.6)["void"]


def test_ratios_are_medians_of_what_was_measured_in_the_same_round() -> None:
    found = _figures(raw=1.0, redis_py=4.0, ours=[1.25, 2.0, 1.0])

    assert found["put_ratio"] == found["get_ratio"] == 0.8
    assert found["redis_py_get_ratio"] == 3.2
    assert found["put_MBps"] == 80.0


def _figures(raw: float, redis_py: float, ours: list[float] | None = None) -> dict[str, Any]:
    seconds = {"kvstore": ours or [1.0] * 3, "raw": [raw] * 3, "redis-py": [redis_py] * 3, "json": [20.0] * 3}
    times = {way: [{"put_s": s, "get_s": s, "first_get_s": s} for s in each] for way, each in seconds.items()}
    return kvstore.figures(times, 100_000_000)


def test_a_ways_own_arrays_are_no_extra_memory_and_what_it_copies_is() -> None:
    # In a process of its own, as a way is: here the system may take back what earlier tests left, and hide a copy.
    looks = "harness.peak_growth(lambda: b'x' * (64 << 20)), harness.peak_growth(lambda: None)"
    code = f"import json; from benchmarks import harness; print(json.dumps([{looks}]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    grown, still = json.loads(done.stdout)

    if grown is None or still is None:
        assert sys.platform != "linux"
    else:
        assert grown > 60 << 20
        assert still < 4 << 20
