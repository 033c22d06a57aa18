"""The decode stage: from a KV cache to an answer. It generates, claims jobs, and steals other models' work."""
