"""PyTorch's tests import it at once: a run that asks for none of them need not have it."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if "not torch" in config.getoption("markexpr") else None
