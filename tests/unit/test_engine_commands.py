"""`kvasir engines` and `kvasir doctor`, without services: the declared table, and what each finding is found by."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.catalogue import BY_NAME, CATALOGUE, Entry
from engines.ollama import CAPABILITIES
from engines.registry import ENGINES, EngineOptions, open_engine
from infra.settings import Settings, load_settings
from infra.settings_schema import ENGINES as CONFIGURABLE
from kvasir import cli
from kvasir.doctor import examine
from kvasir.doctor_pairs import check_workers
from kvasir.doctor_services import check_redis
from kvasir.findings import Finding
from messages.cards import Role, WorkerCard, layout_text
from messages.errors import ConfigError
from messages.kv import KVLayout
from tests.support.llama_server_program import install
from tests.support.tiny_gguf import TinyModel, write_gguf

GIB = 1 << 30
NOEVICTION = {"maxmemory": 128 * GIB, "maxmemory_policy": "noeviction", "aof_enabled": 0, "used_memory": GIB}


def card(role: Role, worker_id: str = "", **fields: Any) -> WorkerCard:
    """A llama.cpp worker's card on a machine of its own."""
    plain = WorkerCard(
        worker_id or f"{role}-1", role, "m", "llamacpp", "cuda", "family-1", "words-1", 8192, 4, f"{role}-host", 1, 0.0
    )
    return replace(plain, **{"hands_over": True, **fields})


def settings(tmp_path: Path, machines: dict[str, Any] | None = None, **model: Any) -> Settings:
    """One model "m", which grades code."""
    weights = {"weights": {"llamacpp": "m.gguf"}}
    tables = {"code_model": "m", "models": {"m": weights | model}, "machines": machines or {}}
    return load_settings(tables, environ={}, cwd=tmp_path, user_dir=tmp_path)


def lines(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, f"{finding.what} -> {finding.todo}") for finding in findings]


def test_every_engine_is_in_the_table() -> None:
    assert {*ENGINES} <= {*BY_NAME} == {*CONFIGURABLE}


@pytest.mark.parametrize("name", ["llamacpp", "simulated"])
def test_an_engine_declares_what_it_does_with_a_model_loaded(name: str, tmp_path: Path) -> None:
    weights = str(write_gguf(tmp_path / "tiny.gguf")) if name == "llamacpp" else "sim:"
    engine = open_engine(name, EngineOptions(weights, context=256, slots=1, threads=1))
    assert engine.info.capabilities == BY_NAME[name].capabilities
    engine.close()


def test_ollama_declares_what_it_does() -> None:
    assert BY_NAME["ollama"].capabilities == CAPABILITIES
    assert BY_NAME["ollama"].partners() == ()
    assert BY_NAME["llamacpp"].partners() == ("llamacpp", "mlx", "transformers")
    assert BY_NAME["simulated"].partners() == ("simulated",)


def test_what_is_not_installed_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Entry("other", CAPABILITIES, ("json", "no_such_package"), "other", "FILE", "")
    assert absent.missing == "pip install 'kvasir-inference[other]'"
    assert replace(absent, extra="").missing == "pip install no_such_package"
    # And llamacpp runs with its package or with the program
    monkeypatch.setitem(__import__("sys").modules, "xllamacpp", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert BY_NAME["llamacpp"].missing == "pip install 'kvasir-inference[llamacpp]'"
    install(tmp_path)
    assert BY_NAME["llamacpp"].missing == ""


def test_engines_prints_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["engines"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{entry.name} " in printed for entry in CATALOGUE)
    assert cli.run(["engines", "--json"]) == 0
    rows = {row["engine"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["ollama"]["hands_over_to"] == []
    assert rows["llamacpp"]["capabilities"]["exports_kv"]


def test_two_workers_of_one_family_are_well(tmp_path: Path) -> None:
    found = lines(check_workers(settings(tmp_path), [card("prefill"), card("decode"), card("decode", "decode-2")]))
    assert found == [("ok", "llamacpp to llamacpp: hands its KV cache over (family family-1) -> ")]


@pytest.mark.parametrize(
    ("decode", "level", "words"),
    [
        ({"fingerprint": "family-2"}, "error", "other weights or shapes"),
        ({"fingerprint": "family-2", "engine": "mlx"}, "error", 'same_weights = ["llamacpp", "mlx"]'),
        ({"tokenizer": "words-2"}, "error", "different tokenizers"),
        ({"tokenizer": "observed-9"}, "ok", "hands its KV cache over"),
        ({"context": 4096}, "warn", "prompts of 8,192 tokens"),
        ({"hands_over": False, "notes": "the proof failed"}, "warn", "does every prompt: the proof failed"),
        ({"engine": "ollama", "fingerprint": "", "hands_over": False}, "warn", "--engine llamacpp at both ends would"),
    ],
)
def test_a_pair_that_does_not_fit_is_found(tmp_path: Path, decode: dict[str, Any], level: str, words: str) -> None:
    found = lines(check_workers(settings(tmp_path), [card("prefill"), card("decode", **decode)]))
    assert (level, True) in [(found_level, words in text) for found_level, text in found]


def test_conversions_of_the_same_weights_may_share_where_it_is_said(tmp_path: Path) -> None:
    said = settings(tmp_path, same_weights=["llamacpp", "mlx"])
    shape = "24 layers x 8 kv_heads x 64 head_dim"
    # Given both under the family's name, in different dtypes, which are cast
    pair = [card("prefill", layout=f"{shape}; f16"), card("decode", engine="mlx", layout=f"{shape}; bf16")]
    assert "because same_weights says" in lines(check_workers(said, pair))[0][1]
    # And where one of them was started before that was said
    [(level, text)] = lines(check_workers(said, [pair[0], replace(pair[1], fingerprint="family-2")]))
    assert level == "error"
    assert text.endswith("start both workers again with this configuration")


def test_shapes_are_compared_also_where_same_weights_calls_two_engines_one_family(tmp_path: Path) -> None:
    said = settings(tmp_path, same_weights=["llamacpp", "mlx"])
    plain, windowed = (
        layout_text(KVLayout(36, 8, 64, "f16", *window)) for window in ((), (128, tuple(range(0, 36, 2))))
    )
    pair = [card("prefill", layout=plain), card("decode", engine="mlx", fingerprint="family-2", layout=windowed)]
    [(level, text)] = lines(check_workers(said, pair))
    assert level == "error"
    assert "36 layers x 8 kv_heads x 64 head_dim, window 128 in layers 0-34 step 2)" in text
    assert "take them out of same_weights" in text
    # And a worker that does not tell its shape yet is judged by its family, as before
    assert "same_weights says that they may" in lines(check_workers(said, [replace(pair[0], layout=""), pair[1]]))[0][1]


def test_ollama_alone_is_told_which_engine_would_hand_over(tmp_path: Path) -> None:
    only = settings(tmp_path, weights={"llamacpp": "", "ollama": "ollama:m"})
    pair = [card(role, engine="ollama", fingerprint="", hands_over=False) for role in ("prefill", "decode")]
    [(level, text)] = lines(check_workers(only, pair))
    assert level == "warn"
    assert "--engine llamacpp --weights ollama:m" in text


def test_a_model_that_nobody_serves_is_an_error_where_it_grades_or_is_half_served(tmp_path: Path) -> None:
    grading = settings(tmp_path)
    idle = replace(grading, grading=replace(grading.grading, code_model=""))
    assert [level for level, _ in lines(check_workers(grading, []))] == ["error"]
    assert [level for level, _ in lines(check_workers(idle, []))] == ["warn"]
    [(level, text)] = lines(check_workers(idle, [card("prefill")]))
    assert level == "error"
    assert text.endswith("no decode worker serves it: its jobs wait for ever -> start kvasir decode-worker --model m")


@pytest.mark.parametrize(
    ("platform", "device", "host", "level"),
    [
        ("linux-cuda", "cpu", "Spark1.local", "error"),
        ("macos", "cpu", "spark1", "error"),
        ("linux-cuda", "cuda", "spark1", "ok"),
        ("linux", "cpu", "spark1", "ok"),
        ("linux-cuda", "cpu", "a-name-nobody-wrote-down", "error"),  # found by its role and model
    ],
)
def test_a_gpu_machine_whose_engine_runs_on_the_cpu_is_an_error(
    tmp_path: Path, platform: str, device: str, host: str, level: str
) -> None:
    roles = [{"role": "prefill", "model": "m", "engine": "llamacpp"}]
    machines = {"spark1": {"host": "10.0.0.3", "platform": platform, "roles": roles}}
    workers = [card("prefill", device=device, host=host), card("decode")]
    found = lines(check_workers(settings(tmp_path, machines), workers))
    assert [level for level, text in found if "CPU" in text] == (["error"] if level == "error" else [])


def test_a_worker_of_a_model_that_is_not_configured_is_mentioned(tmp_path: Path) -> None:
    found = lines(check_workers(settings(tmp_path), [card("prefill"), card("decode"), card("decode", "x", model="n")]))
    assert ("warn", True) in [(level, "does not have" in text) for level, text in found]


@pytest.mark.parametrize(
    ("info", "saves", "levels"),
    [
        ({}, "", ["ok"]),
        ({"maxmemory_policy": "allkeys-lru"}, "", ["error"]),
        ({"maxmemory": 0}, "", ["warn"]),
        ({}, "3600 1 300 100", ["warn"]),
        ({"aof_enabled": 1}, "", ["warn"]),
    ],
)
def test_a_store_that_would_lose_or_write_kv_caches_is_found(
    info: dict[str, Any], saves: str, levels: list[str]
) -> None:
    assert [finding.level for finding in check_redis(NOEVICTION | info, saves)] == levels


def test_a_configuration_that_can_not_be_read_is_a_finding() -> None:
    def load() -> Settings:
        raise ConfigError("kvasir.toml line 3: no such key")

    [finding] = examine(load)
    assert (finding.level, finding.what) == ("error", "kvasir.toml line 3: no such key")


def test_doctor_says_what_is_wrong_with_this_machines_models_and_ends_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given a good model, one whose file is missing, and Ollama's gpt-oss
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_gguf(tmp_path / "good.gguf")
    write_gguf(tmp_path / "foreign.gguf", TinyModel("gptoss"))
    tables = [f'[models.{name}]\nweights.llamacpp = "{name}.gguf"\n' for name in ("good", "missing", "foreign")]
    (tmp_path / "kvasir.toml").write_text("".join(tables))
    # When doctor looks
    assert cli.run(["doctor", "--json"]) == 1
    found = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}
    # Then each has its line
    assert found["good"]["level"] == "ok"
    assert "no weights file" in found["missing"]["what"]
    assert "Ollama's own dialect" in found["foreign"]["what"]
    # And without the bad ones it ends with 0, as a table
    (tmp_path / "kvasir.toml").write_text(tables[0])
    assert cli.run(["doctor"]) == 0
    assert "0 errors" in capsys.readouterr().out
