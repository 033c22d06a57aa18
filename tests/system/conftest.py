"""What the desk's tests share: a desk for each file, and a browser for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.desk_page import DeskPage, quick_model


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeskPage]:
    folder = tmp_path_factory.mktemp("desk")
    with DeskPage(folder, quick_model(folder)) as opened:
        yield opened


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "browser") as opened:
        yield opened
