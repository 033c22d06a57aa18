"""An answer that only repeats itself is no answer; one that repeats a word, a row or a line of code is."""

import json

import pytest

from grading.points import grade_submission
from grading.prompts.answers import AnswerError, parse_answer
from grading.rubric.rubric import Criterion, Rubric
from grading.submissions.reading import Submission, SubmissionPart

WORKS = Criterion("works", "It runs", 4, "", "feedback")

REPEATS = [
    "maxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "maxxxxxxxxxxxxxx",
    "The loop is right and ends by itself, which was asked for. But maxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "good good good good good good",
    "the code the code the code the code the code the code",
    "The mean is right. The mean is right. The mean is right. The mean is right.",
    "You should explain more.\n" * 8,
    "Keep the loop.\nName the columns.\n" * 5,
    "Well done. You should explain what the figures mean for the shop. " * 4,
    "It runs. " + "and the result and the result of the result and the result " * 3,
    "很好" * 12,
    "代码正确。" * 6,
    "よくできました。" * 5,
    "правильно " * 8,
    "إجابة صحيحة " * 7,
    "सही उत्तर " * 8,
    "정답입니다 " * 7,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "あああああああああああああああああああああああああ",
    "!" * 150,
    "😀" * 60,
    "- - - - - - - - - - - - - - - -",
    "\\n\\n\\n\\n\\n\\n\\n\\n\\n\\n\\n\\n\\n\\n",
    "0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0",
    "ab" * 40,
    "the the the loop the the loop the the the loop the loop the the the loop the the loop the the the loop the the",
]
SAYS_SOMETHING = [
    "",
    "Right.",
    "Good. Good.",
    "No, no, no!",
    "–",
    "Very, very, very good work on the plot.",
    "It is not the mean of the mean but the mean of all rows: the mean of means weighs each region the same.",
    "Task 1: correct.\nTask 2: correct.\nTask 3: correct.\nTask 4: correct.\nTask 5: correct.\nTask 6: wrong sign.",
    "\n".join(f"- Aufgabe {number}: richtig." for number in range(1, 13)),
    "1. mean: 2 of 2\n2. median: 2 of 2\n3. mode: 1 of 2\n4. range: 2 of 2\n5. variance: 0 of 2",
    "| region | mean |\n|--------|------|\n| north | 12.5 |\n| south | 12.5 |\n| west | 11.0 |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |\n| a | b | c | d |",
    "=" * 60 + "\nIt runs.\n" + "=" * 60,
    "```\nfor i in range(3):\n    for j in range(3):\n        for k in range(3):\n            print(i, j, k)\n```",
    "Write x[0] + x[1] + x[2] + x[3] as sum(x[:4]): it says what you mean.",
    "if (a > 0) { b <- b + 1 } else if (a < 0) { b <- b - 1 } else { b <- 0 } is right, but sign(a) does it.",
    "You wrote print(df); print(df); print(df), once is enough.",
    "The p-value is 0.000000000000000000001, so the difference is not by chance.",
    "Sooooo close: the last row is missing.",
    "循环是正确的，但是没有说明结果的含义。请写出每个地区的平均值，并解释哪个地区最高。",
    "Цикл верный, но не сказано, что значит результат; назовите столбцы и поясните среднее по регионам.",
    "TTTTTTTTT is how the output shows TRUE; say how many of them there are.",
    "Name it, plot it, explain it. Name it again where you use it, plot it with a title, explain it to a reader.",
]


def answer(feedback: str, summary: str = "Keep on.") -> str:
    said = {"evidence": "x <- 1", "points": 3, "feedback": feedback}
    return json.dumps({"works": said, "summary": summary})


@pytest.mark.parametrize("text", REPEATS)
def test_what_only_repeats_itself_is_no_feedback(text: str) -> None:
    with pytest.raises(AnswerError, match="feedback of 'works' only repeats itself"):
        parse_answer(answer(text), [WORKS], True)
    with pytest.raises(AnswerError, match="summary only repeats itself"):
        parse_answer(answer("Right.", text), [WORKS], True)


@pytest.mark.parametrize("text", SAYS_SOMETHING)
def test_what_says_something_is_feedback(text: str) -> None:
    parsed = parse_answer(answer(text, text), [WORKS], True)

    assert parsed.criteria["works"].feedback == parsed.summary == text


def test_a_grade_without_usable_feedback_is_incomplete_and_says_why() -> None:
    code = Criterion("code", "Code", 2, "", "code")
    rubric = Rubric("Homework", "", (WORKS, code), "d" * 32)
    work = Submission("s", "R", (SubmissionPart("code", "x <- 1", "script"),))
    fine = json.dumps({"code": {"evidence": "x <- 1", "points": 2, "feedback": "Right."}})
    answers = {"code": parse_answer(fine, [code], False)}
    try:
        answers["feedback"] = parse_answer(answer("max" + "x" * 190), [WORKS], True)
    except AnswerError as error:
        answers["feedback"] = str(error)  # type: ignore[assignment]

    made = grade_submission("s", rubric, answers, work)  # type: ignore[arg-type]

    assert (made.state, made.points) == ("incomplete", None)
    assert "repeats itself" in made.reason
