"""The token ids of a job and of its questions: what all of its prompts start with, and what follows for each
question."""

from dataclasses import replace

from engines.base import Tokenizes
from engines.chat import common_prefix
from messages.change import replace_fields
from messages.jobs import PrefillJob

# If a job has only one question, its prompt is compared with a second prompt, which has this text as the question. The
# shared part ends where the two prompts begin to differ.
_PLACEHOLDER_QUESTION = "?"


def tokenize_job(engine: Tokenizes, job: PrefillJob) -> PrefillJob:
    """The job with its token ids; without ids if the engine doesn't reveal them. Raises InvalidPrompt.

    Each prompt is rendered and tokenized as a whole, because a tokenizer may merge the end of one part with the start
    of the next, and a template may print text in between.
    """
    if not job.questions:
        prompt = engine.tokenize(job.prompt, job.submitted_at)
        return job.tokenized(prompt.ids, prompt.shared_tokens)
    suffixes = [question.suffix for question in job.questions]
    if len({*suffixes}) == 1:
        suffixes.append(tuple([replace(part, text=_PLACEHOLDER_QUESTION) for part in suffixes[0]]))
    whole = [engine.tokenize((*job.prompt, *suffix), job.submitted_at) for suffix in suffixes]
    first, *other_ids = [prompt.ids for prompt in whole]
    common = min([len(first) - 1, *(min(common_prefix(first, ids), len(ids) - 1) for ids in other_ids)])
    if common < 0:  # the engine reveals no ids
        return job
    questions = [
        replace_fields(question, tokens=prompt.ids[common:])
        for question, prompt in zip(job.questions, whole, strict=False)
    ]
    return replace_fields(
        job,
        tokens=first[:common],
        shared_tokens=min(common, *(prompt.shared_tokens for prompt in whole)),
        questions=tuple(questions),
    )
