"""What a worker with both roles does next by the watermark: a table of what it sees and what it does."""

import math
from dataclasses import replace

from decode_worker.stealing.policy import Peer, Queue
from decode_worker.stealing.watermark import MIN_AHEAD, ModelWork, next_answer, next_prompt

OWN = Peer(slots=20, busy=20, service_s=60.0)
SLOW = Peer(slots=4, busy=4, service_s=60.0)
FAST = Peer(slots=4, busy=0, service_s=5.0)


def work(model: str, ready: int, prompts: int, share: float = 0.5, peer: Peer = SLOW) -> ModelWork:
    queue = Queue(model, ready + prompts, (peer,))
    return ModelWork(queue, ready, prompts, own=OWN, has_pure_decoders=True, share=share)


def test_the_watermark_grows_with_the_slots_that_decode() -> None:
    assert work("a", 0, 0).ahead == 4
    assert replace(work("a", 0, 0), own=replace(OWN, slots=1)).ahead == MIN_AHEAD


def test_between_two_looks_short_jobs_find_theirs_ready() -> None:
    # 20/2 + 4/2 slots become free in a second: in half of one 6, beside a sixth of all slots
    short = replace(work("a", 0, 9, peer=replace(SLOW, service_s=2.0)), own=replace(OWN, service_s=2.0))
    assert [replace(short, look_s=look_s).ahead for look_s in (0.0, 0.5, 1.0)] == [4, 10, 16]
    # Of long jobs none will have ended by then
    assert replace(work("a", 0, 9), own=replace(OWN, slots=19), look_s=0.2).ahead == 4


def test_the_model_with_the_fewest_ready_jobs_is_prefilled_first_and_none_at_the_watermark() -> None:
    assert next_prompt([work("a", 2, 9), work("b", 1, 9)]) == "b"
    assert next_prompt([work("a", 1, 9), work("b", 1, 10)]) == "b"
    assert next_prompt([work("a", 4, 9), work("b", 0, 0)]) is None


def test_prompts_that_are_computed_now_count_as_ready() -> None:
    behind = work("a", 1, 9)
    assert [replace(behind, prefilling=more).lacks_ready_jobs for more in (2, 3)] == [True, False]


def test_ready_jobs_up_to_the_watermark_are_for_others_while_prompts_wait() -> None:
    assert next_answer([work("a", 3, 9)], ()) is None
    assert next_answer([work("a", 4, 9)], ()) == "a"
    assert next_answer([work("a", 1, 0)], ()) == "a"  # the end of the night is everybody's
    # Workers of both roles would each leave them to the other
    assert next_answer([replace(work("a", 3, 9), has_pure_decoders=False)], ()) == "a"
    # And whoever is not the one to prefill has nothing better to do
    assert next_answer([replace(work("a", 3, 9), own=replace(OWN, busy=16), lead_elsewhere=math.inf)], ()) == "a"


def test_the_larger_share_of_what_is_decoded_comes_first_and_the_first_model_has_a_lead() -> None:
    ahead, behind = work("b", 9, 0, share=0.6), work("a", 9, 0, share=0.4)
    assert next_answer([behind, ahead], ()) == "b"
    assert next_answer([behind, replace(ahead, share=0.45)], ()) == "a"
    # And no other one as long as there is any of it
    assert next_answer([behind, replace(ahead, ready=0, prompts=5)], ()) is None


def test_two_models_are_not_decoded_side_by_side() -> None:
    assert next_answer([work("a", 9, 0)], {"b"}) is None
    assert next_answer([work("a", 9, 0)], {"a"}) == "a"


def test_the_last_jobs_are_left_to_faster_workers_prompts_counted() -> None:
    assert next_answer([work("a", 5, 0, peer=FAST)], ()) is None  # two rounds of 5 s there, a minute here
    assert next_answer([work("a", 5, 95, peer=FAST)], ()) == "a"


def test_where_another_prefills_better_only_what_is_missing_is_prefilled_and_only_where_it_pays() -> None:
    idle = Peer(slots=4, busy=0, service_s=5.0)
    mac = ModelWork(Queue("a", 100, ()), 0, 100, own=idle, has_pure_decoders=False, prefill_s=8.0, lead_elsewhere=40.0)
    assert next_prompt([mac]) == "a"  # idle, and nobody is ahead
    assert next_prompt([replace(mac, ready=3, prefilling=1)]) is None  # there is enough for its slots
    # One answer of 5 s would wait for 8 s, and one of 48 s for 7.5 s
    assert next_prompt([replace(mac, own=Peer(4, 1, 5.0))]) is None
    assert next_prompt([replace(mac, own=Peer(4, 2, 48.0), prefill_s=7.5)]) == "a"
    # Where nobody is measured, or hardly better, it is as good as any
    busy = replace(mac, own=Peer(4, 4, 5.0))
    assert [next_prompt([replace(busy, lead_elsewhere=lead)]) for lead in (0.0, 1.1, math.inf)] == ["a", "a", None]
