"""A batch of the gateway whose process is killed at every step, over a real RabbitMQ and Redis.

One batch for each place: the gateway dies there, is started again, and dies twice more while answers come; the client
repeats what got no answer, with the same Idempotency-Key.
"""

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import openai

from infra.broker import failpoints
from tests.support.processes import Cluster, ModelEntry, RunningProcess
from tests.support.waiting import wait_until

T = TypeVar("T")
# A job of 20 tokens at 400 a second: 50 ms, so that there is somebody to kill.
QUICK = ModelEntry("simulated", "sim:scale=1,prefill=100000,decode=400,answer=20,spread=1", context=8192)
# Each place, and how often it must be passed: the first file is the client's, and the second status is `finalizing`.
PLACES = [f"{place}:1" for place in failpoints.GATEWAY] + ["gateway.described:2", "gateway.advanced:2"]
PATIENCE_S = 120.0


@dataclass
class Row:
    """What came of one batch. All but `lines`, `kills` and `place` are to be 0."""

    place: str
    lines: int
    kills: int = 0
    lost: int = 0  # lines without an answer
    duplicates: int = 0  # lines with more than one
    wrong_counts: int = 0  # looks at which counts didn't add up
    batches: int = 0  # others than the one that was asked for
    changed_ids: int = 0


class Killed:
    """A gateway that somebody kills, and its client."""

    def __init__(self, cluster: Cluster, folder: Path, place: str, source: random.Random) -> None:
        self._cluster, self._state, self._source = cluster, folder, source
        self._gateway = self._serve(f"kill:{place}")
        self.kills = 0

    def call(self, ask: Callable[[openai.OpenAI], T]) -> T:
        """What the client gets, as often as the gateway dies over it."""
        while True:
            try:
                with openai.OpenAI(base_url=f"{self._url}/v1", api_key="x", max_retries=0, timeout=30) as client:
                    return ask(client)
            except openai.APIConnectionError:
                wait_until(lambda: not self._gateway.alive, "the gateway is dead", 30)
                self._again()

    def kill(self) -> None:
        """Now."""
        self._gateway.kill()
        self._again()

    def close(self) -> None:
        """End it."""
        if self._gateway.alive:
            self._gateway.terminate()

    def _again(self) -> None:
        self.kills += 1
        self._gateway = self._serve("")

    def _serve(self, wanted: str) -> RunningProcess:
        environment = {failpoints.VARIABLE: wanted} if wanted else {}
        running = self._cluster.start("serve", "--port", "0", "--state", str(self._state), **environment)
        wait_until(lambda: "answers at" in running.text() or not running.alive, "the gateway serves", 60)
        found = re.search(r"answers at (\S+) ", running.text())
        assert found, running.text()
        self._url = found[1]
        return running


def kill_at(
    cluster: Cluster, folder: Path, place: str, lines: int, seed: int, others: Sequence[Callable[[], None]] = ()
) -> Row:
    """One batch, from its file to its answers. `others` kill somebody else, each twice, in an order by the seed."""
    (model,), source, row = cluster.models, random.Random(f"{seed} {place}"), Row(place, lines)
    names = [f"line {number}" for number in range(lines)]
    body = "\n".join(json.dumps(line(name, model)) for name in names).encode()
    killed = Killed(cluster, folder, place, source)
    try:
        file = killed.call(lambda asks: asks.files.create(file=("lines.jsonl", body), purpose="batch"))
        batch = killed.call(lambda asks: create(asks, file.id))
        kills = [kill for kill in (killed.kill, *others) for _ in range(2)]
        source.shuffle(kills)
        moments = sorted(source.sample(range(1, lines), len(kills)))
        deadline = time.monotonic() + PATIENCE_S + lines
        while (now := killed.call(lambda asks: asks.batches.retrieve(batch.id))).status != "completed":
            assert time.monotonic() < deadline, f"{place}: still {now.status} with {now.request_counts}"
            row.changed_ids += (now.id, now.created_at, now.input_file_id) != (batch.id, batch.created_at, file.id)
            counts = now.request_counts
            row.wrong_counts += bool(counts and counts.completed + counts.failed > counts.total)
            if counts and moments and counts.completed >= moments[0]:
                moments.pop(0)
                kill = kills.pop()
                kill()
                row.kills += kill != killed.kill
            time.sleep(0.05)
        output = killed.call(lambda asks: asks.files.content(now.output_file_id or "").text)
        answered = Counter(json.loads(text)["custom_id"] for text in output.splitlines())
        row.lost = sum(not answered[name] for name in names)
        row.duplicates = sum(number > 1 for number in answered.values())
        row.wrong_counts += now.request_counts is None or now.request_counts.completed != lines
        row.batches = sum(1 for _ in killed.call(lambda asks: list(asks.batches.list()))) - 1
        again = killed.call(lambda asks: create(asks, file.id))
        row.changed_ids += again.id != batch.id
        row.kills += killed.kills
    finally:
        killed.close()
    return row


def line(name: str, model: str) -> dict[str, Any]:
    """A line of the batch's file."""
    body = {"model": model, "max_tokens": 20, "messages": [{"role": "user", "content": f"What is {name}?"}]}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def create(asks: openai.OpenAI, file_id: str) -> Any:
    """The batch of this file; repeated, the same."""
    return asks.batches.create(
        input_file_id=file_id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_headers={"Idempotency-Key": "once"},
    )
