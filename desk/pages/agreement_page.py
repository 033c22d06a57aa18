"""The page that compares the model's grades with those of the people who reviewed them."""

from pathlib import Path

import streamlit as st

from desk.pages.shared import Desk, pictures, show_table
from desk.text import escape_markdown
from grading.evaluation.evaluate import evaluate
from grading.evaluation.hand_grades import reviewed_grades
from grading.evaluation.page import pictures as draw_evaluation
from grading.evaluation.page import rows as evaluation_rows
from grading.evaluation.page import sentences
from grading.report.grades import load_graded
from grading.reviews import AFTER_A_LOOK


def show_agreement_page(desk: Desk, folder: Path) -> None:
    """Show the agreement of model and person, with intervals and charts, as `kvasir evaluate --reviews` does."""
    view, rows, _ = desk.rows(folder)
    st.caption("This page compares the model's points with those of the people who reviewed.")
    if not any(row.final.is_reviewed for row in rows):
        st.caption("No submission is reviewed yet.")
        return
    stamp = desk.version(folder)
    evaluation = desk.get_or_make(
        ("agreement", folder), stamp, lambda: evaluate(load_graded(folder), reviewed_grades(folder), view.assignment)
    )
    show_table(evaluation_rows(evaluation), "Agreement between model and person")
    st.caption(escape_markdown(" ".join([AFTER_A_LOOK, *sentences(evaluation)])))
    st.html(pictures(desk, ("agreement drawn", folder), stamp, lambda: draw_evaluation(evaluation)))
