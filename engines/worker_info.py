"""What every worker's registration says of its engine and its process."""

import os
import socket

from engines.base import DecodeEngine, EngineInfo, LoadedEngine, PrefillEngine, outage_of
from engines.rope import ropes_text
from messages.workers import MAX_LAYOUT_BYTES, WorkerDetails, WorkerInfo, WorkerStage, layout_text

MEND_ROPE = (
    "give both conversions of one configuration (llama.cpp always truncates YaRN's ramp), or run one engine at both "
    "ends"
)
_NOTE_CHARS = 250  # a registration's notes take 1,024 bytes, and a reason may quote anything
_BUILD_CHARS = 60  # and a build 255


def engine_registration(
    worker_id: str,
    stage: WorkerStage,
    model: str,
    started_at: float,
    loaded_model: LoadedEngine[PrefillEngine] | LoadedEngine[DecodeEngine],
    roles: tuple[WorkerStage, ...] = (),
) -> WorkerInfo:
    """The registration of this process as a worker that does nothing yet."""
    info = loaded_model.engine.info
    return WorkerInfo(
        worker_id=worker_id,
        role=stage,
        model=model,
        engine=info.engine,
        device=info.device,
        fingerprint=info.fingerprint,
        tokenizer=info.tokenizer,
        context=info.context,
        slots=info.prefill_slots if stage == "prefill" else info.slots,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=started_at,
        chars_per_token=info.chars_per_token,
        transfers_kv=not loaded_model.why_no_kv,
        notes=(
            outage_of(loaded_model.engine)
            or loaded_model.why_no_kv
            or next(reversed(loaded_model.sketches.refusals.values()), "")
        )[:_NOTE_CHARS],
        layout=kv_text(info),
        sketch=loaded_model.sketches.name,
        details=WorkerDetails(roles, engine_build=info.build[:_BUILD_CHARS], slot_file_version=info.slot_file_version),
    )


def kv_text(info: EngineInfo) -> str:
    """What a registration says of an engine's KV caches, such as `2 layers x …; f16; RoPE base 1e+04, …`.

    RoPE is left out where the windows of uneven layers fill the field.
    """
    layout, ropes = layout_text(info.layout), ropes_text(info.ropes)
    text = f"{layout}; {ropes}"
    return text if layout and ropes and len(text) <= MAX_LAYOUT_BYTES else layout


def ignored_window(left: tuple[str, str], right: tuple[str, str]) -> str:
    """Which of two (engine, kv_text), alike in all else, computes without a window, in words; "": neither."""
    (shape, _, left_window), (other_shape, _, right_window) = (
        text.partition(";")[0].partition(", window ") for _, text in (left, right)
    )
    if not shape or shape != other_shape or bool(left_window) == bool(right_window):
        return ""
    engine_without, engine_with, window = (
        (right[0], left[0], left_window) if left_window else (left[0], right[0], right_window)
    )
    return f"{engine_without} computes without the sliding window of {window} that {engine_with} computes"


def different_rope(left: tuple[str, str], right: tuple[str, str]) -> str:
    """What two (engine, kv_text) compute differently; "": nothing, or one doesn't say. What to do is `MEND_ROPE`."""
    left_ropes, right_ropes = (text.split("; ")[2:] for _, text in (left, right))
    if not left_ropes or not right_ropes or left_ropes == right_ropes:
        return ""
    parameter = "RoPE base" if left_ropes[0].split(",")[0] != right_ropes[0].split(",")[0] else "RoPE scaling"
    numbers = f"{left_ropes[0]}; and {right_ropes[0]}"
    return f"{left[0]} and {right[0]} compute different keys, by another {parameter} ({numbers})"
