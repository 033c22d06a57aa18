"""The rubric, in our format and others, and its deterministic checks."""
