"""docs/configuration.md says what the schema says."""

from pathlib import Path

from infra.config.meanings import MEANINGS, TABLES
from infra.config.reference import keys, reference
from messages.installed import engine_names

PAGE = Path(__file__).resolve().parents[3] / "docs/configuration.md"


def test_every_key_has_a_meaning_and_no_meaning_is_left_over() -> None:
    weights = {f"models.weights.{name}" for name in engine_names()}  # their entries have it
    assert keys() == {*MEANINGS, *weights}


def test_every_table_is_on_the_page() -> None:
    assert all(meaning in reference() for meaning in TABLES.values())


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == reference(), "python -m infra.config.reference > docs/configuration.md"
