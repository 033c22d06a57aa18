"""The wheel holds the rooms, and they can be imported where it is installed."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.rooms import ROOMS

pytestmark = [pytest.mark.system, pytest.mark.gate]  # it is built and installed

_OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
DISTRIBUTION = "kvasir-inference"
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", ".DS_Store")
EXAMPLES = ROOT / "examples"
DEMO = [
    *("demo.toml", "model/kvasir-demo.gguf"),
    *(f"homework/{name}" for name in ("rubric.yaml", "solution.ipynb", "template.ipynb")),
    *("homework/gradebook.csv", "homework/expected.json"),
    *(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("homework/submissions/**/*") if path.is_file()),
]
# Every package of the rooms, imported: where each was found.
_IMPORT = """
import importlib, json, pkgutil, sys
packages = {}
for room in sys.argv[1:]:
    module = importlib.import_module(room)
    packages[room] = module.__file__
    for inner in pkgutil.walk_packages(module.__path__, room + "."):
        if inner.ispkg:
            packages[inner.name] = importlib.import_module(inner.name).__file__
print(json.dumps(packages))
"""


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=_OUTSIDE, stdin=subprocess.DEVNULL, capture_output=True, text=True)
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


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new virtual environment, in which the wheel is installed and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    _run(*pip, "install", "-q", "--no-deps", "--no-index", str(wheel), cwd=folder)
    return python


def test_the_wheel_holds_the_rooms_with_their_data_the_demo_and_nothing_else(checkout: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    there = {
        str(path.relative_to(checkout)) for name in ROOMS for path in (checkout / name).rglob("*") if path.is_file()
    }
    there |= {f"kvasir/demo_files/{name}" for name in DEMO}
    assert sorted(there - shipped) == []
    assert sorted(shipped - there) == []


def test_the_wheel_carries_its_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        licenses = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert archive.read(licenses[0]) == (ROOT / "LICENSE").read_bytes()


def test_the_installed_wheel_owns_its_names(python: Path, tmp_path: Path) -> None:
    owners = "import json, importlib.metadata as m; print(json.dumps(m.packages_distributions()))"
    found = json.loads(_run(str(python), "-c", owners, cwd=tmp_path))
    assert found == {name: [DISTRIBUTION] for name in ROOMS}
    assert python.with_name("kvasir").exists()


def test_every_room_is_imported_from_the_installed_wheel(python: Path, tmp_path: Path) -> None:
    """What they need comes from the folder of this environment, which is looked in last."""
    beside = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})"
    packages = json.loads(_run(str(python), "-c", f"{beside}\n{_IMPORT}", *ROOMS, cwd=tmp_path))
    assert set(ROOMS) <= set(packages)
    home = python.parent.parent
    assert [name for name, file in packages.items() if not Path(file).is_relative_to(home)] == []
