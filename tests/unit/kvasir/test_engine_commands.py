"""`kvasir engines` and `kvasir doctor`, without services: the declared table, and what each finding is found by."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engines.base import Capabilities, EngineInfo
from engines.entry import EngineEntry
from engines.huggingface.rope import stated_rope
from engines.registry import EngineOptions, entries, open_engine, partners
from engines.worker_info import kv_text
from infra.config.settings import Settings, load_settings
from kvasir import cli
from kvasir.doctor.cluster import examine
from kvasir.doctor.findings import Finding
from kvasir.doctor.pairs import check_workers
from kvasir.doctor.services import check_redis
from kvasir.worker.process import check_family
from kvstore.memory import MemoryClusterState
from messages.errors import ConfigError
from messages.kv import KVLayout
from messages.workers import RateCurve, WorkerDetails, WorkerInfo, WorkerStage, layout_text
from tests.support.llama_server_program import install
from tests.support.rope_folders import configuration
from tests.support.sketches import a_sketch, off_by
from tests.support.tiny_gguf import TinyModel, write_gguf

GIB = 1 << 30
NOEVICTION = {"maxmemory": 128 * GIB, "maxmemory_policy": "noeviction", "aof_enabled": 0, "used_memory": GIB}


def registration(role: WorkerStage, worker_id: str = "", **fields: Any) -> WorkerInfo:
    """A llama.cpp worker's registration on a machine of its own."""
    plain = WorkerInfo(
        worker_id or f"{role}-1", role, "m", "llamacpp", "cuda", "family-1", "words-1", 8192, 4, f"{role}-host", 1, 0.0
    )
    return replace(plain, **{"transfers_kv": True, **fields})


def settings(tmp_path: Path, machines: dict[str, Any] | None = None, **model: Any) -> Settings:
    """One model "m", which grades code."""
    weights = {"weights": {"llamacpp": "m.gguf"}}
    tables = {"code_model": "m", "models": {"m": weights | model}, "machines": machines or {}}
    return load_settings(tables, environ={}, cwd=tmp_path, user_dir=tmp_path)


def lines(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, f"{finding.what} -> {finding.todo}") for finding in findings]


def info(engine: str, case: str) -> EngineInfo:
    """A loaded model with the RoPE of one of the tests' folders."""
    can = entries()[engine].capabilities
    rope = stated_rope(configuration(case, 5))
    return EngineInfo(engine, "cpu", 8192, 4, "family-2", "words-1", KVLayout(2, 2, 16, "f16"), can, 0.0, (rope,))


@pytest.mark.parametrize("name", ["llamacpp", "simulated"])
def test_an_engine_declares_what_it_does_with_a_model_loaded(name: str, tmp_path: Path) -> None:
    weights = str(write_gguf(tmp_path / "tiny.gguf")) if name == "llamacpp" else "sim:"
    engine = open_engine(name, EngineOptions(weights, context=256, slots=1, threads=1))
    assert engine.info.capabilities == entries()[name].capabilities
    engine.close()


def test_caches_go_to_engines_of_the_same_family() -> None:
    assert partners("ollama") == ()
    assert partners("llamacpp") == ("llamacpp", "mlx", "transformers", "vllm")
    assert partners("simulated") == ("simulated",)


def test_what_is_not_installed_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = EngineEntry(
        name="other",
        module="other",
        capabilities=Capabilities.text_only(),
        weights="FILE",
        packages=("json", "no_such_package"),
        extra="other",
    )
    assert absent.install_command() == "pip install 'kvasir-inference[other]'"
    assert replace(absent, extra="").install_command() == "pip install no_such_package"
    # And llamacpp runs with its package or with the program
    monkeypatch.setitem(__import__("sys").modules, "xllamacpp", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert entries()["llamacpp"].install_command() == "pip install 'kvasir-inference[llamacpp]'"
    install(tmp_path)
    assert entries()["llamacpp"].install_command() == ""


def test_engines_prints_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["engines"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{entry.name} " in printed for entry in entries().values())
    assert cli.run_command(["engines", "--json"]) == 0
    rows = {row["engine"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["ollama"]["transfers_kv_to"] == []
    assert rows["llamacpp"]["capabilities"]["exports_kv"]


def test_two_workers_of_one_family_are_well(tmp_path: Path) -> None:
    found = lines(
        check_workers(
            settings(tmp_path), [registration("prefill"), registration("decode"), registration("decode", "decode-2")]
        )
    )
    assert found == [("ok", "llamacpp to llamacpp: hands its KV cache over (family family-1) -> ")]


@pytest.mark.parametrize(
    ("decode", "level", "words"),
    [
        ({"fingerprint": "family-2"}, "error", "other weights or shapes"),
        ({"fingerprint": "family-2", "engine": "mlx"}, "error", 'same_weights = ["llamacpp", "mlx"]'),
        ({"tokenizer": "words-2"}, "error", "different tokenizers"),
        ({"tokenizer": "observed-9"}, "ok", "hands its KV cache over"),
        ({"context": 4096}, "warn", "prompts of 8,192 tokens"),
        ({"transfers_kv": False, "notes": "the proof failed"}, "warn", "does every prompt: the proof failed"),
        (
            {"engine": "ollama", "fingerprint": "", "transfers_kv": False},
            "warn",
            "--engine llamacpp at both ends would",
        ),
    ],
)
def test_a_pair_that_does_not_fit_is_found(tmp_path: Path, decode: dict[str, Any], level: str, words: str) -> None:
    found = lines(check_workers(settings(tmp_path), [registration("prefill"), registration("decode", **decode)]))
    assert (level, True) in [(found_level, words in text) for found_level, text in found]


def test_a_refusal_says_what_it_costs_a_class_and_recommends_the_consumers_weights(tmp_path: Path) -> None:
    # Given a prefill worker that has measured 2,000 tokens a second, and a decode worker of another engine
    details = WorkerDetails(prefill_curves=(RateCurve("m", (4000,), (2000.0,)),))
    prefill = registration("prefill", details=details)
    [(level, text)] = lines(
        check_workers(settings(tmp_path), [prefill, registration("decode", engine="mlx", fingerprint="family-2")])
    )
    # Then the refusal is a figure, and the way out is named beside the owner's word
    assert level == "error"
    assert "a class of 100 with prompts of 4,000 tokens the decode worker then computes all 400,000" in text
    assert "which the prefill worker does in 3 minutes" in text
    assert "same_weights" in text
    assert "or give the prefill worker the decode worker's weights (--engine mlx, the same file or folder)" in text
    # And not where the decoder's engine gives no cache out, and with no time where nothing was measured
    remote = registration("decode", engine="ollama", fingerprint="", transfers_kv=False)
    [(level, text)] = lines(check_workers(settings(tmp_path), [registration("prefill"), remote]))
    assert "decode worker's weights" not in text
    assert "minutes" not in text


def test_different_builds_of_one_engine_are_named_with_their_slot_files(tmp_path: Path) -> None:
    older, newer = (
        WorkerDetails(engine_build=build, slot_file_version=v) for build, v in (("b10229", "2"), ("b1", "4"))
    )
    pair = [registration("prefill", details=older), registration("decode", details=newer)]
    [(level, text)] = lines(check_workers(settings(tmp_path), pair))
    assert level == "ok"
    assert "hands its KV cache over" in text
    assert "of different builds (b10229, slot files 2; and b1, slot files 4)" in text
    # And nothing is said of equal ones, of two engines, or where an older worker tells none
    for one, other in (
        (pair[0], replace(pair[1], details=older)),
        (pair[0], replace(pair[1], engine="mlx")),
        (pair[0], registration("decode")),
    ):
        assert "builds" not in lines(check_workers(settings(tmp_path), [one, other]))[0][1]


def test_a_pair_with_two_chat_templates_is_named_and_goes_on(tmp_path: Path) -> None:
    one, other = (WorkerDetails(template=name) for name in ("7e3f", "7e40"))
    pair = [registration("prefill", details=one), registration("decode", details=other)]
    levels, texts = zip(*lines(check_workers(settings(tmp_path), pair)), strict=True)
    assert levels == ("ok", "warn")
    assert "chat templates of prefill-1 and decode-1 differ" in texts[1]
    assert "give both the same template" in texts[1]
    # And nothing is said of equal ones, or where an older worker tells none
    for name in ("7e3f", ""):
        same = [pair[0], registration("decode", details=WorkerDetails(template=name))]
        assert len(lines(check_workers(settings(tmp_path), same))) == 1


def test_conversions_of_the_same_weights_may_share_where_it_is_said(tmp_path: Path) -> None:
    said = settings(tmp_path, same_weights=["llamacpp", "mlx"])
    shape = "24 layers x 8 kv_heads x 64 head_dim"
    # Given both under the family's name, in different dtypes, which are cast
    pair = [
        registration("prefill", layout=f"{shape}; f16"),
        registration("decode", engine="mlx", layout=f"{shape}; bf16"),
    ]
    assert "because same_weights says" in lines(check_workers(said, pair))[0][1]
    # And where one of them was started before that was said
    [(level, text)] = lines(check_workers(said, [pair[0], replace(pair[1], fingerprint="family-2")]))
    assert level == "error"
    assert "start both workers again with this configuration" in text


def test_a_pair_is_judged_by_what_both_compute_and_agreement_is_told_by_layer(tmp_path: Path) -> None:
    # Given workers of one family whose sketches lie in the store
    said = settings(tmp_path, same_weights=["llamacpp", "mlx"])
    ours, cluster_state = a_sketch(engine="llamacpp"), MemoryClusterState()
    rounded = off_by(ours, 0.001, 2, 1, engine="mlx", rounding="f16", weights="weights-2")
    other = off_by(ours, 0.05, 1, 1, slice(4, None), engine="mlx", weights="weights-2")
    for sketch in (ours, rounded, other):
        cluster_state.put_sketch(sketch.name, sketch.body)

    def found(prefill: str, decode: str, **more: Any) -> Finding:
        pair = [registration("prefill", engine="mlx", sketch=prefill), registration("decode", sketch=decode, **more)]
        (only,) = check_workers(said, pair, cluster_state.get_sketch)
        return only

    # Then those that agree are well, with the worst layer in words and all of them in figures
    fine = found(rounded.name, ours.name)
    words = "keys and values differ by 0.10% in layer 2, rounding makes 0.70%, which results call rounded"
    assert (fine.level, fine.what) == ("ok", f"mlx to llamacpp: hands its KV cache over (family family-1); {words}")
    assert [sorted(layer) for layer in json.loads(json.dumps(asdict(fine)))["layers"]] == [["k", "rounding", "v"]] * 3
    assert fine.layers[2]["v"] == pytest.approx(0.001, rel=0.01)
    assert found(ours.name, ours.name).what.endswith("differ by 0.00% in layer 0, rounding makes 0.01%")
    # those that don't are refused with the reason, and so are those that can't be compared
    wrong = found(other.name, ours.name)
    assert wrong.level == "error"
    assert "mlx and llamacpp compute different KV caches: in layer 1, from position 144 on, V differs" in wrong.what
    assert wrong.layers[1]["v"] > wrong.layers[1]["rounding"]
    # as is whom the decoder has refused since
    since = found(rounded.name, ours.name, refuses=(rounded.name,), refuses_because=("0.90 nats apart on average",))
    assert since.level == "error"
    assert since.what.startswith(
        "mlx to llamacpp: 0.90 nats apart on average; the decoder does every prompt; of a class"
    )
    for lost in ("", "5e7c40"):
        assert found(lost, ours.name).level == "error"
        assert "was not compared" in found(ours.name, lost).what
    cluster_state.put_sketch("5e7c41", b"nonsense")
    assert "holds another sketch" in found("5e7c41", ours.name).what


def test_shapes_are_compared_also_where_same_weights_calls_two_engines_one_family(tmp_path: Path) -> None:
    said = settings(tmp_path, same_weights=["llamacpp", "mlx"])
    plain, windowed = (
        layout_text(KVLayout(36, 8, 64, "f16", *window)) for window in ((), (128, tuple(range(0, 36, 2))))
    )
    pair = [
        registration("prefill", layout=plain),
        registration("decode", engine="mlx", fingerprint="family-2", layout=windowed),
    ]
    [(level, text)] = lines(check_workers(said, pair))
    assert level == "error"
    assert "36 layers x 8 kv_heads x 64 head_dim, window 128 in layers 0-34 step 2)" in text
    assert "llamacpp computes without the sliding window of 128 in layers 0-34 step 2 that mlx computes" in text
    assert "take them out of same_weights" in text
    cluster_state = MemoryClusterState()
    cluster_state.register(pair[1], 60)
    joining = replace(info("llamacpp", "qwen2"), fingerprint="family-3", layout=KVLayout(36, 8, 64, "f16"))
    with pytest.raises(
        ConfigError, match=r"already: llamacpp computes without the sliding window .* same engine for prefill and"
    ):
        check_family(cluster_state, "m", joining)
    # And a worker that does not tell its shape yet is judged by its family, as before
    assert "same_weights says that they may" in lines(check_workers(said, [replace(pair[0], layout=""), pair[1]]))[0][1]


def test_a_family_of_two_ropes_is_refused_in_one_sentence(tmp_path: Path) -> None:
    # Given a pair that same_weights calls one family, and of which one truncates YaRN's ramp or has another base
    said = settings(tmp_path, same_weights=["llamacpp", "mlx"])
    ours = kv_text(info("mlx", "gpt_oss, yarn"))
    for other, what in (("gpt_oss, truncated yarn", "RoPE scaling"), ("qwen2", "RoPE base")):
        theirs = info("llamacpp", other)
        pair = [registration("prefill", layout=kv_text(theirs), fingerprint="family-2")]
        pair += [registration("decode", engine="mlx", layout=ours)]
        # Then doctor names what differs and what to do
        [(level, text)] = lines(check_workers(said, pair))
        assert level == "error"
        assert f"llamacpp and mlx compute different keys, by another {what} (RoPE base " in text
        assert "give both conversions of one configuration" in text
        # And a worker that would join is told the same
        cluster_state = MemoryClusterState()
        cluster_state.register(pair[1], 60)
        with pytest.raises(ConfigError, match=f"decode worker decode-1 serves m already: .* another {what}"):
            check_family(cluster_state, "m", theirs)


def test_doctor_names_a_window_that_mlx_ignores(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = configuration("qwen2", 5) | {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": np.zeros(1, np.float32)}, folder / "model.safetensors")
    loading = partial(settings, tmp_path, weights={"mlx": str(folder)})
    findings = {finding.subject: finding for finding in examine(loading)}
    assert findings["m"].level == "error"
    assert "MLX ignores the sliding window of 256 positions" in findings["m"].what


def test_ollama_alone_is_told_which_engine_would_transfer_kv(tmp_path: Path) -> None:
    only = settings(tmp_path, weights={"llamacpp": "", "ollama": "ollama:m"})
    pair = [registration(role, engine="ollama", fingerprint="", transfers_kv=False) for role in ("prefill", "decode")]
    [(level, text)] = lines(check_workers(only, pair))
    assert level == "warn"
    assert "--engine llamacpp --weights ollama:m" in text


def test_a_model_that_nobody_serves_is_an_error_where_it_grades_or_is_half_served(tmp_path: Path) -> None:
    grading = settings(tmp_path)
    idle = replace(grading, grading=replace(grading.grading, code_model=""))
    assert [level for level, _ in lines(check_workers(grading, []))] == ["error"]
    assert [level for level, _ in lines(check_workers(idle, []))] == ["warn"]
    [(level, text)] = lines(check_workers(idle, [registration("prefill")]))
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
    workers = [registration("prefill", device=device, host=host), registration("decode")]
    found = lines(check_workers(settings(tmp_path, machines), workers))
    assert [level for level, text in found if "CPU" in text] == (["error"] if level == "error" else [])


def test_a_worker_of_a_model_that_is_not_configured_is_mentioned(tmp_path: Path) -> None:
    found = lines(
        check_workers(
            settings(tmp_path),
            [registration("prefill"), registration("decode"), registration("decode", "x", model="n")],
        )
    )
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


def test_a_store_without_a_limit_is_told_half_of_its_machines_memory() -> None:
    (finding,) = check_redis(NOEVICTION | {"maxmemory": 0, "total_system_memory": 16 << 30}, "")
    assert "maxmemory 8192mb" in finding.todo


def test_a_configuration_that_can_not_be_read_is_a_finding() -> None:
    def load() -> Settings:
        raise ConfigError("kvasir.toml line 3: no such key")

    [finding] = examine(load)
    assert (finding.level, finding.what) == ("error", "kvasir.toml line 3: no such key")


def test_a_password_file_that_is_missing_is_one_row_and_the_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVASIR_BROKER_URL", "amqp://user@127.0.0.1:9/%2F")
    monkeypatch.setenv("KVASIR_BROKER_PASSWORD_FILE", str(tmp_path / "nowhere"))
    monkeypatch.setenv("KVASIR_STORE_URL", "redis://127.0.0.1:9/0")
    (tmp_path / "kvasir.toml").write_text('[models.m]\nengine = "simulated"\nweights.simulated = "sim:"\n')

    assert cli.run_command(["doctor", "--json"]) == 1

    found = [(one["level"], one["subject"], one["what"]) for one in json.loads(capsys.readouterr().out)]
    assert [subject for level, subject, _ in found if level == "error"] == ["broker", "store"]
    assert {"configuration", "disk"} <= {subject for level, subject, _ in found if level == "ok"}
    [why] = [what for _, subject, what in found if subject == "broker"]
    assert "KVASIR_BROKER_PASSWORD_FILE: can't read the password file" in why


def test_doctor_says_what_is_wrong_with_this_machines_models_and_ends_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given a good model, one whose file is missing, and Ollama's gpt-oss
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "good.gguf")
    write_gguf(tmp_path / "foreign.gguf", TinyModel("gptoss"))
    tables = [f'[models.{name}]\nweights.llamacpp = "{name}.gguf"\n' for name in ("good", "missing", "foreign")]
    (tmp_path / "kvasir.toml").write_text("".join(tables))
    # When doctor looks
    assert cli.run_command(["doctor", "--json"]) == 1
    found = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}
    # Then each has its line
    assert found["good"]["level"] == "ok"
    assert "no weights file" in found["missing"]["what"]
    assert "Ollama's own dialect" in found["foreign"]["what"]
    # And without the bad ones it ends with 0, as a table
    (tmp_path / "kvasir.toml").write_text(tables[0])
    assert cli.run_command(["doctor"]) == 0
    assert "0 errors" in capsys.readouterr().out
