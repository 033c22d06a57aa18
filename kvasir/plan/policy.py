"""The decode worker's own rules, asked by the simulation: what they see is what a worker would see."""

from __future__ import annotations

from collections import defaultdict

from decode_worker.stealing import policy as stealing
from decode_worker.stealing.forecast import expected_service_s
from decode_worker.stealing.policy import Offer, Peer, Queue, Steal
from kvasir.plan.simulate import DecoderState, Policy, RunningJob, SimulationState


class Stealing(Policy):
    """Home first, unless faster workers end the queue sooner; then whatever pays.

    Workers are taken to know their own and each other's rates, and learn how long answers are from those that they
    have seen: the mean so far, and before the first one the declared guess.
    """

    def __init__(self) -> None:
        self._answers: dict[str, int] = defaultdict(int)
        self._tokens: dict[str, int] = defaultdict(int)

    def choose(self, state: SimulationState, decoder: DecoderState) -> str | None:
        """See Policy."""
        home = decoder.worker.model
        if state.backlog(home):
            queue = self._queue(state, decoder, home)
            if stealing.leave_to_faster(queue, self._service_s(decoder, home)) is None:
                return home
        other_models = [model for model, rate in decoder.worker.tokens_per_s.items() if model != home and rate > 0]
        decision = stealing.decide([self._offer(state, decoder, model) for model in other_models])
        return decision.model if isinstance(decision, Steal) else None

    def note_answer(self, state: SimulationState, decoder: DecoderState, running_job: RunningJob) -> None:
        """See Policy."""
        self._answers[running_job.job.model] += 1
        self._tokens[running_job.job.model] += running_job.job.answer_tokens

    def _offer(self, state: SimulationState, decoder: DecoderState, model: str) -> Offer:
        load_s = 0.0 if model in decoder.resident else decoder.worker.load_s.get(model, 0.0)
        return Offer(self._queue(state, decoder, model), self._service_s(decoder, model), load_s=load_s)

    def _queue(self, state: SimulationState, asking: DecoderState, model: str) -> Queue:
        home = [
            decoder
            for decoder in state.decoders
            if decoder.worker.model == model and decoder is not asking and decoder.is_present
        ]
        peers = [
            Peer(decoder.worker.slots, len(decoder.running_jobs), self._service_s(decoder, model)) for decoder in home
        ]
        return Queue(model, state.backlog(model), tuple(peers))

    def _service_s(self, decoder: DecoderState, model: str) -> float:
        mean = self._tokens[model] / self._answers[model] if self._answers[model] else 0.0
        return expected_service_s(mean, decoder.worker.tokens_per_s[model])
