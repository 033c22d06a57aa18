"""Puts work in and takes results out: client, batches, submissions, rubric, grading, reports."""
