"""The `kvasir` command without services: what it prints, where, and with which exit code."""

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvasir import cli
from kvasir.commands.ask import print_answer
from messages.jobs import JobResult, TokenEvent
from monitoring import logs
from producers.batch.batch import Batch
from tests.support.homework import RUBRIC, tiny, tiny_class
from tests.support.processes import ROOT, ModelEntry, config_text, environment

MODEL = "tiny:1b"
COMMANDS = list(cli.kvasir.commands)


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    def sentence(self) -> str:
        """What a usage error prints, with its code: one line on stderr, nothing on stdout, no traceback."""
        assert (self.code, self.stdout) == (cli.EXIT_USAGE, "")
        assert "Traceback" not in self.stderr
        lines = self.stderr.strip().splitlines()
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("kvasir: ")
        return lines[0]


Kvasir = Callable[..., Ended]


@pytest.fixture
def kvasir(configured_folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Kvasir]:
    """Runs a command in this process, in an empty folder with a configuration of one simulated model."""
    loggers = [logging.getLogger(name) for name in ("", *logs.ROOMS)]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]

    def run(*arguments: str | Path) -> Ended:
        capsys.readouterr()
        code = cli.run_command([str(argument) for argument in arguments])
        return Ended(code, *capsys.readouterr())

    yield run
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture
def homework(tmp_path: Path) -> Path:
    """A class of three."""
    return tiny_class(tmp_path / "homework")


# --- usage errors: one sentence, code 2 ---


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("submissions", None, "no such file or folder"),
        ("submissions", (), "holds no submission"),
        ("rubric.yaml", None, "rubric.yaml"),
        ("rubric.yaml", (), "rubric.yaml"),
        ("rubric.yaml", b"\xff\xfe\x00", "rubric.yaml"),
        ("rubric.yaml", RUBRIC.replace("guidance:", "guidence:", 1).encode(), "guidence"),
        ("rubric.yaml", RUBRIC.replace("points: 3", "points: -3").encode(), "-3"),
    ],
)
def test_an_unusable_input_is_named_in_one_sentence(
    kvasir: Kvasir, homework: Path, tmp_path: Path, file: str, content: bytes | tuple[()] | None, expected: str
) -> None:
    """It is gone, it is an empty folder, or it holds something else."""
    (homework / file).rename(tmp_path / "moved")
    if content == ():
        (homework / file).mkdir()
    elif content is not None:
        (homework / file).write_bytes(content)

    assert expected in kvasir("grade", *tiny(homework, tmp_path / "out")).sentence()
    assert not (tmp_path / "out" / "batch.json").exists()


@pytest.mark.parametrize(
    ("config", "solution_lines", "expected"),
    [
        ("", 0, ["--code-model"]),
        ("[grading]\ncode_model =\n", 0, ["kvasir.toml", "line 2"]),
        (config_text({MODEL: ModelEntry("simulated", "sim:scale=0", 4096)}), 2000, ["has no room for a submission"]),
        (config_text({MODEL: ModelEntry("simulated", "sim:scale=0,context=1000000", 1_000_000)}), 50_000, ["prompt"]),
    ],
    ids=["no model", "bad TOML", "a solution too long for the model", "a prompt above the size limit, 1 MiB"],
)
def test_what_the_configuration_does_not_allow_is_a_usage_error(
    kvasir: Kvasir, homework: Path, tmp_path: Path, config: str, solution_lines: int, expected: list[str]
) -> None:
    (tmp_path / "kvasir.toml").write_text(config, "utf-8")
    (homework / "solution.py").write_text("total = total + value\n" * solution_lines, "utf-8")
    solution = ["--solution", homework / "solution.py"] if solution_lines else []

    sentence = kvasir("grade", *tiny(homework, tmp_path / "out"), *solution, "--quiet").sentence()

    assert all(words in sentence for words in expected)


def test_a_model_that_is_not_configured_is_named_with_those_that_are(
    kvasir: Kvasir, homework: Path, tmp_path: Path
) -> None:
    sentence = kvasir("grade", *tiny(homework, tmp_path / "out", "--code-model", "tiny:2b")).sentence()

    assert "'tiny:2b' is not configured" in sentence
    assert sentence.endswith(f"did you mean {MODEL!r}? (configured: {MODEL})")
    assert kvasir("ask", "Why?", "--model", "nobody").sentence().endswith(f"is not configured; known: {MODEL}")


def test_an_out_folder_that_can_not_be_had_is_a_usage_error(kvasir: Kvasir, homework: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", "utf-8")

    assert "--out" in kvasir("grade", *tiny(homework, tmp_path / "file" / "out")).sentence()
    with Batch(tmp_path / "out"):
        ended = kvasir("grade", *tiny(homework, tmp_path / "out"))
    assert "in use by another kvasir process" in ended.sentence()


@pytest.mark.parametrize(("given", "missing"), [("BROKER", "STORE"), ("STORE", "BROKER")])
def test_half_a_cluster_is_a_usage_error(
    kvasir: Kvasir, homework: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, missing: str
) -> None:
    monkeypatch.setenv(f"KVASIR_{given}_URL", "amqp://127.0.0.1" if given == "BROKER" else "redis://127.0.0.1")

    assert f"KVASIR_{missing}_URL" in kvasir("grade", *tiny(homework, tmp_path / "out")).sentence()


@pytest.mark.parametrize("command", ["watch", "results", "retry", "regrade", "requests", "bound --draw 3"])
def test_a_folder_without_a_batch_is_a_usage_error(kvasir: Kvasir, tmp_path: Path, command: str) -> None:
    assert "holds no batch" in kvasir(*command.split(), tmp_path).sentence()
    assert not (tmp_path / "batch.lock").exists()


@pytest.mark.system  # needs Streamlit
def test_the_desk_says_which_folder_it_has_nothing_to_show_of(
    kvasir: Kvasir, homework: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvasir("grade", *tiny(homework, tmp_path / "out"))
    monkeypatch.setattr("os.execv", lambda *_: None)  # the desk itself

    assert kvasir("ui", "out", "typo").stderr == "typo holds no batch yet; it is shown when it does\n"
    assert "is a file" in kvasir("ui", "--home", "kvasir.toml").stderr


@pytest.mark.parametrize(
    "damaged",
    ["", "[]", '{"version": 1}', '{"version": 1, "batch_id": "b", "created_at": 1, "secret": "no hex", "jobs": []}'],
)
def test_a_damaged_batch_is_a_usage_error_and_stays_as_it_is(
    kvasir: Kvasir, homework: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "batch.json").write_text(damaged, "utf-8")
    grading = kvasir("grade", *tiny(homework, out))
    monkeypatch.setenv("KVASIR_BROKER_URL", "amqp://127.0.0.1")
    monkeypatch.setenv("KVASIR_STORE_URL", "redis://127.0.0.1")
    cancelling = kvasir("cancel", out)

    assert grading.sentence() == cancelling.sentence()
    assert "batch.json can't be read" in grading.sentence()
    assert (out / "batch.json").read_text("utf-8") == damaged


@pytest.mark.parametrize("command", ["submit", "cancel", "prefill-worker", "decode-worker"])
def test_what_needs_a_cluster_asks_for_a_broker(kvasir: Kvasir, homework: Path, tmp_path: Path, command: str) -> None:
    kvasir("grade", *tiny(homework, tmp_path / "out"))
    words = {"submit": tiny(homework, tmp_path / "out"), "cancel": [tmp_path / "out"]}.get(command, ["--model", MODEL])

    assert "KVASIR_BROKER_URL" in kvasir(command, *words).sentence()


def test_cancel_without_a_broker_says_what_ends_a_grading_here(kvasir: Kvasir, homework: Path, tmp_path: Path) -> None:
    kvasir("grade", *tiny(homework, tmp_path / "out"))

    sentence = kvasir("cancel", tmp_path / "out").sentence()
    assert sentence.endswith("nothing runs but kvasir grade itself, which ends at Ctrl-C")
    assert "holds no batch" in kvasir("cancel", homework).sentence()


def test_a_command_to_type_next_has_the_configuration_and_can_be_pasted(
    kvasir: Kvasir, homework: Path, tmp_path: Path
) -> None:
    (tmp_path / "kvasir.toml").rename(tmp_path / "mine.toml")
    out = tmp_path / "my class"

    given = kvasir("--config", "mine.toml", "grade", *tiny(homework, out), "--max-wait", "0")
    damaged = out / "grades.json"
    damaged.write_text("{", "utf-8")
    asked = kvasir("--config", "mine.toml", "bound", out, "--draw", "1")
    plain = kvasir("bound", out, "--draw", "1")

    assert given.stderr.endswith(f"still open; go on with: kvasir --config mine.toml watch '{out}'\n")
    assert f"kvasir --config mine.toml results '{out}'" in asked.sentence()
    assert f"kvasir results '{out}'" in plain.sentence()


# --- what works ---
def test_grading_prints_a_table_and_running_again_calls_no_engine(
    kvasir: Kvasir, homework: Path, tmp_path: Path
) -> None:
    first = kvasir("grade", *tiny(homework, tmp_path / "out"))
    again = kvasir("grade", *tiny(homework, tmp_path / "out"))

    assert first.code == again.code == 0, first.stderr
    assert all(f"student{number}_" in first.stdout for number in range(3))
    assert "no engine was called" not in first.stdout
    assert "Everything is already graded; no engine was called." in again.stdout


def test_jobs_not_done_by_the_deadline_expire(kvasir: Kvasir, homework: Path, tmp_path: Path) -> None:
    # Given a model that takes a quarter of a minute for an answer
    slow = ModelEntry("simulated", "sim:prefill=100000,decode=1,answer=500,scale=1", context=8192, slots=8)
    (tmp_path / "kvasir.toml").write_text(config_text({MODEL: slow}), "utf-8")
    # When its answers are wanted in a second
    graded = kvasir("grade", *tiny(homework, tmp_path / "out", "--json", "--deadline", "1s"))
    # Then there are none, and it says why
    assert graded.code == cli.EXIT_FAILURE
    assert json.loads(graded.stdout)["jobs"]["expired"] == 6


def test_json_is_all_that_stdout_holds(kvasir: Kvasir, homework: Path, tmp_path: Path) -> None:
    graded = kvasir("grade", *tiny(homework, tmp_path / "out", "--json"))
    shown = kvasir("results", tmp_path / "out", "--json")

    found: dict[str, Any] = json.loads(graded.stdout)
    assert found["jobs"] == {"total": 6, "succeeded": 6, "failed": 0, "cancelled": 0, "expired": 0}
    assert [made["state"] for made in found["submissions"]] == ["graded"] * 3
    assert json.loads(shown.stdout) == found
    assert "6/6 jobs" in graded.stderr


def test_a_submission_that_can_not_be_read_makes_the_code_1(kvasir: Kvasir, homework: Path, tmp_path: Path) -> None:
    (homework / "submissions" / "broken_7_7_homework.ipynb").write_text("{", "utf-8")

    ended = kvasir("grade", *tiny(homework, tmp_path / "out", "--json"))

    states = {made["submission"]: made["state"] for made in json.loads(ended.stdout)["submissions"]}
    assert ended.code == cli.EXIT_FAILURE
    assert states.pop("broken_7_7_homework.ipynb") == "failed"
    assert set(states.values()) == {"graded"}


def test_limit_and_only_choose_submissions(kvasir: Kvasir, homework: Path, tmp_path: Path) -> None:
    limited = kvasir("grade", *tiny(homework, tmp_path / "limited", "--limit", "2", "--json"))
    only = kvasir("grade", *tiny(homework, tmp_path / "only", "--only", "101, student2_102_1_homework", "--json"))

    assert _names(limited) == ["student0_100_1_homework.py", "student1_101_1_homework.py"]
    assert _names(only) == ["student1_101_1_homework.py", "student2_102_1_homework.py"]
    assert "nobody" in kvasir("grade", *tiny(homework, tmp_path / "out", "--only", "nobody")).sentence()


def test_a_dry_run_counts_tokens_says_what_is_shared_and_leaves_no_trace(
    kvasir: Kvasir, homework: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))

    ended = kvasir("--log-level", "info", "grade", *tiny(homework, tmp_path / "out", "--dry-run", "--json"))

    found = json.loads(ended.stdout)
    assert ended.code == 0
    assert found["exact_tokens"]
    assert found["prompts"] == 6
    assert len(found["submissions"]) == 3
    assert {part["role"] for part in found["shared_prefix"]} == {"code", "feedback"}
    assert sorted(found["pilot"]) == sorted(item["submission"] for item in found["submissions"])
    assert sorted(tmp_path.rglob("*")) == before
    assert "decode_started" not in ended.stderr
    assert "prefill_started" not in ended.stderr
    # And for people
    said = kvasir("grade", *tiny(homework, tmp_path / "out", "--dry-run")).stdout
    assert "6 prompts" in said
    assert "the class shares" in said


def test_asking_prints_the_answer_alone(kvasir: Kvasir) -> None:
    printed = kvasir("ask", "What is a mean?", "--model", MODEL, "--temperature", "0")
    streamed = kvasir("ask", "What is a mean?", "--model", MODEL, "--temperature", "0", "--stream")

    assert printed.code == streamed.code == 0
    assert printed.stdout == streamed.stdout
    assert len(printed.stdout) > 20


@pytest.mark.parametrize(
    ("arrived", "printed"),
    [
        (("one ", "two ", "three"), "one two three\n"),
        (("one ",), "one two three\n"),  # the result overtook the rest
        ((), "one two three\n"),
        (("one ", "three"), "one three\n[pieces of the answer were lost; here it is whole]\none two three\n"),
    ],
)
def test_a_streamed_answer_is_whole_whichever_pieces_arrive(
    capsys: pytest.CaptureFixture[str], arrived: tuple[str, ...], printed: str
) -> None:
    events: list[TokenEvent | JobResult] = [
        *(TokenEvent("job", 1, "delivery", index, piece) for index, piece in enumerate(arrived)),
        JobResult("job", 1, "batch", "item", MODEL, "succeeded", text="one two three"),
    ]

    assert print_answer(events, stream=True, as_json=False) == 0
    assert capsys.readouterr().out == printed


def test_config_shows_where_values_come_from_and_no_password(
    kvasir: Kvasir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASIR_BROKER_URL", "amqp://user:hush@broker.example:5672/")
    monkeypatch.setenv("KVASIR_STORE_PASSWORD", "hush")
    monkeypatch.setenv("KVASIR_STORE_URL", "redis://store.example/0")

    table, rows = kvasir("config"), kvasir("config", "--json")

    values = {row["name"]: row for row in json.loads(rows.stdout)}
    assert table.code == rows.code == 0
    assert "hush" not in table.stdout + table.stderr + rows.stdout + rows.stderr
    assert "user:***@broker.example" in values["services.broker"]["value"]
    assert "KVASIR_BROKER_URL" in values["services.broker"]["from"]
    assert "kvasir.toml" in values["grading.code_model"]["from"]


def test_status_without_a_broker_says_so(kvasir: Kvasir) -> None:
    ended = kvasir("status")

    assert ended.code == 0
    assert "No broker is configured" in ended.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(kvasir: Kvasir, command: str) -> None:
    ended = kvasir(command, "--help")

    assert ended.code == 0
    assert ended.stdout.startswith(f"Usage: kvasir {command}")


def test_help_lists_every_command(kvasir: Kvasir) -> None:
    ended = kvasir("--help")

    assert ended.code == 0
    assert all(command in ended.stdout for command in COMMANDS)


def _names(ended: Ended) -> list[str]:
    return [made["submission"] for made in json.loads(ended.stdout)["submissions"]]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["grade", "x"], "--rubric"),
        (["grade", "x", "--rubric", "y", "--deadline", "soon"], "such as 07:30, not 'soon'"),
        (["decode-worker", "--model", "m", "--kv-cache-gb", "nan"], "'nan' is not a finite number"),
        (["decode-worker", "--model", "m", "--grace", "inf"], "'inf' is not a finite number"),
        (["decode-worker", "--model", "m", "--slots", "99999"], "not in the range"),
        (["grade", "x", "--rubric", "y", "--limit", "0"], "0 would grade nobody"),
        (["grade", "x", "--rubric", "y", "--only", ""], "the list of names is empty"),
        (["grade", "x", "--rubric", "y", "--only", ","], "the list of names is empty"),
    ],
)
def test_a_flag_that_can_not_be_meant_is_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_command(words) == cli.EXIT_USAGE
    assert why in capsys.readouterr().err


def test_closed_streams_are_no_reason_to_fail():
    command = f'"{sys.executable}" -m kvasir --version'
    assert subprocess.run(["/bin/sh", "-c", f"{command} >&- 2>&-"], timeout=60).returncode == 0

    done = subprocess.run(["/bin/sh", "-c", f"{command} --nonsense >&-"], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


CONSOLE_SCRIPT = "import sys\nfrom kvasir.cli import main\nsys.exit(main())\n"


@pytest.mark.parametrize("imported", ["infra.config.urls", "kvasir.class_run"])
@pytest.mark.parametrize("script", [False, True])
def test_ctrl_c_while_it_is_still_importing_is_a_quiet_end(tmp_path: Path, imported: str, script: bool) -> None:
    (tmp_path / "kvasir").write_text(CONSOLE_SCRIPT, "utf-8")
    how = [str(tmp_path / "kvasir")] if script else ["-m", "kvasir"]
    config = tmp_path / "kvasir.toml"
    config.write_text(config_text({MODEL: ModelEntry("simulated", "sim:scale=1,decode=1")}), "utf-8")
    command = [sys.executable, "-X", "importtime", *how, "--config", str(config), "ask", "Why?", "--model", MODEL]
    env = environment(tmp_path) | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        lines = [next(line for line in process.stderr if line.rstrip().endswith(f" {imported}"))]
        process.send_signal(signal.SIGINT)
        lines += process.stderr

    assert process.returncode == cli.EXIT_INTERRUPTED
    said = [line for line in lines if not line.startswith("import time:")]
    assert said in ([], ["interrupted\n"])  # the second if all was imported before the signal came
