"""What the instructors do before they go home: three courses in three ways, and a question in between."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import openai

from tests.night.courses import WRITER, Course
from tests.night.site import Site

ONCE = "the-night"  # Idempotency-Key of the first batch, but for its number
_BACK_S = 120.0  # until a gateway that was killed is back


class Endpoint:
    """A course that asks by OpenAI's SDK, and asks again whenever nobody answers."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lines: list[str] = []  # of all batches
        self._completed: dict[str, int] = {}  # lines of each batch, as far as somebody has looked
        self._outputs: dict[str, str] = {}  # the file of each batch that is over
        self.looks = 0
        self.unanswered = 0  # requests that met no gateway

    @property
    def count(self) -> int:
        """Lines of all batches."""
        return len(self._lines)

    @property
    def is_over(self) -> bool:
        """Whether every batch is."""
        return len(self._outputs) == len(self._completed)

    def open_lines(self) -> int:
        """Those without an answer, as far as somebody has looked."""
        return self.count - sum(list(self._completed.values()))

    def submit(self, count: int) -> None:
        """The file of so many more lines, and the batch of it."""
        names = [f"line {number}" for number in range(self.count, self.count + count)]
        text = "\n".join(json.dumps(_line(name)) for name in names)
        file = self._ask(lambda api: api.files.create(file=("lines.jsonl", text.encode()), purpose="batch"))
        batch_id = self._ask(lambda api: self._create(api, file.id)).id
        self._lines += names
        self._completed[batch_id] = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Somebody looks twice a second how far it is."""
        over = threading.Event()

        def keep_looking() -> None:
            while not over.wait(0.5):
                self.look()

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(keep_looking)
            try:
                yield
            finally:
                over.set()
                watching.result()

    def look(self) -> None:
        """At each batch that is not over, as it is now."""
        for batch_id in set(self._completed) - set(self._outputs):
            batch = self._ask(partial(self._retrieve, batch_id))
            counts = batch.request_counts
            assert counts is None or counts.completed + counts.failed <= counts.total <= self.count, counts
            self._completed[batch_id] = counts.completed if counts else 0
            if batch.status == "completed":
                self._outputs[batch_id] = batch.output_file_id
        self.looks += 1

    def answers(self) -> Counter[str]:
        """How often each line was answered; all batches are over."""
        texts = [self._ask(partial(self._content, output)) for output in self._outputs.values()]
        return Counter(json.loads(line)["custom_id"] for text in texts for line in text.splitlines())

    def missing(self) -> list[str]:
        """Lines without exactly one answer."""
        answers = self.answers()
        return [name for name in self._lines if answers[name] != 1]

    def _create(self, api: openai.OpenAI, file_id: str) -> Any:
        return api.batches.create(
            input_file_id=file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_headers={"Idempotency-Key": f"{ONCE}-{len(self._completed)}"},
        )

    def _retrieve(self, batch_id: str, api: openai.OpenAI) -> Any:
        return api.batches.retrieve(batch_id)

    def _content(self, file_id: str, api: openai.OpenAI) -> str:
        return api.files.content(file_id).text

    def _ask(self, question: Any) -> Any:
        deadline = time.monotonic() + _BACK_S
        while True:
            try:
                with openai.OpenAI(base_url=self._site.gateway_url, api_key="x", max_retries=0, timeout=20) as api:
                    return question(api)
            except (openai.APIConnectionError, openai.InternalServerError):
                self.unanswered += 1
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def _line(name: str) -> dict[str, Any]:
    body = {"model": WRITER, "max_tokens": 25, "messages": [{"role": "user", "content": f"What is {name}?"}]}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def look_before(site: Site, course: Course) -> None:
    """A dry run: no model is called, and nothing is written."""
    dry = site.command("producer", "grade", *course.words("--dry-run"))
    assert dry.code == 0, dry.stderr
    assert not (course.out / "results.jsonl").exists()


def submit(site: Site, course: Course) -> None:
    """The class is queued; its owner stays."""
    submitted = site.command("producer", "submit", *course.words())
    assert submitted.code == 0, submitted.stderr
    site.own(course)


def ask(site: Site) -> float:
    """A question in between, and how long its answer took."""
    start = time.monotonic()
    answer = site.command("producer", "ask", "What is a churn rate?", "--model", WRITER, "--max-tokens", "20")
    assert answer.code == 0, answer.stderr
    assert answer.stdout.strip()
    return time.monotonic() - start
