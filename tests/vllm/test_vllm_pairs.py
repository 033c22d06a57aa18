"""The demo's own grading prompts between vLLM and every other engine that is here, both ways."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.matrix_caches import difference, prefilled
from benchmarks.matrix_mutations import spoiled
from engines.family import family_fingerprint
from engines.proof import prove
from engines.registry import Engine, EngineOptions, entries, open_engine
from engines.sketch import compare
from engines.sketching import fresh_sketch
from grading.jobs import Task
from infra.config.settings import load_settings
from kvasir.class_run import open_assignment, request_from
from messages.jobs import Sampling, user_prompt
from producers.batch.batch import Batch
from tests.support.homework import EXAMPLE

pytestmark = pytest.mark.vllm

MODEL = EXAMPLE.parent / "model"
FOLDER = f"{MODEL / 'kvasir-demo'}?dtype="
WEIGHTS = {
    "llamacpp": str(MODEL / "kvasir-demo.gguf"),
    "mlx": f"{FOLDER}float32",
    "transformers": f"{FOLDER}f32",
    "vllm": f"{FOLDER}float32",
}
OTHERS = [name for name in WEIGHTS if name != "vllm" and not entries()[name].install_command()]
PAIRS = [*(("vllm", other) for other in OTHERS), *((other, "vllm") for other in OTHERS), ("vllm", "vllm")]
CONTEXT = 16_384  # an answer may have 8,000 tokens
RUBRIC = (EXAMPLE / "rubric.yaml").read_text()
LONG_TOKENS = 1500  # MLX on a CPU computes a few hundred a second


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    opened = {
        name: open_engine(name, EngineOptions(WEIGHTS[name], context=CONTEXT, slots=2, threads=1))
        for name in (*OTHERS, "vllm")
    }
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, engines: dict[str, Engine]) -> list[tuple[tuple[int, ...], Task]]:
    """Three of what `make demo` asks, with the schema."""
    settings = load_settings(config=EXAMPLE.parent / "demo.toml", environ={})
    names = ("submissions", "rubric.yaml", "solution.ipynb", "template.ipynb")
    folder, rubric, solution, template = (EXAMPLE / name for name in names)
    with Batch(tmp_path_factory.mktemp("class") / "out") as batch:
        asked = list(open_assignment(batch, request_from(settings, folder, rubric, solution, template)).tasks)
    found = [(engines["vllm"].tokenize(one.job.prompt, 0.0).ids, one) for one in asked]
    short = [(tokens, one) for tokens, one in found if len(tokens) < LONG_TOKENS]
    assert len(short) >= 3
    return short[:3]


@pytest.fixture(scope="module")
def cold(engines: dict[str, Engine], tasks: list[tuple[tuple[int, ...], Task]]) -> list[str]:
    """What llama.cpp alone answers."""
    return [engines["llamacpp"].decode(tokens, None, task.job.sampling).text for tokens, task in tasks]


def test_vllm_tokenizes_and_answers_as_llamacpp(
    engines: dict[str, Engine], tasks: list[tuple[tuple[int, ...], Task]], cold: list[str]
) -> None:
    for (tokens, task), text in zip(tasks, cold, strict=True):
        assert engines["llamacpp"].tokenize(task.job.prompt, 0.0).ids == tokens
        answer = engines["vllm"].decode(tokens, None, task.job.sampling)
        assert (answer.text, answer.evaluated_tokens) == (text, len(tokens))


@pytest.mark.public_report("vllm-project/vllm 43370")
@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_a_kv_transfer_changes_no_answer_and_leaves_one_token(
    sender: str,
    receiver: str,
    engines: dict[str, Engine],
    tasks: list[tuple[tuple[int, ...], Task]],
    cold: list[str],
) -> None:
    for (tokens, task), text in zip(tasks, cold, strict=True):
        answer = engines[receiver].decode(tokens, prefilled(engines[sender], tokens), task.job.sampling)
        assert (answer.text, answer.evaluated_tokens) == (text, 1)


@pytest.mark.parametrize("other", OTHERS)
def test_keys_values_and_sketches_are_the_other_engine_s_to_rounding(
    other: str, engines: dict[str, Engine], tasks: list[tuple[tuple[int, ...], Task]]
) -> None:
    one, two = engines["vllm"], engines[other]
    tokens = tasks[0][0]
    # llama.cpp keeps float16
    assert difference(prefilled(one, tokens), prefilled(two, tokens)) < (0.05 if other == "llamacpp" else 1e-3)
    made = [fresh_sketch(engine, engine.info.layout) for engine in (one, two) if engine.info.layout]
    assert not compare(*made).problem
    assert family_fingerprint("demo", ("vllm", other), one.info.layout)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_caches_of_16_bits_go_in_and_out(
    dtype: str, engines: dict[str, Engine], tasks: list[tuple[tuple[int, ...], Task]]
) -> None:
    vllm = open_engine("vllm", EngineOptions(f"{FOLDER}{dtype}", context=2048, slots=1, threads=1))
    try:
        assert prove(vllm, vllm) == ""
        tokens, greedy = tasks[0][0], Sampling(max_tokens=8, temperature=0)
        for receiver in (vllm, engines["llamacpp"]):
            answer = receiver.decode(tokens, prefilled(vllm, tokens), greedy)
            assert (answer.text, answer.evaluated_tokens) == (receiver.decode(tokens, None, greedy).text, 1)
    finally:
        vllm.close()


def test_a_spoiled_cache_is_noticed(engines: dict[str, Engine]) -> None:
    # Given the cache of one prompt, wrong in each of five ways, another's block among them
    vllm = engines["vllm"]
    tokens = vllm.tokenize(user_prompt(RUBRIC, RUBRIC[:800]), 0.0).ids  # tasks differ from run to run by their fences
    cache = prefilled(vllm, tokens)
    # Then what the model expects next is no longer what it was
    own = vllm.top_logprobs(tokens, cache)
    for name, wrong in spoiled(cache, prefilled(vllm, tokens[::-1])).items():
        found = vllm.top_logprobs(tokens, wrong)
        assert max(abs(own[token] - found.get(token, -100.0)) for token in list(own)[:16]) > 0.01, name


def test_blocks_leave_while_later_ones_are_computed_and_a_class_s_part_is_left_out(
    engines: dict[str, Engine], tasks: list[tuple[tuple[int, ...], Task]]
) -> None:
    # Given a prompt of several chunks, resumed from a beginning that the store has
    vllm, tokens = engines["vllm"], tasks[0][0] * 3
    whole = prefilled(vllm, tokens)
    begun = type(whole)(whole.layout, whole.blocks[:20])
    starts: list[int] = []
    done = vllm.prefill(tokens[:-1], lambda block: starts.append(block.start), begun.num_tokens, begun)
    # Then only the rest is computed and given out, in order
    assert starts == [block.start for block in whole.blocks[20:]]
    assert (done.computed_tokens, done.restored_tokens) == (len(tokens) - 1 - begun.num_tokens, begun.num_tokens)


def test_greedy_answers_of_many_prompts_at_once_are_those_of_each_alone(
    engines: dict[str, Engine], tasks: list[tuple[tuple[int, ...], Task]]
) -> None:
    greedy = Sampling(max_tokens=60, temperature=0)
    vllm = engines["vllm"]
    alone = [vllm.decode(tokens, None, greedy).text for tokens, _ in tasks]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda one: vllm.decode(one[0], None, greedy).text, tasks * 2))
    assert together == alone * 2
