"""Turns lifetime events into logs and metrics. Imports `messages` only."""
