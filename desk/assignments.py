"""Assignments on disk: the inputs that an instructor gave the desk, and the commands made from them."""

import hashlib
import json
import os
import re
import tempfile
import time
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from desk.backend import Backend
from desk.work import Work
from grading.roster import EMPTY_ROSTER, keep_roster, kept_files, roster_in
from grading.rubric.rubric import Rubric, load_rubric
from grading.submissions.reading import read_document
from grading.tables import read_sheet
from infra.config.ownership import why_not_ours
from messages.errors import BatchError, KvasirError, RubricError, SubmissionError, UsageError
from producers.batch import batch as batches
from producers.storage.private import make_folder, read_ordinary, write_atomically
from producers.storage.shapes import from_json, parse_as
from producers.words import as_names

FILE = "desk.json"
TRIAL_SIZES = (5, 10)

_ACCENTS = re.compile(r"[\u0300-\u036f]")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\:]")


class InputError(UsageError):
    """Something that was typed or uploaded can't be used. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of an assignment. Paths are kept as text; "" means none."""

    title: str
    submissions: str
    rubric: str
    solution: str = ""
    template: str = ""
    code_model: str = ""
    feedback_model: str = ""
    created_at: float = 0.0
    # The value for `kvasir grade --ask`. "" means the same as "together".
    ask: str = ""
    samples: int = 1
    examples: str = ""  # the file of hand grades for `kvasir grade --examples`


# --- finding and creating assignments


def find_folders(home: Path, extra_folders: Iterable[Path] = ()) -> list[Path]:
    """Return the folders of all assignments: those below `home`, by name, then `extra_folders`."""
    below = sorted(home.iterdir()) if home.is_dir() else []
    candidates = [*below, *extra_folders]
    return list(dict.fromkeys(path for path in candidates if (path / FILE).is_file() or batches.exists(path)))


def create_folder(home: Path, title: str) -> Path:
    """Create a folder below `home`, named after the title. Raises InputError if that is impossible."""
    if not title.strip():
        raise InputError("give the assignment a name")
    letters = _ACCENTS.sub("", unicodedata.normalize("NFKD", title.casefold()))
    slug = re.sub(r"[^a-z0-9]+", "-", letters).strip("-")[:40] or "assignment"
    for number in range(1, 1000):
        folder = home / (slug if number == 1 else f"{slug}-{number}")
        try:
            make_folder(home)
            folder.mkdir(0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"can't make a folder in {home}: {error.strerror}") from None
        return folder
    raise InputError(f"{home} has too many assignments called {title!r:.60}; choose another name")


def read_inputs(folder: Path) -> Inputs:
    """Read the inputs given to the desk, or to the command that made this batch. Raises BatchError."""
    path = folder / FILE
    if not path.is_file():
        return _from_manifest(folder)
    try:
        return _check_inputs(parse_as(Inputs, from_json(read_ordinary(path)), "the assignment"), path)
    except (OSError, ValueError) as error:
        raise BatchError(
            f"{path} can't be read ({error}); restore the file, or remove the assignment's folder"
        ) from None


def _check_inputs(inputs: Inputs, path: Path) -> Inputs:
    """Check the recorded values. Raises BatchError if one is not text, or would be read as an option."""
    texts = {name: value for name, value in asdict(inputs).items() if name not in ("created_at", "samples")}
    wrong = [name for name, value in texts.items() if not isinstance(value, str)]
    wrong += [name for name, value in texts.items() if name != "title" and str(value).startswith("-")]
    if wrong:
        raise BatchError(
            f"{path}: {wrong[0]} can't be {texts[wrong[0]]!r:.60}; correct the file, or remove the assignment's folder"
        )
    return inputs


def save_inputs(folder: Path, inputs: Inputs) -> None:
    """Keep the inputs. They are on disk on return. Raises BatchError."""
    dated_inputs = replace(inputs, created_at=inputs.created_at or time.time())
    fields = {name: value for name, value in asdict(dated_inputs).items() if name != "examples" or value}
    write_atomically(folder / FILE, json.dumps(fields, indent=1, ensure_ascii=False))


def use_rubric(folder: Path, rubric: Path) -> None:
    """Use this version of the rubric from the start.

    Raises InputError if the class has been graded: then a round is needed.
    """
    if batches.exists(folder):
        raise InputError("the class is already graded; to use this rubric, start a regrade")
    save_inputs(folder, replace(read_inputs(folder), rubric=str(rubric)))


def _from_manifest(folder: Path) -> Inputs:
    request = batches.manifest_of(folder)["request"]
    models = request.get("models", {})
    inputs = Inputs(
        _title(request.get("rubric", "")) or folder.resolve().name,
        request.get("folder", ""),
        request.get("rubric", ""),
        request.get("solution", ""),
        request.get("template", ""),
        models.get("code", ""),
        models.get("feedback", ""),
        ask=request.get("ask", ""),
        samples=request.get("samples", 1),
        examples=request.get("examples", ""),
    )
    return _check_inputs(inputs, folder / "batch.json")


def _title(rubric: str) -> str:
    try:
        return load_rubric(Path(rubric)).title
    except RubricError:
        return ""


# --- uploaded files and typed paths


def uploaded_documents(folder: Path) -> list[Path]:
    """Return the solution and template that were uploaded to the desk; an empty result if desk.json names none."""
    try:
        inputs = read_inputs(folder) if (folder / FILE).is_file() else Inputs("", "", "")
    except BatchError:
        return []
    places = [(kind, Path(getattr(inputs, kind))) for kind in ("solution", "template")]
    document_paths = [folder / kind / path.name for kind, path in places if path.name and path.parent.name == kind]
    return [path for path in document_paths if path.is_file() and not path.parent.is_symlink()]


def save_file(folder: Path, name: str, data: bytes) -> Path:
    """Keep an uploaded file in `folder`, under its name without any path. Raises InputError or BatchError."""
    plain = _plain(name)
    try:
        make_folder(folder)
    except OSError as error:
        raise InputError(f"can't save {plain}: {error.strerror}") from None
    write_atomically(folder / plain, data)
    return folder / plain


def _plain(name: str) -> str:
    plain = _UNSAFE.sub("_", PurePosixPath(name.replace("\\", "/")).name).strip(". ")
    if not plain:
        raise InputError(f"the desk can't store a file named {name!r:.60}; rename it")
    return plain


def check_uploads(names: Sequence[str]) -> None:
    """Raise InputError if there is no upload, or if two have the same name.

    Names that differ only in case count as the same.
    """
    if not names:
        raise InputError("upload the submissions, or name a folder on this machine")
    names_by_key: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", _plain(name)).casefold()
        earlier_name = names_by_key.get(key)
        names_by_key[key] = name
        if earlier_name is not None:
            clash = (
                f"are called {name!r:.80}"
                if name == earlier_name
                else f"{earlier_name!r:.80} and {name!r:.80} would have the same name on disk"
            )
            raise InputError(
                f"two uploaded files {clash}: rename one of them, or upload a zip with a folder for each student"
            )


def check_zip(name: str, data: IO[bytes]) -> None:
    """Raise InputError if the class's zip can't be read, for example because its download was cut off."""
    if PurePosixPath(name).suffix.lower() == ".zip" and not zipfile.is_zipfile(data):
        raise InputError(f"{name!r:.80} can't be read as a zip: download it from the learning platform again")


def save_submissions(folder: Path, files: Sequence[tuple[str, bytes]]) -> Path:
    """Keep uploaded (name, data) pairs: a single file or zip as it is, several in a folder. Raises InputError."""
    names = [name for name, _ in files]
    check_uploads(names)
    place = folder / "handed-in" / hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    saved_paths = [save_file(place, name, data) for name, data in files]
    return saved_paths[0] if len(saved_paths) == 1 else place


def find_submissions(text: str) -> Path:
    """Return the path of the submissions that was typed. Raises InputError if it does not exist."""
    if not text.strip():
        raise InputError("submissions: no upload has arrived and no path is given; wait for the upload, or type a path")
    path = Path(text.strip()).expanduser()
    # `Path.exists` raises an error for some paths. `os.path.exists` returns False for them.
    if not os.path.exists(path):
        raise InputError(
            f"submissions: {text.strip()} does not exist; type the path of a file or folder on this machine"
        )
    return path.resolve()


def save_rubric(folder: Path, name: str, data: bytes) -> Path:
    """Keep a version of the rubric under its digest. A changed text gets a new file, so old grades keep their rubric.

    Raises RubricError if it can't be used.
    """
    suffix = PurePosixPath(name).suffix.lower()
    return save_file(folder / "rubrics", f"{check_rubric(name, data).digest[:8]}{suffix}", data)


def check_rubric(name: str, data: bytes) -> Rubric:
    """Parse the rubric in an uploaded or edited file.

    Raises RubricError, with the file's name as its author knows it.
    """
    rubric: Rubric = _read_upload(name, data, load_rubric)
    return rubric


def check_document(name: str, data: bytes) -> None:
    """Raise SubmissionError if an uploaded solution or template can't be read."""
    _read_upload(name, data, read_document)


def _read_upload(name: str, data: bytes, read: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder, f"upload{PurePosixPath(name).suffix.lower()}")
        draft.write_bytes(data)
        try:
            return read(draft)
        except (RubricError, SubmissionError) as error:
            raise type(error)(str(error).replace(str(draft), name)) from None


def rubric_versions(folder: Path) -> list[Path]:
    """Return the kept versions, newest first."""
    paths = (folder / "rubrics").glob("[!.]*")  # while a version is being written, its name begins with a dot
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def version_name(folder: Path, rubric: Path) -> str:
    """Return a kept version's name, such as `version 2, 2026-11-22 10:56`, or else the file's name."""
    oldest_first = rubric_versions(folder)[::-1]
    if rubric not in oldest_first:
        return rubric.name
    saved_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(rubric.stat().st_mtime))
    return f"version {oldest_first.index(rubric) + 1}, {saved_at}"


# --- the commands


def dry_run_work(folder: Path) -> Work:
    """Return the work (process) of an assignment's dry run."""
    return Work(folder / "runs" / "dry-run")


def grading_work(folder: Path) -> Work:
    """Return the work (process) that grades an assignment, or one of its rounds."""
    return Work(folder / "runs" / "grade")


def dry_run_command(backend: Backend, folder: Path, inputs: Inputs) -> list[str]:
    """Return the command for a dry run. It uses the roster in the assignment's `folder`."""
    rosters = [word for path in kept_files(folder) for word in ("--roster", str(path))]
    return backend.command("grade", *_words(inputs), *rosters, "--dry-run", "--json")


def save_roster(folder: Path, files: Iterable[tuple[str, bytes]]) -> int:
    """Keep a roster from uploaded (name, data) pairs; returns how many people it has.

    Raises ExportError, BatchError.
    """
    roster = EMPTY_ROSTER
    for name, data in files:
        roster = roster.with_more(roster_in(read_sheet(data, name)))
    keep_roster(folder, roster)
    return len(roster.people)


def grade_command(backend: Backend, inputs: Inputs, out: Path, limit: int = 0, names: Sequence[str] = ()) -> list[str]:
    """Return the command that grades into `out`. It continues where an earlier run stopped."""
    selection = ["--limit", str(limit)] if limit else []
    selection += ["--only", as_names(names)] if names else []
    log_options = ("--log-level", "info", "--log-style", "json")
    return backend.command(
        *log_options, "grade", *_words(inputs), "--out", str(out), "--yes", "--quiet", "--json", *selection
    )


def _words(inputs: Inputs) -> list[str]:
    options = {
        "--rubric": inputs.rubric,
        "--solution": inputs.solution,
        "--template": inputs.template,
        "--examples": inputs.examples,
        "--code-model": inputs.code_model,
        "--feedback-model": inputs.feedback_model,
        "--ask": inputs.ask,
        "--samples": str(inputs.samples) if inputs.samples > 1 else "",
    }
    return [inputs.submissions, *(word for option, value in options.items() if value for word in (option, value))]


def resume_interrupted(backend: Backend) -> list[tuple[Path, str]]:
    """Continue the gradings below the desk's home that were interrupted. Their journals tell what is done.

    Returns their folders, each with the reason why it was not continued, or "" if it was. The command is made from the
    assignment's inputs.
    """
    outcomes = []
    for folder in find_folders(backend.home):
        for place in (folder, *sorted((folder / "rounds").glob("*/"))):
            work = grading_work(place)
            if work.is_interrupted:
                try:
                    refusal = _why_not_trusted(work.folder, backend.home)
                    if not refusal:
                        work.start(*_resume_arguments(backend, place, work))
                except KvasirError as error:
                    refusal = str(error)
                outcomes.append((folder, refusal))
    return outcomes


def _resume_arguments(backend: Backend, place: Path, work: Work) -> tuple[list[str], str, int, tuple[str, ...]]:
    """Return the command that continues the work. Raises BatchError if the inputs can't be read."""
    record = work.record()
    assert record
    if record.kind == "retry":
        return backend.command("watch", str(place), "--quiet", "--json"), record.kind, 0, ()
    command = grade_command(backend, read_inputs(place), place, record.limit, record.only)
    return command, record.kind, record.limit, record.only


def _why_not_trusted(work: Path, home: Path) -> str:
    """Return why other users could have changed files between `home` and a work's folder; "" if they could not."""
    below = [work, *(place for place in work.parents if home in place.parents)]
    files = (place / name for place in below for name in ("work.json", FILE, "batch.json"))
    for path in (home, *below, *(file for file in files if file.exists())):
        if path != home and path.is_symlink():
            return f"{path} is a link"
        if problem := why_not_ours(path):
            return problem
    return ""
