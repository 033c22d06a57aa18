"""What it costs to ask many questions of one student's work: 8 criteria, 5 samples to each, from one KV cache.

Each student's prompt is one job with eight questions (`forked`). The same answers are then fetched as one job each, as
was done before jobs had questions (`separate`), and one answer alone of each student shows what the prompt itself costs
(`one`). In all three the class's part is shared between students, and computed once.

    prefill_ratio     tokens computed by the prefill workers, forked / one
    kv_bytes_ratio    bytes put into the store, headers included, forked / one
    speedup           seconds from the submission of the batch to its last result, separate / forked

All in one process: an in-process broker, a real Redis over loopback, two prefill workers, and a decode worker of
8 slots, each with an engine of its own. The simulated engine takes the same time for a step of 1 and of 8 sequences,
as one does that is bound by the bandwidth of its memory. Its speed-up follows from its rates (2,000 prompt tokens/s a
worker, 60 tokens/s a slot) and from the length of the answers: the longer they are, the less of the time is prefill,
hence two rows. The real engines share two cores with everything else, run the demo model, and are reported as they are.

What a question adds is not in `prefill_ratio`: its own tokens are evaluated by the decoder, once for each answer
(`evaluated_tokens`, forked and separate). A job whose KV transfer was not proved for every answer ends the benchmark.
The figures show no network, and no memory traffic of eight sequences at once.

The keys at the top are those of the simulated engine's first row.
"""

import random
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec

from benchmarks import harness
from benchmarks.prefix import DEMO_MODEL, PrefillCost, PrefixFleet, fleet, text
from engines.registry import Engine
from messages.jobs import Part, PrefillJob, Question, Sampling, job_id, user_prompt

CRITERIA, SAMPLES, SLOTS = 8, 5, 8
SPEEDUP_WANTED = 3.0
ALLOWED_PREFILL, ALLOWED_BYTES = 1.1, 1.05
_RATES = "sim:prefill=2000,decode=60,scale=0.2,spread=1,layers=8,kv_heads=2,head_dim=32,answer="
_FOLDER = str(DEMO_MODEL.with_suffix(""))


@dataclass(frozen=True, slots=True)
class Setup:
    """What is asked of whom. `needs`: a package without which the row is left out."""

    engine: str
    weights: str
    answer_tokens: int
    shared_tokens: int = 700
    own_tokens: int = 1300
    students: int = 4
    criteria: int = CRITERIA
    samples: int = SAMPLES
    needs: str = "numpy"


SIMULATED = Setup("simulated", _RATES + "40", 40)
SETUPS = (
    SIMULATED,
    Setup("simulated", _RATES + "120", 120),
    Setup("llamacpp", str(DEMO_MODEL), 24, students=1),
    Setup("mlx", _FOLDER, 24, 300, 300, 1, needs="mlx"),
    Setup("transformers", f"{_FOLDER}?dtype=f32", 24, 300, 300, 1, needs="torch"),
)
QUICK = (replace(SIMULATED, students=1), replace(SETUPS[2], criteria=4, samples=2))


@dataclass(frozen=True, slots=True)
class QuestionsRow:
    """One engine's figures: tokens computed, bytes stored, seconds."""

    engine: str
    students: int
    answers: int  # of each student
    answer_tokens: int
    one_tokens: int
    forked_tokens: int
    separate_tokens: int
    prefill_ratio: float
    one_bytes: int
    forked_bytes: int
    kv_bytes_ratio: float
    forked_evaluated_tokens: int
    separate_evaluated_tokens: int
    forked_seconds: float
    separate_seconds: float
    speedup: float


def measure(setup: Setup, store_url: str, seed: int) -> QuestionsRow:
    """Ask in all three forms."""
    with fleet(setup.engine, store_url, setup.weights, SLOTS) as running:
        source = random.Random(seed)
        texts = _texts(running.engine, setup, source)
        questions = _questions(running.engine, setup, source)
        one = running.run(_forked(running, texts, (_one(questions[0]),)))
        forked = running.run(_forked(running, texts, questions))
        separate = running.run(_separate(running, texts, questions))
    return _row(setup, one, forked, separate)


def _texts(engine: Engine, setup: Setup, source: random.Random) -> list[tuple[str, str]]:
    """The class's text and each student's; they differ from run to run, so that nothing stored before helps."""
    shared = text(engine, setup.shared_tokens, source, f"Class {secrets.token_hex(8)}.")
    return [(shared, text(engine, setup.own_tokens, source, f" Student {n}.")) for n in range(setup.students)]


def _questions(engine: Engine, setup: Setup, source: random.Random) -> tuple[Question, ...]:
    sampling = Sampling(setup.answer_tokens, temperature=0.7, answers=setup.samples)
    asked = [text(engine, 24, source, f"\nCriterion {number}:") for number in range(setup.criteria)]
    return tuple(Question((Part("user", one),), sampling) for one in asked)


def _one(question: Question) -> Question:
    return replace(question, sampling=replace(question.sampling, answers=1))


def _forked(
    running: PrefixFleet, texts: Sequence[tuple[str, str]], questions: tuple[Question, ...]
) -> list[PrefillJob]:
    """A job for each student."""
    return [replace(job, questions=questions, job_id=_named(job, questions)) for job in running.jobs(texts)]


def _named(job: PrefillJob, questions: tuple[Question, ...]) -> str:
    return job_id(job.batch_id, job.item_id, job.model, job.prompt, job.sampling, questions)


def _separate(
    running: PrefixFleet, texts: Sequence[tuple[str, str]], questions: Sequence[Question]
) -> list[PrefillJob]:
    """A job for each answer."""
    asks = [ask for job in _forked(running, texts, tuple(questions)) for ask in job.asks()]
    jobs = running.jobs([("", "x")] * len(asks))
    return [
        replace(job, prompt=_joined(ask.prompt), sampling=ask.sampling) for job, ask in zip(jobs, asks, strict=True)
    ]


def _joined(prompt: Sequence[Part]) -> tuple[Part, ...]:
    shared, *own = [part.text for part in prompt]
    return user_prompt(shared, "".join(own))


def _row(setup: Setup, one: PrefillCost, forked: PrefillCost, separate: PrefillCost) -> QuestionsRow:
    return QuestionsRow(
        setup.engine,
        setup.students,
        setup.criteria * setup.samples,
        setup.answer_tokens,
        one.tokens,
        forked.tokens,
        separate.tokens,
        forked.tokens / one.tokens,
        one.stored_bytes,
        forked.stored_bytes,
        forked.stored_bytes / one.stored_bytes,
        forked.evaluated,
        separate.evaluated,
        forked.seconds,
        separate.seconds,
        separate.seconds / forked.seconds,
    )


def report(row: QuestionsRow) -> str:
    """One engine's row, for people."""
    lines = [
        f"{row.engine}, {row.students} students, {row.answers} answers each, of up to {row.answer_tokens} tokens",
        f"{'':24}{'one answer':>14}{'forked':>14}{'ratio':>8}{'a job each':>14}",
        f"{'tokens prefilled':24}{row.one_tokens:14,}{row.forked_tokens:14,}{row.prefill_ratio:8.3f}"
        f"{row.separate_tokens:14,}",
        f"{'bytes stored':24}{row.one_bytes:14,}{row.forked_bytes:14,}{row.kv_bytes_ratio:8.3f}",
        f"{'tokens at the decoder':38}{row.forked_evaluated_tokens:14,}{'':8}{row.separate_evaluated_tokens:14,}",
        f"{'seconds':38}{row.forked_seconds:14.1f}{'':8}{row.separate_seconds:14.1f}: {row.speedup:.1f} times as long",
    ]
    if row.prefill_ratio > ALLOWED_PREFILL or row.kv_bytes_ratio > ALLOWED_BYTES:
        lines.append("the questions cost more prefill or more bytes than they may")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = harness.options(__doc__, arguments)
    print(f"{CRITERIA} criteria, {SAMPLES} samples to each, {SLOTS} slots; {harness.machine()}\n", flush=True)
    rows = []
    with harness.store() as store_url:
        for setup in QUICK if options.quick else SETUPS:
            if find_spec(setup.needs):
                rows.append(measure(setup, store_url, options.seed))
                print(report(rows[-1]), flush=True)
    first = rows[0]
    if first.speedup < SPEEDUP_WANTED:
        print(f"less than {SPEEDUP_WANTED:.0f} times as fast as a job for each answer")
    harness.finish(
        prefill_ratio=first.prefill_ratio,
        kv_bytes_ratio=first.kv_bytes_ratio,
        speedup=first.speedup,
        rows=list(map(asdict, rows)),
    )


if __name__ == "__main__":
    main()
