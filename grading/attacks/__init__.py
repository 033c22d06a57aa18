"""Detects text in a submission that addresses the grader."""
