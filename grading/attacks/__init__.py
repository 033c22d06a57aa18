"""Text in a submission that speaks to the grader."""
