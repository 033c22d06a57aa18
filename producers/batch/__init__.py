"""A batch from its plan to its last result."""
