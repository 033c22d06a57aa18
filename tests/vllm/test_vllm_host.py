"""The host process: killed, hung and started again, cancelled, given files that it can't read, left by its owner."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.matrix_caches import difference, prefilled
from engines.registry import EngineOptions
from engines.vllm import conversation, process
from engines.vllm.engine import VLLMEngine, open_engine
from messages.errors import ConfigError, EngineUnavailable
from messages.jobs import Sampling
from tests.support.processes import ROOT
from tests.support.vllm_contract import ENDLESS, GREEDY, TOKENS, VLLMContract, answers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm

WEIGHTS = f"{ROOT / 'examples/model/kvasir-demo'}?dtype=float32"
RESTART_S = 900.0  # a start takes a minute, and nine were seen on two cores that many used


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    opened = open_engine(EngineOptions(WEIGHTS, context=8192, slots=2, threads=1, prefill_slots=4))
    yield opened
    opened.close()


def group_of(pid: int) -> list[int]:
    """All living processes of the host's group."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and int(fields[2]) == pid and fields[0] != "Z":
            found.append(int(entry.name))
    return found


class TestHost(VLLMContract):
    """A process of ours."""


def test_nobody_else_can_reach_socket_or_caches(engine: VLLMEngine) -> None:
    folder = engine.host.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    engine.decode(TOKENS, prefilled(engine, TOKENS), GREEDY)
    assert not list(folder.glob("*.kv"))  # what was handed over is gone


def test_a_stop_word_ends_an_answer_and_the_count_is_known(engine: VLLMEngine) -> None:
    # Given an answer, and a word from its middle
    cache, long = prefilled(engine, TOKENS), Sampling(max_tokens=40, temperature=0)
    whole = engine.decode(TOKENS, cache, long).text
    word = whole[len(whole) // 2 :][:4]
    # When it is told to stop there
    answer = engine.decode(TOKENS, cache, replace(long, stop=(word,)))
    # Then it does, and says what it evaluated
    assert (answer.text, answer.finish_reason, answer.evaluated_tokens) == (whole[: whole.index(word)], "stop", 1)


def test_prompts_in_flight_at_once_give_the_caches_of_each_alone(engine: VLLMEngine) -> None:
    prompts = [TOKENS[start : start + 700] for start in range(0, 200, 25)]
    alone = [prefilled(engine, tokens) for tokens in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(lambda tokens: prefilled(engine, tokens), prompts))
    for one, other in zip(alone, together, strict=True):
        assert difference(one, other) < 1e-4  # sums depend on which prompts share a step
        assert [block.start for block in one.blocks] == [block.start for block in other.blocks]
    texts = {engine.decode(tokens, cache, GREEDY).text for tokens, cache in zip(prompts, together, strict=True)}
    assert texts == {engine.decode(tokens, cache, GREEDY).text for tokens, cache in zip(prompts, alone, strict=True)}


@pytest.mark.parametrize("whom", ["host", "worker"])
def test_a_killed_host_is_started_again_and_jobs_can_be_tried_again(engine: VLLMEngine, whom: str) -> None:
    # Given an answer under way
    cold = engine.decode(TOKENS, None, GREEDY)
    cache, before = prefilled(engine, TOKENS), engine.host.process.pid
    others = [pid for pid in group_of(before) if pid != before]
    assert others

    def kill(_: str) -> None:
        os.kill(before if whom == "host" else others[-1], signal.SIGKILL)

    # When one of its processes is killed
    with pytest.raises(EngineUnavailable):
        engine.decode(TOKENS, None, ENDLESS, on_text=kill)
    # Then what follows is told to try again, all of the old ones are gone, and the next one answers as the first
    wait_until(lambda: engine.host.process.pid != before, "it is started again", RESTART_S)
    assert group_of(before) == []

    wait_until(lambda: answers(engine, cache) == (cold.text, 1), "it answers again", RESTART_S, 0.5)


def test_a_model_that_vllm_can_not_load_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"vLLM can't load .*max_model_len"):
        open_engine(EngineOptions(WEIGHTS, context=1 << 20, slots=1, threads=1))


def test_no_process_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom engines.registry import EngineOptions\nfrom engines.vllm.engine import open_engine\n"
        f"engine = open_engine(EngineOptions({WEIGHTS!r}, context=1024, slots=1, threads=1))\n"
        "print(engine.host.process.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        host = int(owner.stdout.readline())
        assert len(group_of(host)) > 1
        owner.kill()
    wait_until(lambda: group_of(host) == [], "vLLM's processes are gone", 20)


def test_a_host_that_hangs_is_noticed_and_started_again(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an answer under way
    cold = engine.decode(TOKENS, None, GREEDY)
    cache, before = prefilled(engine, TOKENS), engine.host.process.pid
    monkeypatch.setattr(conversation, "SILENT_S", 5.0)

    def stop(_: str) -> None:
        for pid in group_of(before):
            os.kill(pid, signal.SIGSTOP)

    # When all of its processes stop, and none of them dies
    with pytest.raises(EngineUnavailable):
        engine.decode(TOKENS, None, ENDLESS, on_text=stop)
    monkeypatch.undo()

    # Then they are gone, and the next one answers as the first
    wait_until(lambda: engine.host.process.pid != before, "it is started again", RESTART_S)
    assert group_of(before) == []
    wait_until(lambda: answers(engine, cache) == (cold.text, 1), "it answers again", RESTART_S, 0.5)


def test_a_model_on_several_ranks_is_refused_by_name(engine: VLLMEngine) -> None:
    launch = engine.host.launch
    arguments = launch.arguments | {"tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"tensor_parallel_size must be 1, not 2: .* several ranks"):
        process.HostProcess(replace(launch, arguments=arguments))
