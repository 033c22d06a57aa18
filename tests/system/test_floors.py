"""The lowest versions that pyproject.toml allows are enough: every module, every command's help, and the main ways.

`uv` chooses them (`--resolution lowest-direct`): of what pyproject.toml names, and of nothing that only that asks for.
"""

import json
import os
import re
import subprocess
import tomllib
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support import processes
from tests.support.homework import tiny, tiny_class
from tests.support.processes import ROOT, SIMULATED_MODEL, Cluster, RunningProcess
from tests.support.rooms import ROOMS
from tests.support.servers import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # an environment of its own is installed

# PyTorch and MLX are pinned, or are run by no floor of ours.
EXTRAS = "gateway,ui,bound,bench,llamacpp,nvml"
BROUGHT_BY_NO_EXTRA = {"llguidance", "mlx", "mlx_lm", "tokenizers", "torch", "transformers", "vllm"}
_OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
_EVERYTHING = """
import importlib, json, pkgutil, sys
import click
from click.testing import CliRunner
from kvasir.cli import kvasir

missing, failed, commands = set(), {}, []
for room in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(room).__path__, room + "."):
        if module.name.endswith("__main__") or ".host.kvasir_vllm" in module.name:
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing.add(error.name.partition(".")[0])

def show_help(command, words):
    commands.append(" ".join(words))
    result = CliRunner().invoke(kvasir, [*words, "--help"])
    if result.exit_code:
        failed[" ".join(words)] = repr(result.exception or result.output)
    for name, inner in getattr(command, "commands", {}).items():
        show_help(inner, [*words, name])

show_help(kvasir, [])
print(json.dumps({"missing": sorted(missing), "failed": failed, "commands": commands}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of an environment with the lowest versions; every command of these tests is run by it."""
    from uv import find_uv_bin  # here, so that without it every other test can be run

    folder = tmp_path_factory.mktemp("floors")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    install = [find_uv_bin(), "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run(
        [*install, "--resolution", "lowest-direct", "--editable", f"{ROOT}[{EXTRAS}]"], env=_OUTSIDE, check=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "command", lambda *words: [str(python), "-m", "kvasir", *words])
        yield python


@pytest.mark.gate
def test_the_lowest_versions_are_installed_as_they_are_written(python: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [*project["dependencies"], *(word for extra in EXTRAS.split(",") for word in _extra(project, extra))]
    floors = dict(match.groups() for word in named if (match := re.match(r"([\w-]+)(?:\[.*\])?[>=]=([\d.]+)", word)))
    script = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    done = subprocess.run([python, "-c", script, *floors], capture_output=True, check=True, text=True)
    installed = json.loads(done.stdout)
    assert {name: floor for name, floor in floors.items() if not _is(installed[name], floor)} == {}


def _extra(project: dict[str, dict[str, list[str]]], name: str) -> list[str]:
    return project["optional-dependencies"][name]


def _is(version: str, floor: str) -> bool:
    """1.1.0 is 1.1."""
    return version == floor or re.fullmatch(rf"{re.escape(floor)}(\.0)*", version) is not None


@pytest.mark.gate
def test_every_module_is_imported_and_every_command_has_its_help(python: Path, tmp_path: Path) -> None:
    environment = processes.environment(tmp_path)
    done = subprocess.run(
        [python, "-c", _EVERYTHING, *ROOMS], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["missing"]) <= BROUGHT_BY_NO_EXTRA
    assert found["failed"] == {}
    assert {"grade", "dead list", "decode-worker", "keys add"} <= set(found["commands"])


def test_a_class_is_graded_on_a_cluster_read_shown_and_exported(
    python: Path, tmp_path: Path, broker_url: str, store_url: str, model_name: str
) -> None:
    batch = tmp_path / "batch"
    with Cluster(tmp_path, broker_url, store_url, {model_name: SIMULATED_MODEL}) as cluster:
        cluster.worker("prefill", model_name)
        cluster.worker("decode", model_name)
        for words in (
            ["grade", *tiny(tiny_class(tmp_path / "class"), batch)],
            ["results", str(batch)],
            ["ask", "What is a queue?", "--model", model_name],
            ["status"],
            ["top", "--once", str(batch)],
            ["engines"],
            ["config"],
            ["doctor"],
            ["dead", "list"],
            ["--config", str(ROOT / "examples/kvasir.toml"), "plan", "--submissions", "10"],
            ["requests", str(batch)],
            ["export", str(batch), "--format", "csv", "--include-unreviewed", "--yes"],
            ["forget", str(batch), "--yes"],
        ):
            done = cluster.run(*words)
            assert done.code == 0, (words, done.stdout, done.stderr)


def test_the_demo_the_gateway_and_the_desk(python: Path, tmp_path: Path, model_name: str) -> None:
    done = processes.run("demo", "--out", "demo", env=processes.environment(tmp_path), cwd=tmp_path)
    assert done.code == 0, done.stderr
    with processes.serving(tmp_path, model_name) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        answer = client.chat.completions.create(
            model=model_name, messages=[{"role": "user", "content": "What is a queue?"}], max_tokens=20
        )
    assert answer.choices[0].message.content
    port = free_port()
    desk = RunningProcess(["ui", "--port", str(port), "demo"], processes.environment(tmp_path), tmp_path)
    try:
        wait_until(lambda: not desk.alive or _page(port), "the desk answers", 60)
        assert "<title>" in _page(port), desk.text()
    finally:
        desk.kill()


def _page(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as response:
            return str(response.read(), "utf-8")
    except OSError:
        return ""
