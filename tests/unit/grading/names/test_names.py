"""No name that a platform wrote into a file's name stays in a text of the class, however it is spelled; words stay."""

import json
import random
import sys
import time
import unicodedata
from itertools import product
from pathlib import Path

import pytest

from grading.names.pseudonyms import pseudonymise
from grading.submissions.reading import Submission, SubmissionPart, read_submissions

ADA = "fairweatherada_48101_910001_hw4.R"
JOSE = "José Müller_48102_assignsubmission_file_"
JAN = "Jan van den Berg_48103_assignsubmission_file_"
SINEAD = "oneillsinead_LATE_48104_910004_hw4.R"
BO = "Bo Wu_48105_assignsubmission_file_"
MING = "李明_48106_assignsubmission_file_"
MARK = "longmark_48107_910007_hw4.R"
MEAN = "Mean Max_48108_assignsubmission_file_"
CLASS = (ADA, JOSE, JAN, SINEAD, BO, MING, MARK, MEAN)


def without_names(text: str, author: str = ADA, elsewhere: str = "") -> str:
    """What becomes of a text by this author, in a class whose others wrote nothing of note."""
    texts = dict.fromkeys(CLASS, elsewhere) | {author: text}
    made = [Submission(name, "R", (SubmissionPart("text", each, "text"),)) for name, each in texts.items()]
    return {one.name: one.parts[0].text for one in pseudonymise(made, b"secret")}[author]


NAMED = [
    (ADA, "cd /Users/adafairweather/hw4", ["fairweather"]),
    (ADA, "by FairweatherAda and AdaFairweather2", ["fairweather", "ada"]),
    (ADA, "ada_fairweather fairweather-ada Ada.Fairweather adaFairweather", ["ada", "fairweather"]),
    (ADA, "Ada\u00a0Fairweather, Ada\u2009Fairweather, Ada\tFairweather", ["ada", "fairweather"]),
    (ADA, "# Ada\r\n# Fairweather\n\nAda\n\nFairweather", ["ada", "fairweather"]),
    (ADA, "Ada **Fairweather** and Ada <b>Fairweather</b> and Ada<br/>Fairweather", ["ada", "fairweather"]),
    (ADA, "Ada&nbsp;Fairweather Ada\\_Fairweather Ada%20Fairweather Ada\\u00a0Fairweather", ["ada", "fairweather"]),
    (ADA, '{"given": "Ada", "family": "Fairweather"}', ["ada", "fairweather"]),
    (ADA, "with Ada M. Fairweather and ADA FAIRWEATHER", ["ada", "fairweather"]),
    (ADA, "A. Fairweather; Fairweather, A.; Ada F.", ["ada", "fairweather"]),
    (ADA, "afairweather@uni.example, ada@uni.example, fairweather@uni.example", ["ada@", "fairweather"]),
    (ADA, "git@github.com:fairweathera/hw4.git https://github.com/afairweather7/x", ["fairweather"]),
    (ADA, 'File "/home/ada/hw4.py", line 3; C:\\Users\\afairweather\\Desktop', ["/ada/", "fairweather"]),
    (ADA, "by Ada Fairweather. Fairweather's plot is Ada's idea.", ["ada", "fairweather"]),
    (ADA, "read.csv('fairweatherada_48101_910001_data.csv') # student 48101", ["fairweather", "48101"]),
    (JOSE, unicodedata.normalize("NFD", "José Müller"), ["jos", "mu"]),
    (JOSE, "Jose Muller, Jose Mueller, JOSÉ MÜLLER, josemueller@uni.example", ["jos", "mueller", "muller"]),
    (JOSE, '"author": "Jos\\u00e9 M\\u00fcller", Jos&eacute; M&uuml;ller', ["jos", "ller"]),
    (JAN, "van den Berg, Jan; J. van den Berg; Jan Berg; janvandenberg@uni.example", ["jan", "berg"]),
    (SINEAD, "Sinéad O’Neill, O'Neill S., sineadoneill", ["neill", "sin"]),
    (BO, "by Bo Wu, Wu Bo and Wu, Bo; bo.wu@uni.example; /home/wubo/", ["bo", "wu"]),
    (MING, "作者：李明。李明的作业，by 李 明, 我是李明", ["李", "明"]),
    (MING, json.dumps("作者 李明"), ["\\u674e", "\\u660e"]),
    (MARK, "# Author: Mark Long\n# Long, Mark\nmark.long@uni.example /Users/marklong/", ["mark", "long"]),
    (MEAN, "author: Max Mean", ["max", "mean"]),
]


@pytest.mark.parametrize(("author", "text", "gone"), NAMED)
def test_a_name_is_found_in_every_spelling(author: str, text: str, gone: list[str]) -> None:
    done = without_names(text, author)

    assert "student-" in done
    assert not [part for part in gone if part in done.lower()], done


@pytest.mark.parametrize(
    "text",
    [
        "x <- mean(long); max(x); mean_max <- list(max = max(x), mean = mean(x))",
        "We mark the long list and take the mean. Max and Mean stand in a table.",
        "Mark all long rows. Long tables have a Max, a mean and a mark.",
        "MeanMax = max(mean, long); class LongMark(list): mark_long = True",
        "bo <- 1; wu <- 2; bo + wu; is.na(wu)",
        "It is fair weather; an adage, a canada, a fairweathered cluster state.",
        "文明的说明 明天 李子",
        "C:\\Users\\Public\\long\\mark.csv and root@host:/home/data/max",
        "see van der Waals, and the berg in den Haag",
    ],
)
def test_words_that_are_names_too_stay(text: str) -> None:
    for author in CLASS:
        assert without_names(text, author) == text


def test_a_name_that_the_whole_class_writes_about_is_a_word() -> None:
    shared = "Fairweather Inc. sold 12 umbrellas."

    assert without_names(f"{shared} by Ada Fairweather", elsewhere=shared).startswith(f"{shared} by student-")


def test_no_name_is_left_in_what_is_read_of_files(tmp_path: Path) -> None:
    trace = ['File "/Users/adafairweather/hw4.py", line 1, in <module>', "NameError: name 'x' is not defined"]
    error = {"output_type": "error", "ename": "NameError", "evalue": "x", "traceback": trace}
    cells = [
        {"cell_type": "markdown", "metadata": {"author": "Ada Fairweather"}, "source": "# HW 4\n*A. Fairweather*"},
        {"cell_type": "code", "metadata": {}, "execution_count": 1, "source": "x", "outputs": [error]},
    ]
    notebook = {"cells": cells, "metadata": {"authors": [{"name": "Ada Fairweather"}]}, "nbformat": 4}
    (tmp_path / "fairweatherada_48101_910001_hw4.ipynb").write_text(json.dumps(notebook))
    header = '---\nauthor: "Bo Wu"\n---\n\nBo Wu and Ada\nFairweather\n'
    (tmp_path / "wubo_48105_910005_hw4.Rmd").write_text(header)

    texts = [part.text for one in pseudonymise(read_submissions(tmp_path), b"secret") for part in one.parts]

    assert len(texts) == 4
    assert not [name for name in ("ada", "fairweather", "Bo", "Wu") if name in " ".join(texts)], texts


LONG = 1 << 16  # letters


@pytest.mark.parametrize("piece", ["a ", "Ada ", "ada@x.y ", "/home/ada/", "\\u00e9", "李明", "Jan van den "])
def test_a_long_text_takes_time_by_its_length_alone(piece: str) -> None:
    started = time.process_time()

    without_names(piece * (LONG // len(piece)))

    assert time.process_time() - started < 5  # a tenth of a second on an idle machine


GIVEN = [
    f"{one}{two}{end}"
    for one, two, end in product("BDFGHKLMNPRSTVZ", "aeiou", ("lin", "mar", "nosk", "rud", "vet", "zal", "gorn"))
]
FORMS = {
    "plain": "{given} {family}, ",
    "joined": "{given}{family} ",
    "disguised": "{given} **{family}** {given}&nbsp;{family} {given}\\_{family}\n",
    "misspelt": "{given} {family}x {given}z {family} ",
    "initials": "{initial}. {family} ",
    "account": "/home/{login}/ ",
    "family alone": "{family} ",
}


def calls_for(text: str, size: int) -> int:
    """Python's calls while names are replaced in a class of so many of one family, beyond those for an empty text."""

    def counted(text: str) -> int:
        files = [
            f"{given} Wolkenstein_{number}_assignsubmission_file_" for number, given in enumerate(GIVEN[:size], 48101)
        ]
        made = [
            Submission(name, "R", (SubmissionPart("text", text if not at else "", "text"),))
            for at, name in enumerate(files)
        ]
        calls = 0

        def note(*event: object) -> None:
            nonlocal calls
            calls += event[1] == "call"

        sys.setprofile(note)
        try:
            pseudonymise(made, b"secret")
        finally:
            sys.setprofile(None)
        return calls

    counted(text)  # letters that were looked up once stay known
    return counted(text) - counted("")


@pytest.mark.system  # it profiles, for seconds
@pytest.mark.parametrize("form", FORMS)
def test_a_text_of_classmates_names_costs_the_same_in_any_class(form: str) -> None:
    draw = random.Random(7)
    drawn = [draw.choice(GIVEN[:40]) for _ in range(1_000)]
    text = "".join(
        FORMS[form].format(given=given, family="Wolkenstein", initial=given[0], login=given[0].lower() + "wolkenstein")
        for given in drawn
    )

    assert calls_for(text, 500) < 2 * calls_for(
        text, 40
    )  # 1.0 to 1.2 times; looking at each of the family takes up to ten
