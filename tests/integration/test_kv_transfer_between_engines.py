"""llama.cpp prefills and MLX decodes, and the other way round: worker processes over a real broker and a real store.

The GGUF and the folder of the demo model hold the same numbers, and `same_weights` says so.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from infra.config.settings import load_settings
from kvasir import connect
from messages.jobs import JobResult, Sampling, user_prompt
from producers.client import Client
from tests.support.processes import DEMO, ROOT, Cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # minutes, not seconds

GREEDY = Sampling(max_tokens=12, temperature=0)
PROMPT = "".join(f"Student {number} computes churn by region, {number % 9 + 20} percent.\n" for number in range(12))


def both_ways(config: Path, model: str, folder: Path = ROOT / "examples/model/kvasir-demo") -> None:
    """The same model in two engines, as one family."""
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
            job = client.new_job(f"{prefill}-{model_name}", "item", model_name, user_prompt("", PROMPT), GREEDY)
            client.submit([job])
            (result,) = list(client.gather(job.batch_id, [job.job_id], timeout_s=120))

    assert result.state == "succeeded", result.error
    assert _engines(result) == (prefill, decode)
    # The folder's weights are float16, the file's float32
    kv_transfer, evaluated = result.decode.kv_transfer, result.decode.evaluated_tokens
    assert (kv_transfer, result.decode.why_none, evaluated) == ("verified-rounded", "", 1)
    assert result.decode.prompt_tokens > 200
    assert result.text


def another_fine_tune(folder: Path) -> Path:
    """The demo model with other values in one layer, by a twentieth."""
    shutil.copytree(ROOT / "examples/model/kvasir-demo", folder)
    weights = load_file(folder / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("layers.1.self_attn.v_proj.weight")]
    noise = np.random.default_rng(0).standard_normal(weights[name].shape) * weights[name].std() / 20
    weights[name] = (weights[name] + noise).astype(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_other_weights_under_one_name_are_refused_whatever_same_weights_says(
    tmp_path: Path, broker_url: str, store_url: str, model_name: str
) -> None:
    with Cluster(tmp_path, broker_url, store_url, {model_name: DEMO}) as cluster:
        # Given another fine-tune, which the configuration calls the same
        both_ways(cluster.config, model_name, another_fine_tune(tmp_path / "fine-tune"))
        cluster.worker("prefill", model_name, "--engine", "mlx")
        cluster.worker("decode", model_name, "--engine", "llamacpp")
        # When a job has been through both
        with connect(load_settings(config=cluster.config, environ=cluster.environment), [model_name]) as client:
            job = client.new_job(f"other-{model_name}", "item", model_name, user_prompt("", PROMPT), GREEDY)
            client.submit([job])
            (result,) = list(client.gather(job.batch_id, [job.job_id], timeout_s=120))
            wait_until(lambda: _notes(client) == [result.decode.why_none], "its registration says why, a beat later")
        doctor = cluster.run("doctor", "--json")

    # Then the decoder has evaluated the prompt itself, and everybody says why
    assert (result.state, result.decode.kv_transfer) == ("succeeded", "none")
    assert result.decode.evaluated_tokens == result.decode.prompt_tokens > 200
    why = "mlx and llamacpp compute different KV caches: in layer 1, from position 0 on, V differs by up to "
    assert result.decode.why_none.startswith(why)
    assert result.decode.why_none.endswith("they hold other weights")
    (finding,) = [each for each in doctor.json() if each["subject"] == model_name and each["layers"]]
    assert finding["level"] == "error"
    assert result.decode.why_none in finding["what"]
    assert [layer["v"] > layer["rounding"] for layer in finding["layers"]] == [False, True, True, True]


def _notes(client: Client) -> list[str]:
    return [each.notes for each in client.workers() if each.role == "decode" and each.model in client.models]


def _engines(result: JobResult) -> tuple[str, str]:
    return result.prefill.engine, result.decode.engine
