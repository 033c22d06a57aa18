"""The lower bound of a plan: the linear programme, beside figures that were computed elsewhere."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir.plan.bound import linear_bound, lower_bound
from kvasir.plan.fleet import Decoder, Fleet, PlannedJob, Prefiller, Rate
from messages.errors import ConfigError
from messages.workers import RateCurve

TOOL = Path(__file__).resolve().parents[4] / "shared/tools/fleet_lp.py"
CODE, FEEDBACK = "code", "feedback"
STUDENTS = 150
# llama.cpp's own table for the GB10 (benches/dgx-spark/dgx-spark.md), tokens a second of 16 and of 32 sequences.
SPARK_PREFILL = {CODE: 2890.0, FEEDBACK: 1750.0}
SPARK_DECODE = {16: {CODE: 122.0, FEEDBACK: 150.0}, 32: {CODE: 143.0, FEEDBACK: 197.0}}
MACS = (
    Decoder("mac1", FEEDBACK, 4, {FEEDBACK: 28.0, CODE: 97.0}),
    Decoder("mac2", CODE, 4, {CODE: 65.0, FEEDBACK: 18.75}),
)


def _jobs() -> list[PlannedJob]:
    lengths = {CODE: (7583, 480), FEEDBACK: (3380, 1342)}
    return [
        PlannedJob(f"{number}.{model}", model, 0, prompt, answer)
        for number in range(STUDENTS)
        for model, (prompt, answer) in lengths.items()
    ]


def _fleet(slots: int, home_only: bool = False) -> Fleet:
    """The Sparks do both, each with one model or with both."""
    prefillers, decoders = [], list(MACS)
    for machine, home in (("spark1", CODE), ("spark2", FEEDBACK)):
        models = [home] if home_only else [CODE, FEEDBACK]
        rates: dict[str, Rate] = {
            model: RateCurve(model, (float(slots),), (SPARK_DECODE[slots][model],)) for model in models
        }
        prefillers += [Prefiller(machine, model, SPARK_PREFILL[model]) for model in models]
        decoders.append(Decoder(machine, home, slots, rates))
    return Fleet(tuple(prefillers), tuple(decoders))


FLEETS = {
    "as configured": Fleet((Prefiller("spark1", CODE, 1750.0), Prefiller("spark2", FEEDBACK, 1000.0)), MACS),
    "fluid B16": _fleet(16),
    "fluid B32": _fleet(32),
    "fluid B16, each spark its home model only": _fleet(16, home_only=True),
}


@pytest.mark.parametrize(
    ("name", "students_per_hour"),
    list(zip(FLEETS, (455, 810, 880, 719), strict=True)),
)
def test_the_teams_fleet_is_bounded_as_computed_by_hand(name: str, students_per_hour: int) -> None:
    assert round(STUDENTS * 3600 / linear_bound(FLEETS[name], _jobs())) == students_per_hour


def test_the_bound_is_that_of_the_separate_programme() -> None:
    if not TOOL.exists():
        pytest.skip("the separate linear programme, ../shared/tools/fleet_lp.py, is not beside the checkout")
    printed = subprocess.run([sys.executable, TOOL], capture_output=True, text=True, check=True, timeout=60).stdout
    rows = dict(re.findall(r"^(.*?) {2,}(\d+) s", printed, re.M))

    for name, fleet in FLEETS.items():
        # The tool prints whole seconds
        assert linear_bound(fleet, _jobs()) == pytest.approx(float(rows[name]), rel=1e-3, abs=0.5)


def test_each_interval_has_the_machines_that_are_there() -> None:
    jobs = [PlannedJob("a", "m", 0, 0, 100)] * 4
    always = Decoder("one", "m", 1, {"m": 10.0})
    late, dead = Decoder("two", "m", 1, {"m": 10.0}, joins_s=10.0), Decoder("three", "m", 1, {"m": 10.0}, dies_s=5.0)

    # 10 s of one and 15 s of two; 5 s of two and 30 s of one; 5 s of two, 5 s of one and 12.5 s of two
    for decoders, seconds in (((always, late), 25.0), ((always, dead), 35.0), ((always, late, dead), 22.5)):
        fleet = Fleet((Prefiller("spark", "m", 1.0),), decoders)
        assert lower_bound(fleet, jobs) == pytest.approx(seconds)
    assert lower_bound(Fleet((Prefiller("spark", "m", 1.0),), (dead,)), jobs) == math.inf


def test_a_machine_that_does_both_has_its_time_once() -> None:
    jobs = [PlannedJob("a", "m", 0, 100, 100)] * 10
    fleet = Fleet((Prefiller("spark", "m", 100.0),), (Decoder("spark", "m", 2, {"m": 50.0}),))

    assert lower_bound(fleet, jobs) == pytest.approx(10.0 + 10.0)


def test_one_long_job_bounds_a_class_that_all_machines_together_would_end_sooner() -> None:
    fleet = Fleet((Prefiller("spark", "m", 100.0),), (Decoder("mac", "m", 10, {"m": 10.0}),))

    assert lower_bound(fleet, [PlannedJob("long", "m", 0, 100, 900)]) == pytest.approx(1.0 + 90.0)


def test_without_scipy_the_bound_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)

    with pytest.raises(ConfigError, match=r"pip install 'kvasir-inference\[plan\]'"):
        lower_bound(FLEETS["as configured"], _jobs())
