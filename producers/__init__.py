"""Puts work in and takes results out: the client, batches with their journal, prompt files, dead letters."""
