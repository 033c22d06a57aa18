"""A made-up class to plan for. Its lengths are drawn from the distribution of the team's notebooks.

The quantiles are those of 270 distinct notebooks of the course, in characters (research notes, workload model). Answers
have the lengths that the team measured with its earlier grader: 5.7 s at 85 tokens/s for code, and 18.9 s at 71
tokens/s for feedback. They vary by half around these values, which is an assumption. To plan for a real folder, see
`kvasir.commands.plan`.
"""

import itertools
import math
import random
from collections.abc import Sequence

from kvasir.plan.fleet import PlannedJob

Quantiles = Sequence[tuple[float, float]]

CODE: Quantiles = ((0.1, 1_306), (0.5, 10_839), (0.9, 28_581), (0.99, 42_559), (1.0, 66_141))
MARKDOWN: Quantiles = ((0.1, 4_712), (0.5, 7_978), (0.9, 17_370), (0.99, 23_193), (1.0, 24_769))
OUTPUTS: Quantiles = ((0.1, 6_320), (0.5, 13_263), (0.9, 39_996), (0.99, 101_948), (1.0, 577_316))

CHARS_PER_TOKEN = 3.25  # assumed; code and prose have 3 to 3.5 characters per token
CODE_SHARED_CHARS = 27_500  # template, solution and instructions, which come before the student's part
FEEDBACK_SHARED_CHARS = 13_500  # the instructions
FEEDBACK_CODE_CHARS = 800  # characters of code that the feedback prompt shows
CODE_ANSWER_TOKENS = 485
FEEDBACK_ANSWER_TOKENS = 1_342
ANSWER_SPREAD = 3.0  # the longest answer is this many times as long as the shortest

# Limits on the tokens that `grading.submissions.truncation` keeps of a submission.
_CODE_LIMIT, _OUTPUT_LIMIT = 12_000, 4_000


def draw_class(
    submissions: int,
    code_model: str,
    feedback_model: str,
    seed: int = 0,
    code_answer: int = CODE_ANSWER_TOKENS,
    feedback_answer: int = FEEDBACK_ANSWER_TOKENS,
) -> list[PlannedJob]:
    """Draw the two jobs of each submission, longest first. The same seed gives the same class."""
    source = random.Random(seed)
    jobs = []
    for number in range(1, submissions + 1):
        code, markdown, outputs = (draw_length(quantiles, source.random()) for quantiles in (CODE, MARKDOWN, OUTPUTS))
        own_tokens = min(_tokens(code), _CODE_LIMIT) + min(_tokens(outputs), _OUTPUT_LIMIT)
        shared_tokens = _tokens(CODE_SHARED_CHARS)
        jobs.append(
            PlannedJob(f"{number}.code", code_model, shared_tokens, own_tokens, draw_around(code_answer, source))
        )
        own_tokens = _tokens(markdown + min(code, FEEDBACK_CODE_CHARS))
        shared_tokens = _tokens(FEEDBACK_SHARED_CHARS)
        jobs.append(
            PlannedJob(
                f"{number}.feedback", feedback_model, shared_tokens, own_tokens, draw_around(feedback_answer, source)
            )
        )
    return longest_first(jobs)


def longest_first(jobs: Sequence[PlannedJob]) -> list[PlannedJob]:
    """Sort jobs by the length of their prompts, which is known before decoding. The order of equal ones is kept."""
    return sorted(jobs, key=lambda job: -job.prompt_tokens)


def draw_around(mean: int, source: random.Random) -> int:
    """Draw a length around `mean`, uniformly."""
    shortest = 2 * mean / (1 + ANSWER_SPREAD)
    return max(1, round(source.uniform(shortest, ANSWER_SPREAD * shortest)))


def draw_length(quantiles: Quantiles, share: float) -> float:
    """Return the value below which this share lies, interpolated on logarithms.

    The first line is extended below its quantile.
    """
    (p1, v1), (p2, v2) = next(
        (pair for pair in itertools.pairwise(quantiles) if share <= pair[1][0]), (quantiles[-2], quantiles[-1])
    )
    return math.exp(math.log(v1) + (math.log(v2) - math.log(v1)) * (share - p1) / (p2 - p1))


def _tokens(chars: float) -> int:
    return max(1, round(chars / CHARS_PER_TOKEN))
