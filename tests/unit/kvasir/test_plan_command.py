"""`kvasir plan`: what it predicts, what it says of the team's targets, and how it answers bad input."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from infra.config.settings import load_settings
from kvasir.cli import run_command
from kvasir.plan.bound import lower_bound
from kvasir.plan.cluster import fleet_of
from kvasir.plan.simulate import typical
from kvasir.plan.targets import beside_goal
from kvasir.plan.workload import draw_class

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples/kvasir.toml"
HOMEWORK = ROOT / "examples/homework"


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str, config: Path = EXAMPLE) -> dict[str, Any]:
    assert run_command(["--config", str(config), "plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str, config: Path = EXAMPLE) -> str:
    assert run_command(["--config", str(config), "plan", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def _changed(folder: Path, *changes: tuple[str, str]) -> Path:
    text = EXAMPLE.read_text("utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    made = folder / "kvasir.toml"
    made.write_text(text, "utf-8")
    return made


def test_the_teams_machines_and_a_class_of_150(capsys: pytest.CaptureFixture[str]) -> None:
    found = _plan(capsys, "--submissions", "150")

    assert found["jobs"] == 300
    assert found["bound_s"] <= found["makespan_s"] < found["without_stealing_s"]
    assert found["students_per_hour"] == pytest.approx(150 * 3600 / found["makespan_s"])
    assert found["steals"] > 0
    assert {busy["machine"] for busy in found["busy"]} == {"mac1", "mac2", "spark1", "spark2"}
    assert {row["machine"] for row in found["what_if"]} == {"mac1", "mac2", "spark1", "spark2"}
    # Energy and cost follow from watts and prices
    assert found["energy_kwh"] == pytest.approx((240 + 240 + 175 + 140) / 1000 * found["makespan_s"] / 3600)
    assert found["electricity"] == pytest.approx(found["energy_kwh"] * 0.17)
    assert found["cost_per_submission"] == pytest.approx((found["electricity"] + found["hardware"]) / 150)


@pytest.mark.parametrize(("submissions", "students_per_hour"), [(150, 736), (600, 770)])
def test_sparks_that_do_both_come_near_the_bound(submissions: int, students_per_hour: int) -> None:
    # Given llama.cpp's published rates of the Sparks, 16 sequences each, and the Macs' single rates
    code, feedback = "qwen3-coder:30b", "gpt-oss:120b"
    fleet = fleet_of(load_settings(config=EXAMPLE), [code, feedback], steal=True)
    jobs = draw_class(submissions, code, feedback)

    # When the class is planned
    run = typical(fleet, jobs)

    # Then it is near what no schedule can beat, and no machine does more than it can
    assert submissions * 3600 / run.makespan_s >= students_per_hour
    assert submissions * 3600 / lower_bound(fleet, jobs) == pytest.approx(810, rel=0.01)
    for machine in fleet.machines():
        assert sum(run.busy_s.get((stage, machine), 0.0) for stage in ("prefill", "decode")) <= run.makespan_s


def test_the_bound_is_printed_beside_the_plan_and_without_scipy_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--config", str(EXAMPLE), "plan", "--submissions", "5"]
    assert run_command(command) == 0
    assert re.search(r"no schedule can beat [\d.]+ (s|min), \d+ students an hour", capsys.readouterr().out)

    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert run_command(command) == 0
    assert "pip install 'kvasir-inference[plan]'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "curve",
    [
        "[[4, 80], [1, 51]]",
        "[[1, 51], [1, 52]]",
        "[1, 51]",
        "[[1]]",
        "[[0, 5]]",
        "[[1, -5]]",
        "[[1, 0]]",
        '"fast"',
        "7",
    ],
)
def test_a_curve_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, curve: str) -> None:
    config = _changed(tmp_path, ("[[1, 51], [4, 80], [8, 115], [16, 150], [32, 197]]", curve))

    said = _refused(capsys, "--submissions", "3", config=config)

    assert "machines.spark1.rates.gpt-oss:120b.decode_curve must be pairs in ascending order" in said


def test_the_chart_shows_every_machine_and_every_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chart = tmp_path / "night.svg"

    found = _plan(capsys, "--submissions", "30", "--chart", str(chart))

    words = ElementTree.parse(chart).getroot().attrib["aria-label"]
    assert {name for name in ("mac1", "mac2") if f"{name} · decode" in words} == {"mac1", "mac2"}
    assert {name for name in ("spark1", "spark2") if f"{name} · prefill" in words} == {"spark1", "spark2"}
    # Each job once in each stage.
    assert sum(map(int, re.findall(r": (\d+) in \d+ at once", words))) == 2 * found["jobs"]


def test_a_chart_that_cant_be_written_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--chart" in _refused(capsys, "--submissions", "3", "--chart", str(tmp_path / "no" / "night.svg"))


def test_every_target_has_a_verdict_and_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    goals = {goal["name"]: goal for goal in _plan(capsys, "--submissions", "30")["targets"]}

    performance = ["latency", "throughput", "parallel efficiency", "utilisation"]
    assert list(goals) == [*performance, "uptime", "error rate", "energy", "cost"]
    assert not goals["throughput"]["met"]
    assert "times the" in goals["throughput"]["why"]
    machines = re.findall(r"(\w+\d) \d+%", goals["utilisation"]["why"])
    assert machines == ["mac1", "mac2", "spark1", "spark2"]  # once each, though the Sparks have two stages
    assert goals["energy"]["met"]
    assert all(goal["why"] for goal in goals.values())


@pytest.mark.parametrize(
    ("goal", "value", "digits", "text"),
    [(60, 68.2, 0, "68"), (60, 59.98, 0, "59.98"), (15, 14.97, 1, "14.97"), (50, 12345.6, 0, "12,346")],
)
def test_a_prediction_never_reads_like_the_goal_that_it_missed(
    goal: float, value: float, digits: int, text: str
) -> None:
    assert beside_goal(goal, value, digits) == text


def test_what_is_not_known_is_neither_met_nor_missed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = _plan(capsys, "--submissions", "5", config=_changed(tmp_path, ("watts = 140", "")))

    goals = {goal["name"]: goal["met"] for goal in found["targets"]}
    assert goals["energy"] is None
    assert goals["cost"] is None
    assert found["energy_kwh"] is None


def test_without_stealing_the_plan_says_what_stealing_would_have_saved(capsys: pytest.CaptureFixture[str]) -> None:
    found = _plan(capsys, "--submissions", "30", "--no-steal")

    assert found["steals"] == 0
    assert found["makespan_s"] == found["without_stealing_s"]


def test_a_mac_without_room_for_both_models_steals_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = _changed(
        tmp_path, ("memory_gb = 512", "memory_gb = 200"), ("memory_gb = 128\nlink", "memory_gb = 90\nlink")
    )

    assert _plan(capsys, "--submissions", "30", config=small)["steals"] == 0


def test_a_folder_is_planned_with_the_prompts_that_grading_makes(capsys: pytest.CaptureFixture[str]) -> None:
    found = _plan(capsys, str(HOMEWORK / "submissions"), "--rubric", str(HOMEWORK / "rubric.yaml"))

    assert found["jobs"] > found["submissions"] > 0
    assert found["computed_tokens"] < found["prompt_tokens"]


def test_people_get_tables_that_end_with_the_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--config", str(EXAMPLE), "plan", "--submissions", "5"]) == 0

    shown = capsys.readouterr().out
    assert "students an hour" in shown
    assert shown.index("one more like") < shown.index("target") < shown.index("10 requests/s")


def test_a_hybrid_models_smaller_kv_cache_spares_the_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    attends = "kv_bytes_per_token = 98304"
    hybrid = _changed(tmp_path, (attends, "kv_bytes_per_token = 24576\nkv_state_bytes = 79036416"))

    (before, *_), (after, *_) = (
        _plan(capsys, "--submissions", "30", config=config)["lone"] for config in (EXAMPLE, hybrid)
    )

    # A quarter of the bytes for each token of the prompt, and the state once
    state_s = 79036416 * 8 / 10e9
    assert after["kv_transfer_s"] == pytest.approx(before["kv_transfer_s"] / 4 + state_s)
    assert after["kv_transfer_s"] < before["kv_transfer_s"] / 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "either a FOLDER of submissions or --submissions N"),
        (["here", "--submissions", "3"], "either a FOLDER"),
        (["--submissions", "3", "--solution", "s.R"], "--solution can't be used with --submissions N"),
        (["--submissions", "3", "--template", "t.R"], "--template can't be used"),
        (["--submissions", "3", "--rubric", str(HOMEWORK / "rubric.yaml")], "--rubric can't be used"),
        (["--submissions", "0"], "--submissions"),
        (["--submissions", "many"], "--submissions"),
        ([str(HOMEWORK / "submissions")], "--rubric"),
        (["nowhere", "--rubric", str(HOMEWORK / "rubric.yaml")], "nowhere"),
        (["--submissions", "3", "--code-model", "llama"], "llama"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in _refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('rates."gpt-oss:120b".prefill = 1750', ""), 'set rates."gpt-oss:120b".prefill'),
        (
            ('{ role = "prefill", model = "qwen3-coder:30b", engine = "llamacpp" },', ""),
            "no machine has the role prefill",
        ),
    ],
)
def test_a_configuration_that_lacks_something_says_what(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    assert said in _refused(capsys, "--submissions", "3", config=_changed(tmp_path, change))


def test_a_configuration_without_machines_points_to_the_example(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bare = tmp_path / "kvasir.toml"
    bare.write_text('[grading]\ncode_model = "m"\nfeedback_model = "m"\n[models.m]\n', "utf-8")

    assert "examples/kvasir.toml" in _refused(capsys, "--submissions", "3", config=bare)
