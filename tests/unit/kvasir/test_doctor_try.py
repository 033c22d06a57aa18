"""`kvasir doctor --try`: what a job's result says of the pair that it met, and the trial itself in one process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvasir import cli
from kvasir.doctor.trial import judge, made_up_text
from messages.jobs import DecodeReport, JobError, JobResult, PrefillReport
from messages.workers import WorkerInfo, WorkerStage

MODEL = "tiny:1b"


def registration(role: WorkerStage, **fields: Any) -> WorkerInfo:
    plain = WorkerInfo(f"{role}-1", role, MODEL, "llamacpp", "cuda", "family-1", "words", 8192, 4, "host", 1, 0.0)
    return replace(plain, **{"transfers_kv": True, **fields})


PREFILL, DECODE = registration("prefill"), registration("decode", device="metal")
GOOD = JobResult(
    *("job", 1, "batch", "try-0", MODEL, "succeeded"),
    prefill=PrefillReport("prefill-1", "llamacpp", 0.25, 1.0, 0.1, 1999, 0, 20_000_000),
    decode=DecodeReport(
        *("decode-1", "llamacpp", "verified", "", 2000, 1999, 1, 64),
        **{"queue_s": 1.75, "get_s": 0.25, "ttft_s": 2.0, "decode_s": 1.1, "total_s": 3.0},
    ),
)


def decoded(**fields: Any) -> JobResult:
    return replace(GOOD, decode=replace(GOOD.decode, **fields))


def test_a_kv_transfer_that_worked_is_a_line_of_figures() -> None:
    seen = judge(GOOD, [PREFILL, DECODE])
    assert (seen.level, seen.found) == ("ok", "")
    assert (seen.prefill_device, seen.decode_device, seen.kv_transfer) == ("cuda", "metal", "verified")
    assert (seen.prefill_tokens_per_s, seen.decode_tokens_per_s) == (1999, 63)
    assert (seen.put_bytes_per_s, seen.get_bytes_per_s) == (40e6, 80e6)
    # And an engine that puts while it computes is given the time of both
    mlx = judge(replace(GOOD, prefill=replace(GOOD.prefill, engine="mlx")), [PREFILL, DECODE])
    assert mlx.put_bytes_per_s == pytest.approx(20e6 / 1.5)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (decoded(evaluated_tokens=2000), "evaluated 2,000 tokens of the prompt, and 1 were left to it"),
        (
            decoded(kv_transfer="none", transferred_tokens=0, evaluated_tokens=2000, why_none="gone"),
            "no KV transfer: gone",
        ),
        (replace(GOOD, state="failed", error=JobError("decode", "Poison", "it took its worker along")), "took its"),
        (replace(GOOD, state="expired"), "the job expired"),
    ],
)
def test_a_kv_transfer_that_should_have_worked_and_did_not_is_an_error(result: JobResult, words: str) -> None:
    seen = judge(result, [PREFILL, DECODE])
    assert seen.level == "error"
    assert words in seen.found
    assert seen.todo


@pytest.mark.parametrize(
    "registrations",
    [
        [PREFILL, registration("decode", transfers_kv=False)],
        [PREFILL, registration("decode", fingerprint="family-2")],
        [registration("prefill", fingerprint=""), registration("decode", fingerprint="")],
        [PREFILL, registration("decode", model="another:2b")],  # it took the job from its neighbour's queue
        [PREFILL],
    ],
)
def test_no_kv_transfer_between_workers_that_promise_none_is_a_warning(registrations: list[WorkerInfo]) -> None:
    none = decoded(kv_transfer="none", transferred_tokens=0, evaluated_tokens=2000, why_none="no KV cache")
    assert judge(none, registrations).level == "warn"


def test_texts_are_as_long_as_asked_and_differ_from_their_first_line_on() -> None:
    first, second = made_up_text(7000), made_up_text(7000)
    assert len(first) == len(second) == 7000
    assert first.splitlines()[0] != second.splitlines()[0]


def configure(folder: Path, monkeypatch: pytest.MonkeyPatch, weights: str = "sim:scale=0") -> None:
    monkeypatch.chdir(folder)
    (folder / "kvasir.toml").write_text(f'[models."{MODEL}"]\nengine = "simulated"\nweights.simulated = "{weights}"\n')


def test_a_model_is_tried_in_this_process_where_there_is_no_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(tmp_path, monkeypatch)
    assert cli.run_command(["doctor", "--try", MODEL, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    [trial] = printed["trials"]
    assert (trial["level"], trial["kv_transfer"], trial["prefill_device"]) == ("ok", "verified", "simulated")
    assert trial["evaluated_tokens"] == 1
    assert 1900 < trial["prompt_tokens"] < 2100
    assert trial["kv_bytes"] > 1_000_000
    assert printed["findings"] == []
    # And as a table
    assert cli.run_command(["doctor", "--try", MODEL]) == 0
    assert "1 of 2,0" in capsys.readouterr().out


def test_a_trial_without_a_broker_needs_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(tmp_path, monkeypatch)
    assert cli.run_command(["doctor", "--try"]) == 2
    assert "--try MODEL" in capsys.readouterr().err
    assert cli.run_command(["doctor", "--try", "other:1b"]) == 2
