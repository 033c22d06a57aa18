"""The plan of the house holds: import arrows, what the wheel contains, the Makefile's targets."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = (
    "messages",
    "engines",
    "kvstore",
    "infra",
    "producers",
    "prefill_worker",
    "decode_worker",
    "monitoring",
    "kvasir",
)
DISTRIBUTION = "kvasir-inference"
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", ".DS_Store")
EXAMPLES = ROOT / "examples"
DEMO = [
    *("demo.toml", "model/kvasir-demo.gguf"),
    *(f"homework/{name}" for name in ("rubric.yaml", "solution.ipynb", "template.ipynb", "expected.json")),
    *(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("homework/submissions/**/*") if path.is_file()),
]
TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def _run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel is made of, copied: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("a checkout")
    for name in ROOMS:
        shutil.copytree(ROOT / name, folder / name, ignore=NOT_SHIPPED)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in DEMO:
        target = folder / "examples" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(EXAMPLES / name, target)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    files = {path.relative_to(checkout) for path in checkout.rglob("*")}
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), ".", cwd=checkout)
    shutil.rmtree(checkout / "build", ignore_errors=True)
    assert files <= {path.relative_to(checkout) for path in checkout.rglob("*")}
    return next(folder.glob("*.whl"))


def test_imports_follow_the_arrows() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    assert " 0 broken" in _run(str(lint), "--no-cache")


def test_the_arrows_cover_every_room() -> None:
    contracts = (ROOT / ".importlinter").read_text()
    roots = contracts.split("root_packages =")[1].split("include_external")[0].split()
    assert sorted(roots) == sorted(ROOMS)


def test_the_wheel_holds_the_rooms_with_their_data_the_demo_and_nothing_else(checkout: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    there = {
        str(path.relative_to(checkout)) for name in ROOMS for path in (checkout / name).rglob("*") if path.is_file()
    }
    there |= {f"kvasir/demo_files/{name}" for name in DEMO}
    assert sorted(there - shipped) == []
    assert sorted(shipped - there) == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_that_it_is_typed(room: str) -> None:
    assert (ROOT / room / "py.typed").is_file()


def test_git_ignores_no_module_and_every_folder_of_them_is_a_package() -> None:
    """`submissions/` in .gitignore, which keeps students' work out, would keep the room of that name out too."""
    inside = [*ROOMS, "tests", "benchmarks", "examples"]
    ignored = _run("git", "ls-files", "--others", "--ignored", "--exclude-standard", *inside).splitlines()
    modules = [path for name in ROOMS for path in (ROOT / name).rglob("*.py")]

    assert [name for name in ignored if name.endswith(".py")] == []
    assert {path.parent for path in modules} == {path.parent for path in modules if path.name == "__init__.py"}


def test_the_wheel_carries_its_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        licenses = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert archive.read(licenses[0]) == (ROOT / "LICENSE").read_bytes()


def test_the_installed_wheel_owns_its_names(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "environment", with_pip=False, symlinks=True)
    python = str(tmp_path / "environment/bin/python")
    _run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", str(wheel))

    owners = "import json, importlib.metadata as m; print(json.dumps(m.packages_distributions()))"
    found = json.loads(_run(python, "-c", owners, cwd=tmp_path))
    assert found == {name: [DISTRIBUTION] for name in ROOMS}
    assert (tmp_path / "environment/bin/kvasir").exists()


def test_no_dependency_of_ours_owns_one_of_our_names() -> None:
    """This environment holds what pyproject.toml asks for: one of those could bring a package named `messages`."""
    owners = importlib.metadata.packages_distributions()
    strangers = {name: set(owners.get(name, [])) - {DISTRIBUTION} for name in ROOMS}
    assert {name: others for name, others in strangers.items() if others} == {}


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_what_to_do_for(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "a fresh clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    assert _run("make", "--dry-run", target, cwd=folder).strip()


def test_make_help_names_every_target() -> None:
    listed = _run("make", "help")
    declared = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert declared is not None
    assert [name for name in declared[1].split() if f"make {name} " not in listed] == []


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file()))
def test_scripts_are_plain_shell(script: str) -> None:
    assert (ROOT / "scripts" / script).read_text().startswith("#!/bin/sh\n")
    _run("sh", "-n", str(ROOT / "scripts" / script))


def test_a_machine_without_python_is_told_one_command(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "cat", "uname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [str(tools / "sh"), str(ROOT / "scripts/find-python")],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr
    assert "PYTHON=/path/to/python3" in done.stderr
