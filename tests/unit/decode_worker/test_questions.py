"""A job with several questions: one prefill, one import, an answer to each, and after a crash only those that lack."""

import threading
from dataclasses import replace

import pytest

from decode_worker import fallback
from decode_worker.answers import Answers
from engines.base import Answer, TokenizedPrompt
from engines.questions import tokenize_job
from engines.registry import EngineOptions
from engines.simulated.engine import SimulatedEngine, parse_weights
from infra.worker_loop import SlotPool
from kvstore.memory import MemoryClusterState
from messages.errors import EngineUnavailable
from messages.jobs import JobResult, Part, PrefillJob, Question, Sampling
from messages.lifecycle import Step
from tests.support.faults import drop
from tests.support.pipeline import (
    INSTANT,
    OWN_TEXT,
    SHARED_TEXT,
    Gate,
    Pipeline,
    WatchedEngine,
    WorkerDied,
    fails,
    work,
)
from tests.support.waiting import wait_until

TEXTS = ("\nIs it named?", "\nIs it right, and why?", "\nIs there a test?")
STEPPED = "sim:scale=1,prefill=1000000,decode=100,answer=8,spread=1"  # each answer takes 80 ms, however many there are


def questions(answers: int = 1, texts: tuple[str, ...] = TEXTS, max_tokens: int = 16) -> tuple[Question, ...]:
    return tuple(Question((Part("user", text),), Sampling(max_tokens, answers=answers)) for text in texts)


def asked(job: PrefillJob) -> PrefillJob:
    """The job with its ids."""
    return tokenize_job(WatchedEngine(), job)


def alone(job: PrefillJob) -> list[str]:
    """What an engine answers to each question by itself, with no queue, no store and no cache."""
    engine = SimulatedEngine(parse_weights(INSTANT), EngineOptions(INSTANT))
    return [engine.decode(engine.tokenize(ask.prompt, 0.0).ids, None, ask.sampling).text for ask in job.asks()]


def texts_of(result: JobResult) -> list[str]:
    assert result.state == "succeeded", result.error
    return [answer.text for answer in result.answers]


@pytest.fixture
def pipeline():
    with Pipeline(unseen_copies=True) as pipeline:
        yield pipeline


def test_questions_and_samples_are_answered_from_one_prefill_and_one_import(pipeline):
    prefill, decode = pipeline.start()
    job = pipeline.job(questions=questions(answers=3))

    result = pipeline.run(job)

    # Each as if it had been asked alone: questions in order, the samples of one in a row, each with its own seed
    assert texts_of(result) == alone(job)
    assert len(set(texts_of(result))) == 9
    assert (result.text, result.finish_reason, result.more_texts) == ("", "", ())
    # The prompt was computed once, its KV cache imported once, and each answer proves that it used it
    ids = asked(job)
    assert (len(prefill.engine.prefill_calls), decode.engine.imports, len(decode.engine.decode_calls)) == (1, 1, 9)
    assert prefill.engine.prefill_calls[0] == ids.tokens
    assert [answer.evaluated_tokens for answer in result.answers] == [
        len(one.tokens) for one in ids.questions for _ in range(3)
    ]
    assert result.prefill.computed_tokens == len(ids.tokens)
    report = result.decode
    assert (report.kv_transfer, report.transferred_tokens) == ("verified", len(ids.tokens))
    assert report.prompt_tokens - report.transferred_tokens == report.evaluated_tokens
    assert report.completion_tokens >= 9
    # and nothing of it is left in the store but the class's part
    pipeline.nothing_is_left()
    wait_until(lambda: not pipeline.cluster_state.noted_answers(job.job_id, job.run), "its noted answers are gone")
    own = [ref for ref in pipeline.kv.stored_refs if not ref.is_shared]
    assert own
    wait_until(lambda: pipeline.kv.find_missing(own) == own, "its own blocks are gone")


def test_several_samples_of_a_plain_prompt_take_the_same_path(pipeline):
    prefill, decode = pipeline.start()
    job = pipeline.job(sampling=Sampling(16, answers=3))

    result = pipeline.run(job)

    assert [result.text, *result.more_texts] == alone(job)
    assert result.answers == ()
    assert (decode.engine.imports, len(prefill.engine.prefill_calls)) == (1, 1)
    assert (result.decode.kv_transfer, result.decode.evaluated_tokens) == ("verified", 1)


def test_the_answers_are_given_together_in_the_slots_that_idle(pipeline):
    # Given a worker of four slots that decodes four answers in the time of one
    pipeline.start_prefill(WatchedEngine(STEPPED))
    decode = pipeline.start_decode(WatchedEngine(STEPPED, slots=4))
    busy, most, lock = [0], [0], threading.Lock()
    inner = decode.engine.decode

    def counted(*args):
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        try:
            return inner(*args)
        finally:
            with lock:
                busy[0] -= 1

    decode.engine.decode = counted
    # When eight answers are wanted
    result = pipeline.run(pipeline.job(questions=questions(4, TEXTS[:2])))
    # Then four at a time are under way, and never more
    assert len(result.answers) == 8
    assert most[0] == 4


def test_a_neighbours_job_waits_for_no_more_than_the_answer_in_hand(pipeline):
    # Given a job with 64 answers that has both slots of a worker
    pipeline.start_prefill(WatchedEngine(STEPPED))
    decode = pipeline.start_decode(WatchedEngine(STEPPED))
    many = pipeline.job(questions=questions(32, TEXTS[:2]))
    pipeline.submit(many)
    wait_until(lambda: len(decode.engine.decode_calls) >= 4, "both slots are at work")
    # When another job comes
    neighbour = pipeline.run(pipeline.job("a neighbour's work"))
    # Then it is answered before the other has all of its answers, which take two and a half seconds
    assert neighbour.state == "succeeded"
    assert pipeline.results_so_far(many) == []
    assert len(pipeline.result(many).answers) == 64


def test_without_a_prefill_worker_they_are_tokenized_and_answered_without_a_kv_cache(pipeline, monkeypatch):
    monkeypatch.setattr(fallback, "ALONE_FOR_SURE_S", 0.1)
    pipeline.start_decode()
    job = pipeline.job(questions=questions(2))

    result = pipeline.run(job)

    assert texts_of(result) == alone(job)
    assert (result.decode.kv_transfer, result.decode.why_none) == ("none", fallback.REASON)
    assert {answer.evaluated_tokens for answer in result.answers} == {len(ask.tokens) for ask in asked(job).asks()}


class TextEngine(WatchedEngine):
    """Renders and tokenizes by itself, and tells nobody the ids."""

    def tokenize(self, prompt, clock):
        return TokenizedPrompt((), 0)

    def decode_text(self, prompt, sampling, on_text=None, stop=None):
        return super().decode(super().tokenize(prompt, 0.0).ids, None, sampling, on_text, stop)


def test_an_engine_that_takes_text_is_given_each_whole_prompt(pipeline):
    pipeline.start_prefill(TextEngine())
    pipeline.start_decode(TextEngine())
    job = pipeline.job(questions=questions(2))

    result = pipeline.run(job)

    assert texts_of(result) == alone(job)
    assert (result.decode.kv_transfer, result.decode.transferred_tokens) == ("none", 0)


def test_a_dead_letter_with_questions_is_tokenized_anew_when_it_is_replayed(pipeline):
    pipeline.start()
    first = asked(pipeline.job(questions=questions()))

    result = pipeline.run(replace(first, tokens=(), shared_tokens=0, run=2))

    assert (texts_of(result), result.decode.kv_transfer) == (alone(first), "verified")


def test_a_crash_in_the_middle_redoes_only_what_is_unanswered(pipeline):
    # Given a worker that dies after the fifth of nine answers
    pipeline.start_prefill()
    decode = pipeline.start_decode(WatchedEngine(slots=1))

    def dies(_tokens, _stop):
        if len(decode.engine.decode_calls) == 6:
            drop(decode.broker)
            raise WorkerDied

    decode.engine.before_decode = dies
    job = pipeline.job(questions=questions(3))
    # When it is started again
    result = pipeline.run(job)
    # Then the job has all of its answers, and only the last four were given twice or later
    assert texts_of(result) == alone(job)
    assert len(decode.engine.decode_calls) == 5 + 1 + 4
    assert result.decode.kv_transfer == "verified"
    assert {answer.evaluated_tokens for answer in result.answers} == {len(one.tokens) for one in asked(job).questions}
    wait_until(lambda: not pipeline.cluster_state.noted_answers(job.job_id, job.run), "its noted answers are gone")


def test_a_transient_error_of_one_answer_costs_no_other(pipeline):
    pipeline.start_prefill()
    decode = pipeline.start_decode(WatchedEngine(slots=1))
    decode.engine.before_decode = fails(EngineUnavailable("not yet"))
    job = pipeline.job(questions=questions(2))

    result = pipeline.run(job)

    assert (texts_of(result), result.attempts) == (alone(job), 2)
    assert len(decode.engine.decode_calls) == 1 + 6


def test_a_schema_that_is_refused_fails_the_job_and_leaves_no_answers_behind(pipeline):
    pipeline.start_prefill()
    pipeline.start_decode()
    refused = Question((Part("user", TEXTS[2]),), Sampling(16, json_schema='{"type": "nonsense"}'))
    job = pipeline.job(questions=(*questions(2, TEXTS[:2]), refused))

    result = pipeline.run(job)

    assert (result.state, result.answers) == ("failed", ())
    assert result.error.kind == "InvalidSchema"
    wait_until(lambda: not pipeline.cluster_state.noted_answers(job.job_id, job.run), "its noted answers are gone")


def test_a_question_that_does_not_fit_the_context_fails_the_job_before_anything_is_computed(pipeline):
    prefill, _ = pipeline.start()
    job = pipeline.job(questions=(*questions(), *questions(max_tokens=4000)))

    result = pipeline.run(job)

    assert (result.state, result.error.stage, result.error.kind) == ("failed", "prefill", "ContextExceeded")
    assert prefill.engine.prefill_calls == []


def test_cancelling_the_batch_ends_all_answers_at_once(pipeline):
    pipeline.start_prefill()
    decode = pipeline.start_decode(WatchedEngine(slots=2))
    decode.engine.before_decode = gate = Gate()
    job = pipeline.job(questions=questions(4))
    pipeline.submit(job)
    gate.wait()

    pipeline.client.cancel(job.batch_id)

    pipeline.nothing_is_left()
    wait_until(
        lambda: Step.CANCELLED in pipeline.steps(job) or not decode.worker._jobs.count_in_progress(),
        "its slots are free",
    )
    assert pipeline.results_so_far(job) == []
    assert len(decode.engine.decode_calls) <= 2


def test_of_a_kv_cache_that_is_gone_the_noted_answers_stay(pipeline):
    # Given a job of which four answers are noted when its worker dies, and its blocks are lost
    pipeline.start_prefill()
    decode = pipeline.start_decode(WatchedEngine(slots=1))
    job = pipeline.job(OWN_TEXT, SHARED_TEXT, questions=questions(2))

    def dies(_tokens, _stop):
        if len(decode.engine.decode_calls) == 5:
            pipeline.kv.delete([ref for ref in pipeline.kv.stored_refs if not ref.is_shared])
            drop(decode.broker)
            raise WorkerDied

    decode.engine.before_decode = dies
    result = pipeline.run(job)
    # Then its prompt is computed again, and the other two questions are answered
    assert texts_of(result) == alone(job)
    assert len(decode.engine.decode_calls) == 4 + 1 + 2
    assert pipeline.steps(job).count(Step.KV_GONE) == 1
    assert pipeline.ready(work("decode")) == 0


def test_what_a_crashed_worker_has_noted_is_taken_over_whole():
    state, slots = MemoryClusterState(), SlotPool(1)
    job = PrefillJob("j", "b", "i", "m:1b", (Part("user", "x"),), Sampling(16, answers=2))
    one = Answer("yes", (7,), 1, "stop", 3, 0.25, 0.5, (0.25, 0.75))

    def dies(number: int) -> Answer:
        if number:
            raise WorkerDied
        return one

    with pytest.raises(WorkerDied):
        Answers(job, 2, dies, slots, state).collect()
    again = Answers(job, 2, lambda number: Answer("no", (), 1, "stop", 3, 0.0, 0.0), slots, state).collect()

    # Its ids are not kept: nobody goes on from a noted answer.
    assert again[0] == replace(one, tokens=())
    assert (again[1].text, again[1].likelihoods) == ("no", ())
    slots.close()
