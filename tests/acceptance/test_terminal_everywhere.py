"""Every command that shows progress, a table or a live screen, in every kind of terminal, over real services."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.homework import tiny, tiny_class
from tests.support.processes import ROOT, SIMULATED_MODEL, Cluster, ModelEntry, command, config_text, environment
from tests.support.pty import CTRL_C, Terminal

pytestmark = pytest.mark.system

MODEL, NOBODYS = "terminal:1b", "nobodys:1b"
SLOW = ModelEntry("simulated", "sim:scale=1,decode=20,answer=2000", context=32768)
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
KINDS = {
    "80 columns": (80, {}),
    "200 columns, no colour": (200, {"NO_COLOR": "1"}),
    "dumb": (80, {"TERM": "dumb"}),
    "no UTF-8": (80, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
}


@dataclass
class World:
    """A cluster with one worker a stage, a class, a batch that was graded, and one that waits for nobody's model."""

    cluster: Cluster
    homework: Path
    graded: Path
    waiting: Path

    def terminal(self, folder: Path, *arguments: str, kind: str = "80 columns", local: bool = False) -> Terminal:
        columns, variables = KINDS[kind]
        env = environment(folder) if local else self.cluster.environment
        env = env | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | variables
        config = [] if local else ["--config", str(self.cluster.config)]
        return Terminal(command(*config, *arguments), env, folder, columns)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, broker_url: str, store_url: str) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("terminals")
    homework = tiny_class(folder / "homework", 6)
    (homework / "submissions" / "müller_300_1_homework.ipynb").write_text("{", "utf-8")
    models = dict.fromkeys((MODEL, NOBODYS), SIMULATED_MODEL)
    with Cluster(folder / "cluster", broker_url, store_url, models) as cluster:
        workers = [cluster.launch(role, MODEL) for role in ("prefill", "decode")]
        for worker in workers:
            worker.wait_until_registered()
        graded, waiting = folder / "graded", folder / "waiting"
        assert cluster.run("grade", *tiny(homework, graded), "--quiet").code == 1
        nobodys = ["--code-model", NOBODYS, "--feedback-model", NOBODYS]
        assert cluster.run("submit", *tiny(homework, waiting, *nobodys), "--quiet").code == 0
        yield World(cluster, homework, graded, waiting)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{number}", "prompt": f"Number {number} … äöü"} for number in range(12)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_terminal_shows_every_command_as_it_can(world: World, tmp_path: Path, prompts: Path, kind: str) -> None:
    out, sent = tmp_path / "out", tmp_path / "sent"
    commands: dict[str, tuple[list[str], int, str]] = {
        "grade": (["grade", *tiny(world.homework, out)], 1, "6 graded, 1 unreadable"),
        "retry": (["retry", str(out), "--only", "100,101"], 1, "4 jobs run again"),
        "results": (["results", str(out)], 1, "6 graded, 1 unreadable"),
        "submit": (["submit", *tiny(world.homework, sent)], 0, "12 jobs queued"),
        "watch": (["watch", str(sent)], 1, "6 graded, 1 unreadable"),
        "run": (["run", str(prompts), "--model", MODEL], 0, "12 of 12 prompts answered"),
        "status": (["status"], 0, r"terminal:1b[\s\S]*Store: "),
        "top": (["top", str(out), "--once"], 0, r"\bout\b"),
        "doctor --try": (["doctor", "--try", MODEL], 0, "ok"),
        "plan": (["--config", str(ROOT / "examples/kvasir.toml"), "plan", "--submissions", "2"], 0, "2 submissions"),
        "ask": (["ask", "Why …?", "--model", MODEL, "--stream", "--max-tokens", "30"], 0, r"\w{3}"),
        "forget": (["forget", str(sent)], 1, "nothing was deleted"),
    }
    for name, (words, code, shown) in commands.items():
        with world.terminal(tmp_path, *words, kind=kind) as terminal:
            if name == "forget":
                terminal.until("for good")
                terminal.type("n\n")
            assert terminal.wait() == code, f"{name}: {terminal.text}"
        assert "Traceback" not in terminal.text, name
        assert re.search(shown, terminal.text), f"{name}: {terminal.text}"
        assert terminal.is_restored, name
        if name in ("grade", "watch", "run", "retry"):
            assert terminal.percentages == sorted(terminal.percentages), name
            assert len(terminal.percentages) >= 3, f"{name}: {terminal.text}"
        if kind == "dumb":
            assert "\x1b" not in terminal.raw, name
        if "no colour" in kind:
            assert not COLOUR.search(terminal.raw), name
        if kind == "no UTF-8":
            assert terminal.raw.isascii(), name


def test_ctrl_c_leaves_every_command_with_one_sentence(world: World, tmp_path: Path, prompts: Path) -> None:
    (tmp_path / "kvasir.toml").write_text(config_text({MODEL: SLOW}), "utf-8")
    out = tmp_path / "out"
    commands: dict[str, tuple[list[str], str, bool]] = {
        "grade": (["grade", *tiny(world.homework, out)], r"\d/13", True),
        "run": (["run", str(prompts), "--model", MODEL], r"\d/12", True),
        "ask": (["ask", "Why?", "--model", MODEL, "--stream"], r"\w{3}[\s\S]*\w{3}", True),
        "retry": (["retry", str(out)], "/13", True),
        "watch": (["watch", str(world.waiting)], "/13", False),
    }
    for name, (words, shown, local) in commands.items():
        with world.terminal(tmp_path, *words, local=local) as terminal:
            terminal.until(shown)
            terminal.type(CTRL_C)
            assert terminal.wait() == 130, f"{name}: {terminal.text}"
        last = terminal.text.strip().splitlines()[-1]
        assert "Traceback" not in terminal.text, name
        assert last.startswith("interrupted"), f"{name}: {terminal.text}"
        assert ("run the same command again" in last) == (name != "ask")
        assert terminal.is_restored, name


def test_top_is_left_by_ctrl_c_and_the_screen_is_as_before(world: World, tmp_path: Path) -> None:
    for local in (True, False):
        with world.terminal(tmp_path, "top", str(world.graded), "--every", "0.2", local=local) as terminal:
            terminal.until("graded[ ]+13/13[\\s\\S]*graded[ ]+13/13")
            terminal.type(CTRL_C)
            assert terminal.wait() == 0, terminal.text
        assert "Traceback" not in terminal.text
        assert terminal.is_restored
