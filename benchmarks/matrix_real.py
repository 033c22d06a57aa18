"""Real weights in the matrix: SmolLM2-135M-Instruct and Gemma 3 270M, on prompts in English of 50 to 3,200 tokens.

llama.cpp runs SmolLM2's Q4_1 and Gemma's Q4_K_M file, MLX and PyTorch the same numbers in float32 (`tests.support`:
`smollm2_folders`, `gemma3`). llama.cpp rounds activations to 8 bits before each product with a matrix of 4 bits, and K
and V to float16. So its KV cache of a prompt is not theirs to the last digit, and where two tokens are nearly as likely
as each other a transfer may change which one is said. No prompt is chosen to avoid that. Gemma's prompts are up to six
times as long as its window of 512 positions. Transferred caches are decoded SLOTS at once, cold runs one by one. What
is said of a pair:

    first_divergence  the earliest position of an answer at which the run after the transfer parts from the receiver's
                      own cold run; null if all answers are equal
    margin            how far the cold run's choice lay ahead of the other token there, in its own logits: the largest
                      over all answers that part
    agreement         both runs are made to say SAID after each prompt: the share of positions at which they find the
                      same token likeliest
    shift             by how much the transfer moves the lead of the likeliest token over the second one, along SAID:
                      median, 99th percentile and largest. An answer parts where a lead is no larger than that
    own_shift         the same between two runs of the receiver alone, with no other engine's cache: it evaluates the
                      prompts of up to ALONE_TOKENS in batches, and token by token. 0 in MLX and PyTorch, which were not
                      asked
    engines_agree     the same share as `agreement` between the cold runs of the two engines: what changing the engine
                      changes, with no transfer at all
    resumed           the longest prompt, of which the sender gives the first half only, as if a class shared it: the
                      receiver computes the rest (`restored_tokens` are the half), and answers from all of that

A pair is held if one prompt token was evaluated, each answer is equal or parts where `margin` is within the bound, and
`agreement` is at least AGREEMENT; so too of `resumed`. A spoiled cache is caught if on one prompt either is not so. The
bound is MARGIN, or the largest `own_shift` where that is more: llama.cpp with weights of 4 bits moves its own leads by
so much when it computes the same prompt in another grouping of tokens. (`margin` is a largest one, too, and of about as
many positions: the 99th percentile of `own_shift` refused one sound answer of 45, which parted at 0.42 of 0.43.)

Measured of SmolLM2 over 860 positions (20 prompts, llama.cpp on a CPU): median 0.083, 99 in 100 below 0.374, the
largest 0.553; transfers into it moved leads by 0.081 to 0.096, 99 in 100 by less than 0.376 to 0.437, and parted
answers at leads of up to 0.30. Keys turned one position too far part them at 1.2 and more there.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import matrix_models
from benchmarks.matrix_caches import CachePlace, difference
from benchmarks.matrix_forced import (
    Forced,
    Likeliest,
    agreement,
    choices,
    first_difference,
    forced,
    lead,
    shifts,
)
from benchmarks.matrix_mutations import spoiled
from engines.base import Answer
from engines.huggingface.prompt import HFPrompt
from engines.registry import Engine
from kvstore.redis.store import RedisKVStore
from messages.errors import KvasirError, KVTransferFailed
from messages.jobs import Sampling, user_prompt
from messages.kv import MAX_BLOCK_TOKENS, KVCache, Record, assemble_cache
from tests.support.essays import PARAGRAPHS, PROMPTS

GREEDY = Sampling(max_tokens=32, temperature=0)
MARGIN = 0.15  # rounding was seen to part answers at leads of up to 0.04, keys turned one position too far at 0.3
AGREEMENT = 0.9
SAID = (
    "The report is clear and easy to follow. Its numbers come from the data, and each of them is explained in a "
    "sentence or two. I would like to see a table of all results at the end."
)
_ASSIGNMENT = Path(__file__).parents[1] / "examples" / "homework" / "ASSIGNMENT.md"
_MORE = (
    ("Which number in this paragraph would you check first?", (1,), False),
    ("Rewrite the last sentence of this paragraph for a child.", (8,), False),
    ("What should these students measure next?", (13, 14), False),
    ("Is the conclusion of this part supported by its data?", (9, 10), False),
    ("Which of these claims is the weakest, and why?", (11, 12, 13), False),
    ("Give this report a title, and say why you chose it.", (1, 2, 3, 4, 5), False),
    ("List what the student did to clean the data.", (0, 1, 2, 3, 4, 5, 6, 7), False),
    ("Explain this assignment to a new student in three sentences.", (), True),
    ("Here are an assignment and a report. Does the report answer it?", (0, 1, 2, 3, 4), True),
    ("Here are an assignment and the reports of a class. What went well?", tuple(range(16)), True),
    ("Which of these two classes followed the assignment more closely?", (*range(16), *reversed(range(16))), True),
)
SLOTS = 8  # answers at once
ALONE_TOKENS = 1000  # each takes a request

_HELD = ("equal", "evaluated_tokens", "margin", "agreement")  # what decides whether a pair is held

Row = dict[str, Any]


def texts() -> dict[str, str]:
    """The prompts by name: those of the test of real weights, and as many more."""
    assignment = _ASSIGNMENT.read_text(encoding="utf-8")
    parts = (
        [question, *([assignment] if with_assignment else []), *(PARAGRAPHS[number] for number in numbers)]
        for question, numbers, with_assignment in _MORE
    )
    return {str(number): text for number, text in enumerate([*PROMPTS, *map("\n\n".join, parts)], 1)}


@cache
def prompts(model: str, count: int) -> dict[str, tuple[int, ...]]:
    """Ids of so many of them, from the shortest to the longest, as every engine tokenizes them."""
    tokenizer = _tokenizer(model)
    ids = {name: tokenizer.tokenize(user_prompt("", text), 0.0).ids for name, text in texts().items()}
    by_length = sorted(ids, key=lambda name: len(ids[name]))
    taken = [by_length[round(place * (len(ids) - 1) / (count - 1))] for place in range(count)]
    return {name: ids[name] for name in taken}


def start(prompts: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """What a class might share of the longest prompt: half of it, in blocks of every layout; and the token after."""
    tokens = prompts[_longest(prompts)]
    return tokens[: len(tokens) // 2 // MAX_BLOCK_TOKENS * MAX_BLOCK_TOKENS + 1]


def _longest(prompts: dict[str, tuple[int, ...]]) -> str:
    return max(prompts, key=lambda name: len(prompts[name]))


@cache
def _tokenizer(model: str) -> HFPrompt:
    return HFPrompt(matrix_models.weights_for("transformers", Path(), model))


class RealReceiver:
    """A decode engine with real weights: its cold answers, its own caches, and what it finds likeliest."""

    def __init__(
        self, engine: Engine, store: RedisKVStore, weights: Path, prompts: dict[str, tuple[int, ...]], own: CachePlace
    ) -> None:
        """`own`: where the caches lie that the same engine has prefilled in another process."""
        self._tokenizer = _tokenizer(own.model)
        self._engine = engine
        self._store = store
        self._prompts = prompts
        self._forced: Forced = forced(engine, str(weights))
        self._said = self._tokenizer.plain_ids(SAID)
        self._own = {name: own.get(store, name, tokens) for name, tokens in prompts.items()}
        self._cold = {name: engine.decode(tokens, None, GREEDY) for name, tokens in prompts.items()}
        self._steps = {
            name: self._forced(tokens, self._cold_start(name), self._said) for name, tokens in prompts.items()
        }
        self._cold_steps: dict[str, list[Likeliest]] = {}  # along the cold answers
        self._own_shift = spread([each for name in prompts for each in self._alone(name)])

    def choices(self) -> dict[str, tuple[int, ...]]:
        """What the engine finds likeliest along SAID in a cold run, by prompt."""
        return {name: choices(steps) for name, steps in self._steps.items()}

    def compare(self, source: CachePlace) -> Row:
        """A row of the matrix; a KV transfer that fails is not equal."""
        longest = _longest(self._prompts)
        try:
            given = {name: source.get(self._store, name, tokens) for name, tokens in self._prompts.items()}
            with ThreadPoolExecutor(SLOTS) as pool:
                warm = dict(zip(given, pool.map(self._decode, given, given.values()), strict=True))
            rows = [self._compare(name, given[name], warm[name]) for name in self._prompts]
            restored, cache = self._resumed(longest, source.get(self._store, "start", start(self._prompts)))
            resumed = self._compare(longest, cache, self._decode(longest, cache))
        except KvasirError as error:
            keys = ("evaluated_tokens", "max_difference", "first_divergence", "margin", "agreement", "resumed")
            return {"equal": False} | dict.fromkeys(keys) | {"failure": str(error)}
        parted = [row for row in rows if row["first_divergence"] is not None]
        return {
            "equal": all(row["equal"] for row in rows),
            "evaluated_tokens": max(row["evaluated_tokens"] for row in rows),
            "max_difference": max(row["max_difference"] for row in rows),
            "first_divergence": min((row["first_divergence"] for row in parted), default=None),
            "margin": max((row["margin"] for row in parted), default=None),
            "agreement": sum(row["agreement"] for row in rows) / len(rows),
            "shift": spread([each for row in rows for each in row["shifts"]]),
            "own_shift": self._own_shift,
            "texts": len(rows),
            "equal_texts": sum(row["equal"] for row in rows),
            "margins": {row["name"]: row["margin"] for row in parted},
            "resumed": {key: resumed[key] for key in _HELD} | {"restored_tokens": restored},
        }

    def controls(self, source: CachePlace) -> list[Row]:
        """What becomes of one prompt's cache when it is spoiled."""
        control, longer = _control(self._prompts)
        mine, foreign = (source.get(self._store, name, self._prompts[name]) for name in (control, longer))
        return [{"mutation": name, **self._spoiled(control, wrong)} for name, wrong in spoiled(mine, foreign).items()]

    def _alone(self, name: str) -> list[float]:
        """What it moves in llama.cpp that each token of the prompt is evaluated by itself; nothing in the others."""
        if self._engine.info.engine != "llamacpp":
            return [0.0]
        if len(self._prompts[name]) > ALONE_TOKENS:
            return []
        first, rest = self._prompts[name][:2], self._prompts[name][2:]
        return shifts(self._steps[name], self._forced(first, None, [*rest, *self._said])[-len(self._said) - 1 :])

    def _cold_start(self, name: str) -> KVCache | None:
        """What a cold run begins with. MLX and PyTorch cut a cold prompt as they cut a prefill: to the last bit it
        holds their own cache, which spares computing it again. llama.cpp rounds by how many tokens it evaluates."""
        return None if self._engine.info.engine == "llamacpp" else self._own[name]

    def _decode(self, name: str, cache: KVCache) -> Answer:
        return self._engine.decode(self._prompts[name], cache, GREEDY)

    def _resumed(self, name: str, beginning: KVCache) -> tuple[int, KVCache]:
        """How many tokens were restored, and the cache of the whole prompt computed on from there."""
        records: list[Record] = []
        done = self._engine.prefill(self._prompts[name][:-1], records.append, resume=beginning)
        if done.restored_tokens != beginning.num_tokens:
            raise KVTransferFailed(f"it went on from {done.restored_tokens} tokens, not {beginning.num_tokens}")
        assert self._engine.info.layout is not None
        return done.restored_tokens, assemble_cache(self._engine.info.layout, records)

    def _compare(self, name: str, given: KVCache, warm: Answer) -> Row:
        tokens, cold = self._prompts[name], self._cold[name]
        equal = (warm.text, warm.tokens) == (cold.text, cold.tokens) and cold.evaluated_tokens == len(tokens)
        parted = first_difference(cold.tokens, warm.tokens)
        steps = self._forced(tokens, given, self._said)
        return {
            "name": name,
            "equal": equal,
            "evaluated_tokens": warm.evaluated_tokens,
            "max_difference": difference(given, self._own[name]),
            "first_divergence": parted,
            "margin": None if parted is None else self._margin(name, warm),
            "agreement": agreement(self._steps[name], steps),
            "shifts": shifts(self._steps[name], steps),
        }

    def _margin(self, name: str, warm: Answer) -> float:
        cold = self._cold[name]
        if name not in self._cold_steps:  # once: llama.cpp computes the prompt again for it
            self._cold_steps[name] = self._forced(self._prompts[name], self._cold_start(name), cold.tokens)
        return cold_margin(lambda _said: self._cold_steps[name], cold, warm, self._tokenizer.end_ids)

    def _spoiled(self, name: str, wrong: KVCache) -> Row:
        tokens, cold = self._prompts[name], self._cold[name]
        try:
            steps = self._forced(tokens, wrong, self._said)
            share, shift = agreement(self._steps[name], steps), spread(shifts(self._steps[name], steps))
            warm = self._engine.decode(tokens, wrong, GREEDY)
        except KVTransferFailed:
            return {"caught": True, "agreement": None, "margin": None, "shift": None}
        ahead = None if warm.tokens == cold.tokens else self._margin(name, warm)
        caught = share < AGREEMENT or (ahead or 0.0) > bound(self._own_shift)
        return {"caught": caught, "agreement": share, "margin": ahead, "shift": shift}


def spread(found: Sequence[float]) -> Row:
    """Median, 99th percentile and largest."""
    median, most = np.percentile(found, (50, 99))
    return {"median": float(median), "p99": float(most), "largest": max(found)}


def cold_margin(
    said_again: Callable[[Sequence[int]], list[Likeliest]], cold: Answer, warm: Answer, ends: Collection[int]
) -> float:
    """How far a cold answer's first token that another has not lay ahead of what the other has there: `lead`.

    `said_again`: a cold run on the same prompt that is made to say this, or more. `ends`: the ids of which one ends an
    answer.
    """
    parted = first_difference(cold.tokens, warm.tokens)
    assert parted is not None
    step = said_again(cold.tokens[:parted])[parted]
    mine, other = ({answer.tokens[parted]} if parted < len(answer.tokens) else ends for answer in (cold, warm))
    return abs(lead(step, mine, other))


def _control(prompts: dict[str, tuple[int, ...]]) -> tuple[str, str]:
    """The prompt whose cache is spoiled, and a longer one to take a foreign block from."""
    by_length = sorted(prompts, key=lambda name: len(prompts[name]))
    return by_length[-2], by_length[-1]


def share(one: dict[str, list[int]], other: dict[str, list[int]]) -> float:
    """Of the positions along SAID, over all prompts, those at which two engines' cold runs choose alike."""
    same = [a == b for name in one for a, b in zip(one[name], other[name], strict=True)]
    return sum(same) / len(same)


def bound(own_shift: Row) -> float:
    """Up to which lead of the receiver's own choice rounding may have parted an answer."""
    return max(MARGIN, own_shift["largest"])


def figures(row: Row) -> str:
    """What a row says beyond those of other models, for people."""
    parted = "" if row["margin"] is None else f" (from token {row['first_divergence']}, ahead by {row['margin']:.2g})"
    return (
        f"{row['equal_texts']} of {row['texts']} texts equal{parted}, agreement {row['agreement']:.1%}, "
        f"between the engines {row['engines_agree']:.1%}, leads moved by {row['shift']['median']:.2g} (at most "
        f"{row['shift']['largest']:.2g}; by the receiver alone {row['own_shift']['median']:.2g}, at most "
        f"{row['own_shift']['largest']:.2g})"
    )


def is_held(row: Row) -> bool:
    """Whether a pair keeps its promise, with rounding granted."""
    most = bound(row["own_shift"]) if "failure" not in row else 0.0
    return "failure" not in row and all(
        each["evaluated_tokens"] == 1
        and (each["equal"] or (each["margin"] is not None and each["margin"] <= most))
        and each["agreement"] >= AGREEMENT
        for each in (row, row["resumed"])
    )
