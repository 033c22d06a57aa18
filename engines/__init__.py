"""Engines run a model: from a prompt to tokens, to a KV cache, to text. They know no queue and no Redis. Imports
messages only."""
