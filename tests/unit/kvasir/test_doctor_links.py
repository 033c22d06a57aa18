"""What doctor says of the links that machines have measured, and what they cost a class."""

from dataclasses import replace

import pytest

from kvasir.doctor.pairs import check_links
from messages.errors import InvalidMessage
from messages.kv import KVLayout
from messages.workers import Link, WorkerDetails, WorkerInfo, layout_text, layout_token_bytes
from tests.unit.messages.golden.make import WORKER

LAYOUT = KVLayout(48, 4, 128, "bf16")
LINK = Link("spark", 20.0, mb_per_s=80.0, put_mb_per_s=60.0, parallel_mb_per_s=100.0, card_mb_per_s=125.0)


def registration(link: Link, **fields: object) -> WorkerInfo:
    known = {"role": "decode", "model": "big:m", "host": "mac", "layout": layout_text(LAYOUT)}
    worker = WorkerInfo(*WORKER)
    return replace(worker, details=WorkerDetails(links=(link,)), **(known | fields))  # type: ignore[arg-type]


def test_a_classs_kv_is_reckoned_at_the_rate_of_the_link_and_once_for_each_machine() -> None:
    workers = [registration(LINK, role="prefill"), registration(LINK), registration(LINK)]

    [finding] = check_links(workers)

    # 100 prompts of 4,000 tokens, 98,304 bytes each, at 100 MB/s
    assert finding.level == "ok"
    assert "39.3 GB, take 6.6 minutes; at 1 Gb/s 5.2" in finding.what
    assert "link of mac to spark: round trip 20 ms, get 80 MB/s (100 on several connections), put 60" in finding.what
    # And a machine that only prefills puts
    [finding] = check_links([registration(LINK, role="prefill")])
    assert "take 10.9 minutes" in finding.what


@pytest.mark.parametrize(
    ("link", "level", "cause", "said"),
    [
        (replace(LINK, card_mb_per_s=250.0), "warn", "slow_link", "negotiated 250"),
        (replace(LINK, card_mb_per_s=0.0), "ok", "", "put 60; "),
        (Link("spark", 20.0, stalls_at=1300), "error", "mtu", "messages of 1,300 bytes do not pass"),
        (Link("spark", 20.0), "ok", "", "round trip 20 ms"),
    ],
)
def test_a_link_below_half_of_its_card_and_one_that_swallows_messages_are_findings(
    link: Link, level: str, cause: str, said: str
) -> None:
    [finding] = check_links([registration(link)])

    assert (finding.level, finding.cause, bool(finding.todo)) == (level, cause, level != "ok")
    assert said in finding.what + "; "


@pytest.mark.parametrize("layout", [LAYOUT, KVLayout(2, 1, 64, "f32"), KVLayout(3, 2, 8, "f16", window=9)])
def test_the_bytes_of_a_token_are_read_from_the_words_of_a_layout(layout: KVLayout) -> None:
    assert layout_token_bytes(layout_text(layout)) == layout.token_bytes
    assert layout_token_bytes("") == 0


@pytest.mark.parametrize("fields", [{"stalls_at": -1}, {"rmem_max": 1.5}, {"card_mb_per_s": float("nan")}])
def test_figures_that_no_link_has_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidMessage, match=next(iter(fields))):
        Link("spark", **fields)  # type: ignore[arg-type]
