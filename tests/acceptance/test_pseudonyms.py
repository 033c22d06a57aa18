"""No student's name leaves the producer's folder: not in a message, not in the store, not in a log."""

from contextlib import closing
from pathlib import Path

import pika
import pytest
import redis

from tests.support.homework import journal, tiny
from tests.support.processes import SIMULATED_MODEL, Cluster, RunningProcess
from tests.support.servers import RedisServer, plain_values
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # half a minute

RUBRIC = """\
title: Means
criteria:
  - {id: works, title: It runs, points: 3, model: code, guidance: One point for each function that works.}
  - {id: clear, title: It can be read, points: 2, model: feedback, guidance: Names and remarks count.}
"""
FILES = {
    "wolkensteinmira_501_9001_hw4.R": "# Mira Wolkenstein, homework 4\nmean(c(1, 2))\n",
    "duvalandre_LATE_502_9002_report.md": "# Report\n\nby André Duval, with help of Mira Wolkenstein\n",
    "broken_503_9003_kestrelodo.ipynb": "this is no notebook, says kestrelodo",
}
NAMES = (b"wolkenstein", b"mira", b"duval", b"andre", "andré".encode(), b"kestrel")


def _class(folder: Path) -> Path:
    """Three students; one of them handed in what can't be read."""
    (folder / "submissions").mkdir(parents=True)
    for name, text in FILES.items():
        (folder / "submissions" / name).write_text(text, "utf-8")
    (folder / "rubric.yaml").write_text(RUBRIC)
    return folder


def _names_in(data: bytes) -> list[bytes]:
    return [name for name in NAMES if name in data.lower()]


def _queued(url: str, queue: str) -> list[bytes]:
    """Every message of a queue with its properties, headers included; they stay there."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        found = []
        while (got := channel.basic_get(queue))[0]:
            found.append(got[2] + b" " + repr(got[1].__dict__).encode())
        return found


def _stored(url: str) -> list[bytes]:
    """Every key with its value."""
    with closing(redis.Redis.from_url(url)) as client:
        return list(plain_values(client))


def test_names_are_in_no_message_no_key_and_no_log(tmp_path: Path, broker_url: str, model_name: str) -> None:
    homework = _class(tmp_path / "homework")
    out = tmp_path / "wolkensteinmira"  # not even the folder's name may travel
    with (
        RedisServer() as store,
        Cluster(tmp_path / "cluster", broker_url, store.url, {model_name: SIMULATED_MODEL}) as cluster,
    ):
        # Given a class in the queues
        loud = ("--log-level", "debug")
        submitted = cluster.run(*loud, "submit", *tiny(homework, out))
        assert submitted.code == 0, submitted.stderr
        (queue,) = [name for name in cluster.queues() if name == f"prefill.{model_name}.bulk"]
        messages = wait_until(lambda: _queued(broker_url, queue), "the jobs are queued")
        assert len(messages) == 4
        assert not [_names_in(message) for message in messages if _names_in(message)]

        # When workers do it, and the owner fetches the results
        workers: list[RunningProcess] = [
            cluster.start(*loud, f"{role}-worker", "--model", model_name) for role in ("prefill", "decode")
        ]
        wait_until(lambda: cluster.run("status", "--json").json()["workers"], "a worker is up", 60)
        watched = cluster.run(*loud, "watch", str(out))
        assert len(journal(out)) == 5, watched.stderr

        # Then nothing in the store or the workers' logs names a student, and the producer's own folder does
        stored = _stored(store.url)
        assert stored
        assert not [_names_in(record) for record in stored if _names_in(record)]
        assert all(worker.text() for worker in workers)
        assert not [_names_in(worker.text().encode()) for worker in workers if _names_in(worker.text().encode())]
        assert not _names_in((out / "results.jsonl").read_bytes())
        assert "wolkensteinmira" in (out / "grades.csv").read_text("utf-8")
