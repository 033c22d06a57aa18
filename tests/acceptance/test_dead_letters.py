"""`kvasir dead` over a real broker: jobs that could not succeed are looked at, run again or dropped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.homework import journal, tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, Cluster

pytestmark = pytest.mark.system  # half a minute


@pytest.fixture
def homework(tmp_path: Path) -> Path:
    """Three submissions, six jobs."""
    return tiny_class(tmp_path / "homework")


@pytest.fixture
def cluster(tmp_path: Path, broker_url: str, store_url: str, model_name: str) -> Iterator[Cluster]:
    """Two models; prompts are planned for a long context, and nobody serves yet."""
    models = {model_name: SIMULATED_MODEL, f"other-{model_name}": SIMULATED_MODEL}
    with Cluster(tmp_path / "cluster", broker_url, store_url, models) as cluster:
        yield cluster
        for model in cluster.models:
            cluster.run("dead", "drop", "--yes", "--model", model)


def _fail_everything(cluster: Cluster, homework: Path, out: Path) -> None:
    """A grading whose every job is dead-lettered: its workers hold a model with too short a context."""
    workers = [
        cluster.launch(role, model, "--context", "64") for model in cluster.models for role in ("prefill", "decode")
    ]
    for worker in workers:
        worker.wait_until_registered()
    done = cluster.run("grade", *tiny(homework, out, "--feedback-model", cluster.models[1]))
    assert done.code == 1, done.stderr
    assert [row["state"] for row in journal(out)] == ["failed"] * 6
    for worker in workers:
        worker.terminate()


def _serve(cluster: Cluster, model: str) -> None:
    for role in ("prefill", "decode"):
        cluster.worker(role, model)


def test_dead_letters_are_replayed_by_filter_and_their_owner_takes_the_results(
    cluster: Cluster, homework: Path, tmp_path: Path
) -> None:
    # Given a complete batch of which every job is a dead letter, three of each model
    out = tmp_path / "out"
    _fail_everything(cluster, homework, out)
    mine = ("--batch", str(out), "--json")
    listed = cluster.run("dead", "list", *mine)
    assert len(listed.json()) == 6, listed.stderr
    assert {letter["error"] for letter in listed.json()} == {"ContextExceeded"}

    # When those of one model are replayed, by the batch's id, to a worker with a longer context
    _serve(cluster, cluster.models[0])
    batch_id = listed.json()[0]["batch"]
    asked = ("dead", "replay", "--batch", batch_id, "--model", cluster.models[0], "--json")
    replayed = cluster.run(*asked)
    again = cluster.run(*asked)

    # Then each is one new run, the others lie where they lay, and watching takes the results
    assert [run for _, run in replayed.json()["replayed"]] == [2, 2, 2], replayed.stderr
    assert again.json() == {"replayed": [], "left": []}
    assert {letter["model"] for letter in cluster.run("dead", "list", *mine).json()} == {cluster.models[1]}
    _watch_until(cluster, out, succeeded=3)

    # And with the batch's folder the batch waits for the rest by itself
    _serve(cluster, cluster.models[1])
    rest = cluster.run("dead", "replay", "--batch", str(out), "--json")
    watched = cluster.run("watch", str(out), "--json")
    assert len(rest.json()["replayed"]) == 3, rest.stderr
    assert watched.json()["jobs"]["succeeded"] == 6, watched.stderr
    assert cluster.run("dead", "list", *mine).json() == []
    lines = [(row["job_id"], row["run"]) for row in journal(out)]
    assert len(lines) == len(set(lines)) == 12


def _watch_until(cluster: Cluster, out: Path, succeeded: int) -> None:
    """Nobody waits for what was replayed by the batch's id: look until it is there."""
    for _ in range(20):
        watched = cluster.run("watch", str(out), "--json")
        if watched.json()["jobs"]["succeeded"] == succeeded:
            return
    raise AssertionError(f"not all results of the replay arrived: {watched.stdout} {watched.stderr}")


def test_dropping_asks_first_and_takes_only_what_was_named(cluster: Cluster, homework: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _fail_everything(cluster, homework, out)
    mine = ("--batch", str(out))

    unnamed = cluster.run("dead", "drop")
    unconfirmed = cluster.run("dead", "drop", *mine, "--model", cluster.models[0])
    shown = cluster.run("dead", "show", *mine, "--json")
    dropped = cluster.run("dead", "drop", *mine, "--model", cluster.models[0], "--yes", "--json")
    table = cluster.run("dead", "list", *mine)

    assert (unnamed.code, unconfirmed.code) == (2, 1)
    assert "or pass --all" in unnamed.stderr
    assert len(shown.json()) == 6
    assert {letter["error"] for letter in shown.json()} == {"ContextExceeded"}
    assert all([part["scope"] for part in letter["prompt"]] == ["class", "own"] for letter in shown.json())
    assert dropped.json() == {"dropped": 3, "left": 0}
    assert "3 dead letters: 3 ContextExceeded" in table.stdout
    assert cluster.models[1] in table.stdout
