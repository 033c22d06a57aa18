"""Every prefill engine to every decode engine: whether the answer from a transferred KV cache is the one without.

Tiny models with random weights (`matrix_models`), the same in a GGUF file and in folders: a dense Qwen3, a Qwen3-MoE,
a Llama, a gpt-oss whose window is 16 positions, and hybrid models, three layers in four of which are recurrent
(`matrix_hybrid`); and the demo model, which is trained. Weights are float32, and so are the caches of MLX and PyTorch;
llama.cpp's is float16, to which its attention would round a float32 one too. Every engine is loaded as a worker would.

One process loads an engine, prefills a prompt of 50 tokens (three windows and two positions) and one of 333 (the demo
model: two grading prompts of about a thousand), and puts their KV caches into a real Redis as the store's records.
Another process loads the engine that decodes, gets them from there, and answers greedily with 64 tokens. Prompts are
chosen beforehand so that rounding decides no token (`matrix_prompts`); so all 64 must be equal, with nothing left out.
For each model and pair:

    sketch_agrees     whether the decode engine's comparison of both sketches (`engines.sketch`) lets KV caches through
    equal             whether both answers have the tokens and the text of the decode engine's own cold run
    evaluated_tokens  prompt tokens that the decode engine evaluated, by its own counter: the most of both prompts
    max_difference    between any number of the transferred caches and of those that the decode engine itself prefills
    first_divergence  the earliest position at which an answer parts from the cold run's; null: both are equal
    margin            by how much the cold run preferred its token there, in its own logits
    resumed_equal     of a hybrid model: whether the decode engine, going on from the first 96 tokens' cache of the
                      longer prompt, computes the rest only, and then answers as without

`all_equal`: every pair was equal and evaluated 1 token (a sliding-window model through llama.cpp: 8 at most), and no
model was left without a pair. `refused`: pairs that the table of capabilities (`kvasir engines`), the loaded engines or
their sketches say no to, with their sentence (`sketch_agrees` null: nothing to compare). Each pair is then given the
longer prompt's cache spoiled in five ways (`matrix_mutations`), and a hybrid model's in four more, except the demo
model's, whose answer leaves most of a prompt out of account; `caught`: the answer is another than the cold run's, or
the engine refuses the cache.

vLLM takes part with the demo model: its attention on CPUs knows no heads of 16 numbers, which the tiny ones have.
`make test-vllm` has its spoiled caches, and 16 bits.

`--real` (make matrix) adds SmolLM2 and Gemma 3: trained, quantized weights, and prompts that nobody chose for their
answers. There rounding decides where two tokens are nearly as likely as each other; `matrix_real` says what their rows
hold. `all_held`: as `all_equal`, but answers of real weights may part at such a token.

`--models releases` holds five releases of llama.cpp's wheel against each other, whose servers write slot files in four
forms, each in an environment of its own (made once, 100 MB each): twenty-five pairs for the demo model, a gpt-oss, and
a hybrid model with M-RoPE, all of llama.cpp. With `--real` the real ones too.

What this does not show: GPUs, unless the engines find one; chat templates and tokenizers, since prompts are ids; YaRN,
by which a real gpt-oss stretches its RoPE.
"""

import json
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import redis

from benchmarks import harness, matrix_models, matrix_real
from benchmarks.matrix_child import pair_name
from engines.registry import entries, partners
from tests.support import scratch_env

ENGINES = ("llamacpp", "mlx", "transformers")
VLLM = "vllm"  # of the demo model alone
MODELS = matrix_models.NAMES
REAL = matrix_models.REAL
HYBRID = "hybrid"  # all models with recurrent layers
RELEASES = "releases"
LLAMACPP_RELEASES = tuple(
    f"llamacpp-{release}"
    for release in ("2026.8.10229", "2026.8.10566", "2026.9.10809", "2026.9.11063", "2026.10.11549")
)
RELEASE_MODELS = (matrix_models.DEMO, "gpt-oss", "qwen3.5")  # plain, with a window, with states and M-RoPE
QUICK_MODELS = ("gpt-oss",)  # the one that has most to go wrong: a window, experts, biases, sinks
REAL_TIMEOUT_S = 3600.0  # for one engine's half: without `mlx_blas`, MLX on a CPU computes ten tokens a second
MOST_WINDOWED = 8  # prompt tokens that llama.cpp may evaluate again of a sliding-window model

Row = dict[str, Any]


class MatrixRun:
    """Which children run, in which order, and what they found."""

    def __init__(
        self, url: str, folder: Path, models: Sequence[str], seed: int, texts: int, engines: Sequence[str]
    ) -> None:
        self.id = f"matrix-{secrets.token_hex(6)}"
        self.found: dict[str, list[Row]] = {"pairs": [], "refused": [], "controls": []}
        self._url = url
        self._models = list(models)
        self._engines = engines
        self._common = {"run": self.id, "folder": str(folder), "seed": seed, "family": (*ENGINES, VLLM), "texts": texts}
        self._timeout_s = REAL_TIMEOUT_S if {*REAL} & {*models} else harness.CHILD_TIMEOUT_S + 60 * len(models)

    def all_pairs(self) -> None:
        """Choose prompts, prefill them with each engine, then decode with each."""
        present = self._present()
        numbers = self._chosen() if any(_name(engine) == "llamacpp" for engine in present) else {}
        handed: dict[str, Any] = {}
        for engine in present:
            done = self._child("prefill", engine, numbers=numbers)
            handed[engine] = done["layouts"]
            for model, reason in done["reasons"].items():
                self._refuse([model], [engine], [one for one in present if model in self._taken(one)], reason)
        choices: dict[str, dict[str, dict[str, list[int]]]] = {}
        for engine in present:
            done = self._child("decode", engine, numbers=numbers, handed=self._allowed(handed, engine))
            for key, rows in self.found.items():
                rows += done[key]
            choices[engine] = done["choices"]
        for row in self.found["pairs"]:
            if (model := row["model"]) in REAL:
                row["engines_agree"] = matrix_real.share(*(choices[row[end]][model] for end in ("prefill", "decode")))

    def delete_keys(self) -> None:
        """Leave nothing in the store."""
        with closing(redis.Redis.from_url(self._url)) as client:
            keys = list(client.scan_iter(match=f"kv*:{self.id}-*", count=1000))
            if keys:
                client.unlink(*keys)

    def _present(self) -> list[str]:
        """Engines whose packages are there; all pairs of the others are refused."""
        engines = [engine for engine in self._engines if self._taken(engine)]
        present = [engine for engine in engines if not entries()[_name(engine)].install_command()]
        for prefill, decode in product(engines, engines):
            absent = [engine for engine in (prefill, decode) if engine not in present]
            if absent:
                reason = f"{absent[0]} is not installed: {entries()[absent[0]].install_command()}"
                self._refuse(self._taken(prefill, decode), [prefill], [decode], reason)
        return present

    def _taken(self, *engines: str) -> list[str]:
        """The run's models that all of these engines are asked about."""
        return [model for model in self._models if model == matrix_models.DEMO or VLLM not in engines]

    def _allowed(self, handed: dict[str, Any], decode: str) -> dict[str, Any]:
        """What the table of capabilities lets this engine decode."""
        allowed = {engine: layouts for engine, layouts in handed.items() if _name(decode) in partners(_name(engine))}
        for engine in handed.keys() - allowed:
            reason = f"{decode} can't read the KV caches of {engine}"
            self._refuse(self._taken(engine, decode), [engine], [decode], reason)
        return allowed

    def _refuse(self, models: Sequence[str], prefill: Sequence[str], decode: Sequence[str], reason: str) -> None:
        for model, one, other in product(models, prefill, decode):
            row = {"model": model, "prefill": one, "decode": other, "sketch_agrees": None, "reason": reason}
            self.found["refused"].append(row)

    def _chosen(self) -> dict[str, Any]:
        done = self._child("choose", "llamacpp")
        margins = ", ".join(f"{model} {margin:.3f}" for model, margin in done["margins"].items())
        print(f"least distance of the best two logits in its answers: {margins}")
        numbers: dict[str, Any] = done["numbers"]
        return numbers

    def _child(self, step: str, engine: str, **more: Any) -> dict[str, Any]:
        own = {"step": step, "engine": engine, "models": self._taken(engine)}
        task = json.dumps(self._common | own | more)
        packages = str(scratch_env.packages(f"x{engine}")) if engine in LLAMACPP_RELEASES else ""
        print(f"{engine}, {step}:", end=" ", flush=True)
        start = time.monotonic()
        found = harness.fresh_process(
            "benchmarks.matrix_child", task, store_url=self._url, timeout_s=self._timeout_s, packages=packages
        )
        print(f"{time.monotonic() - start:.0f} s", flush=True)
        return found


def _name(engine: str) -> str:
    """Of an engine of a certain release: the engine."""
    return engine.partition("-")[0]


def is_held(row: Row) -> bool:
    """Whether a pair keeps the promise: the same text, and no more of the prompt evaluated than it has to be."""
    if row["model"] in REAL:
        return matrix_real.is_held(row)
    windowed = row["model"].startswith("gpt-oss")
    most = MOST_WINDOWED if windowed and _name(row["decode"]) == "llamacpp" else 1
    return bool(row["equal"] and row.get("resumed_equal", True) and row["evaluated_tokens"] <= most)


def verdict(found: dict[str, list[Row]], models: Sequence[str]) -> dict[str, bool]:
    """The keys that sum it up; nothing compared is nothing proved."""
    pairs, controls = found["pairs"], found["controls"]
    complete, held = {row["model"] for row in pairs} == set(models), all(map(is_held, pairs))
    return {
        "all_equal": complete and held and all(row["equal"] for row in pairs),
        "all_held": complete and held,
        "all_caught": bool(controls) and all(row["caught"] for row in controls),
    }


def explain(found: dict[str, list[Row]]) -> None:
    """The rows for people."""
    for row in found["pairs"]:
        figures = row.get("failure") or (
            f"{row['evaluated_tokens']} prompt token(s) evaluated, caches differ by {row['max_difference']:.2g} at most"
            + (f"; {matrix_real.figures(row)}" if row["model"] in REAL else "")
        )
        missed = _missed(found["controls"], pair_name(row))
        print(
            f"{row['model']:11} {row['prefill']:12} to {row['decode']:12}"
            f" {'equal' if row['equal'] else 'held' if is_held(row) else 'NOT HELD'}: {figures}"
            + (f"; NOT CAUGHT: {', '.join(missed)}" if missed else "")
        )
    for row in found["refused"]:
        print(f"{row['model']:11} {row['prefill']:12} to {row['decode']:12} refused: {row['reason']}")


def _missed(controls: list[Row], pair: str) -> list[str]:
    return [row["mutation"] for row in controls if row["pair"] == pair and not row["caught"]]


def compare(models: Sequence[str], seed: int, texts: int, engines: Sequence[str] = (*ENGINES, VLLM)) -> None:
    """The whole benchmark."""
    print(harness.machine())
    with harness.store() as url, tempfile.TemporaryDirectory(prefix="kvasir-matrix-") as folder:
        for model in models:
            matrix_models.write(Path(folder), model, seed)
        run = MatrixRun(url, Path(folder), models, seed, texts, engines)
        try:
            run.all_pairs()
        finally:
            run.delete_keys()
    explain(run.found)
    harness.finish(**run.found, **verdict(run.found, models), seed=seed)


def main() -> int:
    """Compare all pairs."""
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--models", nargs="*", choices=(*MODELS, *REAL, HYBRID, RELEASES), help="only these (default: all)"
    )
    parser.add_argument(
        "--real", action="store_true", help="SmolLM2 and Gemma 3 too (332 MB once, 2 GB unpacked; an hour)"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=(*ENGINES, VLLM), default=(*ENGINES, VLLM), help="only pairs of these"
    )
    parser.add_argument("--texts", type=int, default=20, help="prompts for each real model (default: %(default)s)")
    arguments = parser.parse_args()
    chosen = arguments.models if arguments.models is not None else QUICK_MODELS if arguments.quick else MODELS
    chosen = [model for name in chosen for model in (matrix_models.HYBRID if name == HYBRID else (name,))]
    engines = arguments.engines
    if RELEASES in chosen:
        chosen, engines = list(RELEASE_MODELS), LLAMACPP_RELEASES
    chosen = [*dict.fromkeys((*chosen, *(REAL if arguments.real else ())))]
    compare(chosen, arguments.seed, arguments.texts, engines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
