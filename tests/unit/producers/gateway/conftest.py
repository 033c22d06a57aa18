"""A gateway over a pipeline of simulated engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway import Served
from tests.support.pipeline import Pipeline


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline() as pipeline:
        yield pipeline


@pytest.fixture
def served(pipeline: Pipeline, tmp_path: Path) -> Iterator[Served]:
    """Nobody works yet: start workers in the pipeline."""
    with Served(pipeline.client, tmp_path) as served:
        yield served
