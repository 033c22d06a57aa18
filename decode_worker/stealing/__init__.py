"""Stealing other models' jobs: when it pays, and which models are loaded for it."""
