"""What the fuzzer sends: whatever it makes of a message, reading it raises nothing but our own two errors."""

from collections import Counter

from benchmarks import fuzz
from messages import codec
from messages.errors import InvalidMessage, NewerMessage
from messages.jobs import DecodeJob, PrefillJob


def test_spoilt_bodies_are_read_or_refused_and_nothing_else() -> None:
    ended: Counter[str] = Counter()
    for _, draft in fuzz.drafts(seed=1, count=1_999):
        try:
            codec.decode(draft.body, PrefillJob if draft.stage == "prefill" else DecodeJob)
            ended["read"] += 1
        except (InvalidMessage, NewerMessage) as error:
            ended[type(error).__name__] += 1

    assert set(ended) == {"read", "InvalidMessage", "NewerMessage"}


def test_every_spoiler_is_used_and_a_seed_gives_the_same_messages_again() -> None:
    first = [(name, draft.stage, len(draft.body)) for name, draft in fuzz.drafts(seed=2, count=500)]

    assert {name for name, _, _ in first} == {spoiler.__name__ for spoiler in fuzz.SPOILERS}
    assert first == [(name, draft.stage, len(draft.body)) for name, draft in fuzz.drafts(seed=2, count=500)]
