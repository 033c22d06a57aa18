"""Batch folders: a small class graded by the simulated engine with every file that a folder may get, and exported."""

import asyncio
import contextlib
import html.parser
import io
import json
import os
import re
import secrets
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from desk.assignments import Inputs, grading_work, read_inputs, save_inputs, save_rubric, save_submissions
from grading.reviews import Override, append_override, current_decisions, read_overrides, undo_override, version_of
from kvasir.cli import main
from kvasir.compat import BusinessAnalyticsGraderV2, DisaggregatedClient, DisaggregatedInference
from tests.support.waiting import wait_until

RELEASE = Path(__file__).parent / "release_0_1_0"
MODEL = "tiny:1b"
CONFIG = f"""\
[grading]
code_model = "{MODEL}"
feedback_model = "{MODEL}"
temperature = 0.0
notice = "These are no real grades."

[models."{MODEL}"]
weights = {{ simulated = "sim:scale=0,answer=40" }}
context = 8192
slots = 1
prefill_slots = 1
"""
HOME = "{HOME}"
ADA = "fairweatherada_48101_910001_hw4.R"
BO = "wubo_LATE_48102_910002_hw4.R"
_WORK = ("class/handed-in", "--rubric", "class/rubric.yaml", "--solution", "class/solution.R")
CLASS = (*_WORK, "--template", "class/template.R", "--quiet", "--json")
AT = 1_800_000_000.0


@contextlib.contextmanager
def workplace(folder: Path) -> Iterator[None]:
    """`folder` with the class and a configuration, as the place where commands run; the environment is as before."""
    environ, cwd = dict(os.environ), Path.cwd()
    shutil.copytree(RELEASE / "class", folder / "class")
    (folder / "kvasir.toml").write_text(CONFIG, "utf-8")
    os.environ |= {
        "XDG_CONFIG_HOME": str(folder / "nowhere"),
        "HOME": str(folder),
        "USER": "ada",
        "LOGNAME": "ada",
        "COLUMNS": "200",
    }
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environ)


def run(*words: str) -> dict[str, Any]:
    """A command, here in this process: its exit code and what it printed."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    printed = out.getvalue()
    shown: Any = [" ".join(line.split()) for line in printed.splitlines()]
    with contextlib.suppress(ValueError):
        shown = json.loads(printed)
    return {"command": ["kvasir", *words], "code": code, "stdout": shown, "stderr": err.getvalue().splitlines()}


def identity(folder: Path, number: int) -> None:
    """A batch with nothing in it yet, whose id, secret and date are known."""
    folder.mkdir(parents=True)
    head = {"version": 1, "batch_id": f"batch-20270115-0000000{number}", "created_at": AT, "secret": "0b" * 16}
    rest: dict[str, Any] = {"prompt_form": 3, "request": {}, "runs": {}, "jobs": []}
    (folder / "batch.json").write_text(json.dumps(head | rest), "utf-8")


def record(folder: Path) -> None:
    """Make the batches in `folder`/batches, and what the commands said as `folder`/outputs.json."""
    home = folder / "home"
    home.mkdir()
    with workplace(home):
        said = [*_whole_class(Path("class-4")), *_by_criteria(Path("criteria")), *_prompts(Path("prompts"))]
        _desk(Path("desk"))
        said += [*_keys(), *_refusals()]
        (folder / "earlier-names.json").write_text(json.dumps(_earlier(), indent=1) + "\n", "utf-8")
    text = json.dumps(said, indent=1, ensure_ascii=False) + "\n"
    (folder / "outputs.json").write_text(steady(text, home), "utf-8")
    for name in ("class-4", "criteria", "prompts", "desk"):
        _copy(home / name, folder / "batches" / name, home)
    shutil.rmtree(home)


def _whole_class(out: Path) -> Iterator[dict[str, Any]]:
    identity(out, 1)
    place = str(out)
    yield run("grade", *CLASS, "--dry-run")
    yield run("grade", *CLASS, "--out", place, "--samples", "2")
    _review(out)
    yield run("requests", place, "--from", "class/asked.csv", "--by", "Ada", "--json")
    asked = [json.loads(line) for line in (out / "requests.jsonl").read_text("utf-8").splitlines()]
    yield run("requests", place, "--answer", asked[0]["id"], "--reply", "You are right.", "--by", "Bo")
    yield run("requests", place, "--to", str(out / "replies.csv"), "--json")
    yield run("bound", place, "--draw", "1,2", "--within", "0.5", "--at-most", "50", "--by", "Ada", "--json")
    sheet = (out / "hand-grades.csv").read_text("utf-8").splitlines()
    (out / "hand-grades.csv").write_text("\n".join([sheet[0], sheet[1].replace('"","",""', "2,1.5,seen"), ""]), "utf-8")
    yield run("bound", place, "--json")
    yield run("bound", place, "--more", "--json")
    export = ("export", place, "--include-unreviewed", "--yes", "--format")
    book = ("--gradebook", "class/gradebook.csv", "--assignment", "701", "--times", "class/times.csv")
    yield run(*export, "canvas", *book)
    yield run(*export, "canvas", *book, "--dry-run")
    yield run(*export, "moodle", "--worksheet", "class/worksheet.csv")
    yield run(*export, "moodle-feedback")
    yield run(*export, "csv")
    yield run(*export, "feedback", "--as", "md")
    yield run(*export, "feedback", "--as", "html")
    yield run("export", place, "--format", "csv", "--to", str(out / "without-unreviewed.csv"))
    yield run("results", place, "--json")


def _review(out: Path) -> None:
    """Decisions about a criterion and about the whole of two submissions; one of them is withdrawn."""
    items = {
        row["submission"]: row["item_id"] for row in json.loads((out / "grades.json").read_text("utf-8"))["grades"]
    }
    one = Override(items[ADA], "works", 1.5, "It does run.", "seen by me", "Ada", AT)
    append_override(out, one)
    standing = current_decisions(read_overrides(out), items[ADA])
    two = replace(one, criterion_id=None, points=None, feedback=None, reason="looked at", time=AT + 1)
    append_override(out, replace(two, version=version_of(standing.values())))
    whole = Override(items[BO], None, 4, "Überarbeitet", "agreed", "Bo", AT + 2)
    append_override(out, whole)
    undo_override(out, items[BO], version_of([whole]), [], "Ada")


def _by_criteria(out: Path) -> Iterator[dict[str, Any]]:
    identity(out, 2)
    place = str(out)
    rubric = Path("class/rubric.yaml")
    before = rubric.read_bytes()
    yield run("grade", *CLASS, "--out", place, "--ask", "criteria", "--only", f"{ADA},{BO}")
    shutil.copy("class/rubric-later.yaml", rubric)
    yield run("regrade", place, "--criterion", "works", "--yes", "--quiet", "--json")
    rubric.write_bytes(before)


def _prompts(out: Path) -> Iterator[dict[str, Any]]:
    identity(out, 3)
    yield run("run", "class/prompts.jsonl", "--model", MODEL, "--out", str(out), "--quiet", "--json")


def _desk(folder: Path) -> None:
    """An assignment of the desk's that was not graded yet, and the record of a process that it started."""
    folder.mkdir()
    work = save_submissions(folder, [(ADA, Path("class/handed-in", ADA).read_bytes())])
    rubric = save_rubric(folder, "rubric.yaml", Path("class/rubric.yaml").read_bytes())
    paths = [str(path.resolve()) for path in (work, rubric)]
    save_inputs(folder, Inputs("Homework 4", *paths, "", "", MODEL, MODEL, AT, "criteria", 3))
    save_inputs(folder, read_inputs(folder))
    process = grading_work(folder)
    process.start([sys.executable, "-c", "print('{}')"], limit=5, names=[ADA])
    wait_until(lambda: not process.is_alive and process.exit_code == 0, "the process has ended")


def _keys() -> Iterator[dict[str, Any]]:
    added = run("keys", "add", "forms", "--model", MODEL, "--state", "gateway")
    yield added | {"stdout": [re.sub(r"^kv-.{43}$", "<key>", line) for line in added["stdout"]]}
    listed = run("keys", "list", "--state", "gateway", "--json")
    yield listed | {"stdout": [each | {"created": 0} for each in listed["stdout"]]}
    yield run("keys", "revoke", "forms", "--state", "gateway")


def _earlier() -> dict[str, Any]:
    """What the earlier scripts' names give: the keys of each dict."""
    with DisaggregatedClient() as client:
        text, measured = client.generate(model=MODEL, prompt="What is a queue?", max_tokens=8)
    with DisaggregatedClient("http://a", "http://b", MODEL) as client:
        whole = client.generate("What is a queue?", max_tokens=8)
    inference = DisaggregatedInference({"prefill_servers": [], "decode_servers": []})
    answered = asyncio.run(inference.generate("What is a queue?", MODEL, 8))
    inference.close()
    grader = BusinessAnalyticsGraderV2(MODEL, MODEL, rubric_path="class/rubric.yaml")
    work = Path("class/handed-in", ADA).read_text("utf-8")
    token_hex = secrets.token_hex
    with (
        mock.patch("secrets.token_hex", lambda size: "0b" * size if size == 8 else token_hex(size)),
        mock.patch("secrets.token_bytes", lambda size: b"\x0b" * size),
    ):
        graded = grader.grade_submission(work)
    return {
        "DisaggregatedClient(path).generate": [type(text).__name__, sorted(measured)],
        "DisaggregatedClient(urls).generate": sorted(whole),
        "DisaggregatedInference.generate": sorted(answered),
        "grade_submission": kinds(graded),
    }


def kinds(value: Any) -> Any:
    """Keys and the kinds of their values."""
    if isinstance(value, dict):
        return {str(name): kinds(each) for name, each in sorted(value.items())}
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def _refusals() -> Iterator[dict[str, Any]]:
    yield run("grade", "nowhere", "--rubric", "class/rubric.yaml")
    misspelt = run("grade", "class/handed-in", "--rubic", "class/rubric.yaml")
    yield misspelt | {"stderr": "<what click says>"}
    yield run("export", "nowhere", "--format", "csv")
    yield run("config")
    yield run("--config", "nowhere.toml", "config")


# --- what can't be the same twice


def steady(text: str, home: Path) -> str:
    """Text with one place, one clock and one worker, whoever made it where and when."""
    for place in {str(home.resolve()), str(home)}:
        text = text.replace(place, HOME)
    text = re.sub(r'("\w+_s": ?)[0-9][0-9.e+-]*', r"\g<1>0.25", text)
    text = re.sub(r'("(?:at|time|drawn_at|created_at|started_at)": ?)[0-9.]+', rf"\g<1>{AT}", text)
    # What finds a KV cache of the class's stored, and what came before it, is a matter of moments.
    text = re.sub(r'("(?:computed_tokens|restored_tokens|put_bytes)": ?)\d+', r"\g<1>64", text)
    text = re.sub(r"computed by prefill [\d,]+, by decode", "computed by prefill 64, by decode", text)
    text = re.sub(r'("worker_id": ?)"[^"]+"', r'\g<1>"host.1.a"', text)
    text = re.sub(r'("pid": ?)\d+', r"\g<1>4711", text)
    text = re.sub(r'("process": ?)"[^"]*"', r'\g<1>"boot 1"', text)
    text = text.replace(json.dumps(sys.executable)[1:-1], "PYTHON")
    return re.sub(r"\b20\d\d-\d\d-\d\d \d\d:\d\d\b", "<minute>", text)


def _copy(batch: Path, to: Path, home: Path) -> None:
    """All files as text; zips as folders; lines of journals in order; of the report what is markup.

    Without what was added since 0.1.0, so that its folders stay those of a batch that has none of it: the copies of
    what grades, and their digests.
    """
    for path in sorted(batch.rglob("*")):
        place = to / path.relative_to(batch)
        if path.is_dir() or path.suffix == ".lock" or path.name == "lock" or "inputs" in path.relative_to(batch).parts:
            continue
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    _write(place / name, archive.read(name).decode())
            continue
        text = steady(path.read_bytes().decode(), home)
        if path.name == "batch.json":
            text = re.sub(r',\s*"(inputs|submissions)": \{[^}]*\}', "", text)
        if path.name in ("results.jsonl", "submitted.jsonl", "answers.jsonl", "errors.jsonl"):
            text = "".join(sorted(text.splitlines(keepends=True)))
        _write(place, structure(text) if path.name == "report.html" else text)


def _write(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(text.encode())


class _Structure(html.parser.HTMLParser):
    """A line for each tag and text, without styles, scripts and drawings."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if not self._inside:
            self.lines.append(" ".join([tag, *(f"{name}={value!r}" for name, value in attributes)]))
        if not self._inside and tag in ("style", "script", "svg"):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if not self._inside and data.strip():
            self.lines.append(f"  {' '.join(data.split())}")


def structure(page: str) -> str:
    """A page's tags with their attributes, and its texts."""
    parser = _Structure()
    parser.feed(page)
    return "\n".join(parser.lines) + "\n"
