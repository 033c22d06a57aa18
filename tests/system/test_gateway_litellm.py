"""LiteLLM's client at the gateway, by another URL and nothing else."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import scratch_env
from tests.support.processes import environment, serving

pytestmark = pytest.mark.system

MODEL = "tiny:1b"
CLIENT = Path(__file__).parents[1] / "support" / "litellm_client.py"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path, MODEL) as url:
        yield url


def test_litellm_chats_streams_completes_and_reads_what_is_refused(url: str, tmp_path: Path) -> None:
    command = [str(scratch_env.python("litellm-1.108.7")), str(CLIENT), url, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])

    assert found["whole"]
    assert found["finish"] in ("stop", "length")
    assert found["streamed"] == found["asynchronous"] == found["ollama"] == found["whole"]
    assert len(found["two"]) == 2
    assert found["completed"]
    counts = {key: found["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"] > 0
    assert {key: found["streamed_usage"][key] for key in counts} == counts
    # Errors are of the class that its users catch, and say what to do
    kind, said = found["unknown"]
    assert (kind, "gpt-4o" in said) == ("NotFoundError", True)
    kind, said = found["refused"]
    assert (kind, "tools" in said) == ("BadRequestError", True)
