"""The files that a class is graded by: reads them, and keeps copies in the batch's folder.

A batch always grades with the rubric, solution, template and graded examples that it was planned with. The copies are
in `inputs/`, under their digests, which `batch.json` lists.

Examples are work that a person graded; the models see them before the class's work. There is one set for each batch, so
only the shared prefix of the prompts grows. The examples are chosen once and kept with their texts, because a text in
every prompt must not change when one student's file changes.

For each criterion, the chosen examples are those on both sides of a boundary between two numbers of points. Boundaries
in the middle of the scale come first, and for each number of points the shortest work is taken. Work can be chosen only
if every criterion was graded, nothing about it is doubtful, and it is not in a bound's sample. At most half of the
graded work is chosen, so that the rest can show what the examples are worth.
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
_CONTEXT_SHARE = 0.25  # all examples together take at most this share of the models' smallest context
_Graded = Mapping[str, Mapping[str, Points]]  # points by submission and criterion
_READERS: dict[str, Callable[[Path], Any]] = {
    "rubric": load_rubric,
    "solution": read_document,
    "template": read_document,
}


def read_inputs(request: GradeRequest) -> tuple[dict[str, Any], dict[str, bytes], list[Path]]:
    """Read what a class is graded by. Returns documents by kind, their bytes by kind, and the files that have changed.

    The batch's copy is used, unless the named file would grade in the same way: such a file may have another late rule.
    A named file that differs from the copy in use counts as changed. Raises RubricError, SubmissionError.
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
    """Keep these files in the batch's folder, on disk on return. Returns their digests by kind."""
    digests = {kind: hashlib.sha256(kept).hexdigest() for kind, kept in data.items()}
    for kind, digest in digests.items():
        place = _place(folder, kind, digest, getattr(request, kind))
        make_folder(place.parent)
        write_atomically(place, data[kind])
    return digests


def kept_inputs(folder: Path, stored_request: Mapping[str, Any]) -> dict[str, Path]:
    """Return the paths of the batch's copies by kind.

    Copies that were changed or lost are left out; old batches have none.
    """
    places = {
        kind: _place(folder, kind, digest, Path(stored_request.get(kind, "")))
        for kind, digest in stored_request.get("inputs", {}).items()
    }
    changed_kinds = changed_inputs(stored_request, {kind: content(place) for kind, place in places.items()})
    return {kind: place for kind, place in places.items() if kind not in changed_kinds}


def changed_inputs(stored_request: Mapping[str, Any], data: Mapping[str, bytes]) -> list[str]:
    """Return the kinds of file whose content differs from the batch's copy."""
    digests = stored_request.get("inputs", {})
    return [
        kind for kind, kept in data.items() if kind in digests and digests[kind] != hashlib.sha256(kept).hexdigest()
    ]


def _place(folder: Path, kind: str, digest: str, named_file: Path) -> Path:
    return folder / FOLDER / digest[:8] / (named_file.name if kind in _READERS else f"{kind}.json")


def content(file: Path) -> bytes:
    """Return a file's content, or nothing if the file is gone."""
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
    """Return the batch's examples, or choose new ones if it has none or other hand grades are named.

    None: none are wanted.

    The texts are as they were handed in, including names. Raises SubmissionError if no work can be an example,
    ExportError, EvaluationError, BatchError.
    """
    if not request.examples:
        return None
    data = content(request.examples)
    source, kept_file = hashlib.sha256(data).hexdigest(), request.copies.get("examples")
    try:
        kept_set = parse_as(ExampleSet, from_json(content(kept_file)), "the examples") if kept_file else None
    except ValueError as error:
        raise BatchError(f"{kept_file} can't be read ({error}): restore the file") from None
    if isinstance(kept_set, ExampleSet) and (request.selection.from_manifest or kept_set.source == source):
        return kept_set
    ids = [criterion.id for criterion in rubric.criteria]
    by_hand = in_class(read_hand_grades(data, str(request.examples)), [work.name for work in submissions], ids)
    points: dict[str, dict[str, Points]] = {}
    # If several people graded the same criterion of a work, only the person whose name comes first alphabetically
    # counts.
    for (name, id, _), given_points in sorted(by_hand.items(), reverse=True):
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
            f"{request.examples} grades {len(points)} of this class's submissions (by the names that --dry-run shows). "
            f"Usable as examples: {len(works)}; two are needed. Each needs points for each criterion, must fit into "
            "the model's context, must have no doubts, and must not be in the sample of an error bound"
        )
    fence = fence_for(secret, "\n".join(["graded examples", *(text_of(works[name]) for name in chosen)]))
    return ExampleSet(
        source,
        fence,
        tuple(works[name] for name in chosen),
        {name: {id: points[name][id] for id in ids} for name in chosen},
    )


def _choose(works: Mapping[str, Submission], graded: _Graded, rubric: Rubric, room: float) -> list[str]:
    """Choose examples for each criterion in turn, while there is room. `room` is in tokens."""
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
    # Works with the same points have the same key, so only the last of them stays, and that is the shortest.
    shortest = {graded[name][criterion.id]: name for name in longest_first}
    boundaries = sorted(
        itertools.pairwise(sorted(shortest)), key=lambda pair: abs(sum(pair) - criterion.points - criterion.minimum)
    )
    steps = dict.fromkeys(points for pair in boundaries for points in pair) or shortest
    return [shortest[points] for points in steps][:EXAMPLES_OF_A_CRITERION]
