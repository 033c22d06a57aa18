"""PyTorch's tests import it at once: a run that asks for none of them need not have it.

`make test-torch` without it collects nothing, and pytest ends with 5: a failure.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    unwanted = "not torch" in config.getoption("markexpr") or find_spec("torch") is None
    return True if unwanted else None
