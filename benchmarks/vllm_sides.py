"""The vllm engine and vLLM by itself, on the same model and machine, for the benchmarks that compare them."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engines.registry import EngineOptions
from engines.vllm.engine import VLLMEngine, launch_for, open_engine
from engines.vllm.process import vllm_environ

_PROGRAM = Path(__file__).with_name("vllm_bare.py")
_PATIENCE_S = 20.0
_REST_S = 1.0


class Both:
    """An engine, and a bare vLLM that was loaded with the arguments of the engine's own host."""

    def __init__(self, weights: str, context: int, sequences: int, prefix_caching: bool) -> None:
        """`sequences`: decoded at once, and prefilled at once. `prefix_caching`: of the bare one."""
        options = EngineOptions(weights, context, sequences, prefill_slots=sequences)
        _, launch = launch_for(options)
        arguments = launch.arguments | {"enable_prefix_caching": prefix_caching}
        with ExitStack() as stack:
            self._bare = subprocess.Popen(
                [launch.environment.python, "-P", _PROGRAM, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=vllm_environ(dict(os.environ), launch.threads),
                start_new_session=True,
            )
            stack.callback(self._end_bare)
            self.engine: VLLMEngine = open_engine(options)  # while the other loads
            stack.callback(self.engine.close)
            self._hear()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End both."""
        self._stack.close()

    def bare(self, prompts: Sequence[Sequence[int]], max_tokens: int, ends: Sequence[int]) -> dict[str, Any]:
        """`seconds` and `answers` of the bare one."""
        assert self._bare.stdin is not None
        asked = {"prompts": [list(tokens) for tokens in prompts], "max_tokens": max_tokens, "ends": list(ends)}
        print(json.dumps(asked), file=self._bare.stdin, flush=True)
        return self._hear()

    def rest(self) -> None:
        """Before each turn: threads of the one that just computed look for more work in a loop for a while."""
        time.sleep(_REST_S)

    def engine_cpu_s(self) -> float:
        """Processor time so far of the engine's host and its processes, and of this one."""
        return _group_cpu_s(self.engine.host.pid) + sum(os.times()[:2])

    def bare_cpu_s(self) -> float:
        """Processor time so far of the bare one's processes."""
        return _group_cpu_s(self._bare.pid)

    def _hear(self) -> dict[str, Any]:
        assert self._bare.stdout is not None
        line = self._bare.stdout.readline()
        if not line:
            raise RuntimeError("the bare vLLM ended")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _end_bare(self) -> None:
        assert self._bare.stdin is not None
        self._bare.stdin.close()
        try:
            self._bare.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._bare.pid, 9)
            self._bare.wait()


def _group_cpu_s(group: int) -> float:
    """Of all living processes of a process group (proc(5): utime and stime, in ticks)."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # no process, or one that has ended
            continue
        if entry.name.isdigit() and int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
