"""What several acceptance tests look at: one run of the demo."""

import pytest

from tests.support.homework import Demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The demo's one full run."""
    return Demo(tmp_path_factory.mktemp("demo") / "results")
