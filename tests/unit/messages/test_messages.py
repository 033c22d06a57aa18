"""The four messages: what they refuse. That they survive the wire is in test_golden.py, and in tests/forms."""

import dataclasses
import json
from contextlib import suppress

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import codec
from messages.errors import InvalidMessage, KvasirError, NewerMessage
from messages.jobs import (
    DecodeJob,
    DecodeReport,
    JobError,
    JobResult,
    Part,
    PrefillJob,
    PrefillReport,
    Question,
    QuestionAnswer,
    Sampling,
    Scope,
    StoredKV,
    TokenEvent,
    job_id,
    user_prompt,
)
from messages.kv import KVLayout
from messages.limits import MAX_PARTS, MAX_PROMPT_BYTES
from tests.unit.messages.golden.make import MESSAGES

LAYOUT = KVLayout(4, 2, 32, "bf16", window=16, window_layers=(1, 3))


def a_job(**changes: object) -> PrefillJob:
    fields = {"job_id": "j1", "batch_id": "b1", "item_id": "i1", "model": "qwen3-coder:30b"}
    prompt = user_prompt(str(changes.pop("shared", "rubric")), str(changes.pop("own", "work")))
    return PrefillJob(**{**fields, "prompt": prompt, "sampling": Sampling(10), **changes})  # type: ignore[arg-type]


def user(text: str, scope: Scope = "own") -> Part:
    return Part("user", text, scope)


def a_result(**changes: object) -> JobResult:
    fields = {"job_id": "j1", "run": 1, "batch_id": "b1", "item_id": "i1", "model": "m", "state": "succeeded"}
    return JobResult(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"job_id": ""}, "job_id must be"),
        ({"job_id": "a/b"}, "job_id must be"),
        ({"model": "a b"}, "model must be a model name"),
        ({"own": "x" * (MAX_PROMPT_BYTES + 1)}, "prompt is 1,048,577 bytes long"),
        ({"shared": "x" * (MAX_PROMPT_BYTES // 2), "own": "x" * (MAX_PROMPT_BYTES // 2 + 1)}, "prompt is"),
        ({"shared": "", "own": ""}, "prompt is empty"),
        ({"run": 0}, "run must be a whole number"),
        ({"run": True}, "run must be a whole number"),
        ({"lane": "soon"}, "lane must be one of bulk, now"),
        ({"deadline": float("nan")}, "deadline must be a number"),
        ({"shared_tokens": 1}, "shared_tokens must be"),
        ({"prompt": [user("x")]}, "prompt must hold at most"),
        ({"prompt": (user("x"),) * (MAX_PARTS + 1)}, "at most 256 Parts"),
        ({"prompt": ("x",)}, "prompt must hold at most"),
        ({"prompt": (user("a"), user("b", "class"))}, "order of their scopes: class, conversation, own"),
        ({"prompt": (user("a"), user("b", "conversation"))}, "order of their scopes"),
        ({"prompt": (user("a"), Part("assistant", "{}", function="f"))}, "ends with a function call"),
        ({"prompt": (Part("raw", "a"), Part("raw", "b"))}, "a raw prompt must be a single text"),
        ({"questions": [Question((user("x"),), Sampling(5))]}, "questions must hold at most"),
        ({"questions": ("x",)}, "questions must hold at most"),
        ({"questions": (Question((user("x"),) * (MAX_PARTS // 2), Sampling(5)),) * 2}, "at most 256 parts"),
        ({"questions": (Question((user("x", "class"),), Sampling(5)),)}, "order of their scopes"),
        ({"questions": (Question((user("x" * MAX_PROMPT_BYTES),), Sampling(5)),)}, "prompt is"),
        ({"questions": (Question((user("x"),), Sampling(5, answers=13)),) * 5}, "more than 64 answers in all"),
    ],
)
def test_a_job_with_a_bad_field_says_which_and_why(changes, complaint):
    with pytest.raises(InvalidMessage, match=complaint):
        a_job(**changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": ["x"]}, "stop must hold at most"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[1]"}, "must be a JSON object"),
    ],
)
def test_sampling_with_a_bad_value_says_which(changes, complaint):
    with pytest.raises(InvalidMessage, match=complaint):
        Sampling(**{"max_tokens": 5, **changes})


def test_a_failed_result_has_an_error_and_no_other_has_one():
    with pytest.raises(InvalidMessage, match="a result must have an error if its state is 'failed'"):
        a_result(state="failed")
    with pytest.raises(InvalidMessage, match="a result must have an error if its state is 'failed'"):
        a_result(error=JobError("decode", "X", "y"))


@pytest.mark.parametrize(
    ("suffix", "sampling", "complaint"),
    [
        ((), Sampling(5), "must have a suffix"),
        ([user("x")], Sampling(5), "suffix must hold at most"),
        (("x",), Sampling(5), "suffix must hold at most"),
        ((user("x"),), None, "sampling must be a Sampling"),
    ],
)
def test_a_question_with_a_bad_field_says_which(suffix, sampling, complaint):
    with pytest.raises(InvalidMessage, match=complaint):
        Question(suffix, sampling)


def test_a_job_with_as_many_parts_and_questions_as_it_may_have_is_read():
    every = Sampling(5, stop=("x",))
    asked = tuple(Question((user("x"), user("y")), every) for _ in range(64))
    job = a_job(prompt=(user("x"),) * (MAX_PARTS - 128), sampling=every, questions=asked).tokenized((1, 2, 3), 0)
    layout = KVLayout(9, 2, 32, "f16", 8, (1,), recurrent_layers=(0,), both_layers=(2,))
    decode = DecodeJob(job, StoredKV("f00", layout, 2, 0), PrefillReport("w"))
    assert codec.decode(codec.encode(decode), DecodeJob) == decode


@pytest.mark.parametrize("depth", [600, 1000, 100_000])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("opens", "closes"), [(b"\x91", b"\xc0"), (b"\x81\xa3job", b"\xc0"), (b"\x81\xa6prompt", b"\x90")]
)
def test_what_is_nested_deep_is_refused_like_anything_else(depth, version, opens, closes):
    for name in ("job", "prompt", "sampling", "run", "tokens", "kind"):
        head = {"v": version, "kind": "prefill"} if name != "kind" else {"v": version}
        packed = msgpack.packb(head)
        body = bytes([packed[0] + 1]) + packed[1:] + msgpack.packb(name) + opens * depth + closes
        with pytest.raises(InvalidMessage):
            codec.decode(body, PrefillJob)


@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        ([QuestionAnswer("x")], "at most 64"),
        ((QuestionAnswer("x"),) * 65, "at most 64"),
        (("x",), "at most 64 QuestionAnswers"),
    ],
)
def test_a_result_with_bad_answers_says_so(answers, complaint):
    with pytest.raises(InvalidMessage, match=complaint):
        a_result(answers=answers)


def test_a_kv_transfer_leaves_the_last_prompt_token_to_the_decoder():
    with pytest.raises(InvalidMessage, match="must leave the prompt's last token"):
        DecodeJob(a_job().tokenized((1, 2), 0), StoredKV("f", LAYOUT, 2, 0))


@pytest.mark.parametrize("sketch", ["a b", "x" * 129, None, 5, "../up"])
def test_a_sketch_that_is_no_identifier_is_refused(sketch):
    with pytest.raises(InvalidMessage, match="sketch must be"):
        StoredKV("f00", LAYOUT, 2, 0, sketch=sketch)


def test_a_kv_transfer_with_another_name_is_refused():
    with pytest.raises(InvalidMessage, match="kv_transfer must be one of none, verified, verified-rounded"):
        DecodeReport(kv_transfer="rounded")


def test_a_job_id_changes_with_everything_that_makes_it_other_work():
    base = ("b", "i", "m", user_prompt("", "prompt"), Sampling(5))
    names = {job_id(*base)}
    for place, other in enumerate(["b2", "i2", "m2", user_prompt("", "prompt2"), Sampling(6)]):
        names.add(job_id(*base[:place], other, *base[place + 1 :]))  # type: ignore[arg-type]
    assert len(names) == 6
    assert job_id(*base) == job_id(*base)


FIVE = Sampling(5)


def work(*prompt: Part, sampling: Sampling = FIVE, questions: tuple[Question, ...] = ()) -> str:
    return job_id("b", "i", "m", prompt, sampling, questions)


def test_a_job_id_changes_with_roles_texts_and_where_they_end():
    prompts = [
        (user("ab"),),
        (user("a"), user("b")),
        (user("a", "class"), user("b")),
        (user("ab", "class"),),
        (user("a"), Part("system", "b")),
        (Part("system", "a"), user("b")),
        (user("a"), user("b"), user("c")),
        (user("ba"),),
        (user('a", "role": "system'), user("b")),
    ]
    questions = [
        (Question((user("b"),), Sampling(5)),),
        (Question((user("b"),), Sampling(6)),),
        (Question((user("c"),), Sampling(5)),),
        (Question((user("b"), user("c")), Sampling(5)),),
        (Question((user("b"),), Sampling(5)), Question((user("c"),), Sampling(5))),
    ]
    names = [work(*prompt) for prompt in prompts] + [work(user("a"), questions=asked) for asked in questions]
    assert len(set(names)) == len(prompts) + len(questions)


@dataclasses.dataclass(frozen=True, slots=True)
class LaterSampling(Sampling):
    """As a later version may have it."""

    min_p: float = 0.0
    steps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LaterPart(Part):
    """As a later version may have it."""

    picture: str = ""


def test_a_new_field_with_its_default_changes_no_job_id():
    now = work(user("a", "class"), user("b"), sampling=Sampling(5, temperature=0.0))
    later = (LaterPart("user", "a", "class"), LaterPart("user", "b"))
    assert work(*later, sampling=LaterSampling(5, temperature=0.0)) == now
    assert work(*later, sampling=LaterSampling(5, temperature=0.0, min_p=0.1)) != now
    assert work(later[0], LaterPart("user", "b", picture="cat"), sampling=Sampling(5, temperature=0.0)) != now


def test_a_default_that_is_spelled_out_changes_no_job_id():
    asked = dict.fromkeys(("top_k", "seed"), 0) | {"temperature": 0.2, "stop": (), "json_schema": "", "answers": 1}
    assert work(user("a"), sampling=Sampling(5, **asked)) == work(user("a"))


def test_a_job_id_stays_the_same_in_every_version_with_these_fields():
    prompt = (Part("system", "Be brief.", "class"), user("grüße"))
    assert job_id("batch", "item", "m:1b", prompt, Sampling(8, temperature=0.0)) == "7e830c4e6c30c38fd4cca3424a88bc23"


def test_parts_can_not_slide_from_one_field_of_a_job_id_into_the_next():
    prompt = user_prompt("", "p")
    assert job_id("ab", "c", "m", prompt, Sampling(5)) != job_id("a", "bc", "m", prompt, Sampling(5))


def test_a_newer_version_waits_and_an_unknown_one_is_refused():
    fields = msgpack.unpackb(codec.encode(MESSAGES["prefill-every-field"]))
    with pytest.raises(NewerMessage):
        codec.decode(msgpack.packb({**fields, "v": codec.VERSION + 1}), PrefillJob)
    for version in (0, -1, None, "1"):
        with pytest.raises(InvalidMessage, match="version"):
            codec.decode(msgpack.packb({**fields, "v": version}), PrefillJob)


def test_a_field_with_its_default_is_not_sent():
    assert msgpack.unpackb(codec.encode(a_result())).keys() == {"v", "kind"} | {
        *("job_id", "run", "batch_id", "item_id", "model", "state")
    }


BEFORE = {"v": 1, "job_id": "j1", "batch_id": "b1", "item_id": "i1", "model": "qwen3-coder:30b"}
JOB_BEFORE = BEFORE | {"kind": "prefill", "shared": "rubric", "own": "work", "sampling": {"max_tokens": 10}, "run": 2}


def test_a_job_of_the_version_before_is_read():
    read = codec.decode(msgpack.packb(JOB_BEFORE | {"tokens": b"\x07\0\0\0"}), PrefillJob)
    assert read == a_job(run=2, tokens=(7,))
    inner = {name: value for name, value in JOB_BEFORE.items() if name not in ("v", "kind")}
    decode = {"v": 1, "kind": "decode", "job": inner | {"shared": ""}, "kv": None, "why_no_kv": "short"}
    assert codec.decode(msgpack.packb(decode), DecodeJob) == DecodeJob(a_job(run=2, shared=""), None, why_no_kv="short")


def test_a_result_of_the_version_before_is_read():
    report = {"hand_over": "kv", "handed_over_tokens": 5, "evaluated_tokens": 1}
    fields = BEFORE | {"kind": "result", "run": 1, "model": "m", "state": "succeeded", "text": "x", "decode": report}
    expected = DecodeReport(kv_transfer="verified", transferred_tokens=5, evaluated_tokens=1)
    assert codec.decode(msgpack.packb(fields), JobResult) == a_result(text="x", decode=expected)


@pytest.mark.parametrize("change", [{"shared": 5}, {"own": b"x"}, {"shared": "", "own": ""}, {"prompt": []}, {"x": 1}])
def test_a_damaged_job_of_the_version_before_is_refused(change):
    with pytest.raises(InvalidMessage):
        codec.decode(msgpack.packb(JOB_BEFORE | change | ({"shared": 3} if "prompt" in change else {})), PrefillJob)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"surprise": 1}, "no field 'surprise'"),
        ({"sampling": None}, "must be a map"),
        ({"sampling": {"max_tokens": "5"}}, "max_tokens"),
        ({"tokens": [1, 2]}, "packed 32-bit"),
        ({"tokens": b"abc"}, "packed 32-bit"),
        ({"prompt": "x"}, "prompt must be a list"),
        ({"prompt": [{"role": "user"}]}, "text"),
        ({"prompt": [{"role": "root", "text": "x"}]}, "role must be one of"),
        ({"prompt": [{"role": "user", "text": "x", "scope": "all"}]}, "scope must be one of"),
        ({"prompt": [{"role": "user", "text": ""}]}, "a part of the prompt is empty"),
        ({"prompt": [{"role": "user", "text": "x", "name": "y"}]}, "Part has no field 'name'"),
        ({"questions": [{"suffix": []}]}, "sampling"),
        ({"questions": [{"suffix": "x", "sampling": {"max_tokens": 5}}]}, "suffix must be a list"),
        ({"shared": "x", "own": "y"}, "no field 'own'"),
        ({"kind": "result"}, "kind 'prefill' is expected here, not 'result'"),
    ],
)
def test_a_body_with_a_bad_field_is_refused_with_its_name(change, complaint):
    fields = msgpack.unpackb(codec.encode(a_job()))
    with pytest.raises(InvalidMessage, match=complaint):
        codec.decode(msgpack.packb({**fields, **change}), PrefillJob)


def test_every_missing_required_field_is_refused():
    fields = msgpack.unpackb(codec.encode(a_job()))
    required = [f.name for f in dataclasses.fields(PrefillJob) if f.default is dataclasses.MISSING]
    for name in required:
        with pytest.raises(InvalidMessage):
            codec.decode(msgpack.packb({k: v for k, v in fields.items() if k != name}), PrefillJob)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
anything = st.recursive(
    scalars | st.text(max_size=5) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_our_errors(body):
    for kind in (PrefillJob, DecodeJob, JobResult, TokenEvent):
        with pytest.raises(KvasirError):
            codec.decode(body, kind)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(MESSAGES.values())), st.data())
def test_a_message_with_any_field_replaced_is_read_or_refused_but_never_crashes(message, data):
    fields = msgpack.unpackb(codec.encode(message))
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(anything)
    with suppress(KvasirError):
        codec.decode(msgpack.packb(fields), type(message))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(MESSAGES.values())), st.integers(0, 10**6), st.integers(1, 255))
def test_a_message_with_any_byte_changed_is_read_or_refused_but_never_crashes(message, place, change):
    body = bytearray(codec.encode(message))
    body[place % len(body)] ^= change
    with suppress(KvasirError):
        codec.decode(bytes(body), type(message))


def test_a_result_survives_json():
    for message in MESSAGES.values():
        if isinstance(message, JobResult):
            assert codec.result_from_dict(json.loads(json.dumps(codec.to_dict(message)))) == message


def test_a_job_id_depends_on_the_sampling_alone_and_not_on_which_came_before():
    whole, fraction = Sampling(8, temperature=0), Sampling(8, temperature=0.0)
    first = [job_id("b", "i", "m", user_prompt("", "prompt"), sampling) for sampling in (whole, fraction)]
    again = [
        job_id("b", "i", "m", user_prompt("", "prompt"), sampling) for sampling in (Sampling(8, temperature=0.0), whole)
    ]

    assert first == again[::-1]
    assert first[0] != first[1]
