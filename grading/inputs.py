"""What a class is graded by: read from the files that were named, and kept in the batch's folder as it was.

A batch grades by what it was planned with: rubric, solution, template, and graded examples. Its copies lie in
`inputs/`, under their digests; `batch.json` says which.

Examples are work that a person graded, shown to the models before the class's: one set a batch, so that nothing but the
class's prefix grows. They are chosen once and kept with their texts, since what is in every prompt must not change with
one student's file. Chosen is for each criterion the work on both sides of a boundary between two numbers of points,
boundaries in the middle of the scale first, the shortest work at each; only work that was graded in every criterion,
that nothing is doubtful about, and that no bound's sample holds; at most half of it, so that the rest can tell what the
examples are worth.
"""

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grading.attacks.detection import instruction_flags
from grading.evaluation.hand_grades import in_class, read_hand_grades
from grading.prompts.prompt import ExampleSet, example_text, fence_for, text_of
from grading.request import GradeRequest
from grading.rubric.rubric import Criterion, Points, Rubric, load_rubric
from grading.submissions.reading import Submission, read_document
from grading.submissions.tokens import estimate_tokens
from messages.errors import BatchError, RubricError, SubmissionError
from producers.storage.private import make_folder, open_ordinary, write_atomically
from producers.storage.shapes import from_json, parse_as

FOLDER = "inputs"
EXAMPLES_OF_A_CRITERION = 4
_CONTEXT_SHARE = 0.25  # share of the smallest context for all examples together
_Graded = Mapping[str, Mapping[str, Points]]  # by submission and criterion
_READERS: dict[str, Callable[[Path], Any]] = {
    "rubric": load_rubric,
    "solution": read_document,
    "template": read_document,
}


def read_inputs(request: GradeRequest) -> tuple[dict[str, Any], dict[str, bytes], list[Path]]:
    """What a class is graded by: documents and their files' bytes, by kind, and files that say something else now.

    A batch's own copy is read, unless the file that was named grades alike: that may have another rule on lateness.
    Raises RubricError, SubmissionError.
    """
    documents, data, changed_files = {}, {}, []
    for kind, reader in _READERS.items():
        named_file: Path | None = getattr(request, kind)
        if not named_file:
            continue
        file = request.copies.get(kind, named_file)
        documents[kind] = reader(file)
        if file != named_file and named_file.exists():
            with suppress(RubricError, SubmissionError):
                now = reader(named_file)
                if _what_grades(now) == _what_grades(documents[kind]):
                    file, documents[kind] = named_file, now
            changed_files += [named_file] if file != named_file else []
        data[kind] = content(file)
    return documents, data, changed_files


def keep_inputs(folder: Path, request: GradeRequest, data: Mapping[str, bytes]) -> dict[str, str]:
    """Keep these files in the batch's folder, on disk on return; their digests, by kind."""
    digests = {kind: hashlib.sha256(kept).hexdigest() for kind, kept in data.items()}
    for kind, digest in digests.items():
        place = _place(folder, kind, digest, getattr(request, kind))
        make_folder(place.parent)
        write_atomically(place, data[kind])
    return digests


def kept_inputs(folder: Path, stored_request: Mapping[str, Any]) -> dict[str, Path]:
    """The batch's copies, by kind; none of an older batch's, nor one that has been changed or lost."""
    places = {
        kind: _place(folder, kind, digest, Path(stored_request.get(kind, "")))
        for kind, digest in stored_request.get("inputs", {}).items()
    }
    changed_kinds = changed_inputs(stored_request, {kind: content(place) for kind, place in places.items()})
    return {kind: place for kind, place in places.items() if kind not in changed_kinds}


def changed_inputs(stored_request: Mapping[str, Any], data: Mapping[str, bytes]) -> list[str]:
    """The kinds of which the batch keeps other content than these files have."""
    digests = stored_request.get("inputs", {})
    return [
        kind for kind, kept in data.items() if kind in digests and digests[kind] != hashlib.sha256(kept).hexdigest()
    ]


def _place(folder: Path, kind: str, digest: str, named_file: Path) -> Path:
    return folder / FOLDER / digest[:8] / (named_file.name if kind in _READERS else f"{kind}.json")


def content(file: Path) -> bytes:
    """A file's content; empty if the file is gone."""
    with suppress(OSError), open_ordinary(file) as opened_file:
        return opened_file.read()
    return b""


def _what_grades(document: Rubric | Submission) -> object:
    return document.digest if isinstance(document, Rubric) else document.parts


# --- graded examples


def read_examples(
    request: GradeRequest,
    rubric: Rubric,
    submissions: Sequence[Submission],
    excluded_names: Collection[str],
    secret: bytes,
) -> ExampleSet | None:
    """The batch's set, or a new one where there is none yet or other hand grades are named; None: none is wanted.

    Texts are as they were handed in, with the names in them. Raises SubmissionError where no work can be an example,
    ExportError, EvaluationError, BatchError.
    """
    if not request.examples:
        return None
    data = content(request.examples)
    source, kept_file = hashlib.sha256(data).hexdigest(), request.copies.get("examples")
    try:
        kept_set = parse_as(ExampleSet, from_json(content(kept_file)), "the examples") if kept_file else None
    except ValueError as error:
        raise BatchError(f"{kept_file} can't be read ({error}); restore it") from None
    if isinstance(kept_set, ExampleSet) and (request.selection.from_manifest or kept_set.source == source):
        return kept_set
    ids = [criterion.id for criterion in rubric.criteria]
    by_hand = in_class(read_hand_grades(data, str(request.examples)), [work.name for work in submissions], ids)
    points: dict[str, dict[str, Points]] = {}
    for (name, id, _), given_points in sorted(by_hand.items(), reverse=True):  # of several people's the first
        points.setdefault(name, {})[id] = given_points
    works = {
        work.name: Submission(work.name, work.language, work.parts)
        for work in submissions
        if work.name in points.keys() - excluded_names and work.is_gradable
        if all(points[work.name].get(criterion.id) in criterion.grid for criterion in rubric.criteria)
        if not work.doubtful_notes and not instruction_flags(work)
    }
    room = _CONTEXT_SHARE * min(model.context for model in request.models.values())
    chosen = _choose(works, {name: points[name] for name in works}, rubric, room)
    if not chosen:
        raise SubmissionError(
            f"no work in {request.examples} can be an example: that takes two submissions or more with points for each "
            "criterion, nothing doubtful about them, none of them in a bound's sample, and short enough for the model"
        )
    fence = fence_for(secret, "\n".join(["graded examples", *(text_of(works[name]) for name in chosen)]))
    return ExampleSet(
        source,
        fence,
        tuple(works[name] for name in chosen),
        {name: {id: points[name][id] for id in ids} for name in chosen},
    )


def _choose(works: Mapping[str, Submission], graded: _Graded, rubric: Rubric, room: float) -> list[str]:
    """In turn for each criterion, while there is room (tokens)."""
    sizes = {name: estimate_tokens(example_text(works[name], points, "")) for name, points in graded.items()}
    beside = (_beside_boundaries(criterion, graded, sizes) for criterion in rubric.criteria)
    names = dict.fromkeys(filter(None, itertools.chain.from_iterable(itertools.zip_longest(*beside))))
    chosen: list[str] = []
    for name in list(names)[: len(graded) // 2]:
        if sum(sizes[other] for other in [*chosen, name]) <= room:
            chosen.append(name)
    return chosen


def _beside_boundaries(criterion: Criterion, graded: _Graded, sizes: Mapping[str, int]) -> list[str]:
    longest_first = sorted(graded, key=lambda name: -sizes[name])
    shortest = {graded[name][criterion.id]: name for name in longest_first}  # the last of each
    boundaries = sorted(
        itertools.pairwise(sorted(shortest)), key=lambda pair: abs(sum(pair) - criterion.points - criterion.minimum)
    )
    steps = dict.fromkeys(points for pair in boundaries for points in pair) or shortest
    return [shortest[points] for points in steps][:EXAMPLES_OF_A_CRITERION]
