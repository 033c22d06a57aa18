"""The earlier grader's `grade_submission`: its arguments and result keys, with Kvasir's rubric and rules.

Points come from the rubric's criteria and are summed here. If a model fails there is no grade: the earlier grader used
85 points instead, while this one raises GradingFailed.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grading.grades import make_grades
from grading.jobs import Assignment
from grading.planning import assign
from grading.points import CriterionGrade, Grade
from grading.request import AspectModel, GradeRequest
from grading.rubric.rubric import Aspect, Rubric, load_rubric, parse_rubric
from grading.submissions.reading import Submission, read_document
from grading.submissions.submission import SubmissionPart
from infra.config.settings import Settings, load_settings
from kvasir.class_run import aspect_model
from kvasir.compat.models import resolve_model
from kvasir.connect import connect
from messages.errors import ConfigError, KvasirError
from messages.jobs import JobResult

STRENGTH = 0.75  # a criterion with at least this share of its points counts as a strength
MAX_ENTRIES = 10  # a list has at most this many entries, as in the earlier grader
_COMPONENTS = {
    "business": ("business", "recommend", "decision", "application"),
    "communication": ("communicat", "clarity", "present", "writing", "reflect"),
}


class GradingFailed(KvasirError):
    """There is no grade; the message says why. `grade` holds the criteria that have points."""

    def __init__(self, message: str, made: Grade) -> None:
        super().__init__(message)
        self.grade = made


class BusinessAnalyticsGraderV2:
    """Replaces the earlier grader's class. `ollama_url` is not used."""

    def __init__(
        self,
        code_model: str = "",
        feedback_model: str = "",
        ollama_url: str = "",
        rubric_path: str | Path | None = None,
        solution_path: str | Path | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._settings = settings or load_settings()
        self._models: dict[Aspect, str] = {"code": code_model, "feedback": feedback_model}
        self._rubric = load_rubric(Path(rubric_path)) if rubric_path else None
        self._solution = read_document(Path(solution_path)) if solution_path else None

    def grade_submission(
        self,
        student_code: str,
        student_markdown: str = "",
        template_code: str = "",
        solution_code: str = "",
        assignment_info: Mapping[str, Any] | None = None,
        notebook_path: str | Path | None = None,
        preprocessing_info: Any = None,
    ) -> dict[str, Any]:
        """Grade a submission and return the result under the earlier names. Both models work at the same time.

        `notebook_path` replaces code and text, and adds outputs. Of `assignment_info`, only the rubric reaches a model,
        and a student's name never does. Raises GradingFailed, ConfigError, RubricError, BrokerUnavailable.
        """
        rubric = self._rubric or _rubric_in(assignment_info or {})
        work = read_document(Path(notebook_path)) if notebook_path else _work(student_code, student_markdown)
        solution = _work(solution_code, "") if solution_code.strip() else self._solution
        template = _work(template_code, "") if template_code.strip() else None
        assignment, submission_grade, results = self._grade(rubric, work, solution, template)
        if submission_grade.points is None:
            raise GradingFailed(f"no grade: {submission_grade.reason}", submission_grade)
        return _earlier_result(assignment, submission_grade, results)

    def _grade(
        self, rubric: Rubric, work: Submission, solution: Submission | None, template: Submission | None
    ) -> tuple[Assignment, Grade, list[JobResult]]:
        models = {aspect: self._model(aspect) for aspect in self._models if rubric.for_model(aspect)}
        batch_id = f"compat-{secrets.token_hex(8)}"
        request = GradeRequest(Path(), Path(), models)
        work = replace(work, name="submission")
        assignment = assign(request, rubric, solution, template, [work], batch_id, secrets.token_bytes(16))
        with connect(self._settings, sorted({model.name for model in models.values()}), name="compat") as client:
            jobs = [
                client.new_job(batch_id, job.item_id, job.model, job.prompt, job.sampling, lane="now")
                for job in assignment.jobs
            ]
            client.submit(jobs)
            results = {result.job_id: result for result in client.gather(batch_id, [job.job_id for job in jobs])}
        [submission_grade] = make_grades(assignment, results.get)
        return assignment, submission_grade, list(results.values())

    def _model(self, aspect: Aspect) -> AspectModel:
        model_name = self._models[aspect]
        if model_name:
            return aspect_model(self._settings.model(resolve_model(self._settings, model_name)))
        return aspect_model(self._settings.code_model() if aspect == "code" else self._settings.feedback_model())


def grade_submission(*args: Any, settings: Settings | None = None, **named: Any) -> dict[str, Any]:
    """Grade one submission with the configured models. Arguments: see BusinessAnalyticsGraderV2.grade_submission.

    The rubric is given as `assignment_info={"rubric": …}`.
    """
    return BusinessAnalyticsGraderV2(settings=settings).grade_submission(*args, **named)


def _rubric_in(info: Mapping[str, Any]) -> Rubric:
    rubric = info.get("rubric")
    if not rubric:
        raise ConfigError("there is no rubric: pass rubric_path, or assignment_info={'rubric': …}")
    text = rubric if isinstance(rubric, str) else json.dumps(rubric)
    return parse_rubric("assignment_info['rubric']", text, ".json")


def _work(code: str, markdown: str) -> Submission:
    parts = [SubmissionPart("code", code, "code"), SubmissionPart("text", markdown, "text")]
    return Submission("submission", "", tuple(part for part in parts if part.text.strip()))


def _earlier_result(assignment: Assignment, grade: Grade, results: Sequence[JobResult]) -> dict[str, Any]:
    rubric = assignment.rubric
    parts = {part: [item for item in grade.criteria if _component(rubric, item) == part] for part in _PARTS}
    share = {part: _percent(items) for part, items in parts.items()}
    code = parts["technical"]
    text_criteria = [item for part in ("business", "analysis", "communication") for item in parts[part]]
    findings = [finding for item in assignment.items for finding in item.findings]
    return {
        "final_score": grade.points,
        "final_score_percentage": round(100 * float(grade.points or 0) / float(grade.max_points), 2),
        "max_points": grade.max_points,
        "component_scores": {**{f"{part}_points": _points(items) for part, items in parts.items()}, "bonus_points": 0},
        "component_percentages": {
            "technical_score": share["technical"],
            "business_understanding": share["business"],
            "data_interpretation": share["analysis"],
            "communication_clarity": share["communication"],
        },
        "technical_analysis": {
            "code_strengths": _feedback_lines(code, strong=True),
            "code_suggestions": _feedback_lines(code, strong=False),
            "technical_observations": [finding.text for finding in findings],
        },
        "comprehensive_feedback": {
            "instructor_comments": grade.summary,
            "detailed_feedback": {
                "reflection_assessment": _feedback_lines(parts["communication"]),
                "analytical_strengths": _feedback_lines(text_criteria, strong=True),
                "business_application": _feedback_lines(parts["business"]),
                "areas_for_development": _feedback_lines(text_criteria, strong=False),
                "recommendations": [],
            },
        },
        "validation_results": {finding.text: finding.has_passed for finding in findings},
        "grading_timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "grading_system": "kvasir",
        "grading_stats": {
            result.model: {
                "prompt_tokens": result.decode.prompt_tokens,
                "completion_tokens": result.decode.completion_tokens,
                "seconds": result.decode.total_s,
                "kv_transfer": result.decode.kv_transfer,
            }
            for result in results
        },
        "needs_review": grade.needs_review,
        "review_reasons": list(grade.review_reasons),
        "remarks": list(grade.remarks),
    }


_PARTS = ("technical", "business", "analysis", "communication")


def _component(rubric: Rubric, item: CriterionGrade) -> str:
    """Return which of the earlier grader's four parts a criterion belongs to; analysis if nothing says."""
    if any(criterion.id == item.id for criterion in rubric.for_model("code")):
        return "technical"
    words = f"{item.id} {item.title}".lower()
    return next((part for part, signs in _COMPONENTS.items() if any(sign in words for sign in signs)), "analysis")


def _points(items: Iterable[CriterionGrade]) -> float:
    return sum(float(item.points or 0) for item in items)


def _percent(items: Sequence[CriterionGrade]) -> float | None:
    """Return the share in percent, or None if the rubric has no such criterion. No number is made up."""
    max_points = sum(float(item.max_points) for item in items)
    return round(100 * _points(items) / max_points, 2) if max_points else None


def _feedback_lines(items: Iterable[CriterionGrade], strong: bool | None = None) -> list[str]:
    """Return the feedback of the criteria that went well, of those that didn't, or of all."""
    selected_criteria = [
        item for item in items if strong is None or strong == (_points([item]) >= STRENGTH * item.max_points)
    ]
    return [f"{item.title}: {item.feedback}" for item in selected_criteria if item.feedback and not item.leaks][
        :MAX_ENTRIES
    ]
