"""Runs a model: prompt to tokens to KV cache to text. Knows no queue and no Redis. Imports messages only."""
