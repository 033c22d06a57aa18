"""`kvasir grade` as a person meets it when something is wrong: one sentence, the right exit code, no traceback."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.homework import RUBRIC, journal, tiny, tiny_class
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


def test_a_missing_folder(home: Path, homework: Path) -> None:
    (homework / "submissions").rename(homework / "elsewhere")

    _assert_one_sentence(_grade(home, homework), 2, "submissions: there is no such file or folder")


def test_an_empty_folder(home: Path, homework: Path) -> None:
    for path in (homework / "submissions").iterdir():
        path.unlink()

    _assert_one_sentence(_grade(home, homework), 2, "holds no submission that can be read")


def test_no_model_named(home: Path, homework: Path) -> None:
    (home / "kvasir.toml").unlink()

    _assert_one_sentence(_grade(home, homework), 2, "no model is named", "--code-model")


def test_a_typo_in_a_key_of_the_rubric(home: Path, homework: Path) -> None:
    (homework / "rubric.yaml").write_text(RUBRIC.replace("title: Means", "titel: Means"), "utf-8")

    _assert_one_sentence(_grade(home, homework), 2, "titel", "title")


def test_negative_points(home: Path, homework: Path) -> None:
    (homework / "rubric.yaml").write_text(RUBRIC.replace("points: 3", "points: -3"), "utf-8")

    _assert_one_sentence(_grade(home, homework), 2, "works", "-3")


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
    assert f"nobody serves {unserved.models[0]}: 6 jobs wait" in done.stderr
    assert f"6 jobs are still open; go on with: kvasir --config {unserved.config} watch {out}\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert journal(out) == []

    # And with workers it does
    for role in ("prefill", "decode"):
        unserved.worker(role, unserved.models[0])
    again = unserved.run("grade", *tiny(homework, out))
    assert again.code == 0, again.stderr
    assert len((out / "submitted.jsonl").read_text("utf-8").splitlines()) == 6


def test_a_model_that_is_not_configured(unserved: Cluster, homework: Path, tmp_path: Path) -> None:
    done = unserved.run("grade", *tiny(homework, tmp_path / "out", "--code-model", "typo:1b"))

    _assert_one_sentence(done, 2, "'typo:1b' is not configured", unserved.models[0])


def test_a_worker_with_other_weights_refuses_to_join(unserved: Cluster) -> None:
    unserved.worker("prefill", unserved.models[0])

    joining = unserved.launch("decode", unserved.models[0], "--weights", "sim:scale=0,seed=2")

    assert joining.wait() == 2
    assert "with other weights" in joining.text()
    assert "Traceback" not in joining.text()
