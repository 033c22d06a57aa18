"""`kvasir top` over a real broker and store: one frame, or frames until Ctrl-C."""

import signal
from pathlib import Path

import pytest

from tests.support.processes import SIMULATED_MODEL, Cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system


def test_one_frame_and_then_frames_until_ctrl_c(
    tmp_path: Path, broker_url: str, store_url: str, model_name: str
) -> None:
    with Cluster(tmp_path / "cluster", broker_url, store_url, {model_name: SIMULATED_MODEL}) as cluster:
        workers = [cluster.launch(role, model_name) for role in ("prefill", "decode")]
        for worker in workers:
            worker.wait_until_registered()

        once = cluster.run("top", "--once")
        assert once.code == 0, once.stderr
        assert all(worker.registration.worker_id in once.stdout for worker in workers)

        live = cluster.start("top", "--every", "0.2")
        wait_until(lambda: model_name in live.text(), "a frame was drawn", 60)
        live.send(signal.SIGINT)
        assert live.wait() == 0
        assert "Traceback" not in live.text()
