"""The four messages: PrefillJob, DecodeJob, JobResult, TokenEvent.

All are frozen and check their fields when they are created, so every instance is valid. `codec.py` turns them into
bytes and back.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from messages import checks
from messages.change import non_default_fields, replace_fields
from messages.errors import InvalidMessage
from messages.kv import KVLayout
from messages.limits import MAX_ANSWER_BYTES, MAX_PARTS, MAX_PROMPT_BYTES, MAX_SCHEMA_BYTES
from messages.strict_schema import check_schema

KIB = 1024
MIB = 1024 * KIB

MAX_ERROR_BYTES = 8 * KIB
MAX_TOKENS = 1 << 20
# Up to this length (1 KiB of text and a chat template), computing a prompt is faster than transferring its KV cache.
SHORT_PROMPT_TOKENS = 320
# A decode worker checks the first KV cache from each prefill engine, and then one in this many, by prefilling the
# prompt too.
KV_CHECK_EVERY = 200
MAX_STOP_STRINGS = 16
MAX_ANSWERS = 32
MAX_QUESTION_ANSWERS = 64  # maximum number of answers to all questions of a job together
MAX_SECONDS = 1e9  # upper bound of any duration in a report
FAR_FUTURE_S = 1e11

Lane = Literal["now", "bulk"]
LANES: tuple[Lane, ...] = ("now", "bulk")

# A `tool` message is what a function returned. A `raw` text has no speaker. The model continues it as it is, without a
# chat template.
ChatRole = Literal["system", "user", "assistant", "tool", "raw"]
CHAT_ROLES: tuple[ChatRole, ...] = ("system", "user", "assistant", "tool", "raw")

Scope = Literal["class", "conversation", "own"]
SCOPES: tuple[Scope, ...] = ("class", "conversation", "own")  # a prompt's parts must come in this order

Stage = Literal["intake", "prefill", "decode"]
STAGES: tuple[Stage, ...] = ("intake", "prefill", "decode")

State = Literal["succeeded", "failed", "cancelled", "expired"]
STATES: tuple[State, ...] = ("succeeded", "failed", "cancelled", "expired")

KVTransfer = Literal["verified", "verified-rounded", "none"]
KV_TRANSFERS: tuple[KVTransfer, ...] = ("verified", "verified-rounded", "none")

FINISH_REASONS = ("stop", "length", "")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, with the same meaning in every engine."""

    max_tokens: int
    temperature: float = 0.2
    top_p: float = 0.9
    top_k: int = 0  # 0: no limit
    seed: int = 0
    stop: tuple[str, ...] = ()
    json_schema: str = ""  # the schema as JSON text; if empty, the answer may have any form
    answers: int = 1  # answers to generate from one KV cache; each has its own seed: seed, seed + 1, …

    def __post_init__(self) -> None:
        checks.whole("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        checks.number("temperature", self.temperature, 0, 5)
        checks.number("top_p", self.top_p, 0, 1)
        checks.whole("top_k", self.top_k, 0, MAX_TOKENS)
        checks.whole("seed", self.seed, 0, 2**32 - 1)
        checks.tuple_of("stop", self.stop, str, MAX_STOP_STRINGS)
        for word in self.stop:
            checks.text("stop", word, KIB)
        checks.text("json_schema", self.json_schema, MAX_SCHEMA_BYTES)
        checks.whole("answers", self.answers, 1, MAX_ANSWERS)
        if self.json_schema:
            check_schema(self.json_schema)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt. Consecutive parts of the same role form one message.

    `scope` says who shares the part's KV cache: `class` is shared by a whole batch, `conversation` by the next turns of
    this conversation, and `own` belongs to this job only.

    `function` is the name of a function. In an assistant's part, the assistant calls it, and the text is its arguments
    (a JSON object). In a tool's part, the text is its result. A part with a function is always a separate message.
    """

    role: ChatRole
    text: str
    scope: Scope = "own"
    function: str = ""

    def __post_init__(self) -> None:
        checks.one_of("role", self.role, CHAT_ROLES)
        checks.text("prompt", self.text, MAX_PROMPT_BYTES)
        checks.one_of("scope", self.scope, SCOPES)
        if self.function != "":
            # Chat templates print a function's name, so a name that spells a control token must be refused.
            checks.identifier("a function's name", self.function)
        if not self.text:
            raise InvalidMessage("a part of the prompt is empty")


Message = tuple[str, str] | tuple[str, str, str]  # role, text, and a function's name if there is one


def conversation(messages: Iterable[Message], opening: Scope, rest: Scope) -> tuple[Part, ...]:
    """The parts of a conversation's messages. Two consecutive messages of one role become one, with a blank line
    between them.

    `opening` is the scope of the first system message, `rest` the scope of everything else. The role `developer` counts
    as `system`.
    """
    roles: dict[str, Any] = {"developer": "system"}
    parts: list[Part] = []
    for name, text, *functions in messages:
        role, function = roles.get(name, name), "".join(functions)
        opens = role == "system" and all(part.role == "system" for part in parts)
        goes_on = parts and parts[-1].role == role and not (function or parts[-1].function)
        parts.append(Part(role, "\n\n" * bool(goes_on and text) + text, opening if opens else rest, function))
    return tuple(parts)


def prompt_text(prompt: Iterable[Part]) -> str:
    """All text of a prompt, whatever its roles."""
    return "".join([part.text for part in prompt])


def user_prompt(class_text: str, job_text: str) -> tuple[Part, ...]:
    """One user message: the text that the whole class shares, then the text of this job. Either may be empty."""
    common = (Part("user", class_text, "class"),) if class_text else ()
    return (*common, Part("user", job_text)) if job_text else common


@dataclass(frozen=True, slots=True)
class Question:
    """Something asked after a job's prompt. Each question has its own suffix and its own sampling, and all share the
    job's KV cache.

    `tokens` are the token ids that follow the job's; empty until the job is tokenized.
    """

    suffix: tuple[Part, ...]
    sampling: Sampling
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks.tuple_of("a question's suffix", self.suffix, Part, MAX_PARTS)
        if not self.suffix:
            raise InvalidMessage("a question must have a suffix")
        checks.instance("a question's sampling", self.sampling, Sampling)
        if len(self.tokens) > MAX_TOKENS:
            raise InvalidMessage(f"a question has {len(self.tokens):,} tokens; at most {MAX_TOKENS:,} are allowed")


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """One prompt for one model, with everything needed to run it again from this message alone.

    The prompt's parts go from the most widely shared to the job's own, so each scope begins where the wider one ends.
    `tokens` is empty until a prefill worker has rendered the chat template and tokenized it. The decode worker receives
    the tokens with the job, and tokenizes only jobs that skipped prefill.

    A job with `questions` answers each of them after the prompt, and ignores `sampling`. Its `tokens` are then the ones
    that all questions share, and each question holds the tokens that follow.
    """

    job_id: str
    batch_id: str
    item_id: str  # unique within the batch; a pseudonym, never a name
    model: str
    prompt: tuple[Part, ...]
    sampling: Sampling
    run: int = 1  # number of the run; each retry, replay or regrade adds 1
    lane: Lane = "bulk"
    submitted_at: float = 0.0  # seconds since the epoch, by the store's clock; chat templates see this time
    deadline: float = 0.0  # seconds since the epoch, by the store's clock; 0: no deadline
    reply_to: str = ""  # queue that takes the result
    stream_to: str = ""  # queue for TokenEvents; empty if nobody reads them
    tokens: tuple[int, ...] = ()
    shared_tokens: int = 0  # how many of `tokens` belong to parts of scope `class`, which are the same for all students
    questions: tuple[Question, ...] = ()
    tag: str = ""  # names the conversation whose KV cache is kept for the next turn; empty if none is kept

    def __post_init__(self) -> None:
        if self.tag != "":
            checks.identifier("tag", self.tag)
        for name in ("job_id", "batch_id", "item_id"):
            checks.identifier(name, getattr(self, name))
        checks.model_name("model", self.model)
        if self.questions == ():
            check_prompt(self.prompt)
        else:
            _check_questions(self.prompt, self.questions)
        checks.instance("sampling", self.sampling, Sampling)
        checks.whole("run", self.run, 1, 1_000_000)
        checks.one_of("lane", self.lane, LANES)
        checks.number("submitted_at", self.submitted_at, 0, FAR_FUTURE_S)
        checks.number("deadline", self.deadline, 0, FAR_FUTURE_S)
        checks.text("reply_to", self.reply_to, 255)
        checks.text("stream_to", self.stream_to, 255)
        if len(self.tokens) > MAX_TOKENS:
            raise InvalidMessage(f"the prompt has {len(self.tokens):,} tokens; at most {MAX_TOKENS:,} are allowed")
        checks.whole("shared_tokens", self.shared_tokens, 0, len(self.tokens))

    def waited_s(self, now: float) -> float:
        """Seconds since the job's submission, by the store's clock; 0 if the submission time is unknown."""
        since = max(0.0, now - self.submitted_at)
        return since if since < MAX_SECONDS else 0.0

    def tokenized(self, tokens: tuple[int, ...], shared_tokens: int) -> "PrefillJob":
        """The same job with its token ids."""
        return replace_fields(self, tokens=tokens, shared_tokens=shared_tokens)

    @property
    def kv_tokens(self) -> int:
        """For how many of `tokens` the KV cache is transferred: all but the last; all of them if each question leaves
        some tokens to the decoder."""
        return len(self.tokens) - (not self.questions or not all(question.tokens for question in self.questions))

    def asks(self) -> "list[Ask]":
        """One `Ask` for each answer that the job wants, question by question. Several answers to one prompt get seeds
        that count up."""
        if not self.questions and self.sampling.answers == 1:
            return [self]
        prompts = [
            ((*self.prompt, *question.suffix), self.tokens + question.tokens, question.sampling)
            for question in self.questions
        ]
        asks = []
        for prompt, tokens, sampling in prompts or [(self.prompt, self.tokens, self.sampling)]:
            seeds = [(sampling.seed + number) % 2**32 for number in range(sampling.answers)]
            variants = [replace_fields(sampling, seed=seed, answers=1) for seed in seeds] if seeds[1:] else [sampling]
            asks += [
                replace_fields(self, prompt=prompt, tokens=tokens, sampling=variant, questions=())
                for variant in variants
            ]
        return asks


Ask = PrefillJob  # a job for a single answer: the whole prompt, its token ids, and its sampling


def answer_tokens(job: PrefillJob) -> int:
    """The most tokens that all answers of a job may have together, over all its questions if it has any."""
    samplings = [question.sampling for question in job.questions] or [job.sampling]
    return sum(answer_sampling.max_tokens * answer_sampling.answers for answer_sampling in samplings)


def _check_questions(prompt: tuple[Part, ...], questions: tuple[Question, ...]) -> None:
    checks.tuple_of("questions", questions, Question, MAX_QUESTION_ANSWERS)
    if sum(question.sampling.answers for question in questions) > MAX_QUESTION_ANSWERS:
        raise InvalidMessage(f"questions ask for more than {MAX_QUESTION_ANSWERS} answers in all")
    if sum([len(question.suffix) for question in questions], len(prompt)) > MAX_PARTS:
        raise InvalidMessage(f"prompt and questions must have at most {MAX_PARTS} parts in total")
    if not prompt:
        raise InvalidMessage("prompt is empty")
    for question in questions:
        check_prompt((*prompt, *question.suffix))


def check_prompt(prompt: tuple[Part, ...]) -> None:
    """Raises InvalidMessage if the prompt is not valid for any job."""
    checks.tuple_of("prompt", prompt, Part, MAX_PARTS)
    if not prompt:
        raise InvalidMessage("prompt is empty")
    size = place = 0
    for part in prompt:
        previous, place = place, SCOPES.index(part.scope)
        if place < previous:
            raise InvalidMessage(f"parts of a prompt must be in the order of their scopes: {', '.join(SCOPES)}")
        size += len(part.text)
    if size > MAX_PROMPT_BYTES // 4:
        checks.text("prompt", prompt_text(prompt), MAX_PROMPT_BYTES)
    if prompt[-1].role == "assistant" and prompt[-1].function:
        raise InvalidMessage("the prompt ends with a function call; it must end with a part that the model can answer")
    if any(part.role == "raw" for part in prompt) and len(prompt) > 1:
        raise InvalidMessage("a raw prompt must be a single text without other messages")


def job_id(
    batch_id: str,
    item_id: str,
    model: str,
    prompt: Sequence[Part],
    sampling: Sampling,
    questions: Sequence[Question] = (),
) -> str:
    """32 hex digits that name this work. A changed rubric, model or parameter makes another job.

    The id is the BLAKE2b hash of these texts, each preceded by its length in 8 bytes: the batch id, the item id and the
    model; for each part of the prompt, its other stated fields and then its text; the stated sampling; and the same for
    each question's suffix and sampling. "Stated" fields are those that differ from their defaults, as JSON, so a new
    field with a default changes no id.
    """
    texts = [batch_id, item_id, model, *_texts(prompt, sampling)]
    for question in questions:
        texts += _texts(question.suffix, question.sampling)
    parts = [text.encode() for text in texts]
    hash_input = b"".join([len(part).to_bytes(8, "little") + part for part in parts])
    return hashlib.blake2b(hash_input, digest_size=16, person=b"kvasir.job").hexdigest()


_CACHE_SIZE = 64
_json = json.JSONEncoder(sort_keys=True).encode
_sampling_texts: dict[int, tuple[Sampling, str]] = {}


def _texts(prompt: Sequence[Part], sampling: Sampling) -> list[str]:
    texts = []
    for part in prompt:
        fields = non_default_fields(part)
        text = fields.pop("text")
        texts += [_part_text(tuple(fields.items())), text]
    return [*texts, _sampling_text(sampling)]


@lru_cache(_CACHE_SIZE)
def _part_text(fields: tuple[tuple[str, str], ...]) -> str:
    return _json(dict(fields))


def _sampling_text(sampling: Sampling) -> str:
    """The stated sampling fields as JSON. Cached, because a batch's jobs share a few samplings and this takes longer
    than the rest of an id.

    The cache goes by identity, because equal samplings may differ in their text (0 and 0.0), and therefore in their
    ids.
    """
    entry = _sampling_texts.get(id(sampling))
    if entry is None or entry[0] is not sampling:
        if len(_sampling_texts) >= _CACHE_SIZE:
            _sampling_texts.clear()
        entry = _sampling_texts[id(sampling)] = sampling, _json(non_default_fields(sampling))
    return entry[1]


@dataclass(frozen=True, slots=True)
class StoredKV:
    """Where a job's KV cache is stored. The block keys follow from this and from the job's tokens
    (`kvstore.blocks`)."""

    fingerprint: str
    layout: KVLayout
    num_tokens: int  # number of tokens in the cache, from the start of the prompt; see `PrefillJob.kv_tokens`
    shared_tokens: int  # number of leading tokens in blocks that are keyed by content; a multiple of the block length
    stored_bytes: int = 0
    sketch: str = ""  # hexadecimal hash of the prefill engine's sketch; empty if it stored no sketch

    def __post_init__(self) -> None:
        checks.identifier("fingerprint", self.fingerprint)
        if self.sketch != "":
            checks.identifier("sketch", self.sketch)
        checks.instance("layout", self.layout, KVLayout)
        checks.whole("num_tokens", self.num_tokens, 1, MAX_TOKENS)
        checks.whole("shared_tokens", self.shared_tokens, 0, self.num_tokens)
        checks.whole("stored_bytes", self.stored_bytes, 0, 1 << 50)


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What the prefill stage reports, for the result and the metrics."""

    worker_id: str = ""
    engine: str = ""
    queue_s: float = 0.0  # seconds from submission until the prefill worker received the job
    prefill_s: float = 0.0  # in the engine
    put_s: float = 0.0  # seconds from the last computed token until the whole KV cache was stored
    computed_tokens: int = 0
    restored_tokens: int = 0  # prompt tokens whose keys and values came from stored blocks
    put_bytes: int = 0

    def __post_init__(self) -> None:
        checks.text("worker_id", self.worker_id, 255)
        checks.text("engine", self.engine, 64)
        for name in ("queue_s", "prefill_s", "put_s"):
            checks.number(name, getattr(self, name), 0, MAX_SECONDS)
        for name in ("computed_tokens", "restored_tokens"):
            checks.whole(name, getattr(self, name), 0, MAX_TOKENS)
        checks.whole("put_bytes", self.put_bytes, 0, 1 << 50)


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A prefilled job: the PrefillJob with its tokens, and where its KV cache lies.

    `kv` is None when nothing was transferred (`why_no_kv` says why). The decoder then computes the prompt itself.
    """

    job: PrefillJob
    kv: StoredKV | None
    prefill: PrefillReport = field(default_factory=PrefillReport)
    why_no_kv: str = ""

    def __post_init__(self) -> None:
        checks.instance("job", self.job, PrefillJob)
        checks.text("why_no_kv", self.why_no_kv, MAX_ERROR_BYTES)
        if self.kv is None:
            return
        checks.instance("kv", self.kv, StoredKV)
        if self.kv.num_tokens > self.job.kv_tokens:
            raise InvalidMessage("kv must leave the prompt's last token to the decoder, but covers the whole prompt")


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed: the stage, the class of the error, and one sentence."""

    stage: Stage
    kind: str
    message: str

    def __post_init__(self) -> None:
        checks.one_of("stage", self.stage, STAGES)
        checks.text("kind", self.kind, 255)
        checks.text("message", self.message, MAX_ERROR_BYTES)


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """What the decode stage did. `evaluated_tokens` is the engine's own counter, and proves the KV transfer.

    With several answers it is the largest of their counters, while completion tokens and seconds are totals.
    """

    worker_id: str = ""
    engine: str = ""
    kv_transfer: KVTransfer = "none"
    why_none: str = ""
    prompt_tokens: int = 0
    transferred_tokens: int = 0
    evaluated_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0  # seconds from submission until the decode worker received the job, prefill included
    get_s: float = 0.0  # seconds to fetch the KV cache from the store
    ttft_s: float = 0.0  # seconds from submission to the first token, queues included
    decode_s: float = 0.0  # in the engine
    total_s: float = 0.0  # seconds from submission to the finished answer

    def __post_init__(self) -> None:
        checks.text("worker_id", self.worker_id, 255)
        checks.text("engine", self.engine, 64)
        checks.one_of("kv_transfer", self.kv_transfer, KV_TRANSFERS)
        checks.text("why_none", self.why_none, MAX_ERROR_BYTES)
        for name in ("prompt_tokens", "transferred_tokens", "evaluated_tokens", "completion_tokens"):
            checks.whole(name, getattr(self, name), 0, MAX_TOKENS)
        for name in ("queue_s", "get_s", "ttft_s", "decode_s", "total_s"):
            checks.number(name, getattr(self, name), 0, MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """One answer to one of a job's questions."""

    text: str = ""
    finish_reason: str = ""
    state: State = "succeeded"
    evaluated_tokens: int = 0  # prompt tokens computed for this answer, according to the engine's own counter
    likelihoods: tuple[float, ...] = ()  # probability of each value of the schema's first enum; empty if not known

    def __post_init__(self) -> None:
        if not isinstance(self.likelihoods, tuple):
            raise InvalidMessage("likelihoods must be a tuple of numbers")
        for share in self.likelihoods:
            checks.number("likelihoods", share, 0, 1)
        checks.text("text", self.text, MAX_ANSWER_BYTES)
        checks.one_of("finish_reason", self.finish_reason, FINISH_REASONS)
        checks.one_of("state", self.state, STATES)
        checks.whole("evaluated_tokens", self.evaluated_tokens, 0, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: exactly one for each (job_id, run) counts, and the first in the journal wins.

    For a job with questions, `answers` holds the answers in the order of the questions, and several answers to one
    question follow each other. `text` and `more_texts` are then empty.
    """

    job_id: str
    run: int
    batch_id: str
    item_id: str
    model: str
    state: State
    text: str = ""
    finish_reason: str = ""
    more_texts: tuple[str, ...] = ()  # all answers after the first, if the job asked for several
    error: JobError | None = None
    attempts: int = 1  # number of attempts: the earlier ones, which ended in transient errors, plus this one
    prefill: PrefillReport = field(default_factory=PrefillReport)
    decode: DecodeReport = field(default_factory=DecodeReport)
    answers: tuple[QuestionAnswer, ...] = ()

    def __post_init__(self) -> None:
        for name in ("job_id", "batch_id", "item_id"):
            checks.identifier(name, getattr(self, name))
        checks.whole("run", self.run, 1, 1_000_000)
        checks.model_name("model", self.model)
        checks.one_of("state", self.state, STATES)
        checks.text("text", self.text, MAX_ANSWER_BYTES)
        checks.tuple_of("more_texts", self.more_texts, str, MAX_ANSWERS - 1)
        for text in self.more_texts:
            checks.text("more_texts", text, MAX_ANSWER_BYTES)
        checks.tuple_of("answers", self.answers, QuestionAnswer, MAX_QUESTION_ANSWERS)
        checks.one_of("finish_reason", self.finish_reason, FINISH_REASONS)
        checks.whole("attempts", self.attempts, 0, 1_000_000)
        if (self.state == "failed") != (self.error is not None):
            raise InvalidMessage(
                f"a result must have an error if its state is 'failed', and only then; its state is {self.state!r}"
            )


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A piece of an answer while it is generated. Delivery is best effort: pieces may be lost, the result is not.

    A restarted decode begins again at index 0 with another `delivery`; the reader then drops the pieces it has.
    """

    job_id: str
    run: int
    delivery: str  # id of one decoding; if the job is decoded again, its events have another id
    index: int  # index of this piece of the answer, from 0
    text: str
    last: bool = False

    def __post_init__(self) -> None:
        checks.identifier("job_id", self.job_id)
        checks.whole("run", self.run, 1, 1_000_000)
        checks.identifier("delivery", self.delivery)
        checks.whole("index", self.index, 0, MAX_TOKENS)
        checks.text("text", self.text, MAX_ANSWER_BYTES)
