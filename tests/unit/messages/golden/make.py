"""Writes the golden messages that are not there yet: `python -m tests.unit.messages.golden.make`.

NAME.msgpack is a message as it was sent when the file was made, NAME.json all its fields as it was meant, defaults
too. Neither is ever made again: whoever changes a contract so that one of them fails breaks messages under way.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from messages import codec
from messages.jobs import (
    DecodeJob,
    DecodeReport,
    JobError,
    JobResult,
    Part,
    PrefillJob,
    PrefillReport,
    Question,
    QuestionAnswer,
    Sampling,
    StoredKV,
    TokenEvent,
    user_prompt,
)
from messages.kv import KVLayout
from messages.workers import Link, RateCurve, WorkerDetails, WorkerInfo

FOLDER = Path(__file__).parent

NAMES = ("job-1", "batch-1", "item-1", "qwen3-coder:30b")
JOB = PrefillJob(*NAMES, user_prompt("Rubric.\n", "x <- 1"), Sampling(400))
TOKENIZED = JOB.tokenized((1, 2, 70_000, 2**32 - 1), 2)
TALK = (
    Part("system", "Be brief.", "class"),
    Part("system", " Mind the rubric.", "class"),
    Part("user", "Who was Kvasir?", "conversation"),
    Part("assistant", "Of all gods the wisest.", "conversation"),
    Part("user", "Und dann? 语", "own"),
)
CALLS = (
    Part("user", "Grade it."),
    Part("assistant", '{"points": 7}', function="grade"),
    Part("tool", "kept", function="grade"),
    Part("assistant", "It has"),
)
EVERY_SAMPLING = Sampling(8, 0.0, 1.0, 40, 7, ("\n\n", "END"), '{"type":"object"}', 3)
QUESTIONS = (
    Question((Part("user", "\nIs it named?"),), Sampling(16, temperature=0.0)),
    Question((Part("user", "\nIs it"), Part("user", " right?")), EVERY_SAMPLING),
)
ASKED = PrefillJob(
    *(*NAMES, user_prompt("Rubric.\n", "x <- 1"), Sampling(1)),
    tokens=(1, 2, 70_000),
    shared_tokens=2,
    questions=tuple(replace(one, tokens=(number, 2**32 - 1)) for number, one in enumerate(QUESTIONS)),
)
PLAIN = KVLayout(28, 8, 128, "bf16")
WINDOWED = KVLayout(4, 2, 64, "f16", window=128, window_layers=(0, 2))
HYBRID = KVLayout(6, 2, 192, "f32", v_head_dim=128, recurrent_layers=(0, 1, 3), both_layers=(4,))
STATED = replace(HYBRID, conv_shape=(48, 3), matrix_shape=(4, 8, 16))
PREFILLED = PrefillReport("host.1.a", "transformers", 1.5, 0.25, 0.125, 3, 96, 4096)
DECODED = DecodeReport("host.2.b", "mlx", "verified", "", 100, 99, 1, 12, 2.0, 0.5, 3.0, 4.0, 5.0)
ENDED = (*NAMES[:1], 2, *NAMES[1:])
WORKER = ("host.2.b", "decode", "qwen3-coder:30b", "mlx", "metal", "f00d", "cafe", 32768, 4, "host", 2, 1_800_000_000.5)

MESSAGES = {
    "prefill-bare": JOB,
    "prefill-own-only": PrefillJob(*NAMES, user_prompt("", "x"), EVERY_SAMPLING),
    "prefill-every-field": PrefillJob(
        *(*NAMES, TALK, Sampling(5), 3, "now", 1_800_000_000.25, 1_800_000_060.0, "reply.batch-1", "stream.1"),
        *((5, 6, 7), 2, QUESTIONS),
    ),
    "prefill-conversation": PrefillJob(*NAMES, TALK, Sampling(5)),
    "prefill-functions": PrefillJob(*NAMES, CALLS, Sampling(5)),
    "prefill-raw": PrefillJob(*NAMES, (Part("raw", "Once upon a"),), Sampling(5)),
    "prefill-tagged": replace(JOB, prompt=(*TALK[:-1], Part("user", "Und dann?", "conversation")), tag="0a1b2c"),
    "prefill-tokenized": TOKENIZED,
    "prefill-questions": PrefillJob(*NAMES, user_prompt("Rubric.\n", "x <- 1"), Sampling(1), questions=QUESTIONS),
    "prefill-questions-tokenized": ASKED,
    "decode-questions": DecodeJob(ASKED, StoredKV("f00d", PLAIN, 3, 2, 344_064), PREFILLED),
    "decode-without-kv": DecodeJob(TOKENIZED, None, PREFILLED, "the store is away"),
    "decode-with-kv": DecodeJob(TOKENIZED, StoredKV("f00d", PLAIN, 3, 2, 344_064), PREFILLED),
    "decode-with-a-sketch": DecodeJob(TOKENIZED, StoredKV("f00d", PLAIN, 3, 0, 1, "5e7c4000aa")),
    "decode-with-a-window": DecodeJob(TOKENIZED, StoredKV("f00d", WINDOWED, 3, 0)),
    "decode-with-recurrent-layers": DecodeJob(TOKENIZED, StoredKV("f00d", HYBRID, 3, 0)),
    "decode-with-a-state": DecodeJob(TOKENIZED, StoredKV("f00d", STATED, 3, 0)),
    "result-succeeded": JobResult(*ENDED, "succeeded", "grüße", "stop", (), None, 2, PREFILLED, DECODED),
    "result-verified-rounded": JobResult(*ENDED, "succeeded", decode=DecodeReport(kv_transfer="verified-rounded")),
    "result-without-kv": JobResult(*ENDED, "succeeded", "x", "length", decode=DecodeReport(why_none="too short")),
    "result-several-texts": JobResult(*ENDED, "succeeded", "a", "stop", ("b", "c")),
    "result-answers": JobResult(
        *(*ENDED, "succeeded"),
        answers=(QuestionAnswer("yes", "stop", "succeeded", 9), QuestionAnswer("", "", "failed", 0)),
    ),
    "result-likelihoods": JobResult(
        *(*ENDED, "succeeded"),
        answers=(QuestionAnswer("1", "stop", "succeeded", 9, (0.25, 0.75, 0.0)), QuestionAnswer("2", "stop")),
    ),
    "result-failed": JobResult(*ENDED, "failed", error=JobError("decode", "InvalidSchema", "no schema")),
    "result-cancelled": JobResult(*ENDED, "cancelled"),
    "result-expired": JobResult(*ENDED, "expired", attempts=0),
    "token": TokenEvent("job-1", 1, "d1", 0, "grü"),
    "token-last": TokenEvent("job-1", 2, "d2", 7, "", last=True),
    "card-bare": WorkerInfo(*WORKER),
    "card-every-field": WorkerInfo(
        *(*WORKER, 3.5, 2, 99, 41.5, True, "paused", "says so", ("job-1", "job-2"), ("qwen3-coder:30b", "tiny:1b")),
        *((41.5, 0.0), (200.0, 0.0), 5, 6, 7, "28 layers x 8 kv_heads x 128 head_dim; bf16"),
    ),
    "card-refusing": WorkerInfo(*WORKER, sketch="5e7c4000aa", refuses=("beef",), refuses_because=("other weights",)),
    "details-bare": WorkerDetails(),
    "details-every-field": WorkerDetails(
        ("prefill", "decode"),
        (RateCurve("qwen3-coder:30b", (512, 4096.0), (2100.5, 1900)), RateCurve("tiny:1b", (64,), (0,))),
        (RateCurve("qwen3-coder:30b", (1, 4, 16), (41.5, 73, 122)),),
        (Link("studio2", 0.25, 1100.5), Link("spark1")),
        *(-0.125, "b9999, 0.4.1", "GGSQ 3"),
    ),
    "details-paused": WorkerDetails(("decode",), paused_because="the broker is connected, and has not confirmed"),
    "details-with-a-template": WorkerDetails(("decode",), template="7e3f"),
    "details-with-turns": WorkerDetails(("decode",), turns=4),
    "details-with-steals": WorkerDetails(("decode",), steals=("qwen3-coder:30b", "tiny:1b")),
    "details-with-a-link": WorkerDetails(links=(Link("spark1", 0.25, 110.5, 90.0, 112.0, 125.0, 1300, 212_992),)),
}


def main() -> None:
    """Write what is missing, and say which."""
    for name, message in MESSAGES.items():
        body, meant = FOLDER / f"{name}.msgpack", FOLDER / f"{name}.json"
        if not body.exists() and not meant.exists():
            body.write_bytes(codec.encode(message))
            meant.write_text(json.dumps(asdict(message), indent=1, ensure_ascii=False) + "\n", "utf-8")
            sys.stdout.write(f"made {name}\n")


if __name__ == "__main__":
    main()
