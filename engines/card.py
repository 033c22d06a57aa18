"""What every worker's card says of its engine and its process."""

from __future__ import annotations

import os
import socket

from engines.base import EngineInfo
from messages.cards import Role, WorkerCard, layout_text

_NOTE_CHARS = 250  # a card's notes take 1,024 bytes, and a reason may quote anything


def engine_card(
    worker_id: str, role: Role, model: str, started_at: float, info: EngineInfo, why_no_kv: str
) -> WorkerCard:
    """The card of this process as a worker that does nothing yet; `why_no_kv`: "" if its hand-over was proved."""
    return WorkerCard(
        worker_id=worker_id,
        role=role,
        model=model,
        engine=info.engine,
        device=info.device,
        fingerprint=info.fingerprint,
        tokenizer=info.tokenizer,
        context=info.context,
        slots=1 if role == "prefill" else info.slots,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=started_at,
        chars_per_token=info.chars_per_token,
        hands_over=not why_no_kv,
        notes=why_no_kv[:_NOTE_CHARS],
        layout=layout_text(info.layout),
    )
