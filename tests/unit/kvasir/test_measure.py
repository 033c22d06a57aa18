"""`kvasir measure`: the curves of an engine whose rates are known, and the block that the plan reads again."""

import json
import time
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from engines.registry import EngineOptions, open_engine
from kvasir import measure
from kvasir.cli import run_command
from messages.errors import UsageError
from messages.workers import Link

WEIGHTS = "sim:prefill=20000,decode=2000,scale=1,layers=1,kv_heads=1,head_dim=8,answer=200,spread=1,context=4096"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    file = tmp_path / "kvasir.toml"
    file.write_text(f'[models."big:m"]\nengine = "simulated"\nweights.simulated = "{WEIGHTS}"\n', "utf-8")
    return file


def test_the_rates_of_a_simulated_engine_are_found_again() -> None:
    engine = open_engine("simulated", EngineOptions(WEIGHTS, slots=2))

    prefill = dict(measure.prefill_points(engine, time.monotonic()))
    decode = dict(measure.decode_points(engine, 2, time.monotonic()))

    assert prefill[2048] == pytest.approx(20_000, rel=0.3)
    assert list(decode) == [1, 2]
    assert 0 < decode[1] < decode[2] <= 2 * 2000 * 1.3


def test_the_block_is_read_by_the_plan_and_the_file_keeps_what_was_measured(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["--config", str(config), "measure", "--slots", "3", "--machine", "mac", "--minutes", "0"]) == 0

    block = capsys.readouterr().out
    rates = tomllib.loads(block)["machines"]["mac"]["rates"]["big:m"]
    assert [at for at, _ in rates["decode_curve"]] == [1, 2, 3]
    assert "simulated on simulated" in block
    kept = json.loads((tmp_path / "data/kvasir" / measure.FILE_NAME).read_text("utf-8"))["models"]["big:m"]
    assert {key: kept[key] for key in ("prefill_curve", "decode_curve")} == rates
    # And kvasir.toml takes it as it is
    config.write_text(config.read_text("utf-8") + block, "utf-8")
    assert run_command(["--config", str(config), "config"]) == 0


def test_other_models_measured_earlier_are_kept_and_a_damaged_file_is_said(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    measure.keep(file, "models", {"one": {"decode_curve": [[1, 5.0]]}})
    measure.keep(file, "models", {"two": {}})

    assert set(json.loads(file.read_text("utf-8"))["models"]) == {"one", "two"}
    file.write_text("[", "utf-8")
    with pytest.raises(UsageError, match=r"can't save the measurements in .*rates\.json"):
        measure.keep(file, "models", {})


def test_models_and_links_keep_each_other_and_links_that_can_not_be_read_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    file, link = tmp_path / "kvasir" / measure.FILE_NAME, Link("spark", 0.3, mb_per_s=110.0, rmem_max=212_992)
    assert measure.kept_links() == ()

    measure.keep(file, "links", {"spark": asdict(link)})
    measure.keep(file, "models", {"one": {}})

    assert measure.kept_links() == (link,)
    assert set(json.loads(file.read_text("utf-8"))["models"]) == {"one"}
    for damaged in (
        "[",
        "[]",
        "{}",
        '{"links": []}',
        '{"links": {"a": {"later": 1}}}',
        '{"links": {"a": {"peer": 1}}}',
    ):
        file.write_text(damaged, "utf-8")
        assert measure.kept_links() == ()


def test_without_a_model_the_command_says_what_to_configure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "kvasir.toml"
    bare.write_text("", "utf-8")

    assert run_command(["--config", str(bare), "measure"]) == 2
    assert "[models.NAME]" in capsys.readouterr().err
