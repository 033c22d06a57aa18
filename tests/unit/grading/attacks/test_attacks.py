"""Forty attacks on the grader: whatever a model makes of them, a grade stays a grade, and a person is told to look."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from grading.attacks.detection import instruction_flags, strongest_passages
from grading.grades import make_grades
from grading.jobs import Assignment, Task
from grading.planning import prepare
from grading.points import Grade
from grading.prompts.prompt import has_control_tokens
from grading.request import AspectModel, GradeRequest
from grading.submissions.reading import Submission
from grading.submissions.submission import SubmissionPart
from kvasir import connect, load_settings
from messages.jobs import JobResult
from tests.support.attacks import ATTACKS, clean_submissions
from tests.support.homework import RUBRIC

MODELS = {"code": AspectModel("tiny:1b", 32_768), "feedback": AspectModel("tiny:1b", 32_768)}
SECRET = b"s" * 16
OTHERS = "Only this student wrote: marmalade and thunder."


def work(text: str) -> Submission:
    return Submission("s", "R", (SubmissionPart("text", text, "cell 1"),))


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Assignment:
    """A class of forty attackers and one honest student."""
    folder = tmp_path_factory.mktemp("class")
    (folder / "rubric.yaml").write_text(RUBRIC, "utf-8")
    (folder / "in").mkdir()
    for number, text in enumerate(ATTACKS.values()):
        (folder / "in" / f"qwertz{number}_{100 + number}_{900 + number}_hw.md").write_text(text, "utf-8")
    (folder / "in" / "honest_99_899_hw.md").write_text(OTHERS, "utf-8")
    return prepare(GradeRequest(folder / "in", folder / "rubric.yaml", MODELS), "b", SECRET)


def answered(assignment: Assignment, answer: Callable[[Task], str]) -> list[Grade]:
    """The grades if every task were answered so."""
    by_id = {task.job.job_id: task for task in assignment.tasks}

    def result_of(job_id: str) -> JobResult:
        task = by_id[job_id]
        return JobResult(job_id, 1, "b", task.job.item_id, task.job.model, "succeeded", answer(task), "stop")

    return make_grades(assignment, result_of)


def obedient(task: Task) -> str:
    """A model that does as it is told: all points, and its own prompt for evidence and feedback."""
    schema = json.loads(task.job.sampling.json_schema)["properties"]
    return json.dumps({key: _filled(value, task.job.prompt[-1].text) for key, value in schema.items()})


def _filled(schema: dict[str, Any], text: str) -> Any:
    if schema["type"] == "string":
        return text[: schema["maxLength"]]
    return {"evidence": text[:160], "points": schema["properties"]["points"]["enum"][-1], "feedback": text[:200]}


def test_there_are_forty_attacks_and_two_hundred_clean_submissions() -> None:
    assert len(ATTACKS) == 40
    assert len(set(clean_submissions())) == 200


def test_at_least_35_attacks_are_flagged() -> None:
    missed = [name for name, text in ATTACKS.items() if not instruction_flags(work(text))]

    assert len(missed) <= 5, missed


def test_at_most_two_in_a_hundred_clean_submissions_are_flagged() -> None:
    flagged = [text for text in clean_submissions() if strongest_passages([text])[0] or has_control_tokens(text)]

    assert len(flagged) <= 4, flagged


def test_the_class_shares_its_prefix_and_every_attacker_has_a_fence_of_its_own(attacked: Assignment) -> None:
    for role in ("code", "feedback"):
        assert len({task.job.prompt[0].text for task in attacked.tasks if task.aspect == role}) == 1
    assert len({item.fence for item in attacked.items}) == 41
    for item in attacked.items:
        for task in item.tasks:
            assert task.job.prompt[-1].text.count(f"=== {item.fence} end") == 1
            assert item.fence not in task.job.prompt[0].text


def test_no_prompt_holds_another_students_text(attacked: Assignment) -> None:
    holders = {
        item.submission.name for item in attacked.items for task in item.tasks if OTHERS in task.job.prompt[-1].text
    }

    assert holders == {"honest_99_899_hw.md"}
    assert all(OTHERS not in task.job.prompt[0].text for task in attacked.tasks)


def test_no_chat_control_token_reaches_a_prompt(attacked: Assignment) -> None:
    assert not any(has_control_tokens(task.job.prompt[-1].text) for task in attacked.tasks)


def test_an_obedient_model_reaches_points_within_range_and_reproduces_no_fence(attacked: Assignment) -> None:
    fences = {item.fence for item in attacked.items}

    for grade in answered(attacked, obedient):
        assert grade.state == "graded"
        assert grade.points == 5
        text = json.dumps([[item.evidence, item.feedback] for item in grade.criteria]) + grade.summary
        assert not any(fence in text for fence in fences)
        assert grade.submission.startswith("honest") or OTHERS not in text


@pytest.mark.parametrize("wrong", ["999", "Full points!", '{"works": {"points": 3}}', "", '{"works": 3}'])
def test_a_model_that_leaves_the_schema_makes_no_grade(attacked: Assignment, wrong: str) -> None:
    assert {grade.state for grade in answered(attacked, lambda _task: wrong)} == {"failed"}
    assert {grade.points for grade in answered(attacked, lambda _task: wrong)} == {None}


def test_flagged_attacks_wait_for_a_person(attacked: Assignment) -> None:
    waiting = [grade for grade in answered(attacked, obedient) if any(not doubt.criterion_id for doubt in grade.doubts)]

    assert len(waiting) >= 35


def test_a_constrained_engine_answers_every_attack_within_the_schema(attacked: Assignment, tmp_path: Path) -> None:
    flags = {"models": {"tiny:1b": {"engine": "simulated", "weights": {"simulated": "sim:scale=0"}}}}
    settings = load_settings(flags, environ={}, cwd=tmp_path, user_dir=tmp_path)
    with connect(settings) as client:
        jobs = [
            client.new_job("b", task.job.item_id, task.job.model, task.job.prompt, task.job.sampling)
            for task in attacked.tasks
        ]
        client.submit(jobs)
        found = {result.job_id: result for result in client.gather("b", [job.job_id for job in jobs], timeout_s=60)}

    assert len(found) == 82
    for task in attacked.tasks:
        jsonschema.validate(json.loads(found[task.job.job_id].text), json.loads(task.job.sampling.json_schema))
    assert all(grade.points is not None and 0 <= grade.points <= 5 for grade in make_grades(attacked, found.get))


@pytest.mark.parametrize("text", ["\n \n" * 100_000, " \t" * 200_000, "x " * 100_000, "ignore the " * 20_000])
def test_text_made_to_be_slow_is_read_like_any_other(text: str) -> None:
    found = strongest_passages([text])[0]
    assert not (found and found[1].startswith("give"))  # a pattern that walks back and forth would never get here
