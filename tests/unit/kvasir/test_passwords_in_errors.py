"""No message repeats a value that was meant to be a URL with credentials, however malformed, wherever it stands."""

import json
from pathlib import Path

import pytest

from kvasir import cli

PW = "hunter2"
MALFORMED = [
    f"u:{PW}@h",
    f"u:{PW}@h:5672/vhost",
    f"//u:{PW}@h",
    f"amqp:u:{PW}@h",
    f"amqp:/u:{PW}@h",
    f"amqp:///u:{PW}@h",
    f"amqp//u:{PW}@h",
    f"amqp:\\\\u:{PW}@h",
    f"amqp://u:{PW}@",
    f"amqp://u:{PW}@h:port",
    f"amqp://u:{PW}@h:99999",
    f"amqp://u:{PW}@[::1",
    f"amqp://u:{PW} x@h",
    f" amqp://u:{PW}@h",
    f"'amqp://u:{PW}@h'",
    f"amqp://u:12/{PW}@h",
    f"amqp://u:12#{PW}@h",
    f"amqp://u:12?{PW}@h",
    f"amqp://amqp://u:{PW}@h",
    f"http://u:{PW}@h",
    f"{PW}://u:{PW}@h",
    f"u:{PW}@h?password={PW}",
    f"amqp://u:{PW}\u200b@h",
    f"amqp://u:{PW}@h\u2100",
    f"amqp://u%3a{PW}@h",
    f"amqp://u:p@h/?Auth={PW}",
    f"amqp://u:p@h/?x=1;password={PW}",
    f"amqp://u:p@h/?ssl_options={{'password':'{PW}'}}",
    f"amqp://u:p@h/?%70assword={PW}",
]
COMMANDS = [
    ["config"],
    ["config", "--json"],
    ["doctor"],
    ["status"],
    ["grade", "class", "--rubric", "rubric.yaml"],
    ["submit", "class", "--rubric", "rubric.yaml"],
    ["results", "out"],
    ["watch", "out"],
    ["cancel", "out"],
    ["forget", "out", "--yes"],
    ["export", "out", "--format", "csv"],
    ["top", "--once"],
    ["decode-worker", "--model", "m"],
    ["ui"],
]


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.run_command(list(arguments))
    return code, "".join(capsys.readouterr())


@pytest.mark.parametrize("variable", ["KVASIR_BROKER_URL", "KVASIR_STORE_URL"])
@pytest.mark.parametrize("value", MALFORMED)
def test_a_variable_that_is_no_url_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value.replace("amqp", "redis") if "STORE" in variable else value)

    code, text = said(capsys, "config")

    assert PW not in text
    assert code == cli.EXIT_USAGE
    assert text.startswith(f"kvasir: {variable}: ")
    assert "\n" not in text.strip()


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_command_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    for value in (f"u:{PW}@h", f"amqp://u:12#{PW}@h"):
        monkeypatch.setenv("KVASIR_BROKER_URL", value)

        code, text = said(capsys, *arguments)

        assert PW not in text
        assert code in (cli.EXIT_FAILURE, cli.EXIT_USAGE)
        assert "KVASIR_BROKER_URL: services.broker must be" in text or "holds no batch" in text


@pytest.mark.parametrize(
    "lines",
    [
        "[services]\nbroker = {}",
        "[services]\nstore = {}",
        "[services]\nbroker_password_file = {}\nbroker = 'amqp://u@127.0.0.1:1'",
        "[services]\nstore_ca_file = {}\nstore = 'rediss://127.0.0.1:1'\nbroker = 'amqp://127.0.0.1:1'",
        "[services]\nbroker = [{}]",
        "[services]\nbroker = {{url = {}}}",
        "[services]\n{} = 1",
        "[{}]\nx = 1",
        "broker = {}",
        "services = {}",
        "[grading]\ncode_model = {}",
        "[grading]\ntemperature = {}",
        "[models.m]\nengine = {}",
        "[models.m]\ncontext = {}",
        "[models.m]\nsame_weights = [{}]",
        "[models.{}]\ncontext = 5",
        "[models.m.weights]\nollama = {}",
        "[models.m.weights]\n{} = 'x'",
        "[machines.m]\nhost = {}",
        "[machines.m]\nfolder = {}",
        "[machines.m]\nroles = [{{role = 'store', host = {0}}}, {{role = {0}}}]",
        "[machines.m]\nroles = [{{role = {}}}]",
        "[machines.m.rates.{}]\nprefill = 1",
        "[{0}]\nx = 1\n[{0}]\ny = 1",
    ],
)
def test_a_file_that_holds_it_anywhere_is_not_quoted(capsys: pytest.CaptureFixture[str], lines: str) -> None:
    for value in (f"amqp://u:{PW}@h/v", f"u:{PW}@h", f"http://{'u' * 60}:{PW}@h"):
        Path("kvasir.toml").write_text(lines.format(json.dumps(value)), "utf-8")
        for arguments in (["config"], ["doctor"], ["status"]):
            _, text = said(capsys, *arguments)

            assert PW not in text, text


@pytest.mark.parametrize(
    "variable",
    [
        "KVASIR_BROKER_PASSWORD_FILE",
        "KVASIR_STORE_PASSWORD_FILE",
        "KVASIR_BROKER_CA_FILE",
        "KVASIR_CODE_MODEL",
        "KVASIR_TEMPERATURE",
        "KVASIR_CONFIG",
    ],
)
@pytest.mark.parametrize("value", [f"u:{PW}@h", f"amqp://u:{PW}@h"])
def test_a_url_in_another_variable_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    for arguments in (["config"], ["doctor"], ["status"]):
        _, text = said(capsys, *arguments)

        assert text
        assert PW not in text


@pytest.mark.parametrize("password", ["a:b@c", "://x:y@z", "p w"])
def test_a_password_of_any_signs_may_stand_in_its_own_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], password: str
) -> None:
    monkeypatch.setenv("KVASIR_BROKER_URL", "amqp://u@h")
    monkeypatch.setenv("KVASIR_BROKER_PASSWORD", password)

    code, text = said(capsys, "config")

    assert code == 0
    assert password not in text
    assert "***" in text


def test_toml_that_is_nested_too_deep_or_holds_endless_numbers_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    deep = {
        "arrays": "x = " + "[" * 2000 + "]" * 2000,
        "many lines": "x = [\n" + "[\n" * 2000,
        "tables": "x = " + "{a = " * 2000 + "1" + "}" * 2000,
        "keys": ".".join("a" * 2000) + " = 1",
        "header": "[models.m." + ".".join("a" * 2000) + "]\n",
        "digits": "[grading]\nmax_tokens = " + "9" * 5000,
        "hexadecimal": "[grading]\nmax_tokens = 0x" + "f" * 5000,
        "hexadecimal float": "[grading]\ntemperature = 0x" + "f" * 5000,
        "not UTF-8": "",
    }
    for name, text in deep.items():
        Path("kvasir.toml").write_bytes(text.encode() if text else b"x = '\xff'")

        code, answer = said(capsys, "config")

        assert code == cli.EXIT_USAGE, name
        assert answer.startswith("kvasir: "), name
        assert "kvasir.toml" in answer
        assert len(answer.splitlines()) == 1
