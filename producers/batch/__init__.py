"""Batches, from plan to last result."""
