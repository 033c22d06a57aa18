"""Messages that nobody of ours would send, in thousands: the batch beside them ends, and no worker crashes."""

from pathlib import Path

import pytest

from benchmarks import fuzz
from messages import codec
from messages.errors import InvalidMessage, NewerMessage
from messages.jobs import DecodeJob, PrefillJob

pytestmark = pytest.mark.system  # minutes


def test_thousands_of_spoilt_messages_are_buried_and_the_batch_beside_them_ends(
    tmp_path: Path, broker_url: str, store_url: str
) -> None:
    figures = fuzz.measure(tmp_path, messages=5_000, jobs=50, seed=5, broker_url=broker_url, store_url=store_url)

    assert (figures["batch_succeeded"], figures["batch_total"]) == (50, 50)
    assert (figures["restarts"], figures["bugs"]) == (0, 0)
    assert figures["messages"] == 5_000
    assert figures["dead_letters"] >= sum(not _may_be_read(draft) for _, draft in fuzz.drafts(5, 5_000)) > 3_500
    assert figures["waiting"] > 0


def _may_be_read(draft: fuzz.MessageDraft) -> bool:
    """Whether its body is a job, or that of a newer version, which waits. (Headers may still send it to its grave.)"""
    try:
        codec.decode(draft.body, PrefillJob if draft.stage == "prefill" else DecodeJob)
    except NewerMessage:
        return True
    except InvalidMessage:
        return False
    return True
