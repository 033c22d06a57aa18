"""From answers to grades."""
