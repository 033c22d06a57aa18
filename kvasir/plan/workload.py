"""A class to plan for: lengths drawn from what the team's notebooks look like. `kvasir.plan.command` measures a folder.

The quantiles are those of 270 distinct notebooks of the course (characters; research notes, workload model). Answers
have the lengths that the team measured with its earlier grader: 5.7 s at 85 tokens/s for code, 18.9 s at 71 tokens/s
for feedback, and vary by half around that, which is an assumption.
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

CHARS_PER_TOKEN = 3.25  # 3 to 3.5 is assumed for code and prose
CODE_SHARED_CHARS = 27_500  # template, solution and instructions, the student's part last
FEEDBACK_SHARED_CHARS = 13_500  # the instructions
FEEDBACK_CODE_CHARS = 800  # code characters that the feedback prompt shows
CODE_ANSWER_TOKENS = 485
FEEDBACK_ANSWER_TOKENS = 1_342
ANSWER_SPREAD = 3.0  # the longest answer is so many times the shortest

# The tokens that `grading.submissions.truncation` leaves of a submission.
_CODE_LIMIT, _OUTPUT_LIMIT = 12_000, 4_000


def draw_class(
    submissions: int,
    code_model: str,
    feedback_model: str,
    seed: int = 0,
    code_answer: int = CODE_ANSWER_TOKENS,
    feedback_answer: int = FEEDBACK_ANSWER_TOKENS,
) -> list[PlannedJob]:
    """The two jobs of each of so many submissions, longest expected first. The same seed gives the same class."""
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
    """By what is known before decoding: the prompt's length. Equal ones stay in order."""
    return sorted(jobs, key=lambda job: -job.prompt_tokens)


def draw_around(mean: int, source: random.Random) -> int:
    """A length about `mean`, uniform."""
    shortest = 2 * mean / (1 + ANSWER_SPREAD)
    return max(1, round(source.uniform(shortest, ANSWER_SPREAD * shortest)))


def draw_length(quantiles: Quantiles, share: float) -> float:
    """The value below which this share lies, on straight lines in logarithms; below the first quantile it goes on."""
    (p1, v1), (p2, v2) = next(
        (pair for pair in itertools.pairwise(quantiles) if share <= pair[1][0]), (quantiles[-2], quantiles[-1])
    )
    return math.exp(math.log(v1) + (math.log(v2) - math.log(v1)) * (share - p1) / (p2 - p1))


def _tokens(chars: float) -> int:
    return max(1, round(chars / CHARS_PER_TOKEN))
