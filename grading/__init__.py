"""From submissions to grades: reading, names, rubric, prompts, answers, points, reports, exports. Knows no queue."""
