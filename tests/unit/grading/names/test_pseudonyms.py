"""Names leave no producer: what is known of them is replaced wherever its parts stand together."""

import pytest

from grading.names.pseudonyms import pseudonymise
from grading.names.search import Names, student_called
from grading.submissions.reading import Submission, SubmissionPart

KNOWN = {"fairweatherada": "S1", "oconnorsinead": "S2", "vandenbergjan": "S3"}


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("Author: Fairweather, Ada", "Author: S1"),
        ("FAIRWEATHER ADA and fairweatherada", "S1 and S1"),
        ("by Sinéad O'Connor and Ada Fairweather", "by S2 and S1"),
        ("van den Berg, Jan", "S3"),
        ("Ada said: Fairweather was fair", "Ada said: Fairweather was fair"),
        ("Ada, and Fairweather", "Ada, and Fairweather"),
        ("ada1fairweather", "ada1fairweather"),
        ("", ""),
    ],
)
def test_a_name_is_replaced_where_its_parts_stand_together(text: str, replaced: str) -> None:
    names = Names([student_called(written, stand_in) for written, stand_in in KNOWN.items()])
    assert names.replace_names(text, None, set()) == replaced


def a_submission(name: str, text: str) -> Submission:
    return Submission(name, "R", (SubmissionPart("code", text, "cell 1"),))


def test_names_of_the_whole_class_are_replaced_in_every_submission_and_file_names_stay() -> None:
    class_work = [
        a_submission("fairweatherada_48101_910001_hw4.R", "# Ada Fairweather\nx <- 1"),
        a_submission("Cato Cloverfield_48103_assignsubmission_file", "# with Ada Fairweather, by Cato Cloverfield"),
        a_submission("homework.R", "# by homework"),
    ]

    done = pseudonymise(class_work, b"secret")

    assert [one.name for one in done] == [one.name for one in class_work]
    texts = [one.parts[0].text for one in done]
    assert "Ada" not in "".join(texts)
    assert "Cato" not in "".join(texts)
    assert texts[0].startswith("# student-")
    assert texts[0].endswith("\nx <- 1")
    assert texts[0].split()[1] in texts[1].replace(",", "")
    assert texts[2] == "# by homework"


def test_another_secret_gives_other_pseudonyms() -> None:
    one = a_submission("fairweatherada_48101_910001_hw4.R", "Ada Fairweather")

    assert pseudonymise([one], b"a") != pseudonymise([one], b"b")
