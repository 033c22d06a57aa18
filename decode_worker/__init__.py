"""Decode: from KV cache to answer. Generating, claiming jobs, and stealing other models' work."""
