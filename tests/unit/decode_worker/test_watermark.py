"""What a worker with both roles does next by the watermark: a table of what it sees and what it does."""

from __future__ import annotations

from dataclasses import replace

from decode_worker.stealing.policy import Peer, Queue
from decode_worker.stealing.watermark import MIN_AHEAD, ModelWork, next_answer, next_prompt

SLOW = Peer(slots=4, busy=4, service_s=60.0)
FAST = Peer(slots=4, busy=0, service_s=5.0)


def work(model: str, ready: int, prompts: int, share: float = 0.5, peer: Peer = SLOW) -> ModelWork:
    return ModelWork(Queue(model, ready + prompts, (peer,)), ready, prompts, slots=24, decode_s=60.0, share=share)


def test_the_watermark_grows_with_the_slots_that_decode() -> None:
    assert work("a", 0, 0).ahead == 4
    assert replace(work("a", 0, 0), slots=1).ahead == MIN_AHEAD


def test_the_model_with_the_fewest_ready_jobs_is_prefilled_first_and_none_at_the_watermark() -> None:
    assert next_prompt([work("a", 2, 9), work("b", 1, 9)]) == "b"
    assert next_prompt([work("a", 1, 9), work("b", 1, 10)]) == "b"
    assert next_prompt([work("a", 4, 9), work("b", 0, 0)]) is None


def test_ready_jobs_up_to_the_watermark_are_for_others_while_prompts_wait() -> None:
    assert next_answer([work("a", 3, 9)], ()) is None
    assert next_answer([work("a", 4, 9)], ()) == "a"
    assert next_answer([work("a", 1, 0)], ()) == "a"  # nothing is left to prefill


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
