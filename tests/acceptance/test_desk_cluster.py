"""The desk over a cluster: what it sees of the workers, and a batch that nobody watches."""

import os
from pathlib import Path

import pytest

from desk.assignments import Inputs, grade_command, grading_work, resume_interrupted, save_inputs
from infra.config.settings import load_settings
from kvasir.desk_app.configuration import DeskBackend
from tests.support.desk_page import cut_off
from tests.support.homework import assert_each_once, journal, tiny_class
from tests.support.processes import PATIENCE_S, Cluster, ModelEntry
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

SLOW = ModelEntry("simulated", "sim:prefill=4000,decode=100,scale=1,answer=60", context=32768)


def test_a_batch_goes_on_while_desk_and_grading_are_gone_and_is_gathered_later(
    tmp_path: Path, broker_url: str, store_url: str, model_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tiny_class(tmp_path / "class", 6)
    folder = tmp_path / "home" / "means"
    folder.mkdir(parents=True)
    inputs = Inputs("Means", str(work / "submissions"), str(work / "rubric.yaml"))
    save_inputs(folder, inputs)
    with Cluster(tmp_path / "cluster", broker_url, store_url, {model_name: SLOW}) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(os.environ["PYTHONPATH"])
        desk = DeskBackend(load_settings(config=cluster.config), cluster.config, tmp_path / "home")
        prefill, decode = cluster.worker("prefill", model_name), cluster.worker("decode", model_name)

        grading_work(folder).start(grade_command(desk, inputs, folder))
        wait_until(lambda: journal(folder), "the first answer is there", PATIENCE_S)
        cut_off(folder)
        gathered = len(journal(folder))
        assert gathered < 12
        wait_until(lambda: decode.registration.done == 12, "the workers have done the rest by themselves", PATIENCE_S)
        seen = desk.fleet()
        resumed = resume_interrupted(desk)
        wait_until(lambda: len(journal(folder)) == 12, "the results are gathered", PATIENCE_S)

        assert resumed == [(folder, "")]
        assert {registration.worker_id for registration in seen.workers} == {
            prefill.registration.worker_id,
            decode.registration.worker_id,
        }
        assert seen.queue_depths is not None
        assert set(seen.queue_depths.values()) == {0}
        assert decode.registration.done == 12, "something was decoded twice"
        assert_each_once(folder)
        wait_until(lambda: not grading_work(folder).is_alive, "the grading has ended", PATIENCE_S)


def test_without_a_cluster_there_is_no_fleet(tmp_path: Path) -> None:
    desk = DeskBackend(load_settings(environ={}), None, tmp_path)

    assert (desk.is_cluster, desk.fleet().workers, desk.fleet().problem) == (False, (), "")
