"""Folders of slot files lie in memory and hold students' texts: what a killed process left there is removed."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engines.llamacpp.start import make_slot_folder
from messages.errors import ConfigError

MAKES_ONE = """
import sys
from pathlib import Path
from engines.llamacpp.start import make_slot_folder
folder, _ = make_slot_folder(Path(sys.argv[1]))
(folder / "slot").write_text("a student's work")
print(folder, flush=True)
sys.stdin.read()
"""


def make_in_another_process(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    folder = Path(process.stdout.readline().strip())
    yesterday = time.time() - 86_400
    os.utime(folder, (yesterday, yesterday))
    return process, folder


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    process, left = make_in_another_process(tmp_path)
    end(process)
    assert left.is_dir()

    made, _ = make_slot_folder(tmp_path)

    assert list(tmp_path.iterdir()) == [made]


def test_the_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    process, living = make_in_another_process(tmp_path)
    try:
        make_slot_folder(tmp_path)

        assert (living / "slot").is_file()
    finally:
        end(process)


def test_links_and_other_peoples_names_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    os.utime(precious, (0, 0))
    here = tmp_path / "here"
    here.mkdir()
    (here / "kvasir-slots-link").symlink_to(precious)
    os.utime(here / "kvasir-slots-link", (0, 0), follow_symlinks=False)

    make_slot_folder(here)

    assert (precious / "file").is_file()


def test_a_folder_is_removed_once(tmp_path: Path) -> None:
    folder, remove = make_slot_folder(tmp_path)

    remove()
    remove()

    assert not folder.exists()


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_no_folder_is_made_where_others_can_exchange_it(tmp_path: Path, mode: int) -> None:
    everybodys = tmp_path / "everybodys"
    (everybodys / "mine").mkdir(parents=True)
    everybodys.chmod(mode)
    for parent in (everybodys, everybodys / "mine"):
        with pytest.raises(ConfigError, match=r"other users can rename files in .*everybodys$"):
            make_slot_folder(parent)
    assert [path.name for path in everybodys.rglob("*")] == ["mine"]
    everybodys.chmod(mode | stat.S_ISVTX)  # as /dev/shm is
    folder, remove = make_slot_folder(everybodys / "mine")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    remove()
