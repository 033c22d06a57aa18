"""The jobs of a row: what they ask, and what an undisturbed engine answers."""

import random
from collections.abc import Iterator
from dataclasses import replace

from engines.questions import tokenize_job
from engines.registry import EngineOptions
from engines.simulated.engine import open_engine
from messages.jobs import Part, PrefillJob, Question, Sampling, job_id, user_prompt
from producers.batch.batch import BatchEntry

# An answer takes max_tokens / 100 seconds: each job's length is its own choice.
WEIGHTS = "sim:prefill=20000,decode=100,scale=1,layers=2,kv_heads=1,head_dim=16,answer=1000000"
HYBRID = f"{WEIGHTS},recurrent=1"
BATCHING = f"{WEIGHTS},batch=4"
UNPACED = WEIGHTS.replace("scale=1", "scale=0")
CONTEXT = 32768
TOKENS_PER_S = 100

_SHARED = "The rubric that all of the class share, and what its criteria are. " * 8


def tasks(batch_id: str, model: str, jobs: int, seed: int, long_jobs: int = 0, long_s: float = 0.0) -> list[PrefillJob]:
    """The same tasks for the same arguments; the first `long_jobs` of them take `long_s` seconds to decode."""
    source = random.Random(seed)
    made = []
    for number in range(jobs):
        own = f"Submission {number}. " + "x" * source.randint(40, 400)
        tokens = round(long_s * TOKENS_PER_S) if number < long_jobs else source.randint(4, 16)
        sampling = Sampling(max_tokens=tokens, seed=number)
        item, parts = f"item-{number}", user_prompt(_SHARED, own)
        name = job_id(batch_id, item, model, parts, sampling)
        made.append(PrefillJob(name, batch_id, item, model, parts, sampling))
    return made


def asking(job: PrefillJob, questions: int) -> PrefillJob:
    """The job with so many questions, two answers to each; 0: as it is."""
    sampling = replace(job.sampling, answers=2)
    asked = [Question((Part("user", f"Question {number}?"),), sampling) for number in range(questions)]
    return replace(job, questions=tuple(asked))


def entries(made: list[PrefillJob]) -> list[BatchEntry]:
    """Their lines in the manifest."""
    return [BatchEntry(task.job_id, task.item_id, task.model, "code", task.item_id) for task in made]


def expected_texts(made: list[PrefillJob], questions: int = 0) -> Iterator[tuple[str, str]]:
    """Job id and answer, several of them a line each, from an engine that nobody disturbs."""
    engine = open_engine(EngineOptions(UNPACED, CONTEXT))
    for task in made:
        asks = tokenize_job(engine, asking(task, questions)).asks()
        yield task.job_id, "\n".join(engine.decode(ask.tokens, None, ask.sampling).text for ask in asks)
    engine.close()
