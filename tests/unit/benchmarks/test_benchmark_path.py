"""`benchmarks.path` counts what it says."""

from pathlib import Path

import pytest

from benchmarks import harness, path
from tests.support.rooms import ROOMS


def test_statements_are_counted_at_every_depth_and_docstrings_are_none(tmp_path: Path) -> None:
    source = '''\
"""A module."""
try:
    match 1:
        case 1:
            x = 1
        case _:
            pass
except ValueError:
    x = [n for n in (1, 2)]
else:

    def f():
        """A function."""
        return 1
finally:
    del x
'''
    (tmp_path / "a.py").write_text(source)

    assert path.statements(tmp_path) == 8


def test_every_room_is_counted_and_their_sum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["path", "--quick"])

    assert path.main() == 0

    found = harness.last_object(capsys.readouterr().out)["statements"]
    assert list(found) == [*ROOMS, "all"]
    assert min(found.values()) > 0
    assert found["all"] == sum(found[room] for room in ROOMS)
