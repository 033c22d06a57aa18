"""What every worker's registration says about its engine and its process."""

import hashlib
import os
import socket

from engines.base import DecodeEngine, EngineInfo, LoadedEngine, PrefillEngine, Tokenizes, outage_of
from engines.rope import ropes_text
from messages.errors import InvalidPrompt
from messages.jobs import Part
from messages.workers import MAX_LAYOUT_BYTES, WorkerDetails, WorkerInfo, WorkerStage, layout_text

MEND_ROPE = (
    "give both conversions of one configuration (llama.cpp always truncates YaRN's ramp), or run one engine at both "
    "ends"
)
_NOTE_CHARS = 250  # a registration has room for 1,024 bytes of notes, but a reason can quote a long text
_BUILD_CHARS = 60  # a registration has room for 255 bytes about the engine's version

# Conversations that show how templates differ: how they begin, whether and how they print a system message, and how
# they end one answer and begin the next.
_CONVERSATIONS = (
    (Part("user", "Why?"),),
    (Part("system", "Be brief."), Part("user", "Why?")),
    (Part("user", "Why?"), Part("assistant", "So."), Part("user", "How?")),
)


def engine_registration(
    worker_id: str,
    stage: WorkerStage,
    model: str,
    started_at: float,
    loaded_model: LoadedEngine[PrefillEngine] | LoadedEngine[DecodeEngine],
    roles: tuple[WorkerStage, ...] = (),
) -> WorkerInfo:
    """The registration of this process as a worker that is still idle."""
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
        details=WorkerDetails(
            roles,
            links=loaded_model.links,
            engine_build=info.build[:_BUILD_CHARS],
            slot_file_version=info.slot_file_version,
            template=loaded_model.template,
        ),
    )


def template_name(engine: Tokenizes) -> str:
    """A hash of the engine's chat template's output for fixed conversations; "" if it renders none or reveals no ids.

    Engines whose templates and tokenizers behave the same have the same name, whatever file the template came from.
    """
    found: list[tuple[int, ...]] = []
    for conversation in _CONVERSATIONS:
        try:
            found.append(engine.tokenize(conversation, 0.0).ids)
        except InvalidPrompt:
            found.append(())
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest() if any(found) else ""


def different_template(left: WorkerInfo, right: WorkerInfo) -> str:
    """A sentence that says that two workers' chat templates differ; "" if they don't, or if one of them doesn't report
    its own."""
    names = [worker.details.template for worker in (left, right)]
    if not all(names) or names[0] == names[1] or left.tokenizer != right.tokenizer:
        return ""
    return (
        f"the chat templates of {left.worker_id} and {right.worker_id} differ: a prompt is what the template of the "
        "worker that meets it first makes of it"
    )


def kv_text(info: EngineInfo) -> str:
    """What a registration says about an engine's KV caches, such as `2 layers x …; f16; RoPE base 1e+04, …`.

    RoPE is left out if the windows of uneven layers fill the field.
    """
    layout, ropes = layout_text(info.layout), ropes_text(info.ropes)
    text = f"{layout}; {ropes}"
    return text if layout and ropes and len(text) <= MAX_LAYOUT_BYTES else layout


def ignored_window(left: tuple[str, str], right: tuple[str, str]) -> str:
    """Which of two (engine, kv_text) that are otherwise equal ignores the sliding window, in words; "" if neither
    does."""
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
    """What two (engine, kv_text) compute differently; "" if nothing, or if one doesn't say. `MEND_ROPE` says what to
    do."""
    left_ropes, right_ropes = (text.split("; ")[2:] for _, text in (left, right))
    if not left_ropes or not right_ropes or left_ropes == right_ropes:
        return ""
    parameter = "RoPE base" if left_ropes[0].split(",")[0] != right_ropes[0].split(",")[0] else "RoPE scaling"
    numbers = f"{left_ropes[0]}; and {right_ropes[0]}"
    return f"{left[0]} and {right[0]} compute different keys, by another {parameter} ({numbers})"
