"""One batch under way while programs of two versions take turns: workers, owner or gateway, and who watches them."""

import json
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import httpx

from messages.workers import WorkerStage
from tests.support.processes import ModelEntry, ProcessRole, config_text
from tests.support.servers import Process
from tests.support.services import Pair
from tests.support.waiting import wait_until
from tests.upgrade.programs import Program

JOBS = 300
PATIENCE_S = 240.0
# 300 jobs in 4 slots, a quarter of a second each, and KV caches that are transferred.
MODEL = ModelEntry("simulated", "sim:scale=1,prefill=1000000,decode=80,answer=200", context=4096, slots=2)
_LOOK_S = 0.1

Signal = Literal["stop", "kill"]  # as a deployment does it, or as a power cut
_SIGNALS = {"stop": signal.SIGTERM, "kill": signal.SIGKILL}


@dataclass(frozen=True, slots=True)
class Row:
    """What a batch came to."""

    order: str
    jobs: int
    lost: int  # without a result
    doubled: int  # results beyond the first
    refused: int  # jobs that failed, and owners that would not go on
    idle_s: float  # the longest time without a result while an owner ran

    @property
    def is_clean(self) -> bool:
        """Whether all is as promised."""
        return not (self.lost or self.doubled or self.refused) and self.idle_s <= 30


class Stage:
    """Four workers and an owner. Leaving it ends all of them."""

    def __init__(self, folder: Path, pair: Pair, model: str) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._model = model
        self._urls = {"KVASIR_BROKER_URL": pair.broker_url, "KVASIR_STORE_URL": pair.store_url}
        self.config = folder / "cluster.toml"
        self.config.write_text(config_text({model: MODEL}), "utf-8")
        prompts = (
            {"id": f"line-{number}", "model": model, "shared": "Grade by this rubric. " * 40, "max_tokens": 20}
            | {"prompt": f"student {number} wrote this " * 10}
            for number in range(JOBS)
        )
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in prompts), "utf-8")
        self.journal = folder / "batch/results.jsonl"
        self._workers: dict[tuple[ProcessRole, int], Process] = {}
        self._owner: Process | None = None
        self._number = 0
        self._idle_s = 0.0
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        for process in [*self._workers.values(), *([self._owner] if self._owner else [])]:
            process.end(signal.SIGKILL, 10)
        self._watcher.join()

    # Who takes part

    def start_workers(self, program: Program) -> None:
        """Two of each stage."""
        for place in self.places():
            self.worker(program, *place)

    @staticmethod
    def places() -> Iterator[tuple[WorkerStage, int]]:
        """The workers, in the order in which they are upgraded."""
        stages: tuple[WorkerStage, WorkerStage] = ("prefill", "decode")
        yield from ((stage, number) for number in range(2) for stage in stages)

    def leave_workers(self) -> None:
        """All of one role are stopped."""
        for place in [place for place in self._workers if place[0] != "both"]:
            self._workers.pop(place).end(signal.SIGTERM, 60)

    def worker(self, program: Program, stage: ProcessRole, number: int, how: Signal = "stop") -> None:
        """This worker is of this program from now on; the one that was there ends first."""
        if old := self._workers.get((stage, number)):
            old.end(_SIGNALS[how], 60)
        self._workers[stage, number] = self._start(
            program, "worker" if stage == "both" else f"{stage}-worker", "--model", self._model
        )

    def upgrade_workers(self, program: Program, how: Signal = "stop") -> None:
        """One after the other, each once results have come with the one before; the last one is always killed."""
        for place in self.places():
            self.worker(program, *place, how if place != ("decode", 1) else "kill")
            self.wait_for_more(5)

    def own(self, program: Program) -> None:
        """This program's `kvasir run` owns the batch from now on; who owned it before is killed."""
        self.leave_owner()
        words = ("run", str(self.prompts), "--out", str(self.folder / "batch"), "--quiet")
        self._owner = self._start(program, *words)

    def leave_owner(self) -> None:
        """Nobody owns the batch."""
        if self._owner:
            self._owner.end(signal.SIGKILL, 10)

    # What has come

    def results(self) -> list[dict[str, Any]]:
        """The journal so far."""
        try:
            lines = self.journal.read_bytes().splitlines(keepends=True)
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def wait_for(self, share: float) -> None:
        """Until so many of the jobs have their results."""
        wait_until(
            lambda: self._is_owner_gone() or len(self.results()) >= share * JOBS, "results come", PATIENCE_S, 0.1
        )

    def wait_for_more(self, count: int) -> None:
        """Until so many more have come, or all are there."""
        self.wait_for(min(1.0, (len(self.results()) + count) / JOBS))

    def row(self, order: str) -> Row:
        """Wait for the owner's end, and count."""
        assert self._owner
        wait_until(self._is_owner_gone, f"the owner ends: {order}", PATIENCE_S, 0.1)
        code, rows = self._owner.exit_code, self.results()
        planned = json.loads((self.folder / "batch/batch.json").read_text("utf-8"))["jobs"]
        runs = Counter((row["job_id"], row["run"]) for row in rows)
        answered = {row["job_id"] for row in rows}
        return Row(
            order,
            JOBS,
            max(JOBS - len(planned), 0) + sum(entry["job_id"] not in answered for entry in planned),
            sum(runs.values()) - len(runs),
            sum(row["state"] != "succeeded" for row in rows) + (code != 0),
            self._idle_s,
        )

    def _is_owner_gone(self) -> bool:
        return self._owner is not None and not self._owner.alive

    def _watch(self) -> None:
        """How long an owner, while it ran, got nothing."""
        seen, since, owner = 0, time.monotonic(), self._owner
        while not self._is_over.wait(_LOOK_S):
            count = self.results_count()
            if count != seen or owner is not self._owner or self._owner is None or not self._owner.alive:
                seen, since, owner = count, time.monotonic(), self._owner
            self._idle_s = max(self._idle_s, time.monotonic() - since)

    def results_count(self) -> int:
        """How many lines there are."""
        return len(self.results())

    def _start(self, program: Program, *words: str, **variables: str) -> Process:
        self._number += 1
        place = self.folder / f"{self._number}-{words[0]}-{program.name}"
        place.mkdir()
        command = program.command("--config", str(self.config), *words)
        return Process(command, program.environment(self.folder) | self._urls | variables, place, place / "log")

    def _log(self) -> str:
        """What the last process that was started has written."""
        place = next(self.folder.glob(f"{self._number}-*"))
        return (place / "log").read_text("utf-8", errors="replace")


class GatewayStage(Stage):
    """The same, with a gateway for an owner, and one batch that a client sent to it."""

    _batch = ""
    _url = ""

    def own(self, program: Program) -> None:
        """This program's gateway from now on, on the same state; the first one is sent the batch."""
        self.leave_owner()
        words = ("serve", "--port", "0", "--state", str(self.folder / "state"))
        gateway = self._start(program, *words)
        found = wait_until(lambda: re.search(r"answers at (\S+) ", self._log()), "the gateway answers", 60)
        assert found
        self._url, self._owner = found[1], gateway
        if not self._batch:
            self._batch = self._send()
            self.journal = self.folder / "state/batches" / self._batch / "results.jsonl"

    def _send(self) -> str:
        lines = map(json.loads, self.prompts.read_text("utf-8").splitlines())
        requests = [
            {"custom_id": line["id"], "method": "POST", "url": "/v1/chat/completions"}
            | {"body": {"model": self._model, "max_tokens": 20, "messages": _messages(line)}}
            for line in lines
        ]
        body = "".join(json.dumps(line) + "\n" for line in requests).encode()
        file = {"file": ("lines.jsonl", body)}
        sent = httpx.post(f"{self._url}/v1/files", files=file, data={"purpose": "batch"}, timeout=30).json()
        batch = {"input_file_id": sent["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(httpx.post(f"{self._url}/v1/batches", json=batch, timeout=30).json()["id"])

    def row(self, order: str) -> Row:
        """Wait for the batch's end, and count what a client is given."""
        wait_until(
            lambda: self._described()["status"] not in ("validating", "in_progress", "finalizing"), order, 240, 0.2
        )
        described = self._described()
        answers = Counter(row["custom_id"] for row in self._rows(described["output_file_id"]))
        failures = Counter(row["custom_id"] for row in self._rows(described.get("error_file_id")))
        return Row(
            order,
            JOBS,
            JOBS - len(answers | failures),
            sum((answers + failures).values()) - len(answers | failures),
            len(failures) + (described["status"] != "completed"),
            self._idle_s,
        )

    def _described(self) -> dict[str, Any]:
        described: dict[str, Any] = httpx.get(f"{self._url}/v1/batches/{self._batch}", timeout=30).json()
        return described

    def _rows(self, file: str | None) -> list[dict[str, Any]]:
        if not file:
            return []
        content = httpx.get(f"{self._url}/v1/files/{file}/content", timeout=30).text
        return [json.loads(line) for line in content.splitlines()]


def _messages(line: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "system", "content": line["shared"]}, {"role": "user", "content": line["prompt"]}]
