"""The pages of docs/reference say what the code says."""

import pytest

from docs.write_reference import PAGES, REFERENCE, keys
from infra.config.meanings import MEANINGS
from messages.installed import engine_names


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    assert (REFERENCE / name).read_text("utf-8") == PAGES[name](), "python -m docs.write_reference"


def test_every_key_has_a_meaning_and_no_meaning_is_left_over() -> None:
    weights = {f"models.weights.{name}" for name in engine_names()}  # their entries have it
    assert keys() == {*MEANINGS, *weights}
