"""Puts work in and takes results out: the client, batches with their journal, lines of prompts, dead letters."""
