"""`llama-server` from PATH: started, watched, started again, and gone with us. The program is ours, its server real."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engines.llamacpp.server import Launch, LlamaServerProcess, arguments, device_in
from engines.proof import prove
from engines.registry import Engine, EngineOptions, open_engine
from messages.errors import ConfigError, EngineUnavailable
from messages.jobs import Sampling, user_prompt
from tests.support import llama_server_program
from tests.support.tiny_gguf import write_gguf
from tests.support.waiting import wait_until

GREEDY = Sampling(max_tokens=8, temperature=0)
LONG = Sampling(max_tokens=8000, temperature=0)
ENDLESS = {"prompt": "Who was Kvasir?", "n_predict": 8000, "ignore_eos": True, "stream": True}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = llama_server_program.install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


def load(weights: str) -> Engine:
    return open_engine("llamacpp", EngineOptions(weights, context=8192, slots=2, threads=1))


def test_a_server_of_our_own_transfers_kv_and_decodes_as_the_one_in_the_process(weights: Path, on_path: Path) -> None:
    program, package = load(f"llama-server:{weights}"), load(str(weights))
    assert prove(program, package) == prove(package, program) == ""
    assert (program.info.device, program.info.slots) == ("cpu", 2)
    assert program.info.fingerprint == package.info.fingerprint
    program.close()
    package.close()


def test_a_folder_that_is_too_long_for_a_socket_is_one_sentence(weights: Path, on_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter path"):
        LlamaServerProcess(str(on_path), Launch(weights, 512, 1, tmp_path / ("x" * 90)))


def test_a_program_that_takes_no_socket_is_refused(weights: Path, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho '--host HOST  ip address to listen (default: 127.0.0.1)'\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="needs to keep other users out"):
        LlamaServerProcess(str(program), Launch(weights, 512, 1, tmp_path))


def test_a_server_that_dies_is_started_again_and_its_jobs_can_be_tried_again(
    weights: Path, on_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a running server
    process = LlamaServerProcess(str(on_path), Launch(weights, 512, 1, tmp_path, 1))
    first = process.process.pid
    # When it is killed
    with caplog.at_level(logging.WARNING):
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: process.process.pid != first, "another process was started")
    # Then another answers in its place, and the log says so
    wait_until(lambda: answers(process), "the server answers again", timeout_s=20)
    assert "ended with code -9, and is started again" in caplog.text
    second = process.process.pid
    process.close()
    assert not alive(second)


def test_a_server_that_hangs_is_killed_and_started_again_and_its_jobs_can_be_tried_again(
    weights: Path, on_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a running server with an answer under way
    process = LlamaServerProcess(str(on_path), Launch(weights, 8192, 1, tmp_path, 1, health_s=0.5))
    first = process.process.pid
    # When it stops, in the middle
    with caplog.at_level(logging.WARNING), pytest.raises(EngineUnavailable):
        stop_in_the_middle_of_an_answer(process)
    # Then the answer ended as a transient error, and another server answers in its place
    wait_until(lambda: process.process.pid != first, "another process was started", timeout_s=20)
    wait_until(lambda: answers(process), "the server answers again", timeout_s=20)
    assert not alive(first)
    assert "has not answered /health for 0.5 s" in caplog.text
    process.close()


def test_a_server_that_is_not_ours_and_hangs_ends_its_jobs_as_transient_errors(
    weights: Path, on_path: Path, tmp_path: Path
) -> None:
    # Given an engine on a server that somebody else started
    process = LlamaServerProcess(str(on_path), Launch(weights, 16384, 2, tmp_path, 1))
    engine = load(f"{process.server.url}?slots={tmp_path}&model={weights}&health_s=0.5")
    tokens = engine.tokenize(user_prompt("", "Who was Kvasir?"), 0.0).ids
    expected = engine.decode(tokens, None, GREEDY).text
    # When that stops in the middle of an answer
    with pytest.raises(EngineUnavailable, match="does not answer"):
        engine.decode(tokens, None, LONG, on_text=lambda _: os.kill(process.process.pid, signal.SIGSTOP))
    # Then it is left alone, and serves again once it goes on
    assert alive(process.process.pid)
    os.kill(process.process.pid, signal.SIGCONT)
    wait_until(lambda: decodes(engine, tokens, expected), "it decodes again", timeout_s=20)
    engine.close()
    process.close()


@pytest.mark.parametrize("patience", ["no", "0", "99999"])
def test_a_patience_that_is_none_is_refused(weights: Path, on_path: Path, patience: str) -> None:
    with pytest.raises(ConfigError, match="health_s must be a number of seconds"):
        load(f"llama-server:{weights}?health_s={patience}")


def stop_in_the_middle_of_an_answer(process: LlamaServerProcess) -> None:
    for number, _ in enumerate(process.server.stream("/completion", ENDLESS)):
        if number == 0:
            os.kill(process.process.pid, signal.SIGSTOP)


def decodes(engine: Engine, tokens: tuple[int, ...], expected: str) -> bool:
    try:
        return engine.decode(tokens, None, GREEDY).text == expected
    except EngineUnavailable:
        return False


def answers(process: LlamaServerProcess) -> bool:
    try:
        return bool(process.server.get("/health"))
    except EngineUnavailable:
        return False


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Where nobody reaps orphans, the dead keep their number.
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()


def test_a_server_that_can_not_load_its_model_is_one_sentence(on_path: Path, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't load .*error: argument --host x.sock: invalid value"):
        LlamaServerProcess(refusing(tmp_path / "bin"), Launch(weights, 512, 1, tmp_path))


def refusing(folder: Path) -> str:
    """A llama-server that knows its options and none of their values."""
    folder.mkdir()
    program = folder / "llama-server"
    program.write_text('#!/bin/sh\necho "error: argument --host x.sock: invalid value" >&2\nexit 2\n')
    program.chmod(0o755)
    return str(program)


def test_without_the_package_the_program_on_path_is_used_and_dies_with_its_worker(weights: Path, on_path: Path) -> None:
    # Given an interpreter in which xllamacpp can't be imported, killed as soon as it has answered
    script = f"""
import os, signal, sys
sys.modules["xllamacpp"] = None
from engines.llamacpp.start import start
from engines.registry import EngineOptions
backing = start(EngineOptions({str(weights)!r}, context=256, slots=1, threads=1))
print(backing.release[-1].__self__.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    # Then the server had its own process, and doesn't stay behind
    server = int(done.stdout)
    wait_until(lambda: not alive(server), "the server is gone")


def test_asking_for_a_program_that_is_not_there_is_an_error(
    weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no llama-server on PATH"):
        load(f"llama-server:{weights}")


def test_the_options_fit_the_release() -> None:
    # Given what releases of 2026 and of early 2025 say of themselves
    new = "-fa, --flash-attn [on|off|auto]\n--fit [on|off]\n--swa-full\n-cram, --cache-ram N\n-no-kvu, --no-kv-unified"
    old = "-fa, --flash-attn     enable Flash Attention\n--swa-full"
    launch = Launch(Path("m.gguf"), 2048, 4, Path("/dev/shm/slots"))
    # Then each is told what it understands, and that its model belongs on the GPU
    line = " ".join(arguments(launch, new))
    assert "--host /dev/shm/slots/server.sock " in line
    assert "--ctx-size 2048 --parallel 4 --slot-save-path /dev/shm/slots/ --flash-attn on" in line
    assert "--swa-full" in line
    assert "--cache-ram 0" in line
    assert "--no-kv-unified" in line
    assert "--n-gpu-layers" not in line
    assert " ".join(arguments(launch, old)).endswith("--flash-attn --swa-full --n-gpu-layers 999")


@pytest.mark.parametrize(
    ("listing", "device"),
    [
        ("Available devices:\n  CUDA0: NVIDIA GB10 (122503 MiB, 118000 MiB free)\n", "cuda"),
        ("Available devices:\n  MTL0: Apple M3 Ultra\n  BLAS: Accelerate\n", "metal"),
        ("ggml_cuda_init: found 1 CUDA devices:\nAvailable devices:\n  BLAS: OpenBLAS\n", "cpu"),
        ("error: invalid argument: --list-devices", "cpu"),
    ],
)
def test_the_device_is_the_first_gpu_that_it_lists(listing: str, device: str) -> None:
    assert device_in(listing) == device
