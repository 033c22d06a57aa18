"""Services and workers that are missing, or do not fit: one sentence, the right exit code, no traceback."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.homework import journal, tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, Cluster, CompletedCommand, config_text, environment, run
from tests.support.servers import HOST, free_port

MODEL = "tiny:1b"


@pytest.fixture
def homework(tmp_path: Path) -> Path:
    """Three submissions, six jobs."""
    return tiny_class(tmp_path / "homework")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A working folder with a kvasir.toml."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "kvasir.toml").write_text(config_text({MODEL: SIMULATED_MODEL}), "utf-8")
    return folder


def _grade(home: Path, homework: Path, *more: str, **variables: str) -> CompletedCommand:
    arguments = tiny(homework, home / "out", *more)
    return run("grade", *arguments, env=environment(home) | variables, cwd=home)


def _assert_one_sentence(done: CompletedCommand, code: int, *expected: str) -> None:
    assert done.code == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("kvasir: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for words in expected:
        assert words in done.stderr


@pytest.mark.system  # ten seconds
def test_a_broker_that_is_down(home: Path, homework: Path, store_url: str) -> None:
    port = free_port()
    started = time.monotonic()

    done = _grade(home, homework, KVASIR_BROKER_URL=f"amqp://user:hush@{HOST}:{port}", KVASIR_STORE_URL=store_url)

    _assert_one_sentence(done, 3, f"{HOST}:{port}")
    assert "hush" not in done.stderr
    assert time.monotonic() - started < 60  # 10 s of trying, and a machine that has other things to do


def test_a_store_that_is_down(home: Path, homework: Path, broker_url: str) -> None:
    port = free_port()

    done = _grade(home, homework, KVASIR_BROKER_URL=broker_url, KVASIR_STORE_URL=f"redis://{HOST}:{port}")

    _assert_one_sentence(done, 3, f"{HOST}:{port}")


@pytest.fixture
def unserved(tmp_path: Path, broker_url: str, store_url: str, model_name: str) -> Iterator[Cluster]:
    """A cluster with a model and no worker."""
    with Cluster(tmp_path / "cluster", broker_url, store_url, {model_name: SIMULATED_MODEL}) as cluster:
        yield cluster


@pytest.mark.system  # ten seconds
def test_a_model_nobody_serves_is_waited_for_as_long_as_wanted(
    unserved: Cluster, homework: Path, tmp_path: Path
) -> None:
    # Given nobody who serves the model
    out = tmp_path / "out"

    # When the class is graded with little patience
    done = unserved.run("grade", *tiny(homework, out, "--max-wait", "2"))

    # Then a sentence says so, and that it can go on
    assert done.code == 1, done.stderr
    assert f"no decode worker serves {unserved.models[0]}: 6 jobs wait" in done.stderr
    assert f"6 jobs are still open; go on with: kvasir --config {unserved.config} watch {out}\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert journal(out) == []

    # And with workers it does
    for role in ("prefill", "decode"):
        unserved.worker(role, unserved.models[0])
    again = unserved.run("grade", *tiny(homework, out))
    assert again.code == 0, again.stderr
    assert len((out / "submitted.jsonl").read_text("utf-8").splitlines()) == 6
