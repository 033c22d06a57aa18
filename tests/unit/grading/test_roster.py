"""Whose a submission is: number and name together, as the LMSs write both, compared with the people there are."""

import csv
import io
import zipfile
from pathlib import Path

import pytest

from grading.export.canvas import export_canvas
from grading.export.moodle import export_moodle
from grading.names.pseudonyms import pseudonym, pseudonymise
from grading.points import CriterionGrade, Grade
from grading.report.grades import GradedClass, save_graded
from grading.request import GradeRequest, Selection
from grading.roster import (
    ANSWERS,
    EMPTY_ROSTER,
    UNASSIGNED_QUESTION,
    UNMATCHED_QUESTION,
    Roster,
    canvas_name,
    keep_answer,
    keep_roster,
    kept_files,
    moodle_name,
    read_rosters,
    roster_in,
)
from grading.submissions.reading import Submission, SubmissionPart, read_submissions
from grading.tables import ExportError, read_sheet
from messages.errors import SubmissionError, UsageError

# `GradebookExporter#csv_data`, instructure/canvas-lms, `lib/gradebook_exporter.rb`
GRADEBOOK = b"""Student,ID,SIS Login ID,Section,Homework 5 (5502),Final Score
,,,,Manual Posting,
    Points Possible,,,,20.00,(read only)
"Aldertree, Ada",71001,u1,BA-101 01,,80
"van der Berg, Mia",71002.0,u2,BA-101 01,,80
"O_Brien_42_Kay, Bo",7.1003E+04,u3,BA-101 02,,80
"Smith, Jordan",71004,u4,BA-101 02,,80
"Smith, Jordan",71005,u5,BA-101 01,,80
"Student, Test",79999,,BA-101 01,,
"""
# `lib/group_category/csv_exporter`: People, the group set, Export
GROUPS = b"""name,canvas_user_id,user_id,login_id,sections,group_name,canvas_group_id,group_id
Ada Aldertree,71001,,u1,BA-101 01,Team_7 B,9,
Mia van der Berg,71002,,u2,BA-101 01,Team_7 B,9,
Bo Kay,71003,,u3,BA-101 02,,,
"""
# `assign_grading_table::__construct`, moodle/moodle, `mod/assign/gradingtable.php`: Group where teams hand in
HEADER = "Identifier,Full name,{}Grade,Maximum grade,Grade can be changed,Last modified (grade),Feedback comments\n"
WORKSHEET = (
    HEADER.format("")
    + "Participant 50100,Ana Sobrino,,20.00,Yes,-,\n"
    + "Participant 50101,Chloé D'Au,,20.00,Yes,-,\n"
    + "Participant 50102,Bo_Ek,,20.00,Yes,-,\n"
).encode()
# A group's id counts something else than participants: Team Espresso's is Zed's number.
TEAMS = (
    HEADER.format("Group,")
    + "Participant 50101,Zed Unrelated,Team Mocha,,20.00,Yes,-,\n"
    + "Participant 50102,Ana Sobrino,Team Espresso,,20.00,Yes,-,\n"
    + "Participant 50103,Bo Ek,Team Espresso,,20.00,Yes,-,\n"
    + "Participant 50104,Cy Om,Default group,,20.00,Yes,-,\n"
).encode()


def roster(*files: bytes, **answers: str) -> Roster:
    made = Roster(answers=answers)
    for data in files:
        made = made.with_more(roster_in(read_sheet(data, "roster")))
    return made


def whose(people: Roster, name: str) -> list[str]:
    return [person.number for person in people.owners([name])[name].people]


def a_class(folder: Path, points: dict[str, int]) -> Path:
    grades = [
        Grade(name, "graded", each, 20, (CriterionGrade("parts", "Parts", 20, each),), item_id=f"i{number}")
        for number, (name, each) in enumerate(points.items())
    ]
    save_graded(folder, GradedClass("b", "Homework 5", 20, tuple(grades)))
    return folder


def cells(data: bytes, key: str, column: str) -> dict[str, str]:
    return {row[key]: row[column] for row in csv.DictReader(io.StringIO(data.decode("utf-8-sig")))}


# --- names


@pytest.mark.parametrize(
    ("sortable", "written"),
    [
        # `ContentZipper#sanitize_user_name`, `#sanitize_file_name`, `lib/content_zipper.rb`
        ("Aldertree, Ada", "aldertreeada"),
        ("O_Brien_42_Kay, Bo", "o_brien42kaybo"),
        ("Żółw, Łucja", "żółwłucja"),
        ("حسين, محمد", "حسينمحمد"),
    ],
)
def test_canvas_folds_and_joins_a_name(sortable: str, written: str) -> None:
    assert canvas_name(sortable) == written


@pytest.mark.parametrize(
    ("name", "written"),
    [
        # `downloader::get_student_prefix`, `mod/assign/classes/downloader.php`; `clean_param` of PARAM_FILE
        ("Chloé D'Au", "Chloé DAu"),
        ("Bo_Ek", "Bo Ek"),
        ("Gruppe 1 & 2", "Gruppe 1  2"),
    ],
)
def test_moodle_cleans_a_name_and_makes_a_space_of_an_underscore(name: str, written: str) -> None:
    assert moodle_name(name) == written


# --- Canvas


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("aldertreeada_71001_9_hw5.R", ["71001"]),
        ("vanderbergmia_LATE_71002_text.html", ["71002"]),
        ("o_brien42kaybo_LATE_71003_9_x_1_2.R", ["71003"]),  # a name may hold what stands between names
        ("smithjordan_71005_9_hw5.R", ["71005"]),
        ("newlywedada_71001_9_hw5.R", []),
        ("aldertreeada_71002_9_hw5.R", []),  # her name, and another's number
        ("aldertreeada_81001_9_hw5.R", []),  # of no section that is listed
        ("LATE_anon_7Qz9P_99001_hw5.R", []),
        ("Ada Aldertree.R", ["71001"]),
        ("71004.R", ["71004"]),
        ("Jordan Smith.R", []),  # two have that name
    ],
)
def test_canvass_number_and_name_must_agree(name: str, numbers: list[str]) -> None:
    assert whose(roster(GRADEBOOK), name) == numbers


def test_a_number_with_another_name_is_asked_about_once(tmp_path: Path) -> None:
    name = "newlywedada_71001_9_hw5.R"
    folder = a_class(tmp_path, {name: 12})

    made = export_canvas(folder, GRADEBOOK, "5502")
    assert cells(made.data, "ID", "Homework 5 (5502)")["71001"] == ""
    assert "71001 is the number of Aldertree, Ada" in made.left_blank[0].reason

    keep_answer(folder, name, roster(GRADEBOOK).find("Ada Aldertree"), "eve")
    made = export_canvas(folder, GRADEBOOK, "5502")
    assert cells(made.data, "ID", "Homework 5 (5502)")["71001"] == "12"
    assert made.left_blank == ()


def test_a_group_at_canvas_is_called_after_the_group_and_one_member(tmp_path: Path) -> None:
    """`ContentZipper#add_submission` and `#get_user_name`: the group's name, its representative's id."""
    name = "team_7b_71002_9_hw5.R"
    assert whose(roster(GRADEBOOK, GROUPS), name) == ["71001", "71002"]
    assert whose(roster(GRADEBOOK), name) == []

    folder = a_class(tmp_path, {name: 15})
    keep_roster(folder, roster(GRADEBOOK, GROUPS))
    found = cells(export_canvas(folder, GRADEBOOK, "5502").data, "ID", "Homework 5 (5502)")
    assert (found["71001"], found["71002"], found["71003"]) == ("15", "15", "")


def test_ids_that_a_spreadsheet_rewrote_are_what_they_were(tmp_path: Path) -> None:
    names = {"vanderbergmia_71002_9_a.R": 7, "o_brien42kaybo_71003_9_b.R": 9}
    found = cells(export_canvas(a_class(tmp_path, names), GRADEBOOK, "5502").data, "ID", "Homework 5 (5502)")
    assert (found["71002"], found["71003"]) == ("7", "9")

    lost = GRADEBOOK.replace(b"7.1003E+04", b"7.1E+04")
    with pytest.raises(ExportError, match="has cut off digits"):
        export_canvas(tmp_path, lost, "5502")


@pytest.mark.parametrize("title", ["Final Grade essay (5502)", "Current Points, 2 (5502)", "Override Score (5502)"])
@pytest.mark.public_report("instructure/canvas-lms 2134")
def test_a_column_that_canvas_ignores_is_refused(tmp_path: Path, title: str) -> None:
    """`NON_ASSIGNMENT_COLUMN_HEADERS`, `lib/gradebook_importer.rb`: anywhere in a column's title."""
    folder = a_class(tmp_path, {"aldertreeada_71001_9_a.R": 7})
    with pytest.raises(ExportError, match="because of its title"):
        export_canvas(folder, GRADEBOOK.replace(b"Homework 5 (5502)", f'"{title}"'.encode()), "5502")


@pytest.mark.public_report("instructure/canvas-lms 624")
def test_what_canvas_would_not_take_or_keep_is_said_before(tmp_path: Path) -> None:
    """`GradebookImporter#readonly_assignment?` and `#translate_pass_fail`."""
    folder = a_class(tmp_path, {"aldertreeada_71001_9_a.R": 7})
    with pytest.raises(ExportError, match="read only"):
        export_canvas(folder, GRADEBOOK.replace(b"20.00", b"(read only)"), "5502")
    passed = GRADEBOOK.replace(b"71004,u4,BA-101 02,,", b"71004,u4,BA-101 02,complete,")
    assert any("keeps no points" in line for line in export_canvas(folder, passed, "5502").asks)


@pytest.mark.parametrize("text", ["Manual Posting", "Manual Posting (scores hidden from instructors)", "Muted"])
def test_grades_that_students_do_not_see_at_once_are_remarked_on(tmp_path: Path, text: str) -> None:
    """`GradebookExporter#hidden_assignment_text`: a row between header and points possible."""
    folder = a_class(tmp_path, {"aldertreeada_71001_9_a.R": 7})
    hidden = GRADEBOOK.replace(b"Manual Posting", text.encode())
    assert any(repr(text) in note for note in export_canvas(folder, hidden, "5502").notes)
    shown = GRADEBOOK.replace(b",,,,Manual Posting,\n", b"")
    assert not any("post them" in note for note in export_canvas(folder, shown, "5502").notes)


@pytest.mark.public_report("unc-csxl/csxl.unc.edu 624")
def test_rows_before_points_possible_are_no_students(tmp_path: Path) -> None:
    """There a roster was refused once grades had been entered: from then on there is a row without a student."""
    people = [person.number for person in roster(GRADEBOOK).people]

    assert people == ["71001", "71002", "71003", "71004", "71005", "79999"]
    without_the_row = GRADEBOOK.replace(b",,,,Manual Posting,\n", b"")
    assert [person.number for person in roster(without_the_row).people] == people


@pytest.mark.public_report("pawtograder/platform 979")
def test_a_student_who_is_listed_twice_has_the_same_grade_in_both_rows(tmp_path: Path) -> None:
    """There the first row was shown, and the second was written."""
    folder = a_class(tmp_path, {"aldertreeada_71001_9_a.R": 7})
    row = b'"Aldertree, Ada",71001,u1,BA-101 01,,80\n'
    twice = GRADEBOOK.replace(row, row.replace(b",,80", b",3,80") + row.replace(b",,80", b",5,80"))

    made = export_canvas(folder, twice, "5502")

    rows = csv.reader(io.StringIO(made.data.decode("utf-8-sig")))
    assert [row[-1] for row in rows if row[1] == "71001"] == ["7", "7"]
    assert made.asks[1:] == ("Aldertree, Ada: 3 → 7", "Aldertree, Ada: 5 → 7"), "neither is written unseen"


# --- Moodle


@pytest.mark.parametrize("ending", ["file", "file_", "file_hw5.R"])
@pytest.mark.parametrize(
    ("prefix", "numbers"),
    [
        ("Ana Sobrino_50100", ["50100"]),
        ("Chloé DAu_50101", ["50101"]),
        ("Bo Ek_50102", ["50102"]),
        ("Section A-Ana Sobrino_50100", ["50100"]),  # `assign::download_submissions` before 4.1, a group chosen
        ("Participant_50100", ["50100"]),  # blind when it was downloaded
        ("Ana Newlywed_50100", []),
        ("Ana Sobrino_50101", []),
    ],
)
@pytest.mark.public_report("moodle/moodle mod/assign/classes/downloader.php")
def test_moodles_number_and_name_must_agree(prefix: str, ending: str, numbers: list[str]) -> None:
    assert whose(roster(WORKSHEET), f"{prefix}_assignsubmission_{ending}") == numbers


def test_while_marking_is_blind_the_number_is_all_there_is() -> None:
    blind = b"Identifier,Grade,Last modified (grade)\nParticipant 50100,,-\n"
    assert whose(roster(blind), "Participant_50100_assignsubmission_file") == ["50100"]


@pytest.mark.public_report("moodle/moodle mod/assign/classes/downloader.php")
def test_a_teams_grade_goes_to_its_members_and_never_to_whose_number_its_id_is(tmp_path: Path) -> None:
    names = {
        "Team Espresso_50101_assignsubmission_file": 12,
        "Team Mocha_9002_assignsubmission_file": 15,
        "Default group_assignsubmission_file": 18,
    }
    found = cells(export_moodle(a_class(tmp_path, names), TEAMS).data, "Identifier", "Grade")

    assert found == {
        "Participant 50101": "15",
        "Participant 50102": "12",
        "Participant 50103": "12",
        "Participant 50104": "18",
    }


@pytest.mark.public_report("quickfeed/quickfeed 1440")
def test_who_joins_a_team_after_it_was_graded_has_its_grade(tmp_path: Path) -> None:
    folder = a_class(tmp_path, {"Team Espresso_50101_assignsubmission_file": 12})
    keep_roster(folder, roster(TEAMS))
    joined = TEAMS.replace(b"Cy Om,Default group", b"Cy Om,Team Espresso")

    for worksheet, grade in ((TEAMS, ""), (joined, "12")):
        found = cells(export_moodle(folder, worksheet).data, "Identifier", "Grade")
        assert (found["Participant 50103"], found["Participant 50104"]) == ("12", grade)


def test_a_member_with_a_submission_of_their_own_is_asked_about(tmp_path: Path) -> None:
    team, own = "Team Espresso_7_assignsubmission_file", "Bo Ek.R"
    people = roster(TEAMS)

    owners = people.owners([team, own])
    assert owners[team].numbers == {"50102"}
    assert "only one can count for Bo Ek" in owners[own].question

    folder = a_class(tmp_path, {team: 12, own: 3})
    assert cells(export_moodle(folder, TEAMS).data, "Identifier", "Grade")["Participant 50103"] == ""
    keep_answer(folder, own, people.find("Bo Ek"))
    found = cells(export_moodle(folder, TEAMS).data, "Identifier", "Grade")
    assert (found["Participant 50102"], found["Participant 50103"]) == ("12", "3")


@pytest.mark.public_report("moodle/moodle mod/assign/classes/downloader.php")
def test_several_plugins_and_flat_files_are_one_submission(tmp_path: Path) -> None:
    """`downloader::load_submissionplugin_filelist`, folders or not: a file and an online text are one student's."""
    path = tmp_path / "flat.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("Ana Sobrino_50100_assignsubmission_file_hw5.R", "x <- 1")
        archive.writestr("Ana Sobrino_50100_assignsubmission_onlinetext_onlinetext.html", "<p>y</p>")
        for prefix in ("Bo Ek_50102_assignsubmission", "Default group_assignsubmission"):
            archive.writestr(f"{prefix}_file_/a.R", "x <- 2")
            archive.writestr(f"{prefix}_onlinetext/onlinetext.html", "<p>z</p>")

    submissions = read_submissions(path)

    assert [[part.kind for part in work.parts] for work in submissions] == [["code", "text"]] * 3


# --- GitHub Classroom


def test_classrooms_folders_end_with_an_account() -> None:
    people = roster(b'identifier,github_username,github_id,name\n"Ada Aldertree",Ada-T,1,\n"Bo Ek",T,2,\nCy,,,\n')

    assert whose(people, "hw5-ada-t") == ["ada-t"]  # not the shorter account
    assert whose(people, "hw5-t") == ["t"]
    assert whose(people, "hw5-nobody") == []


# --- what no rule explains


def test_an_account_that_is_not_in_the_roster_is_nobodys() -> None:
    people = roster(b"identifier,github_username\nAda Aldertree,ada-a\nBo Ek,boek\nCy Li,\n")
    owners = people.owners(["hw5-ada-a", "hw5-boek", "hw5-cyli"])
    assert owners["hw5-cyli"].question == UNASSIGNED_QUESTION
    assert not owners["hw5-boek"].question


def test_a_name_that_no_rule_explains_among_an_lmss_is_nobodys() -> None:
    names = ["doejane_12_34_a.R", "doejohn_13_35_b.R", "notes.R"]

    assert Roster().owners(names)["notes.R"].question == UNASSIGNED_QUESTION
    assert Roster().owners(["anna.R", "benno.R", "doejane_12_34_a.R"])["anna.R"].question == ""
    assert Roster(answers={"notes.R": "14"}).owners(names)["notes.R"].numbers == {"14"}


# A folder that an instructor made by hand.
BY_HAND = b"""Student,ID,Section,Homework 1 (7001)
    Points Possible,,,6
"Lindqvist, Anna",501,A,
"Haugen, Anna",502,A,
"Moretti, Carla",503,A,
"Rossi Moretti, Carla",504,A,
"Okafor, Eva",505,A,
"Okafor, Eva",506,A,
"Main, Bo Ek",507,A,
"Ek, Bo",508,A,
"""


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("Carla Moretti hw1.txt", ["503"]),
        ("moretti_carla_hw1.py", ["503"]),
        ("hw1-Anna-Lindqvist-final.ipynb", ["501"]),
        ("503 Carla Moretti.md", ["503"]),
        ("Carla Rossi Moretti homework 1.txt", ["504"]),  # another's name is inside this one
        ("Bo Ek main.py", ["507"]),  # a word that is part of somebody's name is no word of a file
        ("Bo Ek notes.py", ["508"]),
        ("Anna hw1.md", []),  # of two Annas
        ("Anna Lindqvist Haugen hw1.md", []),  # both, or neither
        ("Eva Okafor hw1.md", []),  # two have that name
        ("Carla Moretti Berg hw1.md", []),  # may be somebody who is not in the roster
        ("Carla Moretti-Berg.md", []),
        ("Carla Moretti 505.md", []),  # another's number
        ("carlamoretti hw1.md", []),
        ("Carla hw1.md", []),
        ("hw1.md", []),
    ],
)
def test_only_words_of_files_may_stand_beside_a_whole_name(name: str, numbers: list[str]) -> None:
    assert whose(roster(BY_HAND), name) == numbers


def test_a_classroom_folder_ends_with_an_account_and_not_with_a_name() -> None:
    people = roster(b"identifier,github_username\nAda Aldertree,ada-t\n")
    assert whose(people, "hw5-ada-aldertree") == []


def test_files_that_match_nobody_are_asked_about_and_still_sent() -> None:
    people = roster(BY_HAND)
    names = ["anna.ipynb", "bjorn.md", "Carla Moretti hw1.txt", "dmitri.py", "aldertreeada_81001_9_hw5.R"]

    owners = people.owners(names)

    asked = {name: owner.question for name, owner in owners.items() if owner.question}
    assert asked == dict.fromkeys(["anna.ipynb", "bjorn.md", "dmitri.py"], UNMATCHED_QUESTION)
    assert not any(owner.question for owner in EMPTY_ROSTER.owners(names).values())
    only_names = roster(b"First name,Last name\nAnna,Lindqvist\n")  # nobody in it can be answered with
    assert not only_names.owners(["dmitri.py"])["dmitri.py"].question


def test_answers_hold_back_nothing_that_would_have_been_sent_without_them() -> None:
    names = ["a.py", "b.py", "c.py", "d.py", "e.py"]
    answered = roster(BY_HAND, **{"a.py": "501", "b.py": "502", "c.py": "503"}).owners(names)

    assert [owner.question for owner in answered.values()] == ["", "", "", UNMATCHED_QUESTION, UNMATCHED_QUESTION]
    assert [sorted(owner.numbers) for owner in answered.values()] == [["501"], ["502"], ["503"], [], []]


def test_an_answer_changes_nobodys_text_in_which_the_names_were_found_already(tmp_path: Path) -> None:
    """A text that changes is graded again, and a name that was replaced must stay replaced."""
    works = [
        Submission("bjorn.md", "", (SubmissionPart("text", "by Bjorn Haugen", "text"),)),
        Submission("eva.md", "", (SubmissionPart("text", "My friend Bjorn helped me; so did Haugen, Bjorn", "text"),)),
    ]
    people = roster(BY_HAND.replace(b"Haugen, Anna", b"Haugen, Bjorn"))
    keep_roster(tmp_path, people)
    before = pseudonymise(works, b"secret", roster=people)

    keep_answer(tmp_path, "bjorn.md", people.find("Bjorn Haugen"))

    answered = read_rosters(kept_files(tmp_path))
    assert answered.owners(["bjorn.md"])["bjorn.md"].numbers == {"502"}
    assert pseudonymise(works, b"secret", roster=answered) == before
    assert not any("Bjorn" in part.text or "Haugen" in part.text for work in before for part in work.parts)


def test_an_answer_of_the_release_before_makes_the_texts_that_it_made(tmp_path: Path) -> None:
    """Work that was graded after such an answer is not graded again."""
    work = Submission("bjorn.md", "", (SubmissionPart("text", "by Bjorn Haugen", "text"),))
    people = roster(BY_HAND.replace(b"Haugen, Anna", b"Haugen, Bjorn"))
    keep_roster(tmp_path, people)
    (tmp_path / ANSWERS).write_text('{"submission":"bjorn.md","person":"502","by":"eve","at":""}\n', "utf-8")

    [done] = pseudonymise([work], b"secret", roster=read_rosters(kept_files(tmp_path)))

    assert done.parts[0].text == f"by student-{pseudonym('bjorn.md', b'secret')}"


def test_answers_are_kept_and_the_last_one_counts(tmp_path: Path) -> None:
    people = roster(GRADEBOOK)
    keep_roster(tmp_path, people)
    for text in ("71004", "Aldertree, Ada"):
        keep_answer(tmp_path, "notes.R", people.find(text), "eve")

    kept = read_rosters(kept_files(tmp_path))
    assert kept.people == people.people
    assert kept.answers == {"notes.R": "71001"}
    assert (tmp_path / ANSWERS).read_text("utf-8").count("\n") == 2
    with pytest.raises(UsageError, match="more than one"):
        people.find("Jordan Smith")
    with pytest.raises(UsageError, match="no person or group"):
        people.find("Nora Nemo")


@pytest.mark.parametrize("data", [b"a,b\n1,2\n", b"Student,Grade\nAda,3\n"])
def test_a_file_that_is_no_roster_says_what_one_is(data: bytes) -> None:
    with pytest.raises(ExportError, match=r"not a known kind of roster.*Use Canvas's gradebook"):
        roster(data)


def test_rosters_of_two_products_are_not_mixed() -> None:
    with pytest.raises(ExportError, match="use the rosters of only one"):
        roster(GRADEBOOK, WORKSHEET)


# --- what else goes by the roster


def test_a_section_stands_for_the_submissions_of_its_people_and_none_is_read_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("grading.submissions.reading._read_group")
    (tmp_path / "gradebook.csv").write_bytes(GRADEBOOK)
    place = tmp_path / "class"
    place.mkdir()
    for name in ("aldertreeada_71001_9_a.R", "o_brien42kaybo_71003_8_b.R", "smithjordan_71004_7_c.R", "notes.R"):
        (place / name).write_text("x <- 1", "utf-8")
    request = GradeRequest(place, tmp_path / "rubric.yaml", {}, rosters=(tmp_path / "gradebook.csv",))

    of_section = request.selected_names(Selection(("BA-101 02",)))
    with_one_more = request.selected_names(Selection(("BA-101 02", "notes.R")))

    assert of_section == ["o_brien42kaybo_71003_8_b.R", "smithjordan_71004_7_c.R"]
    assert len(with_one_more) == 3
    with pytest.raises(SubmissionError, match="'BA-101 03'"):
        request.selected_names(Selection(("BA-101 03",)))


def test_a_table_may_call_a_submission_by_its_persons_number() -> None:
    """Its name has underscores, so that without the roster nothing but the roster's number can be compared."""
    name = "o_brien42kaybo_71003_8_b.R"
    assert roster(GRADEBOOK).names(name) == [name, "71003"]
    assert EMPTY_ROSTER.names(name) == [name]


def test_a_teams_number_and_one_that_is_asked_about_are_nobodys_in_a_table() -> None:
    people = roster(
        b"Identifier,Full name,Group,Grade\nParticipant 7,Ada Aldertree,,\nParticipant 8,Bo Birkenau,Espresso,\n"
    )
    team, unknown = "Espresso_7_assignsubmission_file_", "Mocha_7_assignsubmission_file_"

    assert people.names(team) == [team, "8"]
    assert people.names(unknown) == [unknown]
    assert EMPTY_ROSTER.names(team) == [team, "7"]


def test_who_is_asked_about_is_called_as_the_lms_called_them() -> None:
    owners = roster(WORKSHEET).owners(["Ana Newlywed_50100_assignsubmission_file_hw5.R"])
    [owner] = owners.values()
    assert (owner.display_name, bool(owner.question), owner.people) == ("Ana Newlywed?", True, ())


# --- names in texts


@pytest.mark.parametrize("name", ["LATE_anon_7Qz9P_99001_hw5.R", "aldertreeada_71001_9_hw5.R", "hw5.R"])
def test_all_names_of_the_roster_leave_every_text(name: str) -> None:
    text = "Ada Aldertree, van der Berg, Mia; Bo O_Brien_42_Kay and O_Brien_42_Kay, Bo with Jordan Smith"
    work = Submission(name, "R", (SubmissionPart("text", text, "text"),))

    [done] = pseudonymise([work], b"secret", roster=roster(GRADEBOOK))

    assert not {"Ada", "Aldertree", "Berg", "Mia", "Brien", "Kay", "Jordan", "Smith"} & set(
        done.parts[0].text.replace(",", " ").replace("_", " ").split()
    )


def test_a_name_given_by_hand_is_taken_out_as_a_whole() -> None:
    works = [
        Submission(f"{name}.R", "R", (SubmissionPart("text", "by Tuva Kestrel; our final homework", "text"),))
        for name in ("tuva_kestrel", "final homework")
    ]

    for done in pseudonymise(works, b"secret"):
        assert "Kestrel" not in done.parts[0].text
        assert done.parts[0].text.endswith("; our final homework")
