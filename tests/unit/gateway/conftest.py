"""A gateway over a pipeline of simulated engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway import ServedGateway
from tests.support.pipeline import Pipeline


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline() as pipeline:
        yield pipeline


@pytest.fixture
def served(pipeline: Pipeline, tmp_path: Path) -> Iterator[ServedGateway]:
    """Nobody works yet: start workers in the pipeline."""
    with ServedGateway(pipeline.client, tmp_path) as served:
        yield served


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    """With workers, for tests that leave no trace in it."""
    with Pipeline() as pipeline:
        pipeline.start()
        with ServedGateway(pipeline.client, tmp_path_factory.mktemp("home")) as served:
            yield served
