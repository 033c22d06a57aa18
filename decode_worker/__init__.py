"""Decode: KV cache to answer. Generation, whose job a delivery is, and stealing other models' work."""
