"""A made-up class: an assignment, its rubric and solution, and what sixteen made-up students handed in."""
