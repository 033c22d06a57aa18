"""A batch is published longest expected first."""

from dataclasses import replace
from pathlib import Path

import pytest

from grading.jobs import expected_work
from grading.planning import prepare
from grading.request import AspectModel, GradeRequest
from messages.jobs import PrefillJob, Sampling, user_prompt

SAMPLING = Sampling(100)
JOB = PrefillJob("job", "batch", "ada.code", "m", user_prompt("rubric", "x <- 1"), SAMPLING)


@pytest.mark.parametrize(
    "longer",
    [
        replace(JOB, sampling=replace(SAMPLING, max_tokens=101)),
        replace(JOB, sampling=replace(SAMPLING, answers=2)),
        replace(JOB, prompt=user_prompt("rubric", "x <- 10")),
        replace(JOB, prompt=user_prompt("rubric", "é <- 1")),
        replace(JOB, prompt=user_prompt("rubric", "x"), sampling=replace(SAMPLING, max_tokens=101)),
    ],
)
def test_more_tokens_to_generate_and_then_a_longer_prompt_are_more_work(longer):
    assert expected_work(longer) > expected_work(JOB)


def test_a_class_is_published_longest_first_in_each_role_and_the_code_role_first(tmp_path: Path):
    folder = tmp_path / "class"
    folder.mkdir()
    for name, lines in (("ada", 5), ("bob", 50), ("cyd", 20)):
        (folder / f"{name}.R").write_text("x <- mean(orders$amount)\n" * lines)
    rubric = tmp_path / "rubric.yaml"
    rubric.write_text(
        "title: T\ncriteria:\n  - {id: a, title: A, points: 2, guidance: g, model: code}\n"
        "  - {id: b, title: B, points: 2, guidance: g, model: feedback}\n"
    )
    models = {"code": AspectModel("m", 8192), "feedback": AspectModel("n", 8192)}

    tasks = prepare(GradeRequest(folder, rubric, models), "batch", bytes(16)).tasks

    assert [task.aspect for task in tasks] == ["code"] * 3 + ["feedback"] * 3
    for role in ("code", "feedback"):
        sizes = [len(task.job.prompt[-1].text) for task in tasks if task.aspect == role]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == 3
