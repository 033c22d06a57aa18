"""`kvasir forget` over RabbitMQ and Redis: no queue, no stored result and no block of the batch is left."""

import json
import re
from pathlib import Path

import pytest
import redis

from infra.broker import topology
from tests.support.homework import tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, Cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # processes, and a whole batch


def test_a_batch_that_nobody_gathered_is_gone_everywhere(tmp_path: Path, broker_url: str, store_url: str) -> None:
    model = f"forgotten-{tmp_path.name}"
    homework, out = tiny_class(tmp_path / "homework"), tmp_path / "out"
    store = redis.Redis.from_url(store_url)
    with Cluster(tmp_path, broker_url, store_url, {model: SIMULATED_MODEL}) as cluster:
        for role in ("prefill", "decode"):
            cluster.launch(role, model).wait_until_registered()
        cluster.run("submit", *tiny(homework, out))
        manifest = json.loads((out / "batch.json").read_text("utf-8"))
        jobs = {entry["job_id"] for entry in manifest["jobs"]}

        def traces() -> set[bytes]:
            return {
                key
                for key in store.scan_iter(count=1000)
                if jobs & set(re.split("[:{}]", key.decode("ascii", "replace")))
            }

        wait_until(lambda: sum(key.startswith(b"result:") for key in traces()) == 6, "six results are stored", 60)

        only_a_round, only_before = "1" * 32, "2" * 32  # jobs of a regrade, and of a rubric that was changed
        (out / "rounds" / "1").mkdir(parents=True)
        entry = manifest["jobs"][0] | {"job_id": only_a_round}
        (out / "rounds" / "1" / "batch.json").write_text(json.dumps(manifest | {"jobs": [entry]}), "utf-8")
        with (out / "submitted.jsonl").open("a") as submitted:
            submitted.write(json.dumps({"job_id": only_before, "run": 1}) + "\n")
        jobs |= {only_a_round, only_before}
        for job in (only_a_round, only_before):
            store.set(f"result:{{{job}:1}}", b"an answer", ex=600)
            store.set(f"kv:fingerprint:{job}:chain", b"a block", ex=600)

        done = cluster.run("forget", str(out), "--yes")

        assert done.code == 0, done.stderr
        assert "results that nobody had fetched: 6" in done.stdout
        assert not cluster.has_queue(topology.reply_queue(manifest["batch_id"]))
        assert traces() == set()
        assert not out.exists()
    store.close()
