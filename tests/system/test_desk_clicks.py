"""Two clicks that come while the page is drawn: Streamlit may answer both by one run, of the second's page alone."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from desk.assignments import read_inputs, rubric_versions, save_roster
from desk.rounds import rounds
from grading.hand_sample import is_drawn, load_draw
from grading.roster import kept_files, read_rosters
from infra.config.settings import load_settings
from kvasir import class_run
from producers.batch.batch import Batch
from tests.support.desk_page import DeskPage, graded_assignment, new_assignment, quick_model
from tests.support.homework import RUBRIC, tiny_class

pytestmark = pytest.mark.system  # the pages need Streamlit, which comes with the ui extra: so its import is late


def page(home: str, config: str) -> None:
    from kvasir.desk_app.script import main

    main([home, config])


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[DeskPage]:
    """A desk that is run in here, without a server: as much of a DeskPage as makes assignments."""
    import streamlit

    streamlit.cache_resource.clear()
    (tmp_path / "home").mkdir(mode=0o700)
    yield cast(DeskPage, SimpleNamespace(home=tmp_path / "home", config=quick_model(tmp_path)))
    streamlit.cache_resource.clear()
    gc.unfreeze()  # the page froze what it found


def opened(desk: DeskPage, folder: Path | None = None, section: str = "Grade") -> Any:
    from streamlit.testing.v1 import AppTest

    app = AppTest.from_function(page, args=(str(desk.home), str(desk.config)), default_timeout=60)
    app.session_state["browser"], app.session_state["me"] = "b", ""  # there is no cookie
    if folder:
        app.query_params.update({"assignment": str(folder), "section": section})
    return said_nothing(app.run())


def said_nothing(app: Any) -> Any:
    """The page, if nothing went wrong on it."""
    assert [each.value for each in (*app.exception, *app.error)] == []
    return app


def labelled(found: Any, label: str) -> Any:
    return next(each for each in found if each.label == label)


def click_and_leave(app: Any, label: str) -> None:
    """This button and another section, before the page has answered."""
    labelled(app.button, label).click()
    labelled(app.radio, "Section").set_value("Results")
    said_nothing(app.run())
    assert labelled(app.radio, "Section").value == "Results"


def test_a_rubric_is_saved_with_what_was_typed_last(desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2)
    app = opened(desk, folder, "Regrade")
    (first,) = rubric_versions(folder)
    labelled(app.text_input, "Title").set_value("Means and more")
    app.run()
    labelled(app.text_input, "Title").set_value("Means, O'Brien's")

    click_and_leave(app, "Save as a new version")

    (saved,) = {*rubric_versions(folder)} - {first}
    assert "Means, O'Brien's" in saved.read_text("utf-8")
    assert Path(read_inputs(folder).rubric) == first, "the class is graded with what it was"
    assert rounds(folder) == []


def test_a_sample_is_drawn_by_what_was_typed_last(desk: DeskPage) -> None:
    folder = graded_assignment(desk, 24)
    app = opened(desk, folder, "Bound")
    labelled(app.number_input, "Percent that may differ by more").set_value(40.0)
    labelled(app.selectbox, "Graded by hand").set_value(15)

    click_and_leave(app, "Draw")

    assert is_drawn(folder)
    assert (load_draw(folder).plan.sizes, load_draw(folder).plan.at_most) == ((15,), 0.4)


def test_a_submission_that_nothing_explains_is_given_to_somebody_by_a_click(desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2)
    (Path(read_inputs(folder).submissions) / "notes.py").write_text("x = 1\n", "utf-8")
    gradebook = "Student,ID,Section,Means (7)\n    Points Possible,,,\nstudent0,100,,\nstudent1,101,,\nNemo,102,,\n"
    assert save_roster(folder, [("gradebook.csv", gradebook.encode())]) == 3
    settings = load_settings(config=desk.config)
    with Batch(folder) as batch:  # as by "Grade all", which sends it nowhere
        class_run.open_assignment(batch, class_run.request_of_batch(settings, batch))
    app = opened(desk, folder)
    assert any("3 people are known" in each.value for each in app.caption)

    labelled(app.selectbox, "belongs to").select_index(2)
    app.run()
    labelled(app.button, "Assign").click()
    said_nothing(app.run())

    assert read_rosters(kept_files(folder)).answers == {"notes.py": "102"}
    assert not any(each.label == "belongs to" for each in app.selectbox), "nothing is open any more"


def test_an_assignment_is_made_and_its_reader_stays_where_they_went(desk: DeskPage, tmp_path: Path) -> None:
    work = tiny_class(tmp_path / "class", 2) / "submissions"
    other = new_assignment(desk, "Other", work, RUBRIC)
    app = opened(desk)
    labelled(app.text_input, "Name").set_value("Übung 4")
    labelled(app.text_input, "… or a folder, zip or file on this machine").set_value(str(work))
    labelled(app.button, "Create").click()
    labelled(app.selectbox, "Assignment").set_value(str(other))
    said_nothing(app.run())

    (made,) = {*desk.home.iterdir()} - {other}
    assert read_inputs(made).title == "Übung 4"
    assert read_inputs(made).submissions == str(work)
    assert app.session_state["assignment"] == str(other)


def test_a_double_click_makes_one_assignment_and_leads_to_it(desk: DeskPage, tmp_path: Path) -> None:
    work = tiny_class(tmp_path / "class", 2) / "submissions"
    app = opened(desk)
    labelled(app.text_input, "Name").set_value("Means")
    labelled(app.button, "Create").click()
    app.run()
    assert "type a path" in app.error[0].value, "what is missing is said beside the button"
    labelled(app.text_input, "… or a folder, zip or file on this machine").set_value(str(work))
    labelled(app.button, "Create").click()
    clicked = app._tree.get_widget_states()

    said_nothing(app.run())
    said_nothing(app._run(clicked))  # the same once more, sent before the first was answered

    assert [path.name for path in desk.home.iterdir()] == ["means"]
    assert app.session_state["assignment"] == str(desk.home / "means")
    assert app.session_state["section"] == "Regrade", "it has no rubric yet"
