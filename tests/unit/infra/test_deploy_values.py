"""A value in kvasir.toml is a value on the machine: it begins no second directive, variable or command there."""

import json
import os
import plistlib
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from infra.config.schema import SUPERVISORS
from infra.deploy.units import Place, Unit, unit_file
from kvasir import cli
from messages.errors import ConfigError
from tests.support import programs

CONFIG = """
[services]
broker = "amqp://kvasir@b:5672/"
broker_password_file = "{password_file}"
[models.m]
weights.simulated = "{model_weights}"
[machines.one]
host = "one"
supervisor = "{supervisor}"
roles = [{{ role = "prefill", model = "m", engine = "simulated", weights = "{weights}" }}]
"""
ORDINARY = {"password_file": "broker", "model_weights": "sim:", "weights": "sim:", "supervisor": "systemd"}
BREAKS = {
    "line break": r"a\nExecStartPre=/bin/evil",
    "return": r"a\rb",
    "wakeup": r"a\u0007b",
    "separator": r"a\u2028b",
}
ODD = (
    "50% of %h",
    "$HOME ${HOME} $$",
    'a "quoted" word',
    "it's",
    "back\\slash\\n",
    "ends with \\",
    ";",
    "a ; b",
    "# no",
)
ODD += ("-rf", "*", "`id`", "$(id)", "ÄÖ 李明", "a=b c=d", "  two  spaces ", "")


Deploy = Callable[..., tuple[int, str]]


@pytest.fixture
def deploy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Deploy:
    """`kvasir deploy --dry-run` of a configuration with these values: its exit code, and all that it says."""

    def run(**values: str) -> tuple[int, str]:
        config = tmp_path / "kvasir.toml"
        config.write_text(CONFIG.format(**(ORDINARY | values)), "utf-8")
        code = cli.run_command(["--config", str(config), "deploy", "--dry-run"])
        return code, "\n".join(capsys.readouterr())

    return run


@pytest.mark.parametrize("supervisor", SUPERVISORS)
@pytest.mark.parametrize("value", BREAKS.values(), ids=BREAKS)
def test_a_roles_weights_with_a_line_break_are_refused(deploy: Deploy, value: str, supervisor: str) -> None:
    code, said = deploy(weights=value, supervisor=supervisor)
    assert code == 2, said
    assert "weights must be one line" in said
    assert "\nExecStartPre" not in said


@pytest.mark.parametrize("key", ["password_file", "model_weights"])
def test_so_are_other_values_that_stand_in_units_or_become_paths(deploy: Deploy, key: str) -> None:
    code, said = deploy(**{key: BREAKS["line break"]})
    assert code == 2, said
    assert "must be one line" in said


def _place(folder: Path, **environment: str) -> Place:
    return Place(str(folder), "k", str(folder), environment)


@pytest.mark.parametrize("supervisor", SUPERVISORS)
def test_a_line_break_from_anywhere_else_is_refused_too(tmp_path: Path, supervisor: str) -> None:
    unit = Unit("kvasir-x", "a worker", ("/bin/true",), 1)
    broken = (
        (replace(unit, words=("/bin/true", "a\nb")), _place(tmp_path)),
        (replace(unit, says="a\nb"), _place(tmp_path)),
        (replace(unit, environment=(("A", "a\nb"),)), _place(tmp_path)),
        (unit, _place(tmp_path, A="a\nb")),
        (unit, _place(Path("/home/a\nb"))),
        (unit, replace(_place(tmp_path), home="/home/a\nProtectHome=false")),
        (unit, replace(_place(tmp_path), user="a\nUser=root")),
    )
    for one, place in broken:
        with pytest.raises(ConfigError, match="control character"):
            unit_file(supervisor, one, place)  # type: ignore[arg-type]


def test_systemd_gets_every_odd_word_as_it_is(tmp_path: Path) -> None:
    unit = Unit("kvasir-x", "a worker", ("/bin/echo", *ODD), 1, environment=tuple(_variables().items()))
    _, text = unit_file("systemd", unit, _place(tmp_path))
    lines = text.splitlines()
    (command,) = (line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart="))
    assert [word.replace("$$", "$") for word in _systemd_words(command)] == ["/bin/echo", *ODD]
    assert not re.search(r"(?<!\$)\$(\$\$)*(?!\$)", command), "a dollar sign by itself is a variable"
    given = [_systemd_words(line.removeprefix("Environment=")) for line in lines if line.startswith("Environment=")]
    found = dict(words[0].partition("=")[::2] for words in given)
    assert {name: found.get(name) for name in _variables()} == _variables()
    verify = programs.find("systemd-analyze")
    if verify:  # it has no say in values, but knows a directive when it sees one
        file = tmp_path / "kvasir-x.service"
        file.write_text(text.replace("User=k\n", "User=root\n"), "utf-8")
        done = subprocess.run([verify, "verify", str(file)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_systemd_shuts_a_unit_in_and_leaves_it_its_folder_and_gpus(tmp_path: Path) -> None:
    place = replace(_place(tmp_path), home="/home/a k", folder="/home/a k/kvasir", user="k")
    _, text = unit_file("systemd", Unit("kvasir-x", "a worker", ("/bin/echo",), 1), place)
    assert 'ReadWritePaths="/home/a k/kvasir" "-/home/a k/.cache"\n' in text
    assert '"-/home/a k/.ssh"' in text
    # Each of these, ProtectClock by implication, takes /dev/nvidia* away, or forbids to compile for a GPU.
    assert not re.search(r"^(Private|Protect)(Devices|Clock)|^Device|^MemoryDenyWriteExecute", text, re.MULTILINE)
    if sys.platform == "linux":
        file = tmp_path / "kvasir-x.service"
        file.write_text(text, "utf-8")
        words = [programs.require("systemd"), "security", "--offline=true", "--no-pager", str(file)]
        done = subprocess.run(words, capture_output=True, text=True)
        exposure = re.search(r"Overall exposure level for kvasir-x.service: ([\d.]+)", done.stdout)
        assert exposure, done.stderr
        assert float(exposure[1]) <= 4


def test_launchd_gets_every_odd_word_as_it_is(tmp_path: Path) -> None:
    unit = Unit("kvasir-x", "a worker", ODD, 1, environment=tuple(_variables().items()))
    entries = plistlib.loads(unit_file("launchd", unit, _place(tmp_path))[1].encode())
    assert entries["ProgramArguments"] == list(ODD)
    assert entries["EnvironmentVariables"] == {"PYTHONUNBUFFERED": "1"} | _variables()


def test_a_shell_gives_the_supervisor_every_odd_word_as_it_is(tmp_path: Path) -> None:
    # Given a Python that tells what it is called with, and in what environment
    python = tmp_path / "current" / "bin" / "python"
    python.parent.mkdir(parents=True)
    tell = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], sys.stdout)"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{tell}" "$@"\n')
    python.chmod(0o755)
    unit = Unit("kvasir-x", "a worker", ODD, 1, environment=tuple(_variables().items()))
    path, text = unit_file("plain", unit, _place(tmp_path))
    Path(path).parent.mkdir()
    Path(path).write_text(text, "utf-8")

    done = subprocess.run(["sh", path, "start"], env={"PATH": os.environ["PATH"]}, capture_output=True, check=True)

    words, environment = json.loads(done.stdout)
    assert words[words.index("--") + 1 :] == list(ODD)
    assert {name: environment[name] for name in _variables()} == _variables()


def _variables() -> dict[str, str]:
    return {f"V{number}": word for number, word in enumerate(ODD)}


def _systemd_words(text: str) -> list[str]:
    """Words of a systemd setting, by systemd.syntax(7) and systemd.service(5): quotes, C escapes, specifiers."""
    words = []
    for quoted, bare in re.findall(r'\s*(?:"((?:[^"\\]|\\.)*)"|([^\s"]+))', text):
        word = bare or re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), quoted)
        assert not re.search(r"(?<!%)%(%%)*(?!%)", word), f"a percent sign by itself is a specifier: {word}"
        words.append(word.replace("%%", "%"))
    return words
