"""Monitoring's event sink: it never hurts a job, it tells nobody's text, and its path checker catches what is wrong."""

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from messages.lifecycle import Event, Step
from monitoring import logs
from monitoring.events import fan_out
from monitoring.logs import configure, log_event
from tests.support.lifecycle import TABLE, Position
from tests.support.path_checker import PathChecker

S = Step
Read = Callable[[], str]
PREFILL = [S.SUBMITTED, S.PREFILL_STARTED, S.KV_STORED, S.PASSED_ON]
DECODE = [S.DECODE_STARTED, S.FIRST_TOKEN, S.ANSWERED, S.REPLIED, S.JOURNALED]
GOOD = PREFILL + DECODE


def event(step: Step, job: str = "j1", **facts: Any) -> Event:
    return Event(step, job, "m", {"batch_id": "b1", **facts})


def checked(*steps: Step, unseen_copies: bool = False) -> PathChecker:
    checker = PathChecker(unseen_copies)
    for step in steps:
        checker(event(step))
    return checker


# fan_out


def test_every_observer_sees_every_event_in_order() -> None:
    seen: list[tuple[str, Step]] = []
    observe = fan_out(lambda m: seen.append(("a", m.step)), lambda m: seen.append(("b", m.step)))
    observe(event(S.SUBMITTED))
    observe(event(S.PREFILL_STARTED))
    assert seen == [(who, step) for step in (S.SUBMITTED, S.PREFILL_STARTED) for who in "ab"]


def test_a_failing_observer_is_logged_once_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_event: Event) -> None:
        raise RuntimeError("disk full")

    seen: list[Event] = []
    observe = fan_out(broken, seen.append)
    with caplog.at_level(logging.INFO):
        observe(event(S.SUBMITTED))
        observe(event(S.SUBMITTED))
    assert len(seen) == 2
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "disk full" in caplog.text


# PathChecker


def test_a_job_from_submission_to_journal_is_legal_and_finished() -> None:
    checker = checked(*GOOD)
    assert checker.illegal() == []
    assert checker.jobs_without_result() == []
    assert checker.jobs() == ["j1"]


@pytest.mark.parametrize("left_out", [step for step in GOOD[:-1] if step not in (S.KV_STORED, S.FIRST_TOKEN)])
def test_a_path_with_a_step_left_out_is_illegal(left_out: Step) -> None:
    assert checked(*(step for step in GOOD if step is not left_out)).illegal()


@pytest.mark.parametrize("twice", [step for step in GOOD if step is not S.FIRST_TOKEN])
def test_a_step_taken_twice_without_a_redelivery_is_illegal(twice: Step) -> None:
    at = GOOD.index(twice)
    checker = checked(*GOOD[: at + 1], twice, *GOOD[at + 1 :])
    assert [line.split("'")[1] for line in checker.illegal()] == [twice.value]


def test_an_illegal_step_is_named_with_job_run_and_position() -> None:
    checker = PathChecker()
    checker(event(S.SUBMITTED, run=2))
    checker(event(S.ANSWERED, run=2))
    assert checker.illegal() == ["job j1, run 2: 'answered' can't follow 'prefill queue'"]
    assert checker.jobs_without_result() == ["j1"]


def test_the_next_holder_may_be_seen_before_the_publisher() -> None:
    swapped = [*PREFILL[:3], S.DECODE_STARTED, S.FIRST_TOKEN, S.PASSED_ON, S.ANSWERED, S.JOURNALED, S.REPLIED]
    assert checked(*swapped).illegal() == []


def test_one_holders_own_steps_may_not_be_swapped() -> None:
    assert checked(*PREFILL, S.ANSWERED, S.DECODE_STARTED, S.REPLIED).illegal()
    assert checked(*PREFILL[:3], S.ANSWERED, S.DECODE_STARTED, S.PASSED_ON, S.REPLIED).illegal()


def test_after_a_redelivery_both_copies_may_go_on() -> None:
    # Given a prefill worker that lost its channel, so that another one is given the job
    both = [S.SUBMITTED, S.PREFILL_STARTED, S.REDELIVERED, S.PREFILL_STARTED, S.KV_STORED, S.KV_STORED]
    # When both pass it on, and both copies are decoded
    both += [S.PASSED_ON, S.PASSED_ON, S.DECODE_STARTED, S.DECODE_STARTED, S.ANSWERED, S.REPLIED, S.ANSWERED, S.REPLIED]
    # Then that is legal, but a third copy is not, and neither is a second line in the journal
    assert checked(*both, S.JOURNALED).illegal() == []
    assert checked(*both, S.DECODE_STARTED).illegal()
    assert checked(*both, S.JOURNALED, S.JOURNALED).illegal()


def test_a_worker_killed_between_publish_and_ack_makes_a_legal_branch() -> None:
    assert checked(*PREFILL, S.REDELIVERED, *PREFILL[1:], *DECODE).illegal() == []


def test_a_stored_result_is_answered_again_without_decoding() -> None:
    assert checked(*PREFILL, *DECODE[:4], S.REDELIVERED, S.REPLIED, S.JOURNALED).illegal() == []
    assert checked(*PREFILL, S.REPLIED).illegal()


def test_a_redelivery_of_what_nobody_ever_held_is_illegal() -> None:
    assert checked(S.SUBMITTED, S.REDELIVERED).illegal()


def test_a_retry_and_a_lost_kv_cache_lead_back_to_their_queues() -> None:
    steps = [
        S.SUBMITTED,
        S.PREFILL_STARTED,
        S.RETRIED,
        *PREFILL[1:],
        S.DECODE_STARTED,
        S.KV_GONE,
        *PREFILL[1:],
        *DECODE,
    ]
    assert checked(*steps).illegal() == []


def test_a_cancelled_job_may_be_finished_by_who_had_not_heard_yet() -> None:
    assert checked(*PREFILL, S.DECODE_STARTED, S.CANCELLED, S.JOURNALED, S.ANSWERED, S.REPLIED).illegal() == []


def test_unseen_copies_allow_a_repeat_but_no_invention() -> None:
    repeated = [*PREFILL, S.PREFILL_STARTED, S.KV_STORED, S.PASSED_ON, *DECODE]
    assert checked(*repeated).illegal()
    assert checked(*repeated, unseen_copies=True).illegal() == []
    assert checked(*repeated, S.JOURNALED, unseen_copies=True).illegal()
    assert checked(S.SUBMITTED, S.ANSWERED, unseen_copies=True).illegal()


def test_runs_and_jobs_are_followed_apart() -> None:
    checker = PathChecker()
    for step in GOOD:
        for job in ("j1", "j2"):
            checker(event(step, job))
        checker(event(step, "j1", run=2))
    assert checker.illegal() == []
    assert checker.jobs() == ["j1", "j2"]


def test_every_step_of_the_table_is_legal_right_where_it_is_listed() -> None:
    reached = {Position.NEW: []}
    while len(reached) < len(TABLE):
        for position in list(reached):
            for step, target in TABLE[position].items():
                reached.setdefault(target, [*reached[position], step])
    for position, steps in TABLE.items():
        for step in steps:
            assert checked(*reached[position], step).illegal() == [], (position, step)


# Logs


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Read]:
    """Undoes what `configure` did to the process's loggers."""
    levels = {name: logging.getLogger(name).level for name in ("", *logs.ROOMS)}
    yield lambda: capsys.readouterr().err
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, logs._Stderr)]:
        root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_a_event_is_one_json_line_with_job_batch_model_stage_and_seconds(stderr: Read) -> None:
    configure("info", "json")
    log_event(event(S.KV_STORED, stage="prefill", run=1, prefill_s=1.25, put_bytes=4096))
    (line,) = stderr().splitlines()
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "level": "info",
        "logger": "monitoring.jobs",
        "event": "kv_stored",
        "job": "j1",
        "batch": "b1",
        "model": "m",
        "stage": "prefill",
        "run": 1,
        "prefill_s": 1.25,
        "put_bytes": 4096,
    }


def test_a_event_is_one_console_line(stderr: Read) -> None:
    configure("info", "console")
    log_event(event(S.RETRIED, stage="decode", error="StoreUnavailable", queue_s=2.5))
    line = stderr()
    assert line.endswith("WARNING retried job=j1 batch=b1 model=m stage=decode error=StoreUnavailable queue_s=2.5\n")


@pytest.mark.parametrize("style", ["console", "json"])
def test_no_text_of_anybody_reaches_a_job_line(stderr: Read, style: logs.Style) -> None:
    configure("debug", style)
    private = {
        "prompt": "Alice",
        "item_id": "Alice",
        "text": "Alice",
        "error": "failed on: Alice wrote",
        "stage": "decode\nAlice",
        "prefill_s": "Alice",
        "tokens": (1, 2),
        "Alice": 1,
    }
    log_event(Event(S.FAILED, "j1", "m", private))
    written = stderr()
    assert written.count("\n") == 1
    assert "failed" in written
    assert "Alice" not in written


def test_the_level_is_for_our_rooms_and_libraries_speak_from_warning_on(stderr: Read) -> None:
    configure("debug")
    logging.getLogger("infra.worker_loop").debug("ours")
    logging.getLogger("somelibrary").info("theirs")
    configure("error")
    log_event(event(S.RETRIED))
    logging.getLogger("somelibrary").warning("trouble")
    assert [line.split()[-1] for line in stderr().splitlines()] == ["ours", "trouble"]


def test_lines_written_in_the_background_come_whole_in_order_and_before_the_end(stderr: Read) -> None:
    configure("info", "json", background=True)
    for number in range(300):
        log_event(event(S.RETRIED, run=number))
    (handler,) = [handler for handler in logging.getLogger().handlers if isinstance(handler, logs._Stderr)]
    handler.flush()
    assert [json.loads(line)["run"] for line in stderr().splitlines()] == list(range(300))

    log_event(event(S.RETRIED, run=300))
    configure("info", "json")
    assert [json.loads(line)["run"] for line in stderr().splitlines()] == [300]


def test_configuring_again_replaces_and_an_exception_keeps_its_traceback(stderr: Read) -> None:
    configure("info", "console")
    configure("info", "json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("kvasir").exception("bug")
    (line,) = stderr().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]
