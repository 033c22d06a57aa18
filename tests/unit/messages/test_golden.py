"""Messages that were sent in version 2, byte by byte: they must be read for ever, and mean what they meant."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import pytest

from messages import codec
from messages.jobs import DecodeJob, JobResult, PrefillJob, TokenEvent
from messages.workers import WorkerDetails, WorkerInfo
from tests.unit.messages.golden.make import FOLDER, MESSAGES

KINDS: dict[str, type[Any]] = {
    "prefill": PrefillJob,
    "decode": DecodeJob,
    "result": JobResult,
    "token": TokenEvent,
    "card": WorkerInfo,
    "details": WorkerDetails,
}
FILES = sorted(FOLDER.glob("*.msgpack"))


def differences(found: Any, meant: Any, place: str = "") -> list[str]:
    """Where a message isn't what was meant. It may have more fields, which came later."""
    if isinstance(meant, dict):
        missing = [f"{place}.{name} is gone" for name in meant.keys() - found.keys()]
        there = meant.keys() & found.keys()
        return missing + [each for name in there for each in differences(found[name], meant[name], f"{place}.{name}")]
    if isinstance(meant, list) and isinstance(found, list) and len(meant) == len(found):
        pairs = enumerate(zip(found, meant, strict=True))
        return [each for at, (one, other) in pairs for each in differences(one, other, f"{place}[{at}]")]
    return [] if (type(found), found) == (type(meant), meant) else [f"{place} is {found!r}, not {meant!r}"]


def test_every_golden_message_is_there() -> None:
    assert {path.stem for path in FILES} == {path.stem for path in FOLDER.glob("*.json")} == MESSAGES.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_golden_message_is_read_as_it_was_meant(path: Path) -> None:
    body = path.read_bytes()
    assert msgpack.unpackb(body)["v"] == 2
    read = codec.decode(body, KINDS[path.stem.partition("-")[0]])
    meant = json.loads(path.with_suffix(".json").read_text("utf-8"))
    assert differences(json.loads(json.dumps(asdict(read))), meant) == []
    # And what it was made of, as the dataclasses are now, still is this message
    assert read == MESSAGES[path.stem]


def test_another_default_or_a_field_that_is_gone_is_noticed() -> None:
    meant = json.loads((FOLDER / "prefill-bare.json").read_text("utf-8"))
    assert differences({**meant, "run": 2, "later": 1}, meant) == [".run is 2, not 1"]
    assert differences({**meant, "sampling": {**meant["sampling"], "top_p": 1.0}}, meant)
    assert differences({**meant, "prompt": meant["prompt"][:1]}, meant)
    assert differences({name: value for name, value in meant.items() if name != "lane"}, meant) == [".lane is gone"]
