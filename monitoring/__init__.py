"""Turns job events into logs and metrics. Imports messages only."""
