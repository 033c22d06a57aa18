"""Commands in a real terminal: nothing breaks where somebody watches."""

from pathlib import Path

import pytest
from rich.cells import cell_len

from benchmarks.doors_classes import make_class
from grading.submissions.reading import read_submissions
from tests.support.homework import RUBRIC, tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, ModelEntry, command, config_text, environment
from tests.support.pty import CTRL_C, Terminal

MODEL = "tiny:1b"
SLOW = ModelEntry("simulated", "sim:scale=1,decode=100", context=32768)


@pytest.fixture
def homework(tmp_path: Path) -> Path:
    """A class of twelve, and a configuration beside it."""
    (tmp_path / "kvasir.toml").write_text(config_text({MODEL: SIMULATED_MODEL}), "utf-8")
    return tiny_class(tmp_path / "homework", 12)


def kvasir(tmp_path: Path, *arguments: str, columns: int = 80, **variables: str) -> Terminal:
    env = environment(tmp_path) | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | variables
    return Terminal(command(*arguments), env, tmp_path, columns)


def test_the_bar_of_a_grading_rises_to_the_end(tmp_path: Path, homework: Path) -> None:
    with kvasir(tmp_path, "grade", *tiny(homework, tmp_path / "out")) as terminal:
        assert terminal.wait() in (0, 1)
    assert "Traceback" not in terminal.text
    assert terminal.percentages == sorted(terminal.percentages)
    assert len(terminal.percentages) >= 3, terminal.text
    assert "━" in terminal.text
    assert terminal.is_restored
    assert "student11_111_1_homework.py" in terminal.text


def test_ctrl_c_in_a_grading_leaves_the_terminal_as_it_was(tmp_path: Path, homework: Path) -> None:
    (tmp_path / "kvasir.toml").write_text(config_text({MODEL: SLOW}), "utf-8")

    with kvasir(tmp_path, "grade", *tiny(homework, tmp_path / "out")) as terminal:
        terminal.until(r"\b[3-9]\d*/24")  # by then several jobs are in work, and are given back
        terminal.type(CTRL_C)
        assert terminal.wait() == 130

    assert "Traceback" not in terminal.text
    assert "WARNING" not in terminal.text
    assert terminal.text.strip().splitlines()[-1].startswith("interrupted; ")
    assert terminal.is_restored


@pytest.mark.system  # ten seconds
def test_top_says_what_it_looks_for_and_looks_again(tmp_path: Path, homework: Path) -> None:
    away = {"KVASIR_BROKER_URL": "amqp://u:secret@127.0.0.1:9/%2F", "KVASIR_STORE_URL": "redis://127.0.0.1:9/0"}
    with kvasir(tmp_path, "top", "--every", "0.2", **away) as terminal:
        terminal.until("looking for the broker at 127.0.0.1:9 and the store at 127.0.0.1:9")
        assert "no connection" not in terminal.text  # it is said before anything was waited for
        terminal.until("no connection to the broker at 127.0.0.1:9")
        terminal.type(CTRL_C)
        assert terminal.wait() == 0
    assert "secret" not in terminal.text
    assert terminal.is_restored


@pytest.fixture
def a_class(tmp_path: Path) -> Path:
    """Thirty people, as Canvas hands their work out, and a file that can't be read."""
    (tmp_path / "kvasir.toml").write_text(config_text({MODEL: SIMULATED_MODEL}), "utf-8")
    (tmp_path / "rubric.yaml").write_text(RUBRIC, "utf-8")
    work = tmp_path / "submissions"
    work.mkdir()
    for path, data in make_class(1, 30).files.items():
        if " " not in path:  # names as people's are, which have a line each
            (work / path).write_bytes(data)
    (work / "aaronsonann_50001_60001_hw5.ipynb").write_text("{", "utf-8")
    return work


@pytest.mark.parametrize("more", [["--dry-run"], ["--quiet"]])
def test_a_class_has_a_line_a_person_and_twenty_more_in_80_columns(
    tmp_path: Path, a_class: Path, more: list[str]
) -> None:
    with kvasir(tmp_path, "grade", str(a_class), "--rubric", "rubric.yaml", "--out", "out", *more) as terminal:
        assert terminal.wait() == 1
    lines = terminal.text.splitlines()
    names = {submission.name for submission in read_submissions(a_class)}
    words = set(" ".join(lines).split())

    assert max(map(cell_len, lines)) <= 80
    assert len(lines) <= len(names) + 20, terminal.text
    assert len(names) > 20
    assert names <= words
    assert "  it is not valid JSON" in terminal.text.partition("1 can't be read:")[2]


def test_no_command_breaks_a_word_in_80_columns(tmp_path: Path, homework: Path) -> None:
    said = {}
    folder = tmp_path / ("long" * 20)  # a path that is wider than the terminal is a word, too
    folder.mkdir()
    (tmp_path / "kvasir.toml").rename(folder / "kvasir.toml")
    for columns in (80, 400):
        for command_words in (["engines"], ["config"], ["results", "nowhere/" + "long " * 12]):
            with kvasir(folder, *command_words, columns=columns) as terminal:
                terminal.wait()
            said[command_words[0], columns] = terminal.text

    for command_word in ("engines", "config", "results"):
        narrow, wide = (said[command_word, columns] for columns in (80, 400))
        plain_words = {word.strip(":;,") for word in narrow.split()}
        wide_words = {word.strip(":;,") for word in wide.split()} - {"engine", "setting"}  # of a first column
        assert wide_words <= plain_words, narrow
    assert "transformers" in said["engines", 80].split("\n")
