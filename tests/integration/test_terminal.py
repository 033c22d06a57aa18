"""Commands in a real terminal: nothing breaks where somebody watches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.homework import tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, ModelEntry, command, config_text, environment
from tests.support.pty import CTRL_C, Terminal

MODEL = "tiny:1b"
SLOW = ModelEntry("simulated", "sim:scale=1,decode=100", context=32768)


@pytest.fixture
def homework(tmp_path: Path) -> Path:
    """A class of twelve, and a configuration beside it."""
    (tmp_path / "kvasir.toml").write_text(config_text({MODEL: SIMULATED_MODEL}), "utf-8")
    return tiny_class(tmp_path / "homework", 12)


def kvasir(tmp_path: Path, *arguments: str, **variables: str) -> Terminal:
    env = environment(tmp_path) | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | variables
    return Terminal(command(*arguments), env, tmp_path, 80)


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
        terminal.until(r"\b[1-9]\d*/24")
        terminal.type(CTRL_C)
        assert terminal.wait() == 130

    assert "Traceback" not in terminal.text
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
