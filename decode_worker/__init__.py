"""Decode: from the KV cache to the answer. Generates answers, claims jobs, and steals other models' work."""
