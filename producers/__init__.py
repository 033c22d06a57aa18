"""Puts work in and takes results out: the client, batches and their journal, prompt files, and dead letters."""
