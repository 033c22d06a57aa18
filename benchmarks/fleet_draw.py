"""A class for the simulated engines: prompts whose answers have lengths that nobody knows before decoding.

The lengths of prompts are drawn from the workload table (`kvasir.plan.workload`). The engine makes an answer's length
from a hash of the prompt's tokens; so the truth is had by asking an engine that takes no time, and nothing that travels
tells it. Prompts have an eighth of the drawn tokens, and the prefill rates are divided by eight too: times are the
same, and two cores are enough to carry the KV.
"""

import random
from dataclasses import dataclass, replace

from engines.registry import EngineOptions
from engines.simulated.engine import CHARS_PER_TOKEN, SimulatedEngine, open_engine
from kvasir.plan import workload
from kvasir.plan.fleet import PlannedJob
from kvstore.blocks import shared_boundary
from messages.jobs import Sampling, user_prompt

SHRINK = 8
CONTEXT = 8192
SAMPLING = Sampling(max_tokens=4000)
LAYOUT = "layers=2,kv_heads=1,head_dim=16"


@dataclass(frozen=True, slots=True)
class PromptKind:
    """A model of the mix: how long its answers are."""

    model: str
    answer: int
    spread: float

    def weights(self, scale: float, prefill: float = 1.0, decode: float = 1.0) -> str:
        """Of an engine with these rates, in tokens a simulated second."""
        rates = f"prefill={prefill / SHRINK},decode={decode},scale={scale:.6g}"
        return f"sim:{rates},answer={self.answer},spread={self.spread},context={CONTEXT},{LAYOUT}"


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """A job's text, and what the simulation knows of it."""

    job: PlannedJob
    shared: str
    own: str


def draw(submissions: int, code: PromptKind, feedback: PromptKind, seed: int) -> list[DrawnPrompt]:
    """The prompts of a class, longest first, with their true lengths after shrinking."""
    jobs = workload.draw_class(submissions, "code", "feedback", seed)
    kinds = {"code": code, "feedback": feedback}
    engines = {role: open_engine(EngineOptions(kind.weights(0.0))) for role, kind in kinds.items()}
    source = random.Random(seed)
    shared = {job.model: _text(job.shared_tokens, source) for job in jobs}
    return [_prompt(job, kinds[job.model].model, engines[job.model], shared[job.model], source) for job in jobs]


def _prompt(job: PlannedJob, model: str, engine: SimulatedEngine, shared: str, source: random.Random) -> DrawnPrompt:
    own = _text(job.own_tokens, source)
    tokens = engine.tokenize(user_prompt(shared, own), 0.0)
    answer = engine.decode(tokens.ids, None, SAMPLING).completion_tokens
    assert engine.info.layout is not None
    kept = shared_boundary(engine.info.layout, tokens.shared_tokens)
    # Prefill covers all tokens but the last, which is the decoder's.
    truth = replace(
        job,
        model=model,
        prefix=job.model,
        shared_tokens=kept,
        own_tokens=len(tokens.ids) - 1 - kept,
        answer_tokens=answer,
    )
    return DrawnPrompt(truth, shared, own)


def _text(tokens: int, source: random.Random) -> str:
    count = max(1, round(tokens / SHRINK))
    return "".join(f"{source.randrange(16**CHARS_PER_TOKEN):0{CHARS_PER_TOKEN}x}" for _ in range(count))
