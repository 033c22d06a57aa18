"""The parts of the fleet and overhead benchmarks that decide what their figures mean."""

import pytest

from benchmarks import fleet, fleet_contending, overhead
from benchmarks.fleet_draw import SAMPLING, PromptKind, draw
from engines.registry import EngineOptions
from engines.simulated.engine import open_engine
from kvasir.plan.simulate import Stealing, simulate
from messages.jobs import user_prompt


def test_the_truth_of_a_drawn_job_is_what_the_engine_will_answer() -> None:
    kinds = PromptKind("code", 40, 3.0), PromptKind("feedback", 90, 10.0)

    prompts = draw(6, *kinds, seed=1)

    for kind in kinds:
        engine = open_engine(EngineOptions(kind.weights(0.0)))
        for prompt in [prompt for prompt in prompts if prompt.job.model == kind.model]:
            tokens = engine.tokenize(user_prompt(prompt.shared, prompt.own), 0.0)
            assert engine.decode(tokens.ids, None, SAMPLING).completion_tokens == prompt.job.answer_tokens
            assert prompt.job.prompt_tokens == len(tokens.ids) - 1


def test_answers_spread_as_told_and_nothing_that_travels_tells_their_length() -> None:
    lengths = [
        prompt.job.answer_tokens for prompt in draw(60, PromptKind("c", 200, 10.0), PromptKind("f", 200, 10.0), 0)
    ]

    assert 5 < max(lengths) / min(lengths) <= 11
    assert SAMPLING.max_tokens > max(lengths)


@pytest.mark.parametrize("mix", fleet.MIXES, ids=lambda mix: f"{mix.name}, {mix.slots}")
def test_a_rows_clock_makes_the_median_decode_a_second_with_the_usual_slots(mix: fleet.Mix) -> None:
    cast, prompts = fleet.prepare(mix, 12, 1.0, seed=0)

    run = simulate(cast.fleet(), [prompt.job for prompt in prompts], Stealing())

    assert len(run.timings) == len(prompts) == 24
    seconds = sorted(timing.ended_s - timing.started_s for timing in run.timings)
    assert 0.5 < seconds[12] * fleet.USUAL_SLOTS / mix.slots < 2.0
    assert sum(mac.slots for mac in cast.macs) == 2 * mix.slots


def test_the_steady_rate_leaves_out_the_start_and_the_end() -> None:
    moments = [100.0, *(110 + number / 10 for number in range(18)), 200.0]

    assert overhead.steady_rate(moments, 20) == pytest.approx(10.0)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100)]

    assert overhead.percentile(values, 0.5) == 50.0
    assert overhead.percentile(values, 0.99) == 99.0
    assert overhead.percentile([7.0], 0.99) == 7.0


def test_a_rate_over_no_time_to_speak_of_is_refused_and_measured_with_more_jobs() -> None:
    measured: list[int] = []

    def measure(jobs: int) -> float:
        measured.append(jobs)
        return overhead.steady_rate([number / 5000 for number in range(jobs)], jobs)

    with pytest.raises(overhead.TooShort, match=r"239 answers in 0.05 s: a rate over less than 1 s says nothing"):
        measure(300)
    assert overhead.long_enough(measure, 1000) == pytest.approx(5000)
    assert measured[1:] == [1000, 3000, 9000]


@pytest.mark.parametrize("mix", [*fleet.MIXES, fleet_contending.TEAM], ids=lambda mix: f"{mix.name}, {mix.slots}")
def test_machines_that_contend_stay_above_the_bound_and_gain_by_both_roles(mix: fleet.Mix) -> None:
    row = fleet_contending.measure(mix, 40, seed=0)

    assert float(str(row["ratio_to_lp"])) >= 1.0
    assert float(str(row["ratio_single_roles"])) > 1.0
    assert fleet_contending.worst([row], 40) == row["ratio_to_lp"]
