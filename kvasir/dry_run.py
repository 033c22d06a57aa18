"""`kvasir grade --dry-run`: shows what was found, how long it is, what the class shares, and what would be cut."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from typing import Any

from engines.proof import outside_in
from grading import planning
from grading.attacks.detection import instruction_flags
from grading.jobs import Assignment, Item
from grading.likeness import MAX_DISTANCE, CriterionAnswer, group_answers, own_text
from grading.prompts.prompt import cut_summary, examples_text
from grading.report.grades import one_line
from grading.request import GradeRequest
from grading.roster import ANSWERS, SAY_WHOSE, TEST_STUDENT, UNASSIGNED_QUESTION, UNMATCHED_QUESTION, Owner
from grading.submissions.handed_in import ignored_files_sentence
from grading.submissions.lms_names import student_id
from grading.submissions.tokens import estimate_tokens
from grading.submissions.truncation import USUAL_TOKENS, count_parts
from infra.config.settings import Settings
from kvasir.class_run import exclusion_sentence
from kvasir.connect import connect
from kvasir.terminal import print_groups, print_table, say, say_json, shortened
from messages.errors import ConfigError, Retry
from messages.jobs import prompt_text
from producers.client import Client
from producers.words import join_with_and, plural

# Fixed values, because a dry run makes no batch. The fences in prompts have the same length whatever these values are.
_BATCH_ID = "dry-run"
_SECRET = bytes(16)


def show_dry_run(settings: Settings, request: GradeRequest, as_json: bool) -> int:
    """Print the dry run. Returns 0 if every submission can be read, else 1."""
    assignment = planning.prepare(request, _BATCH_ID, _SECRET)
    with ExitStack() as stack:
        client: Client | None = None
        with suppress(ConfigError, Retry):  # without a client, tokens are estimated
            client = stack.enter_context(connect(settings, _models(assignment), name="dry run"))
        summary = describe(assignment, *_counter(assignment, client))
        summary["outside"] = _outside(settings, assignment, client)
    say_json(summary | _pilot(assignment.items)) if as_json else _print(summary)
    if not as_json and (answers := [path for path in request.rosters if path.name == ANSWERS]):
        say(f"Whose each submission is goes by the answers in {join_with_and([*map(str, answers)])}")
    if not as_json and (sentence := _limit_sentence(assignment.items)):
        say(sentence)
    return 1 if any(item["problem"] for item in summary["submissions"]) else 0


def _pilot(items: Iterable[Item]) -> dict[str, list[str]]:
    """Return the order in which to try submissions if some are alike: one of each group, then the second of each."""
    answers = [
        CriterionAnswer(item.submission.name, None, "", own_text(item.submission))
        for item in items
        if item.submission.is_gradable
    ]
    groups = group_answers(answers, MAX_DISTANCE if find_spec("sklearn") else 0.0)
    return (
        {"pilot": [group[rank].item_id for rank in range(len(answers)) for group in groups if rank < len(group)]}
        if len(groups) < len(answers)
        else {}
    )


def describe(
    assignment: Assignment, count: Callable[[str], int], exact: bool, contexts: Mapping[str, int]
) -> dict[str, Any]:
    """Return the dry run as plain data.

    `contexts` are the workers' context lengths by model, as far as they are known.
    """
    models = assignment.request.models
    context_by_model = {model.name: model.context for model in models.values()} | dict(contexts)
    items = [_item(item, count, context_by_model) for item in assignment.items]
    ignored_files = ignored_files_sentence(item.submission for item in assignment.items)
    return {
        "rubric": assignment.rubric.title,
        "points": assignment.rubric.total,
        "exact_tokens": exact,
        "prompts": len(assignment.tasks),
        "questions": sum(len(task.job.questions) for task in assignment.tasks),
        "prompt_tokens": sum(sum(item["prompts"].values()) for item in items),
        "criteria": [
            {
                "role": aspect,
                "model": model.name,
                "ids": [criterion.id for criterion in assignment.rubric.for_model(aspect)],
            }
            for aspect, model in models.items()
        ],
        "shared_prefix": [_shared_prefix(assignment, aspect, count) for aspect in models],
        "submissions": items,
        "left_out": assignment.request.excluded_paths,
        **_compared_with_roster(assignment),
        **({"ignored_files": ignored_files} if ignored_files else {}),
        **(
            {"examples": {"submissions": [*examples.points], "tokens": count(examples_text(examples))}}
            if (examples := assignment.examples)
            else {}
        ),
    }


def _compared_with_roster(assignment: Assignment) -> dict[str, list[str]]:
    """Return who of the roster handed in nothing, and submissions of nobody in the roster."""
    numbers = {person.number for item in assignment.items for person in item.owner.people}
    roster, is_whole = assignment.request.read_roster(), assignment.request.selection.is_whole
    people = [person for person in roster.by_number.values() if person.number not in numbers and is_whole]
    unmatched_names = [item.submission.name for item in assignment.items if roster.by_number and not item.owner.people]
    return {
        "missing": [roster.display_name(Owner((person,))) for person in people if person.name != TEST_STUDENT],
        **({"unmatched": unmatched_names} if unmatched_names else {}),
    }


def _item(item: Item, count: Callable[[str], int], contexts: Mapping[str, int]) -> dict[str, Any]:
    submission = item.submission
    prompts = {task.aspect: count(prompt_text(task.job.prompt)) for task in item.tasks}
    question_tokens = {
        task.aspect: max([count(question.suffix[0].text) for question in task.job.questions], default=0)
        for task in item.tasks
    }
    too_long = [
        f"{prompts[task.aspect] + question_tokens[task.aspect]:,} tokens of prompt "
        f"and up to {task.job.sampling.max_tokens:,} of answer "
        f"are more than the {contexts[task.job.model]:,} that {task.job.model} holds"
        for task in item.tasks
        if prompts[task.aspect] + question_tokens[task.aspect] + task.job.sampling.max_tokens > contexts[task.job.model]
    ]
    empty_reason = "only the template" if submission.only_template else "nothing of the student's own"
    return {
        "submission": submission.name,
        "person": item.owner.display_name,
        "language": submission.language,
        "problem": submission.problem,
        "empty": submission.empty and not submission.problem,
        **({"link": submission.link} if submission.link else {}),
        "tokens": count_parts(submission, count),
        "images_left_out": submission.images_left_out,
        "cuts": cut_summary(item.cuts),
        "notes": list(submission.notes),
        "student_id": student_id(submission.name),
        "replaces": list(submission.superseded_names),
        "prompts": prompts,
        "review_reasons": list(
            dict.fromkeys(
                reason
                for reason in (
                    f"only a link was handed in: {submission.link}" if submission.link else "",
                    *instruction_flags(submission),
                    item.copy_reason,
                    *submission.doubtful_notes,
                )
                if reason
            )
        ),
        "remarks": [
            *dict.fromkeys(filter(None, (submission.problem, item.owner.question))),
            *([f"{empty_reason}: 0 points without a model"] if submission.empty else []),
            *too_long,
            *(f"truncated: {line}" for line in cut_summary(item.cuts)),
            *(note for note in submission.notes if note not in submission.doubtful_notes),
            *(f"replaces {name}" for name in submission.superseded_names),
            *([f"{plural(submission.images_left_out, 'image')} left out"] if submission.images_left_out else []),
        ],
    }


def _shared_prefix(assignment: Assignment, aspect: str, count: Callable[[str], int]) -> dict[str, Any]:
    """Return how much of a role's prompts is the same for the whole class."""
    jobs = [task.job for task in assignment.tasks if task.aspect == aspect]
    if not jobs:
        return {"role": aspect, "tokens": 0, "percent": 0}
    shared_tokens = count(jobs[0].prompt[0].text)
    total = sum(count(prompt_text(job.prompt)) for job in jobs)
    return {
        "role": aspect,
        "tokens": shared_tokens,
        "percent": round(100 * shared_tokens * len(jobs) / total) if total else 0,
    }


def _models(assignment: Assignment) -> list[str]:
    return sorted({model.name for model in assignment.request.models.values()})


def _outside(settings: Settings, assignment: Assignment, client: Client | None) -> list[str]:
    """Return the hosts outside private networks to which prompts go.

    They come from this configuration and from the workers' own reports.
    """
    from engines.openai.http import outside  # imports an HTTP client, which takes half a second

    names = _models(assignment)
    reported_hosts = {
        outside_in(worker.notes) for worker in (client.workers() if client else ()) if worker.model in names
    }
    configured_models = [settings.models[name] for name in names if name in settings.models]
    places = [
        model.weights["openai"] for model in configured_models if model.allow_external and "openai" in model.weights
    ]
    return sorted((reported_hosts | {outside(place) for place in places}) - {""})


def _counter(assignment: Assignment, client: Client | None) -> tuple[Callable[[str], int], bool, Mapping[str, int]]:
    """Return a function that counts tokens, whether its count is exact, and the contexts for `describe`.

    The count is exact if it comes from the tokenizer of a model that is being served.
    """
    models = _models(assignment)
    if client is None:
        return estimate_tokens, False, {}
    contexts = {registration.model: registration.context for registration in client.workers()}
    if client.count_tokens(models[0], "") is None:
        return estimate_tokens, False, contexts
    # Two models rarely share a tokenizer, but their counts hardly differ, so one count is shown for both.
    return lambda text: client.count_tokens(models[0], text) or 0, True, contexts


def _print(summary: dict[str, Any]) -> None:
    counting_method = (
        "counted with the model's tokenizer" if summary["exact_tokens"] else "estimated: no tokenizer at hand"
    )
    items = summary["submissions"]
    print_table(_COLUMNS, [_row(item) for item in items], right=_COLUMNS[2:])
    print_groups(sorted(saying for item in items for saying in _sayings(item)))
    if summary["left_out"]:
        say(exclusion_sentence(summary["left_out"]))
    if unmatched_names := [one_line(name) for name in summary.get("unmatched", ())]:
        count = f"{len(unmatched_names):,} of {len(items):,}"
        say(shortened(f"{count} names match nobody in the roster; once graded, {SAY_WHOSE}: ", unmatched_names))
    if summary["missing"]:
        start = f"{len(summary['missing']):,} of the roster handed in nothing"
        proviso = ", unless under such a name: " if unmatched_names else ": "
        say(shortened(f"{start}{proviso}", [one_line(name) for name in summary["missing"]]))
    if "ignored_files" in summary:
        say(summary["ignored_files"])
    say(f"{plural(summary['prompts'], 'prompt')}, {summary['prompt_tokens']:,} tokens ({counting_method})")
    if summary["questions"]:
        say(f"{plural(summary['questions'], 'question')}, each after the prompt of its submission, from one KV cache")
    for part in summary["criteria"]:
        say(f"{part['role']}: {part['model']} grades {', '.join(part['ids']) or 'nothing, and writes the summary'}")
    if "examples" in summary:
        tokens = f"{summary['examples']['tokens']:,} tokens that the class shares, computed once for each model"
        say(shortened(f"Graded by you, and examples for the others ({tokens}): ", summary["examples"]["submissions"]))
    for host in summary["outside"]:
        say(f"OUTSIDE: prompts, with students' work, go to {host}, outside private networks")
    for part in summary["shared_prefix"]:
        say(f"{part['role']}: the class shares {part['tokens']:,} tokens, {part['percent']}% of its prompts")


def _limit_sentence(items: Sequence[Item]) -> str:
    """Say how much `max_submission_tokens` cuts or would save; "" if no submission is long."""
    if cut_tokens := sum(cut.dropped_tokens for item in items for cut in item.cuts):
        number = plural(sum(bool(item.cuts) for item in items), "submission")
        return f"{number} cut: {cut_tokens:,} tokens of work that no model reads"
    sizes = [sum(count_parts(item.submission, estimate_tokens).values()) for item in items if item.tasks]
    if saved_tokens := sum(max(0, size - USUAL_TOKENS) for size in sizes):
        return (
            f"nothing is cut; the longest submission has about {max(sizes):,} tokens. max_submission_tokens = "
            f"{USUAL_TOKENS} in [grading] would leave out {saved_tokens:,} of the class's"
        )
    return ""


_COLUMNS = ("submission", "language", "prompt tokens", "needs review", "remarks")  # the last two columns are counts


def _name(item: dict[str, Any]) -> str:
    return one_line(item["person"] or item["submission"])


def _row(item: dict[str, Any]) -> list[str]:
    counts = (sum(item["prompts"].values()), len(item["review_reasons"]), len(item["remarks"]))
    return [_name(item), item["language"], *(f"{count:,}" if count else "" for count in counts)]


def _sayings(item: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what there is to say about a submission, for `print_groups`. Replaced copies are covered by their notes."""
    said_otherwise = {item["problem"], UNMATCHED_QUESTION, *(f"replaces {name}" for name in item["replaces"])}
    texts = {
        "unassigned": [item["problem"]] if item["problem"] == UNASSIGNED_QUESTION else [],
        "can't be read": [item["problem"]] if item["problem"] not in ("", UNASSIGNED_QUESTION) else [],
        "to be reviewed": item["review_reasons"],
        "with remarks": [remark for remark in item["remarks"] if remark not in said_otherwise],
    }
    for heading, reasons in texts.items():
        yield from ((heading, _name(item), one_line(reason)) for reason in reasons)
