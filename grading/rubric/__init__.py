"""The rubric, in Kvasir's format and others, and its deterministic checks."""
