"""What every worker's registration says of its engine and its process."""

from __future__ import annotations

import os
import socket

from engines.base import DecodeEngine, EngineInfo, Loaded, PrefillEngine, why_away
from engines.rope import ropes_text
from messages.workers import MAX_LAYOUT_BYTES, Role, WorkerInfo, layout_text

MEND_ROPE = (
    "give both conversions of one configuration (llama.cpp always truncates YaRN's ramp), or run one engine at both "
    "ends"
)
_NOTE_CHARS = 250  # a registration's notes take 1,024 bytes, and a reason may quote anything


def engine_registration(
    worker_id: str, role: Role, model: str, started_at: float, loaded: Loaded[PrefillEngine] | Loaded[DecodeEngine]
) -> WorkerInfo:
    """What this process registers as a worker that does nothing yet."""
    info = loaded.engine.info
    return WorkerInfo(
        worker_id=worker_id,
        role=role,
        model=model,
        engine=info.engine,
        device=info.device,
        fingerprint=info.fingerprint,
        tokenizer=info.tokenizer,
        context=info.context,
        slots=info.prefill_slots if role == "prefill" else info.slots,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=started_at,
        chars_per_token=info.chars_per_token,
        transfers_kv=not loaded.why_no_kv,
        notes=(why_away(loaded.engine) or loaded.why_no_kv or next(reversed(loaded.sketches.refused.values()), ""))[
            :_NOTE_CHARS
        ],
        layout=kv_text(info),
        sketch=loaded.sketches.name,
    )


def kv_text(info: EngineInfo) -> str:
    """What a registration says of an engine's KV caches, such as `2 layers x …; f16; RoPE base 1e+04, …`.

    RoPE is left out where the windows of uneven layers fill the field.
    """
    layout, ropes = layout_text(info.layout), ropes_text(info.ropes)
    both = f"{layout}; {ropes}"
    return both if layout and ropes and len(both) <= MAX_LAYOUT_BYTES else layout


def ignored_window(one: tuple[str, str], other: tuple[str, str]) -> str:
    """Which of two (engine, kv_text), alike in all else, computes without a window, in words; "": neither."""
    (shape, _, ours), (other_shape, _, theirs) = (
        text.partition(";")[0].partition(", window ") for _, text in (one, other)
    )
    if not shape or shape != other_shape or bool(ours) == bool(theirs):
        return ""
    without, windowed, window = (other[0], one[0], ours) if ours else (one[0], other[0], theirs)
    return f"{without} computes without the sliding window of {window} that {windowed} computes"


def different_rope(one: tuple[str, str], other: tuple[str, str]) -> str:
    """What two (engine, kv_text) compute differently; "": nothing, or one doesn't say. What to do is `MEND_ROPE`."""
    ours, theirs = (text.split("; ")[2:] for _, text in (one, other))
    if not ours or not theirs or ours == theirs:
        return ""
    what = "RoPE base" if ours[0].split(",")[0] != theirs[0].split(",")[0] else "RoPE scaling"
    return f"{one[0]} and {other[0]} compute different keys, by another {what} ({ours[0]}; and {theirs[0]})"
