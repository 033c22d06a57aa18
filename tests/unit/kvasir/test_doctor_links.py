"""What doctor says of links that were measured, and what they cost a class."""

import math
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.doctor import services
from kvasir.doctor.findings import Finding, ok
from kvasir.doctor.pairs import check_links
from kvasir.doctor.services import check_link, measured_link
from messages.errors import InvalidMessage
from messages.kv import KVLayout
from messages.workers import Link, WorkerDetails, WorkerInfo, layout_text, layout_token_bytes
from tests.support.servers import HOST, free_port
from tests.unit.messages.golden.make import WORKER

LAYOUT = KVLayout(48, 4, 128, "bf16")
LINK = Link("spark", 20.0, mb_per_s=80.0, put_mb_per_s=102.0, parallel_mb_per_s=110.0, card_mb_per_s=125.0)
NOBODY = f"redis://{HOST}:{free_port()}/0"


def registration(link: Link, **changed: object) -> WorkerInfo:
    known = {"role": "decode", "model": "big:m", "host": "mac", "layout": layout_text(LAYOUT)}
    worker = WorkerInfo(*WORKER)
    return replace(worker, details=WorkerDetails(links=(link,)), **(known | changed))  # type: ignore[arg-type]


def steps(**seconds: float) -> Finding:
    return replace(
        ok("store", "each step works"), steps={name.replace("_", " "): each for name, each in seconds.items()}
    )


def test_a_classs_kv_is_reckoned_at_the_rate_of_the_link_and_once_for_each_machine() -> None:
    workers = [registration(LINK, role="prefill"), registration(LINK), registration(LINK)]

    [finding] = check_links(workers)

    # 100 prompts of 4,000 tokens, 98,304 bytes each, at 110 MB/s
    assert (finding.level, finding.subject) == ("ok", "links")
    assert "link of mac to spark: round trip 20 ms, put 102 MB/s, get 80, get 110 on 4 connections" in finding.what
    assert "a class of 100 with prompts of 4,000 tokens, 39.3 GB, takes 6.0 minutes; at 1 Gb/s 5.2" in finding.what
    # And a machine that only prefills puts
    [finding] = check_links([registration(LINK, role="prefill")])
    assert "takes 6.4 minutes" in finding.what
    # And an engine that hands nothing over costs nothing
    [finding] = check_links([registration(LINK, layout="")])
    assert "minutes" not in finding.what


@pytest.mark.parametrize(
    ("link", "level", "cause", "said"),
    [
        (replace(LINK, parallel_mb_per_s=99.0), "warn", "", "get 99 on 4"),
        (replace(LINK, card_mb_per_s=250.0), "warn", "", "card has 250"),
        (replace(LINK, card_mb_per_s=0.0), "ok", "", "on 4 connections: the KV"),
        (Link("spark", 20.0, stalls_at=1300), "error", "mtu", "messages of 1,300 bytes do not pass"),
        (Link("spark", 20.0, stalls_at=1_000_000), "error", "slow_link", "messages of 1,000,000 bytes do not pass"),
        (Link("spark", 20.0), "ok", "", "spark: round trip 20 ms"),
    ],
)
def test_a_link_that_is_slow_for_its_card_or_for_anything_and_one_that_swallows_messages_are_findings(
    link: Link, level: str, cause: str, said: str
) -> None:
    [finding] = check_links([registration(link)])

    assert (finding.level, finding.cause, bool(finding.todo)) == (level, cause, level != "ok")
    assert said in finding.what
    assert "{" not in finding.todo


def test_this_machines_link_is_judged_by_its_slower_way_and_a_store_that_is_away_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of a link that has no time for 4 MB six times, the step itself tells the rate
    slow = check_link(NOBODY, steps(connect=0.02, **{"1 MB": 0.4}))
    assert slow.level == "warn"
    assert "put 5 MB/s, get 5" in slow.what
    assert "2.0 GB, takes 6.7 minutes" in slow.what
    # Of another one the worse rate of the two counts
    rates = {"put_mb_per_s": 900.0, "mb_per_s": 11.0, "parallel_mb_per_s": 900.0}
    monkeypatch.setattr(services, "_rates", lambda _url, _megabytes: rates)
    assert check_link(NOBODY, steps(**{"1 MB": 0.001})).level == "warn"
    rates["mb_per_s"] = 900.0
    assert check_link(NOBODY, steps(**{"1 MB": 0.001})).level == "ok"
    # And where nobody answers any more, that is said
    monkeypatch.undo()
    with socket.socket() as held:  # bound, so that nothing else listens there
        held.bind((HOST, 0))
        away = check_link(f"redis://{HOST}:{held.getsockname()[1]}/0", steps(**{"1 MB": 0.001}))
    assert (away.level, away.subject, away.cause) == ("error", "store", "refused")


def test_only_as_much_is_sent_as_the_time_allows_and_a_brokers_rates_are_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(services, "_rates", lambda _url, megabytes: asked.append(megabytes) or {})
    for megabyte_s in (0.0001, 0.05, 0.2, 0.3):  # there and back
        measured_link(NOBODY, steps(**{"1 MB": megabyte_s}), most_mb=64, within_s=6.0)
    assert asked == [64, 40, 10, 6]
    broker = measured_link("amqp://spark/", replace(steps(**{"1 MB": 0.01}), subject="broker"), 64, 6.0)
    stalled = measured_link(NOBODY, replace(steps(connect=0.02), stopped_at="1,300 B", cause="mtu"), 64, 6.0)
    undeclared = measured_link(NOBODY, replace(steps(), stopped_at="8 KB", cause="undeclared"), 64, 6.0)
    assert (len(asked), undeclared.stalls_at) == (4, 0)
    assert (broker.peer, broker.mb_per_s) == ("spark", 0.0)
    assert (stalled.stalls_at, stalled.rtt_ms, stalled.mb_per_s) == (1300, 20.0, 0.0)


def test_the_fastest_card_with_hardware_and_a_cable_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_CARDS", tmp_path)
    assert measured_link(NOBODY, steps(), 64, 6.0).card_mb_per_s == 0
    # In Linux a bridge's virtual card claims 10,000, and a card without a cable -1
    for name, speed in (("eth0", "1000\n"), ("wlan0", ""), ("eth1", "-1\n"), ("veth7", "10000\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
        if name != "veth7":
            (tmp_path / name / "device").mkdir()

    assert measured_link(NOBODY, steps(), 64, 6.0).card_mb_per_s == 125


@pytest.mark.parametrize("layout", [LAYOUT, KVLayout(2, 1, 64, "f32")])
def test_the_bytes_of_a_token_are_read_from_the_words_of_a_layout(layout: KVLayout) -> None:
    assert layout_token_bytes(layout_text(layout)) == layout.token_bytes
    windowed = replace(layout, window=9, window_layers=(0,))
    assert layout_token_bytes(layout_text(windowed)) > windowed.token_bytes  # as if it had none
    assert layout_token_bytes("") == 0


@pytest.mark.parametrize("figures", [{"stalls_at": -1}, {"rmem_max": math.inf}, {"card_mb_per_s": math.nan}])
def test_figures_that_no_link_has_are_refused(figures: dict[str, float]) -> None:
    with pytest.raises(InvalidMessage, match=next(iter(figures))):
        Link("spark", **figures)  # type: ignore[arg-type]
