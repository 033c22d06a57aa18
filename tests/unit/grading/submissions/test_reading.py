"""Reading any submission takes seconds and little memory, and one student never stops a class."""

import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from grading.submissions.reading import read_submissions

slow = pytest.mark.system
MIB = 1 << 20
LIMIT = 63 * MIB  # just below what one file may have
SECONDS, MEMORY = 2.0, 200 * MIB  # what reading may take; tests fail at twice that, in processor time
# Reads, finds names, cuts, makes the prompt's text: all that a submission goes through before a model sees it.
READING = """
import resource, sys, time
from pathlib import Path
from grading.prompts.prompt import fence_for, text_of
from grading.names.pseudonyms import pseudonymise
from grading.quotes import submission_texts
from grading.submissions.reading import read_submissions
from grading.submissions.tokens import estimate_tokens
from grading.submissions.truncation import Limits, truncate
from tests.support.memory import peak_bytes

resource.setrlimit(resource.RLIMIT_CPU, (10, 10))  # so that what takes minutes fails in seconds
before = time.process_time()
[submission] = pseudonymise(read_submissions(Path(sys.argv[1])), b"secret")
short, _ = truncate(submission, Limits(), estimate_tokens)
fence_for(b"secret", text_of(short))
submission_texts(submission)
print(time.process_time() - before, peak_bytes())
"""


def repeated(piece: str, size: int) -> bytes:
    data = piece.encode()
    return data * (size // len(data))


def notebook(*outputs: object, source: str = "x") -> bytes:
    cell = {"cell_type": "code", "source": source, "execution_count": 1, "outputs": list(outputs)}
    return json.dumps({"cells": [cell], "metadata": {"kernelspec": {"name": "python3"}}}).encode()


def stream(text: str) -> dict[str, object]:
    return {"output_type": "stream", "name": "stdout", "text": text}


def picture(size: int) -> bytes:
    plot = {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo\n" * (size // 12)}}
    return notebook(plot, stream("mean 4.5"))


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "words of a letter": (".txt", lambda: repeated("a ", LIMIT)),
    "a line of one letter": (".R", lambda: repeated("a", LIMIT)),
    "short lines": (".py", lambda: repeated("x\n", LIMIT)),
    "marks on one letter": (".txt", lambda: b"a" + repeated("\u0301\u0323", 8 * MIB)),
    "chunks": (".Rmd", lambda: repeated("```{r}\nx\n```\n", LIMIT)),
    "tags": (".html", lambda: repeated("<td>", LIMIT)),
    "pictures in prose": (".md", lambda: repeated("data:image/png;base64,", LIMIT)),
    "UTF-16": (".txt", lambda: ("a " * (LIMIT // 4)).encode("utf-16")),
    "emoji": (".ipynb", lambda: notebook(stream("\U0001f600 " * 2 * MIB))),
    "empty lists": (".ipynb", lambda: b'{"cells":[' + b"[]," * (LIMIT // 3) + b"[]]}"),
    "numbers": (".ipynb", lambda: b'{"cells":[' + b"1.5," * (4 * MIB - 10) + b"1]}"),
    "nested": (".ipynb", lambda: b'{"cells":' + b"[" * LIMIT),
    "colours": (".ipynb", lambda: notebook(stream("\x1b[0" * 2 * MIB))),
    "a long output": (".ipynb", lambda: notebook(stream("1 2 3\n" * (10 * MIB)))),
    "listed lines": (".ipynb", lambda: notebook(stream("") | {"text": [f"{row:013}\n" for row in range(590_000)]})),
    "a large picture": (".ipynb", lambda: picture(60 * MIB)),
}


QUICK = ("marks on one letter", "empty lists")  # the others take a second each


@pytest.mark.parametrize("kind", [kind if kind in QUICK else pytest.param(kind, marks=slow) for kind in HOSTILE])
def test_a_pathological_file_costs_little(tmp_path: Path, kind: str) -> None:
    suffix, make = HOSTILE[kind]
    path = tmp_path / f"fairweatherada_101_901_homework{suffix}"
    path.write_bytes(make())

    done = subprocess.run([sys.executable, "-c", READING, str(path)], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    seconds, peak = map(float, done.stdout.split())
    assert seconds < 2 * SECONDS
    assert peak < 2 * MEMORY


def test_what_a_picture_stood_beside_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_bytes(picture(20 * MIB))

    [submission] = read_submissions(tmp_path)

    assert [part.text for part in submission.parts] == ["x", "mean 4.5"]
    assert submission.images_left_out == 1


def test_a_long_text_keeps_its_beginning_and_says_that_it_is_cut(tmp_path: Path) -> None:
    lines = [f"line {number}: größer" for number in range(200_000)]
    (tmp_path / "a.txt").write_text("\n".join(lines), "utf-8")

    [submission] = read_submissions(tmp_path)

    assert submission.parts[0].text.startswith("line 0: größer\nline 1: größer\n")
    assert len(submission.parts[0].text) < 200_000
    assert "\ufffd" not in submission.parts[0].text
    assert any("very long" in note for note in submission.notes)


def test_small_outputs_survive_giant_ones_before_them(tmp_path: Path) -> None:
    outputs = [stream("log\n" * MIB), {"output_type": "execute_result", "data": {"text/plain": "[1] 42"}}]
    (tmp_path / "a.ipynb").write_bytes(notebook(*outputs))

    [submission] = read_submissions(tmp_path)

    assert submission.parts[-1].text == "[1] 42"
    assert len(submission.parts[1].text) < MIB


@pytest.fixture(scope="module")
def noise() -> bytes:
    """A text of 59 MiB that is no bomb."""
    return random.Random(1).randbytes(MIB).hex().encode() * 2 + b"\n" * (55 * MIB)


@pytest.mark.parametrize(
    "where",
    [
        "greedy_7_assignsubmission_file/{}.txt",
        pytest.param("greedy_1_{}_homework.txt", marks=slow),
        pytest.param("text{}.txt", marks=slow),
    ],
)
def test_one_student_with_nine_huge_texts_does_not_stop_the_class(tmp_path: Path, noise: bytes, where: str) -> None:
    path = tmp_path / "class.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(9):
            archive.writestr(where.format(number), noise)
        for number in range(3):
            archive.writestr(f"zoe{number}_{number + 50}_assignsubmission_file/a.py", f"x = {number}\n")

    submissions = read_submissions(path)

    others = [one for one in submissions if one.name.startswith("zoe")]
    assert [one.problem for one in others] == [""] * 3
    assert [one.parts[0].text for one in others] == ["x = 0", "x = 1", "x = 2"]
    if where.startswith("greedy_7"):
        [greedy] = [one for one in submissions if one.name.startswith("greedy")]
        assert "MiB together" in greedy.problem


@slow
def test_damaged_members_are_charged_to_their_student_too(tmp_path: Path) -> None:
    path = tmp_path / "class.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(4):
            archive.writestr(f"greedy_7_assignsubmission_file/{number}.txt", bytes(50 * MIB))
        archive.writestr("zoe_8_assignsubmission_file/a.py", "x = 1\n")

    greedy, zoe = read_submissions(path)

    assert greedy.problem
    assert zoe.parts[0].text == "x = 1"
