"""Turns submissions into grades: reading, names, rubric, prompts, answers, points, reports, exports.

Nothing in this package knows about queues.
"""
