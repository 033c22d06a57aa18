"""Builds the prompts for models, and reads their answers."""
