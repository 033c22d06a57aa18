"""MLX as an engine."""
