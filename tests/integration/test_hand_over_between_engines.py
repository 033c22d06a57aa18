"""llama.cpp prefills and MLX decodes, and the other way round: worker processes over a real broker and a real store.

The GGUF and the folder of the demo model hold the same numbers, and `same_weights` says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.settings import load_settings
from kvasir import connect
from messages.jobs import JobResult, Sampling
from tests.support.processes import DEMO, ROOT, Cluster

pytestmark = pytest.mark.system  # minutes, not seconds

GREEDY = Sampling(max_tokens=12, temperature=0)
PROMPT = "".join(f"Student {number} computes churn by region, {number % 9 + 20} percent.\n" for number in range(12))


def both_ways(config: Path, model: str) -> None:
    """The same model in two engines, as one family."""
    folder = ROOT / "examples/model/kvasir-demo"
    text = config.read_text()
    table = f'[models."{model}".weights]\nllamacpp = "{DEMO.weights}"\nmlx = "{folder}"\n'
    settings = f'[models."{model}"]\ncontext = 2048\nslots = 1\nthreads = 1\nshort_prompt_tokens = 0\n'
    settings += 'same_weights = ["llamacpp", "mlx"]\n'
    config.write_text(text[: text.index("[models")] + settings + table)


@pytest.mark.parametrize(("prefill", "decode"), [("llamacpp", "mlx"), ("mlx", "llamacpp")])
def test_a_kv_cache_goes_from_one_engine_to_another(
    prefill: str, decode: str, tmp_path: Path, broker_url: str, store_url: str, model_name: str
) -> None:
    with Cluster(tmp_path, broker_url, store_url, {model_name: DEMO}) as cluster:
        both_ways(cluster.config, model_name)
        cluster.worker("prefill", model_name, "--engine", prefill)
        cluster.worker("decode", model_name, "--engine", decode)
        with connect(load_settings(config=cluster.config, environ=cluster.environment), [model_name]) as client:
            job = client.new_job(f"{prefill}-{model_name}", "item", model_name, "", PROMPT, GREEDY)
            client.submit([job])
            (result,) = list(client.gather(job.batch_id, [job.job_id], timeout_s=120))

    assert result.state == "succeeded", result.error
    assert _engines(result) == (prefill, decode)
    assert (result.decode.hand_over, result.decode.why_none, result.decode.evaluated_tokens) == ("kv", "", 1)
    assert result.decode.prompt_tokens > 200
    assert result.text


def _engines(result: JobResult) -> tuple[str, str]:
    return result.prefill.engine, result.decode.engine
