"""What a decode worker says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from decode_worker.pace import Pace
from decode_worker.residency import Residency
from decode_worker.slots import Slots
from decode_worker.supply import Tail
from decode_worker.thief import Thief
from engines.card import engine_card
from messages.cards import WorkerCard


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the worker is, for its whole life."""

    worker_id: str
    started_at: float  # store's clock


def decode_card(
    identity: Identity,
    residency: Residency,
    pace: Pace,
    slots: Slots,
    thief: Thief,
    tail: Tail,
    jobs: Sequence[str],
) -> WorkerCard:
    """The card of a decode worker that runs `jobs`, now."""
    home = residency.home
    resident = residency.resident()
    measured = [pace.of(model) for model in resident]
    loaded = home.loaded
    engine = engine_card(
        identity.worker_id, "decode", home.model, identity.started_at, loaded.engine.info, loaded.why_no_kv
    )
    return replace(
        engine,
        slots=slots.count,
        busy=min(len(jobs), slots.count),  # one that is being settled is in no slot any more
        done=slots.done,
        tokens_per_s=pace.of(home.model).tokens_per_s,
        jobs=tuple(jobs),
        resident=tuple(resident),
        resident_tokens_per_s=tuple(each.tokens_per_s for each in measured),
        resident_answer_tokens=tuple(each.answer_tokens for each in measured),
        stolen=thief.stolen,
        not_stolen=sum(thief.refused.values()),
        left=tail.left,
    )
