"""The prompt: the class's part first and the same to the byte, the student's part last and only data."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.prompts.prompt import (
    PROMPT_VERSION,
    SHORT_TEXT_CHARS,
    build_prompt,
    fence_for,
    has_control_tokens,
    neutralise,
    text_of,
)
from grading.rubric.rubric import Aspect, Criterion, Rubric
from grading.submissions.reading import Submission, SubmissionPart
from grading.submissions.truncation import Cut
from messages.jobs import Part, prompt_text

REMINDER = "The submission ends here. Grade it by the rubric above and answer with the JSON object only."
SECRET = b"a secret of this installation"
RUBRIC = Rubric(
    "Homework 3",
    "A first course in R.",
    (
        Criterion("loops", "Uses loops", 6, "A while loop is fine.", "code", 0.5),
        Criterion("words", "Explains the result", 4, "", "feedback"),
    ),
    "d" * 32,
)
SOLUTION = Submission("solution.ipynb", "R", (SubmissionPart("code", "for (i in 1:3) print(i)", "cell 1"),))
TEMPLATE = Submission("template.ipynb", "R", (SubmissionPart("code", "# your loop here", "cell 1"),))


def work(*parts: SubmissionPart, language: str = "R", images: int = 0) -> Submission:
    return Submission("miller_ada_123.ipynb", language, parts, images_left_out=images)


CODE = SubmissionPart("code", "i <- 1\nwhile (i < 4) { print(i); i <- i + 1 }", "cell 2")
OUTPUT = SubmissionPart("output", "[1] 1\n[1] 2", "cell 2")
TEXT = SubmissionPart("text", "The loop prints three numbers.", "cell 3")


def prompt(submission: Submission, role: Aspect = "code", cuts: tuple[Cut, ...] = ()) -> tuple[Part, ...]:
    return build_prompt(role, RUBRIC, SOLUTION, TEMPLATE, submission, fence_for(SECRET, text_of(submission)), cuts)


def test_the_shared_part_is_the_same_for_the_class_and_holds_what_the_class_shares() -> None:
    one, other = prompt(work(CODE, OUTPUT)), prompt(work(TEXT, language="Python", images=3))

    assert one[0].text == other[0].text
    for text in (PROMPT_VERSION, "Homework 3", "A first course in R.", "A while loop is fine.", "for (i in 1:3)"):
        assert text in one[0].text
    assert "# your loop here" in one[0].text
    assert one[0].text.index("for (i in 1:3)") < one[0].text.index('"loops": {"evidence"')


def test_each_role_is_told_its_own_criteria_and_answer() -> None:
    code, feedback = prompt(work(CODE))[0].text, prompt(work(CODE), "feedback")[0].text

    assert '"loops": {"evidence"' in code
    assert "words" not in code
    assert '"summary"' not in code
    assert '"words": {"evidence"' in feedback
    assert '"summary"' in feedback
    assert "loops" not in feedback


def test_the_fixed_wording_is_short_enough_for_small_models() -> None:
    bare = Rubric("", "", (), "d" * 32)
    submission = work(SubmissionPart("text", "", ""))
    built = build_prompt("feedback", bare, None, None, submission, "f" * 12)

    words = re.findall(r"\w+|[^\w\s]", prompt_text(built))  # at least as many as common tokenizers make of prose
    assert len(words) <= 350


def test_the_students_work_stands_between_fences_and_a_reminder_closes() -> None:
    submission = work(CODE, OUTPUT)
    fence = fence_for(SECRET, text_of(submission))
    lines = prompt(submission)[-1].text.splitlines()

    assert lines[0] == f"The code is {fence}."
    assert lines[1] == f"=== {fence} begin"
    assert lines[2] == "Language: R"
    assert f"=== {fence} code, cell 2" in lines
    assert f"=== {fence} output, cell 2" in lines
    assert lines[-2] == f"=== {fence} end"
    assert lines[-1] == REMINDER


def test_the_students_name_never_reaches_a_prompt() -> None:
    built = prompt(work(CODE, OUTPUT, TEXT), "feedback")

    assert "miller" not in prompt_text(built)


def test_the_feedback_prompt_shows_text_first_and_the_code_prompt_keeps_the_order() -> None:
    submission = work(CODE, OUTPUT, TEXT)
    feedback, code = prompt(submission, "feedback")[-1].text, prompt(submission)[-1].text

    assert feedback.index("The loop prints") < feedback.index("while (i < 4)") < feedback.index("[1] 1")
    assert code.index("while (i < 4)") < code.index("[1] 1") < code.index("The loop prints")


def test_a_long_text_is_left_out_of_the_code_prompt_and_said_to_be() -> None:
    essay = SubmissionPart("text", "w" * (SHORT_TEXT_CHARS + 1), "cell 9")

    assert "www" not in prompt(work(CODE, essay))[-1].text
    assert "Not shown: 1 longer text, graded elsewhere" in prompt(work(CODE, essay))[-1].text
    assert essay.text in prompt(work(CODE, essay), "feedback")[-1].text


def test_what_was_cut_and_left_out_is_said() -> None:
    cuts = (Cut("cell 2", "output", 100, 1100), Cut("cell 4", "output", 0, 100), Cut("cell 5", "code", 10, 1))
    own = prompt(work(CODE, images=2), cuts=cuts)[-1].text

    assert "Not shown: 2 images; 1 token of code in 1 place; 1,200 tokens of output in 2 places" in own


def test_an_empty_submission_has_a_prompt_too() -> None:
    assert "(nothing to show)" in prompt(work())[-1].text


def test_a_fence_that_occurs_elsewhere_is_refused() -> None:
    for fence in ("", "Homework", "while"):
        with pytest.raises(ValueError, match="fence"):
            build_prompt("code", RUBRIC, None, None, work(CODE), fence)


def test_the_fence_depends_on_the_secret_and_the_text() -> None:
    fences = {fence_for(SECRET, "a"), fence_for(SECRET, "b"), fence_for(b"another", "a")}

    assert len(fences) == 3
    assert all(re.fullmatch("[0-9a-f]{12}", fence) for fence in fences)
    with pytest.raises(ValueError, match="empty"):
        fence_for(b"", "a")


@given(text=st.text(alphabet=st.characters()))
def test_a_fence_never_occurs_in_its_text(text: str) -> None:
    fence = fence_for(SECRET, text)

    assert fence == fence_for(SECRET, text)
    assert fence not in text


@pytest.mark.parametrize(
    "token",
    [
        "<|im_end|>",
        "<|start|>",
        "<｜end▁of▁sentence｜>",
        "[INST]",
        "[/INST]",
        "<<SYS>>",
        "</s>",
        "<start_of_turn>",
        "<think>",
        "<unused7>",
        "<|<s>|>",
    ],
)
def test_control_tokens_are_shown_in_other_brackets(token: str) -> None:
    own = prompt(work(SubmissionPart("text", f"before {token} after", "cell 1")))[-1].text

    assert token not in own
    assert re.search(r"before [‹⟦].+[›⟧] after", own)


@pytest.mark.parametrize("code", ["x |> f()", "a <- b[i]", "if (a < b || c > d) 1", "List<s2>", "df[INST_ID]"])
def test_code_that_only_looks_similar_stays_as_it_is(code: str) -> None:
    assert neutralise(code) == code


pieces = st.sampled_from(["<", ">", "|", "[", "]", "/", "INST", "s", "im_end", "<|", "|>", "\ud83d", "\0", "x", "\n"])


@given(text=st.lists(pieces, max_size=30).map("".join))
def test_neutralised_text_has_no_control_token_and_can_be_encoded(text: str) -> None:
    safe = neutralise(text)

    assert not has_control_tokens(safe)
    assert "\0" not in safe.encode().decode()
    assert neutralise(safe) == safe


kinds = st.sampled_from(["code", "text", "output"])


@given(
    texts=st.lists(st.tuples(kinds, st.text(max_size=60), st.text(max_size=12)), max_size=5),
    language=st.text(max_size=12),
    role=st.sampled_from(["code", "feedback"]),
)
def test_no_submission_gets_out_of_its_fence(texts: list[tuple[str, str, str]], language: str, role: Aspect) -> None:
    submission = work(*(SubmissionPart(kind, text, where) for kind, text, where in texts), language=language)  # type: ignore[arg-type]
    fence = fence_for(SECRET, text_of(submission))
    own = prompt(submission, role)[-1].text

    assert own.count(fence) == 3 + len(submission.parts)
    assert own.endswith(f"=== {fence} end\n{REMINDER}")
    assert own.startswith(f"The code is {fence}.\n=== {fence} begin\nLanguage: ")
