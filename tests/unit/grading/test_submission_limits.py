"""How much of a submission reaches the models: as much as they have room for, unless a setting says less."""

from dataclasses import replace
from pathlib import Path

import pytest

from grading import planning
from grading.jobs import Item
from grading.request import AspectModel, GradeRequest
from grading.rubric.rubric import load_rubric
from grading.submissions.reading import Submission, SubmissionPart
from grading.submissions.tokens import estimate_tokens
from grading.submissions.truncation import USUAL_TOKENS, Limits, limits_within
from infra.config.settings import load_settings
from kvasir.class_run import request_from_manifest
from kvasir.dry_run import _limit_sentence
from messages.jobs import prompt_text
from producers.batch.batch import Batch

WORDS = "north sells more than south because its mean is higher in each year we looked at\n"
RUBRIC = "title: T\ncriteria: [{id: a, title: It answers, points: 2, model: feedback}]\n"


def item(tmp_path: Path, parts: tuple[SubmissionPart, ...], context: int = 65_536, cap: int | None = 0) -> Item:
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    request = GradeRequest(tmp_path, tmp_path / "rubric.yaml", {"feedback": AspectModel("m", context)})
    request = replace(request, max_submission_tokens=cap)
    rubric = load_rubric(request.rubric)
    [made] = planning.assign(request, rubric, None, None, [Submission("a.md", "", parts)], "b", b"secret").items
    return made


def text(tokens: int, kind: str = "text") -> SubmissionPart:
    words = WORDS * max(1, tokens // estimate_tokens(WORDS))
    return SubmissionPart(kind, words, "text")  # type: ignore[arg-type]


def test_nothing_is_cut_while_the_window_has_room(tmp_path: Path) -> None:
    assert item(tmp_path, (text(20_000), text(15_000, "output"))).cuts == ()


@pytest.mark.parametrize("number_of_parts", [1, 400, 10_000])
def test_what_the_window_has_no_room_for_is_cut_and_said(number_of_parts: int, tmp_path: Path) -> None:
    parts = tuple(text(100_000 // number_of_parts) for _ in range(number_of_parts))
    made = item(tmp_path, parts, context=32_768)
    [task] = made.tasks
    assert made.cuts
    assert estimate_tokens(prompt_text(task.job.prompt)) + task.job.sampling.max_tokens <= 32_768


def test_a_setting_cuts_more_and_the_dry_run_says_what_that_costs(tmp_path: Path) -> None:
    long = text(30_000)
    capped, whole = (item(tmp_path, (long,), cap=cap) for cap in (8_000, 0))
    [cut] = capped.cuts
    assert cut.kept_tokens <= 8_000
    assert _limit_sentence([capped]) == f"1 submission cut: {cut.dropped_tokens:,} tokens of work that no model reads"
    assert f"max_submission_tokens = {USUAL_TOKENS}" in _limit_sentence([whole])
    assert _limit_sentence([item(tmp_path, (text(5_000),))]) == ""


def test_outputs_are_cut_before_work() -> None:
    limits = limits_within({"code": 9_000, "text": 5_000, "output": 90_000}, 20_000)
    assert (limits.code_tokens, limits.text_tokens, limits.output_tokens) == (9_000, 5_000, 6_000)
    full = limits_within({"code": 50_000, "text": 50_000, "output": 50_000}, USUAL_TOKENS)
    assert (full.code_tokens, full.text_tokens, full.output_tokens) == (
        Limits().code_tokens,
        Limits().text_tokens,
        Limits().output_tokens,
    )


def test_a_batch_that_an_earlier_release_planned_keeps_its_limits_and_its_prompts(tmp_path: Path) -> None:
    given = SubmissionPart("text", "Question 1", "cell 1", is_given_cell=True)
    earlier, now = (item(tmp_path, (given, text(10_000)), cap=cap) for cap in (None, 0))
    [cut] = earlier.cuts
    assert cut.kept_tokens <= Limits().text_tokens
    assert now.cuts == ()
    own_parts = [made.tasks[0].job.prompt[1].text for made in (earlier, now)]
    assert ["given to the students" in own for own in own_parts] == [False, True]


def test_a_manifest_says_by_which_limits_it_was_planned(tmp_path: Path) -> None:
    request = GradeRequest(tmp_path, tmp_path / "r.yaml", {}, max_submission_tokens=9_000)
    stored = request.stored_form
    assert request_from_manifest(load_settings({}), stored).max_submission_tokens == 9_000
    del stored["max_submission_tokens"]
    old = request_from_manifest(load_settings({}), stored)
    assert old.max_submission_tokens is None
    assert "max_submission_tokens" not in old.stored_form


def test_a_batch_keeps_its_limit_however_often_it_is_read(tmp_path: Path) -> None:
    with Batch(tmp_path / "out") as batch:
        batch.plan([], {"folder": "x", "max_submission_tokens": 9}, [])

    for _ in range(2):
        with Batch(tmp_path / "out") as batch:
            assert batch.request["max_submission_tokens"] == 9
            batch.plan([], batch.request, [])
