"""The in-process figure of `overhead`: jobs a second through the workers of one process, when the engine takes no time.

`python -m benchmarks.overhead_in_process BYTES JOBS` ends with a line of JSON. It uses what was there in 0.1.0, too, so
that the same file measures both: `PYTHONPATH=OTHER_CHECKOUT python -P benchmarks/overhead_in_process.py BYTES JOBS`.
"""

import json
import secrets
import sys
import tempfile
import time
from pathlib import Path

from infra.config.settings import load_settings
from kvasir.connect import connect
from messages.jobs import Sampling, user_prompt

_SETTINGS = '[models.local]\nweights = {simulated = "sim:scale=0,answer=16"}\nslots = 4\ncontext = 16384\n'
_PATIENCE_S = 120.0


def rate(prompt_bytes: int, jobs: int) -> tuple[float, float]:
    """Answers a second between the first and the last tenth, and how many seconds lay between these."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kvasir.toml"
        config.write_text(_SETTINGS)
        client = connect(load_settings(config=config, environ={}), ["local"])
    moments = []
    with client:
        batch_id = f"load-{secrets.token_hex(4)}"
        client.broker.open_reply_queue(batch_id)
        prompts = [user_prompt("", secrets.token_hex(prompt_bytes // 2)) for _ in range(jobs)]
        submitted = [
            client.new_job(batch_id, str(number), "local", prompt, Sampling(max_tokens=16))
            for number, prompt in enumerate(prompts)
        ]
        client.submit(submitted)
        for result in client.gather(batch_id, [job.job_id for job in submitted], _PATIENCE_S):
            if result.state != "succeeded" or result.decode.kv_transfer != "verified":
                raise RuntimeError(f"a job was not answered as meant: {result.state}, {result.error}")
            moments.append(time.monotonic())
    first, last = jobs // 10, jobs - 1 - jobs // 10
    seconds = moments[last] - moments[first]
    return (last - first) / seconds, seconds


if __name__ == "__main__":
    jobs_per_s, stretch_s = rate(int(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"jobs_per_s": jobs_per_s, "stretch_s": stretch_s}))
