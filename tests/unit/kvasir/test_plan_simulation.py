"""The simulation of the pipeline: cases computed by hand, and what holds for every class and fleet."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.plan.bound import lower_bound
from kvasir.plan.fleet import Decoder, Fleet, PlannedJob, Prefiller
from kvasir.plan.simulate import DecoderState, MachineState, SimulationState, Stealing, simulate, typical
from kvasir.plan.workload import CODE, draw_class
from messages.workers import RateCurve

A, B = "a", "b"


class AtHome(Stealing):
    """Each decoder serves its home model and nothing else."""

    def choose(self, state: SimulationState, decoder: DecoderState) -> str | None:
        return decoder.worker.model

    def choose_prompt(self, state: SimulationState, machine: MachineState, models: Sequence[str]) -> str | None:
        return max((model for model in models if state.prompts(model)), key=state.prompts, default=None)


def _fleet(*decoders: Decoder, **more: object) -> Fleet:
    prefillers = (Prefiller("spark-a", A, 100.0), Prefiller("spark-b", B, 100.0))
    return Fleet(prefillers, decoders, **more)  # type: ignore[arg-type]


def _jobs(count: int, model: str = A, answer: int = 100, shared: int = 0, own: int = 100) -> list[PlannedJob]:
    return [PlannedJob(f"{model}{number}", model, shared, own, answer) for number in range(count)]


def test_one_job_takes_its_prefill_and_its_decode() -> None:
    fleet, jobs = _fleet(Decoder("mac", A, 1, {A: 10.0})), _jobs(1, shared=50)

    run = simulate(fleet, jobs, AtHome())

    assert run.makespan_s == 1.5 + 10.0 == lower_bound(fleet, jobs)
    assert run.busy_s == {("prefill", "spark-a"): 1.5, ("decode", "mac"): 10.0}


def test_the_class_wide_part_is_computed_once_and_stages_overlap() -> None:
    fleet, jobs = _fleet(Decoder("mac", A, 1, {A: 100.0})), _jobs(3, shared=400, own=200)

    run = simulate(fleet, jobs, AtHome())

    # Prefill ends after 6, 8 and 10 s; each decode takes 1 s and waits for nothing.
    assert [timing.ended_s for timing in run.timings] == [7.0, 9.0, 11.0]
    assert lower_bound(fleet, jobs) == pytest.approx(10.0)


def test_two_slots_share_four_jobs() -> None:
    run = simulate(_fleet(Decoder("mac", A, 2, {A: 10.0})), _jobs(4, own=0), AtHome())

    assert run.makespan_s == 20.0
    assert run.busy_s["decode", "mac"] == 20.0


def test_a_second_prefill_worker_waits_for_the_class_wide_part_and_then_helps() -> None:
    prefillers = (Prefiller("one", A, 100.0), Prefiller("two", A, 100.0))
    fleet = Fleet(prefillers, (Decoder("mac", A, 9, {A: 100.0}),))

    run = simulate(fleet, _jobs(4, shared=500, own=100), AtHome())

    assert run.makespan_s == 5.0 + 2 * 1.0 + 1.0


def test_a_transfer_costs_time_only_where_the_job_had_just_arrived() -> None:
    fleet = _fleet(Decoder("mac", A, 1, {A: 10.0}), kv_transfer_s={A: 0.02}, decode_overhead_s=0.5)

    run = simulate(fleet, _jobs(2), AtHome())

    # 1 s of prefill, 2 s of transfer; the second job has waited longer than its transfer takes.
    assert [timing.ended_s for timing in run.timings] == [1 + 2 + 0.5 + 10, 13.5 + 0.5 + 10]


def test_a_thief_with_nothing_to_do_takes_half_of_the_others_work() -> None:
    fleet = _fleet(Decoder("mac1", A, 1, {A: 10.0, B: 10.0}), Decoder("mac2", B, 1, {A: 10.0, B: 10.0}))

    alone, helped = simulate(fleet, _jobs(10), AtHome()), simulate(fleet, _jobs(10), Stealing())

    assert alone.steals == 0
    assert alone.makespan_s == 101.0
    assert helped.steals == 5
    assert helped.makespan_s == 52.0


def test_a_steal_that_needs_a_long_load_is_not_made() -> None:
    fleet = _fleet(
        Decoder("mac1", A, 1, {A: 10.0, B: 10.0}), Decoder("mac2", B, 1, {A: 10.0, B: 10.0}, load_s={A: 500.0})
    )

    assert simulate(fleet, _jobs(10), Stealing()).steals == 0


def test_what_a_dead_worker_was_doing_is_done_again() -> None:
    fleet = _fleet(Decoder("mac1", A, 1, {A: 10.0}), Decoder("mac2", A, 1, {A: 10.0}, dies_s=5.0))

    run = simulate(fleet, _jobs(2, own=0), AtHome())

    assert [(timing.machine, timing.ended_s) for timing in run.timings] == [("mac1", 10.0), ("mac1", 20.0)]
    assert run.busy_s["decode", "mac2"] == 5.0
    assert lower_bound(fleet, _jobs(2, own=0)) == 15.0


def test_a_worker_that_joins_late_takes_nothing_before() -> None:
    fleet = _fleet(Decoder("mac1", A, 1, {A: 10.0}), Decoder("mac2", A, 1, {A: 10.0}, joins_s=15.0))

    run = simulate(fleet, _jobs(3, own=0), AtHome())

    assert [(timing.machine, timing.ended_s) for timing in run.timings][-1] == ("mac2", 25.0)


def test_jobs_of_a_model_that_nobody_serves_stay_and_have_no_bound() -> None:
    fleet, jobs = _fleet(Decoder("mac", A, 1, {A: 10.0})), _jobs(1, B)

    assert simulate(fleet, jobs, AtHome()).timings == ()
    assert lower_bound(fleet, jobs) == float("inf")


def test_classes_take_turns_in_both_stages_and_what_comes_back_is_first() -> None:
    large, small = ([replace(job, name=f"{name}{job.name}", prefix=name) for job in _jobs(4)] for name in ("x", "y"))
    fleet = _fleet(Decoder("dies", A, 1, {A: 10.0}, dies_s=5.0), Decoder("mac", A, 1, {A: 10.0}))

    run = simulate(fleet, [*large, *small[:2]])

    assert [timing.job.name for timing in run.prefills] == ["xa0", "ya0", "xa1", "ya1", "xa2", "xa3"]
    # The first one is begun twice: once where the worker dies after 5 s, and then before everything else
    assert [timing.job.name for timing in run.timings] == ["ya0", "xa0", "ya1", "xa1", "xa2", "xa3"]


def test_no_jobs_take_no_time() -> None:
    fleet = _fleet(Decoder("mac", A, 1, {A: 10.0}))

    assert simulate(fleet, [], AtHome()).makespan_s == lower_bound(fleet, []) == 0.0


def test_slots_of_different_speeds_are_bounded_by_what_each_does_best() -> None:
    # mac1 is ten times as fast with A, mac2 with B: a sum of rates for "tokens" would say too little.
    fleet = _fleet(Decoder("mac1", A, 1, {A: 10.0, B: 1.0}), Decoder("mac2", B, 1, {A: 1.0, B: 10.0}))
    jobs = _jobs(5, A, own=0) + _jobs(5, B, own=0)

    assert lower_bound(fleet, jobs) == pytest.approx(50.0)
    assert simulate(fleet, jobs, Stealing()).makespan_s == pytest.approx(50.0)


def test_sequences_of_one_model_share_its_curve() -> None:
    curve = RateCurve(A, (1.0, 2.0), (10.0, 16.0))
    run = simulate(_fleet(Decoder("mac", A, 2, {A: curve})), _jobs(2, own=0), AtHome())

    # Two of 100 tokens at 8 tokens a second each
    assert [timing.ended_s for timing in run.timings] == pytest.approx([12.5, 12.5])


def test_models_with_curves_take_turns_token_by_token() -> None:
    alone = {model: RateCurve(model, (1.0,), (10.0,)) for model in (A, B)}
    decoder = Decoder("mac", A, 2, alone)

    assert decoder.paces({A: 1, B: 1}) == pytest.approx({A: 5.0, B: 5.0})
    assert decoder.paces({A: 2}) == pytest.approx({A: 5.0})
    # Single rates hold whoever sits beside
    assert Decoder("mac", A, 2, {A: 10.0, B: 3.0}).paces({A: 1, B: 1}) == pytest.approx({A: 10.0, B: 3.0})


def test_what_a_machine_decodes_waits_while_it_prefills() -> None:
    fleet = Fleet((Prefiller("one", A, 100.0),), (Decoder("one", A, 4, {A: 10.0}),))

    run = simulate(fleet, _jobs(2), Stealing())

    # Two prompts of a second each, of which the second holds up the first one's answer, and then 10 s for both
    assert run.makespan_s == pytest.approx(12.0)
    assert run.busy_s["prefill", "one"] + run.busy_s["decode", "one"] <= run.makespan_s


def test_a_worker_with_both_roles_prefills_no_further_than_the_watermark() -> None:
    fleet = Fleet((Prefiller("one", A, 1000.0),), (Decoder("one", A, 4, {A: 10.0}),))

    run = simulate(fleet, _jobs(40), Stealing())

    begun = {timing.job.name: timing.started_s for timing in run.timings}
    waiting = [
        sum(other.ended_s <= prefill.ended_s < begun[other.job.name] for other in run.prefills)
        for prefill in run.prefills
    ]
    assert max(waiting) <= 3  # the watermark of four slots is two, and one more is under way


def test_a_machine_of_both_roles_whose_decode_worker_comes_late_prefills_up_to_the_watermark_and_waits() -> None:
    late = Decoder("one", A, 4, {A: 10.0}, joins_s=100.0)

    run = simulate(Fleet((Prefiller("one", A, 1000.0),), (late,)), _jobs(5), Stealing())

    assert len(run.timings) == 5
    assert sorted(prefill.ended_s < 100.0 for prefill in run.prefills) == [False] * 3 + [True] * 2


def test_a_model_that_a_machine_of_both_roles_does_not_decode_is_prefilled_there_all_the_same() -> None:
    prefillers = (Prefiller("spark", A, 100.0), Prefiller("spark", B, 100.0))
    fleet = Fleet(prefillers, (Decoder("spark", A, 4, {A: 10.0}), Decoder("mac", B, 4, {B: 10.0})))

    run = simulate(fleet, [*_jobs(9), *_jobs(9, B)], Stealing())

    assert Counter(timing.job.model for timing in run.timings) == {A: 9, B: 9}


def test_a_machine_of_both_roles_leaves_prompts_to_one_that_prefills_better_until_it_would_idle() -> None:
    def prefilled(mac_rate: float) -> Counter[str]:
        prefillers = (Prefiller("spark", A, 200.0), Prefiller("mac", A, mac_rate))
        decoders = (Decoder("spark", A, 4, {A: 2.0}), Decoder("mac", A, 4, {A: 2.0}))
        run = simulate(Fleet(prefillers, decoders), _jobs(40), Stealing())
        assert len(run.timings) == 40
        return Counter(prefill.machine for prefill in run.prefills)

    alike, worse = prefilled(200.0), prefilled(100.0)

    assert 0 < worse["mac"] < alike["mac"]


rates = st.floats(1.0, 100.0)
curves = st.builds(lambda one, more: RateCurve(A, (1.0, 3.0), (one, one * more)), rates, st.floats(0.5, 3.0))
decoders = st.builds(
    lambda machine, home, slots, a, b, joins, lives: Decoder(
        machine, home, slots, {A: a, B: b}, {}, joins, joins + lives
    ),
    *(st.sampled_from(["mac", "spark-a"]), st.sampled_from([A, B]), st.integers(1, 4)),
    *(st.one_of(rates, curves), st.one_of(rates, curves), st.floats(0.0, 50.0), st.floats(1.0, 1e6)),
)
classes = st.lists(
    st.builds(
        PlannedJob, st.uuids().map(str), st.sampled_from([A, B]), st.just(300), st.integers(0, 500), st.integers(1, 900)
    ),
    max_size=40,
)
policies = st.sampled_from([AtHome, Stealing])


@given(st.lists(decoders, max_size=3), classes, policies)
@settings(max_examples=150, deadline=None)
def test_every_job_ends_once_and_never_sooner_than_the_bound(
    others: list[Decoder], jobs: list[PlannedJob], policy: type[Stealing]
) -> None:
    constant = [Decoder("home-a", A, 2, {A: 20.0, B: 5.0}), Decoder("home-b", B, 2, {A: 5.0, B: 20.0})]
    fleet = _fleet(*constant, *others)

    run = simulate(fleet, jobs, policy())

    assert Counter(timing.job.name for timing in run.timings) == Counter(job.name for job in jobs)
    assert lower_bound(fleet, jobs) <= run.makespan_s * (1 + 1e-9)
    for machine in fleet.machines():
        workers = max(1, sum(decoder.machine == machine for decoder in fleet.decoders))
        decoding_s = run.busy_s.get(("decode", machine), 0.0) / workers
        assert run.busy_s.get(("prefill", machine), 0.0) + decoding_s <= run.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_with_the_teams_rates_stealing_stays_within_a_tenth_of_the_bound(seed: int) -> None:
    code, feedback = {"c": 65.0, "f": 18.7}, {"c": 97.0, "f": 28.0}
    fleet = Fleet(
        (Prefiller("spark1", "c", 1750.0), Prefiller("spark2", "f", 1000.0)),
        (Decoder("mac1", "f", 4, feedback), Decoder("mac2", "c", 4, code)),
    )
    jobs = draw_class(150, "c", "f", seed)

    run = simulate(fleet, jobs, Stealing())

    assert run.makespan_s <= 1.10 * lower_bound(fleet, jobs)
    assert run.makespan_s < simulate(fleet, jobs, AtHome()).makespan_s


def test_drawn_lengths_follow_the_workload_table() -> None:
    from kvasir.plan.workload import draw_length

    for share, value in CODE:
        assert draw_length(CODE, share) == pytest.approx(value)
    assert draw_length(CODE, 0.0) < 1306 < draw_length(CODE, 0.3) < 10839
    assert draw_class(20, "c", "f", 1) == draw_class(20, "c", "f", 1) != draw_class(20, "c", "f", 2)


def test_the_typical_run_is_the_middle_of_many_and_always_the_same() -> None:
    # Given a class whose makespan hangs on who gets the one long job
    fleet = _fleet(Decoder("mac1", A, 2, {A: 10.0}), Decoder("mac2", A, 2, {A: 9.0}))
    jobs = [*_jobs(40, own=10), *_jobs(1, answer=900, own=10)]
    # When it is simulated as the plan does
    run = typical(fleet, jobs)
    # Then all jobs are in it, it is near the exact one, and asked again it is the same
    assert len(run.timings) == len(jobs)
    assert run.makespan_s == pytest.approx(simulate(fleet, jobs, Stealing()).makespan_s, rel=0.1)
    assert run == typical(fleet, jobs)


def test_the_typical_run_does_not_jump_with_the_last_digit_of_a_rate() -> None:
    def spread(makespan: Callable[[Fleet, list[PlannedJob]], float]) -> float:
        found = []
        for hair in range(10):
            rate = 28.0 + hair / 100
            fleet = _fleet(Decoder("mac1", A, 4, {A: rate, B: 97.0}), Decoder("mac2", B, 4, {A: 18.7, B: 65.0}))
            found.append(makespan(fleet, draw_class(60, A, B, 1)))
        return max(found) - min(found)

    one = spread(lambda fleet, jobs: simulate(fleet, jobs, Stealing()).makespan_s)
    middle = spread(lambda fleet, jobs: typical(fleet, jobs).makespan_s)
    assert middle < one
